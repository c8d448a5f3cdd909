"""The three block low-rank structures: shapes, sizes and costs. Imports no torch.

With ``b`` blocks, ``p = in / b``, ``q = out / b`` and rank ``r``, a weight ``W (out, in)`` has
one of these forms:

- ``LowRank(r)``: ``left (out, r)``, ``right (r, in)``; ``W = left @ right``.
- ``Monarch(b, r)`` with ``m = r / b``: ``left (b, q, r)``, ``right (b, r, p)``;
  ``W[s*b + l, k*p + c] = sum_j left[l, s, k*m + j] * right[k, j*b + l, c]``.
- ``Blast(b, r)``: ``left (b, q, r)``, ``coupling (b, b, r)``, ``right (b, r, p)``; block
  ``(i, j)`` of W is ``left[i] @ diag(coupling[i, j]) @ right[j]``.

Sources: Monarch arXiv 2204.00595, BLAST arXiv 2410.21262.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

Kind: TypeAlias = Literal["low_rank", "monarch", "blast"]
KINDS: tuple[Kind, ...] = ("low_rank", "monarch", "blast")

DEFAULT_BLOCKS: Mapping[str, int] = {"monarch": 4, "blast": 3}
"""Blocks taken when none are given: the paper's choice for ViT-B."""


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class _Costs:
    """What follows from the parameter shapes alone, the same for every structure."""

    def parameter_shapes(self, in_features: int, out_features: int) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def parameter_count(self, in_features: int, out_features: int) -> int:
        """Number of weight parameters, padding included, bias left out."""
        shapes = self.parameter_shapes(in_features, out_features).values()
        return sum(math.prod(shape) for shape in shapes)

    def flops(self, in_features: int, out_features: int, tokens: int) -> int:
        """Floating-point operations of one forward over ``tokens`` rows, bias left out.

        Each parameter meets each token in one multiplication and one addition.
        """
        return 2 * self.parameter_count(in_features, out_features) * tokens

    def weight_bytes(self, in_features: int, out_features: int, itemsize: int) -> int:
        """Bytes of the weight parameters at ``itemsize`` bytes each."""
        return self.parameter_count(in_features, out_features) * itemsize


class _Blocked(_Costs):
    """Padding and shapes shared by the structures that cut the weight into blocks."""

    blocks: int
    rank: int

    def padded(self, in_features: int, out_features: int) -> tuple[int, int]:
        """Sizes rounded up to a multiple of ``blocks``.

        Raises:
            ValueError: if a size is below ``blocks``, so that a block would be padding alone.
        """
        _check_positive("in_features", in_features)
        _check_positive("out_features", out_features)
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < self.blocks:
                raise ValueError(f"{name} must be at least blocks = {self.blocks}, got {size}")
        return _round_up(in_features, self.blocks), _round_up(out_features, self.blocks)

    def parameter_shapes(self, in_features: int, out_features: int) -> dict[str, tuple[int, ...]]:
        """Shapes by name at the padded sizes: ``left (b, q, r)``, ``right (b, r, p)``."""
        in_padded, out_padded = self.padded(in_features, out_features)
        b, r = self.blocks, self.rank
        return {"left": (b, out_padded // b, r), "right": (b, r, in_padded // b)}


@dataclass(frozen=True)
class LowRank(_Costs):
    """``W = left @ right`` with ``left (out, rank)`` and ``right (rank, in)``."""

    rank: int
    kind: ClassVar[Literal["low_rank"]] = "low_rank"

    def __post_init__(self) -> None:
        _check_positive("rank", self.rank)

    def padded(self, in_features: int, out_features: int) -> tuple[int, int]:
        """The sizes themselves: low rank needs no padding."""
        _check_positive("in_features", in_features)
        _check_positive("out_features", out_features)
        return in_features, out_features

    def parameter_shapes(self, in_features: int, out_features: int) -> dict[str, tuple[int, ...]]:
        """Shapes by name: ``left (out, r)``, ``right (r, in)``."""
        self.padded(in_features, out_features)
        return {"left": (out_features, self.rank), "right": (self.rank, in_features)}

    def to_dict(self) -> dict[str, str | int]:
        """A JSON-ready description that ``structure_from_dict`` reads back."""
        return {"kind": self.kind, "rank": self.rank}

    def __str__(self) -> str:
        return f"low rank r{self.rank}"


@dataclass(frozen=True)
class Monarch(_Blocked):
    """Two block-diagonal factors with a fixed permutation between; ``rank % blocks == 0``."""

    blocks: int
    rank: int
    kind: ClassVar[Literal["monarch"]] = "monarch"

    def __post_init__(self) -> None:
        _check_positive("blocks", self.blocks)
        _check_positive("rank", self.rank)
        if self.rank % self.blocks:
            raise ValueError(
                f"Monarch rank must be a multiple of blocks = {self.blocks}, got {self.rank}"
            )

    def to_dict(self) -> dict[str, str | int]:
        """A JSON-ready description that ``structure_from_dict`` reads back."""
        return {"kind": self.kind, "blocks": self.blocks, "rank": self.rank}

    def __str__(self) -> str:
        return f"Monarch b{self.blocks} r{self.rank}"


@dataclass(frozen=True)
class Blast(_Blocked):
    """Blocks that share factors along rows and columns, with a diagonal coupling of their own."""

    blocks: int
    rank: int
    kind: ClassVar[Literal["blast"]] = "blast"

    def __post_init__(self) -> None:
        _check_positive("blocks", self.blocks)
        _check_positive("rank", self.rank)

    def parameter_shapes(self, in_features: int, out_features: int) -> dict[str, tuple[int, ...]]:
        """Shapes by name: ``left (b, q, r)``, ``coupling (b, b, r)``, ``right (b, r, p)``."""
        shapes = super().parameter_shapes(in_features, out_features)
        coupling = (self.blocks, self.blocks, self.rank)
        return {"left": shapes["left"], "coupling": coupling, "right": shapes["right"]}

    def to_dict(self) -> dict[str, str | int]:
        """A JSON-ready description that ``structure_from_dict`` reads back."""
        return {"kind": self.kind, "blocks": self.blocks, "rank": self.rank}

    def __str__(self) -> str:
        return f"BLAST b{self.blocks} r{self.rank}"


Structure: TypeAlias = LowRank | Monarch | Blast


def _check_kind(kind: object) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")


def structure_from_dict(data: Mapping[str, object]) -> Structure:
    """Reads what ``to_dict`` wrote.

    Raises:
        ValueError: if the kind is unknown, a key is missing or one is left over.
        TypeError: if a size is not an int, or ``data`` no mapping.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"a structure must be a mapping, got {type(data).__name__}")
    kind = data.get("kind")
    _check_kind(kind)
    expected = {"kind", "rank"} if kind == "low_rank" else {"kind", "blocks", "rank"}
    if set(data) != expected:
        raise ValueError(
            f"a {kind} structure must have the keys {sorted(expected)}, got {sorted(data)}"
        )
    sizes: dict[str, int] = {}
    for key in expected - {"kind"}:
        value = data[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{key} must be an int, got {type(value).__name__} {value!r}")
        sizes[key] = value
    if kind == "low_rank":
        return LowRank(**sizes)
    return Monarch(**sizes) if kind == "monarch" else Blast(**sizes)


def structure_with_budget(
    kind: str,
    in_features: int,
    out_features: int,
    parameters: int,
    blocks: int | None = None,
) -> Structure:
    """The structure of the largest rank that has at most ``parameters`` weight parameters.

    The rank of ``low_rank`` stops at ``min(in_features, out_features)``: more adds nothing.
    ``blocks`` defaults to ``DEFAULT_BLOCKS``; ``low_rank`` takes none.

    Raises:
        ValueError: if the kind is unknown, ``blocks`` do not fit, or no rank fits the budget.
    """
    _check_kind(kind)
    _check_positive("parameters", parameters)
    if kind == "low_rank":
        if blocks is not None:
            raise ValueError(f"low_rank takes no blocks, got blocks = {blocks}")
        smallest: Structure = LowRank(1)
    else:
        blocks = DEFAULT_BLOCKS[kind] if blocks is None else blocks
        _check_positive("blocks", blocks)
        smallest = Monarch(blocks, blocks) if kind == "monarch" else Blast(blocks, 1)
    # Every count is linear in the rank, so the smallest structure gives the price of a step.
    price = smallest.parameter_count(in_features, out_features)
    steps = parameters // price
    if steps < 1:
        raise ValueError(
            f"{smallest} for {in_features} -> {out_features} needs at least {price} parameters, "
            f"got a budget of {parameters}"
        )
    rank = smallest.rank * steps
    if isinstance(smallest, LowRank):
        return LowRank(min(rank, in_features, out_features))
    return type(smallest)(smallest.blocks, rank)
