"""How Hopper's paths walk tokens, so that the intermediate between two kernels stays bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import Tensor

from blr_kernels.ops.alignment import is_aligned
from blr_kernels.ops.paths import Call
from blr_kernels.ops.triton_config import SCRATCH_BYTES, tokens_per_chunk

TILE_TOKENS: Final = 64
"""Tokens of the tiles in which kernels hand an intermediate to each other."""


def _copy_bytes(call: Call, *, copied: bool) -> int:
    """Bytes a token that a copy of x takes."""
    return call.in_features * call.itemsize if copied else 0


def chunk_tokens(call: Call, bytes_per_token: int, limit: int = 0, *, copied: bool = False) -> int:
    """Tokens walked at once: those whose intermediate, in whole tiles, the scratch holds.

    Args:
        call: as anywhere.
        bytes_per_token: of the intermediate.
        limit: most tokens, which is kept to since it fills the device; without one, 0, the tokens
            are dealt evenly.
        copied: whether the scratch has to hold their rows of x too.
    """
    per_token = bytes_per_token + _copy_bytes(call, copied=copied)
    most = max(TILE_TOKENS, SCRATCH_BYTES // per_token // TILE_TOKENS * TILE_TOKENS)
    if limit:
        return min(call.tokens, limit, most)
    return tokens_per_chunk(call.tokens, per_token, most)


def padded_tokens(call: Call, chunk: int, bytes_per_token: int, *, copied: bool = False) -> int:
    """Length of an intermediate's rows: whole tiles, and if the scratch holds it an odd number.

    Rows that lie a power of two apart would share few of the cache's sets.

    Args:
        chunk: tokens walked at once, as ``chunk_tokens`` gives them for the same arguments.
    """
    room = SCRATCH_BYTES - chunk * _copy_bytes(call, copied=copied)
    tiles = -(-chunk // TILE_TOKENS)
    odd = tiles + 1 - tiles % 2
    return (odd if odd * TILE_TOKENS * bytes_per_token <= room else tiles) * TILE_TOKENS


def walk(
    call: Call, x: Tensor, bytes_per_token: int, limit: int = 0
) -> tuple[int, Iterator[tuple[slice, Tensor, bool]]]:
    """Walks ``x (tokens, in)`` in chunks, copied where TMA cannot read it.

    Args:
        call, bytes_per_token, limit: as ``chunk_tokens`` takes them.

    Returns:
        The length of the intermediate's rows, and for each chunk its tokens, its rows
        ``(tokens, in)`` of x, and whether these and all other inputs are older than the kernel in
        front: a kernel of this very call.
    """
    copied = not is_aligned(x)
    chunk = chunk_tokens(call, bytes_per_token, limit, copied=copied)
    rows = x.new_empty((chunk, call.in_features)) if copied else None

    def chunks() -> Iterator[tuple[slice, Tensor, bool]]:
        for start in range(0, call.tokens, chunk):
            stop = min(start + chunk, call.tokens)
            part = x[start:stop] if rows is None else rows[: stop - start].copy_(x[start:stop])
            # A copy just made may be read once its kernel has ended, not before.
            yield slice(start, stop), part, start > 0 and rows is None

    return padded_tokens(call, chunk, bytes_per_token, copied=copied), chunks()
