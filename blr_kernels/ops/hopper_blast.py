"""BLAST on Hopper: the Gluon kernels of ``hopper_mix`` and ``hopper_product``, chunk by chunk."""

from __future__ import annotations

import triton
from torch import Tensor

from blr_kernels.ops.alignment import aligned
from blr_kernels.ops.hopper_launch import (
    BARRIER_BYTES,
    OPTIONS,
    descriptor,
    unsupported,
)
from blr_kernels.ops.hopper_mix import hopper_mix_kernel
from blr_kernels.ops.hopper_product import AHEAD, hopper_product_kernel
from blr_kernels.ops.hopper_scratch import chunk_tokens, walk
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import accumulators
from blr_kernels.reference import Activation

TILE = 64
"""Tokens and rank of a tile of the first kernel."""

_MAX_STAGES = 12
_MIN_STAGES = AHEAD.value + 1  # of the product: the last of so many is free once all are begun
_UNROLL = 2  # products in a row that the tensor cores compute without a pause
_MANY_TOKENS = 1024
ENOUGH_TOKENS = 512
_MANY_BLOCKS = 9
_WIDE_INPUTS = 256  # columns of an input block
# Up to so many accumulators of 64 tokens fit a consumer's registers; more must be of 32.
_WIDE_ACCUMULATORS = 4


def _ceil(size: int, step: int) -> int:
    return -(-size // step) * step


def _step(size: int) -> int:
    """Step of a sum over ``size`` terms: what a stage of shared memory holds of them."""
    return 128 if size > TILE else TILE


def _tile_rank(config: Config) -> int:
    """Ranks of a tile: the two consumers split them, or the tokens."""
    return 2 * TILE if config["mix_split"] else TILE


def _mix_bytes(call: Call, config: Config) -> int:
    """Shared memory of the first kernel."""
    block_k = _step(call.p)
    stages = config["mix_stages"]
    x_tiles = call.blocks * -(-call.p // block_k) if config["mix_resident"] else stages
    rows = x_tiles * TILE + stages * _tile_rank(config)
    scales = stages * config["mix_outputs"] * _tile_rank(config)
    return (rows * block_k + scales) * call.itemsize + BARRIER_BYTES


def _product_bytes(call: Call, config: Config) -> int:
    """Shared memory of the second kernel."""
    block_k = config["product_inner"]
    slab = config["product_columns"] * _ceil(call.rank, block_k)
    ring = config["product_stages"] * config["product_tokens"] * block_k
    bias = 2 * config["product_columns"]
    return (slab + ring + bias) * call.itemsize + BARRIER_BYTES


def _mix_config(call: Call, tokens: int, *, outputs: int) -> dict[str, int] | None:
    """The first kernel's part of a config, None if shared memory does not hold its stages.

    Args:
        tokens: that it walks at once.
        outputs: output blocks that a program accumulates.
    """
    split = int(outputs <= _WIDE_ACCUMULATORS and call.rank > TILE and tokens > _MANY_TOKENS)
    config = {
        "mix_outputs": outputs,
        "mix_split": split,
        "mix_unroll": min(_UNROLL, call.blocks),
        "mix_resident": 1,
        "mix_tiles": 1,
        "mix_stages": 8,
    }
    # The rank of a token tile is dealt among as many programs as fill the device once.
    tiles = -(-call.rank // _tile_rank(config))
    programs = -(-tokens // TILE) * -(-call.blocks // outputs)
    config["mix_tiles"] = -(-tiles // max(1, min(tiles, call.device.sms // programs)))
    # x that is used for one tile of rank alone need not stay.
    for resident in (1, 0) if config["mix_tiles"] > 1 else (0,):
        # Powers of two: the producer is one warp, and a remainder costs it a tenth of its time.
        for stages in (8, 4, 2):
            config |= {"mix_resident": resident, "mix_stages": stages}
            enough = stages >= 2 * -(-call.p // _step(call.p)) or not resident
            if enough and _mix_bytes(call, config) <= call.device.shared_bytes:
                return config
    return None


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
    return found[:2] if tokens <= _MANY_TOKENS else [most]


def _product_config(call: Call, *, columns: int, tokens: int, inner: int) -> dict[str, int] | None:
    """The second kernel's part of a config, None if shared memory does not hold its stages."""
    if call.q % columns:
        return None
    config = {
        "product_columns": columns,
        "product_tokens": tokens,
        "product_inner": inner,
        "product_stages": _MAX_STAGES,
    }
    while config["product_stages"] >= _MIN_STAGES:
        if _product_bytes(call, config) <= call.device.shared_bytes:
            return config
        config["product_stages"] -= 1
    return None


def _bytes_per_token(call: Call) -> int:
    return call.blocks * call.rank * call.itemsize


def _chunk(call: Call, config: Config) -> int:
    """Tokens walked at once, where x need not be copied."""
    return chunk_tokens(call, _bytes_per_token(call), config["chunk"])


def product_configs(call: Call) -> list[dict[str, int]]:
    """The second kernel's part of configs worth timing, the likely best first.

    None where shared memory does not hold even the smallest slab of the weight.
    """
    # A step that reaches beyond the rank multiplies zeros.
    inner = 128 if call.rank % 128 == 0 else TILE
    shapes = [(256, 64), (128, 64), (192, 64), (64, 128)]
    if call.tokens <= _MANY_TOKENS:
        shapes = shapes[::-1]  # a small slab is there sooner
    return [
        product
        for columns, tokens in shapes
        if (product := _product_config(call, columns=columns, tokens=tokens, inner=inner))
    ]


def _configs(call: Call) -> list[Config]:
    """Configs worth timing, the likely best first; none where shared memory is too small."""
    products = product_configs(call)
    found: list[Config] = []
    # An intermediate that the cache holds is read again from there.
    cached = call.tokens * _bytes_per_token(call) <= call.device.l2_bytes // 2
    # Chunks of one tile for every multiprocessor leave none without a program.
    full = call.device.sms * TILE
    whole = cached or _chunk(call, {"chunk": 0}) <= full
    for chunk in (0,) if whole else (0, full):
        tokens = _chunk(call, {"chunk": chunk})
        for outputs in _outputs(call, tokens):
            mix = _mix_config(call, tokens, outputs=outputs)
            if mix is not None:
                found += [{**mix, **product, "chunk": chunk} for product in products]
    return found


def _candidates(call: Call) -> list[Config]:
    found = _configs(call)[:11]
    other = {**found[0], "mix_unroll": min(3, call.blocks)}
    if other not in found:
        found.append(other)
    return found


def _default_config(call: Call) -> Config:
    return _configs(call)[0]


def unsupported_blast(call: Call) -> str:
    """The reason why ``launch_product`` or TMA cannot take the call, "" if they can."""
    if reason := unsupported(call):
        return reason
    for name, size, step in (("p", call.p, 8), ("rank", call.rank, 8), ("q", call.q, TILE)):
        if size % step:
            return f"it needs {name} to be a multiple of {step}, got {size}"
    if not product_configs(call):
        return f"rank {call.rank} is too large for a slab of the weight in shared memory"
    return ""


def _why_not(call: Call) -> str:
    if reason := unsupported_blast(call):
        return reason
    if not _configs(call):
        return f"rank {call.rank} is too large for the first kernel's shared memory"
    return ""


def _regrouped(weight: Tensor) -> Tensor:
    """``(rows, r)`` -> view ``(rows / 32, 4, 4, 2, r)``: row 32g + 8c + 2n + e at (g, n, c, e)."""
    rows, rank = weight.shape
    return weight.view(rows // 32, 4, 4, 2, rank).transpose(1, 2)


def launch_mix(
    call: Call, x: Tensor, coupling: Tensor, right: Tensor, z: Tensor, config: Config, *, late: bool
) -> None:
    """Launches ``hopper_mix_kernel`` once.

    Args:
        x: ``(tokens, b*p)``, rows aligned to 16 bytes.
        coupling: ``(b, b, r)``, contiguous.
        right: ``(b, r, p)``, contiguous.
        z: written; ``(b, r, z_block)``, contiguous, ``z_block`` a multiple of 64; its tokens are
            in the order of ``hopper_mix.stored_token``.
        late: whether the kernel may read its inputs before the kernel ahead has ended, and waits
            for it only before it writes z.
    """
    blocks, rank, z_block = z.shape
    block_k = _step(call.p)
    outputs, split = config["mix_outputs"], bool(config["mix_split"])
    all_tiles = triton.cdiv(rank, _tile_rank(config))
    tiles = min(config["mix_tiles"], all_tiles)
    grid = (
        triton.cdiv(x.shape[0], TILE) * triton.cdiv(all_tiles, tiles),
        triton.cdiv(blocks, outputs),
    )
    hopper_mix_kernel[grid](
        descriptor(x, [TILE if split else TILE // 2, block_k]),
        descriptor(right.view(blocks * rank, call.p), [TILE, block_k]),
        z,
        coupling,
        z_block,
        BLOCKS=blocks,
        RANK=rank,
        P=call.p,
        ACCUMULATORS=outputs,
        TILES=tiles,
        BLOCK_K=block_k,
        STAGES=config["mix_stages"],
        UNROLL=config["mix_unroll"],
        RESIDENT=bool(config["mix_resident"]),
        SPLIT_RANK=split,
        LATE_WAIT=late,
        **OPTIONS,
    )


def launch_product(
    call: Call,
    z: Tensor,
    left: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
    *,
    group: int,
) -> None:
    """Launches ``hopper_product_kernel`` once.

    Args:
        z: ``(b, r, z_block)``, its tokens in the order of ``hopper_mix.stored_token``.
        left: ``(b, q, r)``, contiguous.
        bias: ``(b*q)`` or None.
        out: written; ``(tokens, b*q)``, contiguous.
        group: tokens that change places among each other in that order.
    """
    blocks, rank, _ = z.shape
    columns, tile_tokens = config["product_columns"], config["product_tokens"]
    block_k = config["product_inner"]
    # 192 columns are 128 and 64 more: the sizes of a tensor are powers of two.
    block_n = 1 << (columns.bit_length() - 1)
    rest = columns - block_n
    weight = _regrouped(left.view(blocks * call.q, rank))
    slab = descriptor(weight, [block_n // 32, 4, 4, 2, block_k])
    slabs = call.q // columns
    groups = min(triton.cdiv(out.shape[0], tile_tokens) * blocks, max(1, call.device.sms // slabs))
    hopper_product_kernel[(groups * slabs,)](
        descriptor(z, [1, block_k, tile_tokens]),
        slab,
        descriptor(weight, [rest // 32, 4, 4, 2, block_k]) if rest else slab,
        out,
        bias,
        out.shape[0],
        BATCH=blocks,
        N=call.q,
        K=rank,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        GROUP=group,
        BLOCK_T=tile_tokens,
        BLOCK_N=block_n,
        REST=rest,
        BLOCK_K=block_k,
        STAGES=config["product_stages"],
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
    left, coupling, right = map(aligned, factors)
    bias = None if bias is None else aligned(bias)
    padded, parts = walk(call, x, _bytes_per_token(call), config["chunk"])
    z = x.new_empty((call.blocks, call.rank, padded))
    # A consumer's tokens.
    group = TILE if config["mix_split"] else TILE // 2
    for tokens, part, late in parts:
        launch_mix(call, part, coupling, right, z, config, late=late)
        launch_product(call, z, left, bias, activation, out[tokens], config, group=group)


def is_mixed_apart(call: Call) -> bool:
    """Whether the first products are better computed apart from the mixing: see ``hopper_apart``.

    Wide input blocks fill its programs, and are the larger part of what is read; the accumulators
    of the mixing leave a program of both no room for many tokens.
    """
    return call.p >= _WIDE_INPUTS


def _suits(call: Call) -> bool:
    # Of many blocks the path for fewer tokens computes the first products several times.
    enough = call.tokens >= ENOUGH_TOKENS or call.blocks > _MANY_BLOCKS
    return enough and not is_mixed_apart(call)


PATH = Path(
    "hopper",
    "blast",
    _why_not,
    _default_config,
    _candidates,
    _run,
    suits=_suits,
    separable=True,
)
