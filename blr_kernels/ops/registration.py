"""Registers an op with PyTorch: schema, kernels, shapes and gradients, the same for all three."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_kernels.ops.backward import Gradients, activation_gradient
from blr_kernels.ops.choice import choose
from blr_kernels.ops.paths import call_of, execute, output_like, rows_of


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
    name = f"blr_kernels::{op}_linear"
    count = len(factors)
    tensors = ", ".join(f"Tensor {factor}" for factor in ("x", *factors))
    torch.library.define(
        name,
        f"({tensors}, Tensor? bias, str? activation, bool kernels_only=False) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
    )
    overload: torch._ops.OpOverload = getattr(torch.ops.blr_kernels, f"{op}_linear").default

    # An argument that has its default is left out of what these two get.
    def forward(x: Tensor, *others: Any) -> Tensor:
        out = output_like(x, others[0])
        if out.numel() == 0:
            return out
        bias, activation, *rest = others[count:]
        rows = rows_of(x)
        call = call_of(op, rows, others[0])
        choice = choose(call, *rest)
        execute(
            choice.path,
            call,
            rows,
            others[:count],
            bias,
            activation,
            out.view(call.tokens, call.out_features),
            choice.config,
        )
        return out

    def fake(x: Tensor, *others: Any) -> Tensor:
        return output_like(x, others[0])

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
        d_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs[count + 1] else None
        return *found, d_bias, None, None

    torch.library.impl(name, ("cpu", "cuda"))(forward)
    torch.library.register_fake(name)(fake)
    torch.library.register_autograd(name, backward, setup_context=setup_context)
    return overload
