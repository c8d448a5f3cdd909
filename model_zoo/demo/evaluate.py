"""Measure the finished demo models. The only module that reads the test set."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from model_zoo.demo.autoencoder import measure
from model_zoo.demo.classifier import UNSEEN_SEED, VIEWS, unseen_accuracy
from model_zoo.demo.dataset import Icons, load_training
from model_zoo.demo.grids import save_grid
from model_zoo.demo.names import CLASSES, SAMPLE_SEED, SAMPLE_STEPS, SHOWN
from model_zoo.demo.runtime import Run, say
from model_zoo.demo.sampling import sample_pictures, top_correct
from model_zoo.demo.testset import load_test
from model_zoo.demo.variants import KINDS, load_variant_, variant_file
from model_zoo.demo.weights import (
    VIT_FILE,
    load_autoencoder,
    load_transformer,
    load_vit,
)
from model_zoo.dit import fuse_qkv_
from model_zoo.weights import parameter_count

TEST_SEED = 4048
"""Seed of the test views."""
PER_CLASS = 8


def _rows(results: dict[str, Any]) -> str:
    head = f"{'model':<14}{'variant':<10}{'parameters':>11}  measured"
    lines = [head]
    for key, values in results.items():
        model, _, variant = key.partition("/")
        figures = "  ".join(
            f"{name} {value:.4f}" for name, value in values.items() if name != "parameters"
        )
        lines.append(f"{model:<14}{variant:<10}{values['parameters']:>11,}  {figures}")
    return "\n".join(lines)


def _vit_figures(vit: nn.Module, seen: Icons, test: Icons) -> dict[str, float]:
    unseen1, unseen5 = unseen_accuracy(vit, seen)
    test1, test5 = unseen_accuracy(vit, test, seed=TEST_SEED)
    return {
        "parameters": parameter_count(vit),
        "unseen_top1": unseen1,
        "unseen_top5": unseen5,
        "test_top1": test1,
        "test_top5": test5,
    }


def _how(run: Run) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "device": torch.cuda.get_device_name(run.device) if run.on_gpu else "cpu",
        "torch": torch.__version__,
        "weights": "float16 as bundled, computed in float32 (TF32 products on a GPU)",
        "unseen_views": {"per_picture": VIEWS, "seed": UNSEEN_SEED},
        "test_views": {"per_picture": VIEWS, "seed": TEST_SEED},
        "samples": {
            "per_class": PER_CLASS,
            "seed": SAMPLE_SEED,
            "steps": SAMPLE_STEPS,
            "guidance": 4.0,
        },
    }


def evaluate(run: Run) -> dict[str, Any]:
    """Measure whatever models are there; write `evaluation.json` and `comparison.png`."""
    seen, test = load_training(run.data, device=run.device), load_test(run.data, device=run.device)
    per_class, steps, classes = PER_CLASS, SAMPLE_STEPS, len(CLASSES)
    if not run.on_gpu:
        few = 4
        seen, test = seen.select(seen.classes < few), test.select(test.classes < few)
        per_class, steps, classes = 1, 2, few
    results: dict[str, Any] = {}
    vae = load_autoencoder(run.out, run.device)
    quality, _ = measure(vae, seen.rgba, run)
    results["autoencoder/dense"] = {"parameters": parameter_count(vae), "psnr_db": quality}
    judge = load_vit(run.out / VIT_FILE, run.device)
    results["vit/dense"] = _vit_figures(judge, seen, test)
    for kind in KINDS:
        path = run.out / variant_file("vit", kind)
        if path.exists():
            vit = load_vit(run.out / VIT_FILE, run.device)
            load_variant_(vit, path)
            results[f"vit/{kind}"] = _vit_figures(vit, seen, test)
    ids = torch.arange(classes, device=run.device).repeat_interleave(per_class)
    shown = torch.tensor([CLASSES.index(name) for name in SHOWN], device=run.device)
    sheet = []
    for kind in ("dense", *KINDS):
        transformer: nn.Module = load_transformer(run.out, run.device)
        if kind != "dense":
            path = run.out / variant_file("dit", kind)
            if not path.exists():
                continue
            fuse_qkv_(transformer)
            load_variant_(transformer, path)
        pictures = sample_pictures(transformer, vae, ids, seed=SAMPLE_SEED, steps=steps)
        top1, top5 = top_correct(judge, pictures, ids)
        results[f"dit/{kind}"] = {
            "parameters": parameter_count(transformer),
            "recognised_top1": top1,
            "recognised_top5": top5,
        }
        sheet.append(sample_pictures(transformer, vae, shown, seed=SAMPLE_SEED, steps=steps))
    save_grid(run.out / "comparison.png", torch.cat(sheet), columns=len(SHOWN))
    record = {"schema": "blr-lab/demo-models", "version": 1, "how": _how(run), "results": results}
    (run.out / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n")
    for line in _rows(results).splitlines():
        say("evaluate", line)
    return results
