"""BLAST on Triton: one kernel from x to the mixed intermediate, one product from it to y."""

# Triton gives a kernel's parameters their types at launch, and a tuple in it may grow.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops.triton_config import accumulators, mix_tiles, tokens_per_chunk
from blr_kernels.ops.triton_product import (
    dot,
    input_precision,
    launch_product,
    must_widen,
    rows_of,
    shared_limit,
)
from blr_kernels.reference import Activation


@triton.jit(do_not_specialize=["tokens"])
def mix_kernel(
    x_ptr,  # (tokens, BLOCKS * P), strides (x_token, 1)
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    right_ptr,  # (BLOCKS, RANK, P), contiguous
    z_ptr,  # (BLOCKS, tokens, RANK), strides (z_block, RANK, 1)
    tokens,
    x_token,
    z_block,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    ACCUMULATORS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``z[i, t, :] = sum_j coupling[i, j, :] * (right[j] @ x[t, j*P : (j + 1)*P])``.

    A program owns a tile of rank and tokens for ACCUMULATORS output blocks i, so each product
    with ``right[j]`` is computed once for all of them. Rank is the M dimension of the dot: a
    thread then holds few rows, and needs few values of the coupling.
    """
    tiles_r: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    tile = tl.program_id(0)
    first = tl.program_id(1) * ACCUMULATORS
    offs_t = (tile // tiles_r) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_r = (tile % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < tokens
    mask_r = offs_r < RANK
    token = offs_t.to(tl.int64)
    rank = offs_r.to(tl.int64)
    x_tile = x_ptr + token[None, :] * x_token + offs_k[:, None]
    right_tile = right_ptr + rank[:, None] * P + offs_k[None, :]
    coupling_row = coupling_ptr + first.to(tl.int64) * (BLOCKS * RANK) + rank

    accs = (tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32),)
    for _ in tl.static_range(1, ACCUMULATORS):
        accs = accs + (tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32),)  # noqa: RUF005
    for j in tl.range(0, BLOCKS):
        product = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32)
        for k in range(0, P, BLOCK_K):
            mask_k = offs_k < P - k
            right = tl.load(
                right_tile + j * (RANK * P) + k,
                mask=mask_r[:, None] & mask_k[None, :],
                other=0.0,
            )
            x = tl.load(x_tile + j * P + k, mask=mask_k[:, None] & mask_t[None, :], other=0.0)
            product = dot(right, x, product, INPUT_PRECISION, WIDEN)
        mixed = ()
        for i in tl.static_range(ACCUMULATORS):
            s = tl.load(
                coupling_row + (i * BLOCKS + j) * RANK,
                mask=mask_r & (first + i < BLOCKS),
                other=0.0,
            )
            mixed = mixed + (accs[i] + s.to(tl.float32)[:, None] * product,)  # noqa: RUF005
        accs = mixed

    z_tile = z_ptr + first.to(tl.int64) * z_block + token[:, None] * RANK + offs_r[None, :]
    mask_z = mask_t[:, None] & mask_r[None, :]
    for n in tl.static_range(ACCUMULATORS):
        z = tl.trans(accs[n]).to(z_ptr.dtype.element_ty)
        tl.store(z_tile + n * z_block, z, mask=mask_z & (first + n < BLOCKS))


def launch_mix(x: Tensor, coupling: Tensor, right: Tensor, z: Tensor) -> None:
    """Launches ``mix_kernel`` once.

    Args:
        x: ``(tokens, b*p)`` with a contiguous last dimension.
        coupling: ``(b, b, r)``, contiguous.
        right: ``(b, r, p)``, contiguous.
        z: written; ``(b, tokens, r)``, the last two dimensions contiguous.
    """
    blocks, rank, columns = right.shape
    tokens = x.shape[0]
    tiles = mix_tiles(
        tokens, rank, columns, itemsize=x.element_size(), shared_limit=shared_limit(x.device)
    )
    share = accumulators(blocks)
    grid = (
        triton.cdiv(tokens, tiles.tokens) * triton.cdiv(rank, tiles.rows),
        triton.cdiv(blocks, share),
    )
    mix_kernel[grid](
        x,
        coupling,
        right,
        z,
        tokens,
        x.stride(0),
        z.stride(0),
        BLOCKS=blocks,
        RANK=rank,
        P=columns,
        ACCUMULATORS=share,
        INPUT_PRECISION=input_precision(x.dtype),
        WIDEN=must_widen(x),
        BLOCK_R=tiles.rows,
        BLOCK_T=tiles.tokens,
        BLOCK_K=tiles.inner,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def blast_forward(
    x: Tensor,
    left: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    """``x (..., b*p)``, ``left (b, q, r)``, ``coupling (b, b, r)``, ``right (b, r, p)``,
    ``bias (b*q)`` -> ``(..., b*q)``.
    """
    blocks, rows, rank = left.shape
    out = x.new_empty((*x.shape[:-1], blocks * rows))
    if out.numel() == 0:
        return out
    x2 = rows_of(x)
    tokens = x2.shape[0]
    y3 = out.view(tokens, blocks, rows).transpose(0, 1)
    by_block = None if bias is None else bias.view(blocks, rows)
    left, coupling, right = left.contiguous(), coupling.contiguous(), right.contiguous()
    chunk = tokens_per_chunk(tokens, blocks * rank * x.element_size())
    hidden = x.new_empty((blocks, chunk, rank))
    with torch.cuda.device_of(x):
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            z = hidden[:, : stop - start]
            launch_mix(x2[start:stop], coupling, right, z)
            launch_product(z, left, y3[:, start:stop], bias=by_block, activation=activation)
    return out
