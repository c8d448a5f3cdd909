"""Monarch on Hopper, in Gluon: two kernels.

The first, of ``hopper_first``, writes h, the products with ``right``, regrouped by output block;
the second, below, keeps a slab of ``left`` in shared memory and streams h past it. The accumulators
of the four output blocks, side by side in a thread's registers, are eight outputs in a row: the
interleaved order of Monarch costs nothing.
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
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from blr_kernels.ops.alignment import aligned
from blr_kernels.ops.hopper_first import TILES, first_bytes, first_configs, launch_first
from blr_kernels.ops.hopper_grid import grid_launch_dependents, grid_wait, prefetch_descriptors
from blr_kernels.ops.hopper_launch import BARRIER_BYTES, OPTIONS, descriptor, unsupported
from blr_kernels.ops.hopper_mix import stored_token
from blr_kernels.ops.hopper_product import activate, stored_layout
from blr_kernels.ops.hopper_scratch import chunk_tokens, walk
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.reference import Activation

BLOCKS = gl.constexpr(4)
RANK = gl.constexpr(128)
TILE = gl.constexpr(64)  # tokens
GROUP = gl.constexpr(32)  # tokens in a group of stored_token
PIECE = gl.constexpr(128)  # most outputs in a row that a consumer finishes at once


@gluon.jit
def _load(
    h_desc,
    left_desc,
    rest_desc,
    h_smem,
    left_smem,
    rest_smem,
    ready,
    empty,
    left_ready,
    first,
    last,
    row,
    COLUMNS: gl.constexpr,
    REST: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer: one warp that issues every TMA load."""
    item: gl.constexpr = h_desc.dtype.primitive_bitwidth // 8
    # left was there before the kernel that writes h.
    mbarrier.expect(left_ready, BLOCKS * (COLUMNS + REST) * RANK * item)
    for i in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(left_desc, [i, row, 0], left_ready, left_smem.index(i))
        if REST > 0:
            tma.async_copy_global_to_shared(
                rest_desc, [i, row + COLUMNS, 0], left_ready, rest_smem.index(i)
            )
    grid_wait()
    stage = 0
    phase = 1
    for token in range(first, last, TILE):
        for i in gl.static_range(BLOCKS):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, RANK * TILE * item)
            tma.async_copy_global_to_shared(h_desc, [i * RANK, token], bar, h_smem.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _multiply(
    out_ptr,
    bias_ptr,
    bias_smem,
    h_smem,
    left_smem,
    ready,
    empty,
    left_ready,
    first,
    last,
    row,  # the first of this consumer
    consumer: gl.constexpr,
    Q: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    COLUMNS: gl.constexpr,
    BOTH: gl.constexpr,
    BIAS_AT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer warp group: every token tile for its rows, or every second tile for all."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    width: gl.constexpr = BLOCKS * COLUMNS if BLOCKS * COLUMNS < PIECE else PIECE
    pieces: gl.constexpr = BLOCKS * COLUMNS // width
    stored: gl.constexpr = stored_layout(TILE, width)
    skip: gl.constexpr = 0 if BOTH else consumer * TILE
    stride: gl.constexpr = TILE if BOTH else 2 * TILE
    position = gl.arange(0, TILE, gl.SliceLayout(1, stored))
    token_of = position // GROUP * GROUP + stored_token(position % GROUP, GROUP)
    column = row * BLOCKS + gl.arange(0, width, gl.SliceLayout(0, stored))
    if HAS_BIAS:
        # Once, and as early as left: at every tile the products would wait for it.
        lane = gl.arange(0, width, gl.BlockedLayout([2], [32], [4], [0]))
        for piece in gl.static_range(pieces):
            source = row * BLOCKS + piece * width + lane
            async_copy.async_copy_global_to_shared(
                bias_smem.index(BIAS_AT + piece), bias_ptr + source, mask=source < BLOCKS * Q
            )
        async_copy.commit_group()
        async_copy.wait_group(0)
    grid_wait()
    mbarrier.wait(left_ready, 0)
    for tile in range(first + skip, last, stride):
        step = (tile - first) // TILE * BLOCKS
        # From the compiler, which part of left it is: it would work out the addresses of all of
        # them ahead, and have no registers for them.
        weight = gl.inline_asm_elementwise(
            "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        sums = ()
        for i in gl.static_range(BLOCKS):
            stage = (step + i) % STAGES
            mbarrier.wait(ready.index(stage), ((step + i) // STAGES) & 1)
            acc = warpgroup_mma_init(gl.zeros((TILE, COLUMNS), gl.float32, layout))
            acc = warpgroup_mma(
                h_smem.index(stage).permute((1, 0)),
                left_smem.index(weight + i).reshape((COLUMNS, RANK)).permute((1, 0)),
                acc,
                is_async=True,
            )
            sums = sums + (acc,)  # noqa: RUF005
        # The stage of each product is loaded anew while those behind it are computed.
        done = warpgroup_mma_wait(BLOCKS - 1, deps=sums)
        for i in gl.static_range(BLOCKS):
            if i > 0:
                done = warpgroup_mma_wait(BLOCKS - 1 - i, deps=done)
            mbarrier.arrive(empty.index((step + i) % STAGES), count=1)
        front, back = gl.join(done[0], done[1]), gl.join(done[2], done[3])
        y = gl.join(front, back).permute((0, 1, 3, 2)).reshape((TILE, pieces, width))
        whole = y.reshape((TILE, BLOCKS * COLUMNS))
        split = gl.split(y.permute((0, 2, 1))) if pieces == 2 else (whole,)
        token = tile + token_of
        out_row = out_ptr + token.to(gl.int64) * (BLOCKS * Q)
        for piece in gl.static_range(pieces):
            at = column + piece * width
            part = gl.convert_layout(split[piece], stored, assert_trivial=True)
            if HAS_BIAS:
                bias = bias_smem.index(BIAS_AT + piece).load(gl.SliceLayout(0, stored))
                part = part + gl.expand_dims(bias.to(gl.float32), 0)
            part = activate(part, ACTIVATION, out_ptr.dtype.element_ty)
            gl.store(
                gl.expand_dims(out_row, 1) + gl.expand_dims(at, 0),
                part.to(out_ptr.dtype.element_ty),
                mask=gl.expand_dims(token < last, 1) & gl.expand_dims(at < BLOCKS * Q, 0),
            )


@gluon.jit(do_not_specialize=["tokens"])
def hopper_monarch_second_kernel(
    h_desc,  # (4 * 128, h_block), blocks of (128, 64); tokens in the order of stored_token
    left_desc,  # (4, Q, 128), blocks of (1, COLUMNS, 128)
    rest_desc,  # the same in blocks of (1, REST, 128); unused where REST is 0
    out_ptr,  # (tokens, 4 * Q), contiguous
    bias_ptr,  # (4 * Q,), aligned to 16 bytes; unused unless HAS_BIAS
    tokens,
    Q: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    COLUMNS: gl.constexpr,  # rows s of every output block that the first consumer multiplies by
    REST: gl.constexpr,  # and the second for the same tokens; if 0, they take turns at the tokens
    STAGES: gl.constexpr,  # where they take turns, a multiple of 8
):
    """``out[t, 4s + l] = act(sum_K left[l, s, K] * h[l, K, t] + bias[4s + l])``.

    A program keeps a slab of ``left``, rows s of all four output blocks. The programs of the slabs
    form a group and walk the same tokens at the same time, so that memory is read once for all of
    them. The groups take equal runs of tokens, whole groups of ``stored_token``.
    """
    slab: gl.constexpr = COLUMNS + REST
    slabs: gl.constexpr = (Q + slab - 1) // slab
    runs = (tokens + GROUP - 1) // GROUP
    group = gl.program_id(0) // slabs
    row = (gl.program_id(0) % slabs) * slab
    groups = gl.num_programs(0) // slabs
    first = (group * runs) // groups * GROUP
    last = gl.minimum(((group + 1) * runs) // groups * GROUP, tokens)

    h_smem = gl.allocate_shared_memory(h_desc.dtype, [STAGES, RANK, TILE], h_desc.layout)
    left_smem = gl.allocate_shared_memory(
        left_desc.dtype, [BLOCKS, 1, COLUMNS, RANK], left_desc.layout
    )
    rest_smem = left_smem
    if REST > 0:
        rest_smem = gl.allocate_shared_memory(
            left_desc.dtype, [BLOCKS, 1, REST, RANK], rest_desc.layout
        )
    width: gl.constexpr = BLOCKS * COLUMNS if BLOCKS * COLUMNS < PIECE else PIECE
    # The second consumer's rows fill whole pieces of the bias too.
    gl.static_assert(REST == 0 or REST == COLUMNS or BLOCKS * REST == PIECE)
    bias_smem = h_smem
    if HAS_BIAS:
        # For each consumer, so that they need not wait for each other.
        bias_smem = gl.allocate_shared_memory(
            bias_ptr.dtype.element_ty,
            [2 * (BLOCKS * COLUMNS // width), width],
            gl.SwizzledSharedLayout(1, 1, 1, [0]),
        )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # Consumers that take turns never share a stage: one that is a round ahead of the other could
    # not tell from a barrier's parity which round it is in.
    gl.static_assert(REST > 0 or STAGES % (2 * BLOCKS) == 0)
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(empty.index(n), count=2 if REST > 0 else 1)
    mbarrier.init(left_ready, count=1)
    prefetch_descriptors("hopper_monarch_second_kernel", (0, 5, 12) if REST > 0 else (0, 5))
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
                    left_smem,
                    ready,
                    empty,
                    left_ready,
                    first,
                    last,
                    row,
                    0,
                    Q,
                    HAS_BIAS,
                    ACTIVATION,
                    COLUMNS,
                    REST > 0,
                    0,
                    STAGES,
                ),
            ),
            (
                _multiply,
                (
                    out_ptr,
                    bias_ptr,
                    bias_smem,
                    h_smem,
                    rest_smem,
                    ready,
                    empty,
                    left_ready,
                    first,
                    last,
                    row + (COLUMNS if REST > 0 else 0),
                    1,
                    Q,
                    HAS_BIAS,
                    ACTIVATION,
                    REST if REST > 0 else COLUMNS,
                    REST > 0,
                    BLOCKS * COLUMNS // width,
                    STAGES,
                ),
            ),
            (
                _load,
                (
                    h_desc,
                    left_desc,
                    rest_desc,
                    h_smem,
                    left_smem,
                    rest_smem,
                    ready,
                    empty,
                    left_ready,
                    first,
                    last,
                    row,
                    COLUMNS,
                    REST,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


# From so many rows on, slabs of 128 halve what is read of h; of fewer, the last is half empty.
_TALL = 512


def _slab(config: Config) -> int:
    """Rows s of every output block that a program of the second kernel keeps."""
    return config["second_columns"] + config["second_rest"]


def _second_stages(config: Config) -> int:
    """Stages of the second kernel's ring."""
    return 2 * BLOCKS.value if _slab(config) <= 96 else 6


def _second_bytes(config: Config) -> int:
    """Shared memory of the second kernel."""
    rows = BLOCKS.value * _slab(config) + _second_stages(config) * TILE.value
    bias = 2 * BLOCKS.value * config["second_columns"]
    return (rows * RANK.value + bias) * 2 + BARRIER_BYTES


def _second_configs(call: Call) -> list[dict[str, int]]:
    """The second kernel's part of configs, the likely best first."""
    tiles = triton.cdiv(call.tokens, TILE.value)

    def sizes(*pairs: tuple[int, int]) -> list[dict[str, int]]:
        return [{"second_columns": c, "second_rest": rest} for c, rest in pairs]

    few = sizes((16, 0), (16, 16), (32, 32))
    # Where it fits, every program has one tile, and as small a slab as possible.
    small = [
        config for config in few if triton.cdiv(call.q, _slab(config)) * tiles <= call.device.sms
    ]
    wide = sizes((64, 64), (64, 0)) if call.q >= _TALL else sizes((64, 0), (64, 64))
    if call.q % 96 == 0:
        wide.insert(1, *sizes((64, 32)))
    return [*small, *wide, few[-1], *sizes((32, 0))][:5]


def _bytes_per_token(call: Call) -> int:
    return BLOCKS.value * RANK.value * call.itemsize


def launch_second(
    call: Call,
    h: Tensor,
    left: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """Launches ``hopper_monarch_second_kernel`` once.

    Args:
        h: ``(4, 128, h_block)`` as ``launch_first`` writes it.
        left: ``(4, q, 128)``, contiguous.
        bias: ``(4*q)`` or None.
        out: written; ``(tokens, 4*q)``, contiguous.
    """
    columns, rest = config["second_columns"], config["second_rest"]
    slabs = triton.cdiv(call.q, _slab(config))
    groups = min(triton.cdiv(out.shape[0], TILE.value), max(1, call.device.sms // slabs))
    hopper_monarch_second_kernel[(groups * slabs,)](
        descriptor(h.view(-1, h.shape[-1]), [RANK.value, TILE.value]),
        descriptor(left, [1, columns, RANK.value]),
        descriptor(left, [1, rest or columns, RANK.value]),
        out,
        bias,
        out.shape[0],
        Q=call.q,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        COLUMNS=columns,
        REST=rest,
        STAGES=_second_stages(config),
        **OPTIONS,
    )


def _run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    left, right = map(aligned, factors)
    bias = None if bias is None else aligned(bias)
    padded, parts = walk(call, x, _bytes_per_token(call))
    h = x.new_empty((BLOCKS.value, RANK.value, padded))
    for rows, part, _ in parts:
        launch_first(
            call,
            part,
            right,
            h,
            tokens_tile=config["first_tokens"],
            stages=config["first_stages"],
            grouped=True,
        )
        launch_second(call, h, left, bias, activation, out[rows], config)


def _candidates(call: Call) -> list[Config]:
    first = first_configs(call, chunk_tokens(call, _bytes_per_token(call)))
    second = _second_configs(call)
    pairs = [(one, second[0]) for one in first] + [(first[0], two) for two in second]
    found: list[Config] = []
    for one, two in pairs:
        if (config := {**one, **two}) not in found:
            found.append(config)
    return found


def _default_config(call: Call) -> Config:
    return _candidates(call)[0]


def _why_not(call: Call) -> str:
    if reason := unsupported(call):
        return reason
    if (call.blocks, call.rank) != (BLOCKS.value, RANK.value):
        return f"it takes 4 blocks of rank 128, got {call.blocks} of rank {call.rank}"
    if call.p % 8:
        return f"it needs p to be a multiple of 8, got {call.p}"
    most = max(first_bytes(call, TILES[0], 2), *map(_second_bytes, _second_configs(call)))
    if call.device.shared_bytes < most:
        return f"it needs {most} bytes of shared memory, got {call.device.shared_bytes}"
    return ""


PATH = Path("hopper", "monarch", _why_not, _default_config, _candidates, _run, separable=True)
