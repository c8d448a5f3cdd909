"""BLAST's mixing of many blocks on Hopper, in Gluon.

For each rank r it is a product for the tensor cores, of the scales ``coupling[:, :, r] (b, b)`` and
``h[:, r] (b, tokens)``. Which token is which column of a product is free. So a thread loads eight
tokens in a row, 16 bytes, as its part of eight products, and stores their results as it loads:
neither goes through shared memory. A result takes the place of what a warp has read for it.
"""

# Gluon gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from blr_kernels.ops.hopper_grid import grid_launch_dependents, grid_wait
from blr_kernels.ops.paths import Call

MOST_BLOCKS: Final = 32
"""Blocks that ``launch_mix_many`` takes."""

WARP_TOKENS = gl.constexpr(64)
"""Tokens of a warp's products: eight of eight columns each."""
ROWS = gl.constexpr(16)
"""Blocks of a product."""

_WARPS = 16  # of a multiprocessor
_REGISTERS = 65_536 // (32 * _WARPS)  # of a thread


@gluon.constexpr_function
def _layout(registers, lanes, warps, blocks):
    """Of h or z ``(blocks, 8 * warps, 8)``; a thread has all eight of the last dimension."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], *registers],
        lane_bases=lanes,
        warp_bases=[[0, 8 << n, 0] for n in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[blocks, 8 * warps, 8],
    )


@gluon.constexpr_function
def _loaded_layout(blocks, warps):
    """Of h: its columns ``(blocks, 8)`` of a product are the second operand's."""
    more = [[16, 0, 0]] if blocks > 16 else []
    lanes = [[2, 0, 0], [4, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return _layout([[1, 0, 0], [8, 0, 0], *more], lanes, warps, blocks)


@gluon.constexpr_function
def _stored_layout(warps):
    """Of z: its columns ``(16, 8)`` of a product are an accumulator's."""
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return _layout([[0, 1, 0], [8, 0, 0]], lanes, warps, 16)


@gluon.jit
def _along(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0, 1, 2 and so on along one axis of three, of size 1 along the others."""
    low: gl.constexpr = 1 if axis == 0 else 0
    high: gl.constexpr = 1 if axis == 2 else 2
    index = gl.arange(0, size, gl.SliceLayout(low, gl.SliceLayout(high, layout)))
    return gl.expand_dims(gl.expand_dims(index, low), high)


@gluon.jit
def _tokens(layout: gl.constexpr):
    """Tokens of a tile ``(1, 8 * warps, 8)``, and the first of each one's warp."""
    group = _along(1, 8 * gl.num_warps(), layout)
    # What a quad of threads stores at once lies in a row.
    token = (group // 8 * 8 + group % 2 * 4 + group % 8 // 2) * 8 + _along(2, 8, layout)
    return token, group // 8 * WARP_TOKENS


@gluon.jit
def _hold_scales(
    coupling_ptr,
    first_rank,
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    PADDED: gl.constexpr,
    BLOCK_R: gl.constexpr,
):
    """Shared memory ``(BLOCK_R * PADDED, PADDED)``: zeros where there is no block or rank."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, BLOCK_R], [2, 16, 1], [gl.num_warps(), 1, 1], [2, 1, 0]
    )
    i = _along(0, PADDED, layout)
    j = _along(1, PADDED, layout)
    r = first_rank + _along(2, BLOCK_R, layout)
    mask = (i < BLOCKS) & (j < BLOCKS) & (r < RANK)
    scales = gl.load(coupling_ptr + (i * BLOCKS + j) * RANK + r, mask=mask, other=0.0)
    scales = gl.reshape(gl.permute(scales, (2, 0, 1)), [BLOCK_R * PADDED, PADDED])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 128 // PADDED // 2, PADDED // 8, [1, 0])
    return gl.allocate_shared_memory(scales.dtype, scales.shape, shared, scales)


@gluon.jit
def mix_many_kernel(
    h_ptr,  # (BLOCKS, RANK, h_block), contiguous; tokens in any order; becomes z
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    tokens,  # of a row that are mixed, a multiple of 64
    h_block,  # a multiple of 64
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    PADDED: gl.constexpr,  # blocks and those of zeros beside them: 16 or 32
    BLOCK_R: gl.constexpr,  # ranks of a program
    AHEAD: gl.constexpr,  # ranks whose h is asked for before the first is multiplied
):
    """``z[i, r, t] = sum_j coupling[i, j, r] * h[j, r, t]``, 64 tokens a warp."""
    warps: gl.constexpr = gl.num_warps()
    tile: gl.constexpr = WARP_TOKENS * warps
    products: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, warps], [ROWS, 8])
    first: gl.constexpr = gl.DotOperandLayout(0, products, 2)
    second: gl.constexpr = gl.DotOperandLayout(1, products, 2)
    loaded: gl.constexpr = _loaded_layout(PADDED, warps)
    stored: gl.constexpr = _stored_layout(warps)
    dtype: gl.constexpr = h_ptr.dtype.element_ty
    first_rank = gl.program_id(1) * BLOCK_R
    # The kernel after this one reads nothing but what is older than the op before it waits.
    grid_launch_dependents()
    scales = _hold_scales(coupling_ptr, first_rank, BLOCKS, RANK, PADDED, BLOCK_R)
    start = gl.program_id(0) * tile
    row = first_rank.to(gl.int64) * h_block + start
    # 32 bits hold any place in h, which lies in a bounded scratch.
    plane = h_block * RANK
    j = _along(0, PADDED, loaded)
    token, warp_token = _tokens(loaded)
    h_at = j * plane + token
    h_mask = (j < BLOCKS) & (warp_token < tokens - start)
    i = _along(0, ROWS, stored)
    token, warp_token = _tokens(stored)
    z_at = i * plane + token
    z_mask = warp_token < tokens - start
    grid_wait()
    blocks = ()
    for n in gl.static_range(BLOCK_R + AHEAD):
        if n < BLOCK_R:
            mask = h_mask
            if RANK % BLOCK_R:
                mask = mask & (first_rank + n < RANK)
            h = gl.load(h_ptr + row + n * h_block + h_at, mask=mask, other=0.0)
            blocks = blocks + (h,)  # noqa: RUF005
        if n >= AHEAD:
            h = gl.reshape(gl.permute(blocks[n - AHEAD], (0, 2, 1)), [PADDED, tile])
            h = gl.convert_layout(h, second, assert_trivial=True)
            z_row = h_ptr + row + (n - AHEAD) * h_block
            for top in gl.static_range(0, PADDED, ROWS):
                s = scales.slice((n - AHEAD) * PADDED + top, ROWS, 0).load(first)
                z = mma_v2(s, h, gl.zeros([ROWS, tile], gl.float32, products)).to(dtype)
                z = gl.permute(gl.reshape(z, [ROWS, 8, 8 * warps]), (0, 2, 1))
                z = gl.convert_layout(z, stored, assert_trivial=True)
                mask = z_mask & (i < BLOCKS - top)
                if RANK % BLOCK_R:
                    mask = mask & (first_rank + n - AHEAD < RANK)
                gl.store(z_row + top * plane + z_at, z, mask=mask)


def _padded(blocks: int) -> int:
    return triton.cdiv(blocks, ROWS.value) * ROWS.value


def mix_many_bytes(blocks: int, rows: int, itemsize: int) -> int:
    """Shared memory of a launch."""
    return rows * _padded(blocks) ** 2 * itemsize


def mix_many_shapes(call: Call, tokens: int) -> list[tuple[int, int]]:
    """Ranks and tokens of a program that are worth timing, the likely best first.

    Args:
        tokens: that are walked at once.
    """
    most = max(WARP_TOKENS.value, triton.next_power_of_2(tokens))
    shapes = [
        (rows, min(columns, most))
        for rows, columns in ((2, 128), (2, 256), (4, 256), (8, 256), (8, 512))
    ]
    programs = [triton.cdiv(call.rank, rows) * triton.cdiv(tokens, n) for rows, n in shapes]
    warps = [n * shape[1] // WARP_TOKENS.value for n, shape in zip(programs, shapes, strict=True)]
    # The largest that fill most of the device, and its neighbours.
    enough = _WARPS * call.device.sms * 3 // 4
    best = max((n for n in range(len(shapes)) if warps[n] >= enough), default=0)
    order = sorted(range(len(shapes)), key=lambda n: abs(n - best))
    return list(dict.fromkeys(shapes[n] for n in order))[:3]


def launch_mix_many(h: Tensor, coupling: Tensor, tokens: int, *, rows: int, columns: int) -> None:
    """Launches ``mix_many_kernel`` once, after a kernel that follows all of its call's inputs.

    Args:
        h: ``(b, r, h_block)``, contiguous, ``h_block`` a multiple of 64; becomes z.
        coupling: ``(b, b, r)``, contiguous.
        tokens: of a row that are mixed, a multiple of 64.
        rows: ranks of a program, a power of two.
        columns: tokens of a program, 64 for each of its warps, a power of two.
    """
    blocks, rank, h_block = h.shape
    padded = _padded(blocks)
    mix_many_kernel[(triton.cdiv(tokens, columns), triton.cdiv(rank, rows))](
        h,
        coupling,
        tokens,
        h_block,
        BLOCKS=blocks,
        RANK=rank,
        PADDED=padded,
        BLOCK_R=rows,
        # More would not stay in registers.
        AHEAD=1 if padded == ROWS.value else 0,
        num_warps=columns // WARP_TOKENS.value,
        maxnreg=_REGISTERS,
        launch_pdl=True,
    )
