"""Monarch on Hopper, in Gluon: one kernel, no intermediate in global memory.

A program owns 64 tokens. First it computes their h, the product with ``right``, regrouped by
output block l, into shared memory; then it streams ``left`` past it. The accumulators of the four
output blocks, side by side in a thread's registers, are eight outputs in a row: the interleaved
order of Monarch costs nothing.
"""

# Gluon gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from blr_kernels.ops.alignment import is_aligned
from blr_kernels.ops.hopper_grid import grid_launch_dependents, grid_wait
from blr_kernels.ops.hopper_launch import BARRIER_BYTES, OPTIONS, descriptor, unsupported
from blr_kernels.ops.hopper_product import activate, stored_layout
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import SCRATCH_BYTES
from blr_kernels.reference import Activation

BLOCKS = gl.constexpr(4)
INNER = gl.constexpr(32)  # rank that one input block gives to one output block
TILE = gl.constexpr(64)  # tokens of a program, and columns of a box in shared memory
BOXES = gl.constexpr(4)  # of a stage, each of 64 rows and 64 columns
STAGES = gl.constexpr(4)  # so that a stage of the second part always serves the same consumer


@gluon.jit
def _load(
    x_desc,
    right_desc,
    left_desc,
    ring,
    ready,
    empty,
    token,
    first_tile,
    tiles,
    P: gl.constexpr,
    ROWS: gl.constexpr,
):
    """The producer: one warp that issues every TMA load."""
    steps: gl.constexpr = (P + TILE - 1) // TILE
    box_bytes: gl.constexpr = TILE * TILE * x_desc.dtype.primitive_bitwidth // 8
    stage = 0
    phase = 1
    for k in range(BLOCKS):
        for step in gl.static_range(steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, 3 * box_bytes)
            for pair in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    right_desc,
                    [2 * pair, k * INNER, step * TILE],
                    bar,
                    ring.index(stage * BOXES + pair),
                )
            tma.async_copy_global_to_shared(
                x_desc,
                [token, k * P + step * TILE],
                bar,
                ring.index(stage * BOXES + 2).reshape((TILE, TILE)),
            )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
    for tile in range(first_tile, first_tile + tiles):
        for part in gl.static_range(ROWS // INNER):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, BOXES * box_bytes)
            for n in gl.static_range(2):
                for half in gl.static_range(2):
                    # Two output blocks of 32 rows, or one of 64.
                    block = 2 * n if ROWS == INNER else 2 * part + n
                    box = ring.index(stage * BOXES + n * 2 + half)
                    tma.async_copy_global_to_shared(
                        left_desc,
                        [block, tile * ROWS, half * TILE],
                        bar,
                        box.reshape((TILE // ROWS, ROWS, TILE)),
                    )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _first_product(
    ring,
    ready,
    empty,
    first_step,
    consumer: gl.constexpr,
    STEPS: gl.constexpr,
    layout: gl.constexpr,
):
    """``x_k @ right[k]^T`` (64 tokens, 64): two output blocks l, 32 of each."""
    sums = warpgroup_mma_init(gl.zeros((TILE, TILE), gl.float32, layout))
    for n in gl.static_range(STEPS):
        stage = (first_step + n) % STAGES
        mbarrier.wait(ready.index(stage), ((first_step + n) // STAGES) & 1)
        sums = warpgroup_mma(
            ring.index(stage * BOXES + 2).reshape((TILE, TILE)),
            ring.index(stage * BOXES + consumer).reshape((TILE, TILE)).permute((1, 0)),
            sums,
            is_async=True,
        )
        if n > 0:
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
            mbarrier.arrive(empty.index((first_step + n - 1) % STAGES), count=1)
    product = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((first_step + STEPS - 1) % STAGES), count=1)
    return product


@gluon.jit
def _multiply(
    out_ptr,
    bias_ptr,
    bias_smem,
    h_smem,
    ring,
    ready,
    empty,
    h_ready,
    token,
    first_tile,
    tiles,
    tokens,
    consumer: gl.constexpr,
    P: gl.constexpr,
    Q: gl.constexpr,
    ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """A consumer warp group: half of h, then every second stage of ``left``."""
    steps: gl.constexpr = (P + TILE - 1) // TILE
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stored: gl.constexpr = stored_layout(TILE, INNER * BLOCKS)
    parts: gl.constexpr = ROWS // INNER
    if HAS_BIAS and consumer == 0:
        # All of it at once, while h is computed: tile by tile each would wait for it.
        lane = gl.arange(0, INNER * BLOCKS, gl.BlockedLayout([2], [32], [4], [0]))
        for n in range(tiles * parts):
            at = (first_tile * parts + n) * (INNER * BLOCKS) + lane
            async_copy.async_copy_global_to_shared(
                bias_smem.index(n), bias_ptr + at, mask=at < BLOCKS * Q
            )
        async_copy.commit_group()
    for half in gl.static_range(2):
        first = half * 2 * steps
        even = _first_product(ring, ready, empty, first, consumer, steps, wide)
        odd = _first_product(ring, ready, empty, first + steps, consumer, steps, wide)
        # (token, l, j, k) -> (token, k and j, l): what output block l reads of two input blocks.
        both = gl.join(even.to(h_smem.dtype), odd.to(h_smem.dtype))
        both = both.reshape((TILE, 2, INNER, 2)).permute((0, 3, 2, 1)).reshape((TILE, TILE, 2))
        h_even, h_odd = gl.split(both)
        h_smem.index((2 * consumer) * 2 + half).store(h_even)
        h_smem.index((2 * consumer + 1) * 2 + half).store(h_odd)
    if HAS_BIAS and consumer == 0:
        async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(h_ready, count=1)
    mbarrier.wait(h_ready, 0)

    row = token + gl.arange(0, TILE, gl.SliceLayout(1, stored))
    column = gl.arange(0, INNER * BLOCKS, gl.SliceLayout(0, stored))
    out_row = out_ptr + row.to(gl.int64) * (BLOCKS * Q)
    inside = gl.expand_dims(row < tokens, 1)
    for n in range(consumer, tiles, 2):
        sums = ()
        for part in gl.static_range(parts):
            step = BLOCKS * steps + n * parts + part
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            for m in gl.static_range(BLOCKS // parts):
                acc = warpgroup_mma_init(gl.zeros((TILE, ROWS), gl.float32, narrow))
                for half in gl.static_range(2):
                    if ROWS == INNER:
                        weight = (
                            ring.index(stage * BOXES + m // 2 * 2 + half)
                            .reshape((TILE, TILE))
                            .slice(m % 2 * ROWS, ROWS)
                        )
                    else:
                        weight = ring.index(stage * BOXES + m * 2 + half).reshape((TILE, TILE))
                    acc = warpgroup_mma(
                        h_smem.index((part * (BLOCKS // parts) + m) * 2 + half),
                        weight.permute((1, 0)),
                        acc,
                        is_async=True,
                    )
                sums = sums + (acc,)  # noqa: RUF005
        done = warpgroup_mma_wait(0, deps=sums)
        for part in gl.static_range(parts):
            # Both consumers free a stage of the first part, one alone a stage of the second.
            mbarrier.arrive(empty.index((BLOCKS * steps + n * parts + part) % STAGES), count=2)
        y = gl.join(gl.join(done[0], done[1]), gl.join(done[2], done[3]))
        y = y.permute((0, 1, 3, 2)).reshape((TILE, parts, INNER * BLOCKS))
        if parts == 2:
            pieces = gl.split(y.permute((0, 2, 1)))
        else:
            pieces = (y.reshape((TILE, INNER * BLOCKS)),)
        for part in gl.static_range(parts):
            at = ((first_tile + n) * parts + part) * (INNER * BLOCKS) + column
            piece = gl.convert_layout(pieces[part], stored, assert_trivial=True)
            if HAS_BIAS:
                bias = bias_smem.index(n * parts + part).load(gl.SliceLayout(0, stored))
                piece = piece + gl.expand_dims(bias.to(gl.float32), 0)
            piece = activate(piece, ACTIVATION, out_ptr.dtype.element_ty)
            gl.store(
                gl.expand_dims(out_row, 1) + gl.expand_dims(at, 0),
                piece.to(out_ptr.dtype.element_ty),
                mask=inside & gl.expand_dims(at < BLOCKS * Q, 0),
            )


@gluon.jit(do_not_specialize=["tokens"])
def hopper_monarch_kernel(
    x_desc,  # (tokens, 4 * P), blocks of (64, 64)
    right_desc,  # (4 l, 4 * 32, P) view of right, blocks of (2, 32, 64)
    left_desc,  # (4, Q, 128), blocks of (64 / ROWS, ROWS, 64)
    out_ptr,  # (tokens, 4 * Q), contiguous
    bias_ptr,  # (4 * Q,), aligned to 16 bytes; unused unless HAS_BIAS
    tokens,
    P: gl.constexpr,
    Q: gl.constexpr,
    ROWS: gl.constexpr,  # of every output block in a tile, 32 or 64
    TILES: gl.constexpr,  # tiles of left of a program
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """``out[t, 4s + l] = act(sum_kj left[l, s, 32k + j] * h[k][t, 4j + l] + bias[4s + l])``
    with ``h[k] = x_k @ right[k]^T``.
    """
    all_tiles: gl.constexpr = (Q + ROWS - 1) // ROWS
    shares: gl.constexpr = (all_tiles + TILES - 1) // TILES
    token = (gl.program_id(0) // shares) * TILE
    first_tile = (gl.program_id(0) % shares) * TILES
    tiles = gl.minimum(TILES, all_tiles - first_tile)

    h_layout: gl.constexpr = x_desc.layout
    h_smem = gl.allocate_shared_memory(x_desc.dtype, [BLOCKS * 2, TILE, TILE], h_layout)
    ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * BOXES, 2, INNER, TILE], right_desc.layout
    )
    bias_smem = h_smem
    if HAS_BIAS:
        bias_smem = gl.allocate_shared_memory(
            bias_ptr.dtype.element_ty,
            [TILES * ROWS // INNER, INNER * BLOCKS],
            gl.SwizzledSharedLayout(1, 1, 1, [0]),
        )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    h_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(empty.index(n), count=2)
    mbarrier.init(h_ready, count=2)
    grid_wait()
    grid_launch_dependents()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_ptr,
                    bias_ptr,
                    bias_smem,
                    h_smem,
                    ring,
                    ready,
                    empty,
                    h_ready,
                    token,
                    first_tile,
                    tiles,
                    tokens,
                    0,
                    P,
                    Q,
                    ROWS,
                    HAS_BIAS,
                    ACTIVATION,
                ),
            ),
            (
                _multiply,
                (
                    out_ptr,
                    bias_ptr,
                    bias_smem,
                    h_smem,
                    ring,
                    ready,
                    empty,
                    h_ready,
                    token,
                    first_tile,
                    tiles,
                    tokens,
                    1,
                    P,
                    Q,
                    ROWS,
                    HAS_BIAS,
                    ACTIVATION,
                ),
            ),
            (
                _load,
                (
                    x_desc,
                    right_desc,
                    left_desc,
                    ring,
                    ready,
                    empty,
                    token,
                    first_tile,
                    tiles,
                    P,
                    ROWS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


_OPERAND_BYTES = 24 * TILE.value * TILE.value * 2 + BARRIER_BYTES


def _shared_bytes(call: Call, config: Config) -> int:
    """Shared memory of a program: what is multiplied, and the bias of its outputs."""
    return _OPERAND_BYTES + config["tiles"] * config["rows"] * BLOCKS.value * call.itemsize


def unsupported_monarch(call: Call) -> str:
    """The reason why no kernel for Monarch on Hopper takes the call, "" if they do."""
    if reason := unsupported(call):
        return reason
    if (call.blocks, call.inner) != (BLOCKS.value, INNER.value):
        return f"it takes 4 blocks of rank 128, got {call.blocks} of rank {call.rank}"
    if call.p % 8:
        return f"it needs p to be a multiple of 8, got {call.p}"
    return ""


def _why_not(call: Call) -> str:
    if reason := unsupported_monarch(call):
        return reason
    least = _shared_bytes(call, {"tiles": 1, "rows": TILE.value})
    if call.device.shared_bytes < least:
        return f"it needs {least} bytes of shared memory, got {call.device.shared_bytes}"
    return ""


def _config(call: Call, rows: int, shares: int) -> dict[str, int]:
    tiles = triton.cdiv(triton.cdiv(call.q, rows), shares)
    most = (call.device.shared_bytes - _OPERAND_BYTES) // (rows * BLOCKS.value * call.itemsize)
    return {"rows": rows, "tiles": min(tiles, most)}


def _default_config(call: Call) -> Config:
    programs = -(-call.tokens // TILE.value)
    many = 2 * programs > call.device.sms
    rows = TILE.value if many else INNER.value
    # Few tokens do not fill the device: the rows are dealt among programs, which compute h again.
    return _config(call, rows, 1 if many else min(-(-call.q // rows), call.device.sms // programs))


def _candidates(call: Call) -> list[Config]:
    found = [_default_config(call)]
    for rows in (INNER.value, TILE.value):
        for shares in (1, 2, 4):
            config = _config(call, rows, shares)
            if config not in found:
                found.append(config)
    return found


def _run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    left, right = (factor if is_aligned(factor) else factor.clone() for factor in factors)
    # Row k*r + 4j + l of right, as (l, 32k + j).
    by_output = right.view(call.rank, call.blocks, call.p).transpose(0, 1)
    if bias is not None and not is_aligned(bias):
        bias = bias.clone()
    rows = config["rows"]
    all_tiles = triton.cdiv(call.q, rows)
    tiles = min(config["tiles"], all_tiles)
    chunk, copied = call.tokens, None
    if not is_aligned(x):
        most = SCRATCH_BYTES // (call.in_features * call.itemsize) // TILE.value * TILE.value
        chunk = min(chunk, max(TILE.value, most))
        copied = x.new_empty((chunk, call.in_features))
    for start in range(0, call.tokens, chunk):
        stop = min(start + chunk, call.tokens)
        part = x[start:stop] if copied is None else copied[: stop - start].copy_(x[start:stop])
        grid = triton.cdiv(stop - start, TILE.value) * triton.cdiv(all_tiles, tiles)
        hopper_monarch_kernel[(grid,)](
            descriptor(part, [TILE.value, TILE.value]),
            descriptor(by_output, [2, INNER.value, TILE.value]),
            descriptor(left, [TILE.value // rows, rows, TILE.value]),
            out[start:stop],
            bias,
            stop - start,
            P=call.p,
            Q=call.q,
            ROWS=rows,
            TILES=tiles,
            HAS_BIAS=bias is not None,
            ACTIVATION=activation or "none",
            **OPTIONS,
        )


def _suits(call: Call) -> bool:
    # Every program reads all of right, which is not repaid where it is the larger factor.
    return call.p <= call.q


PATH = Path("hopper", "monarch", _why_not, _default_config, _candidates, _run, suits=_suits)
