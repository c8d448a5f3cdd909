"""What the engine reports while it works: frozen records, in the order they happen.

A run is a stream of them: `Queued` while another job holds the device (its `backend` is
empty, it concerns the whole run), then for each backend `Loading`, `Compiling` (only where
something is compiled), `Warming`, `Ready`, `Step` and `Preview` in turn, `Decoding` (Generate
only) and `Result`. `Failed` ends one backend and the run goes on with the next; `Stopped` ends
the run. A worker that is still warm skips `Loading`, and `Compiling` if the shape is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """`t` is in seconds since the run was asked for."""

    backend: str
    t: float


@dataclass(frozen=True, kw_only=True)
class Queued(Event):
    """Other runs hold the device; `position` 1 is next in line. Sent again when it changes."""

    position: int


@dataclass(frozen=True, kw_only=True)
class Loading(Event):
    """A worker starts and reads the weights."""


@dataclass(frozen=True, kw_only=True)
class Compiling(Event):
    """The model is being compiled for this shape; `expected_s` is an estimate."""

    expected_s: float


@dataclass(frozen=True, kw_only=True)
class Warming(Event):
    """Untimed forwards run, so that what follows is steady."""


@dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """The timed part begins. Times are those of this worker for this shape.

    `load_s` is reading the weights, without starting Python. `weights_bytes` is the exact
    size of the parameters and buffers of the compared model.
    """

    load_s: float
    compile_s: float
    warmup_s: float
    weights_bytes: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One denoising step or one forward, `index` counting from 1 to `total`.

    `memory_mib` is allocated memory on a GPU; on a CPU the worker's share of memory above
    what it used before the model was loaded.
    """

    index: int
    total: int
    seconds: float
    memory_mib: float


@dataclass(frozen=True, kw_only=True)
class Preview(Event):
    """The pictures as they look after `step` steps, each the bytes of a PNG."""

    images: list[bytes]
    step: int


@dataclass(frozen=True, kw_only=True)
class Decoding(Event):
    """Denoising is done; latents become pictures."""


@dataclass(frozen=True, kw_only=True)
class Result(Event):
    """One backend is done.

    `images` are PNGs (Generate), `top` is (class id, label, probability) with the most
    probable first (Classify); the other one is `None`. `report` is described in `app.report`.
    """

    images: list[bytes] | None
    top: list[tuple[int, str, float]] | None
    report: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """This backend did not finish; `message` is one line for a person."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """The run was stopped, while `backend` ran (empty while it waited in the queue)."""
