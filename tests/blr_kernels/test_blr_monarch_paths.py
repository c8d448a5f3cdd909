"""Monarch's paths: the fused kernel and the two kernels, each config against the formula."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from blr_expected import assert_close, dense, expected, factors_for
from torch import Tensor

from blr_kernels import Monarch
from blr_kernels.ops.paths import Call, Config, DeviceLimits, Path, limits_of

pytest.importorskip("triton")

from blr_kernels.ops import triton_monarch_config as config_of
from blr_kernels.ops import triton_monarch_fused, triton_monarch_two

PATHS = [triton_monarch_fused.PATH, triton_monarch_two.PATH]
HOPPER = DeviceLimits("a Hopper GPU", (9, 0), 227 * 1024, 132)

# tokens, b, r, p, q
SIZES = [
    (1, 4, 16, 5, 7),
    (3, 2, 14, 9, 5),
    (17, 8, 16, 3, 2),
    (65, 4, 64, 16, 20),
    (3, 3, 15, 7, 5),
    (5, 6, 12, 3, 4),
    (4, 2, 96, 6, 5),
]
# Interpreted kernels cut bfloat16 off instead of rounding it.
SLACK = {torch.float32: 1.0, torch.float16: 1.0, torch.bfloat16: 1.6}

# Those of them that "fused" takes.
FUSED_SIZES = [(1, 4, 16, 5, 7), (3, 2, 14, 9, 5), (65, 4, 64, 16, 20), (4, 2, 96, 6, 5)]
DTYPES = {"fused": torch.float16, "two": torch.float32}

by_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)


class Problem:
    """One call's tensors, and its output worked out entry by entry."""

    def __init__(
        self,
        size: tuple[int, int, int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        limits: DeviceLimits | None = None,
    ):
        tokens, b, r, p, q = size
        structure = Monarch(b, r)
        factors = factors_for(structure, b * p, b * q)
        self.factors = tuple(factors[key].to(device, dtype) for key in ("left", "right"))
        self.weight = dense(structure, dict(zip(("left", "right"), self.factors, strict=True)))
        self.x = torch.randn(tokens, b * p).to(device, dtype)
        self.bias = torch.randn(b * q).to(device, dtype)
        self.call = Call("monarch", tokens, b * p, b * q, b, r, dtype, limits or limits_of(device))

    def run(
        self,
        path: Path,
        config: Config | None = None,
        *,
        x: Tensor | None = None,
        bias: Tensor | None = None,
        activation: Any = None,
    ) -> Tensor:
        x = self.x if x is None else x
        out = x.new_full((x.shape[0], self.call.out_features), torch.nan)
        config = path.default_config(self.call) if config is None else config
        path.run(self.call, x, self.factors, bias, activation, out, config)
        return out

    def check(self, y: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        wanted = expected(self.x, self.weight, bias, activation)
        assert_close(y, wanted, slack=SLACK[y.dtype] if y.device.type == "cpu" else 1.0)


@pytest.mark.parametrize(
    ("path", "size"),
    [(PATHS[0], size) for size in FUSED_SIZES] + [(PATHS[1], size) for size in SIZES],
    ids=lambda value: value.name if isinstance(value, Path) else str(value),
)
def test_odd_sizes(path: Path, size: tuple[int, int, int, int, int], device: torch.device) -> None:
    """C1: one token, blocks that are no power of two, sizes that no tile divides."""
    problem = Problem(size, device, DTYPES[path.name])
    assert path.why_not(problem.call) == ""
    problem.check(problem.run(path, bias=problem.bias), problem.bias)


@by_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(17, 4, 64, 16, 20), (3, 2, 12, 5, 7)], ids=str)
def test_half_precision(
    path: Path, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    problem = Problem(size, device, dtype)
    problem.check(problem.run(path))


@by_path
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_epilogues(
    path: Path, activation: str | None, has_bias: bool, device: torch.device
) -> None:
    problem = Problem((5, 4, 16, 8, 6), device, DTYPES[path.name])
    bias = problem.bias if has_bias else None
    problem.check(problem.run(path, bias=bias, activation=activation), bias, activation)


@by_path
def test_rows_of_x_may_lie_apart(path: Path, device: torch.device) -> None:
    problem = Problem((17, 4, 16, 8, 6), device, DTYPES[path.name])
    wide = problem.x.new_full((17, 77), torch.nan)
    wide[:, 3:35] = problem.x
    problem.check(problem.run(path, x=wide[:, 3:35]))


@by_path
def test_nan_stays_in_its_token(path: Path, device: torch.device) -> None:
    problem = Problem((19, 4, 16, 8, 6), device, DTYPES[path.name])
    clean = problem.run(path, activation="gelu")
    x = problem.x.clone()
    x[7, 5] = torch.nan
    y = problem.run(path, x=x, activation="gelu")
    assert y[7].isnan().all()
    others = torch.arange(19, device=device) != 7
    assert torch.equal(y[others], clean[others])


FUSED = {
    "tokens": 16,
    "rows": 16,
    "columns": 16,
    "slices": 1,
    "together": 1,
    "warps": 4,
    "right_stages": 2,
    "left_stages": 2,
    "tma": 0,
}
TWO = {
    "right_tokens": 16,
    "right_columns": 16,
    "right_lanes": 4,
    "right_warps": 4,
    "right_stages": 2,
    "left_tokens": 16,
    "left_rows": 16,
    "left_lanes": 4,
    "left_slices": 1,
    "left_warps": 4,
    "left_stages": 2,
    "left_resident": 256,
    "tma": 0,
}


@pytest.mark.parametrize(
    ("path", "config"),
    [
        (PATHS[0], FUSED | changed)
        for changed in (
            {"slices": 2},
            {"together": 2},
            {"together": 4, "slices": 99},
            {"tokens": 64, "rows": 32, "slices": 3},
        )
    ]
    + [
        (PATHS[1], TWO | changed)
        for changed in (
            {"left_lanes": 1, "right_lanes": 2, "left_slices": 2},
            {"left_lanes": 2, "left_resident": 0},
            {"left_tokens": 32, "left_rows": 32, "left_slices": 99, "left_resident": 0},
        )
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_every_way_to_cut_the_work(path: Path, config: Config, device: torch.device) -> None:
    """m of 48 makes three hidden pieces of an input block, q of 37 a last tile that is cut."""
    problem = Problem((35, 4, 192, 24, 37), device, DTYPES[path.name])
    problem.check(problem.run(path, config, bias=problem.bias), problem.bias)


@pytest.mark.parametrize(
    ("path", "config"),
    [(PATHS[0], FUSED | {"slices": 2}), (PATHS[1], TWO | {"left_slices": 2})],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_slices_of_unequal_length(path: Path, config: Config, device: torch.device) -> None:
    """Five full tiles in two slices: what a sixth would write belongs to the next token."""
    problem = Problem((20, 4, 16, 8, 80), device, DTYPES[path.name])
    out = problem.x.new_full((22, 320), torch.nan)
    path.run(problem.call, problem.x, problem.factors, problem.bias, None, out[1:-1], config)
    problem.check(out[1:-1], problem.bias)
    assert out[[0, -1]].isnan().all()


@by_path
def test_copy_engine_configs(path: Path, device: torch.device) -> None:
    """Hopper's candidates give the same values, also where x is not aligned as they want it."""
    problem = Problem((33, 4, 64, 16, 24), device, torch.float16, HOPPER)
    candidates = path.candidates(problem.call)
    assert all(config["tma"] for config in candidates)
    if device.type == "cuda" and limits_of(device).capability[0] != 9:
        pytest.skip("needs a Hopper GPU")
    few: Sequence[Config] = candidates[:3] if device.type == "cpu" else candidates
    for config in few:
        problem.check(problem.run(path, config, bias=problem.bias), problem.bias)
    odd = torch.empty(33 * 64 + 1, dtype=torch.float16, device=device)[1:].view(33, 64)
    odd.copy_(problem.x)
    problem.check(problem.run(path, x=odd))


def test_two_walks_tokens_in_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_monarch_two, "tokens_per_chunk", lambda tokens, size: 8)
    problem = Problem((21, 4, 16, 8, 6), device)
    problem.check(problem.run(PATHS[1], bias=problem.bias), problem.bias)


def test_fused_says_what_it_cannot_take() -> None:
    def call(b: int, r: int, tokens: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Call:
        return Call("monarch", tokens, b * 256, b * 256, b, r, dtype, HOPPER)

    path = PATHS[0]
    assert path.why_not(call(4, 128)) == ""
    assert path.why_not(call(2, 128)) == ""
    assert path.why_not(call(8, 64)) == "it takes 2 or 4 blocks, got 8"
    assert path.why_not(call(3, 96)) == "it takes 2 or 4 blocks, got 3"
    assert path.why_not(call(4, 128, dtype=torch.float32)) == "it takes float16 and bfloat16"
    assert "would unroll to 64 products" in path.why_not(call(4, 4096))
    assert "at rank 1024 do not fit" in path.why_not(call(4, 1024))
    assert path.suits(call(4, 128))
    assert not path.suits(call(4, 128, tokens=1024))


@by_path
@pytest.mark.parametrize("shared_kib", [48, 99, 163, 227])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_candidates_fit(path: Path, capability: tuple[int, int], shared_kib: int) -> None:
    """C14: at most 12, the default first, within shared memory as the estimates see it."""
    limits = DeviceLimits("", capability, shared_kib * 1024, 100)
    for tokens in (1, 197, 6304):
        for b, r, n_in, n_out in ((4, 128, 768, 3072), (4, 128, 3072, 768), (16, 256, 2048, 2048)):
            for dtype in (torch.bfloat16, torch.float32):
                call = Call("monarch", tokens, n_in, n_out, b, r, dtype, limits)
                if path.why_not(call):
                    continue
                candidates = path.candidates(call)
                assert 1 <= len(candidates) <= config_of.MOST_CANDIDATES
                assert path.default_config(call) == candidates[0]
                for config in candidates:
                    assert all(type(value) is int for value in config.values())
                    if path.name == "fused":
                        assert config_of.fused_fits(call, config)
                    else:
                        assert max(config_of.two_shared_bytes(call, config)) <= shared_kib * 1024


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    here = FilePath(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(here.parents[1]), str(here), environment.get("PYTHONPATH", "")]
    )
    run = subprocess.run(
        [sys.executable, str(here / "blr_monarch_targets.py"), "80", "86", "90", "100", "120"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    return rows


@pytest.mark.slow
def test_compiled_for_every_target(compiled: list[dict[str, Any]]) -> None:
    """C14: within shared memory and its estimate, without spills, on the newest instructions."""
    assert not [r["what"] for r in compiled if r["shared"] > min(r["limit"], r["estimate"])]
    # Up to 8 values of the exact GELU put aside beside the largest tile; more would serialise.
    assert not [(r["what"], r["stack"]) for r in compiled if (r["stack"] or 0) > 32]
    newest = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
    for row in compiled:
        wanted = newest.get(row["target"], "mma.sync") if row["tokens"] >= 64 else "mma"
        assert any(wanted in name for name in row["tensor_cores"]), row["what"]
        assert row["copy_engine"] == (row["target"] == 90), row["what"]
        assert row["waits"] == row["fetches"] == (row["target"] >= 90), row["what"]


VIT = [("qkv", 768, 2304), ("fc1", 768, 3072), ("fc2", 3072, 768)]


@pytest.mark.gpu
@by_path
@pytest.mark.parametrize("tokens", [1, 197, 6304])
@pytest.mark.parametrize(("layer", "n_in", "n_out"), VIT, ids=[layer[0] for layer in VIT])
def test_vit_layers_with_every_candidate(
    layer: str, n_in: int, n_out: int, tokens: int, path: Path
) -> None:
    """Right to the bit from run to run, and a NaN reaches its token only."""
    b, r = 4, 128
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(tokens, n_in, device=device).bfloat16()
    left = torch.randn(b, n_out // b, r, device=device).bfloat16()
    right = (torch.randn(b, r, n_in // b, device=device) * (n_in * r // b) ** -0.5).bfloat16()
    bias = torch.randn(n_out, device=device).bfloat16()
    left4 = left.double().reshape(b, -1, b, r // b)
    right4 = right.double().reshape(b, r // b, b, -1)
    weight = torch.einsum("lskj,kjlc->slkc", left4, right4).reshape(n_out, n_in)
    wanted = torch.nn.functional.gelu(x.double() @ weight.T + bias.double())
    call = Call("monarch", tokens, n_in, n_out, b, r, torch.bfloat16, limits_of(device))
    assert path.why_not(call) == ""
    spoiled = x.clone()
    spoiled[0, 0] = torch.nan
    for config in path.candidates(call):
        outs = [torch.full_like(wanted, torch.nan, dtype=torch.bfloat16) for _ in range(3)]
        for out, source in zip(outs, (x, x, spoiled), strict=True):
            path.run(call, source, (left, right), bias, "gelu", out, config)
        assert_close(outs[0], wanted)
        assert torch.equal(outs[0], outs[1])
        assert outs[2][0].isnan().all()
        assert torch.equal(outs[2][1:], outs[0][1:])
