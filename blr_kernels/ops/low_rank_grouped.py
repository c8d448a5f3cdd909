"""Several layers of low rank and equal sizes on one input, as one launch of each kernel."""

from __future__ import annotations

from torch import Tensor

from blr_kernels import reference
from blr_kernels.ops.backend import Backend
from blr_kernels.ops.backward import low_rank_gradients
from blr_kernels.ops.checks import (
    autocast,
    check_activation,
    check_dims,
    check_input,
    check_shape,
    check_tensors,
)
from blr_kernels.ops.grouped import compute, register_grouped
from blr_kernels.reference import Activation

_grouped_op = register_grouped("low_rank", ("left", "right"), low_rank_gradients)


def low_rank_linear_grouped(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Multiplies one input by ``g`` weights of low rank and equal sizes.

    Up to ``grouped.GROUPED_TOKENS`` tokens, and while one layer alone would leave multiprocessors
    idle, that is one launch of each kernel for all of them, with computed sizes, or two products
    by cuBLAS: the tuner knows calls of one layer only. Beyond that each layer is such a call, as
    tuned.

    Args:
        x: ``(..., in)``, any strides.
        left: ``(g, out, r)``.
        right: ``(g, r, in)``.
        bias: ``(g, out)`` or None.
        activation: None, ``"gelu"`` (exact), ``"gelu_tanh"`` or ``"silu"``, after the bias.
        backend: what computes it.

    Returns:
        ``(g, ..., out)``, contiguous, of x's dtype (of autocast's where that is on).

    Raises:
        TypeError: for tensors of different or non-floating dtypes.
        ValueError: for shapes or devices that do not fit, or an unknown activation.
        RuntimeError: if ``Backend.TRITON`` cannot run here; the text says why.
    """
    x, left, right, bias = autocast(x, left, right, bias)
    check_tensors({"x": x, "left": left, "right": right, "bias": bias})
    check_dims("left", left, "(g, out, r)")
    groups, out_features, rank = left.shape
    check_dims("right", right, "(g, r, in)")
    check_shape("right", right, (groups, rank, right.shape[2]))
    check_input(x, right.shape[2])
    if bias is not None:
        check_shape("bias", bias, (groups, out_features))
    check_activation(activation)
    factors = left, right
    return compute(_grouped_op, reference.low_rank, x, factors, bias, activation, backend)
