"""Low rank by two products of PyTorch's library, the bias added within the second."""

from __future__ import annotations

import torch
from torch import Tensor

from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import smaller_chunks, tokens_per_chunk
from blr_kernels.reference import Activation


def _why_not(call: Call) -> str:
    return ""


def _default_config(call: Call) -> dict[str, int]:
    return {"chunk": 0}


def _candidates(call: Call) -> list[dict[str, int]]:
    chunks = smaller_chunks(call.tokens, call.rank * call.itemsize, call.device.l2_bytes)
    return [{"chunk": chunk} for chunk in (0, *chunks)]


def activate_(y: Tensor, activation: Activation | None) -> None:
    """Activates ``y`` of any shape in place."""
    if activation == "silu":
        torch.ops.aten.silu_(y)
    elif activation is not None:
        torch.ops.aten.gelu_(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def _second(
    hidden: Tensor, left: Tensor, bias: Tensor | None, activation: Activation | None, out: Tensor
) -> None:
    """``hidden (tokens, r)``, ``left (out, r)``, ``bias (out)`` -> ``out (tokens, out)``."""
    if bias is None:
        torch.mm(hidden, left.t(), out=out)
    elif activation == "gelu_tanh" and hidden.is_cuda:
        # On a GPU this GELU is the one by tanh, in the product's own epilogue.
        torch.ops.aten._addmm_activation.out(bias, hidden, left.t(), use_gelu=True, out=out)
        return
    else:
        torch.addmm(bias, hidden, left.t(), out=out)
    activate_(out, activation)


def _run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    left, right = factors
    chunk = tokens_per_chunk(call.tokens, call.rank * call.itemsize, config["chunk"])
    hidden = x.new_empty((chunk, call.rank))
    for start in range(0, call.tokens, chunk):
        stop = min(start + chunk, call.tokens)
        h = hidden[: stop - start]
        torch.mm(x[start:stop], right.t(), out=h)
        _second(h, left, bias, activation, out[start:stop])


def run_grouped(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, Tensor | None, Tensor],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
) -> None:
    """``x (tokens, in)``, ``left (g, 1, out, r)``, None, ``right (g, 1, r, in)``,
    ``bias (g, out)`` or None -> ``out (g, tokens, out)``: one product for all layers, whose weights
    are one below the other, then a batched one.
    """
    groups = out.shape[0]
    left, right = factors[0][:, 0].mT, factors[2].view(groups * call.rank, -1)
    chunk = tokens_per_chunk(call.tokens, groups * call.rank * call.itemsize)
    hidden = x.new_empty((chunk, groups * call.rank))
    for start in range(0, call.tokens, chunk):
        stop = min(start + chunk, call.tokens)
        h, y = hidden[: stop - start], out[:, start:stop]
        torch.mm(x[start:stop], right.t(), out=h)
        by_layer = h.unflatten(1, (groups, call.rank)).transpose(0, 1)
        if bias is None:
            torch.bmm(by_layer, left, out=y)
        else:
            torch.baddbmm(bias[:, None], by_layer, left, out=y)
        activate_(y, activation)


PATH = Path("cublas", "low_rank", _why_not, _default_config, _candidates, _run, library=True)
