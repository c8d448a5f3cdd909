"""Low rank on Hopper by two dependent kernels: ``hopper_first``, then ``hopper_product``.

Those of a BLAST layer of one block, with nothing to mix. The second loads its slab of the weight
while the first still runs, and adds bias and activation where it stores.
"""

from __future__ import annotations

from torch import Tensor

from blr_kernels.ops.hopper_apart import run_products
from blr_kernels.ops.hopper_blast import unsupported_blast
from blr_kernels.ops.hopper_blast_config import bytes_per_token, product_configs
from blr_kernels.ops.hopper_first import first_configs
from blr_kernels.ops.hopper_scratch import chunk_tokens
from blr_kernels.ops.paths import Call, Config, Path, with_parts
from blr_kernels.reference import Activation


def _candidates(call: Call) -> list[dict[str, int]]:
    tokens = chunk_tokens(call, bytes_per_token(call))
    first, products = first_configs(call, tokens), product_configs(call)
    return with_parts({**first[0], **products[0]}, [*first[1:], *products[1:]])


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
    left, right = (factor[None] for factor in factors)
    run_products(call, x, (left, None, right), bias, activation, out, config)


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
