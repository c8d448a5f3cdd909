"""Launch configs of Monarch's kernels: what fits a device, what is safe, what is worth timing.

Pure arithmetic on a call: imports neither torch nor triton.

A config of "fused" holds: tokens, rows, columns (tile of tokens, of an output block's rows, step
over p), slices (parts of an output block), together (input blocks whose first products share a
pipeline), warps, right_stages, left_stages, tma (the copy engine loads).

A config of "two" holds the same as ``right_*`` for its first kernel and ``left_*`` for its second;
hidden values of a rank up to ``left_resident`` stay in the second one's shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blr_kernels.ops.alignment import TMA_ALIGNMENT
from blr_kernels.ops.triton_config import tile_of

if TYPE_CHECKING:
    from blr_kernels.ops.paths import Call, Config

MOST_CANDIDATES = 12
MOST_UNROLLED = 32
"""Products that a fused kernel's source may unroll to; more only bloats it."""

_FEW_TOKENS = 1024
_FUSED_BLOCKS = (2, 4)  # the hidden values of 8 never fit the registers of a program
_SPARE_BYTES = 1024
"""Barriers and the bias's tiles."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


def power_of_two_in(size: int, most: int) -> int:
    """The largest power of two that divides ``size``, at most ``most``."""
    return min(size & -size, most)


def step_over(size: int, most: int) -> int:
    """Step over a summed dimension: divides it if 16 or more does, else its last one is masked."""
    dividing = power_of_two_in(size, most)
    return dividing if dividing >= 16 else tile_of(size, most)


def inner_tile(call: Call) -> int:
    """Columns of one hidden piece (a part of m)."""
    return step_over(call.inner, 64)


def pieces(call: Call) -> int:
    """Hidden pieces that one input block gives to one output block."""
    return ceil_div(call.inner, inner_tile(call))


def group(call: Call) -> int:
    """Hidden pieces that one product of the fused kernel sums over."""
    tile = inner_tile(call)
    if call.inner % tile:
        return 1
    return power_of_two_in(call.blocks * pieces(call), 256 // tile)


def is_hopper(call: Call) -> bool:
    """Whether products run from shared memory and registers at once, as only sm_90's do."""
    return call.device.capability[0] == 9 and call.itemsize == 2


def tma_fits(call: Call) -> bool:
    """Whether the copy engine may load: on Hopper, with strides aligned and no tile cut inside.

    x's own row stride and the base addresses are known only at run time.
    """
    strides = (call.in_features, call.p, call.rank)
    return (
        is_hopper(call)
        and all(stride * call.itemsize % TMA_ALIGNMENT == 0 for stride in strides)
        and call.p % 16 == 0
        and call.inner % 16 == 0
    )


def per_slice(call: Call, rows: int, slices: int) -> int:
    """Rows of an output block that one program computes: whole tiles, and no program idle."""
    tiles = ceil_div(call.q, rows)
    return ceil_div(tiles, min(slices, tiles)) * rows


def fused_shared_bytes(call: Call, config: Config) -> int:
    """Shared memory of a fused launch, not below what the compiler takes."""
    tile, lanes, tokens = inner_tile(call), call.blocks, config["tokens"]
    step = step_over(call.p, config["columns"])
    rank = call.blocks * pieces(call) * tile
    right = config["right_stages"] * config["together"] * (tokens + lanes * tile) * step
    left = config["left_stages"] * lanes * config["rows"] * rank
    staging = tokens * lanes * max(config["rows"], tile)
    if config["tma"]:
        return max(right, left + staging) * call.itemsize + _SPARE_BYTES
    # Blackwell's instructions read both operands from shared memory.
    hidden = tokens * lanes * rank if call.device.capability[0] == 10 else 0
    return (right + left + staging + hidden) * call.itemsize + _SPARE_BYTES


def fused_registers(call: Call, config: Config) -> int:
    """Registers a thread of a fused launch about needs."""
    tile, lanes, tokens = inner_tile(call), call.blocks, config["tokens"]
    warps, together = config["warps"], config["together"]
    threads = 32 * warps
    holders = 32 * min(warps, max(1, tokens // 16))  # warps along N hold the same hidden values
    hidden = tokens * lanes * call.blocks * pieces(call) * tile * call.itemsize // (4 * holders)
    first = hidden * (call.blocks - together) // call.blocks
    first += together * tokens * lanes * tile // threads
    rows = config["rows"]
    second = hidden + tokens * rows * (2 + lanes) // (2 * threads)
    # Below 64 tokens, and before Hopper, an instruction's second operand sits in registers too.
    addresses = 40 if config["tma"] else 90
    return max(first, second) + addresses + (50 if tokens < 64 else 0)


def fused_fits(call: Call, config: Config) -> bool:
    """Whether a fused launch stays within the device's shared memory and registers."""
    return (
        fused_shared_bytes(call, config) <= call.device.shared_bytes
        and fused_registers(call, config) <= 256
    )


# tokens, rows, warps: from the least traffic to the least demand. Before Hopper 16 rows come first:
# with 32 an exact GELU spills.
_FUSED_HOPPER = ((128, 32, 8), (64, 32, 4), (64, 32, 8), (64, 64, 8), (64, 16, 8))
_FUSED_PORTABLE = ((64, 16, 8), (64, 32, 8), (32, 16, 4), (16, 16, 4))


def _fused_staged(call: Call, tma: bool, **sizes: int) -> Config | None:
    """The most pipelining that fits with these sizes, None if nothing does."""
    shared = ((4, 3), (2, 3), (1, 4), (1, 3), (1, 2), (1, 1)) if tma else ((1, 3), (1, 2), (1, 1))
    for together, right_stages in shared:
        if call.blocks % together:
            continue
        for left_stages in (4, 3, 2):
            config = {
                **sizes,
                "columns": 64,
                "together": together,
                "right_stages": right_stages,
                "left_stages": left_stages,
                "tma": int(tma),
            }
            if fused_fits(call, config):
                return config
    return None


def fused_candidates(call: Call, copy_engine: bool = True) -> list[Config]:
    """Fused configs worth timing, the default first; none if nothing fits.

    Args:
        copy_engine: False for operands that it cannot read although their shapes would let it.
    """
    tma = copy_engine and tma_fits(call)
    sizes: list[dict[str, int]] = []
    shapes = _FUSED_HOPPER if is_hopper(call) else _FUSED_PORTABLE
    for tokens, rows, warps in shapes:
        tiles = ceil_div(call.q, rows)
        slices = max(1, min(tiles, call.device.sms // ceil_div(call.tokens, tokens)))
        sizes.append({"tokens": tokens, "rows": rows, "slices": slices, "warps": warps})
    found: list[Config] = []
    for size in sizes:
        config = _fused_staged(call, tma, **size)
        if config is not None and config not in found:
            found.append(config)
    return found[:MOST_CANDIDATES]


def why_not(call: Call) -> str:
    """The reason why neither path can take a call, "" if they can."""
    if (0, 0) < call.device.capability < (8, 0):
        major, minor = call.device.capability
        return f"it needs tensor cores of compute capability 8.0, the device has {major}.{minor}"
    return ""


def fused_why_not(call: Call) -> str:
    """The reason why the fused kernel cannot take a call, "" if it can."""
    if reason := why_not(call):
        return reason
    if call.itemsize != 2:
        return "it takes float16 and bfloat16"
    if call.blocks not in _FUSED_BLOCKS:
        return f"it takes 2 or 4 blocks, got {call.blocks}"
    unrolled = call.blocks * pieces(call)
    if unrolled > MOST_UNROLLED:
        return f"its source would unroll to {unrolled} products, worth it up to {MOST_UNROLLED}"
    # Operands that the copy engine cannot read take the other form, which must fit as well.
    if not (fused_candidates(call) and fused_candidates(call, copy_engine=False)):
        return (
            f"the hidden values of a tile at rank {call.rank} do not fit the registers and the "
            f"{call.device.shared_bytes} bytes of shared memory"
        )
    return ""


def fused_suits(call: Call) -> bool:
    """Whether the first product is small enough to be worth repeating for each slice, and the
    tokens fill the device.
    """
    return call.tokens > _FEW_TOKENS and call.p <= 2 * call.q


def rank_tile(call: Call) -> int:
    """Columns of hidden values that hold a whole rank."""
    return tile_of(call.rank, 1 << 30)


def is_resident(call: Call, config: Config) -> bool:
    """Whether the second kernel keeps a token tile's hidden values in shared memory."""
    return rank_tile(call) <= config["left_resident"]


def rank_step(call: Call, config: Config) -> int:
    """The second kernel's step over the rank."""
    return rank_tile(call) if is_resident(call, config) else step_over(call.rank, 64)


def two_shared_bytes(call: Call, config: Config) -> tuple[int, int]:
    """Shared memory of the two launches, not below what the compiler takes."""
    tile, step = inner_tile(call), step_over(call.p, config["right_columns"])
    first_rows = config["right_lanes"] * tile
    first = config["right_stages"] * (config["right_tokens"] + first_rows) * step
    first = max(first, 2 * config["right_tokens"] * first_rows)
    tokens, rows, lanes = config["left_tokens"], config["left_rows"], config["left_lanes"]
    step = rank_step(call, config)
    if is_resident(call, config):
        second = lanes * step * (tokens + config["left_stages"] * rows)
    else:
        second = config["left_stages"] * lanes * (tokens + rows) * step
    second += tokens * rows * lanes + 2 * config["left_stages"] * rows * lanes
    return first * call.itemsize + _SPARE_BYTES, second * call.itemsize + _SPARE_BYTES


# first_tokens, first_warps; tokens, rows, warps; resident
_TWO_SMALLEST = (16, 4, 16, 16, 4, 0)
_TWO_HOPPER = (
    (128, 8, 128, 32, 8, 256),
    (128, 8, 64, 64, 8, 256),
    (128, 8, 64, 32, 8, 256),
    (64, 4, 64, 32, 4, 256),
    (64, 4, 64, 16, 4, 256),
    (128, 8, 64, 32, 8, 0),
)
_TWO_HOPPER_FEW = ((32, 4, 64, 32, 4, 256), (32, 4, 32, 16, 4, 256), (16, 4, 16, 32, 4, 256))
_TWO_PORTABLE = ((64, 4, 64, 32, 8, 256), (64, 4, 64, 32, 8, 0), (64, 4, 32, 16, 4, 0))
_TWO_PORTABLE_FEW = ((32, 4, 32, 16, 4, 0), _TWO_SMALLEST)


def _two_staged(call: Call, sizes: Config) -> Config | None:
    """The most pipelining that fits in each kernel with these sizes, None if too little does."""
    limit = call.device.shared_bytes
    least = 2 if is_resident(call, sizes) else 1
    for first_stages in (4, 3, 2, 1):
        for stages in range(3, least - 1, -1):
            config = {**sizes, "right_stages": first_stages, "left_stages": stages}
            first, second = two_shared_bytes(call, config)
            if first > limit:
                break
            if second <= limit:
                return config
    return None


def two_candidates(call: Call, copy_engine: bool = True) -> list[Config]:
    """Configs of the two kernels worth timing, the default first; arguments as above."""
    tma = copy_engine and tma_fits(call)
    few = call.tokens <= _FEW_TOKENS
    sizes: tuple[tuple[int, ...], ...]
    if call.itemsize == 4:
        sizes = ()
    elif is_hopper(call):
        sizes = (*_TWO_HOPPER_FEW, *_TWO_HOPPER) if few else _TWO_HOPPER
    else:
        sizes = (*_TWO_PORTABLE_FEW, *_TWO_PORTABLE[1:]) if few else _TWO_PORTABLE
    tile = inner_tile(call)
    found: list[Config] = []
    for first_tokens, first_warps, tokens, rows, warps, resident in (*sizes, _TWO_SMALLEST):
        most = power_of_two_in(call.blocks, 4)
        first_lanes = most if tile * most <= 128 else max(1, 128 // tile)
        first_programs = ceil_div(call.tokens, first_tokens) * call.blocks * pieces(call)
        while first_lanes > 1 and first_programs * (call.blocks // first_lanes) < call.device.sms:
            first_lanes //= 2
        programs = ceil_div(call.tokens, tokens) * (call.blocks // most)
        slices = max(1, (2 if few else 1) * call.device.sms // programs)
        config = {
            "right_tokens": first_tokens,
            "right_columns": 64,
            "right_lanes": first_lanes,
            "right_warps": first_warps,
            "left_tokens": tokens,
            "left_rows": rows,
            "left_lanes": most,
            "left_slices": slices,
            "left_warps": warps,
            "left_resident": resident,
            "tma": int(tma),
        }
        staged = _two_staged(call, config)
        if staged is not None and staged not in found:
            found.append(staged)
    return found[:MOST_CANDIDATES]
