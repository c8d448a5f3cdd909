"""Several BLAST layers of equal sizes on one input, as one launch of each kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_kernels import reference
from blr_kernels.ops.backend import Backend, runs_on_triton
from blr_kernels.ops.backward import activation_gradient, blast_gradients
from blr_kernels.ops.checks import (
    autocast,
    check_activation,
    check_dims,
    check_input,
    check_shape,
    check_tensors,
)
from blr_kernels.ops.choice import choose
from blr_kernels.ops.paths import call_of, execute, rows_of
from blr_kernels.reference import Activation

GROUPED_TOKENS = 1024
"""Most tokens of a grouped launch: with more, every layer fills the device on its own."""

_OP = "blr_kernels::blast_linear_grouped"

torch.library.define(
    _OP,
    "(Tensor x, Tensor left, Tensor coupling, Tensor right, Tensor? bias, str? activation)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_grouped_op = torch.ops.blr_kernels.blast_linear_grouped.default


@torch.library.register_fake(_OP)
def _output_like(
    x: Tensor,
    left: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    """An empty output ``(g, ..., b*q)``, contiguous."""
    return x.new_empty((left.shape[0], *x.shape[:-1], left.shape[1] * left.shape[2]))


@torch.library.impl(_OP, ("cpu", "cuda"))
def _run(
    x: Tensor,
    left: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    out = _output_like(x, left, coupling, right, bias, activation)
    if out.numel() == 0:
        return out
    rows = rows_of(x)
    call = call_of("blast", rows, left[0])
    y = out.view(left.shape[0], call.tokens, call.out_features)
    factors = left.contiguous(), coupling.contiguous(), right.contiguous()
    from blr_kernels.ops import few_paths

    few = not few_paths.FEW_BLAST.why_not(call)
    if call.tokens > GROUPED_TOKENS or (not few and few_paths.SMALL_BLAST.why_not(call)):
        choice = choose(call, True)
        for k in range(left.shape[0]):
            of_layer = tuple(factor[k] for factor in factors)
            of_bias = None if bias is None else bias[k]
            execute(choice.path, call, rows, of_layer, of_bias, activation, y[k], choice.config)
        return out

    groups = left.shape[0]
    by_group = None if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):
        if few:
            config = few_paths.few_config(call, groups)
            few_paths.run_few(call, rows, factors, by_group, activation, y, config)
        else:
            config = few_paths.small_config(call, groups)
            few_paths.run_small(call, rows, factors, by_group, activation, y, config)
    return out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *saved, bias, ctx.activation = inputs
    # The bias is only needed to compute the activation's argument again.
    ctx.save_for_backward(*saved, None if ctx.activation is None else bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, left, coupling, right, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if ctx.activation is not None:
        pre = _grouped_op(x, left, coupling, right, bias, None)
        grad = activation_gradient(grad, pre, ctx.activation)
    by_layer = [
        blast_gradients(grad[k], x, left[k], coupling[k], right[k], needs[:4])
        for k in range(left.shape[0])
    ]
    d_x, *d_factors = (
        torch.stack([gradient for gradient in gradients if gradient is not None])
        if needed
        else None
        for gradients, needed in zip(zip(*by_layer, strict=True), needs, strict=False)
    )
    d_bias = grad.reshape(grad.shape[0], -1, grad.shape[-1]).sum(1) if needs[4] else None
    return None if d_x is None else d_x.sum(0), *d_factors, d_bias, None


torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)


def blast_linear_grouped(
    x: Tensor,
    left: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Multiplies one input by ``g`` BLAST weights of equal sizes.

    On Triton that is one launch of each kernel for all of them, up to ``GROUPED_TOKENS`` tokens and
    64 blocks, with computed sizes: the tuner knows calls of one layer only. Beyond that each layer
    is such a call, as tuned. There is no grouped low rank or Monarch.

    Args:
        x: ``(..., b*p)``, any strides.
        left: ``(g, b, q, r)``.
        coupling: ``(g, b, b, r)``.
        right: ``(g, b, r, p)``.
        bias: ``(g, b*q)`` or None.
        activation: None, ``"gelu"`` (exact), ``"gelu_tanh"`` or ``"silu"``, after the bias.
        backend: what computes it.

    Returns:
        ``(g, ..., b*q)``, contiguous, of x's dtype (of autocast's where that is on).

    Raises:
        TypeError: for tensors of different or non-floating dtypes.
        ValueError: for shapes or devices that do not fit, or an unknown activation.
        RuntimeError: if ``Backend.TRITON`` cannot run here; the text says why.
    """
    x, left, coupling, right, bias = autocast(x, left, coupling, right, bias)
    check_tensors({"x": x, "left": left, "coupling": coupling, "right": right, "bias": bias})
    check_dims("left", left, "(g, b, q, r)")
    groups, blocks, rows, rank = left.shape
    check_shape("coupling", coupling, (groups, blocks, blocks, rank))
    check_dims("right", right, "(g, b, r, p)")
    check_shape("right", right, (groups, blocks, rank, right.shape[3]))
    check_input(x, blocks * right.shape[3])
    if bias is not None:
        check_shape("bias", bias, (groups, blocks * rows))
    check_activation(activation)
    if runs_on_triton(backend, x.device, x.dtype):
        return _grouped_op(x, left, coupling, right, bias, activation)
    return torch.stack(
        [
            reference.blast(
                x, left[k], coupling[k], right[k], None if bias is None else bias[k], activation
            )
            for k in range(groups)
        ]
    )
