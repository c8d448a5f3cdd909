"""Validation shared by the public ops: every message states what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVarTuple, cast

import torch
from torch import Tensor

from blr_kernels.reference import ACTIVATIONS

Tensors = TypeVarTuple("Tensors")


def check_tensors(tensors: Mapping[str, Tensor | None]) -> None:
    """Checks that all given tensors share the floating dtype and the device of the first.

    Raises:
        TypeError: for what is no tensor, no floating point, or of another dtype than the first.
        ValueError: for another device than that of the first.
    """
    first: tuple[str, Tensor] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if first is None:
            first = name, tensor
            if not tensor.is_floating_point():
                raise TypeError(f"{name} must have a floating dtype, got {tensor.dtype}")
            continue
        if tensor.dtype != first[1].dtype:
            raise TypeError(
                f"{name} must have the dtype of {first[0]}, {first[1].dtype}, got {tensor.dtype}"
            )
        if tensor.device != first[1].device:
            raise ValueError(
                f"{name} must be on the device of {first[0]}, {first[1].device}, "
                f"got {tensor.device}"
            )


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless ``tensor`` has the shape ``expected``."""
    if tensor.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")


def check_dims(name: str, tensor: Tensor, layout: str) -> None:
    """Raises ValueError unless ``tensor`` has the dimensions of ``layout``, none of them 0."""
    dims = layout.count(",") + 1
    if tensor.dim() != dims or 0 in tensor.shape:
        raise ValueError(
            f"{name} must have shape {layout} with sizes of at least 1, got {tuple(tensor.shape)}"
        )


def check_input(x: Tensor, in_features: int) -> None:
    """Raises ValueError unless ``x`` is ``(..., in_features)``."""
    if x.dim() < 1 or x.shape[-1] != in_features:
        raise ValueError(f"x must have shape (..., {in_features}), got {tuple(x.shape)}")


def check_activation(activation: str | None) -> None:
    """Raises ValueError unless ``activation`` is known."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )


def autocast(x: Tensor, *others: *Tensors) -> tuple[Tensor, *Tensors]:
    """Casts to the autocast dtype where autocast is on, as ``F.linear`` does there.

    The device of x decides. float64 stays as it is, which is PyTorch's own rule.
    """
    tensors = (x, *others)
    if not isinstance(x, Tensor) or x.device.type == "meta":
        return tensors
    if not torch.is_autocast_enabled(x.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    cast_tensors = tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )
    return cast("tuple[Tensor, *Tensors]", cast_tensors)  # quoted: a compiler traces this line
