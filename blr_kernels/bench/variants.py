"""The implementations that a case is measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from blr_kernels import reference
from blr_kernels.bench import peers
from blr_kernels.bench.cases import Case
from blr_kernels.bench.operands import Operands
from blr_kernels.ops import (
    blast_linear,
    blast_linear_grouped,
    explain,
    low_rank_linear,
    low_rank_linear_grouped,
    monarch_linear,
    monarch_linear_grouped,
)
from blr_kernels.ops import paths as ops_paths
from blr_kernels.ops.int8 import blast_linear_int8
from blr_kernels.ops.paths import Call, Config, call_of, run_path
from blr_kernels.quantize import quantize_blast
from blr_kernels.structures import Blast
from blr_kernels.tuning import lookup

Run = Callable[[Operands], list[Tensor]]
"""Computes the outputs ``(tokens, out)`` of all copies."""

_EAGER: dict[str, Callable[..., Tensor]] = {
    "blast": reference.blast,
    "monarch": reference.monarch,
    "low_rank": reference.low_rank,
}
_AUTO: dict[str, Callable[..., Tensor]] = {
    "blast": blast_linear,
    "monarch": monarch_linear,
    "low_rank": low_rank_linear,
}
_GROUPED: dict[str, Callable[..., Tensor]] = {
    "blast": blast_linear_grouped,
    "monarch": monarch_linear_grouped,
    "low_rank": low_rank_linear_grouped,
}


@dataclass(frozen=True)
class Variant:
    """One implementation.

    Attributes:
        impl: its name in the report.
        build: makes the call from the sets of operands that it will get; this may take long.
        bias: whether it adds the bias.
        path: what it is in particular.
        weight_bytes: of the weights it reads, where they are not those of the case.
    """

    impl: str
    build: Callable[[list[Operands]], Run]
    bias: bool = True
    path: str | None = None
    weight_bytes: int | None = None


def _each(function: Callable[..., Tensor]) -> Run:
    """``function(x, *factors, bias)`` for every copy, one after the other."""

    def run(operands: Operands) -> list[Tensor]:
        return [
            function(operands.x, *factors, bias)
            for factors, bias in zip(operands.factors, operands.biases, strict=True)
        ]

    return run


def _compiled(function: Callable[..., Tensor]) -> Callable[[list[Operands]], Run]:
    def build(sets: list[Operands]) -> Run:
        # Dynamo counts compilations by code object and gives up in silence after a few.
        torch._dynamo.reset()
        return _each(torch.compile(function, dynamic=False, fullgraph=True))

    return build


def _cublas(x: Tensor, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, F.linear(x, right), left.t())


def _ref(
    function: Callable[..., Tensor], prepare: peers.Prepare
) -> Callable[[list[Operands]], Run]:
    def build(sets: list[Operands]) -> Run:
        layouts = {id(s): [prepare(*factors) for factors in s.factors] for s in sets}

        def run(operands: Operands) -> list[Tensor]:
            x = operands.x[None]
            return [function(x, *factors)[0] for factors in layouts[id(operands)]]

        return run

    return build


def _int8(sets: list[Operands]) -> Run:
    layouts = {id(s): [quantize_blast(*factors) for factors in s.factors] for s in sets}

    def run(operands: Operands) -> list[Tensor]:
        return [
            blast_linear_int8(operands.x, w.left, w.left_scale, w.coupling, w.right, bias)
            for w, bias in zip(layouts[id(operands)], operands.biases, strict=True)
        ]

    return run


def int8_variants(case: Case) -> list[Variant]:
    """BLAST in 8-bit integers; none for another op."""
    if not isinstance(case.structure, Blast):
        return []
    # quantize_blast makes int8 left and right, fp32 scales of rows and an fp16 coupling.
    features = case.in_features + case.out_features
    one = case.structure.rank * (features + 2 * case.structure.blocks**2) + 4 * case.out_features
    return [Variant("int8", _int8, weight_bytes=case.copies * one)]


def _grouped(function: Callable[..., Tensor]) -> Run:
    """``function(x, *stacked factors, stacked bias)`` once for all copies."""

    def run(operands: Operands) -> list[Tensor]:
        y = function(operands.x, *operands.stacked, operands.stacked_bias)
        return list(y.unbind())

    return run


def _path(path: ops_paths.Path, call: Call) -> Callable[[list[Operands]], Run]:
    def build(sets: list[Operands]) -> Run:
        config = _tuned(path, call)

        def run(operands: Operands) -> list[Tensor]:
            return [
                run_path(path.name, path.op, operands.x, factors, bias, config=config)
                for factors, bias in zip(operands.factors, operands.biases, strict=True)
            ]

        return run

    return build


def _tuned(path: ops_paths.Path, call: Call) -> Config | None:
    """The path's own config of the nearest entry that timed it; None if none is near enough."""
    keys = path.default_config(call).keys()
    for _, entry in lookup.nearest(call):
        timed = entry.paths.get(path.name)
        if timed is not None and timed.config.keys() == keys:
            return timed.config
    return None


def variants(case: Case, first: Operands, *, compiled: bool, ref: Path | None) -> Iterator[Variant]:
    """What a case is measured with, in order.

    Args:
        case: the case.
        first: a set of its operands; its device and dtype decide which paths there are.
        compiled: whether to compile dense layers and references too.
        ref: the folder of the paper's kernels, None to leave them out.
    """
    op = case.op
    if case.structure is None:
        yield Variant("dense", lambda sets: _each(F.linear))
        if compiled:
            yield Variant("dense_compiled", _compiled(F.linear))
        return
    if ref is not None:
        for name, (function, prepare) in peers.functions(ref, op).items():
            yield Variant("ref", _ref(function, prepare), bias=False, path=name)
    if op == "low_rank":
        # The reference makes the same two calls.
        yield Variant("cublas", lambda sets: _each(_cublas))
    else:
        yield Variant("eager", lambda sets: _each(_EAGER[op]))
    if compiled:
        yield Variant("compiled", _compiled(_EAGER[op]))
    x = first.x
    if x.is_cuda:
        call = call_of(op, x, first.factors[0][0])
        for path in ops_paths.paths(op):
            # The path of that name makes the calls that were just measured.
            if path.name != "cublas" and not path.why_not(call):
                yield Variant(path.name, _path(path, call))
        yield from int8_variants(case)
    if case.copies > 1:
        function = _GROUPED[op]
        yield Variant(
            "auto", lambda sets: _grouped(function), path="grouped" if x.is_cuda else None
        )
        return
    told = explain(
        case.structure, case.in_features, case.out_features,
        dtype=x.dtype, device=x.device, tokens=case.tokens,
    )  # fmt: skip
    yield Variant("auto", lambda sets: _each(_AUTO[op]), path=told.path or None)
