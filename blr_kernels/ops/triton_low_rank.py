"""Low rank on Triton: two products, the second with bias and activation in its epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from blr_kernels.ops.triton_config import tokens_per_chunk
from blr_kernels.ops.triton_product import launch_product, rows_of
from blr_kernels.reference import Activation


def low_rank_forward(
    x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, activation: Activation | None
) -> Tensor:
    """``x (..., in)``, ``left (out, r)``, ``right (r, in)``, ``bias (out)`` -> ``(..., out)``."""
    out_features, rank = left.shape
    out = x.new_empty((*x.shape[:-1], out_features))
    if out.numel() == 0:
        return out
    x2, y2 = rows_of(x), out.view(-1, out_features)
    left, right = left.contiguous()[None], right.contiguous()[None]
    tokens = x2.shape[0]
    chunk = tokens_per_chunk(tokens, rank * x.element_size())
    hidden = x.new_empty((1, chunk, rank))
    with torch.cuda.device_of(x):
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            h = hidden[:, : stop - start]
            launch_product(x2[None, start:stop], right, h)
            launch_product(
                h,
                left,
                y2[None, start:stop],
                bias=None if bias is None else bias[None],
                activation=activation,
            )
    return out
