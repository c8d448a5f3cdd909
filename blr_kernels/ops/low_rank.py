"""Low rank: ``y = activation(x @ right.T @ left.T + bias)``."""

from __future__ import annotations

from torch import Tensor

from blr_kernels import reference
from blr_kernels.ops.backend import Backend, runs_on_triton
from blr_kernels.ops.backward import low_rank_gradients
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

_low_rank_op = register("low_rank", ("left", "right"), low_rank_gradients)


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
        return _low_rank_op(x, left, right, bias, activation, backend is Backend.TRITON)
    return reference.low_rank(x, left, right, bias, activation)
