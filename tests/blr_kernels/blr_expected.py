"""Expected values, worked out entry by entry in float64 from the formulas, with no torch product.

Shares no code with the package: a mistake in its layouts cannot hide here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blr_kernels import (
    Backend,
    Blast,
    LowRank,
    Monarch,
    Structure,
    blast_linear,
    low_rank_linear,
    monarch_linear,
)


def factors_for(
    structure: Structure, in_features: int, out_features: int, *, seed: int = 0
) -> dict[str, Tensor]:
    """Random float64 factors, scaled so that the dense weight has entries of about 1/sqrt(in)."""
    generator = torch.Generator().manual_seed(seed)
    r = structure.rank
    if isinstance(structure, LowRank):
        shapes = {"left": (out_features, r), "right": (r, in_features)}
        terms = r
    else:
        b = structure.blocks
        p, q = in_features // b, out_features // b
        shapes = {"left": (b, q, r), "right": (b, r, p)}
        terms = r // b if isinstance(structure, Monarch) else r
        if isinstance(structure, Blast):
            shapes["coupling"] = (b, b, r)
    factors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    factors["right"] /= math.sqrt(terms * in_features)
    return factors


def dense(structure: Structure, factors: dict[str, Tensor]) -> np.ndarray:
    """``W (out, in)`` in float64, one entry after another."""
    f = {name: tensor.detach().double().cpu().numpy() for name, tensor in factors.items()}
    left, right = f["left"], f["right"]
    if isinstance(structure, LowRank):
        out_features, in_features = left.shape[0], right.shape[1]
        weight = np.zeros((out_features, in_features))
        for o in range(out_features):
            for i in range(in_features):
                weight[o, i] = sum(left[o, n] * right[n, i] for n in range(structure.rank))
        return weight
    b, q, r = left.shape
    p = right.shape[2]
    weight = np.zeros((b * q, b * p))
    if isinstance(structure, Monarch):
        m = r // b
        for el in range(b):
            for s in range(q):
                for k in range(b):
                    for c in range(p):
                        weight[s * b + el, k * p + c] = sum(
                            left[el, s, k * m + j] * right[k, j * b + el, c] for j in range(m)
                        )
        return weight
    for i in range(b):
        for j in range(b):
            scaled = left[i] * f["coupling"][i, j][None, :]
            for c in range(p):
                column = right[j, :, c]
                for s in range(q):
                    weight[i * q + s, j * p + c] = float(np.sum(scaled[s] * column))
    return weight


def activated(y: np.ndarray, activation: str | None) -> np.ndarray:
    """The textbook formulas, in float64."""
    if activation == "gelu":
        return y * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(y / math.sqrt(2)))
    if activation == "gelu_tanh":
        return 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    if activation == "silu":
        return y / (1 + np.exp(-y))
    return y


def expected(
    x: Tensor, weight: np.ndarray, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """``activation(x @ W.T + bias)`` in float64 on the CPU."""
    y = x.detach().double().cpu().numpy() @ weight.T
    if bias is not None:
        y = y + bias.detach().double().cpu().numpy()
    return torch.from_numpy(np.asarray(activated(y, activation)))


def call(
    structure: Structure,
    x: Tensor,
    factors: dict[str, Tensor],
    bias: Tensor | None = None,
    activation: Any = None,
    *,
    backend: Backend,
) -> Tensor:
    """The public op of the structure."""
    left, right = factors["left"], factors["right"]
    if isinstance(structure, LowRank):
        return low_rank_linear(x, left, right, bias, activation, backend=backend)
    if isinstance(structure, Monarch):
        return monarch_linear(x, left, right, bias, activation, backend=backend)
    return blast_linear(x, left, factors["coupling"], right, bias, activation, backend=backend)


TOLERANCES = {
    # dtype: (largest error of the largest output, RMS error of the output's RMS)
    torch.float32: (1e-5, 2e-6),
    torch.float16: (3e-3, 6e-4),
    torch.bfloat16: (2e-2, 4e-3),
}


def assert_close(actual: Tensor, wanted: Tensor, *, slack: float = 1.0) -> None:
    """Bounds the largest error and the RMS error, each relative to the same of what is wanted."""
    assert actual.shape == wanted.shape
    if wanted.numel() == 0:
        return
    largest, rms = TOLERANCES[actual.dtype]
    wanted = wanted.double().to(actual.device)
    error = actual.detach().double() - wanted
    assert torch.isfinite(error).all(), "the output holds values that are not finite"
    assert error.abs().max() <= largest * slack * wanted.abs().max()
    assert error.square().mean().sqrt() <= rms * slack * wanted.square().mean().sqrt()
