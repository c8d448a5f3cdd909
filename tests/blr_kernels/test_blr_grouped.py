"""Grouped launches: many layers on one input, as ops and as a module over real layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from blr_expected import assert_close, dense, expected, factors_for
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from blr_kernels import (
    Backend,
    Blast,
    BLRGroup,
    BLRLinear,
    LowRank,
    Monarch,
    Structure,
    blast_linear_grouped,
    low_rank_linear_grouped,
    monarch_linear_grouped,
)
from blr_kernels.ops import blast_grouped, grouped, low_rank_grouped, monarch_grouped
from blr_kernels.ops.paths import Call, DeviceLimits
from blr_kernels.reference import ACTIVATIONS

BACKENDS = [Backend.TORCH, Backend.TRITON]
N_IN, N_OUT = 21, 33
STRUCTURE = Blast(3, 8)
STRUCTURES: list[Structure] = [STRUCTURE, LowRank(8), Monarch(3, 9)]
H200 = DeviceLimits("test", (9, 0), 227 * 1024, 132)

OPS: dict[str, Callable[..., Tensor]] = {
    "blast": blast_linear_grouped,
    "low_rank": low_rank_linear_grouped,
    "monarch": monarch_linear_grouped,
}
OVERLOADS = {
    "blast": blast_grouped._grouped_op,
    "low_rank": low_rank_grouped._grouped_op,
    "monarch": monarch_grouped._grouped_op,
}

each_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.kind)
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)


def draw(
    groups: int,
    structure: Structure,
    n_in: int,
    n_out: int,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, list[Tensor], Tensor, list[dict[str, Tensor]]]:
    """x, stacked factors in the op's order, bias, and the factors of each layer."""
    each = [factors_for(structure, n_in, n_out, seed=seed) for seed in range(groups)]
    each = [{name: factor.to(device, dtype) for name, factor in f.items()} for f in each]
    names = [name for name in ("left", "coupling", "right") if name in each[0]]
    stacked = [torch.stack([f[name] for f in each]) for name in names]
    x = torch.randn(*shape, n_in).to(device, dtype)
    return x, stacked, torch.randn(groups, n_out).to(device, dtype), each


def call_for(
    structure: Structure, n_in: int, n_out: int, tokens: int, dtype: torch.dtype = torch.bfloat16
) -> Call:
    """A call of one layer on an H200."""
    blocks = 1 if isinstance(structure, LowRank) else structure.blocks
    return Call(structure.kind, tokens, n_in, n_out, blocks, structure.rank, dtype, H200)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 16, 17, 33])
@pytest.mark.parametrize(
    ("groups", "structure", "p", "q"),
    [
        (3, Blast(3, 8), 7, 11),
        (2, Blast(9, 24), 5, 4),
        (5, Blast(1, 3), 9, 6),
        (1, LowRank(5), 33, 17),
        (3, LowRank(24), 37, 70),
        (1, Monarch(3, 9), 7, 11),
        (3, Monarch(4, 20), 5, 6),
        (2, Monarch(1, 3), 9, 6),
        (2, Monarch(5, 70), 66, 3),
    ],
    ids=str,
)
@pytest.mark.usefixtures("nan_memory")
def test_matches_dense(
    groups: int, structure: Structure, p: int, q: int, tokens: int, device: torch.device
) -> None:
    b = 1 if isinstance(structure, LowRank) else structure.blocks
    x, factors, bias, each = draw(groups, structure, b * p, b * q, (tokens,), device)
    weights = [dense(structure, factors) for factors in each]
    for used, activation in ((bias, "gelu"), (None, None)):
        y = OPS[structure.kind](x, *factors, used, activation, backend=Backend.TRITON)
        assert y.shape == (groups, tokens, b * q)
        assert y.is_contiguous()
        for k in range(groups):
            own = None if used is None else used[k]
            assert_close(y[k], expected(x, weights[k], own, activation))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [2, 16, 17])
@each_structure
@pytest.mark.usefixtures("nan_memory")
def test_half_precision(
    structure: Structure,
    tokens: int,
    dtype: torch.dtype,
    activation: str | None,
    device: torch.device,
) -> None:
    x, factors, bias, each = draw(3, structure, N_IN, N_OUT, (tokens,), device, dtype)
    y = OPS[structure.kind](x, *factors, bias, activation, backend=Backend.TRITON)
    assert y.dtype is dtype
    # The interpreter cuts fp32 to bfloat16 instead of rounding it.
    slack = 4.0 if dtype is torch.bfloat16 and device.type == "cpu" else 1.0
    for k in range(3):
        wanted = expected(x, dense(structure, each[k]), bias[k], activation)
        assert_close(y[k], wanted, slack=slack)


@pytest.mark.parametrize("tokens", [3, 17, 70])
@pytest.mark.parametrize("structure", [Blast(3, 66), LowRank(66), Monarch(3, 66)], ids=str)
@pytest.mark.usefixtures("nan_memory")
def test_sizes_of_larger_devices_give_the_same(
    structure: Structure, tokens: int, device: torch.device
) -> None:
    """As many layers as there would have to be for each form of the kernels, on few of them."""
    from blr_kernels.ops import few_paths

    n_in, n_out, groups = 3 * 70, 3 * 20, 2
    x, factors, bias, each = draw(groups, structure, n_in, n_out, (tokens,), device)
    weights = [dense(structure, factors) for factors in each]
    own = replace(call_for(structure, n_in, n_out, tokens, x.dtype), device=limits(device))
    coupling = factors[1] if len(factors) == 3 else None
    left, right = factors[0], factors[-1]
    if isinstance(structure, LowRank):
        left, right = left[:, None], right[:, None]
    configs = []
    for dtype, many in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2000)):
        there = call_for(structure, n_in, n_out, tokens, dtype)
        if tokens <= 4:
            configs.append((few_paths.run_few, few_paths.few_config(there, many)))
        configs.append((few_paths.run_small, few_paths.small_config(there, many)))
    assert tokens > 4 or {config.get("product_dot") for _, config in configs} == {None, 0, 1}
    for run, config in configs:
        y = torch.full((groups, tokens, n_out), torch.nan, device=device)
        run(own, x, (left, coupling, right), bias, "silu", y, config)
        for k in range(groups):
            assert_close(y[k], expected(x, weights[k], bias[k], "silu"))


def limits(device: torch.device) -> DeviceLimits:
    from blr_kernels.ops.paths import limits_of

    return limits_of(device)


@pytest.mark.parametrize("scratch", [None, 4096])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [17, 33])
@pytest.mark.usefixtures("nan_memory")
def test_low_rank_by_the_library(
    tokens: int,
    dtype: torch.dtype,
    activation: str | None,
    scratch: int | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two products for all layers, in chunks of tokens where they need much scratch."""
    if scratch is not None:
        monkeypatch.setattr("blr_kernels.ops.triton_config.SCRATCH_BYTES", scratch)
    monkeypatch.setitem(grouped._GROUPED_ROW_TOKENS, "low_rank", 16)
    structure = LowRank(24)
    x, factors, bias, each = draw(3, structure, 37, 70, (tokens,), device, dtype)
    calls = []
    run = "blr_kernels.ops.cublas_low_rank.run_grouped"
    from blr_kernels.ops.cublas_low_rank import run_grouped

    monkeypatch.setattr(run, lambda *given: (calls.append(given), run_grouped(*given)))
    for used in (bias, None):
        y = OVERLOADS["low_rank"](x, *factors, used, activation)
        for k in range(3):
            own = None if used is None else used[k]
            # The activation takes what was rounded already.
            wanted = expected(x, dense(structure, each[k]), own, activation)
            assert_close(y[k], wanted, slack=1.0 if dtype is torch.float32 else 1.5)
    assert len(calls) == 2
    kept = low_rank_linear_grouped(x, *factors, bias, activation, backend=Backend.TRITON)
    assert len(calls) == 2
    assert kept.shape == y.shape


@pytest.mark.parametrize(
    ("structure", "sizes", "tokens", "taken"),
    [
        (Blast(9, 256), (1152, 6912), 2, "few"),
        (Blast(9, 256), (1152, 6912), 16, "small"),
        (Blast(9, 256), (1152, 6912), 1024, "small"),
        (Blast(9, 256), (1152, 6912), 1025, None),
        (Blast(72, 256), (1152, 6912), 16, None),
        (LowRank(256), (1152, 6912), 2, "small"),
        (LowRank(256), (1152, 6912), 64, "small"),
        (LowRank(256), (1152, 6912), 65, "cublas"),
        (LowRank(256), (1152, 6912), 197, None),
        (LowRank(128), (11008, 4096), 2, "cublas"),
        (LowRank(128), (768, 768), 16, "few"),
        (LowRank(128), (768, 768), 197, "cublas"),
        (Monarch(4, 128), (1152, 6912), 2, "few"),
        (Monarch(4, 128), (1152, 6912), 16, "small"),
        (Monarch(4, 128), (1152, 6912), 17, None),
        (Monarch(4, 128), (768, 768), 16, "small"),
        (Monarch(4, 128), (768, 768), 197, None),
        (Monarch(96, 96), (1152, 6912), 2, None),
    ],
    ids=str,
)
def test_what_takes_all_layers(
    structure: Structure, sizes: tuple[int, int], tokens: int, taken: str | None
) -> None:
    pytest.importorskip("triton")
    from blr_kernels.ops.grouped import grouped_path

    call = call_for(structure, *sizes, tokens)
    found = grouped_path(call, 28, False)
    assert (None if found is None else found[0]) == taken
    kernels = grouped_path(call, 28, True)
    instead = "small" if taken == "cublas" else taken
    assert (None if kernels is None else kernels[0]) == instead
    if isinstance(structure, LowRank) and taken == "small":
        in_fp32 = grouped_path(replace(call, dtype=torch.float32), 28, False)
        assert in_fp32 is not None
        assert in_fp32[0] == "cublas"


@pytest.mark.parametrize("shape", [(), (2,), (2, 1, 3)])
@each_backend
@each_structure
def test_dimensions_of_x(
    structure: Structure, shape: tuple[int, ...], backend: Backend, device: torch.device
) -> None:
    x, factors, bias, each = draw(2, structure, N_IN, N_OUT, shape, device)
    y = OPS[structure.kind](x, *factors, bias, "silu", backend=backend)
    for k in range(2):
        assert_close(y[k], expected(x, dense(structure, each[k]), bias[k], "silu"))


@pytest.mark.parametrize("tokens", [3, 17])
@each_structure
def test_operands_that_are_not_contiguous(
    structure: Structure, tokens: int, device: torch.device
) -> None:
    _, factors, bias, each = draw(2, structure, N_IN, N_OUT, (1,), device)
    strided = [factor.mT.contiguous().mT for factor in factors]
    for x in (
        torch.randn(tokens, 2 * N_IN, device=device)[:, N_IN:],
        torch.randn(N_IN, tokens, device=device).t(),
        torch.randn(1, N_IN, device=device).expand(tokens, N_IN),
    ):
        y = OPS[structure.kind](x, *strided, bias.t().contiguous().t(), backend=Backend.TRITON)
        for k in range(2):
            assert_close(y[k], expected(x, dense(structure, each[k]), bias[k]))


@each_structure
def test_many_tokens_run_layer_by_layer(
    structure: Structure, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blr_kernels.ops.grouped.GROUPED_TOKENS", 32)
    x, factors, bias, each = draw(2, structure, N_IN, N_OUT, (33,), device)
    for used in (bias, None):
        y = OPS[structure.kind](x, *factors, used, backend=Backend.TRITON)
        for k in range(2):
            own = None if used is None else used[k]
            assert_close(y[k], expected(x, dense(structure, each[k]), own))


@pytest.mark.parametrize("tokens", [4, 18])
@each_structure
def test_nan_stays_in_its_token_and_layer(
    structure: Structure, tokens: int, device: torch.device
) -> None:
    grouped = OPS[structure.kind]
    x, factors, bias, _ = draw(3, structure, N_IN, N_OUT, (tokens,), device)
    clean = grouped(x, *factors, bias, backend=Backend.TRITON)
    assert torch.equal(clean, grouped(x, *factors, bias, backend=Backend.TRITON))
    broken = [*factors[:-1], factors[-1].clone()]
    broken[-1][1] = torch.nan
    y = grouped(x, *broken, bias, backend=Backend.TRITON)
    assert y[1].isnan().all()
    assert torch.equal(y[::2], clean[::2])
    x[2] = torch.nan
    y = grouped(x, *factors, bias, backend=Backend.TRITON)
    others = torch.arange(tokens, device=device) != 2
    assert y[:, 2].isnan().all()
    assert torch.equal(y[:, others], clean[:, others])


@pytest.mark.parametrize(
    ("with_bias", "activation", "more"),
    [(False, None, ()), (True, "gelu_tanh", ()), (True, "silu", (True,))],
)
@each_structure
def test_opcheck(
    structure: Structure,
    with_bias: bool,
    activation: str | None,
    more: tuple[bool, ...],
    device: torch.device,
) -> None:
    x, factors, bias, _ = draw(2, structure, N_IN, N_OUT, (2, 3), device)
    leaves = [tensor.requires_grad_() for tensor in (x, *factors)]
    arguments = (*leaves, bias.requires_grad_() if with_bias else None, activation, *more)
    torch.library.opcheck(OVERLOADS[structure.kind], arguments)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@each_structure
def test_gradients_are_those_of_the_reference(
    structure: Structure, activation: str | None, device: torch.device
) -> None:
    x, factors, bias, _ = draw(2, structure, N_IN, N_OUT, (2, 3), device)
    leaves = [tensor.requires_grad_() for tensor in (x, *factors, bias)]
    grad = torch.randn(2, 2, 3, N_OUT, device=device)
    results = []
    for backend in BACKENDS:
        y = OPS[structure.kind](*leaves, activation, backend=backend)
        results.append(torch.autograd.grad(y, leaves, grad))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@each_structure
def test_one_gradient_alone(structure: Structure, device: torch.device) -> None:
    x, factors, bias, _ = draw(2, structure, N_IN, N_OUT, (3,), device)
    leaves = [x, *factors, bias]
    for leaf in leaves:
        leaf.requires_grad_()
        grads = []
        for backend in BACKENDS:
            y = OPS[structure.kind](*leaves, "silu", backend=backend)
            grads.append(torch.autograd.grad(y.square().sum(), leaf)[0])
        leaf.requires_grad_(False)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("structure", "left_layout", "right_layout", "right_shape"),
    [
        (STRUCTURES[0], r"\(g, b, q, r\)", r"\(g, b, r, p\)", r"\(2, 3, 8, 7\)"),
        (STRUCTURES[1], r"\(g, out, r\)", r"\(g, r, in\)", r"\(2, 8, 21\)"),
        (STRUCTURES[2], r"\(g, b, q, r\)", r"\(g, b, r, p\)", r"\(2, 3, 9, 7\)"),
    ],
    ids=lambda s: getattr(s, "kind", None),
)
def test_errors_say_what_was_expected(
    structure: Structure, left_layout: str, right_layout: str, right_shape: str
) -> None:
    grouped = OPS[structure.kind]
    x, factors, bias, _ = draw(2, structure, N_IN, N_OUT, (3,), torch.device("cpu"))
    left, *middle, right = factors
    with pytest.raises(ValueError, match=f"left must have shape {left_layout}"):
        grouped(x, left[0], *middle, right)
    with pytest.raises(ValueError, match=f"right must have shape {right_layout}"):
        grouped(x, left, *middle, right[0])
    with pytest.raises(ValueError, match=f"right must have shape {right_shape}"):
        grouped(x, left, *middle, right[:1])
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 21\)"):
        grouped(x[:, 1:], *factors)
    with pytest.raises(ValueError, match=r"bias must have shape \(2, 33\)"):
        grouped(x, *factors, bias[0])
    with pytest.raises(ValueError, match="activation must be None or one of"):
        grouped(x, *factors, bias, "relu")
    with pytest.raises(TypeError, match="left must have the dtype of x"):
        grouped(x, left.half(), *middle, right)


def test_errors_of_one_op() -> None:
    x, factors, _, _ = draw(2, STRUCTURE, N_IN, N_OUT, (3,), torch.device("cpu"))
    left, coupling, right = factors
    with pytest.raises(ValueError, match=r"coupling must have shape \(2, 3, 3, 8\)"):
        blast_linear_grouped(x, left, coupling[:1], right)
    with pytest.raises(ValueError, match="left's rank must be a multiple of blocks = 3, got 8"):
        monarch_linear_grouped(x, left, right)


class Three(nn.Module):
    """Layers where a model has them, and the group beside them."""

    def __init__(
        self,
        backend: Backend,
        n_in: int = N_IN,
        n_out: int = N_OUT,
        structure: Structure = STRUCTURE,
    ) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            BLRLinear.create(n_in, n_out, structure, activation="silu", backend=backend)
            for _ in range(3)
        )
        self.group = BLRGroup([self.first, self.second, self.third])

    @property
    def layers(self) -> list[BLRLinear]:
        return [self.first, self.second, self.third]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.group(x)


def storages(module: nn.Module) -> int:
    """Bytes of the different storages behind the parameters."""
    found = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in module.parameters()}
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("n_in", [N_IN, N_IN - 1], ids=["fits", "padded"])
@each_backend
@each_structure
def test_group_gives_what_its_layers_give(
    structure: Structure, backend: Backend, n_in: int, device: torch.device
) -> None:
    model = Three(backend, n_in, N_OUT - (N_IN - n_in), structure).to(device).requires_grad_(False)
    x = torch.randn(2, 3, n_in, device=device)
    together = model(x)
    assert isinstance(together, tuple)
    for y, layer in zip(together, model.layers, strict=True):
        torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-6)
    assert model.group.is_stacked()
    assert len({y.untyped_storage().data_ptr() for y in together}) == 1


def test_memory_is_counted_once_and_state_dicts_stay() -> None:
    torch.manual_seed(1)
    model = Three(Backend.TORCH)
    names = [
        f"{layer}.{name}"
        for layer in ("first", "second", "third")
        for name in ("left", "coupling", "right", "bias")
    ]
    assert sorted(model.state_dict()) == sorted(names)
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    assert not list(model.buffers())
    assert storages(model) == sum(p.numel() * p.element_size() for p in model.parameters())

    other = Three(Backend.TORCH)
    other.load_state_dict(model.state_dict())
    assert other.group.is_stacked()
    x = torch.randn(3, N_IN)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model(x), other(x), strict=True))


def test_moved_layers_are_stacked_again() -> None:
    model = Three(Backend.TORCH).requires_grad_(False)
    x = torch.randn(3, N_IN)
    before = model(x)
    model.to(torch.float64)
    assert not model.group.is_stacked()
    after = model(x.double())
    assert model.group.is_stacked()
    assert storages(model) == sum(p.numel() * p.element_size() for p in model.parameters())
    for a, b in zip(before, after, strict=True):
        assert b.dtype is torch.float64
        torch.testing.assert_close(b.float(), a, rtol=1e-4, atol=1e-5)

    # One layer alone gets other memory, behind the group's back.
    state = {name: value.clone() + 1 for name, value in model.second.state_dict().items()}
    model.second.load_state_dict(state, assign=True)
    assert not model.group.is_stacked()
    model.requires_grad_(False)
    y = model(x.double())
    assert model.group.is_stacked()
    torch.testing.assert_close(y[1], model.second(x.double()))
    torch.testing.assert_close(y[0], after[0])

    model.second.half()
    with pytest.raises(ValueError, match=r"same dtype, got torch\.float64 and torch\.float16"):
        model(x.double())


def test_a_copy_has_memory_of_its_own() -> None:
    model = Three(Backend.TORCH).requires_grad_(False)
    copied = copy.deepcopy(model)
    assert copied.group.layers[0] is copied.first
    x = torch.randn(3, N_IN)
    wanted = model(x)
    copied.first.left.zero_()
    assert all(torch.equal(a, b) for a, b in zip(model(x), wanted, strict=True))
    y = copied(x)
    torch.testing.assert_close(y[0], copied.first(x))
    torch.testing.assert_close(y[1], wanted[1])


@each_backend
@each_structure
def test_gradients_reach_every_layer(
    structure: Structure, backend: Backend, device: torch.device
) -> None:
    model = Three(backend, structure=structure).to(device)
    x = torch.randn(4, N_IN, device=device)
    sum(y.square().sum() for y in model(x)).backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sum(layer(x).square().sum() for layer in model.layers).backward()
    for a, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad, rtol=1e-4, atol=1e-5)


@each_backend
@each_structure
def test_compiles_to_one_graph_once(
    structure: Structure, backend: Backend, device: torch.device
) -> None:
    model = Three(backend, structure=structure).to(device).requires_grad_(False)
    x = torch.randn(3, N_IN, device=device)
    wanted = model(x)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        for a, b in zip(compiled(x.clone()), wanted, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_unequal_layers_are_refused() -> None:
    def layer(n_in: int = N_IN, structure: object = STRUCTURE, **options: object) -> BLRLinear:
        return BLRLinear.create(n_in, N_OUT, structure, **options)  # type: ignore[arg-type]

    for other, what in (
        (layer(24), "sizes"),
        (layer(structure=Blast(3, 5)), "structure"),
        (layer(structure=LowRank(8)), "structure"),
        (layer(bias=False), "bias"),
        (layer(activation="gelu"), "activation"),
        (layer(dtype=torch.float16), "dtype"),
        (layer(device="meta"), "device"),
    ):
        with pytest.raises(ValueError, match=f"layers must have the same {what}, got"):
            BLRGroup([layer(), other])
    with pytest.raises(TypeError, match="layers must be BLRLinear, got Linear"):
        BLRGroup([nn.Linear(N_IN, N_OUT)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one layer"):
        BLRGroup([])
    twice = layer()
    with pytest.raises(ValueError, match="got one of them twice"):
        BLRGroup([twice, twice])
    mixed = BLRGroup([layer(backend=Backend.TORCH), layer(backend=Backend.AUTO)])
    with pytest.raises(ValueError, match="layers must have one backend"):
        mixed(torch.randn(2, N_IN))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 16, 64, 197])
@pytest.mark.parametrize("structure", [Blast(9, 256), LowRank(256), Monarch(4, 128)], ids=str)
@pytest.mark.usefixtures("nan_memory")
def test_all_adaptive_norms_of_a_transformer(structure: Structure, tokens: int) -> None:
    """DiT-XL/2's 28 layers 1152 -> 6912 at once, against each on its own."""
    dtype = torch.bfloat16
    layers = [
        BLRLinear.create(1152, 6912, structure, device="cuda", dtype=dtype).requires_grad_(False)
        for _ in range(28)
    ]
    # What is asked for: the allocator may hand out up to 1 MiB more.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    group = BLRGroup(layers)
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] <= before * 1.01
    x = torch.randn(tokens, 1152, device="cuda", dtype=dtype)
    together = group(x)
    for y, layer in zip(together, layers, strict=True):
        assert_close(y, x.double() @ layer.to_dense().double().T + layer.bias.double(), slack=2.0)
    again = group(x)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))


def test_a_copied_group_stacks_its_own_parameters() -> None:
    """A deep copy's parameters are no views of the original's storage, compiled or not."""
    layers = [BLRLinear.create(8, 12, Blast(2, 4)).requires_grad_(False) for _ in range(2)]
    group = BLRGroup(layers)
    x = torch.randn(3, 8)
    group(x)
    twin = copy.deepcopy(group)
    for layer in twin.layers:
        for parameter in layer.parameters():
            parameter.zero_()
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert all(torch.count_nonzero(y) == 0 for y in compiled(x))
        assert all(torch.count_nonzero(y) > 0 for y in group(x))
