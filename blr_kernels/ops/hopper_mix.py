"""BLAST's first kernel on Hopper, in Gluon: x -> the mixed intermediate z.

A program keeps x of 64 tokens in shared memory and streams ``right`` past it by TMA, so that the
bytes read through L2 are those of x once and of ``right`` once per 64 tokens. Two consumer warp
groups own 32 tokens each and keep one fp32 accumulator per output block in registers; while the
tensor cores compute the product with block j + 1, the ordinary cores mix the one with block j.
"""

# Gluon gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blr_kernels.ops.hopper_grid import grid_launch_dependents, grid_wait

TILE_RANK = gl.constexpr(64)
TILE_TOKENS = gl.constexpr(64)
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
):
    """The producer: one warp that issues every TMA load."""
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    half: gl.constexpr = TILE_TOKENS // CONSUMERS
    item: gl.constexpr = x_desc.dtype.primitive_bitwidth // 8
    x_bytes: gl.constexpr = TILE_TOKENS * BLOCK_K * item
    right_bytes: gl.constexpr = TILE_RANK * BLOCK_K * item
    step = 0
    for tile in range(first_tile, first_tile + tiles):
        for j in range(BLOCKS):
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                bar = ready.index(stage)
                if RESIDENT:
                    at = j * steps + k
                    if tile == first_tile:
                        x_bar = x_ready.index(at)
                        mbarrier.expect(x_bar, x_bytes)
                        for c in gl.static_range(CONSUMERS):
                            tma.async_copy_global_to_shared(
                                x_desc,
                                [token + c * half, j * P + k * BLOCK_K],
                                x_bar,
                                x_smem.index(at * CONSUMERS + c),
                            )
                    mbarrier.expect(bar, right_bytes)
                else:
                    mbarrier.expect(bar, right_bytes + x_bytes)
                    for c in gl.static_range(CONSUMERS):
                        tma.async_copy_global_to_shared(
                            x_desc,
                            [token + c * half, j * P + k * BLOCK_K],
                            bar,
                            x_smem.index(stage * CONSUMERS + c),
                        )
                tma.async_copy_global_to_shared(
                    right_desc,
                    [j * RANK + tile * TILE_RANK, k * BLOCK_K],
                    bar,
                    right_smem.index(stage),
                )
                step += 1


@gluon.constexpr_function
def _constraints(inputs):
    """Constraints of an assembly text with one output and ``inputs`` inputs, all fp32."""
    return "=f" + ",f" * inputs


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
    ACCUMULATORS: gl.constexpr,
):
    """Issues ``right[j] @ x_j^T`` (64 rank, 32 tokens) without waiting for it.

    The first instruction ignores what its accumulator held, and nothing may set it: any other
    instruction that writes those registers while another product is being computed makes the
    assembler serialise the two. So they come, unset, from an empty assembly text, which also
    reads the sums: what has been mixed before stays before, and leaves its registers free.
    """
    product = gl.inline_asm_elementwise(
        "// $0", _constraints(ACCUMULATORS), accs, dtype=gl.float32, is_pure=False, pack=1
    )
    for k in gl.static_range(STEPS):
        stage = (step + k) % STAGES
        if RESIDENT:
            mbarrier.wait(x_ready.index(j * STEPS + k), 0)
            x_at = (j * STEPS + k) * CONSUMERS + consumer
        else:
            x_at = stage * CONSUMERS + consumer
        mbarrier.wait(ready.index(stage), ((step + k) // STAGES) & 1)
        product = warpgroup_mma(
            right_smem.index(stage),
            x_smem.index(x_at).permute((1, 0)),
            product,
            use_acc=k > 0,
            is_async=True,
        )
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
    z_desc,
    coupling_ptr,
    x_smem,
    right_smem,
    z_smem,
    x_ready,
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
    RESIDENT: gl.constexpr,
    LATE_WAIT: gl.constexpr,
):
    """A consumer warp group: 32 tokens, every rank tile of this program."""
    STEPS: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    half: gl.constexpr = TILE_TOKENS // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    offs_r = gl.arange(0, TILE_RANK, rows)
    step = 0
    for tile in range(first_tile, first_tile + tiles):
        rank = tile * TILE_RANK + offs_r
        inside = rank < RANK
        row = coupling_ptr + first_block * (BLOCKS * RANK) + rank
        accs = ()
        for _ in gl.static_range(ACCUMULATORS):
            accs = accs + (gl.zeros((TILE_RANK, half), gl.float32, layout),)  # noqa: RUF005
        # Two products a turn: the second is computed while the first is mixed. Nothing is in
        # flight from turn to turn, since the assembler would serialise that.
        for pair in range(BLOCKS // 2):
            j = 2 * pair
            scales = _scales(row, inside, j, first_block, BLOCKS, RANK, ACCUMULATORS)
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
                ACCUMULATORS,
            )
            done_even = warpgroup_mma_wait(STEPS, deps=(even,))
            _free(empty, step, STEPS, STAGES)
            accs = _add(accs, scales, done_even, ACCUMULATORS)
            scales = _scales(row, inside, j + 1, first_block, BLOCKS, RANK, ACCUMULATORS)
            done_odd = warpgroup_mma_wait(0, deps=(odd,))
            _free(empty, step + STEPS, STEPS, STAGES)
            accs = _add(accs, scales, done_odd, ACCUMULATORS)
            step += 2 * STEPS
        if BLOCKS % 2 == 1:
            scales = _scales(row, inside, BLOCKS - 1, first_block, BLOCKS, RANK, ACCUMULATORS)
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
                ACCUMULATORS,
            )
            done_even = warpgroup_mma_wait(0, deps=(even,))
            _free(empty, step, STEPS, STAGES)
            accs = _add(accs, scales, done_even, ACCUMULATORS)
            step += STEPS
        if LATE_WAIT:
            grid_wait()
        for i in gl.static_range(ACCUMULATORS):
            slot = z_smem.index(consumer * 2 + i % 2)
            tma.store_wait(1)
            slot.permute((1, 0)).store(accs[i].to(z_desc.dtype))
            fence_async_shared()
            if first_block + i < BLOCKS:
                tma.async_copy_shared_to_global(
                    z_desc,
                    [(first_block + i) * z_block + token + consumer * half, tile * TILE_RANK],
                    slot,
                )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])
def hopper_mix_kernel(
    x_desc,  # (tokens, BLOCKS * P), blocks of (32, BLOCK_K)
    right_desc,  # (BLOCKS * RANK, P), blocks of (64, BLOCK_K)
    z_desc,  # (BLOCKS * z_block, RANK), blocks of (32, 64)
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    z_block,  # tokens of z, a multiple of 64
    BLOCKS: gl.constexpr,
    RANK: gl.constexpr,
    P: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
    TILES: gl.constexpr,  # rank tiles of a program
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    LATE_WAIT: gl.constexpr,
):
    """``z[i, t, :] = sum_j coupling[i, j, :] * (right[j] @ x[t, j*P : (j + 1)*P])``."""
    all_tiles: gl.constexpr = (RANK + TILE_RANK - 1) // TILE_RANK
    shares: gl.constexpr = (all_tiles + TILES - 1) // TILES
    steps: gl.constexpr = (P + BLOCK_K - 1) // BLOCK_K
    x_tiles: gl.constexpr = BLOCKS * steps if RESIDENT else STAGES
    half: gl.constexpr = TILE_TOKENS // CONSUMERS
    program = gl.program_id(0)
    token = (program // shares) * TILE_TOKENS
    first_tile = (program % shares) * TILES
    tiles = gl.minimum(TILES, all_tiles - first_tile)
    first_block = gl.program_id(1) * ACCUMULATORS

    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [x_tiles * CONSUMERS, half, BLOCK_K], x_desc.layout
    )
    right_smem = gl.allocate_shared_memory(
        right_desc.dtype, [STAGES, TILE_RANK, BLOCK_K], right_desc.layout
    )
    z_smem = gl.allocate_shared_memory(
        z_desc.dtype, [CONSUMERS * 2, half, TILE_RANK], z_desc.layout
    )
    x_ready = gl.allocate_shared_memory(gl.int64, [x_tiles, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(x_tiles):
        mbarrier.init(x_ready.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(empty.index(n), count=CONSUMERS)
    if not LATE_WAIT:
        grid_wait()
    grid_launch_dependents()
    gl.warp_specialize(
        [
            (
                _mix,
                (
                    z_desc,
                    coupling_ptr,
                    x_smem,
                    right_smem,
                    z_smem,
                    x_ready,
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
                    RESIDENT,
                    LATE_WAIT,
                ),
            ),
            (
                _mix,
                (
                    z_desc,
                    coupling_ptr,
                    x_smem,
                    right_smem,
                    z_smem,
                    x_ready,
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
                    RESIDENT,
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
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
