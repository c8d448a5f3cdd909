"""Launch configs that are safe on any device: tiles chosen by shape, stages by shared memory.

Pure arithmetic: imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass

SCRATCH_BYTES = 64 * 2**20
"""Most bytes that an intermediate of one call may take."""

MAX_ACCUMULATORS = 9
"""BLAST accumulators (one an output block) that a program's registers hold without spilling."""

_MAX_STAGES = 3
_SMALL_TOKENS = 16
_LARGE_TOKENS = 1024


@dataclass(frozen=True)
class Tiles:
    """Sizes of one launch: what one program computes, and how.

    Attributes:
        rows: rows of the weight factor a program holds (N of a product; rank of BLAST's first).
        tokens: tokens a program holds.
        inner: step of the summed dimension.
        warps, stages: as Triton takes them.
    """

    rows: int
    tokens: int
    inner: int
    warps: int
    stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of the pipelined operand tiles."""
        return self.stages * (self.rows + self.tokens) * self.inner * itemsize


def _tile(size: int, largest: int) -> int:
    """The smallest power of two that holds ``size``, from 16 (tl.dot's least) to ``largest``."""
    return min(max(16, 1 << (size - 1).bit_length()), largest)


def _stages(rows: int, tokens: int, inner: int, itemsize: int, shared_limit: int) -> int:
    per_stage = (rows + tokens) * inner * itemsize
    return max(1, min(_MAX_STAGES, shared_limit // per_stage))


def product_tiles(tokens: int, rows: int, inner: int, *, itemsize: int, shared_limit: int) -> Tiles:
    """Tiles of ``(tokens, inner) x (rows, inner)^T``.

    Args:
        tokens, rows, inner: sizes of the product.
        itemsize: bytes of an element, 2 or 4.
        shared_limit: shared memory a block may use, in bytes.
    """
    largest = 128 if itemsize == 2 and tokens > _LARGE_TOKENS else 64
    tile_tokens = 16 if tokens <= _SMALL_TOKENS else largest
    tile_rows = _tile(rows, largest)
    tile_inner = _tile(inner, 64 if itemsize == 2 else 32)
    warps = 8 if tile_tokens * tile_rows > 64 * 64 else 4
    stages = _stages(tile_rows, tile_tokens, tile_inner, itemsize, shared_limit)
    return Tiles(tile_rows, tile_tokens, tile_inner, warps, stages)


def mix_tiles(tokens: int, rank: int, inner: int, *, itemsize: int, shared_limit: int) -> Tiles:
    """Tiles of BLAST's first kernel, whose accumulators take most of the registers.

    Args:
        tokens, rank, inner: tokens, rank and the input block's size p.
        itemsize: bytes of an element, 2 or 4.
        shared_limit: shared memory a block may use, in bytes.
    """
    tile_rank = _tile(rank, 64 if itemsize == 2 else 32)
    tile_tokens = 16 if tokens <= _SMALL_TOKENS else 64
    tile_inner = _tile(inner, 64 if itemsize == 2 else 32)
    stages = _stages(tile_rank, tile_tokens, tile_inner, itemsize, shared_limit)
    return Tiles(tile_rank, tile_tokens, tile_inner, 8 if tile_tokens == 64 else 4, stages)


def accumulators(blocks: int) -> int:
    """Output blocks that one program of BLAST's first kernel accumulates.

    All of them up to ``MAX_ACCUMULATORS``; beyond, an even share, so that no register is wasted.
    """
    groups = -(-blocks // MAX_ACCUMULATORS)
    return -(-blocks // groups)


def tokens_per_chunk(tokens: int, bytes_per_token: int) -> int:
    """Tokens to walk at once so that an intermediate stays within ``SCRATCH_BYTES``."""
    most = max(1, SCRATCH_BYTES // bytes_per_token)
    if most >= tokens:
        return tokens
    return most - most % 128 if most >= 128 else most
