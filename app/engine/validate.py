"""Check a job against its model before any worker sees it, without importing torch."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from app.engine.jobs import RUN_ORDER, BackendId, ClassifyJob, GenerateJob, Job, backend_info

MAX_PIXELS = 100_000_000


def check_job(job: Job) -> None:
    """Raise unless the job's model can run it.

    Raises:
        TypeError, ValueError: one line that says what was expected and what came.
    """
    from model_zoo.registry import get_model

    if not isinstance(job, GenerateJob | ClassifyJob):
        raise TypeError(f"job must be a GenerateJob or a ClassifyJob, got {type(job).__name__}")
    entry = get_model(job.model)
    if entry.task != job.task:
        raise ValueError(f"{entry.id} is a model to {entry.task}, it cannot {job.task}")
    if job.untrained and not entry.untrained:
        raise ValueError(f"{entry.id} runs with its own weights only, not with untrained ones")
    if not job.untrained and not entry.available():
        raise ValueError(f"the weights of {entry.id} are not here. {entry.how_to_get()}")
    if isinstance(job, GenerateJob):
        check_class(job.class_id, entry.labels(), entry.id)
    else:
        _check_picture(job.image)


def check_class(class_id: int, labels: Mapping[int, str], model: str) -> None:
    """Raise ValueError unless `class_id` is one of the model's classes."""
    if class_id in labels:
        return
    if not labels:
        raise ValueError(f"{model} names no classes, so it cannot generate by class")
    raise ValueError(
        f"class {class_id} is not one of the {len(labels)} classes of {model} "
        f"({min(labels)} to {max(labels)})"
    )


def check_backends(backends: Sequence[str]) -> list[BackendId]:
    """The backends in the order in which they run.

    Raises:
        TypeError, ValueError: for none, an unknown one, or one named twice.
    """
    if isinstance(backends, str) or not isinstance(backends, Sequence):
        raise TypeError(f"backends must be a list of ids, got {backends!r}")
    if not backends:
        raise ValueError("choose at least one backend")
    for backend in backends:
        backend_info(backend)
    if len(set(backends)) != len(backends):
        raise ValueError(f"each backend can be chosen once, got {', '.join(backends)}")
    return [backend for backend in RUN_ORDER if backend in backends]


def _check_picture(data: bytes) -> None:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ValueError(
                    f"image must have at most {MAX_PIXELS // 10**6} million pixels, "
                    f"got {width}x{height}"
                )
            image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image is not a readable PNG: {error}") from None
