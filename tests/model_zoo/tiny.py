"""Models small enough to build in a test, with random weights that are nowhere zero."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import timm
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from safetensors.torch import save_file
from torch import nn

VIT_ARGUMENTS = {"img_size": 32, "patch_size": 8, "embed_dim": 36, "depth": 2, "num_heads": 3}


def randomize_(model: nn.Module, seed: int) -> nn.Module:
    """adaLN-zero would hide every error behind gates of zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15, generator=generator)
    return model.eval()


def tiny_transformer(classes: int, seed: int = 0, out_channels: int | None = 8) -> nn.Module:
    return randomize_(
        DiTTransformer2DModel(
            num_attention_heads=3,
            attention_head_dim=12,
            in_channels=4,
            out_channels=out_channels,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=classes,
        ),
        seed,
    )


def tiny_pipeline(classes: int, seed: int = 0, out_channels: int | None = 8) -> DiTPipeline:
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=0.4,
    ).eval()
    pipeline = DiTPipeline(
        tiny_transformer(classes, seed, out_channels), vae, DDIMScheduler(clip_sample=False)
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write_dit(folder: Path, classes: int, seed: int = 0, labels: bool = True) -> Path:
    tiny_pipeline(classes, seed).save_pretrained(folder)
    if labels:
        index = folder / "model_index.json"
        content = json.loads(index.read_text())
        content["id2label"] = {str(i): f"thing {i}, alias {i}" for i in range(classes)}
        index.write_text(json.dumps(content))
    return folder


def tiny_vit(classes: int = 5, seed: int = 0) -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **VIT_ARGUMENTS)
    return randomize_(model, seed)


def write_vit(
    folder: Path,
    seed: int = 0,
    *,
    architecture: str = "vit_tiny_patch16_224",
    arguments: Mapping[str, int] = VIT_ARGUMENTS,
    model: nn.Module | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = randomize_(timm.create_model(architecture, num_classes=5, **arguments), seed)
    save_file(model.state_dict(), folder / "model.safetensors")
    config = {
        "architecture": architecture,
        "num_classes": 5,
        "model_args": arguments,
        "label_names": ["ant", "bee", "cat", "dog", "elk"],
        "label_descriptions": {"ant": "ant, emmet"},
        "pretrained_cfg": {
            "num_classes": 5,
            "input_size": [3, 32, 32],
            "mean": [0.4, 0.5, 0.6],
            "std": [0.2, 0.3, 0.25],
            "crop_pct": 0.8,
            "interpolation": "bicubic",
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
