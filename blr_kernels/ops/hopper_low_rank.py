"""Low rank on Hopper by two dependent kernels: ``hopper_first``, then ``hopper_product``.

Those of a BLAST layer of one block, with nothing to mix. The second loads its slab of the weight
while the first still runs, and adds bias and activation where it stores.
"""

from __future__ import annotations

from torch import Tensor

from blr_kernels.ops.alignment import aligned
from blr_kernels.ops.hopper_blast import launch_product, unsupported_blast
from blr_kernels.ops.hopper_blast_config import bytes_per_token, product_configs
from blr_kernels.ops.hopper_first import GROUP, first_configs, launch_first
from blr_kernels.ops.hopper_scratch import chunk_tokens, walk
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.reference import Activation


def _candidates(call: Call) -> list[Config]:
    """Each differs from the first, the default, in one of its parts."""
    tokens = chunk_tokens(call, bytes_per_token(call))
    first, products = first_configs(call, tokens), product_configs(call)
    default: Config = {**first[0], **products[0]}
    parts = [*first[1:], *products[1:]]
    return [default, *({**default, **part} for part in parts)]


def _default_config(call: Call) -> Config:
    return _candidates(call)[0]


def _run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    left, right = (aligned(factor)[None] for factor in factors)
    bias = None if bias is None else aligned(bias)
    padded, parts = walk(call, x, bytes_per_token(call))
    h = x.new_empty((1, call.rank, padded))
    for tokens, part, late in parts:
        launch_first(
            call,
            part,
            right,
            h,
            tokens_tile=config["first_tokens"],
            stages=config["first_stages"],
            grouped=False,
            early=late,
        )
        launch_product(call, h, left, bias, activation, out[tokens], config, group=GROUP.value)


PATH = Path(
    "hopper",
    "low_rank",
    unsupported_blast,
    _default_config,
    _candidates,
    _run,
    # Not timed yet: only a tuner that has timed it makes it a choice.
    suits=lambda call: False,
    separable=True,
)
