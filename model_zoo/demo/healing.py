"""Make the block low-rank variants usable: factorize, then train against the dense model.

Only the factors move. Biases and all unconverted layers stay those of the dense model, so a
variant needs to store nothing but its factors.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blr_kernels import Backend, BLRLinear
from model_zoo.convert import ConversionReport, Rule, convert_
from model_zoo.demo.architectures import LATENT_CHANNELS, seed_everything
from model_zoo.demo.classifier import mixed_loss, mixed_views, unseen_accuracy
from model_zoo.demo.dataset import load_training
from model_zoo.demo.generator import NoisyBatches, encode_views
from model_zoo.demo.runtime import (
    Average,
    Progress,
    Run,
    clip_gradients_,
    cosine,
    save_tensors,
    say,
    set_rate,
)
from model_zoo.demo.variants import BLOCKS, load_variant_, variant_file
from model_zoo.demo.weights import (
    VIT_FILE,
    load_autoencoder,
    load_transformer,
    load_vit,
)
from model_zoo.dit import dit_rules, fuse_qkv_
from model_zoo.vit import vit_rules

SEED = 14
DATA_WEIGHT = 0.25
"""Weight of the plain training loss beside the distance to the dense model."""


def student_(
    run: Run, model: nn.Module, rules: list[Rule], name: str, path: Path
) -> ConversionReport | None:
    """Convert `model` in place and leave only its factors trainable.

    The factors are written to `path` at once; with `resume` they are read from there instead.
    -> the report of the conversion, or None when the stage's time is up and nothing is left to do.
    """
    if run.resume and path.exists():
        report = load_variant_(model, path)
        say(name, "resumed")
    else:
        report = convert_(model, rules, backend=Backend.TORCH)
        for line in str(report).splitlines():
            say(name, line)
    model.requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, BLRLinear):
            for factor in layer.factor_names:
                getattr(layer, factor).requires_grad_(True)
    say(name, f"ready at {run.elapsed():.1f}s")
    if not path.exists():
        save_factors(path, Average(model, 0.0), report)
    return report if run.elapsed() < run.seconds else None


def multiply_out_(model: nn.Module) -> None:
    """Let every converted layer of `model` train through the dense weight of its factors.

    The function and its gradients are the same. At a width of 144 the weight costs little beside
    thousands of tokens, and one product instead of two or three trains several times faster.
    """
    for layer in model.modules():
        if isinstance(layer, BLRLinear):
            layer.forward = partial(_through_dense, layer)  # type: ignore[method-assign]


def _through_dense(layer: BLRLinear, x: Tensor) -> Tensor:
    return F.linear(x, layer.to_dense(), layer.bias)


def save_factors(path: Path, average: Average, report: ConversionReport) -> None:
    """Write the averaged factors and the report of their conversion."""
    save_tensors(path, average.state(), {"report": json.dumps(report.to_dict())})


def heal_dit(run: Run, kind: str) -> None:
    """Factorize the DiT to one kind of structure and distil it from the dense one."""
    name = f"dit-{kind}"
    seed_everything(SEED)
    teacher = load_transformer(run.out, run.device)
    student = load_transformer(run.out, run.device)
    fuse_qkv_(student)
    path = run.out / variant_file("dit", kind)
    rules = dit_rules(kind, layers="all", blocks=BLOCKS[kind])
    report = student_(run, student, rules, name, path)
    if report is None:
        return
    icons = load_training(run.data, device=run.device)
    latents = encode_views(
        load_autoencoder(run.out, run.device), icons, 48 if run.on_gpu else 1, run
    )
    batches = NoisyBatches(latents, icons.classes)
    multiply_out_(student)
    run.compile_(*teacher.transformer_blocks, *student.transformer_blocks)
    batch = run.batch_size(512)
    average = Average(student, 0.999)
    optimizer = torch.optim.AdamW(
        average.trained, 1e-3, betas=(0.9, 0.99), weight_decay=0.0, fused=run.on_gpu
    )
    progress = Progress(run, name, batch, reserve=2)
    for step, used in progress:
        set_rate(optimizer, cosine(used, 1e-3, step=step, warmup=200, floor=1e-5))
        noisy, noise, times, labels = batches.draw(batch)
        with run.autocast():
            with torch.no_grad():
                wanted = teacher(noisy, timestep=times, class_labels=labels).sample.float()
            output = student(noisy, timestep=times, class_labels=labels).sample.float()
        distance = F.mse_loss(output, wanted)
        data = F.mse_loss(output[:, :LATENT_CHANNELS], noise)
        optimizer.zero_grad(set_to_none=True)
        (distance + DATA_WEIGHT * data).backward()
        clip_gradients_(average.trained)
        optimizer.step()
        average.update(step)
        progress.log(step, distance=distance.detach(), data=data.detach())
    save_factors(path, average, report)
    say(name, f"saved at {run.elapsed():.1f}s")


def heal_vit(run: Run, kind: str) -> None:
    """Factorize the ViT to one kind of structure and distil it from the dense one."""
    name = f"vit-{kind}"
    seed_everything(SEED)
    teacher = load_vit(run.out / VIT_FILE, run.device)
    student = load_vit(run.out / VIT_FILE, run.device)
    path = run.out / variant_file("vit", kind)
    rules = vit_rules(kind, layers="all", blocks=BLOCKS[kind])
    report = student_(run, student, rules, name, path)
    if report is None:
        return
    icons = load_training(run.data, device=run.device)
    multiply_out_(student)
    run.compile_(*teacher.blocks, *student.blocks)
    batch = run.batch_size(1024)
    average = Average(student, 0.999)
    optimizer = torch.optim.AdamW(
        average.trained, 1e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=run.on_gpu
    )
    progress = Progress(run, name, batch, reserve=5)
    for step, used in progress:
        set_rate(optimizer, cosine(used, 1e-3, step=step, warmup=200, floor=1e-5))
        pictures, first, second, share = mixed_views(icons, batch)
        with run.autocast():
            with torch.no_grad():
                wanted = teacher(pictures).float()
            logits = student(pictures).float()
        distance = F.kl_div(
            logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        data = mixed_loss(logits, first, second, share)
        optimizer.zero_grad(set_to_none=True)
        (distance + DATA_WEIGHT * data).backward()
        clip_gradients_(average.trained)
        optimizer.step()
        average.update(step)
        progress.log(step, distance=distance.detach(), data=data.detach())
    save_factors(path, average, report)
    say(name, f"saved at {run.elapsed():.1f}s")
    if run.on_gpu:
        average.swap()
        top1, top5 = unseen_accuracy(student, icons)
        say(name, f"unseen views: top-1 {top1:.4f} top-5 {top5:.4f}")
