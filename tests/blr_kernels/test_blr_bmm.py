"""The path "bmm": batched products of PyTorch with kernels of ours between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from blr_expected import assert_close, dense, expected, factors_for
from torch import Tensor

from blr_kernels import Blast, LowRank, Monarch, Structure
from blr_kernels.ops.choice import choose
from blr_kernels.ops.paths import Call, DeviceLimits, find_path, limits_of, run_path
from blr_kernels.ops.triton_config import SCRATCH_BYTES

pytest.importorskip("triton")

from blr_kernels.ops import bmm_paths

H200 = DeviceLimits("NVIDIA H200", (9, 0), 227 * 1024, 132, 60 * 2**20)
A100 = DeviceLimits("an A100", (8, 0), 163 * 1024, 108, 40 * 2**20)
# Interpreted kernels cut bfloat16 off instead of rounding it.
SLACK = {torch.float32: 1.0, torch.float16: 1.0, torch.bfloat16: 1.6}
KEYS = {"blast": ("left", "coupling", "right"), "monarch": ("left", "right")}

# tokens, structure, p, q
SIZES: list[tuple[int, Structure, int, int]] = [
    (1, Blast(4, 16), 5, 7),
    (3, Blast(2, 13), 9, 5),
    (65, Blast(9, 24), 3, 4),
    (70, Blast(16, 20), 6, 9),
    (9, Blast(31, 5), 3, 2),
    (33, Blast(32, 7), 2, 3),
    (20, Blast(64, 9), 2, 3),
    (300, Blast(3, 9), 2, 3),
    (1, Monarch(4, 16), 5, 7),
    (17, Monarch(8, 16), 3, 2),
    (65, Monarch(4, 64), 16, 20),
    (3, Monarch(3, 15), 7, 5),
    (5, Monarch(6, 12), 3, 70),
    (9, Monarch(32, 32), 2, 3),
]
sized = pytest.mark.parametrize("size", SIZES, ids=str)
both = pytest.mark.parametrize(
    "size", [(70, Blast(9, 16), 6, 5), (70, Monarch(3, 15), 6, 5)], ids=["blast", "monarch"]
)


class Problem:
    """One call's tensors, and its weight worked out entry by entry."""

    def __init__(
        self,
        size: tuple[int, Structure, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        tokens, structure, p, q = size
        assert not isinstance(structure, LowRank)
        b = structure.blocks
        self.op = structure.kind
        factors = factors_for(structure, b * p, b * q)
        self.factors = tuple(factors[key].to(device, dtype) for key in KEYS[self.op])
        named = dict(zip(KEYS[self.op], self.factors, strict=True))
        self.weight = dense(structure, named)
        self.x = torch.randn(tokens, b * p).to(device, dtype)
        self.bias = torch.randn(b * q).to(device, dtype)
        limits = limits_of(device)
        self.call = Call(self.op, tokens, b * p, b * q, b, structure.rank, dtype, limits)

    def run(self, x: Tensor | None = None, *options: Any, config: Any = None) -> Tensor:
        x = self.x if x is None else x
        return run_path("bmm", self.op, x, self.factors, *options, config=config)

    def check(self, y: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        wanted = expected(self.x, self.weight, bias, activation)
        assert_close(y, wanted, slack=SLACK[y.dtype] if y.device.type == "cpu" else 1.0)


@pytest.mark.usefixtures("nan_memory")
@sized
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_odd_sizes(
    size: tuple[int, Structure, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """C1: one token, 2 to 32 blocks, sizes that nothing divides."""
    problem = Problem(size, device, dtype)
    problem.check(problem.run(None, problem.bias), problem.bias)


@both
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_epilogue(
    size: tuple[int, Structure, int, int],
    activation: str | None,
    has_bias: bool,
    device: torch.device,
) -> None:
    problem = Problem(size, device, torch.float16)
    bias = problem.bias if has_bias else None
    problem.check(problem.run(None, bias, activation), bias, activation)


@both
def test_operands_anywhere(size: tuple[int, Structure, int, int], device: torch.device) -> None:
    """C3: rows of x that lie apart and begin anywhere, factors with strides of their own."""
    problem = Problem(size, device)
    tokens, columns = problem.x.shape
    wide = torch.randn(2 * tokens, columns + 3, device=device)
    wide[::2, 1 : columns + 1] = problem.x
    problem.check(problem.run(wide[::2, 1 : columns + 1]))
    whole = problem.run()
    assert torch.equal(problem.run(), whole)
    factors = problem.factors
    problem.factors = tuple(f.mT.contiguous().mT for f in factors)
    problem.check(problem.run())
    problem.factors = tuple(
        torch.cat([f.new_zeros(1), f.flatten()])[1:].view(f.shape) for f in factors
    )
    problem.check(problem.run(None, problem.bias, "silu"), problem.bias, "silu")


@both
@pytest.mark.parametrize("tokens", [130, 400])
def test_chunks(
    size: tuple[int, Structure, int, int],
    tokens: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several chunks, of which the last is shorter, and their scratch."""
    problem = Problem((tokens, *size[1:]), device)
    per_token = problem.call.blocks * problem.call.rank
    if problem.op == "monarch":
        per_token += problem.call.out_features
    for module in ("triton_config", "bmm_paths"):
        name = f"blr_kernels.ops.{module}.SCRATCH_BYTES"
        monkeypatch.setattr(name, 128 * per_token * 4)
    made: list[int] = []
    new_empty = Tensor.new_empty

    def noted(self: Tensor, *shape: Any, **options: Any) -> Tensor:
        tensor = new_empty(self, *shape, **options)
        made.append(tensor.nbytes)
        return tensor

    path = find_path(problem.op, "bmm")
    config = {**path.default_config(problem.call), "chunk": 0}
    out = torch.full((tokens, problem.call.out_features), torch.nan, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", noted)
        path.run(problem.call, problem.x, problem.factors, None, None, out, config)
    problem.check(out)
    assert 0 < sum(made) <= 128 * per_token * 4


@both
def test_nan_stays_in_its_token(
    size: tuple[int, Structure, int, int], device: torch.device
) -> None:
    """C16"""
    problem = Problem(size, device, torch.float16)
    whole = problem.run()
    x = problem.x.clone()
    x[41] = torch.nan
    y = problem.run(x)
    assert y[41].isnan().all()
    others = torch.arange(len(x), device=device) != 41
    assert torch.equal(y[others], whole[others])


def llama(tokens: int, op: str = "blast", limits: DeviceLimits = H200, **changes: Any) -> Call:
    blocks, rank = (16, 1488) if op == "blast" else (4, 1536)
    call = Call(op, tokens, 4096, 11008, blocks, rank, torch.bfloat16, limits)
    return replace(call, **changes)


@pytest.mark.parametrize("op", ["blast", "monarch"])
@pytest.mark.parametrize("limits", [H200, A100], ids=lambda limits: limits.name)
def test_preferred_at_large_rank(op: str, limits: DeviceLimits) -> None:
    path = find_path(op, "bmm")
    assert path.library
    for tokens, rank, suits in (
        (4, 1536, False),
        (5, 1536, True),
        (127, 640, op == "monarch"),
        (128, 640, True),
        (4096, 1536, True),
        (4096, 128, False),
    ):
        call = llama(tokens, op, limits, rank=rank, device=replace(limits, name="untuned"))
        assert path.why_not(call) == ""
        assert path.suits(call) is suits
        assert (choose(call).path.name == "bmm") is suits
        assert choose(call, kernels_only=True).path.name != "bmm"
    assert "float64" in path.why_not(llama(9, op, dtype=torch.float64))


@pytest.mark.parametrize(
    ("op", "tokens", "chunks"),
    [
        ("blast", 512, [0, 256]),
        ("blast", 4096, [0, 640, 256]),
        ("blast", 100_000, [0, 640, 256]),
        ("monarch", 512, [0, 256]),
        ("monarch", 4096, [0, 896, 384]),
        ("monarch", 200, [0]),
    ],
)
def test_chunks_worth_timing(op: str, tokens: int, chunks: list[int]) -> None:
    """All that the scratch holds, half or a quarter of the cache."""
    path, call = find_path(op, "bmm"), llama(tokens, op)
    candidates = path.candidates(call)
    assert list(dict.fromkeys(config["chunk"] for config in candidates)) == chunks
    assert path.default_config(call) == candidates[0]


@pytest.mark.parametrize("limits", [H200, A100], ids=lambda limits: limits.name)
@pytest.mark.parametrize("op", ["blast", "monarch"])
@pytest.mark.parametrize("rank", [1024, 8192, 10_016, 33_024])
def test_rows_of_h_are_whole_tiles_within_the_scratch(
    op: str, rank: int, limits: DeviceLimits
) -> None:
    """32 blocks of rank 10,016 leave room for 104 tokens, those of 33,024 for less than a tile."""
    for tokens in (1, 63, 65, 777, 4096, 70_001):
        call = llama(tokens, op, limits, blocks=32, rank=rank)
        per_token = 32 * rank * 2 + (call.out_features * 2 if op == "monarch" else 0)
        for limit in (0, 1, 100, 256, 10**6):
            chunk, row = bmm_paths._chunk_and_row(call, limit)
            assert 1 <= chunk <= min(tokens, limit or tokens, row)
            assert row * per_token <= SCRATCH_BYTES
            tile = 64 if 64 * per_token <= SCRATCH_BYTES else 1
            assert row % tile == 0
            assert row - chunk < tile
        on_tiles = op == "blast" and limits is H200 and rank < 16_384
        assert bmm_paths._mixes_on_hopper(call) is on_tiles


def test_blocks_that_it_takes() -> None:
    """Mixing holds the scales between all blocks in registers."""
    path = find_path("blast", "bmm")
    for limits in (H200, A100):
        for blocks, reason in ((64, ""), (65, "it takes up to 64 blocks, got 65")):
            call = llama(512, "blast", limits, in_features=65 * 64, out_features=65 * 64)
            call = replace(call, blocks=blocks, device=replace(limits, name="untuned"))
            assert path.why_not(call) == reason
            assert (choose(call).path.name == "bmm") is (reason == "")
    assert find_path("monarch", "bmm").why_not(llama(512, "monarch", blocks=128)) == ""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("structure", "n_in", "n_out", "tokens"),
    [
        (Blast(16, 1488), 4096, 11008, 1500),
        (Blast(16, 768), 2048, 8192, 4096),
        (Blast(9, 384), 1152, 3456, 777),
        (Monarch(4, 1536), 4096, 11008, 2100),
        (Monarch(16, 1024), 4096, 4096, 4096),
    ],
    ids=str,
)
def test_large_on_gpu(structure: Any, n_in: int, n_out: int, tokens: int) -> None:
    """Every config, also from a CUDA graph, and no more memory than the scratch."""
    device = torch.device("cuda")
    factors = factors_for(structure, n_in, n_out)
    op = structure.kind
    halves = tuple(factors[key].to(device, torch.bfloat16) for key in KEYS[op])
    x = torch.randn(tokens, n_in, device=device).bfloat16()
    bias = torch.randn(n_out, device=device).bfloat16()
    b, r = structure.blocks, structure.rank
    h = torch.einsum("tkp,krp->tkr", x.double().view(tokens, b, -1), halves[-1].double())
    if op == "blast":
        z = torch.einsum("ijr,tjr->tir", halves[1].double(), h)
        wanted = torch.einsum("tir,iqr->tiq", z, halves[0].double()).flatten(1)
    else:
        left = halves[0].double().view(b, n_out // b, b, r // b)
        h = h.view(tokens, b, r // b, b)
        wanted = torch.einsum("tkjl,lskj->tsl", h, left).flatten(1)
    wanted += bias.double()
    path = find_path(op, "bmm")
    call = Call(op, tokens, n_in, n_out, b, r, torch.bfloat16, limits_of(device))
    for config in path.candidates(call):
        out = torch.full((tokens, n_out), torch.nan, device=device, dtype=torch.bfloat16)
        path.run(call, x, halves, bias, None, out, config)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        again = out.clone().fill_(torch.nan)
        path.run(call, x, halves, bias, None, again, config)
        held = torch.cuda.max_memory_allocated() - before - out.nbytes
        assert held <= SCRATCH_BYTES + 2**20
        error = (out.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < 4e-3
        assert torch.equal(out, again)
    y = run_path("bmm", op, x, halves, bias, "silu")
    assert_close(y, torch.nn.functional.silu(wanted), slack=1.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run_path("bmm", op, x, halves, bias)
    x.copy_(x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert_close(y.flip(0), wanted)
