"""The head of a safetensors file and the config in it. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blr_kernels.structures import structure_from_dict

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
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        raise CheckpointError(f"{path} is not a safetensors file") from None
    expected = 8 + length + end
    if size != expected:
        what = "truncated" if size < expected else "followed by foreign bytes"
        raise CheckpointError(f"{path} is {what}: expected {expected} bytes, got {size}")
    return Header(tensors, metadata)


def read_config(path: str | Path) -> dict[str, Any]:
    """The config that :mod:`model_zoo.checkpoint` wrote into a file's metadata.

    Every layer of it has its sizes, a structure that fits them, the number of its parameters and
    its relative error, or None.

    Raises:
        CheckpointError: not such a file, of another version, or with a config that is damaged.
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
    except (KeyError, ValueError, RecursionError):
        raise CheckpointError(f"{path} has no readable config in its metadata") from None
    if not isinstance(config, dict) or not isinstance(config.get("layers"), dict):
        raise CheckpointError(f"{path} has a config without layers")
    for name, layer in config["layers"].items():
        try:
            _check_layer(layer)
        except KeyError as error:
            raise CheckpointError(f"{path}: layer {name} lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: layer {name} cannot be read: {error}") from None
    return config


def _check_layer(layer: Any) -> None:
    if not isinstance(layer, dict):
        raise TypeError(f"it must be an object, got {layer!r}")
    structure = structure_from_dict(layer["structure"])
    count = structure.parameter_count(layer["in_features"], layer["out_features"])
    if layer["parameters"] != count:
        raise ValueError(f"{structure} has {count} parameters, got {layer['parameters']!r}")
    if layer["relative_error"] is not None and not is_finite_number(layer["relative_error"]):
        raise ValueError(f"relative_error must be a number, got {layer['relative_error']!r}")


def is_finite_number(value: Any) -> bool:
    """Whether JSON gave a number that is neither NaN nor infinite, nor too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
