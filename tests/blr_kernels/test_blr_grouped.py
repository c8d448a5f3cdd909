"""Grouped launches: many BLAST layers on one input, as an op and as a module over real layers."""

from __future__ import annotations

import copy

import pytest
import torch
from blr_expected import assert_close, dense, expected, factors_for
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from blr_kernels import Backend, Blast, BLRGroup, BLRLinear, LowRank, blast_linear_grouped
from blr_kernels.ops.blast_grouped import _grouped_op
from blr_kernels.reference import ACTIVATIONS

BACKENDS = [Backend.TORCH, Backend.TRITON]
STRUCTURE = Blast(3, 8)
N_IN, N_OUT = 21, 33


def draw(
    groups: int,
    structure: Blast,
    n_in: int,
    n_out: int,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, list[Tensor], Tensor, list[dict[str, Tensor]]]:
    """x, stacked factors in the op's order, bias, and the factors of each layer."""
    each = [factors_for(structure, n_in, n_out, seed=seed) for seed in range(groups)]
    each = [{name: factor.to(device, dtype) for name, factor in f.items()} for f in each]
    stacked = [torch.stack([f[name] for f in each]) for name in ("left", "coupling", "right")]
    x = torch.randn(*shape, n_in).to(device, dtype)
    return x, stacked, torch.randn(groups, n_out).to(device, dtype), each


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 16, 17, 33])
@pytest.mark.parametrize(
    ("groups", "b", "p", "q", "r"), [(3, 3, 7, 11, 8), (2, 9, 5, 4, 24), (5, 1, 9, 6, 3)]
)
@pytest.mark.usefixtures("nan_memory")
def test_matches_dense(
    groups: int, b: int, p: int, q: int, r: int, tokens: int, device: torch.device
) -> None:
    structure = Blast(b, r)
    x, factors, bias, each = draw(groups, structure, b * p, b * q, (tokens,), device)
    for used, activation in ((bias, "gelu"), (None, None)):
        y = blast_linear_grouped(x, *factors, used, activation, backend=Backend.TRITON)
        assert y.shape == (groups, tokens, b * q)
        assert y.is_contiguous()
        for k in range(groups):
            own = None if used is None else used[k]
            assert_close(y[k], expected(x, dense(structure, each[k]), own, activation))


@pytest.mark.parametrize("shape", [(), (2,), (2, 1, 3)])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)
def test_dimensions_of_x(shape: tuple[int, ...], backend: Backend, device: torch.device) -> None:
    x, factors, bias, each = draw(2, STRUCTURE, N_IN, N_OUT, shape, device)
    y = blast_linear_grouped(x, *factors, bias, "silu", backend=backend)
    for k in range(2):
        assert_close(y[k], expected(x, dense(STRUCTURE, each[k]), bias[k], "silu"))


def test_many_tokens_run_layer_by_layer(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blr_kernels.ops.blast_grouped.GROUPED_TOKENS", 32)
    x, factors, bias, each = draw(2, STRUCTURE, N_IN, N_OUT, (33,), device)
    for used in (bias, None):
        y = blast_linear_grouped(x, *factors, used, backend=Backend.TRITON)
        for k in range(2):
            own = None if used is None else used[k]
            assert_close(y[k], expected(x, dense(STRUCTURE, each[k]), own))


def test_nan_stays_in_its_token_and_layer(device: torch.device) -> None:
    x, factors, bias, _ = draw(3, STRUCTURE, N_IN, N_OUT, (4,), device)
    clean = blast_linear_grouped(x, *factors, bias, backend=Backend.TRITON)
    broken = [factors[0], factors[1], factors[2].clone()]
    broken[2][1] = torch.nan
    y = blast_linear_grouped(x, *broken, bias, backend=Backend.TRITON)
    assert y[1].isnan().all()
    assert torch.equal(y[::2], clean[::2])
    x[2] = torch.nan
    y = blast_linear_grouped(x, *factors, bias, backend=Backend.TRITON)
    others = torch.arange(4, device=device) != 2
    assert y[:, 2].isnan().all()
    assert torch.equal(y[:, others], clean[:, others])


@pytest.mark.parametrize(("with_bias", "activation"), [(False, None), (True, "gelu_tanh")])
def test_opcheck(with_bias: bool, activation: str | None, device: torch.device) -> None:
    x, factors, bias, _ = draw(2, STRUCTURE, N_IN, N_OUT, (2, 3), device)
    leaves = [tensor.requires_grad_() for tensor in (x, *factors)]
    arguments = (*leaves, bias.requires_grad_() if with_bias else None, activation)
    torch.library.opcheck(_grouped_op, arguments)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_are_those_of_the_reference(activation: str | None, device: torch.device) -> None:
    x, factors, bias, _ = draw(2, STRUCTURE, N_IN, N_OUT, (2, 3), device)
    leaves = [tensor.requires_grad_() for tensor in (x, *factors, bias)]
    grad = torch.randn(2, 2, 3, N_OUT, device=device)
    results = []
    for backend in BACKENDS:
        y = blast_linear_grouped(*leaves, activation, backend=backend)
        results.append(torch.autograd.grad(y, leaves, grad))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_one_gradient_alone(device: torch.device) -> None:
    x, factors, bias, _ = draw(2, STRUCTURE, N_IN, N_OUT, (3,), device)
    leaves = [x, *factors, bias]
    for leaf in leaves:
        leaf.requires_grad_()
        grads = []
        for backend in BACKENDS:
            y = blast_linear_grouped(*leaves, "silu", backend=backend)
            grads.append(torch.autograd.grad(y.square().sum(), leaf)[0])
        leaf.requires_grad_(False)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_errors_say_what_was_expected() -> None:
    x, factors, bias, _ = draw(2, STRUCTURE, N_IN, N_OUT, (3,), torch.device("cpu"))
    left, coupling, right = factors
    with pytest.raises(ValueError, match=r"left must have shape \(g, b, q, r\)"):
        blast_linear_grouped(x, left[0], coupling, right)
    with pytest.raises(ValueError, match=r"coupling must have shape \(2, 3, 3, 8\)"):
        blast_linear_grouped(x, left, coupling[:1], right)
    with pytest.raises(ValueError, match=r"right must have shape \(2, 3, 8, 7\)"):
        blast_linear_grouped(x, left, coupling, right[:1])
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 21\)"):
        blast_linear_grouped(x[:, 1:], left, coupling, right)
    with pytest.raises(ValueError, match=r"bias must have shape \(2, 33\)"):
        blast_linear_grouped(x, left, coupling, right, bias[0])
    with pytest.raises(ValueError, match="activation must be None or one of"):
        blast_linear_grouped(x, left, coupling, right, bias, "relu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="coupling must have the dtype of x"):
        blast_linear_grouped(x, left, coupling.half(), right)


class Three(nn.Module):
    """Layers where a model has them, and the group beside them."""

    def __init__(self, backend: Backend, n_in: int = N_IN, n_out: int = N_OUT) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            BLRLinear.create(n_in, n_out, STRUCTURE, activation="silu", backend=backend)
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
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)
def test_group_gives_what_its_layers_give(
    backend: Backend, n_in: int, device: torch.device
) -> None:
    model = Three(backend, n_in, N_OUT - (N_IN - n_in)).to(device).requires_grad_(False)
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


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)
def test_gradients_reach_every_layer(backend: Backend, device: torch.device) -> None:
    model = Three(backend).to(device)
    x = torch.randn(4, N_IN, device=device)
    sum(y.square().sum() for y in model(x)).backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sum(layer(x).square().sum() for layer in model.layers).backward()
    for a, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.value)
def test_compiles_to_one_graph_once(backend: Backend, device: torch.device) -> None:
    model = Three(backend).to(device).requires_grad_(False)
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
        (layer(bias=False), "bias"),
        (layer(activation="gelu"), "activation"),
        (layer(dtype=torch.float16), "dtype"),
        (layer(device="meta"), "device"),
    ):
        with pytest.raises(ValueError, match=f"layers must have the same {what}, got"):
            BLRGroup([layer(), other])
    with pytest.raises(TypeError, match="layers must be BlastLinear, got LowRankLinear"):
        BLRGroup([layer(structure=LowRank(4))])
    with pytest.raises(ValueError, match="at least one layer"):
        BLRGroup([])
    twice = layer()
    with pytest.raises(ValueError, match="got one of them twice"):
        BLRGroup([twice, twice])
    mixed = BLRGroup([layer(backend=Backend.TORCH), layer(backend=Backend.AUTO)])
    with pytest.raises(ValueError, match="layers must have one backend"):
        mixed(torch.randn(2, N_IN))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 16, 197])
def test_all_adaptive_norms_of_a_transformer(tokens: int) -> None:
    """DiT-XL/2's 28 layers 1152 -> 6912 at once, against each on its own."""
    structure, dtype = Blast(9, 256), torch.bfloat16
    layers = [
        BLRLinear.create(1152, 6912, structure, device="cuda", dtype=dtype).requires_grad_(False)
        for _ in range(28)
    ]
    before = torch.cuda.memory_allocated()
    group = BLRGroup(layers)
    assert torch.cuda.memory_allocated() <= before * 1.01
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
