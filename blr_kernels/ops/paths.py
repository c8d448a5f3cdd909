"""What one call of a layer is, and the ways there are to compute it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_kernels.reference import Activation

Config = Mapping[str, int]
"""Sizes of a launch, by name; plain ints, so that a tuned one is a line of JSON."""

DEFAULT_SHARED_BYTES = 48 * 1024
"""Shared memory that every CUDA device grants a block; also the limit of an interpreted kernel."""


@dataclass(frozen=True)
class DeviceLimits:
    """What a launch may use on a device.

    Attributes:
        name: as the driver tells it, "cpu" for the interpreter.
        capability: compute capability, (0, 0) for the interpreter.
        shared_bytes: most shared memory a block may ask for.
        sms: streaming multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    sms: int


@functools.cache
def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of ``device``; those of the interpreter for one that is no CUDA device."""
    if device.type != "cuda":
        return DeviceLimits("cpu", (0, 0), DEFAULT_SHARED_BYTES, 1)
    found = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        found.name,
        (found.major, found.minor),
        int(found.shared_memory_per_block_optin),
        found.multi_processor_count,
    )


@dataclass(frozen=True)
class Call:
    """One call of one layer: all that a choice of path or launch config may depend on.

    Attributes:
        op: "blast", "monarch" or "low_rank".
        tokens: rows of x.
        in_features, out_features: of the layer, multiples of ``blocks``.
        blocks: b; 1 for low rank.
        rank: r.
        dtype: of x, factors and output.
        device: limits of the device it runs on.
    """

    op: str
    tokens: int
    in_features: int
    out_features: int
    blocks: int
    rank: int
    dtype: torch.dtype
    device: DeviceLimits

    @property
    def p(self) -> int:
        """Columns of an input block."""
        return self.in_features // self.blocks

    @property
    def q(self) -> int:
        """Rows of an output block."""
        return self.out_features // self.blocks

    @property
    def inner(self) -> int:
        """Monarch's m: the rank that one input block gives to one output block."""
        return self.rank // self.blocks

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


Run = Callable[
    [Call, Tensor, tuple[Tensor, ...], Tensor | None, Activation | None, Tensor, Config], None
]


@dataclass(frozen=True)
class Path:
    """One way to compute an op.

    Attributes:
        name: as in tuned configs and benchmarks.
        op: the op it computes.
        why_not: the reason why it cannot take a call, "" if it can.
        default_config: launch sizes that are safe wherever ``why_not`` is "".
        candidates: launch sizes worth timing, the default among them.
        run: computes ``x (tokens, in)``, factors in the op's order, ``bias (out)`` or None,
            activation -> ``out (tokens, out)``, contiguous, written whole. x has a contiguous last
            dimension, the factors are contiguous, tokens is at least 1.
    """

    name: str
    op: str
    why_not: Callable[[Call], str]
    default_config: Callable[[Call], Config]
    candidates: Callable[[Call], Sequence[Config]]
    run: Run
