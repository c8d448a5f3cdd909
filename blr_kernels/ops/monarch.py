"""Monarch: two block-diagonal factors with a fixed permutation between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_kernels import reference
from blr_kernels.ops.backend import Backend, runs_on_triton
from blr_kernels.ops.backward import activation_gradient, monarch_gradients
from blr_kernels.ops.checks import (
    autocast,
    check_activation,
    check_dims,
    check_input,
    check_shape,
    check_tensors,
)
from blr_kernels.reference import Activation

OP = "blr_kernels::monarch_linear"

torch.library.define(
    OP,
    "(Tensor x, Tensor left, Tensor right, Tensor? bias, str? activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_monarch_op = torch.ops.blr_kernels.monarch_linear.default


@torch.library.impl(OP, ("cpu", "cuda"))
def _run(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    from blr_kernels.ops.triton_monarch import monarch_forward

    return monarch_forward(x, left, right, bias, activation)


@torch.library.register_fake(OP)
def _fake(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], left.shape[0] * left.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, left, right, bias, ctx.activation = inputs
    # The bias is only needed to compute the activation's argument again.
    ctx.save_for_backward(x, left, right, None if ctx.activation is None else bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, left, right, bias = ctx.saved_tensors
    if ctx.activation is not None:
        grad = activation_gradient(grad, _monarch_op(x, left, right, bias, None), ctx.activation)
    gradients = monarch_gradients(grad, x, left, right, ctx.needs_input_grad[:3])
    d_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
    return *gradients, d_bias, None


torch.library.register_autograd(OP, _backward, setup_context=_setup_context)


def monarch_linear(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Multiplies by a Monarch weight (``blr_kernels.structures`` has the formula).

    Args:
        x: ``(..., b*p)``, any strides.
        left: ``(b, q, r)`` with ``r % b == 0``.
        right: ``(b, r, p)``.
        bias: ``(b*q)`` or None.
        activation: None, ``"gelu"`` (exact), ``"gelu_tanh"`` or ``"silu"``, after the bias.
        backend: what computes it.

    Returns:
        ``(..., b*q)``, contiguous, of x's dtype (of autocast's where that is on).

    Raises:
        TypeError: for tensors of different or non-floating dtypes.
        ValueError: for shapes or devices that do not fit, or an unknown activation.
        RuntimeError: if ``Backend.TRITON`` cannot run here; the text says why.
    """
    x, left, right, bias = autocast(x, left, right, bias)
    check_tensors({"x": x, "left": left, "right": right, "bias": bias})
    check_dims("left", left, "(b, q, r)")
    blocks, rows, rank = left.shape
    if rank % blocks:
        raise ValueError(f"left's rank must be a multiple of blocks = {blocks}, got {rank}")
    check_dims("right", right, "(b, r, p)")
    check_shape("right", right, (blocks, rank, right.shape[2]))
    check_input(x, blocks * right.shape[2])
    if bias is not None:
        check_shape("bias", bias, (blocks * rows,))
    check_activation(activation)
    if runs_on_triton(backend, x.device, x.dtype):
        return _monarch_op(x, left, right, bias, activation)
    return reference.monarch(x, left, right, bias, activation)
