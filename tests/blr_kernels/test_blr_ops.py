"""The ops against dense matrices built entry by entry, on PyTorch and on Triton.

Without a GPU the Triton kernels run interpreted on the CPU, at tiny and odd shapes.
"""

from __future__ import annotations

import pytest
import torch
from blr_expected import assert_close, call, dense, expected, factors_for
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from blr_kernels import Backend, Blast, LowRank, Monarch, Structure
from blr_kernels.ops import blast, low_rank, monarch
from blr_kernels.reference import ACTIVATIONS

CASES: list[tuple[Structure, int, int]] = [
    (LowRank(8), 36, 50),
    (LowRank(24), 37, 70),
    (Monarch(3, 24), 21, 33),
    (Monarch(4, 8), 40, 52),
    (Monarch(9, 27), 45, 63),
    (Blast(3, 8), 21, 33),
    (Blast(4, 24), 52, 20),
    (Blast(9, 24), 45, 63),
]
ONE_EACH = [CASES[1], CASES[2], CASES[5]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = [Backend.TORCH, Backend.TRITON]


def name(value: object) -> str | None:
    """Readable test ids."""
    if isinstance(value, Backend):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value).replace(" ", "") if isinstance(value, LowRank | Monarch | Blast) else None


def tensors(
    structure: Structure,
    in_features: int,
    out_features: int,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """x of ``(*shape, in)``, factors and bias, drawn once and then rounded to ``dtype``."""
    factors = factors_for(structure, in_features, out_features)
    x = torch.randn(*shape, in_features).to(device, dtype)
    bias = torch.randn(out_features).to(device, dtype)
    return x, {k: v.to(device, dtype) for k, v in factors.items()}, bias


def op_of(structure: Structure) -> torch._ops.OpOverload:
    """The registered op behind ``Backend.TRITON``."""
    if isinstance(structure, LowRank):
        return low_rank._low_rank_op
    if isinstance(structure, Monarch):
        return monarch._monarch_op
    return blast._blast_op


def op_arguments(factors: dict[str, Tensor]) -> list[Tensor]:
    """Factors in the order of the op's schema."""
    return [factors[key] for key in ("left", "coupling", "right") if key in factors]


@pytest.mark.parametrize("tokens", [0, 1, 3, 65])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("structure", "n_in", "n_out"), CASES, ids=name)
@pytest.mark.usefixtures("nan_memory")
def test_triton_matches_dense(
    structure: Structure,
    n_in: int,
    n_out: int,
    dtype: torch.dtype,
    tokens: int,
    device: torch.device,
) -> None:
    """Every structure and dtype, tokens from none to more than a tile, with and without bias."""
    x, factors, bias = tensors(structure, n_in, n_out, (tokens,), dtype, device)
    # The interpreter cuts fp32 to bfloat16 instead of rounding it.
    slack = 3.0 if dtype is torch.bfloat16 and device.type == "cpu" else 1.0
    weight = dense(structure, factors)
    # On a GPU each variant is one more kernel to compile.
    variants = (bias, None) if device.type == "cpu" else (bias if tokens < 65 else None,)
    for used in variants:
        y = call(structure, x, factors, used, backend=Backend.TRITON)
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert_close(y, expected(x, weight, used), slack=slack)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("backend", BACKENDS, ids=name)
@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
@pytest.mark.usefixtures("nan_memory")
def test_dimensions_of_x(
    structure: Structure,
    n_in: int,
    n_out: int,
    backend: Backend,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    x, factors, bias = tensors(structure, n_in, n_out, shape, device=device)
    y = call(structure, x, factors, bias, backend=backend)
    assert y.is_contiguous()
    assert_close(y, expected(x, dense(structure, factors), bias))


@pytest.mark.parametrize("layout", ["transposed", "strided", "sliced", "expanded", "offset"])
@pytest.mark.parametrize("backend", BACKENDS, ids=name)
@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
@pytest.mark.usefixtures("nan_memory")
def test_x_that_is_not_contiguous(
    structure: Structure, n_in: int, n_out: int, backend: Backend, layout: str, device: torch.device
) -> None:
    _, factors, bias = tensors(structure, n_in, n_out, (1,), device=device)
    x = {
        "transposed": torch.randn(n_in, 5, device=device).t(),
        "strided": torch.randn(5, 2 * n_in, device=device)[:, ::2],
        "sliced": torch.randn(4, 3, n_in + 3, device=device)[::2, 1:, 3:],
        "expanded": torch.randn(1, n_in, device=device).expand(4, n_in),
        "offset": torch.randn(5 * n_in + 1, device=device)[1:].view(5, n_in),
    }[layout]
    y = call(structure, x, factors, bias, backend=backend)
    assert_close(y, expected(x, dense(structure, factors), bias))


@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
@pytest.mark.parametrize("backend", BACKENDS, ids=name)
def test_factors_that_are_not_contiguous(
    structure: Structure, n_in: int, n_out: int, backend: Backend, device: torch.device
) -> None:
    x, factors, bias = tensors(structure, n_in, n_out, (3,), device=device)
    weight = dense(structure, factors)
    strided = {
        key: tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        for key, tensor in factors.items()
    }
    wide_bias = bias.repeat_interleave(2)[::2]
    y = call(structure, x, strided, wide_bias, backend=backend)
    assert_close(y, expected(x, weight, bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("backend", BACKENDS, ids=name)
@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_activations(
    structure: Structure,
    n_in: int,
    n_out: int,
    backend: Backend,
    activation: str,
    device: torch.device,
) -> None:
    x, factors, bias = tensors(structure, n_in, n_out, (3,), device=device)
    weight = dense(structure, factors)
    for used in (bias, None):
        y = call(structure, 3 * x, factors, used, activation, backend=backend)
        assert_close(y, expected(3 * x, weight, used, activation))


def test_more_blocks_than_a_program_accumulates(device: torch.device) -> None:
    """11 output blocks are shared by two programs of 6, of which the last has one too many."""
    structure = Blast(11, 8)
    x, factors, bias = tensors(structure, 33, 22, (3,), device=device)
    y = call(structure, x, factors, bias, backend=Backend.TRITON)
    assert_close(y, expected(x, dense(structure, factors), bias))


@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
def test_tokens_are_walked_in_chunks(
    structure: Structure,
    n_in: int,
    n_out: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call whose intermediate would be too large gives the same in several passes."""
    monkeypatch.setattr("blr_kernels.ops.triton_config.SCRATCH_BYTES", 2048)
    x, factors, bias = tensors(structure, n_in, n_out, (65,), device=device)
    y = call(structure, x, factors, bias, backend=Backend.TRITON)
    assert_close(y, expected(x, dense(structure, factors), bias))


@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
def test_nan_in_one_token_reaches_that_token_only(
    structure: Structure, n_in: int, n_out: int, device: torch.device
) -> None:
    x, factors, bias = tensors(structure, n_in, n_out, (65,), device=device)
    clean = call(structure, x, factors, bias, backend=Backend.TRITON)
    x[17] = torch.nan
    y = call(structure, x, factors, bias, backend=Backend.TRITON)
    assert y[17].isnan().all()
    others = torch.arange(65, device=device) != 17
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
def test_same_call_gives_same_bits(
    structure: Structure, n_in: int, n_out: int, device: torch.device
) -> None:
    x, factors, bias = tensors(structure, n_in, n_out, (65,), device=device)
    first = call(structure, x, factors, bias, "gelu", backend=Backend.TRITON)
    assert torch.equal(first, call(structure, x, factors, bias, "gelu", backend=Backend.TRITON))


@pytest.mark.parametrize(("with_bias", "activation"), [(False, None), (True, "gelu_tanh")])
@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
def test_opcheck(
    structure: Structure,
    n_in: int,
    n_out: int,
    with_bias: bool,
    activation: str | None,
    device: torch.device,
) -> None:
    x, factors, bias = tensors(structure, n_in, n_out, (2, 3), device=device)
    leaves = [t.requires_grad_() for t in (x, *op_arguments(factors))]
    arguments = (*leaves, bias.requires_grad_() if with_bias else None, activation)
    torch.library.opcheck(op_of(structure), arguments)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
def test_gradients_are_those_of_the_reference(
    structure: Structure, n_in: int, n_out: int, activation: str | None, device: torch.device
) -> None:
    x, factors, bias = tensors(structure, n_in, n_out, (2, 3), device=device)
    leaves = [t.requires_grad_() for t in (x, bias, *factors.values())]
    grad = torch.randn(2, 3, n_out, device=device)
    results = []
    for backend in BACKENDS:
        y = call(structure, x, factors, bias, activation, backend=backend)
        results.append(torch.autograd.grad(y, leaves, grad))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
@pytest.mark.usefixtures("nan_memory")
def test_half_precision_gradients_are_those_of_the_reference(
    structure: Structure, n_in: int, n_out: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Against the reference in float64, on the same rounded values."""
    x, factors, bias = tensors(structure, n_in, n_out, (2, 3), dtype, device)
    grad = torch.randn(2, 3, n_out).to(device, dtype)

    def gradients(backend: Backend, as_dtype: torch.dtype) -> tuple[Tensor, ...]:
        copies = [
            tensor.detach().to(as_dtype).requires_grad_() for tensor in (x, bias, *factors.values())
        ]
        named = dict(zip(factors, copies[2:], strict=True))
        y = call(structure, copies[0], named, copies[1], "gelu", backend=backend)
        return torch.autograd.grad(y, copies, grad.to(as_dtype))

    wanted = gradients(Backend.TORCH, torch.float64)
    for want, got in zip(wanted, gradients(Backend.TRITON, dtype), strict=True):
        assert got.dtype == dtype
        # Unlike an output, a gradient passes through values that were rounded on the way.
        assert_close(got, want, slack=3.0)


@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
def test_one_gradient_alone(
    structure: Structure, n_in: int, n_out: int, device: torch.device
) -> None:
    """Frozen factors, as in a model of which only some layers are healed."""
    x, factors, bias = tensors(structure, n_in, n_out, (3,), device=device)
    leaves = [x, bias, *factors.values()]
    for leaf in leaves:
        leaf.requires_grad_()
        grads = []
        for backend in BACKENDS:
            y = call(structure, x, factors, bias, "silu", backend=backend)
            grads.append(torch.autograd.grad(y.square().sum(), leaf)[0])
        leaf.requires_grad_(False)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=name)
@pytest.mark.parametrize(("structure", "n_in", "n_out"), ONE_EACH, ids=name)
def test_compiles_to_one_graph_once(
    structure: Structure, n_in: int, n_out: int, backend: Backend, device: torch.device
) -> None:
    x, factors, bias = tensors(structure, n_in, n_out, (3,), device=device)
    torch._dynamo.reset()
    counter = CompileCounter()

    def layer(x: Tensor) -> Tensor:
        return call(structure, x, factors, bias, "gelu", backend=backend)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    first, second = compiled(x), compiled(x.clone())
    assert counter.frame_count == 1
    assert torch.equal(first, second)
    assert_close(first, expected(x, dense(structure, factors), bias, "gelu"))


@pytest.mark.parametrize("backend", BACKENDS, ids=name)
def test_autocast_casts_as_linear_does(backend: Backend, device: torch.device) -> None:
    structure, n_in, n_out = CASES[5]
    x, factors, bias = tensors(structure, n_in, n_out, (3,), device=device)
    weight = torch.nn.functional.linear
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = call(structure, x, factors, bias, backend=backend)
        assert y.dtype == weight(x, torch.randn(n_out, n_in, device=device)).dtype
    rounded = {key: tensor.bfloat16() for key, tensor in factors.items()}
    wanted = expected(x.bfloat16(), dense(structure, rounded), bias.bfloat16())
    assert_close(y, wanted, slack=3.0)
