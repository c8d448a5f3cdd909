"""Train the DiT on the autoencoder's latents."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from model_zoo.demo.architectures import (
    LATENT_CHANNELS,
    NULL_CLASS,
    build_scheduler,
    build_transformer,
    initialise_transformer,
    seed_everything,
)
from model_zoo.demo.augment import light_views
from model_zoo.demo.dataset import Icons, load_training
from model_zoo.demo.grids import save_grid
from model_zoo.demo.names import CLASSES
from model_zoo.demo.runtime import (
    Average,
    Progress,
    Run,
    clip_gradients_,
    cosine,
    load_tensors,
    save_tensors,
    say,
    set_rate,
)
from model_zoo.demo.sampling import sample_pictures, top_correct
from model_zoo.demo.weights import TRANSFORMER_FILE, load_autoencoder, load_transformer, load_vit
from model_zoo.weights import parameter_count

SEED = 12
LABEL_DROPOUT = 0.1
SAVE_EVERY_S = 60.0


@torch.no_grad()
def encode_views(vae: AutoencoderKL, icons: Icons, views: int, run: Run) -> Tensor:
    """Scaled latents (views, n, 4, 32, 32) of random light views of every picture."""
    encoded = []
    for _ in range(views):
        for rgba in icons.rgba.split(256):
            with run.autocast():
                mean = vae.encode(light_views(rgba)).latent_dist.mean
            encoded.append(mean.float() * vae.config.scaling_factor)
    return torch.cat(encoded).view(views, len(icons), *encoded[0].shape[1:])


class NoisyBatches:
    """Draws training batches: noisy latents, their noise, times and labels."""

    def __init__(self, latents: Tensor, classes: Tensor) -> None:
        self.latents, self.classes = latents, classes
        cumulative = build_scheduler().alphas_cumprod.to(latents.device)
        self.signal, self.noise = cumulative.sqrt(), (1 - cumulative).sqrt()

    def draw(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> noisy (n, 4, 32, 32), noise likewise, times (n,), labels (n,), some null."""
        device = self.latents.device
        view = torch.randint(len(self.latents), (n,), device=device)
        picture = torch.randint(len(self.classes), (n,), device=device)
        clean = self.latents[view, picture]
        times = torch.randint(len(self.signal), (n,), device=device)
        noise = torch.randn_like(clean)
        factors = (self.signal[times], self.noise[times])
        noisy = factors[0][:, None, None, None] * clean + factors[1][:, None, None, None] * noise
        labels = self.classes[picture]
        dropped = torch.rand(n, device=device) < LABEL_DROPOUT
        return noisy, noise, times, torch.where(dropped, NULL_CLASS, labels)


def train(run: Run, judge: Path | None = None) -> None:
    """Train for the stage's time; write averaged weights and a sheet of samples.

    judge: file of a trained ViT, to tell how many samples it recognises.
    """
    seed_everything(SEED + run.resume)
    icons = load_training(run.data, device=run.device)
    vae = load_autoencoder(run.out, run.device)
    latents = encode_views(vae, icons, 48 if run.on_gpu else 1, run)
    say(
        "dit",
        f"latents {tuple(latents.shape)} std {float(latents.std()):.4f} at {run.elapsed():.1f}s",
    )
    batches = NoisyBatches(latents, icons.classes)
    transformer = build_transformer()
    initialise_transformer(transformer)
    path = run.out / TRANSFORMER_FILE
    if run.resume and path.exists():
        transformer.load_state_dict(load_tensors(path)[0])
        say("dit", "resumed")
    # Evaluation mode while training: the only thing it turns off is the label embedders' own
    # dropout, which each block would draw apart.
    transformer.to(run.device).eval()
    run.compile_(*transformer.transformer_blocks)
    say("dit", f"{parameter_count(transformer)} parameters, {len(icons)} pictures")
    batch = run.batch_size(512)
    optimizer = torch.optim.AdamW(
        transformer.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=run.on_gpu
    )
    average = Average(transformer, 0.9995)
    warmup = 300
    progress = Progress(run, "dit", batch, reserve=25 if run.on_gpu else 5)
    saved = run.elapsed()
    for step, used in progress:
        peak = 1e-3 if not run.resume else 7e-4
        set_rate(optimizer, cosine(used, peak, step=step, warmup=warmup, floor=2e-5))
        noisy, noise, times, labels = batches.draw(batch)
        with run.autocast():
            output = transformer(noisy, timestep=times, class_labels=labels).sample
        loss = F.mse_loss(output[:, :LATENT_CHANNELS].float(), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradients_(transformer.parameters())
        optimizer.step()
        average.update(step)
        progress.log(step, loss=loss.detach())
        if run.elapsed() - saved > SAVE_EVERY_S:
            save_tensors(path, {**transformer.state_dict(), **average.state()})
            saved = run.elapsed()
    average.swap()
    save_tensors(path, transformer.state_dict())
    say("dit", f"saved at {run.elapsed():.1f}s")
    # A fresh copy: the compiled one would be compiled again for the shapes of sampling.
    final = load_transformer(run.out, run.device)
    per_class = 8 if run.on_gpu else 1
    ids = torch.arange(len(CLASSES) if run.on_gpu else 8, device=run.device)
    ids = ids.repeat_interleave(per_class)
    with run.autocast():
        pictures = sample_pictures(final, vae, ids, seed=SEED, steps=25 if run.on_gpu else 2)
    save_grid(run.out / "samples.png", pictures[::per_class], columns=16)
    if judge is not None and judge.exists():
        top1, top5 = top_correct(load_vit(judge, run.device), pictures, ids)
        say("dit", f"samples recognised: top-1 {top1:.4f} top-5 {top5:.4f}")
    say("dit", f"done at {run.elapsed():.1f}s")
