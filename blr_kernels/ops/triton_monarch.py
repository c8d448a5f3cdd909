"""Monarch on Triton: two batched products with the permutation in the first one's stores."""

from __future__ import annotations

from torch import Tensor

from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import (
    Tiles,
    product_candidates,
    product_tiles,
    smaller_chunks,
    tokens_per_chunk,
)
from blr_kernels.ops.triton_product import launch_product, why_not
from blr_kernels.reference import Activation


def _bytes_per_token(call: Call) -> int:
    return call.blocks * call.rank * call.itemsize


def _default_config(call: Call) -> dict[str, int]:
    limits = {"itemsize": call.itemsize, "shared_limit": call.device.shared_bytes}
    return {
        **product_tiles(call.tokens, call.rank, call.p, **limits).to_config("right"),
        **product_tiles(call.tokens, call.q, call.rank, **limits).to_config("left"),
        "chunk": 0,
    }


def _candidates(call: Call) -> list[dict[str, int]]:
    """Each differs from the default in one of its parts: a product or the chunk."""
    limits = {"itemsize": call.itemsize, "shared_limit": call.device.shared_bytes}
    right = product_candidates(call.tokens, call.rank, call.p, **limits)[:4]
    left = product_candidates(call.tokens, call.q, call.rank, **limits)[:4]
    chunks = smaller_chunks(call.tokens, _bytes_per_token(call), call.device.l2_bytes)
    default = _default_config(call)
    return [
        default,
        *({**default, **tiles.to_config("right")} for tiles in right),
        *({**default, **tiles.to_config("left")} for tiles in left),
        *({**default, "chunk": chunk} for chunk in chunks),
    ]


def _run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """The intermediate is ``(l, tokens, k*m + j)``: for each output block l the part of every
    input block's rank that it uses, so that the second product reads it contiguously.
    """
    left, right = factors
    tokens, blocks = call.tokens, call.blocks
    first, second = Tiles.from_config(config, "right"), Tiles.from_config(config, "left")
    x3 = x.view(tokens, blocks, call.p).transpose(0, 1)
    y3 = out.view(tokens, call.q, blocks).permute(2, 0, 1)  # output s*b + l belongs to block l
    by_block = None if bias is None else bias.view(call.q, blocks).t()
    chunk = tokens_per_chunk(tokens, _bytes_per_token(call), config["chunk"])
    hidden = x.new_empty((blocks, chunk, call.rank))
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        h = hidden[:, : stop - start]
        by_input = h[0].view(stop - start, blocks, call.inner).transpose(0, 1)
        launch_product(
            x3[:, start:stop],
            right,
            by_input,
            first,
            groups=blocks,
            out_group=hidden.stride(0),
        )
        launch_product(h, left, y3[:, start:stop], second, bias=by_block, activation=activation)


PATH = Path("triton", "monarch", why_not, _default_config, _candidates, _run, separable=True)
