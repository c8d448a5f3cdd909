"""A batched product with bias and activation on Hopper, in Gluon: BLAST's second kernel.

A program keeps a slab of the weight in shared memory and streams tokens past it, so that the
weight is read through L2 once a program. Two consumer warp groups take the token tiles in turn:
while one writes its tile, the other has the tensor cores.
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

BLOCK_K = gl.constexpr(64)


@gluon.jit
def _activate(y, ACTIVATION: gl.constexpr):
    """``y`` in fp32 -> activated; ACTIVATION is "none" or one of the op's names."""
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + gl.erf(y * 0.7071067811865476))
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
    a_block,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer: one warp that issues every TMA load."""
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    slabs: gl.constexpr = N // BLOCK_N
    item: gl.constexpr = a_desc.dtype.primitive_bitwidth // 8
    step = 0
    turn = 0
    slab = -1
    for unit in range(first, last):
        if unit // tiles != slab:
            slab = unit // tiles
            mbarrier.wait(w_empty, (turn & 1) ^ 1)
            mbarrier.expect(w_ready, BLOCK_N * steps * BLOCK_K * item)
            for k in gl.static_range(steps):
                tma.async_copy_global_to_shared(
                    w_desc, [slab * BLOCK_N, k * BLOCK_K], w_ready, w_smem.index(k)
                )
            if turn == 0:
                # The weight was there before the kernel that writes a.
                grid_wait()
            turn += 1
        row = (slab // slabs) * a_block + (unit % tiles) * BLOCK_T
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, BLOCK_T * BLOCK_K * item)
            tma.async_copy_global_to_shared(a_desc, [row, k * BLOCK_K], bar, a_smem.index(stage))
            step += 1


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
    tokens,
    consumer: gl.constexpr,
    WIDTH: gl.constexpr,
    K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer warp group: every second token tile of this program."""
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    stored: gl.constexpr = _stored(BLOCK_T, BLOCK_N)
    row = gl.arange(0, BLOCK_T, gl.SliceLayout(1, stored))
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    slabs = 0
    slab = -1
    grid_wait()
    for unit in range(first, last):
        if unit // tiles != slab:
            if slabs > 0:
                mbarrier.arrive(w_empty, count=1)
            slab = unit // tiles
            mbarrier.wait(w_ready, slabs & 1)
            slabs += 1
        if (unit - first) % 2 == consumer:
            # The other group has then issued its products: it is in no stage that this one waits
            # for, whose parity would otherwise not tell one round of the ring from the next.
            turn = (unit - first) // 2
            mbarrier.wait(order.index(consumer), (turn & 1) ^ (1 - consumer))
            step = (unit - first) * steps
            sums = warpgroup_mma_init(gl.zeros((BLOCK_T, BLOCK_N), gl.float32, layout))
            for k in range(steps):
                stage = (step + k) % STAGES
                mbarrier.wait(ready.index(stage), ((step + k) // STAGES) & 1)
                sums = warpgroup_mma(
                    a_smem.index(stage), w_smem.index(k).permute((1, 0)), sums, is_async=True
                )
                sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
                if k > 0:
                    mbarrier.arrive(empty.index((step + k - 1) % STAGES), count=1)
            mbarrier.arrive(order.index(1 - consumer), count=1)
            acc = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(empty.index((step + steps - 1) % STAGES), count=1)
            if HAS_BIAS:
                bias = gl.load(bias_ptr + slab * BLOCK_N + offs_n)
                acc = acc + gl.expand_dims(bias.to(gl.float32), 0)
            acc = _activate(acc, ACTIVATION)
            y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), stored)
            token = (unit % tiles) * BLOCK_T + row
            out_row = out_ptr + slab * BLOCK_N + token.to(gl.int64) * WIDTH
            gl.store(
                gl.expand_dims(out_row, 1) + gl.expand_dims(column, 0),
                y,
                mask=gl.expand_dims(token < tokens, 1),
            )


@gluon.jit(do_not_specialize=["tokens"])
def hopper_product_kernel(
    a_desc,  # (batch * a_block, K), blocks of (BLOCK_T, 64)
    w_desc,  # (batch * N, K), blocks of (BLOCK_N, 64)
    out_ptr,  # (tokens, batch * N), contiguous
    bias_ptr,  # (batch * N,); unused unless HAS_BIAS
    tokens,
    a_block,  # rows of a in a batch, at least ``tokens``
    BATCH: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``out[t, i*N + n] = act(sum_k a[i, t, k] * w[i, n, k] + bias[i*N + n])``.

    N is a multiple of BLOCK_N. Each program takes an equal run of the units of work, which are
    ordered by slab of the weight first and by tokens next: it changes its slab once at most.
    """
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    units = tiles * (BATCH * N // BLOCK_N)
    programs = gl.num_programs(0)
    first = (gl.program_id(0) * units) // programs
    last = ((gl.program_id(0) + 1) * units) // programs

    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_T, BLOCK_K], a_desc.layout)
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
                    tokens,
                    0,
                    BATCH * N,
                    K,
                    HAS_BIAS,
                    ACTIVATION,
                    BLOCK_T,
                    BLOCK_N,
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
                    tokens,
                    1,
                    BATCH * N,
                    K,
                    HAS_BIAS,
                    ACTIVATION,
                    BLOCK_T,
                    BLOCK_N,
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
                    a_block,
                    N,
                    K,
                    BLOCK_T,
                    BLOCK_N,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [216, 24],
    )
