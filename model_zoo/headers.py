"""The head of a safetensors file and the config in it. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "FORMAT",
    "VERSION",
    "CheckpointError",
    "Header",
    "TensorInfo",
    "read_config",
    "read_header",
]

FORMAT = "blr-lab"
VERSION = "1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; one line that says what is wrong."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: dtype as safetensors names it ("F16"), shape, size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: str | Path) -> Header:
    """Read and check the head of a safetensors file, without its tensors.

    Raises:
        CheckpointError: missing, not safetensors, or shorter than its header says.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(size - 8, 100_000_000):
                # A safetensors file cut inside its header looks like any other file.
                raise CheckpointError(f"{path} is not a safetensors file, or is truncated")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        raw = json.loads(text)
        metadata = {str(k): str(v) for k, v in raw.pop("__metadata__", {}).items()}
        tensors = {
            name: TensorInfo(
                info["dtype"],
                tuple(info["shape"]),
                info["data_offsets"][1] - info["data_offsets"][0],
            )
            for name, info in raw.items()
        }
        end = max((info["data_offsets"][1] for info in raw.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise CheckpointError(f"{path} is not a safetensors file") from None
    expected = 8 + length + end
    if size != expected:
        what = "truncated" if size < expected else "followed by foreign bytes"
        raise CheckpointError(f"{path} is {what}: expected {expected} bytes, got {size}")
    return Header(tensors, metadata)


def read_config(path: str | Path) -> dict[str, Any]:
    """The config that :mod:`model_zoo.checkpoint` wrote into a file's metadata.

    Raises:
        CheckpointError: not such a file, or of another version.
    """
    return config_of(path, read_header(path))


def config_of(path: str | Path, header: Header) -> dict[str, Any]:
    """As :func:`read_config`, from a header already read."""
    found = header.metadata.get("format")
    if found != FORMAT:
        raise CheckpointError(f"{path} was not written by BLR Lab (format is {found!r})")
    version = header.metadata.get("version")
    if version != VERSION:
        raise CheckpointError(f"{path} has version {version!r}, this program reads {VERSION!r}")
    try:
        config = json.loads(header.metadata["config"])
    except (KeyError, ValueError):
        raise CheckpointError(f"{path} has no readable config in its metadata") from None
    if not isinstance(config, dict) or not isinstance(config.get("layers"), dict):
        raise CheckpointError(f"{path} has a config without layers")
    return config
