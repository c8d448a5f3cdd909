"""What Hopper's copy engine (TMA) asks of a tensor's memory. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TMA_ALIGNMENT = 16
"""Bytes to which the copy engine wants addresses and row strides aligned."""


def is_aligned(*tensors: Tensor) -> bool:
    """Whether the copy engine may read these: base and row stride of each."""
    return all(
        t.data_ptr() % TMA_ALIGNMENT == 0
        and (t.dim() < 2 or t.stride(-2) * t.element_size() % TMA_ALIGNMENT == 0)
        for t in tensors
    )


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if the copy engine may not read it where it is."""
    return tensor if is_aligned(tensor) else tensor.clone()
