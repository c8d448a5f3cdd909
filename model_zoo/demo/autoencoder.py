"""Train the autoencoder: sharp, flat colours through 32x32x4 latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from model_zoo.demo.architectures import build_autoencoder, seed_everything
from model_zoo.demo.augment import light_views, strong_views
from model_zoo.demo.dataset import load_training
from model_zoo.demo.names import CLASSES
from model_zoo.demo.runtime import (
    Average,
    Progress,
    Run,
    clip_gradients_,
    cosine,
    load_tensors,
    psnr,
    save_tensors,
    say,
    set_rate,
)
from model_zoo.demo.weights import AUTOENCODER_FILE
from model_zoo.weights import parameter_count

SEED = 11
KL_WEIGHT = 1e-4
LATENT_NOISE = 0.05
"""Noise on latents while the decoder learns, in units of their spread: it forgives the DiT."""


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 at three scales, and L1 of the edges. (n, 3, h, w) -> scalar."""
    loss = F.l1_loss(output, target)
    for axis in (2, 3):
        loss = loss + F.l1_loss(output.diff(dim=axis), target.diff(dim=axis))
    for _ in range(2):
        output, target = F.avg_pool2d(output, 2), F.avg_pool2d(target, 2)
        loss = loss + 0.5 * F.l1_loss(output, target)
    return loss


def train(run: Run) -> None:
    """Train for the stage's time and write the averaged weights with their scaling factor."""
    seed_everything(SEED)
    icons = load_training(run.data, device=run.device, auxiliary=True)
    vae = build_autoencoder().to(run.device)
    path = run.out / AUTOENCODER_FILE
    if run.resume and path.exists():
        vae.load_state_dict(load_tensors(path)[0])
    if run.on_gpu:
        vae.to(memory_format=torch.channels_last)
    run.compile_(vae.encoder, vae.decoder)
    say("autoencoder", f"{parameter_count(vae)} parameters, {len(icons)} pictures")
    batch = run.batch_size(128)
    optimizer = torch.optim.AdamW(
        vae.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=1e-3, fused=run.on_gpu
    )
    average = Average(vae, 0.999)
    progress = Progress(run, "autoencoder", batch, reserve=8 if run.on_gpu else 2)
    for step, used in progress:
        set_rate(optimizer, cosine(used, 2e-3, step=step, warmup=100, floor=1e-5))
        rgba = icons.rgba[torch.randint(len(icons), (batch,), device=run.device)]
        quarter = max(1, batch // 4)
        picture = torch.cat([light_views(rgba[quarter:]), strong_views(rgba[:quarter])])
        if run.on_gpu:
            picture = picture.contiguous(memory_format=torch.channels_last)
        with run.autocast():
            posterior = vae.encode(picture).latent_dist
            latents = posterior.sample()
            noise = LATENT_NOISE * latents.detach().std() * torch.randn_like(latents)
            output = vae.decode(latents + noise).sample
        loss = reconstruction_loss(output.float(), picture)
        kl = (
            0.5
            * (
                posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()
            ).mean()
        )
        optimizer.zero_grad(set_to_none=True)
        (loss + KL_WEIGHT * kl).backward()
        clip_gradients_(vae.parameters())
        optimizer.step()
        average.update(step)
        progress.log(step, loss=loss.detach(), kl=kl.detach())
    average.swap()
    # A fresh copy: the compiled one would be compiled again for each new shape below.
    final = build_autoencoder().to(run.device).eval()
    final.load_state_dict(vae.state_dict())
    torch.manual_seed(SEED)
    pictures = icons.select(icons.classes < len(CLASSES))
    quality, spread = measure(final, pictures.rgba if run.on_gpu else pictures.rgba[:16], run)
    say(
        "autoencoder",
        f"PSNR {quality:.2f} dB on light views, latents' standard deviation {spread:.4f}",
    )
    metadata = {"scaling_factor": repr(1 / spread), "psnr": f"{quality:.3f}"}
    save_tensors(path, final.state_dict(), metadata)


@torch.no_grad()
def measure(vae: AutoencoderKL, rgba: Tensor, run: Run) -> tuple[float, float]:
    """-> (PSNR in dB of reconstructed light views, standard deviation of the latents)."""
    inputs, outputs, latents = [], [], []
    for part in rgba.split(128):
        picture = light_views(part)
        with run.autocast():
            mean = vae.encode(picture).latent_dist.mean
            outputs.append(vae.decode(mean).sample.float())
        inputs.append(picture)
        latents.append(mean.float())
    return psnr(torch.cat(outputs), torch.cat(inputs)), float(torch.cat(latents).std())
