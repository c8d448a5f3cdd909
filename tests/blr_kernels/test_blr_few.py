"""The paths for few and some tokens, interpreted at tiny and odd shapes, or on a GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from blr_expected import assert_close, dense, expected, factors_for
from torch import Tensor

from blr_kernels import Blast, LowRank, Monarch, Structure
from blr_kernels.ops.few_paths import few_config, small_config
from blr_kernels.ops.paths import Call, DeviceLimits, find_path, paths, run_path

SHAPES: list[tuple[int, int, int, int]] = [
    # blocks, p, q, rank
    (1, 33, 17, 5),
    (2, 128, 40, 32),
    (3, 7, 11, 8),
    (9, 16, 20, 24),
    (16, 5, 6, 20),
]
# The same, with ranks that the blocks divide.
MONARCH_SHAPES = [(2, 128, 40, 32), (3, 7, 11, 9), (4, 16, 20, 24), (16, 5, 6, 32)]
TOKENS = [1, 2, 3, 4, 5, 16, 17, 33]
FEW = 4
H200 = DeviceLimits("test", (9, 0), 227 * 1024, 132)
ROOT = Path(__file__).parents[2]
TARGETS = [80, 86, 90, 100, 120]


def draw(
    structure: Structure,
    n_in: int,
    n_out: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """x, factors and bias, drawn once and then rounded to ``dtype``."""
    factors = factors_for(structure, n_in, n_out)
    x = torch.randn(tokens, n_in).to(device, dtype)
    bias = torch.randn(n_out).to(device, dtype)
    return x, {name: factor.to(device, dtype) for name, factor in factors.items()}, bias


def in_order(factors: dict[str, Tensor]) -> list[Tensor]:
    return [factors[name] for name in ("left", "coupling", "right") if name in factors]


def paths_for(tokens: int) -> Sequence[str]:
    return ("few", "small") if tokens <= FEW else ("small",)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("nan_memory")
def test_matches_dense(shape: tuple[int, int, int, int], tokens: int, device: torch.device) -> None:
    """Odd sizes, one block to sixteen, tokens around every limit, with and without bias."""
    b, p, q, r = shape
    structure = Blast(b, r)
    x, factors, bias = draw(structure, b * p, b * q, tokens, torch.float32, device)
    weight = dense(structure, factors)
    for name in paths_for(tokens):
        for used, activation in ((bias, "gelu"), (None, None)):
            y = run_path(name, "blast", x, in_order(factors), used, activation)
            assert_close(y, expected(x, weight, used, activation))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", MONARCH_SHAPES, ids=str)
@pytest.mark.usefixtures("nan_memory")
def test_monarch_matches_dense(
    shape: tuple[int, int, int, int], tokens: int, device: torch.device
) -> None:
    b, p, q, r = shape
    structure = Monarch(b, r)
    x, factors, bias = draw(structure, b * p, b * q, tokens, torch.float32, device)
    weight = dense(structure, factors)
    for name in paths_for(tokens):
        for used, activation in ((bias, "gelu"), (None, None)):
            y = run_path(name, "monarch", x, in_order(factors), used, activation)
            assert_close(y, expected(x, weight, used, activation))


@pytest.mark.parametrize("tokens", [2, 7, 70])
def test_every_candidate_of_monarch_gives_the_same(tokens: int, device: torch.device) -> None:
    """The rank and p need several pieces of a row."""
    structure = Monarch(2, 66)
    x, factors, bias = draw(structure, 140, 40, tokens, torch.float32, device)
    wanted = expected(x, dense(structure, factors), bias)
    limits = DeviceLimits("test", (8, 0), 99 * 1024, 100)
    call = Call("monarch", tokens, 140, 40, 2, 66, torch.float32, limits)
    for name in paths_for(tokens):
        path = find_path("monarch", name)
        configs = path.candidates(call)
        assert configs[0] == path.default_config(call)
        assert 1 < len(configs) <= 12
        for config in configs:
            y = run_path(name, "monarch", x, in_order(factors), bias, config=config)
            assert_close(y, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [2, 16, 17])
@pytest.mark.usefixtures("nan_memory")
def test_half_precision(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    structure = Blast(9, 24)
    x, factors, bias = draw(structure, 144, 180, tokens, dtype, device)
    # The interpreter cuts fp32 to bfloat16 instead of rounding it.
    slack = 3.0 if dtype is torch.bfloat16 and device.type == "cpu" else 1.0
    for name in paths_for(tokens):
        y = run_path(name, "blast", x, in_order(factors), bias, "silu")
        assert y.dtype is dtype
        assert_close(y, expected(x, dense(structure, factors), bias, "silu"), slack=slack)


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.usefixtures("nan_memory")
def test_low_rank_of_few_tokens(tokens: int, device: torch.device) -> None:
    structure = LowRank(24)
    x, factors, bias = draw(structure, 37, 70, tokens, torch.float32, device)
    for used in (bias, None):
        y = run_path("few", "low_rank", x, in_order(factors), used, "gelu_tanh")
        assert_close(y, expected(x, dense(structure, factors), used, "gelu_tanh"))


# The rank and p of the last need several pieces of a row, those of the others one.
@pytest.mark.parametrize("shape", [(3, 7, 11, 8), (2, 70, 20, 66)], ids=str)
@pytest.mark.parametrize("tokens", [2, 7, 70])
def test_every_candidate_gives_the_same(
    shape: tuple[int, int, int, int], tokens: int, device: torch.device
) -> None:
    b, p, q, r = shape
    structure = Blast(b, r)
    x, factors, bias = draw(structure, b * p, b * q, tokens, torch.float32, device)
    wanted = expected(x, dense(structure, factors), bias)
    limits = DeviceLimits("test", (8, 0), 99 * 1024, 100)
    call = Call("blast", tokens, b * p, b * q, b, r, torch.float32, limits)
    for name in paths_for(tokens):
        path = find_path("blast", name)
        configs = path.candidates(call)
        assert configs[0] == path.default_config(call)
        assert 1 < len(configs) <= 12
        for config in configs:
            y = run_path(name, "blast", x, in_order(factors), bias, config=config)
            assert_close(y, wanted)


@pytest.mark.parametrize("op", ["blast", "blast_int8", "monarch", "low_rank"])
def test_warps_are_powers_of_two(op: str) -> None:
    """In every config of every path, on every GPU that it takes."""
    pytest.importorskip("triton")
    sizes = [(1, 33, 17, 5), (2, 70, 20, 66), (3, 7, 11, 8), (4, 192, 768, 128), (9, 16, 20, 24)]
    sizes += [(9, 128, 384, 384), (16, 256, 688, 1488), (16, 5, 6, 32)]
    seen = set()
    for path, (b, p, q, r), tokens in itertools.product(paths(op), sizes, (1, 3, 7, 70, 2048)):
        if (b > 1) is (op == "low_rank") or (op == "monarch" and r % b):
            continue
        for dtype, capability in itertools.product(
            (torch.float32, torch.bfloat16), [(8, 0), (9, 0), (10, 0)]
        ):
            shared_kib = 227 if capability == (9, 0) else 99
            limits = DeviceLimits("test", capability, shared_kib * 1024, 100)
            call = Call(op, tokens, b * p, b * q, b, r, dtype, limits)
            for config in () if path.why_not(call) else path.candidates(call):
                for name, value in config.items():
                    if name.endswith("warps"):
                        seen.add(path.name)
                        assert value in (1, 2, 4, 8, 16, 32), (path.name, call, config)
    assert seen


@pytest.mark.parametrize("tokens", [3, 17])
def test_x_that_is_not_contiguous(tokens: int, device: torch.device) -> None:
    structure = Blast(3, 8)
    _, factors, bias = draw(structure, 21, 33, 1, torch.float32, device)
    weight = dense(structure, factors)
    for x in (
        torch.randn(tokens, 2 * 21, device=device)[:, 21:],
        torch.randn(21, tokens, device=device).t(),
        torch.randn(1, 21, device=device).expand(tokens, 21),
        torch.randn(tokens * 21 + 1, device=device)[1:].view(tokens, 21),
    ):
        for name in paths_for(tokens):
            y = run_path(name, "blast", x, in_order(factors), bias)
            assert_close(y, expected(x, weight, bias))


@pytest.mark.parametrize("tokens", [4, 16, 40])
def test_nan_stays_in_its_token_and_bits_repeat(tokens: int, device: torch.device) -> None:
    structure = Blast(3, 24)
    x, factors, bias = draw(structure, 21, 33, tokens, torch.float32, device)
    for name in paths_for(tokens):
        clean = run_path(name, "blast", x, in_order(factors), bias, "gelu")
        assert torch.equal(clean, run_path(name, "blast", x, in_order(factors), bias, "gelu"))
        broken = x.clone()
        broken[2] = torch.nan
        y = run_path(name, "blast", broken, in_order(factors), bias, "gelu")
        others = torch.arange(tokens, device=device) != 2
        assert y[2].isnan().all()
        assert torch.equal(y[others], clean[others])


def test_small_walks_tokens_in_chunks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blr_kernels.ops.triton_config.SCRATCH_BYTES", 4096)
    for b in (3, 9):
        structure = Blast(b, 8)
        x, factors, bias = draw(structure, b * 7, b * 11, 65, torch.float32, device)
        y = run_path("small", "blast", x, in_order(factors), bias)
        assert_close(y, expected(x, dense(structure, factors), bias))


def test_too_many_tokens_are_refused_in_words() -> None:
    structure = Blast(3, 8)
    call = Call("blast", 5, 21, 33, structure.blocks, structure.rank, torch.float32, H200)
    assert find_path("blast", "few").why_not(call) == "it takes up to 4 tokens, got 5"
    assert find_path("blast", "small").why_not(call) == ""
    call = Call("low_rank", 17, 21, 33, 1, structure.rank, torch.float32, H200)
    assert find_path("low_rank", "few").why_not(call) == "it takes up to 16 tokens, got 17"


@pytest.mark.parametrize(
    ("shape", "tokens", "groups", "measured"),
    [
        ((9, 128, 768, 256), 2, 1, {"product_dot": 0, "product_rows": 32, "product_inner": 256}),
        ((9, 128, 768, 256), 2, 28, {"product_dot": 1, "product_rows": 64, "product_inner": 128}),
        ((9, 128, 768, 256), 16, 1, {"mix_rows": 16, "mix_tokens": 16, "mix_outputs": 3}),
        ((9, 128, 768, 256), 16, 28, {"mix_rows": 32, "mix_tokens": 16, "mix_outputs": 9}),
        ((3, 256, 1024, 128), 197, 1, {"mix_in_product": 0, "mix_rows": 32, "mix_tokens": 16}),
        ((3, 1024, 256, 128), 197, 1, {"mix_in_product": 1, "product_tokens": 32}),
        ((9, 128, 384, 384), 512, 1, {"mix_in_product": 0, "mix_rows": 64, "mix_tokens": 32}),
        ((9, 128, 512, 256), 512, 1, {"mix_in_product": 0, "mix_rows": 64, "mix_tokens": 32}),
    ],
)
def test_defaults_are_the_fastest_measured(
    shape: tuple[int, int, int, int], tokens: int, groups: int, measured: dict[str, int]
) -> None:
    """On an H200 in bfloat16; ``groups`` layers in one launch."""
    b, p, q, r = shape
    call = Call("blast", tokens, b * p, b * q, b, r, torch.bfloat16, H200)
    config = (few_config if tokens <= FEW else small_config)(call, groups)
    assert {key: config[key] for key in measured} == measured


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(ROOT)
    script = Path(__file__).with_name("blr_compile_few.py")
    run = subprocess.run(
        [sys.executable, str(script), *map(str, TARGETS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    return rows


@pytest.mark.parametrize("target", TARGETS)
def test_default_configs_fit_the_target(compiled: list[dict[str, Any]], target: int) -> None:
    """C14: shared memory within the limit, no spilled registers, loads of 16 bytes."""
    rows = [row for row in compiled if row["target"] == target]
    assert len(rows) >= 20
    assert not [(row["what"], row["shared"]) for row in rows if row["shared"] > row["limit"]]
    assert not [(row["what"], row["stack"]) for row in rows if row["stack"]]
    assert not [row["what"] for row in rows if not row["wide_loads"]]


@pytest.mark.parametrize("target", TARGETS)
def test_launches_are_dependent_where_they_can_be(
    compiled: list[dict[str, Any]], target: int
) -> None:
    """From sm_90 on every kernel waits once. Before that the first one only fetches weights to L2:
    what came before it may have written them. The second has them in flight, or fetches them.
    """
    for row in (row for row in compiled if row["target"] == target):
        assert row["waits"] == (target >= 90), row["what"]
        assert row["second"] or row["wide_loads_before"] == 0, row["what"]
        if target >= 90:
            assert row["fetches"] or row["wide_loads_before"] > 0, row["what"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("b", "p", "q", "r", "tokens"),
    [
        (9, 128, 768, 256, 1),
        (9, 128, 768, 256, 2),
        (9, 128, 768, 256, 16),
        (16, 256, 688, 1488, 1),
        (9, 128, 384, 384, 512),
        (9, 128, 512, 256, 512),
        (3, 256, 768, 128, 197),
        (3, 256, 1024, 128, 197),
        (3, 1024, 256, 128, 197),
    ],
)
@pytest.mark.usefixtures("nan_memory")
def test_layers_of_the_benchmark(
    b: int, p: int, q: int, r: int, tokens: int, dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    left = torch.randn(b, q, r, device=device).to(dtype)
    coupling = torch.randn(b, b, r, device=device).to(dtype)
    right = (torch.randn(b, r, p, device=device) * (r * b * p) ** -0.5).to(dtype)
    x, bias = torch.randn(tokens, b * p, device=device).to(dtype), left.new_ones(b * q)
    weight = torch.einsum("iqr,ijr,jrp->iqjp", left.double(), coupling.double(), right.double())
    wanted = x.double() @ weight.reshape(b * q, b * p).T + 1
    for name in paths_for(tokens):
        y = run_path(name, "blast", x, (left, coupling, right), bias)
        assert_close(y, wanted)
        assert torch.equal(y, run_path(name, "blast", x, (left, coupling, right), bias))


@pytest.mark.gpu
def test_dependent_launches_in_a_row_keep_their_order() -> None:
    """Each layer reads what the one before wrote and all share their scratch; 50 times over, in a
    graph, where the gaps are smallest.
    """
    b, p, r = 9, 128, 256
    factors = [
        torch.randn(b, p, r, device="cuda"),
        torch.randn(b, b, r, device="cuda"),
        torch.randn(b, r, p, device="cuda") * (r * b * p) ** -0.5,
    ]
    halves = [factor.bfloat16() for factor in factors]
    x = torch.randn(2, b * p, device="cuda").bfloat16()

    def chain() -> Tensor:
        y = x
        for _ in range(50):
            y = torch.nn.functional.layer_norm(run_path("few", "blast", y, halves), (b * p,))
            y = run_path("few", "blast", y, halves) / r**0.5
        return y

    wanted = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, wanted)
