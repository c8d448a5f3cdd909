"""Train the ViT on strongly varied views of the training designers' pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_zoo.demo.architectures import build_vit, seed_everything
from model_zoo.demo.augment import fixed_views, strong_views
from model_zoo.demo.dataset import Icons, load_training
from model_zoo.demo.names import CLASSES, TRAINING_DESIGNERS
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
from model_zoo.demo.sampling import top_correct
from model_zoo.weights import parameter_count

SEED = 13
UNSEEN_SEED = 2024
"""Seed of the views that measure the training designers' pictures."""
VIEWS = 8
SMOOTHING = 0.1


def mixed_loss(logits: Tensor, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Cross-entropy against two labels, `share` (n,) of the first; -> scalar."""
    losses = [
        F.cross_entropy(logits.float(), labels, label_smoothing=SMOOTHING, reduction="none")
        for labels in (first, second)
    ]
    return (share * losses[0] + (1 - share) * losses[1]).mean()


def mixed_views(icons: Icons, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A training batch: pictures (n, 3, 128, 128), two labels each, share of the first.

    At least half show the classes, however many auxiliary pictures there are. Two fifths are
    blends with another picture, mostly of the one.
    """
    device = icons.rgba.device
    index = torch.randint(len(icons), (batch,), device=device)
    wanted = (icons.classes < len(CLASSES)).nonzero()[:, 0]
    sure = wanted[torch.randint(len(wanted), (batch,), device=device)]
    index = torch.where(torch.rand(batch, device=device) < 0.5, sure, index)
    pictures, first = strong_views(icons.rgba[index]), icons.classes[index]
    other = torch.randperm(batch, device=device)
    share = torch.empty(batch, device=device).uniform_(0.6, 1.0)
    share = torch.where(torch.rand(batch, device=device) < 0.4, share, torch.ones_like(share))
    pictures = torch.lerp(pictures[other], pictures, share[:, None, None, None])
    return pictures, first, first[other], share


@torch.no_grad()
def unseen_accuracy(
    vit: nn.Module, icons: Icons, *, seed: int = UNSEEN_SEED
) -> tuple[float, float]:
    """Top-1 and top-5 on VIEWS fixed views of every picture."""
    views = fixed_views(icons.rgba, VIEWS, seed)
    return top_correct(vit, views, icons.classes.repeat_interleave(VIEWS))


def train(
    run: Run, name: str = "vit", *, auxiliary: bool = False, holdout: str | None = None
) -> None:
    """Train for the stage's time and write the averaged weights as `<name>.safetensors`.

    auxiliary: learn the auxiliary names as further classes, whose outputs are dropped at the end.
    holdout: leave this training designer out and measure on it instead of keeping the weights.
    """
    seed_everything(SEED)
    icons = load_training(run.data, device=run.device, auxiliary=auxiliary)
    measured = icons.select(icons.classes < len(CLASSES))
    if holdout is not None:
        if holdout not in TRAINING_DESIGNERS:
            raise ValueError(f"expected one of {', '.join(TRAINING_DESIGNERS)}, got {holdout}")
        icons = icons.by(tuple(d for d in TRAINING_DESIGNERS if d != holdout))
        measured = measured.by((holdout,))
    classes = int(icons.classes.max()) + 1
    vit = build_vit(classes).to(run.device)
    path = run.out / f"{name}.safetensors"
    if run.resume and path.exists() and not auxiliary:
        vit.load_state_dict(load_tensors(path)[0])
        say(name, "resumed")
    run.compile_(*vit.blocks)
    say(name, f"{parameter_count(vit)} parameters, {len(icons)} pictures, {classes} classes")
    batch = run.batch_size(1024)
    optimizer = torch.optim.AdamW(
        vit.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.05, fused=run.on_gpu
    )
    average = Average(vit, 0.999)
    progress = Progress(run, name, batch, reserve=8 if run.on_gpu else 5)
    vit.train()
    for step, used in progress:
        set_rate(optimizer, cosine(used, 1.5e-3, step=step, warmup=300, floor=1e-5))
        pictures, first, second, share = mixed_views(icons, batch)
        with run.autocast():
            logits = vit(pictures)
        loss = mixed_loss(logits, first, second, share)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_gradients_(vit.parameters())
        optimizer.step()
        average.update(step)
        progress.log(step, loss=loss.detach())
    average.swap()
    state = {
        n: t[: len(CLASSES)] if n.startswith("head.") else t for n, t in vit.state_dict().items()
    }
    final = build_vit().to(run.device).eval()
    final.load_state_dict(state)
    if not run.on_gpu:
        measured = measured.select(torch.arange(len(measured)) < 4)
    top1, top5 = unseen_accuracy(final, measured)
    what = f"designer {holdout} left out" if holdout else "unseen views"
    say(name, f"{what}: top-1 {top1:.4f} top-5 {top5:.4f}, done at {run.elapsed():.1f}s")
    if holdout is None:
        save_tensors(path, state, {"unseen_top1": f"{top1:.5f}", "auxiliary": str(auxiliary)})
