"""The products of all input blocks on Hopper, in Gluon: x -> h.

A program owns 128 rows of ``right`` of one input block and a tile of tokens. Two consumer warp
groups split the rows, so that x, the larger operand, is read by as few programs as there are tiles
of rank.

h is written as ``hopper_mix`` writes z: token by token along a row of rank, in the order of
``stored_token`` with groups of 32.
"""

# Gluon gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from blr_kernels.ops.hopper_grid import grid_launch_dependents, grid_wait, prefetch_descriptors
from blr_kernels.ops.hopper_launch import BARRIER_BYTES, OPTIONS, descriptor
from blr_kernels.ops.hopper_product import in_row_order, stored_layout
from blr_kernels.ops.paths import Call

TILE_RANK = gl.constexpr(128)  # of a program
SHARE = gl.constexpr(64)  # of a consumer
CONSUMERS = gl.constexpr(2)
BLOCK_K = gl.constexpr(64)
GROUP = gl.constexpr(32)  # tokens that change places among each other
TILES = (64, 128, 160, 192)
"""Tokens that a program may take."""


@gluon.jit
def _load_x(
    x_desc,
    x_rest_desc,
    x_smem,
    x_rest,
    bar,
    stage,
    token,
    column,
    BLOCK_T: gl.constexpr,
    REST: gl.constexpr,
):
    tma.async_copy_global_to_shared(x_desc, [token, column], bar, x_smem.index(stage))
    if REST > 0:
        tma.async_copy_global_to_shared(
            x_rest_desc, [token + BLOCK_T, column], bar, x_rest.index(stage)
        )


@gluon.jit
def _load(
    x_desc,
    x_rest_desc,
    right_desc,
    x_smem,
    x_rest,
    right_smem,
    ready,
    empty,
    token,
    block,
    row,
    P: gl.constexpr,
    BLOCK_T: gl.constexpr,
    REST: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    """The producer: one warp that issues every TMA load."""
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    filled: gl.constexpr = STAGES if steps > STAGES else steps
    item: gl.constexpr = x_desc.dtype.primitive_bitwidth // 8
    stage_bytes: gl.constexpr = (TILE_RANK + BLOCK_T + REST) * BLOCK_K * item
    column = block * P
    for k in gl.static_range(filled):
        bar = ready.index(k)
        mbarrier.expect(bar, stage_bytes)
        tma.async_copy_global_to_shared(right_desc, [0, row, k * BLOCK_K], bar, right_smem.index(k))
        if not EARLY:
            _load_x(
                x_desc,
                x_rest_desc,
                x_smem,
                x_rest,
                bar,
                k,
                token,
                column + k * BLOCK_K,
                BLOCK_T,
                REST,
            )
    if EARLY:
        grid_wait()
        for k in gl.static_range(filled):
            _load_x(
                x_desc,
                x_rest_desc,
                x_smem,
                x_rest,
                ready.index(k),
                k,
                token,
                column + k * BLOCK_K,
                BLOCK_T,
                REST,
            )
    stage = 0
    phase = 0
    for k in range(filled, steps):
        mbarrier.wait(empty.index(stage), phase)
        bar = ready.index(stage)
        mbarrier.expect(bar, stage_bytes)
        tma.async_copy_global_to_shared(
            right_desc, [0, row, k * BLOCK_K], bar, right_smem.index(stage)
        )
        _load_x(
            x_desc,
            x_rest_desc,
            x_smem,
            x_rest,
            bar,
            stage,
            token,
            column + k * BLOCK_K,
            BLOCK_T,
            REST,
        )
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _store(
    acc,
    h_ptr,
    h_block,
    first,
    block,
    rank_from,
    consumer: gl.constexpr,
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    GROUPED: gl.constexpr,
    KEEP: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """Stores ``acc (64, TOKENS)``, whose first token is ``first``."""
    stored: gl.constexpr = stored_layout(SHARE, TOKENS)
    acc = in_row_order(acc.to(h_ptr.dtype.element_ty), SHARE, TOKENS)
    at = consumer * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, stored))
    position = first + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    mask = gl.expand_dims(position < h_block, 0)
    if GROUPED:
        inner: gl.constexpr = RANK // BLOCKS
        row = at // inner * RANK + block * inner + at % inner
    else:
        rank = rank_from + at
        row = block * RANK + rank
        mask = mask & gl.expand_dims(rank < RANK, 1)
    row_ptr = h_ptr + row.to(gl.int64) * h_block
    gl.store(
        gl.expand_dims(row_ptr, 1) + gl.expand_dims(position, 0),
        acc,
        mask=mask,
        eviction_policy="evict_last" if KEEP else "",
    )


@gluon.jit
def _multiply(
    h_ptr,
    h_block,
    x_smem,
    x_rest,
    right_smem,
    ready,
    empty,
    token,
    block,
    rank_from,
    consumer: gl.constexpr,
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    P: gl.constexpr,
    GROUPED: gl.constexpr,
    KEEP: gl.constexpr,
    BLOCK_T: gl.constexpr,
    REST: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    """A consumer warp group: half of the rank of this program, all of its tokens."""
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    rest: gl.constexpr = REST if REST > 0 else 32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rest, 16])
    sums = warpgroup_mma_init(gl.zeros((SHARE, BLOCK_T), gl.float32, layout))
    more = warpgroup_mma_init(gl.zeros((SHARE, rest), gl.float32, rest_layout))
    for k in range(steps):
        stage = k % STAGES
        mbarrier.wait(ready.index(stage), (k // STAGES) & 1)
        rows = right_smem.index(stage).reshape((TILE_RANK, BLOCK_K))
        rows = rows.slice(consumer * SHARE, SHARE)
        sums = warpgroup_mma(rows, x_smem.index(stage).permute((1, 0)), sums, is_async=True)
        if REST > 0:
            more = warpgroup_mma(rows, x_rest.index(stage).permute((1, 0)), more, is_async=True)
            before = warpgroup_mma_wait(2, deps=(sums, more))
            sums = warpgroup_mma_init(before[0])
            more = warpgroup_mma_init(before[1])
        else:
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
        if k > 0:
            mbarrier.arrive(empty.index((k - 1) % STAGES), count=1)
    # Nobody waits for the stage of the last step to be empty.
    done = warpgroup_mma_wait(0, deps=(sums, more))
    if EARLY:
        grid_wait()
    _store(
        done[0],
        h_ptr,
        h_block,
        token,
        block,
        rank_from,
        consumer,
        BLOCKS,
        RANK,
        GROUPED,
        KEEP,
        BLOCK_T,
    )
    if REST > 0:
        _store(
            done[1],
            h_ptr,
            h_block,
            token + BLOCK_T,
            block,
            rank_from,
            consumer,
            BLOCKS,
            RANK,
            GROUPED,
            KEEP,
            REST,
        )


@gluon.jit
def hopper_first_kernel(
    x_desc,  # (tokens, BLOCKS * P), blocks of (BLOCK_T, 64)
    x_rest_desc,  # the same in blocks of (REST, 64); unused where REST is 0
    right_desc,  # (1, BLOCKS * RANK, P), blocks of (1, 128, 64); if GROUPED (BLOCKS, RANK, P),
    # blocks of (BLOCKS, RANK / BLOCKS, 64): row j * BLOCKS + l of input block k at (l, k, j)
    h_ptr,  # (BLOCKS, RANK, h_block), contiguous; tokens in the order of stored_token
    h_block,  # tokens of h, a multiple of 64
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    P: gl.constexpr,
    GROUPED: gl.constexpr,  # rank is 128, and h by output block, as Monarch's second product is
    KEEP: gl.constexpr,  # the cache drops other lines before those of h
    BLOCK_T: gl.constexpr,
    REST: gl.constexpr,  # tokens of a tile beyond BLOCK_T, 0, 32 or 64
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,  # right is older than the kernel ahead
    REGISTERS: gl.constexpr,  # of a consumer's thread
):
    """``h[k, :, t] = right[k] @ x[t, k*P : (k + 1)*P]``; if GROUPED row j * BLOCKS + l of it is at
    ``h[l, k * RANK / BLOCKS + j, t]``.
    """
    tiles: gl.constexpr = (RANK + TILE_RANK - 1) // TILE_RANK
    # Programs that read the same x run at the same time.
    program = gl.program_id(0)
    rank_from = (program % tiles) * TILE_RANK
    block = (program // tiles) % BLOCKS
    token = (program // tiles // BLOCKS) * (BLOCK_T + REST)
    row = block * (RANK // BLOCKS) if GROUPED else block * RANK + rank_from

    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_T, BLOCK_K], x_desc.layout)
    x_rest = x_smem
    if REST > 0:
        x_rest = gl.allocate_shared_memory(
            x_desc.dtype, [STAGES, REST, BLOCK_K], x_rest_desc.layout
        )
    planes: gl.constexpr = BLOCKS if GROUPED else 1
    right_smem = gl.allocate_shared_memory(
        right_desc.dtype, [STAGES, planes, TILE_RANK // planes, BLOCK_K], right_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(empty.index(n), count=CONSUMERS)
    prefetch_descriptors("hopper_first_kernel", (0, 5, 10) if REST > 0 else (0, 10))
    if not EARLY:
        grid_wait()
    grid_launch_dependents()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    h_ptr,
                    h_block,
                    x_smem,
                    x_rest,
                    right_smem,
                    ready,
                    empty,
                    token,
                    block,
                    rank_from,
                    0,
                    BLOCKS,
                    RANK,
                    P,
                    GROUPED,
                    KEEP,
                    BLOCK_T,
                    REST,
                    STAGES,
                    EARLY,
                ),
            ),
            (
                _multiply,
                (
                    h_ptr,
                    h_block,
                    x_smem,
                    x_rest,
                    right_smem,
                    ready,
                    empty,
                    token,
                    block,
                    rank_from,
                    1,
                    BLOCKS,
                    RANK,
                    P,
                    GROUPED,
                    KEEP,
                    BLOCK_T,
                    REST,
                    STAGES,
                    EARLY,
                ),
            ),
            (
                _load,
                (
                    x_desc,
                    x_rest_desc,
                    right_desc,
                    x_smem,
                    x_rest,
                    right_smem,
                    ready,
                    empty,
                    token,
                    block,
                    row,
                    P,
                    BLOCK_T,
                    REST,
                    STAGES,
                    EARLY,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def first_bytes(call: Call, tokens_tile: int, stages: int) -> int:
    """Shared memory of a launch."""
    rows = TILE_RANK.value + tokens_tile
    return stages * rows * BLOCK_K.value * call.itemsize + BARRIER_BYTES


def _stages(call: Call, tokens_tile: int, shared_bytes: int) -> int:
    """Stages of a ring that a program has use and room for; it wants two."""
    stages = max(2, triton.cdiv(call.p, BLOCK_K.value))
    while stages and first_bytes(call, tokens_tile, stages) > shared_bytes:
        stages -= 1
    return stages


def first_configs(call: Call, tokens: int) -> list[dict[str, int]]:
    """The launch's part of configs worth timing, the likely best first.

    Args:
        tokens: that are walked at once.
    """
    rows = call.blocks * triton.cdiv(call.rank, TILE_RANK.value)

    def cost(tile: int) -> int:
        # What the busiest multiprocessor reads, in rows of right and of x.
        programs = triton.cdiv(tokens, tile) * rows
        return triton.cdiv(programs, call.device.sms) * (TILE_RANK.value + tile)

    found: list[dict[str, int]] = []
    for tile in sorted(TILES, key=cost):
        crowded = triton.cdiv(tokens, tile) * rows > call.device.sms
        # Two programs of the smallest tiles share a multiprocessor where there are enough of them.
        for programs in (2, 1) if tile == TILES[0] and crowded else (1,):
            stages = _stages(call, tile, call.device.shared_bytes // programs)
            config = {"first_tokens": tile, "first_stages": stages}
            if config not in found:
                found.append(config)
    if found[0]["first_stages"] > 2:
        # What is asked for at once may be too much.
        found.insert(1, {**found[0], "first_stages": found[0]["first_stages"] - 1})
    return found


def _keeps(call: Call, x: Tensor, h: Tensor) -> bool:
    """Whether the cache should drop other lines before those of h.

    Where x fills the cache it drives h out, which memory then takes although nobody reads it there.
    """
    return 2 * x.nbytes > call.device.l2_bytes >= 4 * h.nbytes


def launch_first(
    call: Call,
    x: Tensor,
    right: Tensor,
    h: Tensor,
    *,
    tokens_tile: int,
    stages: int,
    grouped: bool,
    early: bool = False,
) -> None:
    """Launches ``hopper_first_kernel`` once.

    Args:
        x: ``(tokens, b*p)``, rows aligned to 16 bytes, p a multiple of 8.
        right: ``(b, r, p)``, contiguous.
        h: written; ``(b, r, h_block)``, contiguous, ``h_block`` a multiple of 64 and at least the
            tokens; its tokens are in the order of ``hopper_mix.stored_token``, groups of 32.
        tokens_tile: tokens of a program, one of ``TILES``.
        stages: of a program's ring, at least 2.
        grouped: plane l of h has rows j*b + l of every input block, as Monarch's output block l
            reads them; r must be 128. Otherwise plane k has the rows of input block k.
        early: whether right was there before the kernel ahead and everything that kernel could
            start before; it is then read, and the next kernel let start, while that one still runs.
    """
    blocks, rank, h_block = h.shape
    # 160 tokens are 128 and 32 more: the sizes of a tensor are powers of two.
    block_t = 1 << (tokens_tile.bit_length() - 1)
    rest = tokens_tile - block_t
    tile = descriptor(x, [block_t, BLOCK_K.value])
    if grouped:
        # Row k*r + j*b + l of right, as (l, k*r/b + j).
        rows = right.view(rank, blocks, call.p).transpose(0, 1)
        box = [blocks, rank // blocks, BLOCK_K.value]
    else:
        rows = right.view(1, blocks * rank, call.p)
        box = [1, TILE_RANK.value, BLOCK_K.value]
    # The smallest tiles leave room for a second program on a multiprocessor.
    two = tokens_tile <= SHARE.value
    grid = triton.cdiv(x.shape[0], tokens_tile) * blocks * triton.cdiv(rank, TILE_RANK.value)
    hopper_first_kernel[(grid,)](
        tile,
        descriptor(x, [rest, BLOCK_K.value]) if rest else tile,
        descriptor(rows, box),
        h,
        h_block,
        BLOCKS=blocks,
        RANK=rank,
        P=call.p,
        GROUPED=grouped,
        KEEP=_keeps(call, x, h),
        BLOCK_T=block_t,
        REST=rest,
        STAGES=stages,
        EARLY=early,
        REGISTERS=104 if two else 240,
        **(OPTIONS | {"maxnreg": 80} if two else OPTIONS),
    )
