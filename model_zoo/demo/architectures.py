"""The three networks of the demo, at sizes that 3, 4 and 9 blocks divide. All start from a seed."""

from __future__ import annotations

from typing import Any

import timm
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTTransformer2DModel
from torch import nn

from model_zoo.demo.names import CLASSES, IMAGE_SIZE

LATENT_SIZE = 32
LATENT_CHANNELS = 4
NULL_CLASS = len(CLASSES)
"""The class id that stands for "no class" in guidance."""

VIT_ARCHITECTURE = "vit_tiny_patch16_224"
VIT_ARGUMENTS: dict[str, Any] = {
    "img_size": IMAGE_SIZE,
    "embed_dim": 144,
    "depth": 4,
    "num_heads": 6,
}
VIT_MEAN = VIT_STD = (0.5, 0.5, 0.5)


def build_autoencoder() -> AutoencoderKL:
    """128x128x3 pictures <-> 32x32x4 latents, 0.8 M parameters, no attention."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 48, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=IMAGE_SIZE,
        mid_block_add_attention=False,
    )


def build_transformer() -> DiTTransformer2DModel:
    """The DiT: 256 tokens of width 144, 6 blocks, 2.8 M parameters."""
    return DiTTransformer2DModel(
        num_attention_heads=6,
        attention_head_dim=24,
        in_channels=LATENT_CHANNELS,
        out_channels=2 * LATENT_CHANNELS,
        num_layers=6,
        sample_size=LATENT_SIZE,
        patch_size=2,
        num_embeds_ada_norm=len(CLASSES),
    )


def initialise_transformer(transformer: DiTTransformer2DModel) -> None:
    """adaLN-zero: every block starts as the identity and the output at zero."""
    zeroed: list[nn.Linear] = [transformer.proj_out_1, transformer.proj_out_2]
    for block in transformer.transformer_blocks:
        zeroed.append(block.norm1.linear)
        emb = block.norm1.emb
        nn.init.normal_(emb.class_embedder.embedding_table.weight, std=0.02)
        nn.init.normal_(emb.timestep_embedder.linear_1.weight, std=0.02)
        nn.init.normal_(emb.timestep_embedder.linear_2.weight, std=0.02)
    for linear in zeroed:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)


def build_scheduler() -> DDIMScheduler:
    """The noise schedule of DiT: 1000 linear steps, epsilon prediction."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.0001,
        beta_end=0.02,
        beta_schedule="linear",
        clip_sample=False,
        prediction_type="epsilon",
    )


def build_vit(classes: int = len(CLASSES), drop_path: float = 0.0) -> nn.Module:
    """The ViT: 64 patches and a class token of width 144, 4 blocks, 1.1 M parameters."""
    return timm.create_model(
        VIT_ARCHITECTURE,
        pretrained=False,
        num_classes=classes,
        drop_path_rate=drop_path,
        **VIT_ARGUMENTS,
    )


def seed_everything(seed: int) -> None:
    """Seed torch on every device."""
    torch.manual_seed(seed)
