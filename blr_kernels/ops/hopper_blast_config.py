"""Launch sizes of BLAST on Hopper: what fits a multiprocessor, and what is worth timing."""

from __future__ import annotations

from blr_kernels.ops.hopper_launch import BARRIER_BYTES
from blr_kernels.ops.hopper_mix import SHARE
from blr_kernels.ops.hopper_product import AHEAD
from blr_kernels.ops.hopper_scratch import chunk_tokens
from blr_kernels.ops.paths import Call, Config
from blr_kernels.ops.triton_config import accumulators

TILE = 64
"""Rank of a consumer's tile of the first kernel, and the tokens that two consumers have."""

_MAX_STAGES = 12
_MIN_STAGES = AHEAD.value + 1  # of the product: the last of so many is free once all are begun
_UNROLL = 2  # products in a row that the tensor cores compute without a pause
MANY_TOKENS = 1024
"""Tokens beyond which programs are those of a full device."""

# Up to so many accumulators of 64 tokens fit a consumer's registers; more must be of 32.
_WIDE_ACCUMULATORS = 4
# Parts of a slab that the second kernel asks for before the tokens. More would be in their way, but
# for all there is time where the kernel ahead has long to go.
_EARLY = 2
ALL_EARLY = 64
"""More parts than any slab has."""

_ENOUGH_RING = 64 * 1024  # bytes on their way that hide the latency of memory
_REGISTERS = 65_536  # of a multiprocessor
_PROGRAM_BYTES = 1024  # of its shared memory that it keeps for itself, for each program


def _ceil(size: int, step: int) -> int:
    return -(-size // step) * step


def step_of(size: int) -> int:
    """Step of a sum over ``size`` terms: what a stage of shared memory holds of them."""
    return 128 if size > TILE else TILE


def tile_rank(config: Config) -> int:
    """Ranks of a program's tile, which two consumers may split instead of the tokens."""
    return 2 * TILE if config["mix_split"] else TILE


def tile_tokens(config: Config) -> int:
    """Tokens of a program of the first kernel."""
    return SHARE.value * config["mix_consumers"]


def mix_bytes(call: Call, config: Config) -> int:
    """Shared memory of the first kernel."""
    block_k = step_of(call.p)
    stages = config["mix_stages"]
    x_tiles = call.blocks * -(-call.p // block_k) if config["mix_resident"] else stages
    rows = x_tiles * tile_tokens(config) + stages * tile_rank(config)
    scales = stages * config["mix_outputs"] * tile_rank(config)
    return (rows * block_k + scales) * call.itemsize + BARRIER_BYTES


def _ring_bytes(call: Call, config: Config) -> int:
    """Shared memory of the second kernel's tokens."""
    stage = config["product_tokens"] * config["product_inner"] * call.itemsize
    return config["product_stages"] * stage


def product_bytes(call: Call, config: Config) -> int:
    """Shared memory of the second kernel."""
    block_k = config["product_inner"]
    slab = config["product_columns"] * _ceil(call.rank, block_k)
    bias = 2 * config["product_columns"]
    return (slab + bias) * call.itemsize + _ring_bytes(call, config) + BARRIER_BYTES


def _mix_config(call: Call, tokens: int, *, outputs: int) -> dict[str, int] | None:
    """The first kernel's part of a config, None if shared memory does not hold its stages.

    Args:
        tokens: that it walks at once.
        outputs: output blocks that a program accumulates.
    """
    split = int(outputs <= _WIDE_ACCUMULATORS and call.rank > TILE and tokens > MANY_TOKENS)
    config = {
        "mix_consumers": 2,
        "mix_outputs": outputs,
        "mix_split": split,
        "mix_unroll": min(_UNROLL, call.blocks),
        "mix_resident": 1,
        "mix_tiles": 1,
        "mix_stages": 8,
    }
    # The rank of a token tile is dealt among as many programs as fill the device once.
    tiles = -(-call.rank // tile_rank(config))
    programs = -(-tokens // TILE) * -(-call.blocks // outputs)
    config["mix_tiles"] = -(-tiles // max(1, min(tiles, call.device.sms // programs)))
    # x that is used for one tile of rank alone need not stay.
    for resident in (1, 0) if config["mix_tiles"] > 1 else (0,):
        # Powers of two: the producer is one warp, and a remainder costs it a tenth of its time.
        for stages in (8, 4, 2):
            config |= {"mix_resident": resident, "mix_stages": stages}
            enough = stages >= 2 * -(-call.p // step_of(call.p)) or not resident
            if enough and mix_bytes(call, config) <= call.device.shared_bytes:
                return config
    return None


def _short_mix_config(call: Call) -> dict[str, int] | None:
    """The same for few tokens, with small programs so that more multiprocessors have one.

    None as well where the device does not hold all of them at once.
    """
    programs = -(-call.tokens // SHARE.value) * -(-call.rank // TILE)
    groups = min(call.device.sms // programs, call.blocks)
    outputs = -(-call.blocks // groups) if groups else call.blocks
    if not groups or outputs > accumulators(call.blocks):
        return None
    steps = -(-call.p // step_of(call.p))
    config = {
        "mix_consumers": 1,
        "mix_outputs": outputs,
        "mix_split": 0,
        "mix_unroll": min(_UNROLL, call.blocks),
        "mix_resident": 0,
        "mix_tiles": 1,
        # All operands in two rounds of the ring: half of them are on their way from the start.
        "mix_stages": max(-(-call.blocks * steps // 2), 2 * steps),
    }
    while config["mix_stages"] >= 2 * steps:
        if mix_bytes(call, config) <= call.device.shared_bytes:
            return config
        config["mix_stages"] -= 1
    return None


def short_mix_registers(outputs: int) -> int:
    """Registers a thread of the first kernel with one consumer may hold where it starts.

    Up to five accumulators beside the largest tile of the second kernel, more beside a smaller one.
    """
    return 112 if outputs <= 5 else 120


def short_product_registers(columns: int, tokens: int) -> int:
    """The same of the second kernel for few tokens, 0 for tiles that need all registers.

    Not so few that a multiprocessor takes two of its programs: they would crowd on those that have
    none of the first kernel.
    """
    return {(64, 64): 88, (128, 64): 96, (64, 128): 112}.get((columns, tokens), 0)


def _fits_beside(call: Call, mix: Config, product: Config) -> bool:
    """Whether a multiprocessor holds a program of either kernel at once."""
    short = short_product_registers(product["product_columns"], product["product_tokens"])
    registers = 8 * short_mix_registers(mix["mix_outputs"]) + 12 * short  # of all their warps
    shared = mix_bytes(call, mix) + product_bytes(call, product) + _PROGRAM_BYTES
    return bool(short) and 32 * registers <= _REGISTERS and shared <= call.device.shared_bytes


def _outputs(call: Call, tokens: int) -> list[int]:
    """Numbers of output blocks a program may accumulate: all that fit, fewer for few tokens."""
    most = accumulators(call.blocks)
    programs = -(-tokens // TILE) * -(-call.rank // TILE)
    found = [most]
    for outputs in range(most - 1, 0, -1):
        groups = -(-call.blocks // outputs)
        # As even a deal as any, and still no more programs than the device holds at once.
        if outputs == -(-call.blocks // groups) and programs * groups <= call.device.sms:
            found.insert(0, outputs)
    return found[:2] if tokens <= MANY_TOKENS else [most]


def _product_config(
    call: Call, *, columns: int, tokens: int, early: int, mix: Config | None = None
) -> dict[str, int] | None:
    """The second kernel's part of a config, None if there is no room for its stages.

    Args:
        columns, tokens: of a tile.
        early: parts of a slab that are asked for before the tokens.
        mix: the first kernel's part where programs of both are to share a multiprocessor.
    """
    if call.q % columns:
        return None
    # A step that reaches beyond the rank multiplies zeros.
    inner = 128 if call.rank % 128 == 0 else TILE
    config = {
        "product_columns": columns,
        "product_tokens": tokens,
        "product_inner": inner,
        "product_stages": _MAX_STAGES,
        "product_early": min(early, -(-call.rank // inner)),
    }
    while config["product_stages"] >= _MIN_STAGES:
        if mix is None:
            fits = product_bytes(call, config) <= call.device.shared_bytes
        else:
            fits = _fits_beside(call, mix, config)
        if fits:
            return config
        config["product_stages"] -= 1
    return None


def bytes_per_token(call: Call) -> int:
    """Bytes of the intermediate."""
    return call.blocks * call.rank * call.itemsize


def chunk_of(call: Call, config: Config) -> int:
    """Tokens walked at once, where x need not be copied."""
    return chunk_tokens(call, bytes_per_token(call), config["chunk"])


def product_configs(call: Call, *, early: int = _EARLY) -> list[dict[str, int]]:
    """The second kernel's part of configs worth timing, the likely best first.

    Empty where shared memory does not hold even the smallest slab of the weight.

    Args:
        early: parts of a slab that are asked for before the tokens.
    """
    shapes = [(256, 64), (128, 64), (192, 64), (64, 128)]
    if call.tokens <= MANY_TOKENS:
        shapes = shapes[::-1]  # a small slab is there sooner
    found = [
        product
        for columns, tokens in shapes
        if (product := _product_config(call, columns=columns, tokens=tokens, early=early))
    ]
    # Last those whose slab leaves no room for tokens on their way.
    return sorted(found, key=lambda product: _ring_bytes(call, product) < _ENOUGH_RING)


def _short_configs(call: Call) -> list[Config]:
    """Configs for few tokens, the likely best first; none where the device is too small."""
    mix = _short_mix_config(call)
    if mix is None:
        return []
    # Where there is room for both kernels, the second loads its slab while the first still runs.
    beside = [
        product
        for columns, tokens in ((128, 64), (64, 64))
        if (
            product := _product_config(
                call, columns=columns, tokens=tokens, early=ALL_EARLY, mix=mix
            )
        )
    ]
    others = [product for product in product_configs(call, early=1) if product not in beside]
    return [{**mix, **product, "chunk": 0} for product in [*beside, *others]]


def configs(call: Call) -> list[Config]:
    """Configs worth timing, the likely best first; none where shared memory is too small."""
    found: list[Config] = []
    if call.tokens <= MANY_TOKENS:
        found += _short_configs(call)
    products = product_configs(call)
    # An intermediate that the cache holds is read again from there.
    cached = call.tokens * bytes_per_token(call) <= call.device.l2_bytes // 2
    # Chunks of one tile for every multiprocessor leave none without a program.
    full = call.device.sms * TILE
    whole = cached or chunk_of(call, {"chunk": 0}) <= full
    for chunk in (0,) if whole else (0, full):
        tokens = chunk_of(call, {"chunk": chunk})
        for outputs in _outputs(call, tokens):
            mix = _mix_config(call, tokens, outputs=outputs)
            if mix is not None:
                found += [{**mix, **product, "chunk": chunk} for product in products]
    return found


def candidates(call: Call) -> list[Config]:
    """Those of ``configs`` that a tuner should time, at most twelve, the default first."""
    found = configs(call)[:11]
    other = {**found[0], "mix_unroll": min(3, call.blocks)}
    if found[0]["mix_consumers"] == 2 and other not in found:
        found.append(other)
    return found


def default_config(call: Call) -> Config:
    """What is taken where nothing is tuned."""
    return configs(call)[0]
