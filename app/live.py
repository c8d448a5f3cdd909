"""What a run looks like right now: the engine's events, folded into one view a backend."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.charts import Line, Point
from app.engine import (
    BACKENDS,
    BackendId,
    BackendInfo,
    Compiling,
    Decoding,
    Event,
    Failed,
    Job,
    Loading,
    Preview,
    Queued,
    Ready,
    Result,
    Step,
    Stopped,
    Warming,
)

REFRESH_S = 0.25
"""The page is redrawn at most this often while steps come in faster."""


class Running(Protocol):
    """What `Engine.run` returns."""

    def __iter__(self) -> Iterator[Event]: ...
    def stop(self) -> None:
        """Ask the run to stop within one step."""
        ...

    def close(self) -> None:
        """Stop, without waiting for it."""
        ...


@dataclass
class BackendView:
    """One backend's part of a run."""

    info: BackendInfo
    phase: str = "waiting"
    since: float = field(default_factory=time.monotonic)
    expected_s: float = 0.0
    step: int = 0
    total: int = 0
    images: list[bytes] | None = None
    top: list[tuple[int, str, float]] | None = None
    latency: list[Point] = field(default_factory=list)
    memory: list[Point] = field(default_factory=list)
    ready: Ready | None = None
    report: dict[str, Any] | None = None
    message: str = ""
    phases: set[str] = field(default_factory=set)
    """The phases of this run; a warm worker is through with loading and warming before it."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come from this backend."""
        return self.phase in ("done", "failed", "stopped")

    @property
    def elapsed(self) -> float:
        """Seconds in this phase."""
        return time.monotonic() - self.since

    def enter(self, phase: str) -> None:
        """Begin a phase now."""
        self.phase = phase
        self.phases.add(phase)
        self.since = time.monotonic()


class LiveRun:
    """A run as the page shows it."""

    def __init__(self, job: Job, backends: Sequence[BackendId]) -> None:
        self.job = job
        self.views: dict[str, BackendView] = {
            info.id: BackendView(info) for info in BACKENDS if info.id in backends
        }
        self.position = 0
        self.stopped = False
        self.finished = False
        self.error = ""

    def fold(self, event: Event) -> None:
        """Take one event in."""
        if isinstance(event, Queued):
            self.position = event.position
            return
        self.position = 0
        if isinstance(event, Stopped):
            self._end("stopped")
            self.stopped = True
            return
        view = self.views.get(event.backend)
        if view is None:
            return
        match event:
            case Loading():
                view.enter("loading")
            case Compiling(expected_s=expected):
                view.enter("compiling")
                view.expected_s = expected
            case Warming():
                view.enter("warming")
            case Ready():
                view.ready = event
                view.enter("running")
            case Step():
                if view.phase != "running":
                    view.enter("running")
                view.step, view.total = event.index, event.total
                view.latency.append((float(event.index), 1e3 * event.seconds))
                view.memory.append((event.t, event.memory_mib))
            case Preview(images=images):
                view.images = images
            case Decoding():
                view.enter("decoding")
            case Result():
                view.images, view.top, view.report = event.images, event.top, event.report
                view.enter("done")
            case Failed(message=message):
                view.message = message
                view.enter("failed")
            case _:
                raise TypeError(f"unknown event {type(event).__name__}")

    def _end(self, phase: str) -> None:
        for view in self.views.values():
            if not view.ended:
                view.enter(phase)

    def finish(self, error: str = "") -> None:
        """The stream of events has ended; nothing is left waiting."""
        self.error = error
        self._end("failed" if error else "stopped")
        self.finished = True

    @property
    def current(self) -> BackendView | None:
        """The backend that works now."""
        return next((v for v in self.views.values() if not v.ended and v.phase != "waiting"), None)

    def reports(self) -> list[dict[str, Any]]:
        """Reports of the backends that are done, in the order of the page."""
        return [view.report for view in self.views.values() if view.report is not None]

    def latency_lines(self) -> list[Line]:
        """A line a backend: milliseconds over the step."""
        return [Line(v.info.title, v.info.colour, v.latency) for v in self.views.values()]

    def memory_lines(self) -> list[Line]:
        """A line a backend: MiB over seconds since the run began."""
        return [Line(v.info.title, v.info.colour, v.memory) for v in self.views.values()]


_URGENT = (Result, Failed, Stopped, Queued, Compiling)


def follow(run: Running, live: LiveRun) -> Iterator[LiveRun]:
    """Fold the events of a run as they come, yielding when the page should be redrawn.

    Yields at most every `REFRESH_S` while steps come in, at once for what a person waits for,
    and also while nothing comes, so that elapsed times move. Closing the iterator stops the
    run within one step and waits for it.
    """
    events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()

    def pump() -> None:
        try:
            for event in run:
                events.put(event)
            events.put(None)
        except BaseException as error:  # it is handed on to the reader
            events.put(error)

    thread = threading.Thread(target=pump, name="run-events", daemon=True)
    thread.start()
    drawn = time.monotonic()
    try:
        while True:
            wait = max(0.0, drawn + REFRESH_S - time.monotonic())
            try:
                item = events.get(timeout=wait)
            except queue.Empty:
                yield live
                drawn = time.monotonic()
                continue
            if item is None:
                live.finish()
                yield live
                return
            if isinstance(item, BaseException):
                raise item
            live.fold(item)
            if isinstance(item, _URGENT) or time.monotonic() - drawn >= REFRESH_S:
                yield live
                drawn = time.monotonic()
    finally:
        run.close()
        thread.join(timeout=10.0)
