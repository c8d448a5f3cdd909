"""The model that a spec names, from the zoo, on its device, with its kernels chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from app.engine.spec import WorkerSpec
from blr_kernels import Backend

if TYPE_CHECKING:
    from model_zoo.dit import DiT
    from model_zoo.vit import ViT


def open_dit(spec: WorkerSpec, dtype: torch.dtype) -> DiT:
    """Load a diffusion transformer, converted if the backend asks for it.

    Raises:
        ValueError: if the model or its variant is missing or does not fit; one line.
    """
    from model_zoo.dit import load_dit

    return load_dit(
        spec.model,
        dtype=dtype,
        device=spec.device,
        fuse_qkv=spec.fuse_qkv,
        untrained=spec.untrained,
        variant=spec.variant,
        backend=_kernels(spec),
    )


def open_vit(spec: WorkerSpec, dtype: torch.dtype) -> ViT:
    """Load a vision transformer, converted if the backend asks for it.

    Raises:
        ValueError: if the model or its variant is missing or does not fit; one line.
    """
    from model_zoo.vit import load_vit

    return load_vit(
        spec.model,
        dtype=dtype,
        device=spec.device,
        untrained=spec.untrained,
        variant=spec.variant,
        backend=_kernels(spec),
    )


def _kernels(spec: WorkerSpec) -> Backend:
    # Each backend runs on what it is named after; AUTO could choose another.
    return Backend.TRITON if spec.backend == "blr-triton" else Backend.TORCH
