"""Background warm-ups that make way for runs."""

from __future__ import annotations

import queue
import threading
import time

from app.engine.channel import LAST, WARMED
from app.engine.fairness import DeviceLine
from app.engine.jobs import Job
from app.engine.pool import WorkerPool
from app.engine.process import Worker, WorkerDiedError
from app.engine.run import Limits
from app.engine.spec import WorkerSpec

_POLL_S = 0.05


class Warmer:
    """Warms workers one after another, while no run has or wants the device.

    When a run comes, the worker that is being warmed is frozen until the device is free again,
    or until that run needs the very worker.
    """

    def __init__(self, line: DeviceLine, pool: WorkerPool, limits: Limits) -> None:
        self._line = line
        self._pool = pool
        self._limits = limits
        self._wishes: queue.Queue[tuple[Job, WorkerSpec] | None] = queue.Queue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, job: Job, spec: WorkerSpec) -> None:
        """Warm a worker for `spec` and the shape of `job` when there is time."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="warmer", daemon=True)
                self._thread.start()
        self._wishes.put((job, spec))

    def close(self) -> None:
        """End without waiting; what waits to be warmed is forgotten."""
        self._closed.set()
        self._wishes.put(None)

    def _main(self) -> None:
        while (wish := self._wishes.get()) is not None and not self._closed.is_set():
            self._warm(*wish)

    def _warm(self, job: Job, spec: WorkerSpec) -> None:
        number: int | None = None
        worker: Worker | None = None
        while not self._closed.is_set():
            ticket = self._line.enter(background=True)
            try:
                while not ticket.wait(_POLL_S):
                    if self._closed.is_set():
                        return
                if number is None or worker is None:
                    if self._pool.find(spec) is not None or self._pool.full:
                        return
                    worker = self._pool.take(spec)
                    number = worker.send("warm", job)
                elif not worker.alive or worker.pending != number:
                    return  # a run took it over
                if self._drain(worker, number):
                    return
                worker.suspend()
            except (WorkerDiedError, RuntimeError):
                if worker is not None:
                    self._pool.discard(worker)
                return
            finally:
                ticket.leave()

    def _drain(self, worker: Worker, number: int) -> bool:
        """Wait for the warm-up to end; False when a run wants the device first."""
        worker.resume()
        heard = time.monotonic()
        while not self._line.wanted and not self._closed.is_set():
            message = worker.receive(_POLL_S)
            if message is None:
                if time.monotonic() - heard > max(self._limits.load_s, self._limits.compile_s):
                    raise WorkerDiedError("the warm-up hung")
                continue
            heard = time.monotonic()
            if message[0] == number and message[1] in LAST:
                if message[1] != WARMED:
                    self._pool.discard(worker)
                return True
        return False
