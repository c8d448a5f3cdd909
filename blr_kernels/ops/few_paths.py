"""The paths "few" (1 to 4 tokens) and "small" (5 to about 1,024), and their launch sizes.

Both take several layers of the same input at once too.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from blr_kernels.ops.paths import Call, Config, Path, with_parts
from blr_kernels.ops.triton_config import power_of_two, tile_of, tokens_per_chunk
from blr_kernels.ops.triton_dependent import is_dependent
from blr_kernels.ops.triton_few import MAX_TOKENS, launch_few_mix, launch_few_product
from blr_kernels.ops.triton_product import why_not
from blr_kernels.ops.triton_small import Sizes, launch_small_mix, launch_small_product
from blr_kernels.reference import Activation

FEW_TOKENS = 16
"""Most tokens of the path "few" for low rank, which alone has no path "small"."""

SMALL_TOKENS = 2048
"""Most tokens of the path "small": beyond it larger tiles read less."""

_LONG_ROW = 8192
"""Input features up to which "few" is preferred for low rank."""

_SMALL_BYTES = 3 * 2**19
"""Bytes of both factors up to which it is so for all the tokens that it takes."""

_ROW_TOKENS = 16
"""Tokens up to which "small" is bound by reading the weights, not by the products."""

_MAX_BLOCKS = 64
_MAX_RANK = 4096
_REGISTERS = 32
"""Registers in which a thread of the path "few" holds weights."""

_PIECE = 64
"""Columns of a weight row that 8 threads read at once; the sum over them takes 3 steps."""

_VECTOR = 8
"""Elements of 2 bytes that a thread loads at once."""


def _step(size: int, largest: int) -> int:
    """A power of two up to ``largest`` in which to walk ``size``: the widest that wastes little."""
    step = min(power_of_two(size), largest)
    while step > 64 and 8 * (-(-size // step) * step) > 9 * size:
        step //= 2
    return step


def _piece(size: int, rows: int, warps: int) -> int:
    """Width in which to walk rows of ``size``: narrow, but a whole vector for every thread."""
    return _step(size, max(_PIECE, _VECTOR * 32 * warps // power_of_two(rows)))


# The path "few".


def why_not_few(call: Call) -> str:
    """The reason why the path "few" cannot take a call, or ""."""
    if reason := why_not(call):
        return reason
    most = FEW_TOKENS if call.op == "low_rank" else MAX_TOKENS
    if call.tokens > most:
        return f"it takes up to {most} tokens, got {call.tokens}"
    if call.blocks > _MAX_BLOCKS:
        return f"it takes up to {_MAX_BLOCKS} blocks, got {call.blocks}"
    if call.rank > _MAX_RANK:
        return f"it takes ranks up to {_MAX_RANK}, got {call.rank}"
    return ""


def few_config(call: Call, groups: int = 1) -> dict[str, int]:
    """Launch sizes of the path "few" for ``groups`` layers at once."""
    tokens = min(MAX_TOKENS, power_of_two(call.tokens))
    blocks = power_of_two(call.blocks)
    programs = groups * -(-call.tokens // tokens)
    # The rank is spread over all multiprocessors; more rows than that share their loads of x.
    rows = 1
    while rows * blocks < 64 and -(-call.rank // (2 * rows)) * programs >= call.device.sms * 3 // 4:
        rows *= 2
    held = _REGISTERS * 4 // call.itemsize // tokens  # elements of a thread; x is as large again
    warps = 4
    while warps < 8 and rows * blocks * call.p > held * 32 * warps:
        warps *= 2
    columns = _piece(call.p, rows * blocks, warps)
    warps = max(1, min(warps, power_of_two(rows * blocks * columns // (_VECTOR * 32))))
    fit = max(1, held * 32 * warps // (rows * blocks * columns))
    return {
        "mix_rows": rows,
        "mix_columns": columns,
        "mix_pieces": min(power_of_two(fit), -(-call.p // columns)),
        "mix_tokens": tokens,
        "mix_warps": warps,
        **_product_sizes(call, groups, call.tokens > MAX_TOKENS or _fills_often(call, groups)),
    }


def _fills_often(call: Call, groups: int) -> bool:
    """Whether there are so many weights that tensor cores pay for their start: fewer
    instructions a weight then leave more loads in flight.
    """
    programs = groups * call.blocks * -(-call.q // 64)
    tensor_cores = call.itemsize == 2 and call.device.capability >= (8, 0)
    return tensor_cores and programs >= 8 * call.device.sms


def _product_sizes(call: Call, groups: int, on_tensor_cores: bool) -> dict[str, int]:
    held = _REGISTERS * 4 // call.itemsize  # elements of a thread
    if on_tensor_cores:
        inner = min(max(16, _step(call.rank, 128)), 64 if call.itemsize == 4 else 128)
        width = -(-call.rank // inner) * inner
        # With 64 rows the tensor cores of capability 10 are used, and registers spill.
        rows, warps = 32 if call.device.capability[0] == 10 else 64, 4
        # The weights pass through registers once, then stay in shared memory.
        while rows > 16 and rows * width > held * 2 * 128:
            rows //= 2
        while rows > 16 and groups * call.blocks * -(-call.q // rows) < call.device.sms * 3 // 4:
            rows //= 2
        fits = (rows + 16) * width * call.itemsize <= call.device.shared_bytes
        unroll = int(fits and rows * width <= held * 2 * 128)
    else:
        rows, warps, unroll = 64, 8, 1
        while rows > 1 and rows * call.rank > held * 32 * warps:
            rows //= 2
        while rows > 8 and groups * call.blocks * -(-call.q // rows) < call.device.sms * 3 // 2:
            rows, warps = rows // 2, 4
        inner = _step(call.rank, 256)
    return {
        "product_dot": int(on_tensor_cores),
        "product_rows": rows,
        "product_inner": inner,
        "product_unroll": unroll,
        "product_warps": warps,
    }


def _other_warps(warps: int) -> int:
    """What else to try: 8 for up to 4, else 4."""
    return 8 if warps <= 4 else 4


def few_candidates(call: Call) -> list[dict[str, int]]:
    """The default and what differs from it in one part."""
    default = few_config(call)

    def variants() -> Iterator[dict[str, int]]:
        for rows in (default["mix_rows"] // 2, default["mix_rows"] * 2):
            if rows and rows * power_of_two(call.blocks) <= 128:
                yield {"mix_rows": rows}
        yield {"mix_warps": _other_warps(default["mix_warps"])}
        if call.tokens > 1:
            yield {"mix_tokens": max(1, default["mix_tokens"] // 2)}
        for rows in (default["product_rows"] // 2, default["product_rows"] * 2):
            if rows >= (16 if default["product_dot"] else 1):
                yield {"product_rows": rows}
        yield {"product_warps": _other_warps(default["product_warps"])}
        if not default["product_dot"]:
            yield {"product_inner": _piece(call.rank, default["product_rows"], 4)}
        if call.tokens <= MAX_TOKENS:
            yield _product_sizes(call, 1, not default["product_dot"])

    return with_parts(default, variants())


def _by_block(call: Call, out: Tensor) -> Tensor:
    """``out (g, tokens, b*q)``, contiguous -> ``(g, tokens, b, q)`` of the blocks of left."""
    if call.op == "monarch":
        return out.unflatten(2, (call.q, call.blocks)).transpose(2, 3)
    return out.unflatten(2, (call.blocks, call.q))


def run_few(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, Tensor | None, Tensor],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """``x (tokens, b*p)``, ``left (g, b, q, r)``, ``coupling (g, b, b, r)`` or None,
    ``right (g, b, r, p)``, ``bias (g, b*q)`` or None -> ``out (g, tokens, b*q)``.
    """
    left, coupling, right = factors
    groups, blocks, _, rank = left.shape
    dependent = is_dependent(call.device)
    on_tensor_cores = bool(config["product_dot"])
    z = x.new_empty((groups, blocks, call.tokens, rank))
    launch_few_mix(
        x,
        coupling,
        right,
        z,
        rows=config["mix_rows"],
        columns=config["mix_columns"],
        pieces=config["mix_pieces"],
        tokens=config["mix_tokens"],
        warps=config["mix_warps"],
        dependent=dependent,
    )
    if on_tensor_cores:
        sizes = Sizes(
            config["product_rows"],
            16,
            config["product_inner"],
            config["product_unroll"],
            config["product_warps"],
            1 if config["product_unroll"] else 2,
        )
        launch_small_product(
            z,
            left,
            _by_block(call, out),
            sizes,
            bias=bias,
            activation=activation,
            early=True,
            dependent=dependent,
        )
        return
    launch_few_product(
        z,
        left,
        bias,
        activation,
        out,
        interleaved=call.op == "monarch",
        rows=config["product_rows"],
        inner=config["product_inner"],
        tokens=min(MAX_TOKENS, power_of_two(call.tokens)),
        warps=config["product_warps"],
        dependent=dependent,
    )


def _alone(factors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor]:
    """A layer's factors as those of a group: left, coupling or None, right."""
    left, *couplings, right = (factor[None] for factor in factors)
    return left, couplings[0] if couplings else None, right


def _run_few_blocks(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    by_group = None if bias is None else bias[None]
    run_few(call, x, _alone(factors), by_group, activation, out[None], config)


def _run_few_low_rank(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    left, right = factors
    by_group = None if bias is None else bias[None]
    stacked = left[None, None], None, right[None, None]
    run_few(call, x, stacked, by_group, activation, out[None], config)


# The path "small".


def why_not_small(call: Call) -> str:
    """The reason why the path "small" cannot take a call, or ""."""
    if reason := why_not(call):
        return reason
    if call.tokens > SMALL_TOKENS:
        return f"it takes up to {SMALL_TOKENS} tokens, got {call.tokens}"
    if call.blocks > _MAX_BLOCKS:
        return f"it takes up to {_MAX_BLOCKS} blocks, got {call.blocks}"
    return ""


def _programs(size: int, tile: int) -> int:
    return -(-size // tile)


def _stages(per_stage: int, shared_bytes: int, most: int) -> int:
    return max(1, min(most, shared_bytes // per_stage))


def small_config(call: Call, groups: int = 1) -> dict[str, int]:
    """Launch sizes of the path "small" for ``groups`` layers at once."""
    if call.op != "blast":
        first, second = _hidden_sizes(call, groups), _small_product(call, groups, False)
        return {"mix_in_product": 0, **first, **second}
    # Mixed in the second kernel, the first is one plain product with blocks as a grid dimension,
    # where a program that mixes walks all columns of x; the second then reads the intermediate of
    # every block, which few blocks alone repay, and only where the walk is long.
    few_blocks = call.blocks <= 4 and call.rank <= 256
    return _small_sizes(call, groups, few_blocks and call.in_features > 1024)


def _small_sizes(call: Call, groups: int, in_product: bool) -> dict[str, int]:
    mix = _hidden_sizes(call, groups) if in_product else _mix_sizes(call, groups)
    return {"mix_in_product": int(in_product), **mix, **_small_product(call, groups, in_product)}


def _mix_sizes(call: Call, groups: int) -> dict[str, int]:
    half = call.itemsize == 2
    outputs = -(-call.blocks // -(-call.blocks // 9))
    # Without Hopper's products the operands take registers too, beside 9 accumulators.
    wide = half and call.device.capability >= (9, 0) and call.tokens > _ROW_TOKENS
    rows, tokens = tile_of(call.rank, 64 if wide else 32), tile_of(call.tokens, 32)

    def starved() -> bool:
        shares = groups * -(-call.blocks // outputs)
        programs = shares * _programs(call.rank, rows) * _programs(call.tokens, tokens)
        return programs < call.device.sms // 3

    # Smaller tiles read x or the weights again, fewer outputs multiply again: the last resort.
    if rows > 32 and starved():
        rows = 32
    if tokens > 16 and starved():
        tokens = 16
    if outputs > 3 and starved():
        outputs = -(-outputs // 3)
    if rows > 16 and starved():
        rows = 16
    inner = tile_of(call.p, 128 if half else 32)
    unroll = max(1, min(2, -(-call.p // inner)))
    per_stage = (rows + tokens) * inner * unroll * call.itemsize
    turns = call.blocks * -(-call.p // (inner * unroll))
    return {
        "mix_rows": rows,
        "mix_tokens": tokens,
        "mix_inner": inner,
        "mix_unroll": unroll,
        "mix_warps": 4,
        "mix_stages": _stages(per_stage, call.device.shared_bytes, min(4, turns)),
        "mix_outputs": outputs,
    }


def _hidden_sizes(call: Call, groups: int) -> dict[str, int]:
    rows, tokens = 32, 16
    each = groups * call.blocks
    if each * _programs(call.rank, rows) * _programs(call.tokens, tokens) > 4 * call.device.sms:
        rows, tokens = 64, 64
    inner = tile_of(call.p, (256 if tokens == 16 else 128) if call.itemsize == 2 else 32)
    per_stage = (rows + tokens) * inner * call.itemsize
    return {
        "mix_rows": rows,
        "mix_tokens": tokens,
        "mix_inner": inner,
        "mix_unroll": 0,
        "mix_warps": 4,
        # Of a small p everything is in flight at once.
        "mix_stages": _stages(per_stage, call.device.shared_bytes, min(4, 1 + call.p // inner)),
        "mix_outputs": 1,
    }


def _small_product(call: Call, groups: int, mixing: bool) -> dict[str, int]:
    half = call.itemsize == 2
    if call.tokens <= _ROW_TOKENS and not mixing:
        sizes = _product_sizes(call, groups, True)
        del sizes["product_dot"]
        stages = 1 if sizes["product_unroll"] else 2
        return {**sizes, "product_tokens": 16, "product_stages": stages}
    each = groups * call.blocks
    tiles = (
        [(32, 128, 8), (32, 64, 4), (16, 64, 4)]
        if mixing
        else [(128, 128, 8), (64, 128, 4), (64, 64, 4), (32, 64, 4)]
    )
    enough = call.device.sms // 2 if mixing else call.device.sms * 3 // 4
    tokens, rows, warps = next(
        (
            tile
            for tile in tiles
            if tile[0] <= max(32, tile_of(call.tokens, 128))
            and each * _programs(call.tokens, tile[0]) * _programs(call.q, tile[1]) >= enough
        ),
        tiles[-1],
    )
    inner = tile_of(call.rank, (128 if mixing else 64) if half else 32)
    width = _programs(call.rank, inner) * inner
    if not half:
        tokens, rows = min(tokens, 64), min(rows, 64)
    rows = min(rows, tile_of(call.q, 128))
    whole = (rows + tokens) * width * call.itemsize
    unroll = int(width <= 128 and whole <= call.device.shared_bytes)
    per_stage = (rows + tokens) * inner * call.itemsize
    return {
        "product_rows": rows,
        "product_tokens": tokens,
        "product_inner": inner,
        "product_unroll": unroll,
        "product_warps": warps,
        "product_stages": _stages(per_stage, call.device.shared_bytes, 3),
    }


def small_candidates(call: Call) -> list[dict[str, int]]:
    """The default and what differs from it in one part, or in the kernel that mixes."""
    default = small_config(call)
    mixing = bool(default["mix_in_product"])

    def variants() -> Iterator[dict[str, int]]:
        if call.op == "blast" and call.blocks <= 4 and call.rank <= 256:
            other = _small_sizes(call, 1, not mixing)
            if mixing:
                yield other
            else:
                yield {**other, "product_tokens": 32, "product_rows": 64, "product_warps": 4}
                yield {**other, "product_tokens": 32, "product_rows": 128, "product_warps": 8}
        if not mixing:
            for rows, tokens in ((16, 16), (32, 16), (32, 32), (64, 32), (64, 64)):
                if tokens <= tile_of(call.tokens, 64) and (rows > 16 or call.tokens <= _ROW_TOKENS):
                    per_stage = (rows + tokens) * default["mix_inner"] * call.itemsize
                    per_stage *= max(1, default["mix_unroll"])
                    stages = _stages(per_stage, call.device.shared_bytes, default["mix_stages"])
                    yield {"mix_rows": rows, "mix_tokens": tokens, "mix_stages": stages}
            if call.op == "blast" and call.tokens <= _ROW_TOKENS:
                for outputs in (-(-default["mix_outputs"] // 3), 3 * default["mix_outputs"]):
                    if outputs <= min(call.blocks, 9):
                        yield {"mix_outputs": outputs}
        if mixing:
            tiles = [(64, 64, 4), (32, 128, 8), (32, 64, 4), (16, 64, 4)]
        elif call.tokens <= _ROW_TOKENS:
            tiles = [(16, 32, 4), (16, 64, 4), (16, 128, 4)]
        else:
            tiles = [(64, 64, 4), (64, 128, 4), (128, 128, 8), (32, 64, 4)]
        for tokens, rows, warps in tiles:
            yield {"product_rows": rows, "product_tokens": tokens, "product_warps": warps}
        if not mixing:
            unroll = 1 - default["product_unroll"]
            yield {"product_unroll": unroll, "product_stages": 1 if unroll else 3}

    return [config for config in with_parts(default, variants()) if _small_fits(call, config)]


def _small_fits(call: Call, config: Config) -> bool:
    width = -(-call.rank // config["product_inner"]) * config["product_inner"]
    depth = (
        width if config["product_unroll"] else config["product_stages"] * config["product_inner"]
    )
    product = (config["product_rows"] + config["product_tokens"]) * depth
    mix = (config["mix_rows"] + config["mix_tokens"]) * config["mix_inner"]
    mix *= config["mix_stages"] * max(1, config["mix_unroll"])
    return max(product, mix) * call.itemsize <= call.device.shared_bytes


def run_small(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, Tensor | None, Tensor],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """``x (tokens, b*p)``, ``left (g, b, q, r)``, ``coupling (g, b, b, r)`` or None,
    ``right (g, b, r, p)``, ``bias (g, b*q)`` or None -> ``out (g, tokens, b*q)``.
    """
    left, coupling, right = factors
    groups, blocks, _, rank = left.shape
    p = right.shape[3]
    dependent = is_dependent(call.device)
    in_product = bool(config["mix_in_product"])
    mix, product = (
        Sizes(*(config[f"{kernel}_{size}"] for size in Sizes.__dataclass_fields__))
        for kernel in ("mix", "product")
    )
    chunk = tokens_per_chunk(call.tokens, groups * blocks * rank * call.itemsize)
    z = x.new_empty((groups, blocks, chunk, rank))
    y = _by_block(call, out)
    lanes = blocks if call.op == "monarch" else 1
    for start in range(0, call.tokens, chunk):
        stop = min(start + chunk, call.tokens)
        rows, hidden = x[start:stop], z[:, :, : stop - start]
        if coupling is None or in_product:
            by_block = rows.unflatten(1, (blocks, p)).transpose(0, 1)
            by_input = hidden.transpose(1, 2)
            if lanes > 1:
                # Every output block takes its lane of every input block's rank.
                by_input = hidden[:, 0].unflatten(2, (blocks, call.inner))
            launch_small_product(
                by_block.expand(groups, -1, -1, -1),
                right,
                by_input,
                mix,
                lanes=lanes,
                out_lane=hidden.stride(1),
                early=False,
                dependent=dependent,
            )
        else:
            launch_small_mix(
                rows,
                coupling,
                right,
                hidden,
                mix,
                outputs=config["mix_outputs"],
                dependent=dependent,
            )
        launch_small_product(
            hidden,
            left,
            y[:, start:stop],
            product,
            coupling=coupling if in_product else None,
            bias=bias,
            activation=activation,
            early=True,
            dependent=dependent,
        )


def _run_small_blocks(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    by_group = None if bias is None else bias[None]
    run_small(call, x, _alone(factors), by_group, activation, out[None], config)


def _suits_few_low_rank(call: Call) -> bool:
    # Its programs each walk a whole row of the input; for more tokens each walks it again.
    small = call.rank * (call.in_features + call.out_features) * call.itemsize <= _SMALL_BYTES
    return call.in_features <= _LONG_ROW and (call.tokens <= MAX_TOKENS or small)


FEW_BLAST = Path(
    "few", "blast", why_not_few, few_config, few_candidates, _run_few_blocks, separable=True
)
FEW_MONARCH = Path(
    "few", "monarch", why_not_few, few_config, few_candidates, _run_few_blocks, separable=True
)
FEW_LOW_RANK = Path(
    "few",
    "low_rank",
    why_not_few,
    few_config,
    few_candidates,
    _run_few_low_rank,
    suits=_suits_few_low_rank,
    separable=True,
)
SMALL_BLAST = Path(
    "small",
    "blast",
    why_not_small,
    small_config,
    small_candidates,
    _run_small_blocks,
    suits=lambda call: call.tokens <= SMALL_TOKENS // 2,
)
SMALL_MONARCH = Path(
    "small",
    "monarch",
    why_not_small,
    small_config,
    small_candidates,
    _run_small_blocks,
)
