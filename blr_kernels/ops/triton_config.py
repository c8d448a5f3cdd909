"""Launch configs that are safe on any device: tiles chosen by shape, stages by shared memory.

Pure arithmetic: imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

SCRATCH_BYTES = 64 * 2**20
"""Most bytes that an intermediate of one call may take."""

MAX_ACCUMULATORS = 9
"""BLAST accumulators (one an output block) that a program's registers hold without spilling."""

_MAX_STAGES = 3
_SMALL_TOKENS = 16
_LARGE_TOKENS = 1024
_CHUNK_STEP = 128
_SMALLEST_CHUNK = 1024
_MAX_ACCUMULATED = 176
"""fp32 values that a thread accumulates beside its other registers, of 255."""


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

    def to_config(self, prefix: str) -> dict[str, int]:
        """The sizes as ``<prefix>_rows``, ``<prefix>_tokens`` and so on."""
        return {f"{prefix}_{name}": getattr(self, name) for name in _TILE_SIZES}

    @classmethod
    def from_config(cls, config: Mapping[str, int], prefix: str) -> Tiles:
        """Reads what ``to_config`` wrote."""
        return cls(*(config[f"{prefix}_{name}"] for name in _TILE_SIZES))


_TILE_SIZES = ("rows", "tokens", "inner", "warps", "stages")


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``, which is at least 1."""
    return 1 << (size - 1).bit_length()


def tile_of(size: int, largest: int, least: int = 16) -> int:
    """The smallest power of two that holds ``size``, from ``least`` (of tl.dot) to ``largest``."""
    return min(max(least, power_of_two(size)), largest)


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
    tile_rows = tile_of(rows, largest)
    tile_inner = tile_of(inner, 64 if itemsize == 2 else 32)
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
    tile_rank = tile_of(rank, 64 if itemsize == 2 else 32)
    tile_tokens = 16 if tokens <= _SMALL_TOKENS else 64
    tile_inner = tile_of(inner, 64 if itemsize == 2 else 32)
    stages = _stages(tile_rank, tile_tokens, tile_inner, itemsize, shared_limit)
    return Tiles(tile_rank, tile_tokens, tile_inner, 8 if tile_tokens == 64 else 4, stages)


def accumulators(blocks: int) -> int:
    """Output blocks that one program of BLAST's first kernel accumulates.

    All of them up to ``MAX_ACCUMULATORS``; beyond, an even share, so that no register is wasted.
    """
    groups = -(-blocks // MAX_ACCUMULATORS)
    return -(-blocks // groups)


def tokens_per_chunk(tokens: int, bytes_per_token: int, chunk: int = 0) -> int:
    """Tokens to walk at once, the same number in every pass as far as they divide.

    Args:
        tokens: of the call.
        bytes_per_token: of the intermediate, which stays within ``SCRATCH_BYTES``.
        chunk: most tokens to walk at once, 0 for no other limit than the scratch.
    """
    most = max(1, SCRATCH_BYTES // bytes_per_token)
    if chunk:
        most = min(most, chunk)
    if most >= tokens:
        return tokens
    if most >= _CHUNK_STEP:
        most -= most % _CHUNK_STEP
    passes = -(-tokens // most)
    even = -(-tokens // passes)
    return min(most, -(-even // _CHUNK_STEP) * _CHUNK_STEP)


def smaller_chunks(
    tokens: int, bytes_per_token: int, cache_bytes: int, *, least: int = _SMALLEST_CHUNK
) -> list[int]:
    """Chunks worth trying beside the largest: the intermediate in half or a quarter of the cache.

    Args:
        tokens, bytes_per_token: as in ``tokens_per_chunk``.
        cache_bytes: the device's L2 cache.
        least: tokens that make a chunk worth its launches.
    """
    found: list[int] = []
    largest = tokens_per_chunk(tokens, bytes_per_token)
    for share in (2, 4):
        chunk = cache_bytes // (share * bytes_per_token)
        if chunk < least:
            continue
        chunk = tokens_per_chunk(tokens, bytes_per_token, chunk)
        if chunk < largest and chunk not in found:
            found.append(chunk)
    return found


def _fits(tiles: Tiles, itemsize: int, shared_limit: int, accumulated: int) -> bool:
    """Whether shared memory and accumulators, ``accumulated`` tiles in fp32, leave room."""
    values = accumulated * tiles.rows * tiles.tokens / (32 * tiles.warps)
    return tiles.shared_bytes(itemsize) <= shared_limit and values <= _MAX_ACCUMULATED


def product_candidates(
    tokens: int, rows: int, inner: int, *, itemsize: int, shared_limit: int
) -> list[Tiles]:
    """Tiles worth timing instead of ``product_tiles``, at most five, all within the limits."""
    default = product_tiles(tokens, rows, inner, itemsize=itemsize, shared_limit=shared_limit)
    if tokens <= _SMALL_TOKENS:
        shapes = ((16, 16, 128, 2), (32, 16, 128, 4), (16, 16, 256, 4), (64, 16, 128, 4))
    elif tokens <= _LARGE_TOKENS:
        shapes = ((128, 64, 64, 4), (64, 32, 64, 4), (32, 64, 64, 4), (64, 64, 128, 4))
    else:
        shapes = ((256, 128, 64, 8), (128, 256, 64, 8), (128, 128, 64, 4), (128, 64, 64, 4))
    return _distinct(
        default, shapes, rows, inner, itemsize=itemsize, shared_limit=shared_limit, accumulated=1
    )


def mix_candidates(
    tokens: int, rank: int, inner: int, outputs: int, *, itemsize: int, shared_limit: int
) -> list[Tiles]:
    """Tiles worth timing instead of ``mix_tiles``, at most five, all within the limits.

    Args:
        tokens, rank, inner: tokens, rank and the input block's size p.
        outputs: output blocks that a program accumulates.
        itemsize: bytes of an element, 2 or 4.
        shared_limit: shared memory a block may use, in bytes.
    """
    default = mix_tiles(tokens, rank, inner, itemsize=itemsize, shared_limit=shared_limit)
    if tokens <= _SMALL_TOKENS:
        shapes = ((16, 16, 64, 2), (32, 16, 64, 4), (16, 16, 128, 4), (32, 16, 128, 4))
    else:
        shapes = ((32, 64, 64, 4), (64, 32, 64, 4), (128, 64, 64, 8), (64, 128, 64, 8))
    return _distinct(
        default,
        shapes,
        rank,
        inner,
        itemsize=itemsize,
        shared_limit=shared_limit,
        accumulated=outputs + 1,
    )


def _distinct(
    default: Tiles,
    shapes: Sequence[tuple[int, int, int, int]],
    rows: int,
    inner: int,
    *,
    itemsize: int,
    shared_limit: int,
    accumulated: int,
) -> list[Tiles]:
    """``shapes`` of (rows, tokens, inner, warps), cut to what there is, and one more stage."""
    found: list[Tiles] = []
    for tile_rows, tile_tokens, tile_inner, warps in shapes:
        tile_rows, tile_inner = tile_of(rows, tile_rows), tile_of(inner, tile_inner)
        stages = _stages(tile_rows, tile_tokens, tile_inner, itemsize, shared_limit)
        found.append(Tiles(tile_rows, tile_tokens, tile_inner, warps, stages))
    found.append(replace(default, stages=default.stages + 1))
    kept = [t for t in dict.fromkeys(found) if _fits(t, itemsize, shared_limit, accumulated)]
    return [tiles for tiles in kept if tiles != default]
