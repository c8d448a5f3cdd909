"""A batched product with bias and activation on Hopper, in Gluon: BLAST's second kernel.

A program keeps a slab of the weight in shared memory and streams tokens past it. Two consumer warp
groups take the token tiles in turn: while one writes its tile, the other has the tensor cores.
"""

# Gluon gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from blr_kernels.ops.hopper_grid import grid_launch_dependents, grid_wait
from blr_kernels.ops.hopper_mix import stored_token

# Products that the tensor cores are given ahead of the one that is waited for.
AHEAD = gl.constexpr(2)


@gluon.jit
def _activate(y, ACTIVATION: gl.constexpr):
    """``y`` in fp32 -> activated; ACTIVATION is "none" or one of the op's names."""
    if ACTIVATION == "gelu":
        # erf by formula 7.1.26 of Abramowitz and Stegun, right to 1.5e-7 and far below an ulp of
        # the output; the library's takes more registers than a tile of 128 x 128 leaves.
        u = gl.abs(y) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.3275911 * u)
        poly = t * (1.061405429 * t - 1.453152027) + 1.421413741
        poly = t * (t * (t * poly - 0.284496736) + 0.254829592)
        erfc = poly * gl.exp(-u * u)
        y = 0.5 * y * gl.where(y > 0, 2.0 - erfc, erfc)
    elif ACTIVATION == "gelu_tanh":
        # One special-function instruction an element, where exp and a division would take two.
        u = 0.7978845608028654 * y * (1.0 + 0.044715 * y * y)
        t = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=gl.float32, is_pure=True, pack=1
        )
        y = 0.5 * y * (1.0 + t)
    elif ACTIVATION == "silu":
        y = y / (1.0 + gl.exp(-y))
    return y


@gluon.jit
def _load(
    a_desc,
    w_desc,
    a_smem,
    w_smem,
    ready,
    empty,
    w_ready,
    w_empty,
    first,
    last,
    tiles,
    column,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer: one warp that issues every TMA load."""
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    item: gl.constexpr = a_desc.dtype.primitive_bitwidth // 8
    step = 0
    batch = first // tiles
    tile = first % tiles
    fresh = 0
    for unit in range(first, last):
        if (tile == 0) | (unit == first):
            mbarrier.wait(w_empty, (fresh & 1) ^ 1)
            mbarrier.expect(w_ready, BLOCK_N * steps * BLOCK_K * item)
            for k in gl.static_range(steps):
                tma.async_copy_global_to_shared(
                    w_desc, [batch * N + column, k * BLOCK_K], w_ready, w_smem.index(k)
                )
            if fresh == 0:
                # The weight was there before the kernel that writes a.
                grid_wait()
            fresh += 1
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, BLOCK_T * BLOCK_K * item)
            tma.async_copy_global_to_shared(
                a_desc, [batch * K + k * BLOCK_K, tile * BLOCK_T], bar, a_smem.index(stage)
            )
            step += 1
        tile += 1
        if tile == tiles:
            tile = 0
            batch += 1


@gluon.constexpr_function
def _stored(rows, columns):
    """Layout (rows, columns) in which a thread holds eight columns of a row, 16 bytes.

    Every value stays in the warp that computed it, so that changing to it needs no barrier.
    """
    columns_by_lane = [[0, 8 << n] for n in range((columns // 8).bit_length() - 1)]
    rows_of_warp = [[1, 0], [2, 0], [4, 0], [8, 0]]
    by_lane = 5 - len(columns_by_lane)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]]
        + rows_of_warp[by_lane:]
        + ([[64, 0]] if rows == 128 else []),
        lane_bases=columns_by_lane + rows_of_warp[:by_lane],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.jit
def _multiply(
    out_ptr,
    bias_ptr,
    a_smem,
    w_smem,
    ready,
    empty,
    w_ready,
    w_empty,
    order,
    first,
    last,
    tiles,
    column,
    tokens,
    consumer: gl.constexpr,
    BATCH: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer warp group: every second token tile of this program."""
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    stored: gl.constexpr = _stored(BLOCK_T, BLOCK_N)
    position = gl.arange(0, BLOCK_T, gl.SliceLayout(1, stored))
    offs_t = position // GROUP * GROUP + stored_token(position % GROUP, GROUP)
    offs_out = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    bias = gl.zeros((BLOCK_N,), gl.float32, gl.SliceLayout(0, layout))
    batch = first // tiles
    tile = first % tiles
    fresh = 0
    grid_wait()
    for unit in range(first, last):
        if (tile == 0) | (unit == first):
            if fresh > 0:
                mbarrier.arrive(w_empty, count=1)
            if HAS_BIAS:
                bias = gl.load(bias_ptr + batch * N + column + offs_n).to(gl.float32)
            mbarrier.wait(w_ready, fresh & 1)
            fresh += 1
        if (unit - first) % 2 == consumer:
            # The other group has then issued its products: it is in no stage that this one waits
            # for, whose parity would otherwise not tell one round of the ring from the next.
            turn = (unit - first) // 2
            mbarrier.wait(order.index(consumer), (turn & 1) ^ (1 - consumer))
            step = (unit - first) * steps
            sums = warpgroup_mma_init(gl.zeros((BLOCK_T, BLOCK_N), gl.float32, layout))
            for k in gl.static_range(steps):
                stage = (step + k) % STAGES
                mbarrier.wait(ready.index(stage), ((step + k) // STAGES) & 1)
                sums = warpgroup_mma(
                    a_smem.index(stage).permute((1, 0)),
                    w_smem.index(k).permute((1, 0)),
                    sums,
                    is_async=True,
                )
                if k == steps - 1:
                    mbarrier.arrive(order.index(1 - consumer), count=1)
                if k >= AHEAD:
                    sums = warpgroup_mma_init(warpgroup_mma_wait(AHEAD, deps=(sums,)))
                    mbarrier.arrive(empty.index((step + k - AHEAD) % STAGES), count=1)
            acc = warpgroup_mma_wait(0, deps=(sums,))
            for k in gl.static_range(steps):
                if k + AHEAD >= steps:
                    mbarrier.arrive(empty.index((step + k) % STAGES), count=1)
            if HAS_BIAS:
                acc = acc + gl.expand_dims(bias, 0)
            acc = _activate(acc, ACTIVATION)
            y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), stored)
            token = tile * BLOCK_T + offs_t
            out_row = out_ptr + batch * N + token.to(gl.int64) * (BATCH * N)
            gl.store(
                gl.expand_dims(out_row, 1) + gl.expand_dims(offs_out, 0),
                y,
                mask=gl.expand_dims(token < tokens, 1),
            )
        tile += 1
        if tile == tiles:
            tile = 0
            batch += 1


@gluon.jit(do_not_specialize=["tokens"])
def hopper_product_kernel(
    a_desc,  # (batch * K, a_block), blocks of (BLOCK_K, BLOCK_T); tokens as hopper_mix stores
    w_desc,  # (batch * N, K), blocks of (BLOCK_N, BLOCK_K)
    out_ptr,  # (tokens, batch * N), contiguous
    bias_ptr,  # (batch * N,); unused unless HAS_BIAS
    tokens,
    BATCH: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,  # tokens in a group of stored_token
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``out[t, i*N + n] = act(sum_k a[i, k, t] * w[i, n, k] + bias[i*N + n])``.

    N is a multiple of BLOCK_N. The programs of the N / BLOCK_N slabs of a batch form a group and
    walk the same tokens at the same time, so that memory is read once for all of them. The groups
    take equal runs of the token tiles of all batches: a program changes its slab once or twice.
    """
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    slabs: gl.constexpr = N // BLOCK_N
    tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    units = tiles * BATCH
    group = gl.program_id(0) // slabs
    column = (gl.program_id(0) % slabs) * BLOCK_N
    groups = gl.num_programs(0) // slabs
    first = (group * units) // groups
    last = ((group + 1) * units) // groups

    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_K, BLOCK_T], a_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [steps, BLOCK_N, BLOCK_K], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(order.index(n), count=1)
    mbarrier.init(w_ready, count=1)
    mbarrier.init(w_empty, count=2)
    grid_launch_dependents()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_ptr,
                    bias_ptr,
                    a_smem,
                    w_smem,
                    ready,
                    empty,
                    w_ready,
                    w_empty,
                    order,
                    first,
                    last,
                    tiles,
                    column,
                    tokens,
                    0,
                    BATCH,
                    N,
                    K,
                    HAS_BIAS,
                    ACTIVATION,
                    GROUP,
                    BLOCK_T,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                ),
            ),
            (
                _multiply,
                (
                    out_ptr,
                    bias_ptr,
                    a_smem,
                    w_smem,
                    ready,
                    empty,
                    w_ready,
                    w_empty,
                    order,
                    first,
                    last,
                    tiles,
                    column,
                    tokens,
                    1,
                    BATCH,
                    N,
                    K,
                    HAS_BIAS,
                    ACTIVATION,
                    GROUP,
                    BLOCK_T,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                ),
            ),
            (
                _load,
                (
                    a_desc,
                    w_desc,
                    a_smem,
                    w_smem,
                    ready,
                    empty,
                    w_ready,
                    w_empty,
                    first,
                    last,
                    tiles,
                    column,
                    N,
                    K,
                    BLOCK_T,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
