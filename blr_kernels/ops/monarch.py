"""Monarch: two block-diagonal factors with a fixed permutation between them."""

from __future__ import annotations

from torch import Tensor

from blr_kernels import reference
from blr_kernels.ops.backend import Backend, runs_on_triton
from blr_kernels.ops.backward import monarch_gradients
from blr_kernels.ops.checks import (
    autocast,
    check_activation,
    check_dims,
    check_input,
    check_shape,
    check_tensors,
)
from blr_kernels.ops.registration import register
from blr_kernels.reference import Activation

_monarch_op = register("monarch", ("left", "right"), monarch_gradients)


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
        return _monarch_op(x, left, right, bias, activation, backend is Backend.TRITON)
    return reference.monarch(x, left, right, bias, activation)
