"""Where the stages leave their weights, and how the next stage reads them.

They are kept in fp16, because that is what is bundled: what is healed against and measured is then
exactly what people run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DiTTransformer2DModel
from torch import nn

from model_zoo.demo.architectures import build_autoencoder, build_transformer, build_vit
from model_zoo.demo.runtime import load_tensors

AUTOENCODER_FILE = "vae.safetensors"
TRANSFORMER_FILE = "dit.safetensors"
VIT_FILE = "vit.safetensors"


def load_autoencoder(out: Path, device: torch.device) -> AutoencoderKL:
    """The trained autoencoder, with its own scaling factor in the config."""
    tensors, metadata = load_tensors(out / AUTOENCODER_FILE)
    vae = build_autoencoder()
    vae.load_state_dict(tensors)
    vae.register_to_config(scaling_factor=float(metadata["scaling_factor"]))
    return vae.to(device).eval().requires_grad_(False)


def load_transformer(out: Path, device: torch.device) -> DiTTransformer2DModel:
    """The trained DiT."""
    transformer = build_transformer()
    transformer.load_state_dict(load_tensors(out / TRANSFORMER_FILE)[0])
    return transformer.to(device).eval().requires_grad_(False)


def load_vit(path: Path, device: torch.device) -> nn.Module:
    """The trained ViT in the file `path`."""
    vit = build_vit()
    vit.load_state_dict(load_tensors(path)[0])
    return vit.to(device).eval().requires_grad_(False)
