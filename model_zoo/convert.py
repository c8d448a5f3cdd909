"""Conversion of a model's linears to block low-rank layers: ordered rules over module names."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_kernels.nn import BLRLinear
from blr_kernels.ops import Backend
from blr_kernels.structures import (
    KINDS,
    Blast,
    LowRank,
    Monarch,
    Structure,
    structure_with_budget,
)
from model_zoo.factorize import MAX_ITERATIONS, Factorization, factorize
from model_zoo.weights import parameter_count

__all__ = [
    "ConversionReport",
    "LayerReport",
    "Rule",
    "Saving",
    "convert_",
    "plan",
    "replace_linears_",
]

Progress = Callable[[int, int, str], None]
"""Called with layers done, layers in all and the name of the layer in hand (or "" at the end)."""


@dataclass(frozen=True)
class Saving:
    """A target by what it removes: ``fraction`` of the weight's parameters.

    The rank becomes the largest that removes at least that much. ``blocks`` is for Monarch and
    BLAST, by default that of :func:`blr_kernels.structure_with_budget`.

    Raises:
        TypeError: the fraction is no number, or the blocks are no int.
        ValueError: unknown kind, a fraction not between 0 and 1 (both excluded), blocks below 1,
            or blocks for low rank.
    """

    kind: str
    fraction: float
    blocks: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        fraction, blocks = self.fraction, self.blocks
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise TypeError(
                f"fraction must be a number between 0 and 1, got {type(fraction).__name__} "
                f"{fraction!r}"
            )
        if not 0 < fraction < 1:  # NaN is caught here too
            raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
        if blocks is None:
            return
        if isinstance(blocks, bool) or not isinstance(blocks, int):
            raise TypeError(f"blocks must be an int, got {type(blocks).__name__} {blocks!r}")
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        if self.kind == "low_rank":
            raise ValueError(f"low_rank takes no blocks, got blocks = {blocks}")

    def structure(self, in_features: int, out_features: int) -> Structure:
        """The structure of a layer of these sizes.

        Raises:
            ValueError: no rank of this kind fits what may stay.
        """
        budget = int(in_features * out_features * (1 - self.fraction))
        return structure_with_budget(self.kind, in_features, out_features, budget, self.blocks)


@dataclass(frozen=True)
class Rule:
    """What becomes of the linears whose name is ``pattern`` (or matches it whole, as a regex).

    ``target`` is a structure, a :class:`Saving`, or None to leave the layer as it is.

    Raises:
        TypeError: the pattern is no text, or the target none of these.
        ValueError: the pattern is no regular expression where it should be one.
    """

    pattern: str
    target: Structure | Saving | None
    regex: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(f"pattern must be a str, got {type(self.pattern).__name__}")
        if not isinstance(self.target, LowRank | Monarch | Blast | Saving | None):
            raise TypeError(
                f"the target of rule {self.pattern!r} must be LowRank, Monarch, Blast, Saving or "
                f"None, got {type(self.target).__name__}"
            )
        if self.regex:
            try:
                re.compile(self.pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    f"rule {self.pattern!r} is no regular expression: {error}"
                ) from None

    def matches(self, name: str) -> bool:
        """Whether the rule speaks of the module of this name."""
        if self.regex:
            return re.fullmatch(self.pattern, name) is not None
        return self.pattern == name


@dataclass(frozen=True)
class LayerReport:
    """One converted layer. Parameters are those of the weight, without the bias."""

    name: str
    in_features: int
    out_features: int
    structure: Structure
    in_padded: int
    out_padded: int
    parameters_before: int
    parameters_after: int
    relative_error: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``structure`` as ``Structure.to_dict`` gives it."""
        return {**self.__dict__, "structure": self.structure.to_dict()}


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert_` did. ``str()`` is a table."""

    layers: tuple[LayerReport, ...]
    skipped: tuple[str, ...]
    parameters_before: int
    parameters_after: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. The two totals are those of the whole model."""
        return {
            "layers": [layer.to_dict() for layer in self.layers],
            "skipped": list(self.skipped),
            "parameters_before": self.parameters_before,
            "parameters_after": self.parameters_after,
        }

    def save_json(self, path: str | Path) -> None:
        """Write :meth:`to_dict` as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        head = ("layer", "out x in", "structure", "padded to", "before", "after", "kept", "error")
        rows = [head]
        for layer in self.layers:
            sizes = (layer.out_features, layer.in_features)
            padded = (layer.out_padded, layer.in_padded)
            rows.append(
                (
                    layer.name,
                    f"{sizes[0]} x {sizes[1]}",
                    str(layer.structure),
                    "" if padded == sizes else f"{padded[0]} x {padded[1]}",
                    f"{layer.parameters_before:,}",
                    f"{layer.parameters_after:,}",
                    f"{layer.parameters_after / layer.parameters_before:.1%}",
                    f"{layer.relative_error:.4f}",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 4 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        before = sum(layer.parameters_before for layer in self.layers)
        after = sum(layer.parameters_after for layer in self.layers)
        kept = f"{after / before:.1%}" if before else "-"
        lines.append(
            f"{len(self.layers)} layers converted, {len(self.skipped)} left as they are; "
            f"converted weights {before:,} -> {after:,} ({kept}); "
            f"whole model {self.parameters_before:,} -> {self.parameters_after:,} "
            f"({self.parameters_after / self.parameters_before:.1%})"
        )
        return "\n".join(lines)


def plan(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Structure | None]:
    """What ``rules`` make of each linear of ``model``, by name, in the model's order.

    Raises:
        ValueError: a linear that no rule matches, a rule that matches no linear, a structure that
            does not fit a layer, or a layer to convert whose weight another layer shares.
    """
    planned: dict[str, Structure | None] = {}
    owners: dict[int, str] = {}
    used = [False] * len(rules)
    for name, linear in _linears(model):
        matching = [index for index, rule in enumerate(rules) if rule.matches(name)]
        if not matching:
            raise ValueError(f"no rule matches the linear {name!r}; add one, with None to skip it")
        for index in matching:
            used[index] = True
        target = rules[matching[0]].target
        sizes = (linear.in_features, linear.out_features)
        try:
            structure = target.structure(*sizes) if isinstance(target, Saving) else target
            if structure is not None:
                structure.padded(*sizes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        owner = owners.setdefault(id(linear.weight), name)
        if owner != name and (structure is not None or planned[owner] is not None):
            raise ValueError(f"{name} shares its weight with {owner}, so it cannot be converted")
        planned[name] = structure
    for rule, seen in zip(rules, used, strict=True):
        if not seen:
            raise ValueError(f"rule {rule.pattern!r} matches no linear of the model")
    return planned


def convert_(
    model: nn.Module,
    rules: Sequence[Rule],
    *,
    backend: Backend = Backend.AUTO,
    progress: Progress | None = None,
    device: torch.device | str | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> ConversionReport:
    """Factorize the linears of ``model`` in place, one layer at a time.

    For each linear the first matching rule holds. All rules are checked before the first layer
    changes. A dense weight is freed as soon as its factors exist.

    Args:
        model: changed layer by layer.
        rules: in order.
        backend: of the new layers.
        progress: told before each layer, and at the end.
        device: where to factorize, one weight at a time; the factors come back to the model's.
            None works where each weight is.
        max_iterations: of :func:`model_zoo.factorize.factorize`, for BLAST.

    Raises:
        ValueError: see :func:`plan`; also a weight that cannot be factorized, named.
    """
    planned = plan(model, rules)
    chosen = [(name, target) for name, target in planned.items() if target is not None]
    parameters_before = parameter_count(model)
    layers: list[LayerReport] = []
    for done, (name, structure) in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), name)
        begin = time.perf_counter()
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        made: list[Factorization] = []

        def factors(
            weight: Tensor, structure: Structure, made: list[Factorization] = made
        ) -> Mapping[str, Tensor]:
            there = weight if device is None else weight.to(device)
            made.append(factorize(there, structure, max_iterations=max_iterations))
            return {name: factor.to(weight.device) for name, factor in made[0].factors.items()}

        try:
            layer = BLRLinear.from_linear(linear, structure, factors, backend=backend)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        sizes = (linear.in_features, linear.out_features)
        in_padded, out_padded = structure.padded(*sizes)
        layers.append(
            LayerReport(
                name=name,
                in_features=sizes[0],
                out_features=sizes[1],
                structure=structure,
                in_padded=in_padded,
                out_padded=out_padded,
                parameters_before=linear.weight.numel(),
                parameters_after=structure.parameter_count(*sizes),
                relative_error=made[0].relative_error,
                seconds=time.perf_counter() - begin,
            )
        )
        model.set_submodule(name, layer)
        del linear
    if progress is not None:
        progress(len(chosen), len(chosen), "")
    return ConversionReport(
        layers=tuple(layers),
        skipped=tuple(name for name, target in planned.items() if target is None),
        parameters_before=parameters_before,
        parameters_after=parameter_count(model),
    )


def replace_linears_(
    model: nn.Module, structures: Mapping[str, Structure], *, backend: Backend = Backend.AUTO
) -> None:
    """Put block low-rank layers where the named linears are, without factorizing.

    The new layers have the device and dtype of the old ones: on ``meta`` they hold nothing, else
    random factors. Nothing changes unless every name is a linear that its structure fits.

    Raises:
        ValueError: a name is no linear of the model, or a structure does not fit its layer.
    """
    linears = dict(_linears(model))
    for name, structure in structures.items():
        if name not in linears:
            raise ValueError(f"{name!r} is no linear of the model")
        try:
            structure.padded(linears[name].in_features, linears[name].out_features)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for name, structure in structures.items():
        linear = linears.pop(name)
        layer = BLRLinear.create(
            linear.in_features,
            linear.out_features,
            structure,
            linear.bias is not None,
            backend=backend,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        layer.train(linear.training)
        model.set_submodule(name, layer)
        del linear


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    ]
