"""Factorizers against weights built entry by entry from the formulas in the design."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blr_kernels.structures import Blast, LowRank, Monarch, Structure
from model_zoo.factorize import Factorization, blast, factorize


def blast_weight(b: int, p: int, q: int, r: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((b, q, r)), rng.standard_normal((b, r, p))
    coupling = rng.standard_normal((b, b, r))
    rows = [
        np.hstack([left[i] @ np.diag(coupling[i, j]) @ right[j] for j in range(b)])
        for i in range(b)
    ]
    return torch.from_numpy(np.vstack(rows))


def monarch_weight(b: int, p: int, q: int, r: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    m = r // b
    left, right = rng.standard_normal((b, q, r)), rng.standard_normal((b, r, p))
    weight = np.zeros((b * q, b * p))
    for s in range(q):
        for block_row in range(b):
            for k in range(b):
                for c in range(p):
                    weight[s * b + block_row, k * p + c] = sum(
                        left[block_row, s, k * m + j] * right[k, j * b + block_row, c]
                        for j in range(m)
                    )
    return torch.from_numpy(weight)


def dense_from(result: Factorization) -> Tensor:
    """The weight from the formulas, independent of the package's own to_dense."""
    f = {name: factor.double().numpy() for name, factor in result.factors.items()}
    if isinstance(result.structure, LowRank):
        return torch.from_numpy(f["left"] @ f["right"])
    b = result.structure.blocks
    q, p = f["left"].shape[1], f["right"].shape[2]
    weight = np.zeros((b * q, b * p))
    if isinstance(result.structure, Blast):
        for i in range(b):
            for j in range(b):
                weight[i * q : (i + 1) * q, j * p : (j + 1) * p] = (
                    f["left"][i] @ np.diag(f["coupling"][i, j]) @ f["right"][j]
                )
    else:
        m = result.structure.rank // b
        for block_row in range(b):
            for k in range(b):
                block = f["left"][block_row][:, k * m : (k + 1) * m] @ f["right"][k][block_row::b]
                weight[block_row::b, k * p : (k + 1) * p] = block
    return torch.from_numpy(weight)


def relative(weight: Tensor, other: Tensor) -> float:
    return float((weight - other).norm() / weight.norm())


def low_rank_error(weight: Tensor, parameters: int) -> float:
    singular = np.linalg.svd(weight.numpy(), compute_uv=False)
    rank = parameters // sum(weight.shape)
    return float(np.sqrt((singular[rank:] ** 2).sum() / (singular**2).sum()))


def check_result(result: Factorization, weight: Tensor) -> None:
    shapes = result.structure.parameter_shapes(weight.shape[1], weight.shape[0])
    assert {name: tuple(factor.shape) for name, factor in result.factors.items()} == shapes
    assert all(factor.dtype == weight.dtype for factor in result.factors.values())
    rows, columns = weight.shape
    dense = dense_from(result)[:rows, :columns]
    assert relative(weight.double(), dense) == pytest.approx(result.relative_error, abs=1e-9)
    assert all(b <= a for a, b in zip(result.errors, result.errors[1:], strict=False))


@pytest.mark.parametrize(
    ("weight", "structure"),
    [
        (torch.randn(30, 5).double() @ torch.randn(5, 18).double(), LowRank(5)),
        (monarch_weight(3, 4, 5, 6), Monarch(3, 6)),
        (monarch_weight(4, 9, 6, 12), Monarch(4, 12)),
        (blast_weight(3, 16, 16, 8), Blast(3, 8)),
        (blast_weight(3, 16, 24, 16, seed=1), Blast(3, 16)),  # r = p
        (blast_weight(9, 16, 16, 16, seed=2), Blast(9, 16)),
        (blast_weight(4, 36, 36, 36, seed=3), Blast(4, 36)),
        (blast_weight(2, 7, 5, 4, seed=4), Blast(2, 4)),
        (blast_weight(1, 12, 10, 3, seed=5), Blast(1, 3)),
    ],
)
def test_structured_weight_is_recovered(weight: Tensor, structure: Structure) -> None:
    result = factorize(weight, structure)
    check_result(result, weight)
    assert result.relative_error < 1e-6
    single = factorize(weight.float(), structure)
    check_result(single, weight.float())
    assert single.relative_error < 1e-4


@pytest.mark.parametrize(
    ("b", "p", "q", "r"), [(3, 16, 16, 24), (9, 16, 16, 32), (9, 16, 48, 40), (9, 16, 64, 24)]
)
def test_blast_of_more_rank_than_a_block_beats_low_rank(b: int, p: int, q: int, r: int) -> None:
    weight = blast_weight(b, p, q, r)
    structure = Blast(b, r)
    result = factorize(weight, structure)
    check_result(result, weight)
    budget = structure.parameter_count(b * p, b * q)
    assert result.relative_error < 0.75 * low_rank_error(weight, budget)


def test_blast_beats_low_rank_on_a_decaying_spectrum() -> None:
    generator = torch.Generator().manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(216, 144, generator=generator).double(), False)
    weight = u @ torch.diag((torch.arange(144.0) + 5) ** -0.5).double() @ vh
    structure = Blast(9, 36)
    result = factorize(weight, structure)
    check_result(result, weight)
    assert result.relative_error < low_rank_error(weight, structure.parameter_count(144, 216))
    assert 20 < len(result.errors) < 300  # stops by itself
    short = factorize(weight, structure, max_iterations=0)
    assert short.errors == pytest.approx(result.errors[: len(short.errors)])


def test_blast_sweeps_in_single_precision_until_it_must_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five times quicker at real sizes, and the fit ends where one in double precision would."""
    used = []
    sweep = blast._least_squares_sweep

    def spy(tiles: Tensor, *rest: Any) -> Any:
        used.append(tiles.dtype)
        return sweep(tiles, *rest)

    monkeypatch.setattr(blast, "_least_squares_sweep", spy)
    noise = torch.randn(72, 36, generator=torch.Generator().manual_seed(7)).double()
    result = factorize(noise, Blast(3, 10))
    assert set(used) == {torch.float32}
    check_result(result, noise)
    monkeypatch.setattr(blast, "FINE", 2.0)
    used.clear()
    double = factorize(noise, Blast(3, 10))
    assert set(used) == {torch.float64}
    assert result.relative_error == pytest.approx(double.relative_error, rel=1e-4)
    monkeypatch.undo()

    monkeypatch.setattr(blast, "_least_squares_sweep", spy)
    # A start that is far from the exact fit, which the sweeps then reach.
    monkeypatch.setattr(blast, "_starts", lambda tiles, rank, seed: [blast._block_start(tiles, 8)])
    used.clear()
    weight = blast_weight(3, 16, 16, 8)
    fine = factorize(weight, Blast(3, 8))
    check_result(fine, weight)
    assert fine.relative_error < 1e-6
    assert used == sorted(used, key=lambda dtype: dtype == torch.float64)  # one change, for good
    assert {used[0], used[-1]} == {torch.float32, torch.float64}


def test_blast_stops_when_sweeps_gain_too_little() -> None:
    weight = torch.randn(72, 36, generator=torch.Generator().manual_seed(8)).double()
    default, coarse = (
        factorize(weight, Blast(3, 10)),
        factorize(weight, Blast(3, 10), tolerance=0.1),
    )
    assert len(coarse.errors) < len(default.errors) < 300
    gain = coarse.errors[-11] - coarse.errors[-1]
    assert gain <= 0.1 * coarse.errors[-1]
    assert len(factorize(weight, Blast(3, 10), max_iterations=2).errors) == 1 + 10 + 2


def test_low_rank_and_monarch_are_optimal() -> None:
    weight = torch.randn(20, 12, generator=torch.Generator().manual_seed(1)).double()
    assert factorize(weight, LowRank(4)).relative_error == pytest.approx(
        low_rank_error(weight, 4 * 32), abs=1e-12
    )
    blocks = weight.numpy().reshape(5, 4, 4, 3).transpose(1, 2, 0, 3)
    singular = np.linalg.svd(blocks, compute_uv=False)
    expected = np.sqrt((singular[..., 2:] ** 2).sum() / (singular**2).sum())
    result = factorize(weight, Monarch(4, 8))
    check_result(result, weight)
    assert result.relative_error == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("structure", [LowRank(4), Monarch(3, 6), Blast(3, 6)])
def test_padding_keeps_the_weight(structure: Structure) -> None:
    weight = torch.randn(11, 10, generator=torch.Generator().manual_seed(2))
    result = factorize(weight, structure)
    check_result(result, weight)
    assert 0 < result.relative_error < 0.9


@pytest.mark.parametrize("structure", [LowRank(4), Monarch(3, 6), Blast(3, 6)])
def test_zero_weight(structure: Structure) -> None:
    weight = torch.zeros(12, 9)
    result = factorize(weight, structure)
    assert result.relative_error == 0
    assert torch.equal(dense_from(result), torch.zeros(12, 9, dtype=torch.float64))


def test_degenerate_blocks_are_fitted() -> None:
    weight = torch.zeros(12, 12).double()
    weight[:4, :4] = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    weight[8:, 8:] = 1
    result = factorize(weight, Blast(3, 6))
    assert result.relative_error < 0.5
    assert all(torch.isfinite(factor).all() for factor in result.factors.values())
    diagonal = torch.block_diag(*torch.randn(3, 4, 4).double())
    assert factorize(diagonal, Blast(3, 12)).relative_error < 1e-6


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("structure", [LowRank(8), Monarch(4, 8), Blast(4, 6)])
def test_half_precision_storage_is_safe(structure: Structure, scale: float) -> None:
    weight = scale * torch.randn(32, 24, generator=torch.Generator().manual_seed(4))
    fine = factorize(weight, structure)
    coarse = factorize(weight.half(), structure)
    assert all(torch.isfinite(factor).all() for factor in coarse.factors.values())
    assert coarse.relative_error == pytest.approx(fine.relative_error, abs=5e-3)
    largest = max(float(f.abs().max()) for f in fine.factors.values())
    assert largest < 20 * max(1.0, scale**0.5)


def test_wrong_input_is_refused() -> None:
    good = torch.randn(12, 9)
    with pytest.raises(TypeError, match="floating"):
        factorize(torch.ones(4, 4, dtype=torch.int64), LowRank(2))
    with pytest.raises(ValueError, match=r"\(out, in\)"):
        factorize(torch.randn(3, 4, 5), LowRank(2))
    with pytest.raises(ValueError, match="finite"):
        factorize(good.clone().fill_(float("nan")), Blast(3, 3))
    with pytest.raises(ValueError, match="rank <= min"):
        factorize(good, LowRank(10))
    with pytest.raises(ValueError, match="rank <= 9"):
        factorize(good, Monarch(3, 12))
    with pytest.raises(ValueError, match="rank <= 9"):
        factorize(good, Blast(3, 10))
    with pytest.raises(TypeError, match="structure"):
        factorize(good, "blast")  # type: ignore[arg-type]


def test_same_seed_same_factors() -> None:
    weight = torch.randn(18, 18)
    first, second = (factorize(weight, Blast(3, 6), seed=5) for _ in range(2))
    assert all(torch.equal(first.factors[n], second.factors[n]) for n in first.factors)


@pytest.mark.gpu
def test_gpu_tensor_stays_on_the_gpu() -> None:
    weight = blast_weight(3, 16, 16, 8).float().cuda()
    for structure in (LowRank(8), Monarch(3, 9), Blast(3, 8)):
        result = factorize(weight, structure)
        assert all(factor.is_cuda for factor in result.factors.values())
        assert result.relative_error == pytest.approx(
            factorize(weight.cpu(), structure).relative_error, abs=1e-4
        )
