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
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from blr_kernels.ops.hopper_grid import grid_launch_dependents, grid_wait, prefetch_descriptors
from blr_kernels.ops.hopper_mix import stored_token

# Products that the tensor cores are given ahead of the one that is waited for.
AHEAD = gl.constexpr(1)
# Columns of the output among which the rows of the weight change places.
GROUP_N = gl.constexpr(32)


@gluon.jit
def _tanh(u):
    """By one special-function instruction an element, right to 2^-11."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def activate(y, ACTIVATION: gl.constexpr, dtype: gl.constexpr):
    """``y`` in fp32 -> activated, for an output of ``dtype``; ACTIVATION is "none" or one of the
    op's names.
    """
    if ACTIVATION == "gelu" and dtype == gl.bfloat16:
        # atanh(erf(y / sqrt(2))) / y as a polynomial of y^2, fitted so that GELU by it is right to
        # 3e-5; the tanh adds up to |y| / 4096. erf itself takes three times the instructions, which
        # take longer than the products.
        u = gl.minimum(y * y, 32.0)
        u = y * (0.79750758 + u * (0.037005998 - 0.00035159339 * u))
        y = 0.5 * y * (1.0 + _tanh(u))
    elif ACTIVATION == "gelu":
        # erf by formula 7.1.26 of Abramowitz and Stegun, right to 1.5e-7 and far below an ulp of
        # the output; the library's takes more registers than a tile of 128 x 128 leaves.
        u = gl.abs(y) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.3275911 * u)
        poly = t * (1.061405429 * t - 1.453152027) + 1.421413741
        poly = t * (t * (t * poly - 0.284496736) + 0.254829592)
        erfc = poly * gl.exp(-u * u)
        y = 0.5 * y * gl.where(y > 0, 2.0 - erfc, erfc)
    elif ACTIVATION == "gelu_tanh":
        u = 0.7978845608028654 * y * (1.0 + 0.044715 * y * y)
        y = 0.5 * y * (1.0 + _tanh(u)) if dtype == gl.bfloat16 else y / (1.0 + gl.exp(-2.0 * u))
    elif ACTIVATION == "silu":
        y = y / (1.0 + gl.exp(-y))
    return y


@gluon.jit
def _load_part(
    w_desc,
    w_rest_desc,
    w_smem,
    w_rest,
    w_ready,
    row,
    k: gl.constexpr,
    BLOCK_N: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Asks for part k of a slab: its columns of step k."""
    item: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    bar = w_ready.index(k)
    mbarrier.expect(bar, (BLOCK_N + REST) * BLOCK_K * item)
    tma.async_copy_global_to_shared(w_desc, [row, 0, 0, 0, k * BLOCK_K], bar, w_smem.index(k))
    if REST > 0:
        tma.async_copy_global_to_shared(
            w_rest_desc,
            [row + BLOCK_N // GROUP_N, 0, 0, 0, k * BLOCK_K],
            bar,
            w_rest.index(k),
        )


@gluon.jit
def _load(
    a_desc,
    w_desc,
    w_rest_desc,
    a_smem,
    w_smem,
    w_rest,
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
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY_PARTS: gl.constexpr,
):
    """The producer: one warp that issues every TMA load."""
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    item: gl.constexpr = a_desc.dtype.primitive_bitwidth // 8
    batch = first // tiles
    tile = first % tiles
    fresh = 0
    stage = 0
    phase = 1
    for unit in range(first, last):
        is_fresh = (tile == 0) | (unit == first)
        row = (batch * N + column) // GROUP_N
        if is_fresh:
            mbarrier.wait(w_empty, (fresh & 1) ^ 1)
            for k in gl.static_range(steps):
                if k < EARLY_PARTS:
                    _load_part(
                        w_desc, w_rest_desc, w_smem, w_rest, w_ready, row, k, BLOCK_N, REST, BLOCK_K
                    )
            if fresh == 0:
                # The weight was there before the kernel that writes a.
                grid_wait()
            fresh += 1
        for k in gl.static_range(steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, BLOCK_T * BLOCK_K * item)
            tma.async_copy_global_to_shared(
                a_desc, [batch, k * BLOCK_K, tile * BLOCK_T], bar, a_smem.index(stage)
            )
            # The rest of a slab comes piece by piece, so that the first product waits for little.
            if k + EARLY_PARTS < steps:  # noqa: SIM102
                if is_fresh:
                    _load_part(
                        w_desc,
                        w_rest_desc,
                        w_smem,
                        w_rest,
                        w_ready,
                        row,
                        k + EARLY_PARTS,
                        BLOCK_N,
                        REST,
                        BLOCK_K,
                    )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        tile += 1
        if tile == tiles:
            tile = 0
            batch += 1


@gluon.constexpr_function
def stored_layout(rows, columns):
    """Layout (rows, columns) of an accumulator whose columns are in the order of the output."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]]
        + [[0, 32 << n] for n in range((columns // 32).bit_length() - 1)]
        + [[8, 0]]
        + ([[64, 0]] if rows == 128 else []),
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.jit
def in_row_order(acc, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """An accumulator ``(ROWS, COLUMNS)`` in the layout of ``stored_layout``; moves no data.

    A thread has columns 8n + 2c and 8n + 2c + 1 of every 32, c its lane modulo 4; they become
    eight in a row, at 8c + 2n and 8c + 2n + 1.
    """
    acc = acc.reshape((ROWS, COLUMNS // GROUP_N, 4, 4, 2)).permute((0, 1, 3, 2, 4))
    acc = acc.reshape((ROWS, COLUMNS))
    return gl.convert_layout(acc, stored_layout(ROWS, COLUMNS), assert_trivial=True)


@gluon.jit
def _load_bias(bias_ptr, bias_smem, COLUMNS: gl.constexpr):
    """Asks for ``COLUMNS`` elements of the bias."""
    lane = gl.arange(0, COLUMNS, gl.BlockedLayout([2], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(bias_smem, bias_ptr + lane)


@gluon.jit
def _store(
    acc,
    bias_smem,  # (COLUMNS,)
    out_ptr,
    first_token,
    tokens,
    WIDTH: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_T: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Stores ``acc (BLOCK_T, COLUMNS)``; the pointer is at its first column."""
    stored: gl.constexpr = stored_layout(BLOCK_T, COLUMNS)
    # The weight's rows were loaded in the order that this undoes.
    acc = in_row_order(acc, BLOCK_T, COLUMNS)
    if HAS_BIAS:
        bias = bias_smem.load(gl.SliceLayout(0, stored))
        acc = acc + gl.expand_dims(bias.to(gl.float32), 0)
    acc = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    position = gl.arange(0, BLOCK_T, gl.SliceLayout(1, stored))
    token = first_token + position // GROUP * GROUP + stored_token(position % GROUP, GROUP)
    row = out_ptr + token.to(gl.int64) * WIDTH
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
    gl.store(
        gl.expand_dims(row, 1) + gl.expand_dims(column, 0),
        acc.to(out_ptr.dtype.element_ty),
        mask=gl.expand_dims(token < tokens, 1),
    )


@gluon.jit
def _multiply(
    out_ptr,
    bias_ptr,
    bias_smem,
    bias_rest,
    a_smem,
    w_smem,
    w_rest,
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
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer warp group: every second token tile of this program."""
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rest: gl.constexpr = REST if REST > 0 else 32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rest, 16])
    batch = first // tiles
    tile = first % tiles
    fresh = 0
    grid_wait()
    for unit in range(first, last):
        if (tile == 0) | (unit == first):
            if fresh > 0:
                mbarrier.arrive(w_empty, count=1)
            fresh += 1
            if HAS_BIAS:
                # Once a slab: at every tile the products would wait for it. The one before may
                # still be on its way where this group had no tile of its slab.
                async_copy.wait_group(0)
                at = batch * N + column
                _load_bias(bias_ptr + at, bias_smem.index(consumer), BLOCK_N)
                if REST > 0:
                    _load_bias(bias_ptr + at + BLOCK_N, bias_rest.index(consumer), REST)
                async_copy.commit_group()
        if (unit - first) % 2 == consumer:
            at = batch * N + column
            # The other group has then issued its products: it is in no stage that this one waits
            # for, whose parity would otherwise not tell one round of the ring from the next.
            turn = (unit - first) // 2
            mbarrier.wait(order.index(consumer), (turn & 1) ^ (1 - consumer))
            step = (unit - first) * steps
            sums = warpgroup_mma_init(gl.zeros((BLOCK_T, BLOCK_N), gl.float32, layout))
            more = warpgroup_mma_init(gl.zeros((BLOCK_T, rest), gl.float32, rest_layout))
            for k in gl.static_range(steps):
                stage = (step + k) % STAGES
                mbarrier.wait(w_ready.index(k), (fresh & 1) ^ 1)
                mbarrier.wait(ready.index(stage), ((step + k) // STAGES) & 1)
                a = a_smem.index(stage).reshape((BLOCK_K, BLOCK_T)).permute((1, 0))
                w = w_smem.index(k).reshape((BLOCK_N, BLOCK_K)).permute((1, 0))
                sums = warpgroup_mma(a, w, sums, is_async=True)
                if REST > 0:
                    w = w_rest.index(k).reshape((REST, BLOCK_K)).permute((1, 0))
                    more = warpgroup_mma(a, w, more, is_async=True)
                if k == steps - 1:
                    mbarrier.arrive(order.index(1 - consumer), count=1)
                if k >= AHEAD:
                    if REST > 0:
                        done = warpgroup_mma_wait(2 * AHEAD, deps=(sums, more))
                        sums = warpgroup_mma_init(done[0])
                        more = warpgroup_mma_init(done[1])
                    else:
                        sums = warpgroup_mma_init(warpgroup_mma_wait(AHEAD, deps=(sums,)))
                    mbarrier.arrive(empty.index((step + k - AHEAD) % STAGES), count=1)
            done = warpgroup_mma_wait(0, deps=(sums, more))
            for k in gl.static_range(steps):
                if k + AHEAD >= steps:
                    mbarrier.arrive(empty.index((step + k) % STAGES), count=1)
            if HAS_BIAS:
                async_copy.wait_group(0)
            _store(
                done[0],
                bias_smem.index(consumer),
                out_ptr + at,
                tile * BLOCK_T,
                tokens,
                BATCH * N,
                HAS_BIAS,
                ACTIVATION,
                GROUP,
                BLOCK_T,
                BLOCK_N,
            )
            if REST > 0:
                _store(
                    done[1],
                    bias_rest.index(consumer),
                    out_ptr + at + BLOCK_N,
                    tile * BLOCK_T,
                    tokens,
                    BATCH * N,
                    HAS_BIAS,
                    ACTIVATION,
                    GROUP,
                    BLOCK_T,
                    REST,
                )
        tile += 1
        if tile == tiles:
            tile = 0
            batch += 1


@gluon.jit(do_not_specialize=["tokens"])
def hopper_product_kernel(
    a_desc,  # (batch, K, a_block), blocks of (1, BLOCK_K, BLOCK_T), zero beyond K; tokens as
    # hopper_mix stores them
    w_desc,  # (batch * N / 32, 4, 4, 2, K), blocks of (BLOCK_N / 32, 4, 4, 2, BLOCK_K): row
    # 32g + 8c + 2n + e of the weight is at (g, n, c, e)
    w_rest_desc,  # the same in blocks of (REST / 32, 4, 4, 2, BLOCK_K); unused where REST is 0
    out_ptr,  # (tokens, batch * N), contiguous
    bias_ptr,  # (batch * N,), aligned to 16 bytes; unused unless HAS_BIAS
    tokens,
    BATCH: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP: gl.constexpr,  # tokens in a group of stored_token
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
    REST: gl.constexpr,  # columns of a slab beyond BLOCK_N, 0 or 32, 64, 128
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY_PARTS: gl.constexpr,  # of a slab, loaded before the first tokens are asked for
    REGISTERS: gl.constexpr,  # of a consumer's thread
):
    """``out[t, i*N + n] = act(sum_k a[i, k, t] * w[i, n, k] + bias[i*N + n])``.

    N is a multiple of a slab, BLOCK_N + REST columns. The programs of the slabs of a batch form a
    group and walk the same tokens at the same time, so that memory is read once for all of them.
    The groups take equal runs of the token tiles of all batches.
    """
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    slab: gl.constexpr = BLOCK_N + REST
    slabs: gl.constexpr = N // slab
    tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    units = tiles * BATCH
    group = gl.program_id(0) // slabs
    column = (gl.program_id(0) % slabs) * slab
    groups = gl.num_programs(0) // slabs
    first = (group * units) // groups
    last = ((group + 1) * units) // groups

    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 1, BLOCK_K, BLOCK_T], a_desc.layout)
    w_smem = gl.allocate_shared_memory(
        w_desc.dtype, [steps, BLOCK_N // GROUP_N, 4, 4, 2, BLOCK_K], w_desc.layout
    )
    w_rest = w_smem
    if REST > 0:
        w_rest = gl.allocate_shared_memory(
            w_desc.dtype, [steps, REST // GROUP_N, 4, 4, 2, BLOCK_K], w_rest_desc.layout
        )
    bias_smem = w_smem
    bias_rest = w_smem
    if HAS_BIAS:
        # For each consumer, so that they need not wait for each other.
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        bias_smem = gl.allocate_shared_memory(bias_ptr.dtype.element_ty, [2, BLOCK_N], flat)
        if REST > 0:
            bias_rest = gl.allocate_shared_memory(bias_ptr.dtype.element_ty, [2, REST], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [steps, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(order.index(n), count=1)
    for n in gl.static_range(steps):
        mbarrier.init(w_ready.index(n), count=1)
    mbarrier.init(w_empty, count=2)
    prefetch_descriptors("hopper_product_kernel", (0, 7, 18) if REST > 0 else (0, 7))
    grid_launch_dependents()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_ptr,
                    bias_ptr,
                    bias_smem,
                    bias_rest,
                    a_smem,
                    w_smem,
                    w_rest,
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
                    REST,
                    BLOCK_K,
                    STAGES,
                ),
            ),
            (
                _multiply,
                (
                    out_ptr,
                    bias_ptr,
                    bias_smem,
                    bias_rest,
                    a_smem,
                    w_smem,
                    w_rest,
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
                    REST,
                    BLOCK_K,
                    STAGES,
                ),
            ),
            (
                _load,
                (
                    a_desc,
                    w_desc,
                    w_rest_desc,
                    a_smem,
                    w_smem,
                    w_rest,
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
                    REST,
                    BLOCK_K,
                    STAGES,
                    EARLY_PARTS,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
