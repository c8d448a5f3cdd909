"""BLAST's first kernel on Hopper, in Gluon: x -> the mixed intermediate z.

For many tokens a program keeps x of 64 in shared memory, where it fits, and streams ``right`` past
it by TMA, so that the bytes read through L2 are those of x once and of ``right`` once per 64
tokens. Its consumer warp groups keep one fp32 accumulator per output block in registers. While the
tensor cores compute the product with block j + 1, a group mixes the one with block j on the
ordinary cores. For few tokens a program has one consumer and half the tokens.

z is written as the registers hold it, token by token along a row of rank, in an order of tokens
(``stored_token``) that the second kernel undoes: each thread stores 16 bytes at once.
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

TILE_RANK = gl.constexpr(64)  # of a consumer
SHARE = gl.constexpr(32)  # tokens that a program has for each of its consumers


@gluon.jit
def _load(
    x_desc,
    right_desc,
    x_smem,
    right_smem,
    ready,
    empty,
    token,
    first_tile,
    tiles,
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    P: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """One warp that issues every TMA load."""
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    x_boxes: gl.constexpr = 1 if SPLIT_RANK else CONSUMERS
    right_boxes: gl.constexpr = CONSUMERS if SPLIT_RANK else 1
    item: gl.constexpr = x_desc.dtype.primitive_bitwidth // 8
    x_bytes: gl.constexpr = SHARE * CONSUMERS * BLOCK_K * item
    right_bytes: gl.constexpr = right_boxes * TILE_RANK * BLOCK_K * item
    stage = 0
    phase = 1
    for tile in range(first_tile, first_tile + tiles):
        row = tile * (right_boxes * TILE_RANK)
        for j in range(BLOCKS):
            for k in gl.static_range(steps):
                column = j * P + k * BLOCK_K
                mbarrier.wait(empty.index(stage), phase)
                bar = ready.index(stage)
                # x that stays comes with the operands of the first tile.
                if RESIDENT and tile > first_tile:
                    mbarrier.expect(bar, right_bytes)
                else:
                    mbarrier.expect(bar, right_bytes + x_bytes)
                    x_at = j * steps + k if RESIDENT else stage
                    for c in gl.static_range(x_boxes):
                        tma.async_copy_global_to_shared(
                            x_desc,
                            [token + c * (SHARE * CONSUMERS // x_boxes), column],
                            bar,
                            x_smem.index(x_at * x_boxes + c),
                        )
                for c in gl.static_range(right_boxes):
                    tma.async_copy_global_to_shared(
                        right_desc,
                        [row + c * TILE_RANK, k * BLOCK_K],
                        bar,
                        right_smem.index(stage * right_boxes + c),
                    )
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            row += RANK


@gluon.jit
def _load_coupling(
    coupling_ptr,
    coupling_smem,
    ready,
    empty,
    first_tile,
    tiles,
    first_block,
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    P: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Another warp that brings the scales of every product, with the first stage of its operands.

    Read by the consumers straight from global memory, they would be waited for step by step.
    """
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    boxes: gl.constexpr = CONSUMERS if SPLIT_RANK else 1
    offs_r = gl.arange(0, TILE_RANK, gl.BlockedLayout([2], [32], [1], [0]))
    stage = 0
    phase = 1
    for tile in range(first_tile, first_tile + tiles):
        rank = tile * (boxes * TILE_RANK) + offs_r
        source = coupling_ptr + first_block * (BLOCKS * RANK) + rank
        for _ in range(BLOCKS):
            for k in gl.static_range(steps):
                mbarrier.wait(empty.index(stage), phase)
                bar = ready.index(stage)
                if k == 0:
                    for i in gl.static_range(ACCUMULATORS):
                        for c in gl.static_range(boxes):
                            mask = rank < RANK - c * TILE_RANK
                            if BLOCKS % ACCUMULATORS > 0:
                                mask = mask & (first_block + i < BLOCKS)
                            async_copy.async_copy_global_to_shared(
                                coupling_smem.index((stage * ACCUMULATORS + i) * boxes + c),
                                source + (i * BLOCKS * RANK + c * TILE_RANK),
                                mask=mask,
                            )
                async_copy.mbarrier_arrive(bar, increment_count=False)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
            source += RANK


@gluon.constexpr_function
def _constraints(inputs):
    """Constraints of an assembly text with one output and ``inputs`` inputs, all fp32."""
    return "=f" + ",f" * inputs


@gluon.jit
def stored_token(position, GROUP: gl.constexpr):
    """The token of a group that is stored at ``position`` (an int tensor in [0, GROUP)).

    A thread of the tensor cores' layout holds tokens 8n + 2c and 8n + 2c + 1 for every n, where c
    is its lane modulo 4; its tokens are stored next to each other.
    """
    share: gl.constexpr = GROUP // 4
    return (position % share) // 2 * 8 + position // share * 2 + position % 2


@gluon.constexpr_function
def _stored(tokens):
    """Layout (64 rank, tokens) of the accumulators with tokens in the order they are stored."""
    lanes = tokens // 4
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << n] for n in range((lanes).bit_length() - 1)] + [[8, 0]],
        lane_bases=[[0, lanes], [0, 2 * lanes], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, tokens],
    )


@gluon.jit
def _in_stored_order(z, TOKENS: gl.constexpr):
    """``z (64, tokens)`` with its columns in the order that they are stored; moves no data."""
    z = z.reshape((TILE_RANK, TOKENS // 8, 4, 2)).permute((0, 2, 1, 3))
    return gl.convert_layout(z.reshape((TILE_RANK, TOKENS)), _stored(TOKENS), assert_trivial=True)


@gluon.jit
def _issue(
    product,
    x_smem,
    right_smem,
    ready,
    step,
    j,
    k,
    use_acc,
    consumer: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Issues step k of ``right[j] @ x_j^T`` once its operands are there."""
    stage = (step + k) % STAGES
    x_at = stage
    if RESIDENT:
        x_at = j * STEPS + k
    right_at = stage
    if SPLIT_RANK:
        right_at = stage * CONSUMERS + consumer
    else:
        x_at = x_at * CONSUMERS + consumer
    mbarrier.wait(ready.index(stage), ((step + k) // STAGES) & 1)
    return warpgroup_mma(
        right_smem.index(right_at),
        x_smem.index(x_at).permute((1, 0)),
        product,
        use_acc=use_acc,
        is_async=True,
    )


@gluon.jit
def _multiply(
    accs,
    x_smem,
    right_smem,
    ready,
    step,
    j,
    consumer: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
):
    """Issues ``right[j] @ x_j^T`` without waiting for it.

    The first instruction ignores what its accumulator held, and nothing may set it: any other
    instruction that writes those registers while another product is being computed makes the
    assembler serialise the two. So they come, unset, from an empty assembly text, which also
    reads the sums: what has been mixed before stays before, and leaves its registers free.
    """
    product = gl.inline_asm_elementwise(
        "// $0", _constraints(ACCUMULATORS), accs, dtype=gl.float32, is_pure=False, pack=1
    )
    for k in gl.static_range(STEPS):
        product = _issue(
            product,
            x_smem,
            right_smem,
            ready,
            step,
            j,
            k,
            k > 0,
            consumer,
            STEPS,
            STAGES,
            RESIDENT,
            SPLIT_RANK,
            CONSUMERS,
        )
    return product


@gluon.jit
def _multiply_in_turn(
    x_smem,
    right_smem,
    ready,
    empty,
    step,
    j,
    consumer: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TOKENS: gl.constexpr,
    layout: gl.constexpr,
):
    """``right[j] @ x_j^T``, for more steps than there are stages: frees them as it goes."""
    sums = warpgroup_mma_init(gl.zeros((TILE_RANK, TOKENS), gl.float32, layout))
    for k in range(STEPS):
        sums = _issue(
            sums,
            x_smem,
            right_smem,
            ready,
            step,
            j,
            k,
            True,
            consumer,
            STEPS,
            STAGES,
            RESIDENT,
            SPLIT_RANK,
            CONSUMERS,
        )
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
        if k > 0:
            mbarrier.arrive(empty.index((step + k - 1) % STAGES), count=1)
    product = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((step + STEPS - 1) % STAGES), count=1)
    return product


@gluon.jit
def _scales(
    coupling_smem,
    stage,
    consumer: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    layout: gl.constexpr,
):
    """``coupling[first + i, j, rank]`` for every accumulator i, still in the factors' dtype."""
    boxes: gl.constexpr = CONSUMERS if SPLIT_RANK else 1
    box: gl.constexpr = consumer if SPLIT_RANK else 0
    scales = ()
    for i in gl.static_range(ACCUMULATORS):
        s = coupling_smem.index((stage * ACCUMULATORS + i) * boxes + box).load(layout)
        scales = scales + (s,)  # noqa: RUF005
    return scales


@gluon.jit
def _add(accs, scales, product, ACCUMULATORS: gl.constexpr, FRESH: gl.constexpr):
    """Adds the product, scaled, to every accumulator; if FRESH it is all they hold."""
    mixed = ()
    for i in gl.static_range(ACCUMULATORS):
        scaled = gl.expand_dims(scales[i].to(gl.float32), 1) * product
        if not FRESH:
            scaled = accs[i] + scaled
        mixed = mixed + (scaled,)  # noqa: RUF005
    return mixed


@gluon.jit
def _mix_run(
    accs,
    x_smem,
    right_smem,
    coupling_smem,
    ready,
    empty,
    step,
    first_j,
    consumer: gl.constexpr,
    COUNT: gl.constexpr,
    STEPS: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    rows: gl.constexpr,
    FRESH: gl.constexpr,
):
    """Mixes blocks ``first_j`` to ``first_j + COUNT``, each while the next one is computed.

    If FRESH there are no sums yet, and ``accs`` is a tuple of one tensor of their shape.
    """
    held: gl.constexpr = 1 if FRESH else ACCUMULATORS
    current = _multiply(
        accs,
        x_smem,
        right_smem,
        ready,
        step,
        first_j,
        consumer,
        STEPS,
        STAGES,
        RESIDENT,
        SPLIT_RANK,
        CONSUMERS,
        held,
    )
    scales = _scales(
        coupling_smem, step % STAGES, consumer, ACCUMULATORS, SPLIT_RANK, CONSUMERS, rows
    )
    for n in gl.static_range(COUNT):
        if n + 1 < COUNT:
            ahead = step + (n + 1) * STEPS
            following = _multiply(
                accs,
                x_smem,
                right_smem,
                ready,
                ahead,
                first_j + n + 1,
                consumer,
                STEPS,
                STAGES,
                RESIDENT,
                SPLIT_RANK,
                CONSUMERS,
                held if n == 0 else ACCUMULATORS,
            )
            later = _scales(
                coupling_smem, ahead % STAGES, consumer, ACCUMULATORS, SPLIT_RANK, CONSUMERS, rows
            )
            done = warpgroup_mma_wait(STEPS, deps=(current,))
        else:
            done = warpgroup_mma_wait(0, deps=(current,))
        for k in gl.static_range(STEPS):
            mbarrier.arrive(empty.index((step + n * STEPS + k) % STAGES), count=1)
        accs = _add(accs, scales, done, ACCUMULATORS, FRESH and n == 0)
        if n + 1 < COUNT:
            current = following
            scales = later
    return accs


@gluon.jit
def _mix(
    z_ptr,
    x_smem,
    right_smem,
    coupling_smem,
    ready,
    empty,
    token,
    first_tile,
    tiles,
    first_block,
    z_block,
    consumer: gl.constexpr,
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    P: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    CONSUMERS: gl.constexpr,
    LATE_WAIT: gl.constexpr,
):
    """A consumer warp group: its share of tokens or rank of every tile of this program."""
    STEPS: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    TOKENS: gl.constexpr = SHARE * CONSUMERS if SPLIT_RANK else SHARE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    stored: gl.constexpr = _stored(TOKENS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    z_rank = gl.arange(0, TILE_RANK, gl.SliceLayout(1, stored))
    z_token = token + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    rank_from = first_tile * TILE_RANK
    rank_step: gl.constexpr = TILE_RANK * CONSUMERS if SPLIT_RANK else TILE_RANK
    if SPLIT_RANK:
        rank_from = first_tile * rank_step + consumer * TILE_RANK
    else:
        z_token += consumer * TOKENS
    first: gl.constexpr = BLOCKS % UNROLL if BLOCKS % UNROLL > 0 else UNROLL
    step = 0
    for tile in range(tiles):
        none = gl.zeros((TILE_RANK, TOKENS), gl.float32, layout)
        if 2 * STEPS <= STAGES:
            # Nothing is in flight from run to run: the assembler would serialise that. The first
            # run sets the sums, so that no instructions do before it.
            accs = _mix_run(
                (none,),
                x_smem,
                right_smem,
                coupling_smem,
                ready,
                empty,
                step,
                0,
                consumer,
                first,
                STEPS,
                ACCUMULATORS,
                STAGES,
                RESIDENT,
                SPLIT_RANK,
                CONSUMERS,
                rows,
                True,
            )
            step += first * STEPS
            for run in range((BLOCKS - first) // UNROLL):
                accs = _mix_run(
                    accs,
                    x_smem,
                    right_smem,
                    coupling_smem,
                    ready,
                    empty,
                    step,
                    first + run * UNROLL,
                    consumer,
                    UNROLL,
                    STEPS,
                    ACCUMULATORS,
                    STAGES,
                    RESIDENT,
                    SPLIT_RANK,
                    CONSUMERS,
                    rows,
                    False,
                )
                step += UNROLL * STEPS
        else:
            accs = ()
            for _ in gl.static_range(ACCUMULATORS):
                accs = accs + (none,)  # noqa: RUF005
            for j in range(BLOCKS):
                mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
                scales = _scales(
                    coupling_smem,
                    step % STAGES,
                    consumer,
                    ACCUMULATORS,
                    SPLIT_RANK,
                    CONSUMERS,
                    rows,
                )
                product = _multiply_in_turn(
                    x_smem,
                    right_smem,
                    ready,
                    empty,
                    step,
                    j,
                    consumer,
                    STEPS,
                    STAGES,
                    RESIDENT,
                    SPLIT_RANK,
                    CONSUMERS,
                    TOKENS,
                    layout,
                )
                accs = _add(accs, scales, product, ACCUMULATORS, False)
                step += STEPS
        if LATE_WAIT:
            grid_wait()
        column = rank_from + tile * rank_step + z_rank
        z_row = z_ptr + (first_block * RANK + column).to(gl.int64) * z_block
        z_at = gl.expand_dims(z_row, 1) + gl.expand_dims(z_token, 0)
        mask = gl.expand_dims(column < RANK, 1)
        for i in gl.static_range(ACCUMULATORS):
            z = _in_stored_order(accs[i].to(z_ptr.dtype.element_ty), TOKENS)
            if BLOCKS % ACCUMULATORS == 0:
                gl.store(z_at, z, mask=mask)
            else:
                gl.store(z_at, z, mask=mask & (first_block + i < BLOCKS))
            z_at += z_block.to(gl.int64) * RANK


@gluon.jit
def hopper_mix_kernel(
    x_desc,  # (tokens, BLOCKS * P), blocks of (64 if SPLIT_RANK else 32, BLOCK_K)
    right_desc,  # (BLOCKS * RANK, P), blocks of (64, BLOCK_K)
    z_ptr,  # (BLOCKS, RANK, z_block), contiguous; tokens in the order of stored_token
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    z_block,  # tokens of z, a multiple of 64
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    P: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
    TILES: gl.constexpr,  # rank tiles of a program
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    UNROLL: gl.constexpr,  # blocks mixed without a pause of the tensor cores
    RESIDENT: gl.constexpr,  # x stays in shared memory
    SPLIT_RANK: gl.constexpr,  # the consumers share tokens and split the rank, or the other way
    CONSUMERS: gl.constexpr,  # 2, or 1 that leaves room for programs of the next kernel
    LATE_WAIT: gl.constexpr,
):
    """``z[i, :, t] = sum_j coupling[i, j, :] * (right[j] @ x[t, j*P : (j + 1)*P])``."""
    tile_rank: gl.constexpr = TILE_RANK * CONSUMERS if SPLIT_RANK else TILE_RANK
    all_tiles: gl.constexpr = (RANK + tile_rank - 1) // tile_rank
    shares: gl.constexpr = (all_tiles + TILES - 1) // TILES
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    x_tiles: gl.constexpr = BLOCKS * steps if RESIDENT else STAGES
    x_boxes: gl.constexpr = 1 if SPLIT_RANK else CONSUMERS
    right_boxes: gl.constexpr = CONSUMERS if SPLIT_RANK else 1
    program = gl.program_id(0)
    token = (program // shares) * (SHARE * CONSUMERS)
    first_tile = (program % shares) * TILES
    tiles = gl.minimum(TILES, all_tiles - first_tile)
    first_block = gl.program_id(1) * ACCUMULATORS

    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [x_tiles * x_boxes, SHARE * CONSUMERS // x_boxes, BLOCK_K], x_desc.layout
    )
    right_smem = gl.allocate_shared_memory(
        right_desc.dtype, [STAGES * right_boxes, TILE_RANK, BLOCK_K], right_desc.layout
    )
    coupling_smem = gl.allocate_shared_memory(
        coupling_ptr.dtype.element_ty,
        [STAGES * ACCUMULATORS * right_boxes, TILE_RANK],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        # The TMA's arrival and that of each lane of the warp that loads the scales.
        mbarrier.init(ready.index(n), count=1 + 32)
        mbarrier.init(empty.index(n), count=CONSUMERS)
    prefetch_descriptors("hopper_mix_kernel", (0, 5))
    if not LATE_WAIT:
        grid_wait()
    grid_launch_dependents()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _mix,
                    (
                        z_ptr,
                        x_smem,
                        right_smem,
                        coupling_smem,
                        ready,
                        empty,
                        token,
                        first_tile,
                        tiles,
                        first_block,
                        z_block,
                        0,
                        BLOCKS,
                        RANK,
                        P,
                        ACCUMULATORS,
                        BLOCK_K,
                        STAGES,
                        UNROLL,
                        RESIDENT,
                        SPLIT_RANK,
                        CONSUMERS,
                        LATE_WAIT,
                    ),
                ),
                (
                    _mix,
                    (
                        z_ptr,
                        x_smem,
                        right_smem,
                        coupling_smem,
                        ready,
                        empty,
                        token,
                        first_tile,
                        tiles,
                        first_block,
                        z_block,
                        1,
                        BLOCKS,
                        RANK,
                        P,
                        ACCUMULATORS,
                        BLOCK_K,
                        STAGES,
                        UNROLL,
                        RESIDENT,
                        SPLIT_RANK,
                        CONSUMERS,
                        LATE_WAIT,
                    ),
                ),
                (
                    _load,
                    (
                        x_desc,
                        right_desc,
                        x_smem,
                        right_smem,
                        ready,
                        empty,
                        token,
                        first_tile,
                        tiles,
                        BLOCKS,
                        RANK,
                        P,
                        BLOCK_K,
                        STAGES,
                        RESIDENT,
                        SPLIT_RANK,
                        CONSUMERS,
                    ),
                ),
                (
                    _load_coupling,
                    (
                        coupling_ptr,
                        coupling_smem,
                        ready,
                        empty,
                        first_tile,
                        tiles,
                        first_block,
                        BLOCKS,
                        RANK,
                        P,
                        ACCUMULATORS,
                        BLOCK_K,
                        STAGES,
                        SPLIT_RANK,
                        CONSUMERS,
                    ),
                ),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _mix,
                    (
                        z_ptr,
                        x_smem,
                        right_smem,
                        coupling_smem,
                        ready,
                        empty,
                        token,
                        first_tile,
                        tiles,
                        first_block,
                        z_block,
                        0,
                        BLOCKS,
                        RANK,
                        P,
                        ACCUMULATORS,
                        BLOCK_K,
                        STAGES,
                        UNROLL,
                        RESIDENT,
                        SPLIT_RANK,
                        CONSUMERS,
                        LATE_WAIT,
                    ),
                ),
                (
                    _load,
                    (
                        x_desc,
                        right_desc,
                        x_smem,
                        right_smem,
                        ready,
                        empty,
                        token,
                        first_tile,
                        tiles,
                        BLOCKS,
                        RANK,
                        P,
                        BLOCK_K,
                        STAGES,
                        RESIDENT,
                        SPLIT_RANK,
                        CONSUMERS,
                    ),
                ),
                (
                    _load_coupling,
                    (
                        coupling_ptr,
                        coupling_smem,
                        ready,
                        empty,
                        first_tile,
                        tiles,
                        first_block,
                        BLOCKS,
                        RANK,
                        P,
                        ACCUMULATORS,
                        BLOCK_K,
                        STAGES,
                        SPLIT_RANK,
                        CONSUMERS,
                    ),
                ),
            ],
            [1, 1],
            [24, 24],
        )
