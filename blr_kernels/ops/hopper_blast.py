"""BLAST on Hopper: the Gluon kernels of ``hopper_mix`` and ``hopper_product``, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blr_kernels.ops.hopper_mix import hopper_mix_kernel
from blr_kernels.ops.hopper_product import hopper_product_kernel
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import SCRATCH_BYTES, accumulators
from blr_kernels.reference import Activation

TILE = 64
"""Tokens and rank of a tile of the first kernel, and step of the sum of the second."""

_WARPS = 4
# Registers a thread may hold where the kernel starts: 65,536 over the 12 warps that it takes with
# its producer. The warp groups then hand theirs to each other.
_START_REGISTERS = 168
_BARRIER_BYTES = 1024
_ALIGNMENT = 16


def _ceil(size: int, step: int) -> int:
    return -(-size // step) * step


def _block_k(call: Call) -> int:
    return 128 if call.p > TILE else TILE


def _mix_bytes(call: Call, config: Config) -> int:
    """Shared memory of the first kernel."""
    block_k = _block_k(call)
    stage = TILE * block_k * call.itemsize
    x_tiles = (
        call.blocks * -(-call.p // block_k) if config["mix_resident"] else config["mix_stages"]
    )
    z = 2 * TILE * TILE * call.itemsize
    return (x_tiles + config["mix_stages"]) * stage + z + _BARRIER_BYTES


def _product_bytes(call: Call, config: Config) -> int:
    """Shared memory of the second kernel."""
    slab = config["product_columns"] * _ceil(call.rank, TILE)
    tiles = config["product_tokens"] * (
        config["product_stages"] * TILE + 2 * config["product_columns"]
    )
    return (slab + tiles) * call.itemsize + _BARRIER_BYTES


def _fits(call: Call, config: Config) -> bool:
    limit = call.device.shared_bytes
    return (
        _mix_bytes(call, config) <= limit
        and _product_bytes(call, config) <= limit
        and call.q % config["product_columns"] == 0
    )


def _config(
    call: Call, *, resident: bool, shares: int, columns: int, product_tokens: int, chunk: int
) -> dict[str, int] | None:
    """The config with as many stages as shared memory holds, None if it does not hold two."""
    rank_tiles = -(-call.rank // TILE)
    config = {
        "mix_resident": int(resident),
        "mix_tiles": -(-rank_tiles // shares),
        "mix_stages": 2,
        "product_columns": columns,
        "product_tokens": product_tokens,
        "product_stages": 2,
        "chunk": chunk,
    }
    if not _fits(call, config):
        return None
    for name, most in (("mix_stages", 6), ("product_stages", 8)):
        while config[name] < most:
            config[name] += 1
            if not _fits(call, config):
                config[name] -= 1
                break
    return config


def _chunks(call: Call) -> list[int]:
    """Even chunks of tokens, multiples of a tile: the largest that the scratch allows first."""
    per_token = call.blocks * call.rank * call.itemsize
    most = SCRATCH_BYTES // per_token // TILE * TILE
    found: list[int] = []
    for pieces in (-(-call.tokens // most), -(-call.tokens // 4096)):
        chunk = _ceil(-(-call.tokens // pieces), TILE)
        if chunk <= most and chunk not in found:
            found.append(chunk)
    return found


def _shares(call: Call, chunk: int) -> int:
    """Programs among which the rank of a token tile is dealt, to fill the device once."""
    rank_tiles = -(-call.rank // TILE)
    groups = -(-call.blocks // accumulators(call.blocks))
    token_tiles = -(-min(chunk, call.tokens) // TILE) * groups
    return max(1, min(rank_tiles, call.device.sms // token_tiles))


def candidates(call: Call) -> list[Config]:
    """Configs worth timing, the default first."""
    found: list[Config] = []
    for chunk in _chunks(call):
        shares = _shares(call, chunk)
        for columns, tokens in ((128, 128), (128, 64), (64, 128), (256, 64)):
            for resident in (True, False):
                config = _config(
                    call,
                    resident=resident,
                    shares=shares,
                    columns=columns,
                    product_tokens=tokens,
                    chunk=chunk,
                )
                if config is not None and config not in found:
                    found.append(config)
                    break
    return found


def default_config(call: Call) -> Config:
    """The first of the candidates."""
    return candidates(call)[0]


def why_not(call: Call) -> str:
    """The reason why these kernels cannot take ``call``, "" if they can."""
    if call.device.capability != (9, 0):
        major, minor = call.device.capability
        return f"wgmma needs compute capability 9.0, got {major}.{minor}"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {str(call.dtype).removeprefix('torch.')}"
    sizes = {"p": call.p, "rank": call.rank, "q": call.q}
    for name, size in sizes.items():
        step = TILE if name == "q" else _ALIGNMENT // call.itemsize
        if size % step:
            return f"needs {name} to be a multiple of {step}, got {size}"
    if not candidates(call):
        return f"rank {call.rank} is too large for a slab of the weight in shared memory"
    return ""


def _descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    # The layout depends on the width of an element alone.
    layout = NVMMASharedLayout.get_default_for(block, bfloat16)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def launch_mix(
    call: Call, x: Tensor, coupling: Tensor, right: Tensor, z: Tensor, config: Config, *, late: bool
) -> None:
    """Launches ``hopper_mix_kernel`` once.

    Args:
        x: ``(tokens, b*p)``, rows aligned to 16 bytes.
        coupling: ``(b, b, r)``, contiguous.
        right: ``(b, r, p)``, contiguous.
        z: written; ``(b, z_block, r)``, contiguous, ``z_block`` a multiple of 64.
        late: whether the kernel may read its inputs before the kernel ahead has ended, and waits
            for it only before it writes z.
    """
    blocks, z_block, rank = z.shape
    block_k = _block_k(call)
    share = accumulators(blocks)
    shares = triton.cdiv(triton.cdiv(rank, TILE), config["mix_tiles"])
    grid = (triton.cdiv(x.shape[0], TILE) * shares, triton.cdiv(blocks, share))
    hopper_mix_kernel[grid](
        _descriptor(x, [TILE // 2, block_k]),
        _descriptor(right.view(blocks * rank, call.p), [TILE, block_k]),
        _descriptor(z.view(blocks * z_block, rank), [TILE // 2, TILE]),
        coupling,
        z_block,
        BLOCKS=blocks,
        RANK=rank,
        P=call.p,
        ACCUMULATORS=share,
        TILES=config["mix_tiles"],
        BLOCK_K=block_k,
        STAGES=config["mix_stages"],
        RESIDENT=bool(config["mix_resident"]),
        LATE_WAIT=late,
        num_warps=_WARPS,
        maxnreg=_START_REGISTERS,
        launch_pdl=True,
    )


def launch_product(
    call: Call,
    z: Tensor,
    left: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """Launches ``hopper_product_kernel`` once.

    Args:
        z: ``(b, z_block, r)``, contiguous.
        left: ``(b, q, r)``, contiguous.
        bias: ``(b*q)`` or None.
        out: written; ``(tokens, b*q)``, contiguous.
    """
    blocks, z_block, rank = z.shape
    columns, tile_tokens = config["product_columns"], config["product_tokens"]
    units = triton.cdiv(out.shape[0], tile_tokens) * (out.shape[1] // columns)
    hopper_product_kernel[(min(units, call.device.sms),)](
        _descriptor(z.view(blocks * z_block, rank), [tile_tokens, TILE]),
        _descriptor(left.view(blocks * call.q, rank), [columns, TILE]),
        _descriptor(out, [tile_tokens, columns]),
        bias,
        out.shape[0],
        z_block,
        BATCH=blocks,
        N=call.q,
        K=rank,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        BLOCK_T=tile_tokens,
        BLOCK_N=columns,
        STAGES=config["product_stages"],
        num_warps=_WARPS,
        maxnreg=_START_REGISTERS,
        launch_pdl=True,
    )


def run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """Computes ``out (tokens, b*q)`` as ``paths.Path`` says."""
    left, coupling, right = factors
    if x.data_ptr() % _ALIGNMENT or x.stride(0) * x.element_size() % _ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)  # TMA reads aligned rows only
    chunk = min(config["chunk"], _ceil(call.tokens, TILE))
    z = x.new_empty((call.blocks, chunk, call.rank))
    with torch.cuda.device_of(x):
        for start in range(0, call.tokens, chunk):
            stop = min(start + chunk, call.tokens)
            launch_mix(call, x[start:stop], coupling, right, z, config, late=start > 0)
            launch_product(call, z, left, bias, activation, out[start:stop], config)


PATHS: Sequence[Path] = (Path("hopper", "blast", why_not, default_config, candidates, run),)
