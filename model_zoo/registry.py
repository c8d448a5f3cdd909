"""Every model a person can pick, and where its weights come from. Imports no torch.

Bundled models are part of the package. The others are looked for in the local Hugging Face cache
(``HF_HOME`` is respected) or in a folder; nothing is downloaded unless :meth:`ModelEntry.fetch` is
called. Converted variants are files of factors, ``<name>-<kind>.safetensors``: beside the folder of
a bundled or local model, and in :func:`variants_dir` for a model of the hub's cache.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_zoo.headers import CheckpointError, read_config
from model_zoo.json_files import read_object
from model_zoo.labels import (
    classify_labels,
    find_class,
    generate_labels,
    imagenet_labels,
    search_labels,
)

__all__ = [
    "VARIANTS",
    "ModelEntry",
    "Task",
    "Variant",
    "assets_dir",
    "find_class",
    "get_model",
    "models",
    "search_labels",
    "variants_dir",
]

Task = Literal["generate", "classify"]

VARIANTS = {"low_rank": "Low rank", "monarch": "Monarch", "blast": "BLAST"}
"""Title of each kind of converted variant, by its id."""

# Names of which one must be there, for each file that a model consists of.
_GENERATE_FILES: tuple[tuple[str, ...], ...] = (
    ("model_index.json",),
    ("scheduler/scheduler_config.json",),
    ("transformer/config.json",),
    (
        "transformer/diffusion_pytorch_model.safetensors",
        "transformer/diffusion_pytorch_model.bin",
    ),
    ("vae/config.json",),
    ("vae/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.bin"),
)
_CLASSIFY_FILES: tuple[tuple[str, ...], ...] = (
    ("config.json",),
    ("model.safetensors", "pytorch_model.bin"),
)
_TIMM_NAME = re.compile(r"(?:timm/)?([a-z0-9_]+\.[a-z0-9_]+)")


@dataclass(frozen=True)
class Variant:
    """A converted form of a model. ``path`` is None where no file of factors is here."""

    id: str
    title: str
    summary: str
    path: Path | None


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be picked.

    Attributes:
        id: stable name; for a folder, its absolute path.
        title: for people.
        task: "generate" (a diffusers ``DiTPipeline``) or "classify" (a timm model).
        source: repository on the Hugging Face hub, or folder.
        bundled: whether it comes with the package.
        licence: of the weights; "" where unknown.
        download_bytes: size of a download, 0 for a folder or where unknown.
        untrained: name of the architecture that can be built without any file, or "".
    """

    id: str
    title: str
    task: Task
    source: str
    bundled: bool = False
    licence: str = ""
    download_bytes: int = 0
    untrained: str = ""

    @property
    def is_folder(self) -> bool:
        """Whether ``source`` is a folder rather than a repository of the hub."""
        return self.bundled or Path(self.source).is_absolute()

    def folder(self) -> Path | None:
        """Where the model's files are: its folder or its snapshot in the local cache."""
        if self.is_folder:
            return Path(self.source)
        from huggingface_hub import try_to_load_from_cache

        index = try_to_load_from_cache(self.source, self._files[0][0], cache_dir=_hub_cache())
        return Path(index).parent if isinstance(index, str) else None

    def missing(self) -> list[str]:
        """Files that are needed and not here; of a model never fetched, the first."""
        folder = self.folder()
        if folder is None:
            return [self._files[0][0]]
        return [
            " or ".join(names)
            for names in self._files
            if not any((folder / name).is_file() for name in names)
        ]

    def available(self) -> bool:
        """Whether the weights are here. Looks at the disk only."""
        return not self.missing()

    def how_to_get(self) -> str:
        """What is missing and the command that fetches it, with size and licence; one line."""
        if self.is_folder:
            if not Path(self.source).is_dir():
                return f"The folder {self.source} is not here."
            lacking = ", ".join(self.missing()) or "nothing"
            return f"{lacking} is missing from the folder {self.source}."
        facts = []
        if self.download_bytes:
            facts.append(f"{self.download_bytes / 1e9:.2g} GB")
        facts.append(f"licence {self.licence or 'on its page'}")
        text = f"Get it with: {self._command} ({', '.join(facts)})."
        folder = self.folder()
        if missing := self.missing():
            where = folder or f"the cache {_hub_cache()}"
            text = f"{', '.join(missing)} is missing from {where}. {text}"
        return text

    def fetch(self) -> Path:
        """Download the weights from the hub into the local cache; returns their folder.

        Raises:
            ValueError: for a bundled model or a folder.
        """
        if self.is_folder:
            raise ValueError(f"{self.id} is a folder, there is nothing to download")
        from huggingface_hub import snapshot_download

        wanted = [name for names in self._files for name in names]
        return Path(snapshot_download(self.source, allow_patterns=wanted))

    def labels(self) -> dict[int, str]:
        """Names of the classes by id, as the model's own files give them; else ImageNet's where
        the model has its 1000 classes.

        Raises:
            ValueError: the model's files say what cannot be; one line.
        """
        folder = self.folder()
        if folder is None:
            return dict(imagenet_labels())
        found = generate_labels(folder) if self.task == "generate" else classify_labels(folder)
        return dict(found)

    def how_to_make(self, kind: str) -> str:
        """Why there is no variant of this kind and the command that makes it; one line.

        Raises:
            ValueError: unknown kind.
        """
        if kind not in VARIANTS:
            raise ValueError(f"kind must be one of {', '.join(VARIANTS)}, got {kind!r}")
        command = f"blr-lab convert {shlex.quote(self.id)} --structure {kind}"
        return f"{self.id} has no {VARIANTS[kind]} variant here; make it with: {command}"

    def variant_path(self, kind: str) -> Path:
        """Where the factors of this kind belong.

        Raises:
            ValueError: unknown kind.
        """
        if kind not in VARIANTS:
            raise ValueError(f"kind must be one of {', '.join(VARIANTS)}, got {kind!r}")
        if self.is_folder:
            folder = Path(self.source)
            return folder.with_name(f"{folder.name}-{kind}.safetensors")
        return variants_dir() / f"{self.id.replace('/', '--')}-{kind}.safetensors"

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All three kinds, each with its file where that is here."""
        found: list[Variant] = []
        for kind, title in VARIANTS.items():
            path = self.variant_path(kind)
            here = path.is_file()
            found.append(
                Variant(kind, title, _summary(path) if here else "", path if here else None)
            )
        return tuple(found)

    @property
    def variants_here(self) -> tuple[Variant, ...]:
        """Those of :attr:`variants` whose file is here."""
        return tuple(variant for variant in self.variants if variant.path is not None)

    @property
    def _files(self) -> tuple[tuple[str, ...], ...]:
        return _GENERATE_FILES if self.task == "generate" else _CLASSIFY_FILES

    @property
    def _command(self) -> str:
        command = f"hf download {self.source}"
        if self.task == "classify":  # these repositories hold the weights in two formats
            command += " config.json model.safetensors"
        return command


def models() -> list[ModelEntry]:
    """The known models, bundled ones first."""
    demo = assets_dir() / "demo"
    return [
        ModelEntry(
            id="demo-dit",
            title="Emoji DiT (bundled)",
            task="generate",
            source=str(demo / "dit"),
            bundled=True,
            licence="Apache-2.0, trained on icons named in NOTICE",
        ),
        ModelEntry(
            id="demo-vit",
            title="Emoji ViT (bundled)",
            task="classify",
            source=str(demo / "vit"),
            bundled=True,
            licence="Apache-2.0, trained on icons named in NOTICE",
        ),
        ModelEntry(
            id="dit-xl-2-256",
            title="DiT-XL/2 256",
            task="generate",
            source="facebook/DiT-XL-2-256",
            licence="CC-BY-NC-4.0",
            download_bytes=3_334_000_000,
            untrained="dit-xl-2-256",
        ),
        ModelEntry(
            id="dit-xl-2-512",
            title="DiT-XL/2 512",
            task="generate",
            source="facebook/DiT-XL-2-512",
            licence="CC-BY-NC-4.0",
            download_bytes=3_334_000_000,
            untrained="dit-xl-2-512",
        ),
        ModelEntry(
            id="vit-b-16",
            title="ViT-B/16",
            task="classify",
            source="timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
            licence="Apache-2.0",
            download_bytes=346_000_000,
            untrained="vit_base_patch16_224",
        ),
    ]


def get_model(id_or_path: str) -> ModelEntry:
    """The model of this id, folder, or full timm tag (``vit_small_patch16_224.augreg_in1k``).

    A folder is a ``DiTPipeline`` (``model_index.json``) or a timm model (``config.json`` with its
    architecture); ``local-dir:FOLDER`` is accepted too.

    Raises:
        ValueError: none of these; the message names the known ids, or what the folder lacks.
    """
    known = models()
    for entry in known:
        if entry.id == id_or_path:
            return entry
    # Unlike Path.expanduser, this leaves the name of an unknown user as it is.
    path = Path(os.path.expanduser(id_or_path.removeprefix("local-dir:")))
    if path.is_dir():
        return _folder_entry(path.resolve())
    if tag := _TIMM_NAME.fullmatch(id_or_path):
        return ModelEntry(
            id=tag[1],
            title=tag[1],
            task="classify",
            source=f"timm/{tag[1]}",
            untrained=tag[1].split(".")[0],
        )
    ids = ", ".join(entry.id for entry in known)
    raise ValueError(f"unknown model {id_or_path!r}; expected one of {ids}, or a model's folder")


def assets_dir() -> Path:
    """Where bundled weights and examples are: beside the packages, or inside an installed one."""
    package = Path(__file__).resolve().parent
    inside = package / "assets"
    return inside if inside.is_dir() else package.parent / "assets"


def variants_dir() -> Path:
    """Where converted variants of hub models are kept: ``BLR_LAB_DATA`` or the user's data folder.

    It is not made here.
    """
    if configured := os.environ.get("BLR_LAB_DATA"):
        return Path(configured) / "variants"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "blr-lab" / "variants"


def _hub_cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _folder_entry(folder: Path) -> ModelEntry:
    if (folder / "model_index.json").is_file():
        found = read_object(folder / "model_index.json").get("_class_name")
        if found != "DiTPipeline":
            raise ValueError(f"{folder} holds a {found}, expected a DiTPipeline")
        return ModelEntry(str(folder), folder.name, "generate", str(folder))
    if (folder / "config.json").is_file():
        if not read_object(folder / "config.json").get("architecture"):
            raise ValueError(f"{folder / 'config.json'} names no architecture, expected timm's")
        return ModelEntry(str(folder), folder.name, "classify", str(folder))
    raise ValueError(
        f"{folder} is no model: expected model_index.json (a DiTPipeline) or config.json (timm)"
    )


def _summary(path: Path) -> str:
    try:
        config = read_config(path)
        before = sum(
            layer["in_features"] * layer["out_features"] for layer in config["layers"].values()
        )
        after = sum(layer["parameters"] for layer in config["layers"].values())
        return f"{after / before:.0%} of the converted weights"
    except CheckpointError as error:
        return str(error)
    except (KeyError, TypeError, ZeroDivisionError):
        return "its layers cannot be read"
