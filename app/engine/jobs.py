"""What a person can ask the engine for: jobs and backends, as plain data.

Nothing here imports torch. A job checks by itself everything that can be checked without
knowing its model; `app.engine.validate` checks the rest before a worker sees the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

BackendId = Literal["dense", "compiled", "blr-triton", "blr-torch", "blr-compiled"]
VariantId = Literal["low_rank", "monarch", "blast"]
DtypeName = Literal["float32", "float16", "bfloat16"]

MAX_STEPS = 1000
MAX_IMAGES = 64
MAX_REPEATS = 1000
MAX_BATCH = 1024
MAX_GUIDANCE = 100.0
MAX_SEED = 2**63 - 1
MAX_IMAGE_BYTES = 64 * 2**20

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class BackendInfo:
    """One way of running a model that a person can pick.

    `colour` is the same wherever the backend is drawn; the five are told apart by people
    with any of the common colour blindnesses.
    """

    id: BackendId
    title: str
    colour: str
    description: str

    @property
    def block_low_rank(self) -> bool:
        """Whether the backend runs the converted model rather than the original one."""
        return self.id.startswith("blr-")

    @property
    def compiles(self) -> bool:
        """Whether the backend runs under `torch.compile` on a CPU."""
        return self.id in ("compiled", "blr-compiled")


BACKENDS: tuple[BackendInfo, ...] = (
    BackendInfo("dense", "Dense", "#4b5563", "The original model, eager"),
    BackendInfo("compiled", "Compiled", "#c87604", "The original model under torch.compile"),
    BackendInfo(
        "blr-triton", "BLR Triton", "#0072b2", "The block low-rank model on the Triton kernels"
    ),
    BackendInfo(
        "blr-torch", "BLR PyTorch", "#009e73", "The block low-rank model on PyTorch ops, eager"
    ),
    BackendInfo(
        "blr-compiled",
        "BLR compiled",
        "#cc79a7",
        "The block low-rank model on PyTorch ops under torch.compile",
    ),
)

RUN_ORDER: tuple[BackendId, ...] = ("dense", "blr-torch", "blr-triton", "blr-compiled", "compiled")
"""Backends of one comparison run in this order: quick ones first, compiling ones last."""


def backend_info(backend: str) -> BackendInfo:
    """The description of a backend.

    Raises:
        ValueError: for an unknown id; the message names the known ones.
    """
    for info in BACKENDS:
        if info.id == backend:
            return info
    known = ", ".join(info.id for info in BACKENDS)
    raise ValueError(f"unknown backend {backend!r}; expected one of {known}")


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run a model on this machine, and if not, why.

    `compile_s` is about how long its first run compiles, `None` where nothing is compiled.
    """

    id: BackendId
    available: bool
    reason: str = ""
    compile_s: float | None = None


def whole_number(name: str, value: Any, low: int, high: int) -> None:
    """Raise unless `value` is an int (no bool, no float) with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{name} must be a non-empty text, got {value!r}")


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")


def _check_common(job: GenerateJob | ClassifyJob) -> None:
    _text("model", job.model)
    _one_of("variant", job.variant, get_args(VariantId))
    if job.dtype is not None:
        _one_of("dtype", job.dtype, get_args(DtypeName))
    _flag("untrained", job.untrained)


@dataclass(frozen=True)
class GenerateJob:
    """Generate `images` pictures of one class.

    All backends start from the same noise, drawn from `seed`. `guidance` 1 means none.
    A preview is decoded every `preview_every` steps, 0 for never; previews are outside
    every timed region. `dtype` None means the device's default.

    Raises:
        TypeError, ValueError: for anything that no model could run.
    """

    model: str
    variant: VariantId = "blast"
    class_id: int = 0
    seed: int = 0
    steps: int = 25
    guidance: float = 4.0
    images: int = 1
    untrained: bool = False
    dtype: DtypeName | None = None
    fuse_qkv: bool = True
    preview_every: int = 5

    def __post_init__(self) -> None:
        _check_common(self)
        whole_number("class_id", self.class_id, 0, 10**6)
        whole_number("seed", self.seed, 0, MAX_SEED)
        whole_number("steps", self.steps, 1, MAX_STEPS)
        whole_number("images", self.images, 1, MAX_IMAGES)
        whole_number("preview_every", self.preview_every, 0, MAX_STEPS)
        _flag("fuse_qkv", self.fuse_qkv)
        if isinstance(self.guidance, bool) or not isinstance(self.guidance, int | float):
            raise TypeError(f"guidance must be a number, got {self.guidance!r}")
        if not 0 <= self.guidance <= MAX_GUIDANCE:  # NaN is not, either
            raise ValueError(
                f"guidance must be a finite number between 0 and {MAX_GUIDANCE:g}, "
                f"got {self.guidance}"
            )

    @property
    def task(self) -> str:
        """The task of the models that can run it, "generate"."""
        return "generate"


@dataclass(frozen=True)
class ClassifyJob:
    """Classify one picture, `repeats` times over so that latency has a distribution.

    `image` holds the bytes of a PNG of the upright RGB picture (see `model_zoo.images`).
    The picture fills a batch of `batch`; at least `warmup` forwards run before the timed ones.

    Raises:
        TypeError, ValueError: for anything that no model could run.
    """

    model: str
    variant: VariantId = "blast"
    image: bytes = b""
    repeats: int = 30
    warmup: int = 3
    batch: int = 1
    top: int = 5
    untrained: bool = False
    dtype: DtypeName | None = None

    def __post_init__(self) -> None:
        _check_common(self)
        if not isinstance(self.image, bytes):
            raise TypeError(f"image must be the bytes of a PNG, got {type(self.image).__name__}")
        if not self.image:
            raise ValueError("image is missing: choose a picture first")
        if not self.image.startswith(_PNG_SIGNATURE):
            raise ValueError("image must be the bytes of a PNG, got something else")
        if len(self.image) > MAX_IMAGE_BYTES:
            raise ValueError(
                f"image must be at most {MAX_IMAGE_BYTES >> 20} MiB, "
                f"got {len(self.image) / 2**20:.1f} MiB"
            )
        whole_number("repeats", self.repeats, 1, MAX_REPEATS)
        whole_number("warmup", self.warmup, 0, MAX_REPEATS)
        whole_number("batch", self.batch, 1, MAX_BATCH)
        whole_number("top", self.top, 1, MAX_REPEATS)

    @property
    def task(self) -> str:
        """The task of the models that can run it, "classify"."""
        return "classify"


Job = GenerateJob | ClassifyJob
