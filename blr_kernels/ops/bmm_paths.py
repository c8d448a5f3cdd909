"""The path "bmm": BLAST and Monarch of large rank by batched products of PyTorch's library.

Where the two products are bound by arithmetic, nothing is faster at them than cuBLAS. What lies
between and behind them is done by kernels of ours: mixing in the place of what is mixed, and
interleaving with bias and activation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_kernels.ops.hopper_apart import launch_mix_apart, mix_configs
from blr_kernels.ops.hopper_blast import unsupported_blast
from blr_kernels.ops.hopper_launch import unsupported
from blr_kernels.ops.hopper_mix_many import MOST_BLOCKS
from blr_kernels.ops.hopper_scratch import TILE_TOKENS, chunk_tokens
from blr_kernels.ops.paths import Call, Config, Path, with_parts
from blr_kernels.ops.triton_batched import (
    MOST_MIXED_BLOCKS,
    launch_interleave,
    launch_mix_blocks,
)
from blr_kernels.ops.triton_config import SCRATCH_BYTES, smaller_chunks, tokens_per_chunk
from blr_kernels.ops.triton_product import why_not
from blr_kernels.reference import Activation

_ENOUGH_TOKENS = 128
"""Tokens from which the products, not the reading of weights, take most of the time."""

_LARGE_WEIGHTS = {"blast": 32 * 2**20, "monarch": 8 * 2**20}
"""Bytes of both factors from which reading them outlasts the launches: few tokens are enough."""

_FEW_TOKENS = 5
"""Up to 4 are better read by programs that each take a part of the weights."""

_SMALLEST_CHUNK = 256
"""Tokens that make a large product's launch worth it."""

_LARGE_RANK = {"blast": 513, "monarch": 192}
"""From here on it was faster than our kernels in assets/benchmarks/h200-layers.json."""

_WIDE_INPUTS = 256
"""Columns of an input block below which Hopper's kernels for BLAST were faster there."""


def _bytes_per_token(call: Call) -> int:
    """Of h, and for Monarch of y before it is interleaved."""
    columns = call.blocks * call.rank + (call.out_features if call.op == "monarch" else 0)
    return columns * call.itemsize


def _chunks(call: Call) -> list[int]:
    """Chunks, the likely best first: a larger product gains more than the cache gives."""
    sizes = call.tokens, _bytes_per_token(call), call.device.l2_bytes
    return [0, *smaller_chunks(*sizes, least=_SMALLEST_CHUNK)]


def _fits_tiles(call: Call) -> bool:
    return TILE_TOKENS * _bytes_per_token(call) <= SCRATCH_BYTES


def _mixes_on_hopper(call: Call) -> bool:
    if call.op != "blast" or call.blocks > MOST_BLOCKS or not _fits_tiles(call):
        return False
    return not unsupported(call)


def _chunk_and_row(call: Call, limit: int) -> tuple[int, int]:
    """Tokens walked at once and the length of a row of h that holds them.

    A row is whole tiles, as Hopper's mixing takes them and so that the next row begins where
    cuBLAS reads fastest, whatever the number of tokens. What lies behind the last token is never
    read, except by that mixing.

    Args:
        call: the call.
        limit: most tokens, 0 for no other limit than the scratch.
    """
    per_token = _bytes_per_token(call)
    if not _fits_tiles(call):
        chunk = tokens_per_chunk(call.tokens, per_token, limit)
        return chunk, chunk
    chunk = chunk_tokens(call, per_token, limit)
    return chunk, -(-chunk // TILE_TOKENS) * TILE_TOKENS


def _candidates(call: Call) -> list[dict[str, int]]:
    chunks = _chunks(call)
    if not _mixes_on_hopper(call):
        return [{"chunk": chunk} for chunk in chunks]
    mixes = mix_configs(call, _chunk_and_row(call, chunks[0])[0])
    parts = [*mixes[1:], *({"chunk": chunk} for chunk in chunks[1:])]
    return with_parts({**mixes[0], "chunk": chunks[0]}, parts)


def _default_config(call: Call) -> Config:
    return _candidates(call)[0]


def _suits(call: Call) -> bool:
    if call.rank < _LARGE_RANK[call.op]:
        return False
    if call.op == "blast" and call.p < _WIDE_INPUTS and not unsupported_blast(call):
        return False
    weights = call.rank * (call.in_features + call.out_features) * call.itemsize
    least = _FEW_TOKENS if weights >= _LARGE_WEIGHTS[call.op] else _ENOUGH_TOKENS
    return call.tokens >= least


def _run_blast(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    left, coupling, right = factors
    blocks, rank = call.blocks, call.rank
    x3 = x.unflatten(1, (blocks, call.p)).permute(1, 2, 0)  # (j, p, t)
    y3 = out.view(call.tokens, blocks, call.q).transpose(0, 1)  # (i, t, q)
    chunk, row = _chunk_and_row(call, config["chunk"])
    hidden = x.new_empty((blocks, rank, row))
    on_hopper = _mixes_on_hopper(call)
    for start in range(0, call.tokens, chunk):
        stop = min(start + chunk, call.tokens)
        h, y = hidden[:, :, : stop - start], y3[:, start:stop]
        torch.bmm(right, x3[:, :, start:stop], out=h)
        if on_hopper:
            launch_mix_apart(call, hidden, coupling, stop - start, config)
        else:
            launch_mix_blocks(hidden, coupling, stop - start)
        # PyTorch writes a bias into y before the product adds to it: as many bytes as one pass
        # over y takes, which with an activation is made anyway.
        if bias is not None and activation is None:
            torch.baddbmm(bias.view(blocks, 1, call.q), h.mT, left.mT, out=y)
            continue
        torch.bmm(h.mT, left.mT, out=y)
        if activation is not None:
            rows = out[start:stop]
            launch_interleave(rows[None], bias, activation, rows)


def _run_monarch(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    left, right = factors
    blocks, rank = call.blocks, call.rank
    x3 = x.unflatten(1, (blocks, call.p)).permute(1, 2, 0)  # (k, p, t)
    chunk, row = _chunk_and_row(call, config["chunk"])
    hidden = x.new_empty((blocks, rank, row))
    # Row k*r + j*b + l of it is what output block l takes as its k*r/b + j.
    by_output = hidden.view(rank, blocks, row).transpose(0, 1)
    apart = x.new_empty((blocks, chunk, call.q))
    for start in range(0, call.tokens, chunk):
        stop = min(start + chunk, call.tokens)
        y = apart[:, : stop - start]
        torch.bmm(right, x3[:, :, start:stop], out=hidden[:, :, : stop - start])
        torch.bmm(by_output[:, :, : stop - start].mT, left.mT, out=y)
        launch_interleave(y, bias, activation, out[start:stop])


def _why_not_blast(call: Call) -> str:
    if reason := why_not(call):
        return reason
    if call.blocks > MOST_MIXED_BLOCKS:
        return f"it takes up to {MOST_MIXED_BLOCKS} blocks, got {call.blocks}"
    return ""


BLAST = Path(
    "bmm", "blast", _why_not_blast, _default_config, _candidates, _run_blast, suits=_suits,
    library=True,
)  # fmt: skip
MONARCH = Path(
    "bmm", "monarch", why_not, _default_config, _candidates, _run_monarch, suits=_suits,
    library=True,
)  # fmt: skip
