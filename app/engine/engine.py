"""The engine: a fair queue for the device, and warm workers under a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from app.engine.events import Event
from app.engine.jobs import BackendId, BackendStatus, Job


class Run:
    """One comparison: an iterator over its events.

    `stop()` may be called from any thread and takes effect within one step; the iterator
    then yields `Stopped` and ends. `close()` does the same without waiting for the events.
    """

    def __iter__(self) -> Iterator[Event]:
        raise NotImplementedError

    def __next__(self) -> Event:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

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
    """Runs jobs on one device.

    Args:
        device: "cpu" or "cuda:N".
        max_models: how many workers stay warm; the least recently used one goes first.
    """

    def __init__(self, device: str = "cpu", max_models: int = 3) -> None:
        raise NotImplementedError

    def device_info(self) -> dict[str, Any]:
        """What is known so far of the device; never waits.

        Keys: device, kind ("cpu" or "cuda"), name, ready (False until the probe answered),
        memory_total_mib, memory_free_mib, versions ({"torch": ..., ...}), error.
        """
        raise NotImplementedError

    def backend_status(self, model: str, variant: str) -> list[BackendStatus]:
        """Which backends can run `model` here, in the order of `BACKENDS`; never waits."""
        raise NotImplementedError

    def warm_up(self, job: Job, backend: BackendId) -> None:
        """Load a worker in the background, for a later run of a job like this one."""
        raise NotImplementedError

    def run(self, job: Job, backends: Sequence[BackendId]) -> Run:
        """Run a job on each backend in turn.

        Raises:
            TypeError, ValueError: when the job cannot be run by this model; one line.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Stop every run, those that wait in the queue too."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop everything and end the workers."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
