"""The reference against the entry formulas, and its gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blr_expected import activated, assert_close, call, dense, expected, factors_for

from blr_kernels import Backend, Blast, LowRank, Monarch, Structure, reference
from blr_kernels.reference import ACTIVATIONS

CASES: list[tuple[Structure, int, int]] = [
    (LowRank(8), 12, 20),
    (Monarch(3, 9), 12, 15),
    (Monarch(4, 8), 20, 12),
    (Blast(3, 8), 12, 15),
    (Blast(4, 24), 20, 12),
]


def to_dense(structure: Structure, factors: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(structure, LowRank):
        return reference.low_rank_to_dense(factors["left"], factors["right"])
    if isinstance(structure, Monarch):
        return reference.monarch_to_dense(factors["left"], factors["right"])
    return reference.blast_to_dense(factors["left"], factors["coupling"], factors["right"])


@pytest.mark.parametrize(("structure", "n_in", "n_out"), CASES, ids=str)
def test_dense_weight(structure: Structure, n_in: int, n_out: int) -> None:
    factors = factors_for(structure, n_in, n_out)
    np.testing.assert_allclose(
        to_dense(structure, factors).numpy(), dense(structure, factors), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("tokens", [0, 1, 65])
@pytest.mark.parametrize(("structure", "n_in", "n_out"), CASES, ids=str)
def test_forward_in_float64(structure: Structure, n_in: int, n_out: int, tokens: int) -> None:
    factors = factors_for(structure, n_in, n_out)
    x = torch.randn(tokens, n_in, dtype=torch.float64)
    bias = torch.randn(n_out, dtype=torch.float64)
    for used in (bias, None):
        y = call(structure, x, factors, used, backend=Backend.TORCH)
        torch.testing.assert_close(y, expected(x, dense(structure, factors), used))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("structure", "n_in", "n_out"), CASES, ids=str)
def test_forward_in_half_precision(
    structure: Structure, n_in: int, n_out: int, dtype: torch.dtype
) -> None:
    factors = {k: v.to(dtype) for k, v in factors_for(structure, n_in, n_out).items()}
    x, bias = torch.randn(7, n_in).to(dtype), torch.randn(n_out).to(dtype)
    y = call(structure, x, factors, bias, backend=Backend.TORCH)
    assert y.dtype == dtype
    assert_close(y, expected(x, dense(structure, factors), bias))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("structure", "n_in", "n_out"), CASES[::2], ids=str)
def test_gradcheck(structure: Structure, n_in: int, n_out: int, activation: str | None) -> None:
    factors = factors_for(structure, n_in, n_out)
    x = torch.randn(2, n_in, dtype=torch.float64)
    bias = torch.randn(n_out, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, bias, *factors.values())]

    def function(x: torch.Tensor, bias: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        named = dict(zip(factors, values, strict=True))
        return call(structure, x, named, bias, activation, backend=Backend.TORCH)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_formulas(activation: str) -> None:
    y = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(
        reference.activate(y, activation), torch.from_numpy(activated(y.numpy(), activation))
    )
