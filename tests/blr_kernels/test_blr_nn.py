"""The modules: what nn.Linear does around a product, they do too."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from blr_expected import TOLERANCES, assert_close, dense, expected
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from blr_kernels import (
    Backend,
    Blast,
    BlastLinear,
    BLRLinear,
    LowRank,
    LowRankLinear,
    Monarch,
    MonarchLinear,
    Structure,
    explain,
    set_backend_,
    triton_available,
)
from blr_kernels.reference import Activation

STRUCTURES: list[Structure] = [LowRank(8), Monarch(4, 8), Blast(3, 8)]
BACKENDS = [Backend.TORCH, Backend.TRITON]
SIZES = [(24, 36), (25, 38)]


def layer_on(
    device: torch.device,
    structure: Structure,
    n_in: int,
    n_out: int,
    backend: Backend,
    activation: Activation | None = None,
) -> BLRLinear:
    return BLRLinear.create(
        n_in, n_out, structure, backend=backend, activation=activation, device=device
    )


def dense_of(layer: BLRLinear) -> np.ndarray:
    """The independent dense weight, cut to the sizes that the caller sees."""
    weight = dense(layer.structure, {k: v.data for k, v in layer.factors().items()})
    return weight[: layer.out_features, : layer.in_features]


@pytest.mark.parametrize(
    ("structure", "kind"),
    [(LowRank(2), LowRankLinear), (Monarch(2, 2), MonarchLinear), (Blast(2, 2), BlastLinear)],
)
def test_create_picks_the_class(structure: Structure, kind: type[BLRLinear]) -> None:
    layer = BLRLinear.create(6, 8, structure, bias=False)
    assert type(layer) is kind
    assert layer.bias is None
    assert dict(layer.named_parameters()).keys() == layer.factors().keys()
    assert layer.backend is Backend.AUTO


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_forward_and_dense(
    structure: Structure, n_in: int, n_out: int, backend: Backend, device: torch.device
) -> None:
    """At sizes that the blocks divide, and at sizes that are padded inside."""
    layer = layer_on(device, structure, n_in, n_out, backend, activation="gelu")
    weight = dense_of(layer)
    np.testing.assert_allclose(layer.to_dense().detach().cpu().numpy(), weight, atol=1e-6)
    for shape in ((n_in,), (0, n_in), (2, 3, n_in)):
        x = torch.randn(shape, device=device)
        y = layer(x)
        assert y.is_contiguous()
        assert_close(y, expected(x, weight, layer.bias, "gelu"))


def test_padding_is_reported_and_gets_no_gradient_from_nothing() -> None:
    layer = BLRLinear.create(25, 38, Blast(3, 8))
    assert (layer.in_padded, layer.out_padded) == (27, 39)
    assert "padded to 27 -> 39" in repr(layer)
    assert layer.bias is not None
    assert layer.bias.shape == (38,)
    layer(torch.randn(4, 25)).sum().backward()
    assert layer.right.grad is not None
    assert torch.count_nonzero(layer.right.grad[2, :, 7:]) == 0


def test_extra_repr() -> None:
    layer = BLRLinear.create(24, 36, Monarch(4, 8), activation="silu", backend=Backend.TORCH)
    assert repr(layer) == (
        "MonarchLinear(24 -> 36, Monarch b4 r8, bias=True, 480 of 864 parameters (56%), "
        "activation=silu, backend=torch)"
    )


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_state_dict_round_trip(structure: Structure) -> None:
    layer = BLRLinear.create(25, 38, structure)
    assert list(layer.state_dict()) == [*structure.parameter_shapes(25, 38), "bias"]
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = BLRLinear.create(25, 38, structure, backend=Backend.TORCH)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(3, 25)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_deep_copy_shares_nothing(structure: Structure) -> None:
    layer = BLRLinear.create(24, 36, structure)
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 24)
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.left.zero_()
    assert layer.left.count_nonzero() > 0


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_moves_with_the_module(structure: Structure, dtype: torch.dtype) -> None:
    layer = BLRLinear.create(25, 38, structure).to(dtype)
    x = torch.randn(5, 25, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert_close(y, expected(x, dense_of(layer), layer.bias))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_meta_device(structure: Structure) -> None:
    """Shapes without memory; materialised and loaded, the layer is the original."""
    original = BLRLinear.create(25, 38, structure)
    layer = BLRLinear.create(25, 38, structure, device="meta")
    assert layer(torch.empty(2, 3, 25, device="meta")).shape == (2, 3, 38)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(original.state_dict())
    x = torch.randn(2, 25)
    assert torch.equal(layer(x), original(x))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_compiles_to_one_graph_once(
    structure: Structure, n_in: int, n_out: int, backend: Backend, device: torch.device
) -> None:
    layer = layer_on(device, structure, n_in, n_out, backend)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    x = torch.randn(2, 3, n_in, device=device)
    first, second = compiled(x), compiled(x)
    assert counter.frame_count == 1
    assert torch.equal(first, second)
    assert_close(first, expected(x, dense_of(layer), layer.bias))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_compiled_training_step(backend: Backend, device: torch.device) -> None:
    """Forward and backward through the compiler give the eager gradients."""
    layer = layer_on(device, Blast(3, 8), 24, 36, backend, activation="gelu_tanh")
    x = torch.randn(4, 24, device=device)
    layer(x).square().sum().backward()
    wanted = {k: p.grad.clone() for k, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    torch._dynamo.reset()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    assert set(wanted) == {"left", "right", "coupling", "bias"}
    for key, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_autocast(
    structure: Structure, backend: Backend, compiled: bool, device: torch.device
) -> None:
    """As F.linear: x and weights go to the autocast dtype, gradients come back in the weights'."""
    layer = layer_on(device, structure, 24, 36, backend)
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = run(torch.randn(3, 24, device=device))
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert layer.left.grad is not None
    assert layer.left.grad.dtype is torch.float32


def svd(weight: Tensor, structure: Structure) -> Mapping[str, Tensor]:
    u, s, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    r = structure.rank
    return {"left": u[:, :r] * s[:r], "right": vh[:r]}


def test_from_linear() -> None:
    linear = nn.Linear(12, 20).eval()
    with torch.no_grad():
        linear.weight.copy_(torch.randn(20, 4) @ torch.randn(4, 12))
    layer = BLRLinear.from_linear(linear, LowRank(4), svd, backend=Backend.TORCH)
    assert isinstance(layer, LowRankLinear)
    assert not layer.training
    assert layer.left.dtype is torch.float32
    assert layer.backend is Backend.TORCH
    torch.testing.assert_close(layer.to_dense(), linear.weight, rtol=1e-4, atol=1e-5)
    x = torch.randn(3, 12)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-4, atol=1e-5)
    assert layer.bias is not None
    assert layer.bias.data_ptr() != linear.bias.data_ptr()


def test_from_linear_pads_the_weight() -> None:
    seen: list[Tensor] = []

    def factorize(weight: Tensor, structure: Structure) -> Mapping[str, Tensor]:
        seen.append(weight)
        shapes = structure.parameter_shapes(weight.shape[1], weight.shape[0])
        return {key: torch.ones(shape) for key, shape in shapes.items()}

    linear = nn.Linear(25, 38, bias=False)
    layer = BLRLinear.from_linear(linear, Blast(3, 8), factorize)
    assert seen[0].shape == (39, 27)
    assert torch.equal(seen[0][:38, :25], linear.weight)
    assert seen[0][38:].count_nonzero() == seen[0][:, 25:].count_nonzero() == 0
    assert layer.to_dense().shape == (38, 25)
    assert layer.bias is None


def test_factors_are_checked() -> None:
    layer = BLRLinear.create(6, 9, Blast(3, 2))
    good = {key: torch.ones_like(value) for key, value in layer.factors().items()}
    with pytest.raises(ValueError, match=r"\['coupling', 'left', 'right'\], got \['left'"):
        layer.load_factors_({"left": good["left"], "right": good["right"]})
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"right must have shape \(3, 2, 2\), got \(3, 2, 3\)"):
        layer.load_factors_({**good, "right": torch.ones(3, 2, 3)})
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())
    assert layer.load_factors_(good) is layer
    assert torch.equal(layer.coupling, torch.ones(3, 3, 2))  # type: ignore[arg-type]


def test_set_backend_reaches_every_layer() -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), BLRLinear.create(6, 6, LowRank(2)), BLRLinear.create(6, 6, Blast(2, 2))
    )
    assert set_backend_(model, Backend.TORCH) == 2
    assert [m.backend for m in model.modules() if isinstance(m, BLRLinear)] == [Backend.TORCH] * 2


@pytest.mark.parametrize("structure", [LowRank(64), Monarch(4, 64), Blast(4, 64)], ids=str)
def test_fresh_weights_have_the_spread_of_linear(structure: Structure) -> None:
    layer = BLRLinear.create(256, 256, structure)
    ratio = layer.to_dense().std() / nn.Linear(256, 256).weight.std()
    assert 0.8 < ratio < 1.25


def test_explain_on_a_cpu() -> None:
    told = explain(Blast(3, 8), 24, 36, dtype=torch.float32, device="cpu")
    assert told.implementation is Backend.TORCH
    assert told.reason
    assert set(told.others) == {Backend.TRITON}
    asked = explain(Blast(3, 8), 24, 36, dtype=torch.float32, device="cpu", backend=Backend.TORCH)
    assert "asked for" in asked.reason
    with pytest.raises(ValueError, match="at least blocks = 30, got 24"):
        explain(Blast(30, 8), 24, 36, dtype=torch.float32, device="cpu")


def test_explain_below_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """C14: AUTO takes PyTorch on a T4, where bfloat16 cannot run on Triton at all."""
    pytest.importorskip("triton")
    monkeypatch.setattr("blr_kernels.ops.backend._capability", lambda device: (7, 5))
    monkeypatch.setattr("blr_kernels.ops.backend._INTERPRETED", False)
    half = explain(Blast(3, 8), 24, 36, dtype=torch.float16, device="cuda")
    assert half.implementation is Backend.TORCH
    assert "7.5" in half.others[Backend.TRITON]
    asked = explain(Blast(3, 8), 24, 36, dtype=torch.float16, device="cuda", backend=Backend.TRITON)
    assert asked.implementation is Backend.TRITON
    with pytest.raises(RuntimeError, match=r"bfloat16 needs compute capability 8.0, got 7.5"):
        explain(Blast(3, 8), 24, 36, dtype=torch.bfloat16, device="cuda", backend=Backend.TRITON)


def test_explain_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("blr_kernels.ops.backend._capability", lambda device: (9, 0))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        told = explain(Monarch(4, 8), 24, 36, dtype=dtype, device="cuda")
        assert told.implementation is Backend.TRITON
        assert set(told.others) == {Backend.TORCH}


def test_triton_available_gives_a_reason() -> None:
    available, reason = triton_available()
    assert isinstance(available, bool)
    assert reason


def test_tolerances_stay_tight() -> None:
    """The bounds these tests share: largest 2e-2, RMS 4e-3 at most."""
    assert max(largest for largest, _ in TOLERANCES.values()) <= 2e-2
    assert max(rms for _, rms in TOLERANCES.values()) <= 4e-3
