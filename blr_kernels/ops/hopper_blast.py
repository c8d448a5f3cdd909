"""BLAST on Hopper: the Gluon kernels of ``hopper_mix`` and ``hopper_product``, chunk by chunk."""

from __future__ import annotations

import triton
from torch import Tensor

from blr_kernels.ops.alignment import aligned
from blr_kernels.ops.hopper_blast_config import (
    MANY_TOKENS,
    TILE,
    bytes_per_token,
    candidates,
    configs,
    default_config,
    product_configs,
    short_mix_registers,
    short_product_registers,
    step_of,
    tile_rank,
    tile_tokens,
)
from blr_kernels.ops.hopper_launch import OPTIONS, descriptor, unsupported
from blr_kernels.ops.hopper_mix import SHARE, hopper_mix_kernel
from blr_kernels.ops.hopper_product import hopper_product_kernel
from blr_kernels.ops.hopper_scratch import walk
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import accumulators
from blr_kernels.reference import Activation

_ENOUGH_TOKENS = 64
_MANY_BLOCKS = 9
_WIDE_INPUTS = 256  # columns of an input block
_FEW_SPLIT_TOKENS = 512


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
    if not configs(call):
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
    block_k = step_of(call.p)
    outputs, split = config["mix_outputs"], bool(config["mix_split"])
    all_tiles = triton.cdiv(rank, tile_rank(config))
    tiles = min(config["mix_tiles"], all_tiles)
    consumers = config["mix_consumers"]
    grid = (
        triton.cdiv(x.shape[0], tile_tokens(config)) * triton.cdiv(all_tiles, tiles),
        triton.cdiv(blocks, outputs),
    )
    hopper_mix_kernel[grid](
        descriptor(x, [TILE if split else SHARE.value, block_k]),
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
        CONSUMERS=consumers,
        LATE_WAIT=late,
        **(OPTIONS if consumers == 2 else OPTIONS | {"maxnreg": short_mix_registers(outputs)}),
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
    columns, tile = config["product_columns"], config["product_tokens"]
    block_k = config["product_inner"]
    # 192 columns are 128 and 64 more: the sizes of a tensor are powers of two.
    block_n = 1 << (columns.bit_length() - 1)
    rest = columns - block_n
    weight = _regrouped(left.view(blocks * call.q, rank))
    slab = descriptor(weight, [block_n // 32, 4, 4, 2, block_k])
    slabs = call.q // columns
    tiles = triton.cdiv(out.shape[0], tile)
    most = max(1, call.device.sms // slabs)
    groups = min(tiles * blocks, most)
    # A group that stays in one block loads one slab: as many as that if none walks more tiles then.
    even = min(tiles, most // blocks)
    if even and triton.cdiv(tiles, even) <= triton.cdiv(tiles * blocks, groups):
        groups = even * blocks
    # Few registers leave room for programs of the kernel ahead.
    short = short_product_registers(columns, tile) if call.tokens <= MANY_TOKENS else 0
    hopper_product_kernel[(groups * slabs,)](
        descriptor(z, [1, block_k, tile]),
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
        BLOCK_T=tile,
        BLOCK_N=block_n,
        REST=rest,
        BLOCK_K=block_k,
        STAGES=config["product_stages"],
        EARLY_PARTS=config["product_early"],
        # The consumers share what the producer's warps do not keep.
        REGISTERS=(3 * short - 24) // 16 * 8 if short else 240,
        **(OPTIONS | {"maxnreg": short} if short else OPTIONS),
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
    padded, parts = walk(call, x, bytes_per_token(call), config["chunk"])
    z = x.new_empty((call.blocks, call.rank, padded))
    # A consumer's tokens.
    group = TILE if config["mix_split"] else SHARE.value
    for tokens, part, late in parts:
        launch_mix(call, part, coupling, right, z, config, late=late)
        launch_product(call, z, left, bias, activation, out[tokens], config, group=group)


def is_mixed_apart(call: Call) -> bool:
    """Whether the first products are better computed apart from the mixing: see ``hopper_apart``.

    Wide input blocks fill its programs, and are the larger part of what is read; the accumulators
    of the mixing leave a program of both no room for many tokens. If they do not fit a program, the
    first products are computed again for each group of them, which few tokens do not hide.
    """
    split = accumulators(call.blocks) < call.blocks and call.tokens < _FEW_SPLIT_TOKENS
    return call.p >= _WIDE_INPUTS or split


def _suits(call: Call) -> bool:
    # Of many blocks the path for fewer tokens computes the first products several times.
    enough = call.tokens >= _ENOUGH_TOKENS or call.blocks >= _MANY_BLOCKS
    return enough and not is_mixed_apart(call)


PATH = Path(
    "hopper",
    "blast",
    _why_not,
    default_config,
    candidates,
    _run,
    suits=_suits,
    separable=True,
)
