"""Wrong input is refused in words that state what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blr_kernels import (
    Backend,
    Blast,
    BlastLinear,
    BLRLinear,
    LowRank,
    Monarch,
    blast_linear,
    explain,
    low_rank_linear,
    monarch_linear,
    set_backend_,
)


def low_rank_arguments() -> dict[str, Any]:
    return {"x": torch.zeros(2, 6), "left": torch.zeros(10, 4), "right": torch.zeros(4, 6)}


def monarch_arguments() -> dict[str, Any]:
    return {"x": torch.zeros(2, 6), "left": torch.zeros(2, 5, 4), "right": torch.zeros(2, 4, 3)}


def blast_arguments() -> dict[str, Any]:
    return {**monarch_arguments(), "coupling": torch.zeros(2, 2, 4)}


OPS = [
    pytest.param(low_rank_linear, low_rank_arguments, id="low_rank"),
    pytest.param(monarch_linear, monarch_arguments, id="monarch"),
    pytest.param(blast_linear, blast_arguments, id="blast"),
]


@pytest.mark.parametrize(("op", "arguments"), OPS)
def test_right_input_passes(op: Any, arguments: Any) -> None:
    assert op(**arguments(), bias=torch.zeros(10), activation="silu").shape == (2, 10)


@pytest.mark.parametrize(("op", "arguments"), OPS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 5)}, ValueError, r"x must have shape \(\.\.\., 6\), got \(2, 5\)"),
        ({"x": torch.zeros(())}, ValueError, r"x must have shape \(\.\.\., 6\), got \(\)"),
        ({"x": [1.0]}, TypeError, "x must be a Tensor, got list"),
        ({"x": torch.zeros(2, 6, dtype=torch.int64)}, TypeError, "floating.*got torch.int64"),
        ({"x": torch.zeros(2, 6).half()}, TypeError, "left .*torch.float16, got torch.float32"),
        ({"x": torch.zeros(2, 6, device="meta")}, ValueError, "left .*device of x, meta, got cpu"),
        ({"left": torch.zeros(5)}, ValueError, r"left must have shape .*got \(5,\)"),
        ({"right": torch.zeros(7)}, ValueError, r"right must have shape .*got \(7,\)"),
        ({"left": torch.zeros(10, 0)}, ValueError, r"left must have shape .*got \(10, 0\)"),
        ({"bias": torch.zeros(9)}, ValueError, r"bias must have shape \(10,\), got \(9,\)"),
        ({"bias": torch.zeros(10).half()}, TypeError, "bias .*torch.float32, got torch.float16"),
        ({"activation": "relu"}, ValueError, "one of gelu, gelu_tanh, silu, got 'relu'"),
        ({"backend": "torch"}, TypeError, "backend must be a Backend, got str 'torch'"),
    ],
)
def test_common_mistakes(
    op: Any, arguments: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        op(**{**arguments(), **change})


@pytest.mark.parametrize(
    ("op", "arguments", "change", "message"),
    [
        (
            low_rank_linear,
            low_rank_arguments,
            {"right": torch.zeros(3, 6)},
            r"right must have shape \(4, 6\), got \(3, 6\)",
        ),
        (
            monarch_linear,
            monarch_arguments,
            {"right": torch.zeros(3, 4, 2)},
            r"right must have shape \(2, 4, 2\), got \(3, 4, 2\)",
        ),
        (
            monarch_linear,
            monarch_arguments,
            {"left": torch.zeros(2, 5, 3), "right": torch.zeros(2, 3, 3)},
            "rank must be a multiple of blocks = 2, got 3",
        ),
        (
            blast_linear,
            blast_arguments,
            {"coupling": torch.zeros(2, 4, 2)},
            r"coupling must have shape \(2, 2, 4\), got \(2, 4, 2\)",
        ),
        (
            blast_linear,
            blast_arguments,
            {"right": torch.zeros(2, 5, 3)},
            r"right must have shape \(2, 4, 3\), got \(2, 5, 3\)",
        ),
    ],
)
def test_factors_that_do_not_fit(
    op: Any, arguments: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        op(**{**arguments(), **change})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LowRank(0), ValueError, "rank must be at least 1, got 0"),
        (lambda: LowRank(2.0), TypeError, "rank must be an int, got float 2.0"),
        (lambda: LowRank(True), TypeError, "rank must be an int, got bool"),
        (lambda: Monarch(4, 10), ValueError, "multiple of blocks = 4, got 10"),
        (lambda: Monarch(0, 10), ValueError, "blocks must be at least 1, got 0"),
        (lambda: Blast(-1, 10), ValueError, "blocks must be at least 1, got -1"),
        (lambda: Blast(3, 0), ValueError, "rank must be at least 1, got 0"),
        (lambda: Blast(9, 4).padded(8, 20), ValueError, "in_features .* blocks = 9, got 8"),
        (lambda: Monarch(9, 9).padded(20, 8), ValueError, "out_features .* blocks = 9, got 8"),
        (lambda: BLRLinear.create(8, 20, Blast(9, 4)), ValueError, "at least blocks = 9, got 8"),
        (lambda: BLRLinear.create(0, 20, LowRank(4)), ValueError, "in_features .*got 0"),
        (lambda: BLRLinear.create(8, 20, "blast"), TypeError, "got 'blast'"),
        (lambda: BlastLinear(8, 20, LowRank(4)), TypeError, "takes a Blast, got LowRank"),
        (lambda: BLRLinear(8, 20, LowRank(4)), TypeError, "BLRLinear.create"),
        (lambda: set_backend_(torch.nn.Linear(2, 2), "torch"), TypeError, "got str 'torch'"),
    ],
)
def test_structures_and_modules(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_module_names_the_size_it_takes() -> None:
    for structure in (LowRank(4), Blast(3, 4)):
        layer = BLRLinear.create(10, 20, structure)
        with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 10\), got \(2, 12\)"):
            layer(torch.zeros(2, 12))


def test_triton_in_float64_says_which_dtypes_it_takes() -> None:
    pytest.importorskip("triton")
    layer = BLRLinear.create(6, 10, LowRank(2), dtype=torch.float64, backend=Backend.TRITON)
    with pytest.raises(RuntimeError, match="take float16, bfloat16, float32, got float64"):
        layer(torch.zeros(1, 6, dtype=torch.float64))
    told = explain(LowRank(2), 6, 10, dtype=torch.float64, device="cpu")
    assert told.implementation is Backend.TORCH
    assert "got float64" in told.others[Backend.TRITON]
