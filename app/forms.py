"""From what a person or a program sends to a job: every check that the page and the API share.

Everything here raises `ValueError` or `TypeError` with one line for a person.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from gradio.utils import get_upload_folder

from app.engine import BACKENDS, BackendId, BackendStatus, ClassifyJob, GenerateJob, backend_info
from model_zoo import registry
from model_zoo.images import open_image
from model_zoo.registry import ModelEntry, get_model, models, search_labels

PREVIEWS = 10
"""About this many previews are decoded in a run, however many steps it has."""

MAX_PAGE_IMAGES = 8
MAX_PAGE_BATCH = 64
DEFAULT_CLASSES = ("fox", "shark", "strawberry", "tiger", "apple")


class Models:
    """The models on offer: those of the registry and the local folders named at the start."""

    def __init__(self, folders: Iterable[str | Path] = ()) -> None:
        self._entries = {entry.id: entry for entry in models()}
        self._named: list[ModelEntry] = []
        for folder in folders:
            entry = get_model(str(folder))
            self._entries[entry.id] = entry
            self._named.append(entry)

    def for_task(self, task: str) -> list[ModelEntry]:
        """The models of one task, in the order of the page."""
        return [entry for entry in self._entries.values() if entry.task == task]

    def all(self) -> list[ModelEntry]:
        """Every model on offer."""
        return list(self._entries.values())

    def get(self, model: Any, task: str | None = None) -> ModelEntry:
        """The entry of an id; unknown ids, and other tasks' models, are refused."""
        offered = self._entries if task is None else {e.id: e for e in self.for_task(task)}
        if not isinstance(model, str) or model not in offered:
            raise ValueError(f"unknown model {model!r}; expected one of {', '.join(offered)}")
        return offered[model]

    def first(self, task: str) -> ModelEntry:
        """What a visitor starts with: the first folder named at the start, else a bundled model."""
        named = next((entry for entry in self._named if entry.task == task), None)
        if named is not None:
            return named
        offered = self.for_task(task)
        return next((entry for entry in offered if entry.bundled), offered[0])


def class_choices(entry: ModelEntry) -> list[tuple[str, int]]:
    """Every class as ("name · id", id); ids keep two classes of one name apart (C7)."""
    return [(f"{name} · {index}", index) for index, name in sorted(entry.labels().items())]


def default_class(entry: ModelEntry) -> int | None:
    """A class that makes a good first picture."""
    labels = entry.labels()
    for wish in DEFAULT_CLASSES:
        found = search_labels(labels, wish)
        if found:
            return found[0][0]
    return min(labels, default=None)


def find_class(entry: ModelEntry, wanted: Any) -> int:
    """The class id that a number, an id as text or a name stands for.

    Raises:
        ValueError: nothing or several classes match; the message lists them (C7).
        TypeError: for anything else than an int or a text.
    """
    labels = entry.labels()
    if wanted is None:
        raise ValueError("choose a class first")
    if isinstance(wanted, bool) or not isinstance(wanted, int | str):
        raise TypeError(f"class must be an id or a name, got {wanted!r}")
    if isinstance(wanted, str) and not re.fullmatch(r"\s*-?\d{1,9}\s*", wanted):
        return registry.find_class(labels, wanted)
    index = int(wanted)
    if index not in labels:
        raise ValueError(
            f"class id must be between {min(labels)} and {max(labels)}, got {index}"
            if labels
            else f"{entry.title} has no classes"
        )
    return index


def chosen_backends(wanted: Any, status: Sequence[BackendStatus]) -> list[BackendId]:
    """The backends to run, in the order of the page.

    Raises:
        ValueError: none, an unknown one, or one that cannot run here; the message says why.
    """
    if not isinstance(wanted, list | tuple) or not all(isinstance(item, str) for item in wanted):
        raise TypeError(f"backends must be a list of backend ids, got {wanted!r}")
    if not wanted:
        raise ValueError("choose at least one backend to run")
    for backend in wanted:
        info = backend_info(backend)
        for entry in status:
            if entry.id == backend and not entry.available:
                raise ValueError(f"{info.title} cannot run here: {entry.reason}")
    return [info.id for info in BACKENDS if info.id in wanted]


def check_variant(variant: Any) -> str:
    """One of the three structures; anything else is refused."""
    if not isinstance(variant, str) or variant not in registry.VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(registry.VARIANTS)}, got {variant!r}")
    return variant


def check_weights(entry: ModelEntry, untrained: Any) -> bool:
    """Whether the run uses untrained weights; weights that are missing must be waived."""
    if not isinstance(untrained, bool):
        raise TypeError(f"untrained must be true or false, got {untrained!r}")
    if not untrained and not entry.available():
        raise ValueError(
            f"the weights of {entry.title} are not here. {entry.how_to_get()} "
            "Or tick “untrained weights, for timing only”."
        )
    return untrained


def whole(name: str, value: Any) -> int:
    """A whole number, also where a browser sends 25.0 for 25."""
    _filled(name, value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    return value


def _filled(name: str, value: Any) -> None:
    if value is None:
        raise ValueError(f"{name} is empty; enter a number")


def generate_job(
    entry: ModelEntry,
    *,
    class_wanted: Any,
    variant: Any,
    seed: Any,
    steps: Any,
    guidance: Any,
    images: Any,
    untrained: Any,
) -> GenerateJob:
    """A checked job (C8)."""
    steps = whole("steps", steps)
    _filled("guidance", guidance)
    count = whole("images", images)
    if not 1 <= count <= MAX_PAGE_IMAGES:
        raise ValueError(f"images must be between 1 and {MAX_PAGE_IMAGES}, got {count}")
    return GenerateJob(
        model=entry.id,
        variant=cast(Any, variant),
        class_id=find_class(entry, class_wanted),
        seed=whole("seed", seed),
        steps=steps,
        guidance=guidance,
        images=count,
        untrained=check_weights(entry, untrained),
        preview_every=max(1, steps // PREVIEWS),
    )


def uploaded_path(upload: Any) -> str | None:
    """The path in what Gradio sends for an uploaded file; None without one.

    Raises:
        ValueError: for a path outside of Gradio's own folder of uploads.
    """
    if upload is None:
        return None
    path = upload.get("path") if isinstance(upload, dict) else None
    if not isinstance(path, str) or not path:
        raise ValueError("image must be an uploaded file")
    folder = Path(get_upload_folder()).resolve()
    if not Path(path).resolve().is_relative_to(folder):
        raise ValueError("image must be an uploaded file, got a path on the server")
    return path


def read_picture(path: str | Path | None) -> bytes:
    """The upright RGB picture of an uploaded file, as the bytes of a PNG (C5)."""
    if path is None:
        raise ValueError("choose a picture first, or take one of the examples")
    out = io.BytesIO()
    open_image(Path(path)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def classify_job(
    entry: ModelEntry,
    *,
    image: bytes,
    variant: Any,
    repeats: Any,
    batch: Any,
    untrained: Any,
) -> ClassifyJob:
    """A checked job (C8)."""
    count = whole("batch", batch)
    if not 1 <= count <= MAX_PAGE_BATCH:
        raise ValueError(f"batch must be between 1 and {MAX_PAGE_BATCH}, got {count}")
    return ClassifyJob(
        model=entry.id,
        variant=cast(Any, variant),
        image=image,
        repeats=whole("repeats", repeats),
        batch=count,
        untrained=check_weights(entry, untrained),
    )
