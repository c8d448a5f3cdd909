"""Batched DDIM sampling with guidance, for measuring the demo models while they are made."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from model_zoo.demo.architectures import (
    LATENT_CHANNELS,
    LATENT_SIZE,
    NULL_CLASS,
    build_scheduler,
)


@torch.no_grad()
def sample_latents(
    transformer: nn.Module,
    class_ids: Tensor,
    *,
    seed: int,
    steps: int = 25,
    guidance: float = 4.0,
) -> Tensor:
    """Latents (n, 4, 32, 32) for class ids (n,); the noise is drawn on the CPU from `seed`."""
    device = class_ids.device
    random = torch.Generator().manual_seed(seed)
    shape = (len(class_ids), LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
    latents = torch.randn(shape, generator=random).to(device)
    labels = torch.cat([class_ids, torch.full_like(class_ids, NULL_CLASS)])
    scheduler = build_scheduler()
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        doubled = torch.cat([latents, latents])
        times = t.to(device).expand(len(doubled))
        output = transformer(doubled, timestep=times, class_labels=labels).sample
        wanted, free = output[:, :LATENT_CHANNELS].float().chunk(2)
        guided = free + guidance * (wanted - free)
        latents = scheduler.step(guided, t, latents).prev_sample
    return latents


@torch.no_grad()
def sample_pictures(
    transformer: nn.Module,
    vae: AutoencoderKL,
    class_ids: Tensor,
    *,
    seed: int,
    steps: int = 25,
    guidance: float = 4.0,
    chunk: int = 1024,
) -> Tensor:
    """Pictures (n, 3, 128, 128) in [-1, 1] for class ids (n,)."""
    pictures = []
    for i, part in enumerate(class_ids.split(chunk)):
        latents = sample_latents(transformer, part, seed=seed + i, steps=steps, guidance=guidance)
        for latent in latents.split(64):
            pictures.append(vae.decode(latent / vae.config.scaling_factor).sample)
    return torch.cat(pictures).float().clamp(-1, 1)


@torch.no_grad()
def top_correct(vit: nn.Module, pictures: Tensor, classes: Tensor) -> tuple[float, float]:
    """Shares of pictures whose class is the ViT's first guess, and among its first five."""
    guesses = torch.cat([vit(part).topk(5).indices for part in pictures.split(512)])
    hits = guesses == classes[:, None]
    return float(hits[:, 0].float().mean()), float(hits.any(1).float().mean())
