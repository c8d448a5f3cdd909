"""Several layers of equal sizes on one input, as one launch of each kernel: what all ops share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_kernels.ops.backend import Backend, runs_on_triton
from blr_kernels.ops.backward import Gradients
from blr_kernels.ops.choice import choose
from blr_kernels.ops.paths import Call, call_of, execute, rows_of
from blr_kernels.ops.registration import define
from blr_kernels.reference import Activation

GROUPED_TOKENS = 1024
"""Most tokens of a grouped launch: with more, every layer fills the device on its own."""

_TILE = (64, 128)
"""Tokens and output features of a program that the faster kernels of one layer have at least."""

_GROUPED_ROW_TOKENS = {"low_rank": 64, "monarch": 16}
"""Tokens up to which these are bound by reading the weights, not by the products."""

Grouped = Callable[
    [Call, Tensor, tuple[Tensor, Tensor | None, Tensor], Tensor | None, Activation | None, Tensor],
    None,
]
"""Computes ``x (tokens, in)``, ``left (g, b, q, r)``, ``coupling (g, b, b, r)`` or None,
``right (g, b, r, p)``, ``bias (g, out)`` or None -> ``out (g, tokens, out)``, all contiguous.
"""


def _is_filled(call: Call) -> bool:
    """Whether one layer alone has a tile for more than every multiprocessor."""
    tokens, features = _TILE
    return -(-call.tokens // tokens) * -(-call.out_features // features) > call.device.sms


def _is_starved(call: Call, groups: int) -> bool:
    """Whether the path "small", of which a program walks a row of the input, has too few.

    Those of one tile of tokens are counted, each with 32 ranks.
    """
    return groups * -(-call.rank // 32) < call.device.sms


def _suits_library(call: Call, groups: int) -> bool:
    """Whether low rank in two products of cuBLAS is likely to be faster than the path "small"."""
    many = call.tokens > _GROUPED_ROW_TOKENS["low_rank"]
    return many or call.itemsize > 2 or _is_starved(call, groups)


def _suits_few(call: Call, groups: int) -> bool:
    """Whether the path "few" is likely to be faster than "small"."""
    if call.op != "low_rank":
        return True
    from blr_kernels.ops import few_paths

    return few_paths.FEW_LOW_RANK.suits(call) and _is_starved(call, groups)


def grouped_path(call: Call, groups: int, kernels_only: bool) -> tuple[str, Grouped] | None:
    """What computes ``groups`` layers at once, by name; None if each had better go alone.

    Args:
        call: a call of one of the layers.
        groups: how many there are.
        kernels_only: leave out what calls PyTorch's library.
    """
    if call.tokens > GROUPED_TOKENS or (call.op != "blast" and _is_filled(call)):
        return None
    if call.op == "monarch" and call.tokens > _GROUPED_ROW_TOKENS["monarch"]:
        return None
    from blr_kernels.ops import cublas_low_rank, few_paths

    low_rank = call.op == "low_rank"
    if not few_paths.why_not_few(call) and _suits_few(call, groups):
        sizes = few_paths.few_config(call, groups)
        return "few", functools.partial(few_paths.run_few, config=sizes)
    if low_rank and not kernels_only and _suits_library(call, groups):
        return "cublas", cublas_low_rank.run_grouped
    if few_paths.why_not_small(call):
        return None
    sizes = few_paths.small_config(call, groups)
    return "small", functools.partial(few_paths.run_small, config=sizes)


def _run(
    op: str,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    kernels_only: bool,
    out: Tensor,
) -> None:
    """``x (..., in)``, factors of a layer behind a leading g, ``bias (g, out)`` ->
    ``out (g, ..., out)``.
    """
    groups = out.shape[0]
    rows = rows_of(x)
    call = call_of(op, rows, factors[0][0])
    y = out.view(groups, call.tokens, call.out_features)
    found = grouped_path(call, groups, kernels_only)
    if found is None:
        choice = choose(call, kernels_only)
        for k in range(groups):
            own = tuple(factor[k] for factor in factors)
            of_bias = None if bias is None else bias[k]
            execute(choice.path, call, rows, own, of_bias, activation, y[k], choice.config)
        return
    by_group = None if bias is None else bias.contiguous()
    left, *couplings, right = (factor.contiguous() for factor in factors)
    if op == "low_rank":
        left, right = left[:, None], right[:, None]
    stacked = left, couplings[0] if couplings else None, right
    with torch.cuda.device_of(x):
        found[1](call, rows, stacked, by_group, activation, y)


def register_grouped(
    op: str, factors: Sequence[str], gradients: Callable[..., Gradients]
) -> torch._ops.OpOverload:
    """Registers ``blr_kernels::<op>_linear_grouped``; arguments as of ``registration.register``,
    every factor and the bias with a leading g.
    """

    def run(*arguments: Any) -> None:
        _run(op, *arguments)

    def output(x: Tensor, left: Tensor) -> Tensor:
        return x.new_empty((left.shape[0], *x.shape[:-1], math.prod(left.shape[1:-1])))

    def of_all(grad: Tensor, x: Tensor, *others: Any) -> Gradients:
        *stacked, needs = others
        by_layer = [
            gradients(grad[k], x, *(factor[k] for factor in stacked), needs)
            for k in range(grad.shape[0])
        ]
        d_x, *d_factors = (
            torch.stack([gradient for gradient in found if gradient is not None])
            if needed
            else None
            for found, needed in zip(zip(*by_layer, strict=True), needs, strict=True)
        )
        return None if d_x is None else d_x.sum(0), *d_factors

    return define(f"{op}_linear_grouped", factors, run, output, of_all, lead=1)


def compute(
    overload: torch._ops.OpOverload,
    reference: Callable[..., Tensor],
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    backend: Backend,
) -> Tensor:
    """The registered op where the package's kernels run, else the reference layer by layer.

    Args:
        overload: what ``register_grouped`` returned.
        reference: of one layer.
        x, factors, bias, activation: the op's, already checked.
        backend: what was asked for.
    """
    if runs_on_triton(backend, x.device, x.dtype):
        return overload(x, *factors, bias, activation, backend is Backend.TRITON)
    biases = [None] * len(factors[0]) if bias is None else bias.unbind()
    layers = zip(zip(*factors, strict=True), biases, strict=True)
    return torch.stack([reference(x, *own, of_bias, activation) for own, of_bias in layers])
