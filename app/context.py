"""What every tab and the API share: the engine, the models on offer, and who runs what."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gradio as gr

from app.engine import BackendId, BackendStatus, Job
from app.forms import Models
from app.live import LiveRun, Running, follow

log = logging.getLogger("blr-lab")

WAITING_RUNS = 16
"""Runs that may wait in the engine's queue, where each sees its place."""

QUEUE_LIMIT = 32
"""Requests that may wait for one of those; more are refused."""

MAX_REFUSAL = 500
"""Characters of the sentence that says why something is refused."""

DEVICE_QUEUE = "device"
"""Everything that uses the device shares this one queue."""


class EngineLike(Protocol):
    """The part of `app.engine.Engine` that the page uses."""

    def device_info(self) -> dict[str, Any]: ...
    def backend_status(
        self, model: str, variant: str, *, untrained: bool = False
    ) -> list[BackendStatus]: ...
    def warm_up(self, job: Job, backend: BackendId) -> None: ...
    def run(self, job: Job, backends: Sequence[BackendId]) -> Running: ...
    def close(self) -> None: ...


class Sessions:
    """Which run belongs to which open page, so that Stop stops one's own only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, Running] = {}

    def begin(self, session: str, run: Running) -> None:
        """Note that `run` is the one of this session."""
        with self._lock:
            self._runs[session] = run

    def end(self, session: str, run: Running) -> None:
        """Forget `run`, unless the session has begun another since."""
        with self._lock:
            if self._runs.get(session) is run:
                del self._runs[session]

    def running(self, session: str) -> bool:
        """Whether the session has a run."""
        with self._lock:
            return session in self._runs

    def stop(self, session: str) -> bool:
        """Stop the run of a session; False when there is none."""
        with self._lock:
            run = self._runs.get(session)
        if run is None:
            return False
        run.stop()
        return True


@dataclass
class Context:
    """Built once a server; tabs read from it and never write."""

    engine: EngineLike
    models: Models
    device: str
    sessions: Sessions = field(default_factory=Sessions)

    @property
    def default_ticks(self) -> tuple[BackendId, ...]:
        """What a visitor starts with."""
        if self.device.startswith("cuda"):
            return ("dense", "compiled", "blr-triton")
        return ("dense", "blr-torch")

    @property
    def ready(self) -> bool:
        """Whether the device has been looked at; a GPU takes seconds."""
        return bool(self.engine.device_info().get("ready"))

    def status(self, model: str, variant: str, untrained: bool = False) -> list[BackendStatus]:
        """What can run here; nothing is said of a device that has not answered yet."""
        if not self.ready:
            return []
        return self.engine.backend_status(model, variant, untrained=untrained)

    def start(self, job: Job, backends: Sequence[BackendId]) -> Running:
        """Start a run; what the model cannot run is refused with one line."""
        return self.engine.run(job, backends)

    def watch(self, session: str, job: Job, backends: Sequence[BackendId]) -> Iterator[LiveRun]:
        """Run a job for one open page, yielding whenever the page should be redrawn.

        Raises:
            gr.Error: when the job is refused, before anything is drawn.
        """
        live = LiveRun(job, backends)
        try:
            run = self.start(job, backends)
        except (TypeError, ValueError) as error:
            raise refusal(error) from None
        self.sessions.begin(session, run)
        try:
            yield from follow(run, live)
        except Exception:
            log.exception("a run ended early")
            live.finish("An unexpected error; the server's log has the details.")
            yield live
        finally:
            self.sessions.end(session, run)


def refusal(error: Exception) -> gr.Error:
    """The one line that a person or a program gets instead of a traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0]
    if text.partition(" ")[0].isalpha():  # names of files and of models stay as they are
        text = text[:1].upper() + text[1:]
    if len(text) > MAX_REFUSAL:  # what was sent is quoted, however long it is
        text = text[:MAX_REFUSAL] + " …"
    return gr.Error(text, duration=8, print_exception=False)
