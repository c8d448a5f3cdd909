"""Low rank by truncated SVD: the best approximation of its rank (Eckart and Young, 1936)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["low_rank_factors", "split_svd"]


def split_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-``rank`` product ``left @ right``, the singular values shared evenly.

    Args:
        matrix: ``(..., rows, columns)`` in a floating dtype that has an SVD.
        rank: at most ``min(rows, columns)``.

    Returns:
        ``left (..., rows, rank)`` and ``right (..., rank, columns)``. Each carries the square root
        of the singular values, so that neither is large where the other is small.
    """
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    root = s[..., :rank].sqrt()
    return u[..., :rank] * root[..., None, :], root[..., :, None] * vh[..., :rank, :]


def low_rank_factors(weight: Tensor, rank: int) -> dict[str, Tensor]:
    """Factors ``left (out, rank)`` and ``right (rank, in)`` of ``weight (out, in)``.

    Raises:
        ValueError: the rank is more than the matrix can have.
    """
    limit = min(weight.shape)
    if rank > limit:
        raise ValueError(
            f"low rank needs rank <= min(out, in) = {limit} for a weight of shape "
            f"{tuple(weight.shape)}, got {rank}"
        )
    left, right = split_svd(weight, rank)
    return {"left": left.contiguous(), "right": right.contiguous()}
