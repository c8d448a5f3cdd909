"""Gradients of the registered ops, as PyTorch products (healing trains these layers).

Every function takes the gradient of the output before the activation and returns gradients in
the order of its factors; ``needs`` says, in that order, which of them are wanted, the others
come back as None. All of it is differentiable again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blr_kernels.reference import Activation

Gradients = tuple[Tensor | None, ...]


def activation_gradient(grad: Tensor, pre: Tensor, activation: Activation) -> Tensor:
    """``grad`` times the derivative of the activation at ``pre``, both of any one shape."""
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(grad, pre)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_backward(grad, pre, approximate="tanh")
    return torch.ops.aten.silu_backward(grad, pre)


def low_rank_gradients(
    grad: Tensor, x: Tensor, left: Tensor, right: Tensor, needs: Sequence[bool]
) -> Gradients:
    """``grad (..., out)``, ``x (..., in)`` -> gradients of x, left and right."""
    g, x2 = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    d_hidden = g @ left if needs[0] or needs[2] else None
    d_x = d_left = d_right = None
    if needs[0] and d_hidden is not None:
        d_x = (d_hidden @ right).view(x.shape)
    if needs[1]:
        d_left = g.t() @ (x2 @ right.t())
    if needs[2] and d_hidden is not None:
        d_right = d_hidden.t() @ x2
    return d_x, d_left, d_right


def monarch_gradients(
    grad: Tensor, x: Tensor, left: Tensor, right: Tensor, needs: Sequence[bool]
) -> Gradients:
    """``grad (..., b*q)``, ``x (..., b*p)`` -> gradients of x, left and right."""
    blocks, rows, rank = left.shape
    tokens, inner, columns = grad.numel() // (blocks * rows), rank // blocks, right.shape[2]
    g = grad.reshape(tokens, rows, blocks).permute(2, 0, 1)  # (l, t, s)
    x_blocks = x.reshape(tokens, blocks, columns).transpose(0, 1)  # (k, t, p)
    d_hidden = None
    if needs[0] or needs[2]:
        by_output = torch.bmm(g, left).view(blocks, tokens, blocks, inner)  # (l, t, k, j)
        d_hidden = by_output.permute(2, 1, 3, 0).reshape(blocks, tokens, rank)  # (k, t, j*b + l)
    d_x = d_left = d_right = None
    if needs[0] and d_hidden is not None:
        d_x = torch.bmm(d_hidden, right).transpose(0, 1).reshape(x.shape)
    if needs[1]:
        hidden = torch.bmm(x_blocks, right.transpose(1, 2)).view(blocks, tokens, inner, blocks)
        regrouped = hidden.permute(3, 1, 0, 2).reshape(blocks, tokens, rank)  # (l, t, k*m + j)
        d_left = torch.bmm(g.transpose(1, 2), regrouped)
    if needs[2] and d_hidden is not None:
        d_right = torch.bmm(d_hidden.transpose(1, 2), x_blocks)
    return d_x, d_left, d_right


def blast_gradients(
    grad: Tensor,
    x: Tensor,
    left: Tensor,
    coupling: Tensor,
    right: Tensor,
    needs: Sequence[bool],
) -> Gradients:
    """``grad (..., b*q)``, ``x (..., b*p)`` -> gradients of x, left, coupling and right."""
    blocks, rows, _ = left.shape
    tokens, columns = grad.numel() // (blocks * rows), right.shape[2]
    g = grad.reshape(tokens, blocks, rows).transpose(0, 1)  # (i, t, q)
    x_blocks = x.reshape(tokens, blocks, columns).transpose(0, 1)  # (j, t, p)
    by_rank = coupling.permute(2, 0, 1)  # (r, i, j)
    hidden = d_mixed = d_hidden = None
    if needs[1] or needs[2]:
        hidden = torch.bmm(x_blocks, right.transpose(1, 2)).permute(2, 0, 1)  # (r, j, t)
    if needs[0] or needs[2] or needs[3]:
        d_mixed = torch.bmm(g, left).permute(2, 0, 1)  # (r, i, t)
        if needs[0] or needs[3]:
            d_hidden = torch.bmm(by_rank.transpose(1, 2), d_mixed).permute(1, 2, 0)  # (j, t, r)
    d_x = d_left = d_coupling = d_right = None
    if needs[0] and d_hidden is not None:
        d_x = torch.bmm(d_hidden, right).transpose(0, 1).reshape(x.shape)
    if needs[1] and hidden is not None:
        mixed = torch.bmm(by_rank, hidden).permute(1, 2, 0)  # (i, t, r)
        d_left = torch.bmm(g.transpose(1, 2), mixed)
    if needs[2] and d_mixed is not None and hidden is not None:
        d_coupling = torch.bmm(d_mixed, hidden.transpose(1, 2)).permute(1, 2, 0)
    if needs[3] and d_hidden is not None:
        d_right = torch.bmm(d_hidden.transpose(1, 2), x_blocks)
    return d_x, d_left, d_coupling, d_right
