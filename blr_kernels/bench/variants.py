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
from blr_kernels.ops import blast_linear, low_rank_linear, monarch_linear
from blr_kernels.ops.paths import call_of, paths, run_path

Run = Callable[[Operands], list[Tensor]]
"""Computes the outputs ``(tokens, out)`` of all copies."""

_EAGER = {"blast": reference.blast, "monarch": reference.monarch, "low_rank": reference.low_rank}
_AUTO = {"blast": blast_linear, "monarch": monarch_linear, "low_rank": low_rank_linear}


@dataclass(frozen=True)
class Variant:
    """One implementation.

    Attributes:
        impl: its name in the report.
        build: makes the call from the sets of operands that it will get; this may take long.
        bias: whether it adds the bias.
        path: what it is in particular.
    """

    impl: str
    build: Callable[[list[Operands]], Run]
    bias: bool = True
    path: str | None = None


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


def _path(name: str, op: str) -> Callable[[list[Operands]], Run]:
    def build(sets: list[Operands]) -> Run:
        def run(operands: Operands) -> list[Tensor]:
            return [
                run_path(name, op, operands.x, factors, bias)
                for factors, bias in zip(operands.factors, operands.biases, strict=True)
            ]

        return run

    return build


def variants(case: Case, first: Operands, *, compiled: bool, ref: Path | None) -> Iterator[Variant]:
    """What a case is measured with, in order.

    Args:
        case: the case.
        first: a set of its operands; its device and dtype decide which paths there are.
        compiled: whether to compile dense layers and references too.
        ref: the folder of the paper's kernels, None to leave them out.
    """
    op = case.op
    if op == "dense":
        yield Variant("dense", lambda sets: _each(F.linear))
        if compiled:
            yield Variant("dense_compiled", _compiled(F.linear))
        return
    if op == "low_rank":
        # The reference makes the same two calls.
        yield Variant("cublas", lambda sets: _each(_cublas))
    else:
        yield Variant("eager", lambda sets: _each(_EAGER[op]))
    if compiled:
        yield Variant("compiled", _compiled(_EAGER[op]))
    if ref is not None:
        for name, (function, prepare) in peers.functions(ref, op).items():
            yield Variant("ref", _ref(function, prepare), bias=False, path=name)
    call = call_of(op, first.x, first.factors[0][0])
    for path in paths(op):
        if path.name != "cublas" and first.x.is_cuda and not path.why_not(call):
            yield Variant(path.name, _path(path.name, op))
    yield Variant("auto", lambda sets: _each(_AUTO[op]))
