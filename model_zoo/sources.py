"""From what a caller names to a model entry, its folder and the file of a variant."""

from __future__ import annotations

from pathlib import Path

from model_zoo.registry import VARIANTS, ModelEntry, Task, get_model

__all__ = ["entry_of", "folder_of", "variant_file"]


def entry_of(source: ModelEntry | str | Path, task: Task) -> ModelEntry:
    """The entry that ``source`` names.

    Raises:
        ValueError: unknown, or a model of the other task.
    """
    entry = source if isinstance(source, ModelEntry) else get_model(str(source))
    if entry.task != task:
        raise ValueError(f"{entry.id} is a model to {entry.task}, expected one to {task}")
    return entry


def folder_of(entry: ModelEntry) -> Path:
    """The folder with the whole model.

    Raises:
        ValueError: something is missing; the message names it and how to get it.
    """
    folder = entry.folder()
    if folder is None or entry.missing():
        raise ValueError(f"the weights of {entry.id} are not here. {entry.how_to_get()}")
    return folder


def variant_file(entry: ModelEntry, variant: str | Path) -> Path:
    """The file of a variant, named by its kind or by its path.

    Raises:
        ValueError: there is none; the message says what makes it.
    """
    if str(variant) not in VARIANTS:
        return Path(variant)
    path = entry.variant_path(str(variant))
    if not path.is_file():
        raise ValueError(entry.how_to_make(str(variant)))
    return path
