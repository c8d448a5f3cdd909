"""Several Monarch layers of equal sizes on one input, as one launch of each kernel."""

from __future__ import annotations

from torch import Tensor

from blr_kernels import reference
from blr_kernels.ops.backend import Backend
from blr_kernels.ops.backward import monarch_gradients
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

_grouped_op = register_grouped("monarch", ("left", "right"), monarch_gradients)


def monarch_linear_grouped(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Multiplies one input by ``g`` Monarch weights of equal sizes.

    On Triton that is one launch of each kernel for all of them, up to 16 tokens and 64 blocks, and
    while one layer alone would leave multiprocessors idle, with computed sizes: the tuner knows
    calls of one layer only. Beyond that each layer is such a call, as tuned.

    Args:
        x: ``(..., b*p)``, any strides.
        left: ``(g, b, q, r)`` with ``r % b == 0``.
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
    x, left, right, bias = autocast(x, left, right, bias)
    check_tensors({"x": x, "left": left, "right": right, "bias": bias})
    check_dims("left", left, "(g, b, q, r)")
    groups, blocks, rows, rank = left.shape
    if rank % blocks:
        raise ValueError(f"left's rank must be a multiple of blocks = {blocks}, got {rank}")
    check_dims("right", right, "(g, b, r, p)")
    check_shape("right", right, (groups, blocks, rank, right.shape[3]))
    check_input(x, blocks * right.shape[3])
    if bias is not None:
        check_shape("bias", bias, (groups, blocks * rows))
    check_activation(activation)
    factors = left, right
    return compute(_grouped_op, reference.monarch, x, factors, bias, activation, backend)
