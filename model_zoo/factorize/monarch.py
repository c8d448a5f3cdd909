"""Monarch by an exact SVD of each block (Dao et al., arXiv 2204.00595, section 3).

Row ``s * b + l`` and column ``k * p + c`` of the weight meet in block ``(l, k)``, which a Monarch
matrix holds at rank ``m = r / b``. The blocks share no parameter, so their truncated SVDs are the
optimum.
"""

from __future__ import annotations

from torch import Tensor

from model_zoo.factorize.svd import split_svd

__all__ = ["monarch_factors"]


def monarch_factors(weight: Tensor, blocks: int, rank: int) -> dict[str, Tensor]:
    """Factors ``left (b, q, r)`` and ``right (b, r, p)`` of ``weight (b * q, b * p)``.

    Raises:
        ValueError: the rank of a block is more than the block can have.
    """
    out_features, in_features = weight.shape
    q, p, m = out_features // blocks, in_features // blocks, rank // blocks
    if m > min(q, p):
        raise ValueError(
            f"Monarch with {blocks} blocks needs rank <= {blocks * min(q, p)} for a weight of "
            f"shape {tuple(weight.shape)}, got {rank}"
        )
    permuted = weight.reshape(q, blocks, blocks, p).permute(1, 2, 0, 3)  # (l, k, q, p)
    left, right = split_svd(permuted, m)  # (l, k, q, m), (l, k, m, p)
    return {
        "left": left.permute(0, 2, 1, 3).reshape(blocks, q, rank).contiguous(),
        "right": right.permute(1, 2, 0, 3).reshape(blocks, rank, p).contiguous(),
    }
