"""Monarch on Triton: two batched products with the permutation in the first one's stores."""

from __future__ import annotations

import torch
from torch import Tensor

from blr_kernels.ops.triton_config import tokens_per_chunk
from blr_kernels.ops.triton_product import launch_product, rows_of
from blr_kernels.reference import Activation


def monarch_forward(
    x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, activation: Activation | None
) -> Tensor:
    """``x (..., b*p)``, ``left (b, q, r)``, ``right (b, r, p)``, ``bias (b*q)`` -> ``(..., b*q)``.

    The intermediate is ``(l, tokens, k*m + j)``: for each output block l the part of every input
    block's rank that it uses, so that the second product reads it contiguously.
    """
    blocks, rows, rank = left.shape
    inner, columns = rank // blocks, right.shape[2]
    out = x.new_empty((*x.shape[:-1], blocks * rows))
    if out.numel() == 0:
        return out
    tokens = out.numel() // (blocks * rows)
    x3 = rows_of(x).view(tokens, blocks, columns).transpose(0, 1)
    y3 = out.view(tokens, rows, blocks).permute(2, 0, 1)  # output s*b + l belongs to block l
    by_block = None if bias is None else bias.view(rows, blocks).t()
    left, right = left.contiguous(), right.contiguous()
    chunk = tokens_per_chunk(tokens, blocks * rank * x.element_size())
    hidden = x.new_empty((blocks, chunk, rank))
    with torch.cuda.device_of(x):
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            h = hidden[:, : stop - start]
            by_input = h[0].view(stop - start, blocks, inner).transpose(0, 1)
            launch_product(
                x3[:, start:stop], right, by_input, groups=blocks, out_group=hidden.stride(0)
            )
            launch_product(h, left, y3[:, start:stop], bias=by_block, activation=activation)
    return out
