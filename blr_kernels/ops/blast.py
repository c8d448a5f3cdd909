"""BLAST: block ``(i, j)`` of the weight is ``left[i] @ diag(coupling[i, j]) @ right[j]``."""

from __future__ import annotations

from torch import Tensor

from blr_kernels import reference
from blr_kernels.ops.backend import Backend, runs_on_triton
from blr_kernels.ops.backward import blast_gradients
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

_blast_op = register("blast", ("left", "coupling", "right"), blast_gradients)


def blast_linear(
    x: Tensor,
    left: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Multiplies by a BLAST weight.

    Args:
        x: ``(..., b*p)``, any strides.
        left: ``(b, q, r)``.
        coupling: ``(b, b, r)``.
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
    x, left, coupling, right, bias = autocast(x, left, coupling, right, bias)
    check_tensors({"x": x, "left": left, "coupling": coupling, "right": right, "bias": bias})
    check_dims("left", left, "(b, q, r)")
    blocks, rows, rank = left.shape
    check_shape("coupling", coupling, (blocks, blocks, rank))
    check_dims("right", right, "(b, r, p)")
    check_shape("right", right, (blocks, rank, right.shape[2]))
    check_input(x, blocks * right.shape[2])
    if bias is not None:
        check_shape("bias", bias, (blocks * rows,))
    check_activation(activation)
    if runs_on_triton(backend, x.device, x.dtype):
        return _blast_op(x, left, coupling, right, bias, activation, backend is Backend.TRITON)
    return reference.blast(x, left, coupling, right, bias, activation)
