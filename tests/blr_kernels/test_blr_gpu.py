"""On a real GPU: the layers of the paper's models, at sizes that the interpreter cannot reach."""

from __future__ import annotations

import pytest
import torch
from blr_expected import TOLERANCES, assert_close, call
from torch import Tensor

from blr_kernels import Backend, Blast, BLRLinear, LowRank, Monarch, Structure, explain

pytestmark = pytest.mark.gpu

LAYERS: list[tuple[str, Structure, int, int, int]] = [
    ("DiT qkv", Blast(9, 384), 1152, 3456, 512),
    ("DiT fc1", Blast(9, 256), 1152, 4608, 512),
    ("DiT adaLN", Blast(9, 256), 1152, 6912, 2),
    ("ViT qkv", Blast(3, 128), 768, 2304, 197),
    ("ViT fc1", Monarch(4, 128), 768, 3072, 197),
    ("ViT fc2", Monarch(4, 128), 3072, 768, 197),
    ("ViT fc2 low rank", LowRank(128), 3072, 768, 1379),
]
LAYER_IDS = [layer[0] for layer in LAYERS]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def draw(
    structure: Structure, n_in: int, n_out: int, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """x, factors and bias on the GPU, the output of about unit size."""
    shapes = structure.parameter_shapes(n_in, n_out)
    factors = {key: torch.randn(shape, device="cuda").to(dtype) for key, shape in shapes.items()}
    terms = structure.rank // (structure.blocks if isinstance(structure, Monarch) else 1)
    factors["right"] *= (terms * n_in) ** -0.5
    x = torch.randn(tokens, n_in, device="cuda").to(dtype)
    return x, factors, torch.randn(n_out, device="cuda").to(dtype)


def dense(structure: Structure, factors: dict[str, Tensor]) -> Tensor:
    """``W (out, in)`` in float64, by einsum from the formulas."""
    f = {key: value.double() for key, value in factors.items()}
    if isinstance(structure, LowRank):
        return torch.einsum("or,ri->oi", f["left"], f["right"])
    b, q, r = f["left"].shape
    if isinstance(structure, Monarch):
        left = f["left"].reshape(b, q, b, r // b)
        right = f["right"].reshape(b, r // b, b, -1)
        return torch.einsum("lskj,kjlc->slkc", left, right).reshape(b * q, -1)
    return torch.einsum("iqr,ijr,jrp->iqjp", f["left"], f["coupling"], f["right"]).reshape(
        b * q, -1
    )


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("label", "structure", "n_in", "n_out", "tokens"), LAYERS, ids=LAYER_IDS)
@pytest.mark.usefixtures("nan_memory")
def test_layers_of_the_paper(
    label: str, structure: Structure, n_in: int, n_out: int, tokens: int, dtype: torch.dtype
) -> None:
    x, factors, bias = draw(structure, n_in, n_out, tokens, dtype)
    y = call(structure, x, factors, bias, backend=Backend.TRITON)
    assert y.dtype == dtype
    assert_close(y, wanted(x, dense(structure, factors), bias))


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[4], LAYERS[6]], ids=lambda x: x[0])
def test_bits_repeat_and_nan_stays_in_its_token(
    layer: tuple[str, Structure, int, int, int],
) -> None:
    _, structure, n_in, n_out, tokens = layer
    x, factors, bias = draw(structure, n_in, n_out, tokens, torch.bfloat16)
    clean = call(structure, x, factors, bias, "gelu", backend=Backend.TRITON)
    assert torch.equal(clean, call(structure, x, factors, bias, "gelu", backend=Backend.TRITON))
    x[100] = torch.nan
    y = call(structure, x, factors, bias, "gelu", backend=Backend.TRITON)
    assert y[100].isnan().all()
    others = torch.arange(tokens, device="cuda") != 100
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("structure", [LowRank(512), Monarch(4, 512), Blast(9, 384)], ids=str)
def test_scratch_is_bounded(structure: Structure) -> None:
    """At 16,384 tokens a call takes at most 64 MiB beside its output, and is still right."""
    n_in, n_out, tokens = 1152, 3456, 16_384
    x, factors, bias = draw(structure, n_in, n_out, tokens, torch.bfloat16)
    call(structure, x, factors, bias, backend=Backend.TRITON)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = call(structure, x, factors, bias, backend=Backend.TRITON)
    extra = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    assert extra <= 64 * 2**20
    assert_close(y, wanted(x, dense(structure, factors), bias))


@pytest.mark.parametrize("structure", [LowRank(16), Monarch(4, 16), Blast(4, 16)], ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), [(1024, 16), (16, 1024)])
def test_offsets_beyond_32_bits(structure: Structure, n_in: int, n_out: int) -> None:
    """x or y of more than 2**31 elements: the last tokens are still the right ones."""
    tokens = 2**31 // 1024 + 100
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    last, factors, _ = draw(structure, n_in, n_out, 64, torch.bfloat16)
    x = torch.zeros(tokens, n_in, dtype=torch.bfloat16, device="cuda")
    x[-64:] = last
    y = call(structure, x, factors, backend=Backend.TRITON)
    assert_close(y[-64:], wanted(last, dense(structure, factors), None))
    assert torch.count_nonzero(y[:64]) == 0


def test_tf32_only_where_torch_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    structure = LowRank(128)
    x, factors, bias = draw(structure, 768, 768, 197, torch.float32)
    right = wanted(x, dense(structure, factors), bias)
    assert_close(call(structure, x, factors, bias, backend=Backend.TRITON), right)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    y = call(structure, x, factors, bias, backend=Backend.TRITON)
    error = (y.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
    assert TOLERANCES[torch.float32][1] < error < 2e-3


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.TORCH], ids=lambda b: b.value)
def test_inductor_and_cuda_graphs(backend: Backend) -> None:
    """One graph under the real compiler, replayed as a CUDA graph, with eager's values."""
    structure = Blast(3, 128)
    layer = BLRLinear.create(
        768, 2304, structure, backend=backend, device="cuda", dtype=torch.bfloat16
    ).requires_grad_(False)
    x = torch.randn(197, 768, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    factors = {key: value.data for key, value in layer.factors().items()}
    right = wanted(x, dense(structure, factors), layer.bias)
    for _ in range(4):
        y = compiled(x).clone()
    assert_close(y, right)


def test_auto_takes_triton() -> None:
    for dtype in DTYPES:
        told = explain(Blast(3, 8), 24, 36, dtype=dtype, device="cuda")
        assert told.implementation is Backend.TRITON
    told = explain(Blast(3, 8), 24, 36, dtype=torch.float64, device="cuda")
    assert told.implementation is Backend.TORCH


@pytest.mark.parametrize("structure", [LowRank(128), Monarch(4, 128), Blast(3, 128)], ids=str)
def test_training_step_in_bfloat16(structure: Structure) -> None:
    """Gradients in half precision stay near those of float64."""
    x, factors, bias = draw(structure, 768, 768, 197, torch.bfloat16)
    grad = torch.randn(197, 768, device="cuda").bfloat16()
    results = []
    for dtype, backend in ((torch.float64, Backend.TORCH), (torch.bfloat16, Backend.TRITON)):
        own = {key: value.to(dtype).requires_grad_() for key, value in factors.items()}
        leaves = [x.to(dtype).requires_grad_(), *own.values()]
        y = call(structure, leaves[0], own, bias.to(dtype), "gelu", backend=backend)
        results.append(torch.autograd.grad(y, leaves, grad.to(dtype)))
    for right, got in zip(*results, strict=True):
        error = (got.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
        assert error < 1e-2
