"""Dense weight to block low-rank factors: one entry point, :func:`factorize`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blr_kernels.reference import blast_to_dense, low_rank_to_dense, monarch_to_dense
from blr_kernels.structures import Blast, LowRank, Monarch, Structure
from model_zoo.factorize.blast import blast_factors
from model_zoo.factorize.monarch import monarch_factors
from model_zoo.factorize.svd import low_rank_factors

__all__ = ["MAX_ITERATIONS", "TOLERANCE", "Factorization", "factorize"]

MAX_ITERATIONS = 300
"""Most sweeps of a BLAST fit."""

TOLERANCE = 1e-3
"""Ten sweeps of a BLAST fit that lower the error by less than this fraction of it are the last."""


@dataclass(frozen=True)
class Factorization:
    """A weight in factors.

    Attributes:
        structure: what was asked for.
        factors: ``left``, ``right`` and, for BLAST, ``coupling``, in the weight's dtype and on its
            device, in the canonical layout and padded sizes of ``structure.parameter_shapes``.
        relative_error: ``|W - to_dense| / |W|`` (Frobenius) of these very factors.
        errors: the relative error of the start and after each iteration, never rising. One entry
            where the optimum is found directly.
    """

    structure: Structure
    factors: dict[str, Tensor] = field(repr=False)
    relative_error: float
    errors: tuple[float, ...] = field(repr=False)


@torch.no_grad()
def factorize(
    weight: Tensor,
    structure: Structure,
    *,
    max_iterations: int = MAX_ITERATIONS,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Factorization:
    """Approximate ``weight (out, in)`` by ``structure``.

    Low rank (truncated SVD) and Monarch (an SVD a block) are optimal and direct. BLAST is fitted by
    alternating least squares and stops by itself, see :mod:`model_zoo.factorize.blast`. The work is
    done on the weight's device, in float64 (float32 on a device without it, and for the sweeps of
    BLAST that need no more).

    Args:
        weight: floating, two-dimensional, finite.
        structure: where its blocks do not divide the weight, the weight is padded with zeros.
        max_iterations: BLAST only, upper limit of sweeps after its starts have raced for ten each.
        tolerance: BLAST only, smallest relative gain over ten sweeps worth going on for.
        seed: BLAST only.

    Raises:
        TypeError: the weight is no floating tensor, or the structure is none of the three.
        ValueError: wrong shape, NaN or infinite entries, or more rank than the weight can have.
    """
    if not isinstance(structure, LowRank | Monarch | Blast):
        raise TypeError(
            f"structure must be LowRank, Monarch or Blast, got {type(structure).__name__}"
        )
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"weight must be a floating tensor, got {got}")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight must have shape (out, in), got {tuple(weight.shape)}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight must be finite, got NaN or infinite entries")
    if max_iterations < 0:
        raise ValueError(f"max_iterations must be >= 0, got {max_iterations}")

    out_features, in_features = weight.shape
    in_padded, out_padded = structure.padded(in_features, out_features)
    dtype = torch.float32 if weight.device.type == "mps" else torch.float64
    work = torch.zeros(out_padded, in_padded, dtype=dtype, device=weight.device)
    work[:out_features, :in_features] = weight

    errors: tuple[float, ...] | None = None
    match structure:
        case LowRank():
            factors = low_rank_factors(work, structure.rank)
        case Monarch():
            factors = monarch_factors(work, structure.blocks, structure.rank)
        case Blast() if not bool(work.any()):
            shapes = structure.parameter_shapes(in_features, out_features)
            factors = {name: work.new_zeros(shape) for name, shape in shapes.items()}
            factors["coupling"].fill_(1)
        case _:
            fit = blast_factors(
                work,
                structure.blocks,
                structure.rank,
                max_iterations=max_iterations,
                tolerance=tolerance,
                seed=seed,
            )
            factors = {"left": fit.left, "coupling": fit.coupling, "right": fit.right}
            errors = fit.errors

    factors = {name: factor.to(weight.dtype) for name, factor in factors.items()}
    error = _relative_error(weight, factors, structure)
    return Factorization(structure, factors, error, errors if errors is not None else (error,))


def _relative_error(weight: Tensor, factors: dict[str, Tensor], structure: Structure) -> float:
    dtype = torch.float32 if weight.device.type == "mps" else torch.float64
    wide = {name: factor.to(dtype) for name, factor in factors.items()}
    match structure:
        case LowRank():
            dense = low_rank_to_dense(wide["left"], wide["right"])
        case Monarch():
            dense = monarch_to_dense(wide["left"], wide["right"])
        case _:
            dense = blast_to_dense(wide["left"], wide["coupling"], wide["right"])
    out_features, in_features = weight.shape
    target = weight.to(dtype)
    norm = target.norm()
    if float(norm) == 0:
        return 0.0
    return float((dense[:out_features, :in_features] - target).norm() / norm)
