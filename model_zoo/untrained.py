"""Block low-rank layers of the paper's ranks with random factors, for models without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from blr_kernels.ops import Backend
from blr_kernels.structures import KINDS, Structure, structure_from_dict
from model_zoo.convert import replace_linears_

__all__ = ["PaperSizes", "untrained_variant_"]


@dataclass(frozen=True)
class PaperSizes:
    """The sizes that the paper chose for one model.

    Attributes:
        width: of the model that the ranks are for.
        ranks: of each converted layer, by its name inside a transformer block.
        blocks: by kind, for Monarch and BLAST.
    """

    width: int
    ranks: Mapping[str, int]
    blocks: Mapping[str, int]


def untrained_variant_(
    model: nn.Module, kind: str, sizes: PaperSizes, *, backend: Backend = Backend.AUTO
) -> dict[str, Structure]:
    """Put block low-rank layers of the paper's ranks into a model, with random factors.

    At another width than the paper's the ranks scale with it; Monarch's are rounded down to a
    multiple of its blocks. The width is the input of the first layer to convert.

    Args:
        model: blocks of it are named ``<list>.<index>``; q, k and v are one linear.
        kind: "low_rank", "monarch" or "blast".
        sizes: of the paper for this model.
        backend: of the new layers.

    Returns:
        The structure of each converted layer.

    Raises:
        ValueError: unknown kind, or no layer to convert.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    found = {
        name: (sizes.ranks[suffix], module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (suffix := name.split(".", 2)[-1]) in sizes.ranks
    }
    if not found:
        raise ValueError("the model has none of the layers to convert; q, k and v must be fused")
    width = next(iter(found.values()))[1]
    structures = {
        name: _structure(kind, rank * width // sizes.width, sizes.blocks.get(kind))
        for name, (rank, _) in found.items()
    }
    replace_linears_(model, structures, backend=backend)
    return structures


def _structure(kind: str, rank: int, blocks: int | None) -> Structure:
    if blocks is None:
        return structure_from_dict({"kind": kind, "rank": max(1, rank)})
    step = blocks if kind == "monarch" else 1
    return structure_from_dict(
        {"kind": kind, "blocks": blocks, "rank": max(blocks, rank - rank % step)}
    )
