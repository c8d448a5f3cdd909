"""Warm workers under a limit: the least recently used one makes room."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Collection

from app.engine.process import Worker
from app.engine.spec import WorkerSpec


class WorkerPool:
    """Live workers by what they hold. Dead ones are never handed out.

    Args:
        start: starts a worker for a spec.
        limit: how many may live at once, at least 1.
    """

    def __init__(self, start: Callable[[WorkerSpec], Worker], limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"max_models must be a whole number of at least 1, got {limit!r}")
        self._start = start
        self._limit = limit
        self._lock = threading.RLock()
        self._workers: collections.OrderedDict[WorkerSpec, Worker] = collections.OrderedDict()
        self._closed = False

    def find(self, spec: WorkerSpec) -> Worker | None:
        """The live worker for `spec`, if there is one; counts as no use of it."""
        with self._lock:
            self._drop_dead()
            return self._workers.get(spec)

    def take(self, spec: WorkerSpec, keep: Collection[WorkerSpec] = ()) -> Worker:
        """The worker for `spec`, started if need be, now the most recently used one.

        Where another has to go, it is the least recently used one that is not in `keep`, what
        the same run needs later; else two runs in a row would evict each other's workers.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._drop_dead()
            worker = self._workers.get(spec)
            if worker is None:
                while len(self._workers) >= self._limit:
                    victims = [known for known in self._workers if known not in keep]
                    victim = next(iter(victims or self._workers))
                    self._workers.pop(victim).close()
                worker = self._workers[spec] = self._start(spec)
            self._workers.move_to_end(spec)
            return worker

    @property
    def full(self) -> bool:
        """Whether a new worker would push another out."""
        with self._lock:
            self._drop_dead()
            return len(self._workers) >= self._limit

    def discard(self, worker: Worker) -> None:
        """End a worker and forget it."""
        with self._lock:
            for spec, known in list(self._workers.items()):
                if known is worker:
                    del self._workers[spec]
        worker.kill()

    def workers(self) -> list[Worker]:
        """The live workers, least recently used first."""
        with self._lock:
            self._drop_dead()
            return list(self._workers.values())

    def close(self) -> None:
        """End all workers; none can be taken any more."""
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.kill()

    def _drop_dead(self) -> None:
        for spec, worker in list(self._workers.items()):
            if not worker.alive:
                del self._workers[spec]
