"""Block low-rank linear layers: structures, reference math, Triton kernels and modules.

Importing this package imports no torch and touches no device: names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blr_kernels.grouped import BLRGroup
    from blr_kernels.nn import (
        BlastLinear,
        BLRLinear,
        LowRankLinear,
        MonarchLinear,
        set_backend_,
    )
    from blr_kernels.ops import (
        Backend,
        Explanation,
        blast_linear,
        blast_linear_grouped,
        blast_linear_int8,
        explain,
        low_rank_linear,
        low_rank_linear_grouped,
        monarch_linear,
        monarch_linear_grouped,
        triton_available,
    )
    from blr_kernels.quantize import Int8BlastLinear, quantize_, quantize_blast
    from blr_kernels.structures import (
        Blast,
        LowRank,
        Monarch,
        Structure,
        structure_from_dict,
        structure_with_budget,
    )

_MODULES = {
    "BLRGroup": "grouped",
    "BLRLinear": "nn",
    "Backend": "ops",
    "Blast": "structures",
    "BlastLinear": "nn",
    "Explanation": "ops",
    "Int8BlastLinear": "quantize",
    "LowRank": "structures",
    "LowRankLinear": "nn",
    "Monarch": "structures",
    "MonarchLinear": "nn",
    "Structure": "structures",
    "blast_linear": "ops",
    "blast_linear_grouped": "ops",
    "blast_linear_int8": "ops",
    "explain": "ops",
    "low_rank_linear": "ops",
    "low_rank_linear_grouped": "ops",
    "monarch_linear": "ops",
    "monarch_linear_grouped": "ops",
    "quantize_": "quantize",
    "quantize_blast": "quantize",
    "set_backend_": "nn",
    "structure_from_dict": "structures",
    "structure_with_budget": "structures",
    "triton_available": "ops",
}

__all__ = [
    "BLRGroup",
    "BLRLinear",
    "Backend",
    "Blast",
    "BlastLinear",
    "Explanation",
    "Int8BlastLinear",
    "LowRank",
    "LowRankLinear",
    "Monarch",
    "MonarchLinear",
    "Structure",
    "blast_linear",
    "blast_linear_grouped",
    "blast_linear_int8",
    "explain",
    "low_rank_linear",
    "low_rank_linear_grouped",
    "monarch_linear",
    "monarch_linear_grouped",
    "quantize_",
    "quantize_blast",
    "set_backend_",
    "structure_from_dict",
    "structure_with_budget",
    "triton_available",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
