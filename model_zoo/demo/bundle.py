"""Write the finished models to assets/demo in the formats that everything else reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import DiTPipeline
from safetensors.torch import save_file
from torch import nn

from model_zoo.checkpoint import save_variant
from model_zoo.demo.architectures import (
    VIT_ARCHITECTURE,
    VIT_ARGUMENTS,
    VIT_MEAN,
    VIT_STD,
    build_scheduler,
)
from model_zoo.demo.names import CLASSES, IMAGE_SIZE, LABELS
from model_zoo.demo.runtime import say
from model_zoo.demo.variants import KINDS, load_variant_, variant_file
from model_zoo.demo.weights import VIT_FILE, load_autoencoder, load_transformer, load_vit
from model_zoo.dit import fuse_qkv_

SIZE_LIMIT = 20 * 2**20
"""Bytes that assets/demo may take."""


def write_dit(out: Path, folder: Path) -> None:
    """The dense DiT as a diffusers `DiTPipeline` folder, fp16, with its labels."""
    cpu = torch.device("cpu")
    pipeline = DiTPipeline(
        load_transformer(out, cpu).half(), load_autoencoder(out, cpu).half(), build_scheduler()
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    # The pipeline does not write its labels by itself.
    index = folder / "model_index.json"
    config = json.loads(index.read_text(encoding="utf-8"))
    config["id2label"] = {str(i): label for i, label in enumerate(LABELS)}
    index.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def vit_config() -> dict[str, Any]:
    """The `config.json` from which timm builds the ViT."""
    return {
        "architecture": VIT_ARCHITECTURE,
        "num_classes": len(CLASSES),
        "num_features": VIT_ARGUMENTS["embed_dim"],
        "global_pool": "token",
        "model_args": VIT_ARGUMENTS,
        "label_names": list(LABELS),
        "label_descriptions": {label: label for label in LABELS},
        "pretrained_cfg": {
            "tag": "emoji",
            "custom_load": False,
            "input_size": [3, IMAGE_SIZE, IMAGE_SIZE],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(VIT_MEAN),
            "std": list(VIT_STD),
            "num_classes": len(CLASSES),
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "license": "apache-2.0",
        },
    }


def write_vit(out: Path, folder: Path) -> None:
    """The dense ViT as a folder that timm reads, fp16, with its labels."""
    folder.mkdir(parents=True, exist_ok=True)
    vit = load_vit(out / VIT_FILE, torch.device("cpu")).half()
    save_file(vit.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(vit_config(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def write_variants(out: Path, folder: Path, model: str) -> None:
    """The healed variants of "dit" or "vit" that are there, each one file of factors."""
    cpu = torch.device("cpu")
    for kind in KINDS:
        path = out / variant_file(model, kind)
        if not path.exists():
            say("package", f"no {path.name}: {model}-{kind} left out")
            continue
        variant: nn.Module = (
            load_transformer(out, cpu) if model == "dit" else load_vit(out / VIT_FILE, cpu)
        )
        if model == "dit":
            fuse_qkv_(variant)
        report = load_variant_(variant, path)
        save_variant(
            folder / f"{model}-{kind}.safetensors",
            variant.half(),
            base=f"demo-{model}",
            report=report,
        )


def write_assets(out: Path, assets: Path) -> int:
    """Write everything below `assets`/demo; -> its bytes. ValueError if that is too much."""
    folder = assets / "demo"
    write_dit(out, folder / "dit")
    write_vit(out, folder / "vit")
    for model in ("dit", "vit"):
        write_variants(out, folder, model)
    files = [path for path in folder.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    for path in sorted(files):
        say("package", f"{path.stat().st_size:>10,} {path.relative_to(folder)}")
    say("package", f"{total:>10,} bytes in all, {total / 2**20:.2f} MiB")
    if total > SIZE_LIMIT:
        raise ValueError(f"{folder}: expected at most {SIZE_LIMIT} bytes, got {total}")
    return total
