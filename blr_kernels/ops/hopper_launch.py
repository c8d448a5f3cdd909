"""What the launches of all Gluon kernels on Hopper share."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blr_kernels.ops.paths import Call

# maxnreg: registers a thread may hold where a kernel starts, 65,536 over the 12 warps that it takes
# with its producers. The warp groups then hand theirs to each other.
OPTIONS: Final = {"num_warps": 4, "maxnreg": 168, "launch_pdl": True}
"""Options of a launch, unless it gives other registers."""

BARRIER_BYTES: Final = 1024
"""Shared memory to keep free for barriers."""


def unsupported(call: Call) -> str:
    """The reason why no such kernel takes the call's device or dtype, "" if they do."""
    if call.device.capability != (9, 0):
        major, minor = call.device.capability
        return f"wgmma needs compute capability 9.0, got {major}.{minor}"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {str(call.dtype).removeprefix('torch.')}"
    return ""


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """How TMA moves boxes of size ``block`` between ``tensor`` and shared memory."""
    # The layout depends on the width of an element alone.
    layout = NVMMASharedLayout.get_default_for(block, bfloat16)
    return TensorDescriptor.from_tensor(tensor, block, layout)
