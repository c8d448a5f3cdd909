"""What the measured calls are given, and what they should return."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_kernels import reference
from blr_kernels.bench.cases import Case
from blr_kernels.structures import Monarch

SETS_BYTES = 200_000_000
"""All sets of operands together are larger than this, several times the L2 cache of an H200."""

_FEWEST_SETS = 3


@dataclass(frozen=True)
class Operands:
    """One set: what one call reads.

    Attributes:
        x: ``(tokens, in)``.
        factors: of each copy, in the op's order; the one ``(out, in)`` weight of a dense layer.
        biases: ``(out)`` of each copy.
        stacked: the same factors, all copies in one tensor each.
        stacked_bias: ``(copies, out)``, the same biases.
    """

    x: Tensor
    factors: tuple[tuple[Tensor, ...], ...]
    biases: tuple[Tensor, ...]
    stacked: tuple[Tensor, ...]
    stacked_bias: Tensor


def set_count(bytes_per_call: int) -> int:
    """How many sets exceed ``SETS_BYTES`` together."""
    return max(_FEWEST_SETS, SETS_BYTES // bytes_per_call + 1)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    if case.structure is None:
        return [(case.out_features, case.in_features)]
    return list(case.structure.parameter_shapes(case.in_features, case.out_features).values())


def draw(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Operands:
    """One set of random operands; the dense weight has the variance of ``nn.Linear``'s default.

    Args:
        case, device, dtype: of the call.
        seed: of the set, so that another run measures the same errors.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shapes = _shapes(case)
    terms = 1
    if case.structure is not None:
        blocks = case.structure.blocks if isinstance(case.structure, Monarch) else 1
        terms = case.structure.rank // blocks
    std = math.sqrt(1 / (3 * case.in_features * terms)) ** (1 / len(shapes))
    bound = 1 / math.sqrt(case.in_features)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    stacked = tuple(
        empty(case.copies, *shape).normal_(std=std, generator=generator) for shape in shapes
    )
    bias = empty(case.copies, case.out_features).uniform_(-bound, bound, generator=generator)
    return Operands(
        x=empty(case.tokens, case.in_features).normal_(generator=generator),
        factors=tuple(zip(*(factor.unbind() for factor in stacked), strict=True)),
        biases=bias.unbind(),
        stacked=stacked,
        stacked_bias=bias,
    )


@contextmanager
def _exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


_TO_DENSE: dict[str, Callable[..., Tensor]] = {
    "dense": lambda weight: weight,
    "blast": reference.blast_to_dense,
    "monarch": reference.monarch_to_dense,
    "low_rank": reference.low_rank_to_dense,
}


def expected(case: Case, operands: Operands) -> list[Tensor]:
    """The outputs ``(tokens, out)`` of all copies in fp32, through the dense weight, no bias."""
    to_dense = _TO_DENSE[case.op]
    x = operands.x.float()
    with _exact_products():
        return [x @ to_dense(*(f.float() for f in factors)).t() for factors in operands.factors]


def errors(outputs: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[float, float]:
    """RMS error relative to the RMS of ``right``, and largest error relative to its largest entry.

    Raises:
        ValueError: if an output has another shape, or is not finite.
    """
    shapes = [tuple(y.shape) for y in outputs]
    if shapes != [tuple(y.shape) for y in right]:
        raise ValueError(
            f"outputs must have shapes {[tuple(y.shape) for y in right]}, got {shapes}"
        )
    squares = scale_squares = torch.zeros((), dtype=torch.float64, device=right[0].device)
    worst = scale = torch.zeros((), device=right[0].device)
    for y, true in zip(outputs, right, strict=True):
        wrong = y.float() - true
        squares = squares + wrong.square().sum(dtype=torch.float64)
        scale_squares = scale_squares + true.square().sum(dtype=torch.float64)
        worst = torch.maximum(worst, wrong.abs().amax())
        scale = torch.maximum(scale, true.abs().amax())
    rms, largest = (squares / scale_squares).sqrt().item(), (worst / scale).item()
    if not (math.isfinite(rms) and math.isfinite(largest)):
        raise ValueError("the output is not finite")
    return rms, largest
