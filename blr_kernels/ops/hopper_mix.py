"""BLAST's first kernel on Hopper, in Gluon: x -> the mixed intermediate z.

A program keeps x of 64 tokens in shared memory, where it fits, and streams ``right`` past it by
TMA, so that the bytes read through L2 are those of x once and of ``right`` once per 64 tokens. Two
consumer warp groups keep one fp32 accumulator per output block in registers. They take turns: while
the tensor cores compute one group's products, the other mixes its own on the ordinary cores.
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

TILE_RANK = gl.constexpr(64)  # of a consumer
TILE_TOKENS = gl.constexpr(64)  # of a program
CONSUMERS = gl.constexpr(2)


@gluon.jit
def _load(
    x_desc,
    right_desc,
    x_smem,
    right_smem,
    x_ready,
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
):
    """The producer: one warp that issues every TMA load."""
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    x_boxes: gl.constexpr = 1 if SPLIT_RANK else CONSUMERS
    right_boxes: gl.constexpr = CONSUMERS if SPLIT_RANK else 1
    item: gl.constexpr = x_desc.dtype.primitive_bitwidth // 8
    x_bytes: gl.constexpr = TILE_TOKENS * BLOCK_K * item
    right_bytes: gl.constexpr = right_boxes * TILE_RANK * BLOCK_K * item
    step = 0
    for tile in range(first_tile, first_tile + tiles):
        for j in range(BLOCKS):
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                bar = ready.index(stage)
                column = j * P + k * BLOCK_K
                if RESIDENT:
                    if tile == first_tile:
                        at = j * steps + k
                        mbarrier.expect(x_ready.index(at), x_bytes)
                        for c in gl.static_range(x_boxes):
                            tma.async_copy_global_to_shared(
                                x_desc,
                                [token + c * (TILE_TOKENS // x_boxes), column],
                                x_ready.index(at),
                                x_smem.index(at * x_boxes + c),
                            )
                    mbarrier.expect(bar, right_bytes)
                else:
                    mbarrier.expect(bar, right_bytes + x_bytes)
                    for c in gl.static_range(x_boxes):
                        tma.async_copy_global_to_shared(
                            x_desc,
                            [token + c * (TILE_TOKENS // x_boxes), column],
                            bar,
                            x_smem.index(stage * x_boxes + c),
                        )
                for c in gl.static_range(right_boxes):
                    tma.async_copy_global_to_shared(
                        right_desc,
                        [j * RANK + (tile * right_boxes + c) * TILE_RANK, k * BLOCK_K],
                        bar,
                        right_smem.index(stage * right_boxes + c),
                    )
                step += 1


@gluon.constexpr_function
def _constraints(inputs):
    """Constraints of an assembly text with one output and ``inputs`` inputs, all fp32."""
    return "=f" + ",f" * inputs


@gluon.constexpr_function
def _stored(tokens):
    """Layout (64 rank, tokens) in which a thread holds eight ranks of a token, 16 bytes.

    Every value stays in the warp that computed it, so that changing to it needs no barrier.
    """
    registers = [[1, 0], [2, 0], [4, 0], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(
        reg_bases=registers[: 4 if tokens == 32 else 5],
        lane_bases=[[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, tokens],
    )


@gluon.jit
def _issue(
    product,
    x_smem,
    right_smem,
    x_ready,
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
):
    """Issues step k of ``right[j] @ x_j^T`` once its operands are there."""
    stage = (step + k) % STAGES
    x_at = stage
    if RESIDENT:
        x_at = j * STEPS + k
        mbarrier.wait(x_ready.index(x_at), 0)
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
    x_ready,
    ready,
    step,
    j,
    consumer: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
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
            x_ready,
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
        )
    return product


@gluon.jit
def _multiply_in_turn(
    x_smem,
    right_smem,
    x_ready,
    ready,
    empty,
    step,
    j,
    consumer: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
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
            x_ready,
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
        )
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
        if k > 0:
            mbarrier.arrive(empty.index((step + k - 1) % STAGES), count=1)
    product = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((step + STEPS - 1) % STAGES), count=1)
    return product


@gluon.jit
def _scales(
    coupling_row,  # of shape (64,): at coupling[first, 0, rank]
    inside,  # (64,): whether the rank exists
    j,
    first_block,
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
):
    """``coupling[first + i, j, rank]`` for every accumulator i, still in the factors' dtype."""
    scales = ()
    for i in gl.static_range(ACCUMULATORS):
        at = coupling_row + (i * BLOCKS + j) * RANK
        if BLOCKS % ACCUMULATORS == 0:
            s = gl.load(at, mask=inside, other=0.0)
        else:
            s = gl.load(at, mask=inside & (first_block + i < BLOCKS), other=0.0)
        scales = scales + (s,)  # noqa: RUF005
    return scales


@gluon.jit
def _add(accs, scales, product, ACCUMULATORS: gl.constexpr):
    """Adds the product, scaled, to every accumulator."""
    mixed = ()
    for i in gl.static_range(ACCUMULATORS):
        scale = gl.expand_dims(scales[i].to(gl.float32), 1)
        mixed = mixed + (accs[i] + scale * product,)  # noqa: RUF005
    return mixed


@gluon.jit
def _free(empty, step, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Gives the stages of one product back to the producer."""
    for k in gl.static_range(STEPS):
        mbarrier.arrive(empty.index((step + k) % STAGES), count=1)


@gluon.jit
def _mix(
    z_ptr,
    coupling_ptr,
    x_smem,
    right_smem,
    x_ready,
    ready,
    empty,
    order,
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
    RESIDENT: gl.constexpr,
    SPLIT_RANK: gl.constexpr,
    LATE_WAIT: gl.constexpr,
):
    """A consumer warp group: half of the tokens or of the rank of every tile of this program."""
    STEPS: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    TOKENS: gl.constexpr = TILE_TOKENS if SPLIT_RANK else TILE_TOKENS // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    stored: gl.constexpr = _stored(TOKENS)
    offs_r = gl.arange(0, TILE_RANK, gl.SliceLayout(1, layout))
    z_rank = gl.arange(0, TILE_RANK, gl.SliceLayout(1, stored))
    z_token = token + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    rank_from = first_tile * TILE_RANK
    rank_step: gl.constexpr = TILE_RANK * CONSUMERS if SPLIT_RANK else TILE_RANK
    if SPLIT_RANK:
        rank_from = first_tile * rank_step + consumer * TILE_RANK
    else:
        z_token += consumer * TOKENS
    z_row = z_ptr + (first_block * z_block + z_token).to(gl.int64) * RANK
    z_row = gl.expand_dims(z_row, 0)
    step = 0
    turn = 0
    for tile in range(tiles):
        rank = rank_from + tile * rank_step + offs_r
        inside = rank < RANK
        row = coupling_ptr + first_block * (BLOCKS * RANK) + rank
        accs = ()
        for _ in gl.static_range(ACCUMULATORS):
            accs = accs + (gl.zeros((TILE_RANK, TOKENS), gl.float32, layout),)  # noqa: RUF005
        if 2 * STEPS <= STAGES:
            # Two products a turn: the second is computed while the first is mixed. Nothing is in
            # flight from turn to turn, since the assembler would serialise that.
            for pair in range(BLOCKS // 2):
                j = 2 * pair
                scales = _scales(row, inside, j, first_block, BLOCKS, RANK, ACCUMULATORS)
                mbarrier.wait(order.index(consumer), (turn & 1) ^ (1 - consumer))
                even = _multiply(
                    accs,
                    x_smem,
                    right_smem,
                    x_ready,
                    ready,
                    step,
                    j,
                    consumer,
                    STEPS,
                    STAGES,
                    RESIDENT,
                    SPLIT_RANK,
                    ACCUMULATORS,
                )
                odd = _multiply(
                    accs,
                    x_smem,
                    right_smem,
                    x_ready,
                    ready,
                    step + STEPS,
                    j + 1,
                    consumer,
                    STEPS,
                    STAGES,
                    RESIDENT,
                    SPLIT_RANK,
                    ACCUMULATORS,
                )
                done_even = warpgroup_mma_wait(STEPS, deps=(even,))
                mbarrier.arrive(order.index(1 - consumer), count=1)
                _free(empty, step, STEPS, STAGES)
                accs = _add(accs, scales, done_even, ACCUMULATORS)
                scales = _scales(row, inside, j + 1, first_block, BLOCKS, RANK, ACCUMULATORS)
                done_odd = warpgroup_mma_wait(0, deps=(odd,))
                _free(empty, step + STEPS, STEPS, STAGES)
                accs = _add(accs, scales, done_odd, ACCUMULATORS)
                step += 2 * STEPS
                turn += 1
            if BLOCKS % 2 == 1:
                scales = _scales(row, inside, BLOCKS - 1, first_block, BLOCKS, RANK, ACCUMULATORS)
                mbarrier.wait(order.index(consumer), (turn & 1) ^ (1 - consumer))
                even = _multiply(
                    accs,
                    x_smem,
                    right_smem,
                    x_ready,
                    ready,
                    step,
                    BLOCKS - 1,
                    consumer,
                    STEPS,
                    STAGES,
                    RESIDENT,
                    SPLIT_RANK,
                    ACCUMULATORS,
                )
                done_even = warpgroup_mma_wait(0, deps=(even,))
                mbarrier.arrive(order.index(1 - consumer), count=1)
                _free(empty, step, STEPS, STAGES)
                accs = _add(accs, scales, done_even, ACCUMULATORS)
                step += STEPS
                turn += 1
        else:
            for j in range(BLOCKS):
                scales = _scales(row, inside, j, first_block, BLOCKS, RANK, ACCUMULATORS)
                product = _multiply_in_turn(
                    x_smem,
                    right_smem,
                    x_ready,
                    ready,
                    empty,
                    step,
                    j,
                    consumer,
                    STEPS,
                    STAGES,
                    RESIDENT,
                    SPLIT_RANK,
                    TOKENS,
                    layout,
                )
                accs = _add(accs, scales, product, ACCUMULATORS)
                step += STEPS
        if LATE_WAIT:
            grid_wait()
        column = rank_from + tile * rank_step + z_rank
        z_at = z_row + gl.expand_dims(column, 1)
        mask = gl.expand_dims(column < RANK, 1)
        for i in gl.static_range(ACCUMULATORS):
            z = gl.convert_layout(accs[i].to(z_ptr.dtype.element_ty), stored)
            if BLOCKS % ACCUMULATORS == 0:
                gl.store(z_at, z, mask=mask)
            else:
                gl.store(z_at, z, mask=mask & (first_block + i < BLOCKS))
            z_at += z_block.to(gl.int64) * RANK


@gluon.jit
def hopper_mix_kernel(
    x_desc,  # (tokens, BLOCKS * P), blocks of (64 if SPLIT_RANK else 32, BLOCK_K)
    right_desc,  # (BLOCKS * RANK, P), blocks of (64, BLOCK_K)
    z_ptr,  # (BLOCKS, z_block, RANK), contiguous
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    z_block,  # tokens of z, a multiple of 64
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    P: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
    TILES: gl.constexpr,  # rank tiles of a program
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,  # x stays in shared memory
    SPLIT_RANK: gl.constexpr,  # the consumers share tokens and split the rank, or the other way
    LATE_WAIT: gl.constexpr,
):
    """``z[i, t, :] = sum_j coupling[i, j, :] * (right[j] @ x[t, j*P : (j + 1)*P])``."""
    tile_rank: gl.constexpr = TILE_RANK * CONSUMERS if SPLIT_RANK else TILE_RANK
    all_tiles: gl.constexpr = (RANK + tile_rank - 1) // tile_rank
    shares: gl.constexpr = (all_tiles + TILES - 1) // TILES
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    x_tiles: gl.constexpr = BLOCKS * steps if RESIDENT else STAGES
    x_boxes: gl.constexpr = 1 if SPLIT_RANK else CONSUMERS
    right_boxes: gl.constexpr = CONSUMERS if SPLIT_RANK else 1
    program = gl.program_id(0)
    token = (program // shares) * TILE_TOKENS
    first_tile = (program % shares) * TILES
    tiles = gl.minimum(TILES, all_tiles - first_tile)
    first_block = gl.program_id(1) * ACCUMULATORS

    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [x_tiles * x_boxes, TILE_TOKENS // x_boxes, BLOCK_K], x_desc.layout
    )
    right_smem = gl.allocate_shared_memory(
        right_desc.dtype, [STAGES * right_boxes, TILE_RANK, BLOCK_K], right_desc.layout
    )
    x_ready = gl.allocate_shared_memory(gl.int64, [x_tiles, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(x_tiles):
        mbarrier.init(x_ready.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(empty.index(n), count=CONSUMERS)
    for n in gl.static_range(CONSUMERS):
        mbarrier.init(order.index(n), count=1)
    if not LATE_WAIT:
        grid_wait()
    grid_launch_dependents()
    gl.warp_specialize(
        [
            (
                _mix,
                (
                    z_ptr,
                    coupling_ptr,
                    x_smem,
                    right_smem,
                    x_ready,
                    ready,
                    empty,
                    order,
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
                    RESIDENT,
                    SPLIT_RANK,
                    LATE_WAIT,
                ),
            ),
            (
                _mix,
                (
                    z_ptr,
                    coupling_ptr,
                    x_smem,
                    right_smem,
                    x_ready,
                    ready,
                    empty,
                    order,
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
                    RESIDENT,
                    SPLIT_RANK,
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
                    x_ready,
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
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
