"""Low rank on Triton: two products, the second with bias and activation in its epilogue."""

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


def _default_config(call: Call) -> dict[str, int]:
    limits = {"itemsize": call.itemsize, "shared_limit": call.device.shared_bytes}
    return {
        **product_tiles(call.tokens, call.rank, call.in_features, **limits).to_config("right"),
        **product_tiles(call.tokens, call.out_features, call.rank, **limits).to_config("left"),
        "chunk": 0,
    }


def _candidates(call: Call) -> list[dict[str, int]]:
    """Each differs from the default in one of its parts: a product or the chunk."""
    limits = {"itemsize": call.itemsize, "shared_limit": call.device.shared_bytes}
    right = product_candidates(call.tokens, call.rank, call.in_features, **limits)[:4]
    left = product_candidates(call.tokens, call.out_features, call.rank, **limits)[:4]
    chunks = smaller_chunks(call.tokens, call.rank * call.itemsize, call.device.l2_bytes)
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
    left, right = factors
    first, second = Tiles.from_config(config, "right"), Tiles.from_config(config, "left")
    chunk = tokens_per_chunk(call.tokens, call.rank * call.itemsize, config["chunk"])
    hidden = x.new_empty((1, chunk, call.rank))
    for start in range(0, call.tokens, chunk):
        stop = min(start + chunk, call.tokens)
        h = hidden[:, : stop - start]
        launch_product(x[None, start:stop], right[None], h, first)
        launch_product(
            h,
            left[None],
            out[None, start:stop],
            second,
            bias=None if bias is None else bias[None],
            activation=activation,
        )


PATH = Path("triton", "low_rank", why_not, _default_config, _candidates, _run, separable=True)
