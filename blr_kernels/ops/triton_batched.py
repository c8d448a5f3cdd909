"""What PyTorch's batched products leave to do: mixing for BLAST, interleaving for Monarch."""

# Triton gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops.triton_config import power_of_two
from blr_kernels.ops.triton_product import activate, dot, input_precision, must_widen
from blr_kernels.reference import Activation

MOST_MIXED_BLOCKS = 64
"""Blocks that ``launch_mix_blocks`` takes; scales of more would not stay in registers."""

_LEAST = 16  # rows and columns of the smallest product on tensor cores
_MIX_RANKS = 8
_MIX_TOKENS = 128
_MIX_BYTES = 4096  # of h for one rank, which registers hold beside its scales
_WARPS = 4
_TILE = 4096  # outputs of a program that interleaves


@triton.jit(do_not_specialize=["tokens"])
def mix_blocks_kernel(
    h_ptr,  # (BLOCKS, RANK, h_block), contiguous; becomes z
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    tokens,
    h_block,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """``z[i, r, t] = sum_j coupling[i, j, r] * h[j, r, t]``: a product of b x b for each rank.

    A program takes ranks next to each other, whose scales lie in the same lines.
    """
    first = tl.program_id(1) * BLOCK_R
    block = tl.arange(0, PADDED)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    plane = h_block.to(tl.int64) * RANK
    at = block.to(tl.int64)[:, None] * plane + token[None, :]
    mask = (block < BLOCKS)[:, None] & (token < tokens)[None, :]
    scale_at = (block[:, None] * BLOCKS + block[None, :]) * RANK
    scale_mask = (block < BLOCKS)[:, None] & (block < BLOCKS)[None, :]
    for n in tl.static_range(BLOCK_R):
        rank = first + n
        inside = rank < RANK
        scales = tl.load(coupling_ptr + scale_at + rank, mask=scale_mask & inside, other=0.0)
        rows = h_ptr + rank.to(tl.int64) * h_block + at
        h = tl.load(rows, mask=mask & inside, other=0.0)
        z = dot(scales, h, tl.zeros((PADDED, BLOCK_T), tl.float32), INPUT_PRECISION, WIDEN)
        tl.store(rows, z.to(h_ptr.dtype.element_ty), mask=mask & inside)


def launch_mix_blocks(h: Tensor, coupling: Tensor, tokens: int) -> None:
    """Launches ``mix_blocks_kernel`` once.

    Args:
        h: ``(b, r, h_block)``, contiguous, at most ``MOST_MIXED_BLOCKS``; the first ``tokens`` of
            each row become z.
        coupling: ``(b, b, r)``, contiguous.
        tokens: at most ``h_block``.
    """
    blocks, rank, h_block = h.shape
    padded = max(_LEAST, power_of_two(blocks))
    most = min(_MIX_TOKENS, _MIX_BYTES // (padded * h.element_size()))
    columns = max(_LEAST, min(most, power_of_two(tokens)))
    mix_blocks_kernel[(triton.cdiv(tokens, columns), triton.cdiv(rank, _MIX_RANKS))](
        h,
        coupling,
        tokens,
        h_block,
        BLOCKS=blocks,
        RANK=rank,
        PADDED=padded,
        INPUT_PRECISION=input_precision(h.dtype),
        WIDEN=must_widen(h),
        BLOCK_R=_MIX_RANKS,
        BLOCK_T=columns,
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize=["tokens"])
def interleave_kernel(
    y_ptr,  # (BLOCKS, tokens, Q), strides (y_block, Q, 1)
    bias_ptr,  # (BLOCKS * Q,), contiguous; unused unless HAS_BIAS
    out_ptr,  # (tokens, BLOCKS * Q), contiguous
    tokens,
    y_block,
    BLOCKS: tl.constexpr,
    Q: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """``out[t, s * BLOCKS + l] = act(y[l, t, s] + bias[s * BLOCKS + l])``."""
    tiles: tl.constexpr = (Q + BLOCK_S - 1) // BLOCK_S
    offs_t = (tl.program_id(0) // tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = (tl.program_id(0) % tiles) * BLOCK_S
    block = tl.arange(0, PADDED)
    offs_s = first + tl.arange(0, BLOCK_S)
    mask_t = offs_t < tokens
    token = offs_t.to(tl.int64)
    at = block.to(tl.int64)[:, None, None] * y_block + token[None, :, None] * Q
    mask = (block < BLOCKS)[:, None, None] & mask_t[None, :, None] & (offs_s < Q)[None, None, :]
    y = tl.load(y_ptr + at + offs_s[None, None, :], mask=mask, other=0.0)
    y = tl.reshape(tl.permute(y, (1, 2, 0)), (BLOCK_T, BLOCK_S * PADDED)).to(tl.float32)
    place = tl.arange(0, BLOCK_S * PADDED)
    if PADDED == BLOCKS:
        column = first * BLOCKS + place
        mask_n = column < BLOCKS * Q
    else:
        column = (first + place // PADDED) * BLOCKS + place % PADDED
        mask_n = (place % PADDED < BLOCKS) & (column < BLOCKS * Q)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y = activate(y, ACTIVATION).to(out_ptr.dtype.element_ty)
    out = out_ptr + token[:, None] * (BLOCKS * Q) + column[None, :]
    tl.store(out, y, mask=mask_t[:, None] & mask_n[None, :])


def launch_interleave(
    y: Tensor, bias: Tensor | None, activation: Activation | None, out: Tensor
) -> None:
    """Launches ``interleave_kernel`` once.

    Args:
        y: ``(b, tokens, q)``, of which only the blocks may lie apart.
        bias: ``(b*q)``, contiguous, or None.
        activation: after the bias.
        out: written; ``(tokens, b*q)``, contiguous. Of one block it may be y itself.
    """
    blocks, tokens, columns = y.shape
    padded = power_of_two(blocks)
    # 64 halves fill a cache line of each block's row.
    width = min(64, power_of_two(columns), _TILE // padded)
    rows = max(1, _TILE // (padded * width))
    interleave_kernel[(triton.cdiv(tokens, rows) * triton.cdiv(columns, width),)](
        y,
        bias,
        out,
        tokens,
        y.stride(0),
        BLOCKS=blocks,
        Q=columns,
        PADDED=padded,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        BLOCK_T=rows,
        BLOCK_S=width,
        num_warps=_WARPS,
    )
