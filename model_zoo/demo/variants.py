"""Read the healed block low-rank variants."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from blr_kernels import Backend
from blr_kernels.structures import structure_from_dict
from model_zoo.convert import ConversionReport, LayerReport, replace_linears_
from model_zoo.demo.runtime import load_tensors

KINDS = ("low_rank", "monarch", "blast")
BLOCKS = {"low_rank": 1, "monarch": 4, "blast": 3}
"""Blocks of each kind (low rank has none to count)."""


def variant_file(model: str, kind: str) -> str:
    """File of the healed factors of "dit" or "vit" for one kind of structure."""
    return f"{model}-{kind}.factors.safetensors"


def load_variant_(model: nn.Module, path: Path) -> ConversionReport:
    """Turn a dense model (q, k, v fused) into the healed variant in `path`; -> its report."""
    factors, metadata = load_tensors(path)
    report = _report(metadata["report"])
    structures = {layer.name: layer.structure for layer in report.layers}
    biases = {name: model.get_submodule(name).bias for name in structures}
    replace_linears_(model, structures, backend=Backend.TORCH)
    with torch.no_grad():
        for name in structures:
            layer = model.get_submodule(name)
            if biases[name] is not None:
                layer.bias.copy_(biases[name])
            for factor in layer.factor_names:
                getattr(layer, factor).copy_(factors[f"{name}.{factor}"])
    model.requires_grad_(False)
    return report


def _report(text: str) -> ConversionReport:
    plain = json.loads(text)
    layers = tuple(
        LayerReport(**{**layer, "structure": structure_from_dict(layer["structure"])})
        for layer in plain["layers"]
    )
    return ConversionReport(**{**plain, "layers": layers, "skipped": tuple(plain["skipped"])})
