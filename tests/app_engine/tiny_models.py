"""Tiny models in the real file formats, with converted variants, made where a test wants them."""

from __future__ import annotations

import json
from pathlib import Path

import timm
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTTransformer2DModel
from safetensors.torch import save_file

from model_zoo.checkpoint import save_variant
from model_zoo.convert import convert_
from model_zoo.dit import DiT, dit_rules, load_dit, save_dit
from model_zoo.vit import load_vit, vit_rules

CLASSES = 10


def make_dit(folder: Path) -> Path:
    """A DiTPipeline folder of 2 blocks, width 36, 16 tokens, with a BLAST variant beside it."""
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=18,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
    )
    with torch.no_grad():
        # The gates of a new DiT are shut, and all classes would look the same.
        for parameter in transformer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    vae = AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, scaling_factor=0.5
    )
    save_dit(
        DiT(
            transformer=transformer,
            vae=vae,
            scheduler=DDIMScheduler(clip_sample=False),
            labels={i: f"thing {i}" for i in range(CLASSES)},
            model="tiny",
            untrained=False,
            config=dict(transformer.config),
            scaling_factor=0.5,
            out_channels=8,
        ),
        folder,
    )
    dense = load_dit(folder)
    convert_(dense.transformer, dit_rules("blast", blocks=3))
    save_variant(folder.with_name(f"{folder.name}-blast.safetensors"), dense.transformer, base="x")
    return folder


def make_vit(folder: Path) -> Path:
    """A timm folder of 2 blocks, width 48, 16 patches, with a BLAST variant beside it."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **sizes)
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    labels = [f"thing_{i}" for i in range(CLASSES)]
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": CLASSES,
        "model_args": sizes,
        "label_names": labels,
        "label_descriptions": {name: name.replace("_", " ") for name in labels},
        "pretrained_cfg": {
            "num_classes": CLASSES,
            "input_size": [3, 32, 32],
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "crop_pct": 1.0,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    dense = load_vit(folder)
    convert_(dense.model, vit_rules("blast"))
    save_variant(folder.with_name(f"{folder.name}-blast.safetensors"), dense.model, base="x")
    return folder
