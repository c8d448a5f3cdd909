"""Names of classes: read from a model's files, searched as a person types. Imports no torch."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from model_zoo.json_files import read_object

__all__ = [
    "classify_labels",
    "find_class",
    "generate_labels",
    "imagenet_labels",
    "search_labels",
]


MAX_CLASSES = 100_000
"""More are refused: no model here has as many, and each becomes a choice on the page."""


def search_labels(labels: Mapping[int, str], text: str) -> list[tuple[int, str]]:
    """Classes that ``text`` may mean, the best first; any case.

    A number finds the class of that id and names that hold it. A name finds whole names first,
    then beginnings, then words inside. Every class of an ambiguous name is there. Empty text
    finds all.

    Returns:
        Pairs of id and label as in ``labels``.
    """
    wanted = " ".join(text.casefold().split())
    if not wanted:
        return sorted(labels.items())
    number = _number(wanted)
    ranked = []
    for index, label in labels.items():
        rank = 0 if index == number else _rank(label, wanted)
        if rank is not None:
            ranked.append((rank, index, label))
    return [(index, label) for _, index, label in sorted(ranked)]


def find_class(labels: Mapping[int, str], text: str) -> int:
    """The one class that ``text`` names, by id or by one of its names; any case.

    Raises:
        ValueError: no class or several have that name; the message lists candidates.
    """
    wanted = " ".join(text.casefold().split())
    if (number := _number(wanted)) is not None and number in labels:
        return number
    exact = [index for index, label in sorted(labels.items()) if wanted in _names(label)]
    if len(exact) == 1:
        return exact[0]
    if exact:
        listed = "; ".join(f"{index} {labels[index]}" for index in exact)
        raise ValueError(f"{text!r} names {len(exact)} classes, choose by id: {listed}")
    near = search_labels(labels, text)[:5] if wanted else []
    hint = "; ".join(f"{index} {label}" for index, label in near)
    raise ValueError(f"no class is named {text!r}" + (f"; near it: {hint}" if hint else ""))


def _number(wanted: str) -> int | None:
    # Python refuses to read thousands of digits, in words that are about Python.
    short = len(wanted) <= len(str(MAX_CLASSES))
    return int(wanted) if short and wanted.isascii() and wanted.isdecimal() else None


def _names(label: str) -> list[str]:
    # "crane (large wading bird)" is named "crane"; "tench, Tinca tinca" has two names.
    plain = label.casefold().split(" (", 1)[0]
    return [part.strip() for part in plain.split(",")]


def _rank(label: str, wanted: str) -> int | None:
    names = _names(label)
    whole = label.casefold()
    if wanted in names or wanted == whole:
        return 0
    if any(name.startswith(wanted) for name in names):
        return 1
    if any(word.startswith(wanted) for word in whole.replace(",", " ").split()):
        return 2
    return 3 if wanted in whole else None


@cache
def imagenet_labels() -> dict[int, str]:
    """ImageNet-1k's names by id, from the files that timm brings, without importing timm.

    Where two classes share a name, its definition follows in brackets.
    """
    spec = find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(spec.submodule_search_locations[0]) / "data" / "_info"
    synsets = (folder / "imagenet_synsets.txt").read_text(encoding="utf-8").split()
    names = _table(folder / "imagenet_synset_to_lemma.txt")
    definitions = _table(folder / "imagenet_synset_to_definition.txt")
    count = Counter(names[synset] for synset in synsets)
    return {
        index: names[synset]
        if count[names[synset]] == 1
        else f"{names[synset]} ({shorten(definitions[synset], 45, placeholder='...')})"
        for index, synset in enumerate(synsets)
    }


def _table(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8", newline="") as file:
        return {row[0]: row[1] for row in csv.reader(file, delimiter="\t") if len(row) == 2}


def generate_labels(folder: Path) -> dict[int, str]:
    """Labels of a ``DiTPipeline`` folder: its ``id2label``, else by its number of classes.

    Raises:
        ValueError: neither can be read as that.
    """
    named = _json(folder / "model_index.json").get("id2label")
    if isinstance(named, dict) and named:
        wrong = [key for key in named if not (key.isascii() and key.isdecimal() and len(key) < 8)]
        if wrong:
            raise ValueError(f"{folder}: id2label must have ids as keys, got {wrong[0]!r}")
        return {int(index): _name(label) for index, label in named.items()}
    config = _json(folder / "transformer" / "config.json")
    return _numbered(folder, config.get("num_embeds_ada_norm"))


def classify_labels(folder: Path) -> dict[int, str]:
    """Labels of a timm folder: its ``label_names``, with descriptions where it has them.

    Raises:
        ValueError: neither they nor the number of classes can be read as that.
    """
    config = _json(folder / "config.json")
    inner = config.get("pretrained_cfg")
    config = {**(inner if isinstance(inner, dict) else {}), **config}
    names = config.get("label_names")
    if not names:
        return _numbered(folder, config.get("num_classes"))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder}: label_names must be a list of names")
    described = config.get("label_descriptions")
    if isinstance(described, list):
        described = dict(zip(names, described, strict=False))
    if not isinstance(described, dict):
        described = {}
    return {index: _name(described.get(name, name)) for index, name in enumerate(names)}


def _name(label: Any) -> str:
    """A label in one line."""
    return " ".join(str(label).split())


def _numbered(folder: Path, count: Any) -> dict[int, str]:
    count = 0 if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_CLASSES:
        raise ValueError(
            f"{folder}: the number of classes must be between 0 and {MAX_CLASSES}, got {count!r}"
        )
    if count == 1000 and imagenet_labels():
        return imagenet_labels()
    return {index: f"class {index}" for index in range(count)}


def _json(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        return {}


@lru_cache(maxsize=64)
def _parsed(path: Path, changed: int) -> dict[str, Any]:
    return read_object(path)
