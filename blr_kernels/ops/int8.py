"""BLAST in 8-bit integers, for inference: int8 factors, tokens and intermediate, exact sums.

Symmetric throughout: an integer of -127 to 127 times a scale. ``left`` has a scale per output
row; the scales of ``right`` are folded into the coupling. A token gets its scale when it comes, the
intermediate z one per token, tile of rank and group of output blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_kernels.ops.backend import Backend, runs_on_triton
from blr_kernels.ops.checks import (
    autocast,
    check_activation,
    check_dims,
    check_input,
    check_shape,
    check_tensors,
)
from blr_kernels.ops.choice import choose
from blr_kernels.ops.paths import call_of, execute, output_like, rows_of
from blr_kernels.ops.triton_config import accumulators
from blr_kernels.reference import Activation, activate

OP = "blr_kernels::blast_linear_int8"
RANK_TILE = 64
"""Rank values of z that share a scale."""

LEAST = 1e-30
"""What counts as a row's largest magnitude if that is smaller, so that zeros have a scale too."""

_INFERENCE = (
    "blast_linear_int8 is for inference: call it under torch.no_grad(), got {} that needs grad"
)

torch.library.define(
    OP,
    "(Tensor x, Tensor left, Tensor left_scale, Tensor coupling, Tensor right, Tensor? bias,"
    " str? activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_blast_int8_op = torch.ops.blr_kernels.blast_linear_int8.default


@torch.library.impl(OP, ("cpu", "cuda"))
def _run(
    x: Tensor,
    left: Tensor,
    left_scale: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    out = output_like(x, left)
    if out.numel() == 0:
        return out
    rows = rows_of(x)
    call = call_of("blast_int8", rows, left)
    choice = choose(call)
    factors = left, left_scale, coupling, right
    y = out.view(call.tokens, call.out_features)
    execute(choice.path, call, rows, factors, bias, activation, y, choice.config)
    return out


@torch.library.register_fake(OP)
def _fake(
    x: Tensor,
    left: Tensor,
    left_scale: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
) -> Tensor:
    return output_like(x, left)


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
    raise RuntimeError(_INFERENCE.format("a tensor"))


torch.library.register_autograd(OP, _backward)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows to integers, each with a scale of its own.

    Args:
        x: ``(..., n)``, any floating dtype.

    Returns:
        int8 ``(..., n)`` and fp32 scales ``(...)``: the row's largest magnitude, at least
        ``LEAST``, / 127. A row that holds NaN or an infinity is zeros with the scale NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    finite = largest.isfinite()
    # A number divided by a tensor would be a product with the reciprocal, rounded twice.
    inverse = torch.full_like(largest, 127.0) / largest
    integers = torch.round(torch.where(finite, x, 0.0) * inverse).to(torch.int8)
    scale = torch.where(finite, largest * (1 / 127), torch.nan)
    return integers, scale.squeeze(-1)


def _integer_bmm(a: Tensor, b: Tensor) -> Tensor:
    """``a (n, r, k)`` and ``b (n, k, c)``, both int8 -> their exact product as fp32 rounds it."""
    # Up to 2**24 fp32 holds every integer, so also every partial sum.
    exact = torch.float32 if a.shape[2] * 127**2 <= 2**24 else torch.float64
    return torch.bmm(a.to(exact), b.to(exact)).float()


def blast_int8(
    x: Tensor,
    left: Tensor,
    left_scale: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    rank_tile: int = RANK_TILE,
    group: int | None = None,
) -> Tensor:
    """The math in PyTorch, with exact integer products; arguments as of ``blast_linear_int8``.

    Args:
        rank_tile, group: rank values and output blocks of z that share a scale.
    """
    blocks, rows, rank = left.shape
    group = group or accumulators(blocks)
    x2 = x.reshape(-1, x.shape[-1])
    tokens = x2.shape[0]
    x8, x_scale = quantize_rows(x2)
    by_input = x8.view(tokens, blocks, right.shape[2]).permute(1, 2, 0)  # (j, p, t)
    hidden = _integer_bmm(right, by_input)  # (j, r, t)
    coupling = coupling.float()
    z = torch.zeros(blocks, rank, tokens, device=x.device)
    for j in range(blocks):
        z = z + coupling[:, j, :, None] * hidden[j]
    y = torch.zeros(blocks, tokens, rows, device=x.device)
    for start in range(0, rank, rank_tile):
        part = z[:, start : start + rank_tile]  # (i, r, t)
        z8, scale = [], []
        for first in range(0, blocks, group):
            of_group = part[first : first + group]
            integers, of_tokens = quantize_rows(of_group.permute(2, 0, 1).flatten(1))
            z8.append(integers.view(tokens, *of_group.shape[:2]).transpose(0, 1))  # (i, t, r)
            scale.append((of_tokens * x_scale).expand(of_group.shape[0], tokens))
        weight = left[:, :, start : start + rank_tile].transpose(1, 2)
        y = y + _integer_bmm(torch.cat(z8), weight) * torch.cat(scale).unsqueeze(2)
    y = y * left_scale.unsqueeze(1)
    if bias is not None:
        y = y + bias.float().view(blocks, 1, rows)
    y = y.transpose(0, 1).reshape(*x.shape[:-1], blocks * rows)
    return activate(y, activation).to(x.dtype)


def blast_linear_int8(
    x: Tensor,
    left: Tensor,
    left_scale: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    backend: Backend = Backend.AUTO,
) -> Tensor:
    """Multiplies by a BLAST weight of 8-bit integers, as ``quantize_blast`` makes it.

    Args:
        x: ``(..., b*p)``, any strides.
        left: ``(b, q, r)``, int8.
        left_scale: ``(b, q)``, float32; output row n of block i is ``left_scale[i, n]`` times that
            of the integers.
        coupling: ``(b, b, r)``, float16, bfloat16 or float32, the scales of ``right`` folded in;
            finite, and ``|coupling|`` summed over its second dimension is at most 1 (what exceeds
            it belongs into ``left_scale``), so that fp16 can hold the intermediate.
        right: ``(b, r, p)``, int8.
        bias: ``(b*q)`` or None, of x's dtype.
        activation: None, ``"gelu"`` (exact), ``"gelu_tanh"`` or ``"silu"``, after the bias.
        backend: what computes it.

    Returns:
        ``(..., b*q)``, contiguous, of x's dtype (of autocast's where that is on). A token that
        holds NaN or an infinity gives NaN, itself alone.

    Raises:
        TypeError: for dtypes other than those.
        ValueError: for shapes or devices that do not fit, or an unknown activation.
        RuntimeError: if a gradient is asked for, or ``Backend.TRITON`` cannot run here.
    """
    x, bias = autocast(x, bias)
    check_tensors({"x": x, "bias": bias})
    _check_dtypes(x, {"left": left, "right": right}, (torch.int8,))
    _check_dtypes(x, {"left_scale": left_scale}, (torch.float32,))
    _check_dtypes(x, {"coupling": coupling}, (torch.float16, torch.bfloat16, torch.float32))
    check_dims("left", left, "(b, q, r)")
    blocks, rows, rank = left.shape
    check_shape("left_scale", left_scale, (blocks, rows))
    check_shape("coupling", coupling, (blocks, blocks, rank))
    check_dims("right", right, "(b, r, p)")
    check_shape("right", right, (blocks, rank, right.shape[2]))
    check_input(x, blocks * right.shape[2])
    if bias is not None:
        check_shape("bias", bias, (blocks * rows,))
    check_activation(activation)
    if torch.is_grad_enabled():
        inputs = {"x": x, "left_scale": left_scale, "coupling": coupling, "bias": bias}
        for name, tensor in inputs.items():
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(_INFERENCE.format(name))
    if runs_on_triton(backend, x.device, x.dtype):
        return _blast_int8_op(x, left, left_scale, coupling, right, bias, activation)
    with torch.autocast(x.device.type, enabled=False):
        return blast_int8(x, left, left_scale, coupling, right, bias, activation)


def _check_dtypes(x: Tensor, tensors: dict[str, Tensor], expected: tuple[torch.dtype, ...]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in expected:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in expected)
            raise TypeError(f"{name} must have dtype {names}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
