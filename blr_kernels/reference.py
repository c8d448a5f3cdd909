"""The math of the three structures in PyTorch, and their dense weights.

Written as batched products, which both a CPU and a compiler take well, with BLAST's coupling added
up block by block between them: on a CPU this is the fastest of the formulations tried (a third
product over the blocks, folding the coupling into a factor, ``einsum`` and broadcast-multiply-sum
are slower). Layouts are those of ``blr_kernels.structures``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "silu"]
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "silu")


def activate(y: Tensor, activation: Activation | None) -> Tensor:
    """Applies ``None``, ``"gelu"`` (exact, by erf), ``"gelu_tanh"`` or ``"silu"``."""
    if activation is None:
        return y
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    return F.silu(y)


def _batched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x (b, tokens, k)``, ``weight (b, n, k)``, ``bias (b, n)`` -> ``(b, tokens, n)``."""
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def _couple(hidden: Tensor, coupling: Tensor) -> Tensor:
    """``hidden (j, r, t)``, ``coupling (i, j, r)`` -> their sum over j ``(i, r, t)``."""
    if hidden.dtype in (torch.float16, torch.bfloat16):
        # A product adds up in fp32; the sum below would round after each of the j.
        return torch.bmm(coupling.permute(2, 0, 1), hidden.transpose(0, 1)).transpose(0, 1)
    mixed = coupling[:, 0, :, None] * hidden[0]
    for j in range(1, hidden.shape[0]):
        mixed.addcmul_(coupling[:, j, :, None], hidden[j])
    return mixed


def low_rank(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """``x (..., in)``, ``left (out, r)``, ``right (r, in)``, ``bias (out)`` -> ``(..., out)``."""
    return activate(F.linear(F.linear(x, right), left, bias), activation)


def monarch(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """``x (..., b*p)``, ``left (b, q, r)``, ``right (b, r, p)``, ``bias (b*q)`` -> ``(..., b*q)``.

    Output ``s*b + l`` sums, over every block ``k``, the part ``j*b + l`` of its rank.
    """
    blocks, rows, rank = left.shape
    x2 = x.reshape(-1, x.shape[-1])
    tokens = x2.shape[0]
    hidden = torch.bmm(
        right, x2.view(tokens, blocks, right.shape[2]).permute(1, 2, 0)
    )  # (k, j*b + l, t)
    hidden = hidden.view(blocks, rank // blocks, blocks, tokens).permute(2, 3, 0, 1)
    by_block = None if bias is None else bias.view(rows, blocks).t()
    y = _batched(hidden.reshape(blocks, tokens, rank), left, by_block)  # (l, t, s)
    y = y.permute(1, 2, 0).reshape(*x.shape[:-1], rows * blocks)
    return activate(y, activation)


def blast(
    x: Tensor,
    left: Tensor,
    coupling: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """``x (..., b*p)``, ``left (b, q, r)``, ``coupling (b, b, r)``, ``right (b, r, p)``,
    ``bias (b*q)`` -> ``(..., b*q)``.
    """
    blocks, rows, _ = left.shape
    x2 = x.reshape(-1, x.shape[-1])
    tokens = x2.shape[0]
    by_input = x2.view(tokens, blocks, right.shape[2]).permute(1, 2, 0)  # (j, p, t)
    hidden = torch.bmm(right, by_input)  # (j, r, t)
    mixed = _couple(hidden, coupling)  # (i, r, t)
    by_block = None if bias is None else bias.view(blocks, rows)
    y = _batched(mixed.transpose(1, 2), left, by_block)  # (i, t, q)
    y = y.transpose(0, 1).reshape(*x.shape[:-1], blocks * rows)
    return activate(y, activation)


def low_rank_to_dense(left: Tensor, right: Tensor) -> Tensor:
    """``left (out, r)``, ``right (r, in)`` -> ``W (out, in)``."""
    return left @ right


def monarch_to_dense(left: Tensor, right: Tensor) -> Tensor:
    """``left (b, q, r)``, ``right (b, r, p)`` -> ``W (b*q, b*p)``."""
    blocks, rows, rank = left.shape
    columns = right.shape[2]
    inner = rank // blocks
    left_blocks = left.view(blocks, rows, blocks, inner).permute(0, 2, 1, 3)  # (l, k, s, j)
    right_blocks = right.view(blocks, inner, blocks, columns).permute(2, 0, 1, 3)  # (l, k, j, c)
    dense = left_blocks @ right_blocks  # (l, k, s, c)
    return dense.permute(2, 0, 1, 3).reshape(rows * blocks, blocks * columns)


def blast_to_dense(left: Tensor, coupling: Tensor, right: Tensor) -> Tensor:
    """``left (b, q, r)``, ``coupling (b, b, r)``, ``right (b, r, p)`` -> ``W (b*q, b*p)``."""
    blocks, rows, _ = left.shape
    scaled = left.unsqueeze(1) * coupling.unsqueeze(2)  # (i, j, q, r)
    dense = scaled @ right.unsqueeze(0)  # (i, j, q, p)
    return dense.permute(0, 2, 1, 3).reshape(blocks * rows, blocks * right.shape[2])
