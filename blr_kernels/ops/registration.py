"""Registers an op with PyTorch: schema, kernels, shapes and gradients, the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_kernels.ops.backward import Gradients, activation_gradient
from blr_kernels.ops.choice import choose
from blr_kernels.ops.paths import call_of, execute, output_like, rows_of
from blr_kernels.reference import Activation

Run = Callable[[Tensor, tuple[Tensor, ...], Tensor | None, Activation | None, bool, Tensor], None]
"""``run(x, factors, bias, activation, kernels_only, out)`` fills out, which is not empty."""


def define(
    name: str,
    factors: Sequence[str],
    run: Run,
    output: Callable[[Tensor, Tensor], Tensor],
    gradients: Callable[..., Gradients],
    lead: int = 0,
) -> torch._ops.OpOverload:
    """Registers ``blr_kernels::<name>(x, *factors, bias, activation, kernels_only=False)``.

    Args:
        name: of the op.
        factors: names of the factors in order, ``left`` first.
        run: computes it.
        output: x and left -> an empty output, contiguous.
        gradients: ``gradients(grad, x, *factors, needs)`` as in ``blr_kernels.ops.backward``.
        lead: dimensions of the output before the tokens, which the bias has as well.
    """
    qualified = f"blr_kernels::{name}"
    count = len(factors)
    tensors = ", ".join(f"Tensor {factor}" for factor in ("x", *factors))
    torch.library.define(
        qualified,
        f"({tensors}, Tensor? bias, str? activation, bool kernels_only=False) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
    )
    overload: torch._ops.OpOverload = getattr(torch.ops.blr_kernels, name).default

    # An argument that has its default is left out of what these two get.
    def forward(x: Tensor, *others: Any) -> Tensor:
        out = output(x, others[0])
        if out.numel() > 0:
            bias, activation, *rest = others[count:]
            run(x, others[:count], bias, activation, bool(rest and rest[0]), out)
        return out

    def fake(x: Tensor, *others: Any) -> Tensor:
        return output(x, others[0])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *saved, bias, ctx.activation, ctx.kernels_only = inputs
        # The bias is only needed to compute the activation's argument again.
        ctx.save_for_backward(*saved, None if ctx.activation is None else bias)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if ctx.activation is not None:
            pre = overload(*saved, bias, None, ctx.kernels_only)
            grad = activation_gradient(grad, pre, ctx.activation)
        found = gradients(grad, *saved, needs[: count + 1])
        d_bias = None
        if needs[count + 1]:
            d_bias = grad.reshape(*grad.shape[:lead], -1, grad.shape[-1]).sum(lead)
        return *found, d_bias, None, None

    torch.library.impl(qualified, ("cpu", "cuda"))(forward)
    torch.library.register_fake(qualified)(fake)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    return overload


def register(
    op: str, factors: Sequence[str], gradients: Callable[..., Gradients]
) -> torch._ops.OpOverload:
    """Registers ``blr_kernels::<op>_linear(x, *factors, bias, activation, kernels_only=False)``.

    It runs on the path that ``choose`` names for the call; ``kernels_only`` leaves out those that
    call PyTorch's library.

    Args:
        op: "blast", "monarch" or "low_rank".
        factors: names of the factors in order, ``left`` first: ``(b, q, r)`` or ``(out, r)``.
        gradients: ``gradients(grad, x, *factors, needs)`` of ``blr_kernels.ops.backward``.
    """

    def run(
        x: Tensor,
        factors: tuple[Tensor, ...],
        bias: Tensor | None,
        activation: Activation | None,
        kernels_only: bool,
        out: Tensor,
    ) -> None:
        rows = rows_of(x)
        call = call_of(op, rows, factors[0])
        choice = choose(call, kernels_only)
        y = out.view(call.tokens, call.out_features)
        execute(choice.path, call, rows, factors, bias, activation, y, choice.config)

    return define(f"{op}_linear", factors, run, output_like, gradients)
