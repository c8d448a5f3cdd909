"""The engine: a fair line for the device, warm workers under a limit, runs and warm-ups."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from app.engine import channel, machine
from app.engine.availability import backend_statuses
from app.engine.events import Event
from app.engine.fairness import DeviceLine
from app.engine.jobs import BackendId, BackendStatus, Job, backend_info
from app.engine.pool import WorkerPool
from app.engine.process import Worker, WorkerDiedError
from app.engine.run import Driver, Limits
from app.engine.spec import WorkerSpec, spec_for
from app.engine.validate import check_backends, check_job
from app.engine.warming import Warmer

_PROBE_S = 180.0


class Run:
    """One comparison: an iterator over its events.

    The run goes on whether or not the events are read. `stop()` and `close()` may be called
    from any thread; the run stops within one step, after which the iterator yields `Stopped`
    and ends. A run that nobody refers to any more stops too.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._finalizer = weakref.finalize(self, driver.stop)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = self._driver.events.get()
        if event is None:
            self._driver.events.put(None)
            raise StopIteration
        return event

    def stop(self) -> None:
        """Stop within one step. The events up to `Stopped` can still be read."""
        self._driver.stop()

    def close(self) -> None:
        """Stop, without waiting for it."""
        self._driver.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Engine:
    """Runs jobs on one device, one at a time.

    Args:
        device: "cpu" or "cuda:N".
        max_models: how many workers stay warm; the least recently used one goes first.
        threads: threads of a CPU worker; by default one a physical core.
        offline: whether workers are told to use only files that are already here.
        limits: how long a worker may be silent before it counts as hung.
        worker_main: module whose `main()` a worker process runs.

    Raises:
        ValueError: for a device or a number that cannot be.
    """

    def __init__(
        self,
        device: str = "cpu",
        max_models: int = 3,
        *,
        threads: int | None = None,
        offline: bool = True,
        limits: Limits | None = None,
        worker_main: str = "app.engine.worker",
    ) -> None:
        self.device = machine.normal_device(device)
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._threads = threads or machine.usable_cores()
        self._offline = offline
        self._limits = limits or Limits()
        self._worker_main = worker_main
        # The kernel ends workers with the thread that started them: so with one that stays.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")
        self._line = DeviceLine()
        self._pool = WorkerPool(self._start, max_models)
        self._compile_s: dict[tuple[str, str], float] = {}
        self._drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
        self._warmer = Warmer(self._line, self._pool, self._limits)
        self._probe: dict[str, Any] = {}
        self._probed = threading.Event()
        if self.device == "cpu":
            self._probed.set()
        else:
            threading.Thread(target=self._ask_device, name="probe", daemon=True).start()
        atexit.register(self.close)

    def device_info(self) -> dict[str, Any]:
        """What is known so far of the device; never waits.

        Keys: device, kind ("cpu" or "cuda"), name, ready (False until the GPU was looked at),
        memory_total_mib, memory_free_mib, versions ({"torch": ..., ...}), error, and on a GPU
        capability (major, minor).
        """
        if self.device == "cpu":
            return machine.cpu_info()
        if self._probed.is_set():
            return dict(self._probe)
        return {
            "device": self.device,
            "kind": "cuda",
            "name": self.device,
            "ready": False,
            "memory_total_mib": None,
            "memory_free_mib": None,
            "versions": machine.versions(),
            "error": "",
        }

    def wait_ready(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the device was looked at."""
        return self._probed.wait(timeout)

    def backend_status(
        self, model: str, variant: str, *, untrained: bool = False
    ) -> list[BackendStatus]:
        """Which backends can run `model` here, in the order of `BACKENDS`; never waits.

        Raises:
            ValueError: for an unknown model.
        """
        from model_zoo.registry import get_model

        return backend_statuses(
            get_model(model), variant, self.device_info(), self._compile_s, untrained=untrained
        )

    def warm_up(self, job: Job, backend: BackendId) -> None:
        """Load a worker in the background, for a later run of a job like this one.

        It makes way for runs at once, and evicts no other worker: without room, or where the
        backend cannot run, nothing happens.

        Raises:
            TypeError, ValueError: when the job cannot be run by this model; one line.
        """
        check_job(job)
        backend_info(backend)
        if self._why_not(job, backend) == "":
            self._warmer.add(job, spec_for(job, backend, self.device))

    def run(self, job: Job, backends: Sequence[str]) -> Run:
        """Run a job on each backend in turn, quick ones first.

        Raises:
            TypeError, ValueError: when the job cannot be run by this model; one line.
        """
        ordered = check_backends(backends)
        check_job(job)
        driver = Driver(
            job,
            [(backend, spec_for(job, backend, self.device)) for backend in ordered],
            line=self._line,
            pool=self._pool,
            limits=self._limits,
            why_not=lambda backend: self._why_not(job, backend),
            compiled=lambda backend, seconds: self._remember(job.model, backend, seconds),
            expected=lambda backend: self._compile_s.get((job.model, backend)),
        )
        self._drivers.add(driver)
        driver.start()
        return Run(driver)

    def stop(self) -> None:
        """Stop every run, those that wait in the line too."""
        for driver in list(self._drivers):
            driver.stop()

    def close(self) -> None:
        """Stop everything and end the workers."""
        atexit.unregister(self.close)
        self.stop()
        self._warmer.close()
        self._pool.close()
        self._spawner.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _why_not(self, job: Job, backend: str) -> str:
        if not self._probed.wait(_PROBE_S):
            return "the GPU did not answer"
        statuses = self.backend_status(job.model, job.variant, untrained=job.untrained)
        return next(status.reason for status in statuses if status.id == backend)

    def _remember(self, model: str, backend: str, seconds: float) -> None:
        self._compile_s[model, backend] = seconds

    def _start(self, spec: WorkerSpec | None) -> Worker:
        env = machine.worker_env(self.device, self._threads, offline=self._offline)
        return self._spawner.submit(Worker, spec, self._worker_main, env).result()

    def _ask_device(self) -> None:
        worker = self._start(None)
        answer: dict[str, Any] = {"error": f"{self.device} did not answer"}
        try:
            worker.send("probe", self.device)
            match worker.receive(_PROBE_S):
                case (_, channel.ANSWERED, facts):
                    answer = facts
                case (_, _, failure):
                    answer = {"error": f"looking at {self.device} failed: {failure['message']}"}
        except WorkerDiedError as error:
            answer = {"error": f"looking at {self.device} failed: {error}"}
        finally:
            worker.close()
        self._probe = self.device_info() | {"ready": True} | answer
        self._probed.set()
