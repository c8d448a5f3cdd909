"""The model that a spec names, from the zoo, on its device, with its kernels chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from app.engine.jobs import backend_info
from app.engine.spec import WorkerSpec
from blr_kernels import Backend

if TYPE_CHECKING:
    from model_zoo.dit import DiT
    from model_zoo.vit import ViT

    from model_zoo.convert import Rule


def open_dit(spec: WorkerSpec, dtype: torch.dtype) -> DiT:
    """Load a diffusion transformer, converted if the backend asks for it.

    Raises:
        ValueError: if the model or its variant is missing or does not fit; one line.
    """
    from model_zoo.dit import dit_rules, load_dit

    from model_zoo.registry import get_model

    dit = load_dit(
        get_model(spec.model),
        dtype=dtype,
        device=spec.device,
        fuse_qkv=spec.fuse_qkv,
        untrained=spec.untrained,
    )
    if spec.variant is not None:
        if spec.untrained:
            _untrained_(dit.transformer, dit_rules(spec.variant), spec)
        else:
            _load_variant_(dit.transformer, spec)
    return dit


def open_vit(spec: WorkerSpec, dtype: torch.dtype) -> ViT:
    """Load a vision transformer, converted if the backend asks for it.

    Raises:
        ValueError: if the model or its variant is missing or does not fit; one line.
    """
    from model_zoo.vit import load_vit, vit_rules

    from model_zoo.registry import get_model

    vit = load_vit(get_model(spec.model), dtype=dtype, device=spec.device, untrained=spec.untrained)
    if spec.variant is not None:
        if spec.untrained:
            _untrained_(vit.model, vit_rules(spec.variant), spec)
        else:
            _load_variant_(vit.model, spec)
    return vit


def _kernels(spec: WorkerSpec) -> Backend:
    # Each backend says what it runs on; AUTO could run another one than its name promises.
    return Backend.TRITON if backend_info(spec.backend).id == "blr-triton" else Backend.TORCH


def _untrained_(model: nn.Module, rules: Sequence[Rule], spec: WorkerSpec) -> None:
    """Put layers with random factors where the rules want converted ones."""
    from model_zoo.convert import plan, replace_linears_

    structures = {name: chosen for name, chosen in plan(model, rules).items() if chosen}
    replace_linears_(model, structures, backend=_kernels(spec))
    model.eval().requires_grad_(False)


def _load_variant_(model: nn.Module, spec: WorkerSpec) -> None:
    from model_zoo.checkpoint import load_variant_

    from model_zoo.registry import get_model

    path = next(
        (known.path for known in get_model(spec.model).variants if known.id == spec.variant), None
    )
    if path is None:
        raise ValueError(f"{spec.model} has no variant {spec.variant}")
    load_variant_(model, Path(path), backend=_kernels(spec))
    model.eval().requires_grad_(False)
