"""Low rank: ``y = activation(x @ right.T @ left.T + bias)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_kernels import reference
from blr_kernels.ops.backend import Backend, runs_on_triton
from blr_kernels.ops.backward import activation_gradient, low_rank_gradients
from blr_kernels.ops.checks import (
    autocast,
    check_activation,
    check_dims,
    check_input,
    check_shape,
    check_tensors,
)
from blr_kernels.reference import Activation

OP = "blr_kernels::low_rank_linear"

torch.library.define(
    OP,
    "(Tensor x, Tensor left, Tensor right, Tensor? bias, str? activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_low_rank_op = torch.ops.blr_kernels.low_rank_linear.default


@torch.library.impl(OP, ("cpu", "cuda"))
def _run(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    from blr_kernels.ops.triton_low_rank import low_rank_forward

    return low_rank_forward(x, left, right, bias, activation)


@torch.library.register_fake(OP)
def _fake(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], left.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, left, right, bias, ctx.activation = inputs
    # The bias is only needed to compute the activation's argument again.
    ctx.save_for_backward(x, left, right, None if ctx.activation is None else bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, left, right, bias = ctx.saved_tensors
    if ctx.activation is not None:
        grad = activation_gradient(grad, _low_rank_op(x, left, right, bias, None), ctx.activation)
    gradients = low_rank_gradients(grad, x, left, right, ctx.needs_input_grad[:3])
    d_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
    return *gradients, d_bias, None


torch.library.register_autograd(OP, _backward, setup_context=_setup_context)


def low_rank_linear(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Multiplies by a weight of low rank.

    Args:
        x: ``(..., in)``, any strides.
        left: ``(out, r)``.
        right: ``(r, in)``.
        bias: ``(out)`` or None.
        activation: None, ``"gelu"`` (exact), ``"gelu_tanh"`` or ``"silu"``, after the bias.
        backend: what computes it.

    Returns:
        ``(..., out)``, contiguous, of x's dtype (of autocast's where that is on).

    Raises:
        TypeError: for tensors of different or non-floating dtypes.
        ValueError: for shapes or devices that do not fit, or an unknown activation.
        RuntimeError: if ``Backend.TRITON`` cannot run here; the text says why.
    """
    x, left, right, bias = autocast(x, left, right, bias)
    check_tensors({"x": x, "left": left, "right": right, "bias": bias})
    check_dims("left", left, "(out, r)")
    out_features, rank = left.shape
    check_dims("right", right, "(r, in)")
    check_shape("right", right, (rank, right.shape[1]))
    check_input(x, right.shape[1])
    if bias is not None:
        check_shape("bias", bias, (out_features,))
    check_activation(activation)
    if runs_on_triton(backend, x.device, x.dtype):
        return _low_rank_op(x, left, right, bias, activation)
    return reference.low_rank(x, left, right, bias, activation)
