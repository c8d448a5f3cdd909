"""BLAST in 8-bit integers: exact sums, scales, error against fp32, module, targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from blr_expected import activated, dense, expected, factors_for
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from blr_kernels import (
    Backend,
    Blast,
    BlastLinear,
    BLRLinear,
    Int8BlastLinear,
    LowRank,
    blast_linear_int8,
    quantize_,
    quantize_blast,
    set_backend_,
)
from blr_kernels.ops import int8
from blr_kernels.ops.int8 import LEAST, blast_int8, quantize_rows
from blr_kernels.ops.paths import Call, DeviceLimits, call_of, find_path, run_path
from blr_kernels.ops.triton_config import SCRATCH_BYTES
from blr_kernels.reference import ACTIVATIONS

ROOT = Path(__file__).parents[2]
TARGETS = [80, 86, 90, 100, 120]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = [Backend.TORCH, Backend.TRITON]
TINY = [
    # b, p, q, r, tokens
    (1, 5, 3, 1, 1),
    (3, 7, 11, 8, 5),
    (4, 13, 5, 70, 33),
    (9, 5, 7, 24, 65),
    (11, 3, 2, 8, 3),
    (2, 300, 17, 130, 17),
]
REAL = {
    "DiT qkv": (9, 128, 384, 384),
    "DiT fc1": (9, 128, 512, 256),
    "DiT adaLN": (9, 128, 768, 256),
    "ViT qkv": (3, 256, 768, 128),
    "ViT fc1": (3, 256, 1024, 128),
    "ViT fc2": (3, 1024, 256, 128),
}


def draw(
    b: int, p: int, q: int, r: int, tokens: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """x, int8 factors of random normal ones, and bias; the output of about unit size."""
    factors = factors_for(Blast(b, r), b * p, b * q)
    rounded = quantize_blast(factors["left"], factors["coupling"], factors["right"])
    x, bias = torch.randn(tokens, b * p), torch.randn(b * q)
    return x.to(device, dtype), tuple(t.to(device) for t in rounded), bias.to(device, dtype)


def rms(actual: Tensor, wanted: Tensor) -> float:
    """RMS of the difference, relative to what is wanted."""
    wanted = wanted.double()
    difference = actual.double() - wanted
    return float((difference.square().mean() / wanted.square().mean()).sqrt())


def run_int8(x: Tensor, factors: tuple[Tensor, ...], bias: Tensor | None, **config: int) -> Tensor:
    """The Triton path at its default config with some of it changed."""
    default = find_path("blast_int8", "triton").default_config(call_of("blast_int8", x, factors[0]))
    return run_path("triton", "blast_int8", x, factors, bias, config={**default, **config})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", TINY, ids=str)
def test_kernels_are_near_the_integer_reference(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """But for z in fp16 before it is rounded to integers: few of them fall on the other side."""
    x, factors, bias = draw(*size, dtype, device)
    y = run_int8(x, factors, bias)
    wanted = blast_int8(x, *factors, bias)
    # The interpreter cuts where it should round to bfloat16.
    assert rms(y, wanted) < (6e-3 if dtype is torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("tokens", [0, 1, 17, 65])
@pytest.mark.parametrize("size", TINY, ids=str)
@pytest.mark.usefixtures("nan_memory")
def test_op_is_near_the_reference(size: tuple[int, ...], tokens: int, device: torch.device) -> None:
    """What fp16 between the products adds is small beside what rounding to integers costs."""
    x, factors, bias = draw(*size[:4], tokens, torch.float32, device)
    y = blast_linear_int8(x, *factors, bias, backend=Backend.TRITON)
    wanted = blast_linear_int8(x, *factors, bias, backend=Backend.TORCH)
    assert y.shape == wanted.shape
    if tokens:
        assert rms(y, wanted) < 4e-3


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_bias_activation_and_leading_dimensions(
    backend: Backend, activation: Any, device: torch.device
) -> None:
    x, factors, bias = draw(3, 7, 11, 8, 12, torch.float32, device)
    strided = torch.stack((x, x), -1)[..., 0].view(3, 4, -1)
    plain = blast_linear_int8(x, *factors, backend=backend)
    y = blast_linear_int8(strided, *factors, bias, activation, backend=backend)
    assert y.shape == (3, 4, 33)
    assert y.is_contiguous()
    wanted = activated((plain + bias).double().cpu().numpy(), activation)
    torch.testing.assert_close(
        y.view(12, 33).double().cpu(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_output_is_that_of_the_dense_weight(backend: Backend, device: torch.device) -> None:
    """Against the formula, entry by entry, of the factors before they were rounded."""
    structure = Blast(4, 24)
    factors = factors_for(structure, 52, 20)
    rounded = quantize_blast(factors["left"], factors["coupling"], factors["right"])
    x = torch.randn(40, 52)
    y = blast_linear_int8(
        x.to(device), *(t.to(device) for t in rounded), None, None, backend=backend
    )
    assert rms(y.cpu(), expected(x, dense(structure, factors))) < 2e-2


@pytest.mark.parametrize(
    "config", [{"mix_tokens": 16}, {"mix_outputs": 2}, {"mix_rows": 32}], ids=str
)
def test_other_configs_compute_the_same(config: dict[str, int], device: torch.device) -> None:
    x, factors, bias = draw(5, 7, 11, 70, 33, torch.float32, device)
    y = run_int8(x, factors, bias, **config)
    tile, group = config.get("mix_rows", 64), config.get("mix_outputs")
    assert rms(y, blast_int8(x, *factors, bias, rank_tile=tile, group=group)) < 4e-3


def test_chunks_give_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, factors, bias = draw(3, 7, 11, 8, 65, torch.float32, device)
    whole = run_int8(x, factors, bias)
    monkeypatch.setattr("blr_kernels.ops.triton_config.SCRATCH_BYTES", 2048)
    assert torch.equal(run_int8(x, factors, bias), whole)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_a_token_that_is_not_finite_gives_nan_alone(
    backend: Backend, bad: float, device: torch.device
) -> None:
    x, factors, bias = draw(3, 7, 11, 8, 65, torch.float32, device)
    clean = blast_linear_int8(x, *factors, bias, "gelu", backend=backend)
    x[17, 4] = bad
    y = blast_linear_int8(x, *factors, bias, "gelu", backend=backend)
    assert y[17].isnan().all()
    others = torch.arange(65, device=device) != 17
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_tokens_of_zeros_give_the_bias(backend: Backend, device: torch.device) -> None:
    x, factors, bias = draw(3, 7, 11, 8, 4, torch.float32, device)
    x[1:3] = 0
    y = blast_linear_int8(x, *factors, bias, backend=backend)
    assert torch.equal(y[1], bias)
    assert torch.equal(y[2], bias)
    assert torch.equal(y, blast_linear_int8(x, *factors, bias, backend=backend))


def test_rows_have_the_scale_of_their_largest() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [254.0, -127.0, 1.0], [0.0, 0.0, 0.0]])
    integers, scale = quantize_rows(x)
    torch.testing.assert_close(scale[:2], torch.tensor([2 / 127, 2.0]))
    assert integers.dtype == torch.int8
    # 63.5 and 31.75 become 64 and 32; 254, -127 and 1 are halved: 0.5 is even at 0.
    assert integers.tolist() == [[64, -127, 32], [127, -64, 0], [0, 0, 0]]
    assert scale[2] * 127 == pytest.approx(LEAST)


def test_rows_are_symmetric_and_off_by_half_a_step_at_most() -> None:
    x = torch.randn(50, 33) * torch.logspace(-6, 6, 50).unsqueeze(1)
    integers, scale = quantize_rows(x)
    negative, same = quantize_rows(-x)
    assert torch.equal(negative, -integers)
    assert torch.equal(same, scale)
    assert integers.abs().amax(1).eq(127).all()
    error = (integers * scale.unsqueeze(1) - x).abs()
    assert (error <= 0.5001 * scale.unsqueeze(1)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_carry_it_in_the_scale(bad: float) -> None:
    integers, scale = quantize_rows(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert scale.isnan().tolist() == [True, False]
    assert integers.tolist() == [[0, 0], [64, 127]]


def test_integer_products_are_exact() -> None:
    """1,200 products of 127 by 127 pass 2**24, where fp32 no longer holds every integer."""
    for size in (1040, 1200):
        a = torch.full((1, 1, size), 127, dtype=torch.int8)
        b = torch.full((1, size, 1), -127, dtype=torch.int8)
        b[0, 0] = 1
        wanted = 127 - 127**2 * (size - 1)
        assert int8._integer_bmm(a, b).item() == torch.tensor(float(wanted)).item()


@pytest.mark.parametrize("name", REAL)
def test_error_against_fp32_within_the_bar(name: str) -> None:
    """Random normal factors and inputs at the real sizes: RMS of at most 2e-2."""
    b, p, q, r = REAL[name]
    left, coupling, right = torch.randn(b, q, r), torch.randn(b, b, r), torch.randn(b, r, p)
    rounded = quantize_blast(left, coupling, right)
    x = torch.randn(64, b * p)
    weight = torch.einsum("iqr,ijr,jrp->iqjp", left, coupling, right).reshape(b * q, b * p)
    error = rms(blast_int8(x, *rounded), x @ weight.T)
    assert 5e-3 < error < 1.8e-2
    of_weight = rounded.error(left, coupling, right)
    assert of_weight == pytest.approx(rms(rounded.to_dense(), weight), rel=1e-3)
    assert 5e-3 < of_weight < error


def test_uneven_ranks_are_evened_out() -> None:
    """What can move between left and the coupling changes nothing; ranks of a decaying spectrum
    are rounded as well as equal ones.
    """
    f = {key: value.float() for key, value in factors_for(Blast(3, 32), 48, 60).items()}
    once = quantize_blast(f["left"], f["coupling"], f["right"])
    d = torch.exp2(torch.randint(-3, 4, (3, 32)).float())
    moved = quantize_blast(f["left"] * d[:, None], f["coupling"] / d[:, None], f["right"])
    assert torch.equal(once.left, moved.left)
    for kept, other in zip(once, moved, strict=True):
        torch.testing.assert_close(other, kept)
    decay = f["right"] * torch.logspace(0, -2, 32)[None, :, None]
    assert quantize_blast(f["left"], f["coupling"], decay).error(
        f["left"], f["coupling"], decay
    ) < 1.05 * once.error(f["left"], f["coupling"], f["right"])


def test_couplings_keep_the_intermediate_within_fp16(device: torch.device) -> None:
    """The worst case: all integers are 127 and all couplings add up."""
    ones = [torch.ones(shape) for shape in ((3, 4, 32), (3, 3, 32), (3, 32, 300))]
    rounded = quantize_blast(*(1e3 * t for t in ones))
    assert rounded.coupling.float().abs().sum(1).max() == pytest.approx(1, abs=1e-3)
    x = torch.full((2, 900), 1e-4, device=device)
    y = blast_linear_int8(x, *(t.to(device) for t in rounded), backend=Backend.TRITON)
    torch.testing.assert_close(y, torch.full_like(y, 1e-4 * 900 * 32 * 1e9), rtol=2e-3, atol=0)


def test_zero_factors_give_zero() -> None:
    zeros = [torch.zeros(shape) for shape in ((2, 3, 4), (2, 2, 4), (2, 4, 5))]
    rounded = quantize_blast(*zeros)
    assert not any(t.isnan().any() for t in rounded)
    assert torch.count_nonzero(blast_linear_int8(torch.randn(3, 10), *rounded)) == 0
    assert rounded.error(*zeros) == 0


@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(with_bias: bool, device: torch.device) -> None:
    x, factors, bias = draw(3, 7, 11, 8, 6, torch.float32, device)
    arguments = (x.view(2, 3, -1), *factors, bias if with_bias else None, "gelu_tanh")
    torch.library.opcheck(int8._blast_int8_op, arguments)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_compiles_to_one_graph_once(backend: Backend, device: torch.device) -> None:
    x, factors, bias = draw(3, 7, 11, 8, 6, torch.float32, device)
    torch._dynamo.reset()
    counter = CompileCounter()

    def layer(x: Tensor) -> Tensor:
        return blast_linear_int8(x, *factors, bias, "gelu", backend=backend)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    first, second = compiled(x), compiled(x.clone())
    assert counter.frame_count == 1
    assert torch.equal(first, second)
    assert torch.equal(first, layer(x))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_autocast_casts_x_alone(backend: Backend, device: torch.device) -> None:
    x, factors, bias = draw(3, 7, 11, 8, 6, torch.float32, device)
    wanted = blast_linear_int8(x.bfloat16(), *factors, bias.bfloat16(), backend=backend)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = blast_linear_int8(x, *factors, bias, backend=backend)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_a_gradient_is_refused_in_words(backend: Backend, device: torch.device) -> None:
    x, factors, bias = draw(3, 7, 11, 8, 6, torch.float32, device)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=r"for inference.*no_grad.*got x that needs grad"):
        blast_linear_int8(x, *factors, bias, backend=backend)
    with torch.no_grad():
        assert not blast_linear_int8(x, *factors, bias, backend=backend).requires_grad
    y = int8._blast_int8_op(x, *factors, bias, None)
    with pytest.raises(RuntimeError, match="for inference"):
        y.sum().backward()


def test_errors_say_what_was_expected() -> None:
    x, (left, scale, coupling, right), bias = draw(3, 7, 11, 8, 6, torch.float32, "cpu")
    with pytest.raises(TypeError, match=r"left must have dtype int8, got torch.float32"):
        blast_linear_int8(x, left.float(), scale, coupling, right)
    with pytest.raises(TypeError, match=r"left_scale must have dtype float32"):
        blast_linear_int8(x, left, scale.half(), coupling, right)
    with pytest.raises(TypeError, match=r"bias must have the dtype of x"):
        blast_linear_int8(x, left, scale, coupling, right, bias.half())
    with pytest.raises(ValueError, match=r"left_scale must have shape \(3, 11\), got \(3, 10\)"):
        blast_linear_int8(x, left, scale[:, :10], coupling, right)
    with pytest.raises(ValueError, match=r"x must have shape \(..., 21\), got \(6, 20\)"):
        blast_linear_int8(x[:, :20], left, scale, coupling, right)
    with pytest.raises(ValueError, match="right must be on the device of x"):
        blast_linear_int8(x, left, scale, coupling, right.to("meta"))
    with pytest.raises(ValueError, match="coupling must be finite"):
        quantize_blast(torch.ones(2, 3, 4), torch.full((2, 2, 4), torch.nan), torch.ones(2, 4, 5))
    with pytest.raises(TypeError, match="must be a BlastLinear, got Linear"):
        Int8BlastLinear.from_blast(nn.Linear(3, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a Blast, got LowRank"):
        Int8BlastLinear(8, 8, LowRank(4))  # type: ignore[arg-type]


def blast_layer(n_in: int = 22, n_out: int = 31, **options: Any) -> BlastLinear:
    """A layer whose sizes three blocks do not divide."""
    layer = BLRLinear.create(n_in, n_out, Blast(3, 8), **options)
    assert isinstance(layer, BlastLinear)
    return layer.requires_grad_(False)


def test_module_takes_the_place_of_the_layer() -> None:
    layer = blast_layer(activation="gelu").eval()
    rounded = Int8BlastLinear.from_blast(layer)
    x = torch.randn(2, 50, 22)
    y = rounded(x)
    assert y.shape == (2, 50, 31)
    assert y.is_contiguous()
    assert rms(y, layer(x)) < 2e-2
    assert not rounded.training
    # The error counts the padding too.
    of_weight = rms(rounded.to_dense(), layer.to_dense())
    assert of_weight == pytest.approx(float(rounded.weight_error), rel=0.1)
    for part in (
        "22 -> 31",
        "BLAST b3 r8 in int8",
        "weight error 0.",
        "padded to 24 -> 33",
        "gelu",
    ):
        assert part in repr(rounded)
    with pytest.raises(ValueError, match=r"x must have shape \(..., 22\), got \(2, 24\)"):
        rounded(torch.randn(2, 24))


def test_module_state_survives_saving(tmp_path: Path) -> None:
    rounded = Int8BlastLinear.from_blast(blast_layer())
    torch.save(rounded.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["left"].dtype == state["right"].dtype == torch.int8
    empty = Int8BlastLinear(22, 31, Blast(3, 8))
    assert "weight error nan" in repr(empty)
    empty.load_state_dict(state)
    x = torch.randn(5, 22)
    assert torch.equal(empty(x), rounded(x))
    assert float(empty.weight_error) == float(rounded.weight_error)
    assert "weight error" not in repr(Int8BlastLinear(22, 31, Blast(3, 8), device="meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_casting_the_module_casts_the_bias_alone(dtype: torch.dtype) -> None:
    rounded = Int8BlastLinear.from_blast(blast_layer())
    before = {key: value.clone() for key, value in rounded.state_dict().items()}
    rounded.to(dtype)
    after = rounded.state_dict()
    assert after.pop("bias").dtype == dtype
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])
    assert rounded(torch.randn(5, 22, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(("n_out", "rank"), [(3456, 384), (4608, 256)])
def test_weights_are_half_of_16_bit_ones(n_out: int, rank: int) -> None:
    layer = Int8BlastLinear(1152, n_out, Blast(9, rank), device="meta")
    of_16_bits = Blast(9, rank).weight_bytes(1152, n_out, 2)
    assert layer.weight_bytes == sum(t.nbytes for t in layer.factors)
    assert 0.5 < layer.weight_bytes / of_16_bits < 0.53


def test_quantize_a_model_in_place() -> None:
    shared = blast_layer(20, 20)
    model = nn.Sequential(
        blast_layer(), nn.Sequential(shared, nn.Linear(20, 20), shared), nn.Linear(3, 3)
    )
    kept = model[0]
    reports = quantize_(model, lambda name, layer: name.startswith("1."))
    assert [report.name for report in reports] == ["1.0"]
    assert model[0] is kept
    assert isinstance(model[1][0], Int8BlastLinear)
    assert model[1][0] is model[1][2]
    assert reports[0].bytes_before == 4 * (2 * 3 * 7 * 8 + 3 * 3 * 8)
    assert reports[0].bytes_after == model[1][0].weight_bytes < reports[0].bytes_before
    assert reports[0].error == float(model[1][0].weight_error)
    assert set_backend_(model, Backend.TORCH) == 2
    assert model[1][0].backend is Backend.TORCH
    with pytest.raises(ValueError, match="no BlastLinear was found or chosen"):
        quantize_(model, lambda name, layer: False)
    with pytest.raises(ValueError, match="from_blast"):
        quantize_(kept)


def test_scratch_is_bounded_and_chunks_are_even() -> None:
    from blr_kernels.ops.triton_blast_int8 import default_config, make_scratch

    limits = DeviceLimits("", (9, 0), 227 * 1024, 132)

    def chunk_of(b: int, p: int, q: int, r: int, tokens: int) -> int:
        call = Call("blast_int8", tokens, b * p, b * q, b, r, torch.bfloat16, limits)
        scratch = make_scratch(call, default_config(call), torch.device("meta"))
        assert sum(t.nbytes for t in vars(scratch).values()) <= SCRATCH_BYTES
        return scratch.x.shape[0]

    for size in [*REAL.values(), (16, 256, 688, 1488), (2, 40_000, 3, 8)]:
        for tokens in (1, 100, 16_384, 100_000):
            assert 0 < chunk_of(*size, tokens) <= tokens
    assert chunk_of(*REAL["DiT qkv"], 16_384) == 8192


def test_candidates_hold_the_default_and_fit() -> None:
    from blr_kernels.ops.triton_blast_int8 import PATH

    for shared in (48, 99, 227):
        limits = DeviceLimits("", (9, 0), shared * 1024, 132)
        for b, p, q, r in REAL.values():
            for tokens in (1, 512, 16_384):
                call = Call("blast_int8", tokens, b * p, b * q, b, r, torch.bfloat16, limits)
                found = list(PATH.candidates(call))
                assert PATH.default_config(call) in found
                assert 1 < len(found) <= 12
                for c in found:
                    mix = (c["mix_rows"] + c["mix_tokens"]) * c["mix_inner"] * c["mix_stages"]
                    out = (
                        (c["product_rows"] + c["product_tokens"])
                        * c["mix_rows"]
                        * c["product_stages"]
                    )
                    assert max(mix, out) <= shared * 1024
    old = DeviceLimits("", (7, 5), 64 * 1024, 40)
    call = Call("blast_int8", 1, 8, 8, 2, 4, torch.float16, old)
    assert PATH.why_not(call) == "int8 products need compute capability 8.0, got 7.5"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("blr_compile_int8.py")), *map(str, TARGETS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    return rows


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_their_targets(compiled: list[dict[str, Any]], target: int) -> None:
    """Shared memory within the limit, no spills, 8-bit matrix instructions, the newest there."""
    rows = [row for row in compiled if row["target"] == target]
    assert len(rows) == (18 if target < 90 else 21)
    assert not [row for row in rows if row["shared"] > row["limit"]]
    # Triton 3.6's ptxas puts one address of a kernel for sm_80 there.
    assert not [row for row in rows if (row["stack"] or 0) > 8]
    for row in rows:
        if row["kernel"] == "int8_rows_kernel":
            continue
        assert row["waits"] == (target >= 90 and ("early" in row["what"] or row["tokens"] >= 4096))
        integer = [i for i in row["instructions"] if ".s8.s8" in i or "kind::i8" in i]
        assert integer == row["instructions"] != []
        if target == 90 and row["tokens"] > 16:
            assert all(i.startswith("wgmma") for i in integer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 197, 512, 4096])
@pytest.mark.parametrize("name", REAL)
@pytest.mark.usefixtures("nan_memory")
def test_layers_of_the_paper(name: str, tokens: int, dtype: torch.dtype) -> None:
    b, p, q, r = REAL[name]
    left, coupling, right = (
        torch.randn(shape, device="cuda") for shape in ((b, q, r), (b, b, r), (b, r, p))
    )
    right *= (r * b * p) ** -0.5
    bias = torch.randn(b * q, device="cuda").to(dtype)
    x = torch.randn(tokens, b * p, device="cuda").to(dtype)
    rounded = quantize_blast(left, coupling, right)
    y = blast_linear_int8(x, *rounded, bias, backend=Backend.AUTO)
    weight = torch.einsum("iqr,ijr,jrp->iqjp", left, coupling, right).reshape(b * q, b * p)
    assert rms(y, x.double() @ weight.T.double() + bias.double()) < 2e-2
    assert rms(y, blast_linear_int8(x, *rounded, bias, backend=Backend.TORCH)) < 6e-3
    assert torch.equal(y, blast_linear_int8(x, *rounded, bias, backend=Backend.AUTO))


@pytest.mark.gpu
def test_dependent_launches_give_the_same_bits() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("dependent launches need compute capability 9.0")
    x, factors, bias = draw(9, 128, 384, 384, 4096, torch.bfloat16, "cuda")
    plain = run_int8(x, factors, bias, early=0, chunk=1024)
    for _ in range(20):
        assert torch.equal(run_int8(x, factors, bias, early=1, chunk=1024), plain)


@pytest.mark.gpu
def test_candidates_compute_the_layer() -> None:
    from blr_kernels.ops.triton_blast_int8 import PATH

    for tokens in (2, 512, 2048):
        x, factors, bias = draw(9, 128, 384, 384, tokens, torch.bfloat16, "cuda")
        wanted = blast_int8(x, *factors, bias)
        for config in PATH.candidates(call_of("blast_int8", x, factors[0])):
            assert rms(run_int8(x, factors, bias, **config), wanted) < 1.2e-2


@pytest.mark.gpu
def test_measured_scratch_is_bounded() -> None:
    x, factors, bias = draw(9, 128, 384, 384, 16_384, torch.bfloat16, "cuda")
    blast_linear_int8(x, *factors, bias)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = blast_linear_int8(x, *factors, bias)
    extra = torch.cuda.max_memory_allocated() - before - y.nbytes
    assert extra <= SCRATCH_BYTES


@pytest.mark.gpu
def test_inductor_and_cuda_graphs() -> None:
    layer = BLRLinear.create(768, 2304, Blast(3, 128), device="cuda", dtype=torch.bfloat16)
    assert isinstance(layer, BlastLinear)
    rounded = Int8BlastLinear.from_blast(layer)
    x = torch.randn(197, 768, device="cuda", dtype=torch.bfloat16)
    wanted = rounded(x)
    torch._dynamo.reset()
    compiled = torch.compile(rounded, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        y = compiled(x).clone()
    assert torch.equal(y, wanted)
