"""One comparison from its place in the line to its last event."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine import channel
from app.engine import events as ev
from app.engine.fairness import DeviceLine, Ticket
from app.engine.jobs import Job
from app.engine.pool import WorkerPool
from app.engine.process import Worker, WorkerDiedError
from app.engine.spec import WorkerSpec

_POLL_S = 0.05

_EVENTS: dict[str, type[ev.Event]] = {
    "compiling": ev.Compiling,
    "warming": ev.Warming,
    "ready": ev.Ready,
    "step": ev.Step,
    "preview": ev.Preview,
    "decoding": ev.Decoding,
    "result": ev.Result,
    "failed": ev.Failed,
    "stopped": ev.Stopped,
}
_PREPARATION = ("compiling", "warming")


@dataclass(frozen=True)
class Limits:
    """Seconds a worker may be silent before it counts as hung, and is ended.

    `stop_s` is how long it has, after Stop, beyond the step that it is in.
    """

    load_s: float = 900.0
    compile_s: float = 1800.0
    step_s: float = 600.0
    stop_s: float = 2.0


class Driver:
    """Runs one job on its backends in a thread of its own; `events` ends with `None`.

    Args:
        job: what to run.
        specs: backends with the workers that they need, in the order to run.
        line: the line for the device.
        pool: the warm workers.
        limits: how long workers may be silent.
        why_not: why a backend cannot run here, or an empty text.
        compiled: is told how long a backend compiled.
        expected: how long a backend will compile, by what was seen here, or `None`.
    """

    def __init__(
        self,
        job: Job,
        specs: Sequence[tuple[str, WorkerSpec]],
        *,
        line: DeviceLine,
        pool: WorkerPool,
        limits: Limits,
        why_not: Callable[[str], str],
        compiled: Callable[[str, float], None],
        expected: Callable[[str], float | None],
    ) -> None:
        self.events: queue.Queue[ev.Event | None] = queue.Queue()
        self._job = job
        self._specs = specs
        self._line = line
        self._pool = pool
        self._limits = limits
        self._why_not = why_not
        self._compiled = compiled
        self._expected = expected
        self._thawed: list[Worker] = []
        self._stop = threading.Event()
        self._asked = time.perf_counter()
        self._thread = threading.Thread(target=self._main, name="run", daemon=True)
        self._ticket = line.enter()

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the run to stop; may be called from any thread, and more than once."""
        self._stop.set()

    def _prepare(self, name: str, worker: Worker, backend: str, fields: dict[str, Any]) -> None:
        # A worker that was frozen while it compiled may hold a lock that this compilation waits
        # for; nothing is timed now, so it may go on meanwhile.
        if name == "compiling":
            self._thawed = [w for w in self._pool.workers() if w.suspended and w is not worker]
            for other in self._thawed:
                other.resume()
        else:
            self._freeze_again()
        if name == "compiling" and (seen := self._expected(backend)) is not None:
            fields = {"expected_s": seen}
        self._emit(_EVENTS[name], backend, **fields)

    def _freeze_again(self) -> None:
        for other in self._thawed:
            other.suspend()
        self._thawed = []

    def _emit(self, kind: type[ev.Event], backend: str, **fields: Any) -> None:
        self.events.put(kind(backend=backend, t=time.perf_counter() - self._asked, **fields))

    def _main(self) -> None:
        try:
            if self._wait_in_line(self._ticket):
                for index, (backend, spec) in enumerate(self._specs):
                    later = [other for _, other in self._specs[index + 1 :]]
                    if not self._one(backend, spec, later):
                        break
        finally:
            self._ticket.leave()
            self.events.put(None)

    def _wait_in_line(self, ticket: Ticket) -> bool:
        told = 0
        while not ticket.wait(_POLL_S):
            if self._stop.is_set():
                self._emit(ev.Stopped, "")
                return False
            if (ahead := ticket.ahead) not in (0, told):
                self._emit(ev.Queued, "", position=ahead)
                told = ahead
        return True

    def _one(self, backend: str, spec: WorkerSpec, later: list[WorkerSpec]) -> bool:
        """Run one backend; whether to go on with the next."""
        if self._stop.is_set():
            self._emit(ev.Stopped, backend)
            return False
        if reason := self._why_not(backend):
            self._emit(ev.Failed, backend, message=reason)
            return True
        worker = None
        while True:
            try:
                worker = self._pool.take(spec, keep=later)
                return self._follow(backend, worker)
            except Exception as error:
                message = str(error) or type(error).__name__
            if worker is not None:
                self._pool.discard(worker)
            if self._stop.is_set():
                self._emit(ev.Stopped, backend)
                return False
            # Memory may be short only because others are kept warm: try once more without them.
            others = self._pool.workers() if message.startswith("out of memory") else []
            if not others:
                self._emit(ev.Failed, backend, message=message)
                return True
            for other in others:
                self._pool.discard(other)

    def _follow(self, backend: str, worker: Worker) -> bool:
        if not worker.loaded:
            self._emit(ev.Loading, backend)
        # A warm-up of the same worker may be under way; its stages are shown as ours, and the
        # worker takes up our job when it is through.
        warm_up = worker.pending
        number = worker.send("run", self._job)
        limit = self._limits.compile_s if worker.loaded else self._limits.load_s
        heard = time.monotonic()
        stopping: float | None = None
        last_step_s = 0.0
        while True:
            message = worker.receive(_POLL_S)
            now = time.monotonic()
            if self._stop.is_set() and stopping is None:
                worker.send("stop", id=number)
                stopping = now + self._limits.stop_s + 2 * last_step_s
            if stopping is not None and now > stopping:
                self._pool.discard(worker)
                self._emit(ev.Stopped, backend)
                return False
            if message is None:
                if now - heard > limit:
                    raise WorkerDiedError(f"its worker was silent for {limit:.0f} s and was ended")
                continue
            heard = now
            sender, name, fields = message
            if sender != number:
                if sender == warm_up and name == channel.FAILED:
                    raise WorkerDiedError(fields["message"])
                if sender == warm_up and name in _PREPARATION:
                    self._prepare(name, worker, backend, fields)
                continue
            if name == "step":
                last_step_s = fields["seconds"]
            if name == "ready":
                self._freeze_again()
                if fields["compile_s"] > 0:
                    self._compiled(backend, fields["compile_s"])
            if name in _PREPARATION:
                limit = self._limits.compile_s
            elif name in _EVENTS:
                limit = self._limits.step_s
            if name == channel.FAILED:
                # After an error the memory of a process is in an unknown state: start anew.
                raise WorkerDiedError(fields["message"])
            if name in _PREPARATION:
                self._prepare(name, worker, backend, fields)
            elif name in _EVENTS:
                self._emit(_EVENTS[name], backend, **fields)
            if name == channel.RESULT:
                return True
            if name == channel.STOPPED:
                return False
