"""Least time of a linear layer on a device: the bytes it must move and the products it must do.

Imports no torch. A bound counts compulsory traffic only (x read once, weights read once, y
written once) and no intermediate, so no implementation can beat it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blr_kernels.structures import Blast, Structure


@dataclass(frozen=True)
class Device:
    """Two ceilings of a device.

    Attributes:
        name: as shown to people.
        bytes_per_s: memory bandwidth.
        flops_per_s: of matrix products in the dtype in question.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "flops_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


H200_BF16 = Device("NVIDIA H200, bf16", bytes_per_s=4.3e12, flops_per_s=790e12)
"""The ceilings measured on such a card, below those of its data sheet."""


@dataclass(frozen=True)
class Cost:
    """What one call of a layer costs at least.

    Attributes:
        bytes: compulsory traffic in bytes.
        flops: floating-point operations of matrix products; BLAST's coupling runs beside them on
            the ordinary cores and is not counted.
    """

    bytes: int
    flops: int

    def seconds(self, device: Device) -> float:
        """The bound: the larger of the two least times, in seconds."""
        return max(self.bytes / device.bytes_per_s, self.flops / device.flops_per_s)

    def limit(self, device: Device) -> Literal["memory", "compute"]:
        """Which of the two ceilings decides."""
        by_memory = self.bytes / device.bytes_per_s >= self.flops / device.flops_per_s
        return "memory" if by_memory else "compute"


def layer_cost(
    in_features: int,
    out_features: int,
    tokens: int,
    itemsize: int,
    structure: Structure | None = None,
    *,
    bias: bool = False,
) -> Cost:
    """Cost of ``(tokens, in) -> (tokens, out)``.

    Args:
        in_features, out_features, tokens: sizes of the call.
        itemsize: bytes of an element of x, weight and y.
        structure: of the weight; None is a dense one.
        bias: whether a bias is read.

    Raises:
        ValueError: if a size is not positive (``tokens`` may be 0) or the structure does not fit.
    """
    sizes = {"in_features": in_features, "out_features": out_features, "itemsize": itemsize}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, got {tokens}")
    if structure is None:
        parameters = products = in_features * out_features
    else:
        parameters = structure.parameter_count(in_features, out_features)
        products = parameters
        if isinstance(structure, Blast):
            products -= structure.blocks**2 * structure.rank
    elements = parameters + tokens * (in_features + out_features) + (out_features if bias else 0)
    return Cost(bytes=elements * itemsize, flops=2 * products * tokens)
