from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tiny import write_vit

from blr_kernels import BLRLinear
from model_zoo.checkpoint import CheckpointError, save_variant
from model_zoo.convert import convert_
from model_zoo.registry import get_model
from model_zoo.untrained import untrained_variant_
from model_zoo.vit import PAPER_SIZES, classify, load_vit, top_classes, vit_rules


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vit(tmp_path_factory.mktemp("models") / "vit")


def picture(seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (41, 57, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def converted_layers(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, BLRLinear)]


def test_outputs_equal_those_of_timm(folder: Path) -> None:
    reference = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(reference)
    assert list(config["mean"]) == [0.4, 0.5, 0.6]  # the model's own, not ImageNet's
    transform = timm.data.create_transform(**config, is_training=False)
    with torch.no_grad():
        expected = reference(transform(picture())[None])
        vit = load_vit(folder)
        assert torch.equal(vit.model(vit.pixels([picture()])), expected)
    (found,) = classify(vit, [picture()], top=3)
    values, classes = expected[0].softmax(-1).topk(3)
    assert [index for index, _, _ in found] == classes.tolist()
    assert [value for _, _, value in found] == pytest.approx(values.tolist())


def test_labels_are_the_models_own(folder: Path) -> None:
    vit = load_vit(f"local-dir:{folder}")
    assert vit.labels == {0: "ant, emmet", 1: "bee", 2: "cat", 3: "dog", 4: "elk"}
    (found,) = classify(vit, [picture()], top=99)
    assert sorted(index for index, _, _ in found) == [0, 1, 2, 3, 4]
    assert all(vit.labels[index] == label for index, label, _ in found)
    assert sum(value for _, _, value in found) == pytest.approx(1)
    assert len(classify(vit, [picture(1), picture(2)])) == 2


def test_grey_and_transparent_pictures_are_taken(folder: Path) -> None:
    vit = load_vit(folder, dtype=torch.bfloat16)
    pixels = vit.pixels([Image.new("L", (40, 30)), Image.new("RGBA", (9, 9))])
    assert pixels.shape == (2, 3, 32, 32)
    assert pixels.dtype == vit.dtype == torch.bfloat16


def test_bad_requests(folder: Path) -> None:
    vit = load_vit(folder)
    with pytest.raises(ValueError, match="at least one image"):
        classify(vit, [])
    with pytest.raises(ValueError, match="top must be at least 1, got 0"):
        top_classes(torch.zeros(1, 3), {}, 0)


@pytest.mark.parametrize("kind", ["low_rank", "monarch", "blast"])
def test_a_variant_beside_the_folder_is_loaded(folder: Path, kind: str) -> None:
    vit = load_vit(folder)
    report = convert_(vit.model, vit_rules(kind))
    assert len(report.layers) == 6
    assert {layer.structure.kind for layer in report.layers} == {kind}
    entry = get_model(str(folder))
    save_variant(entry.variant_path(kind), vit.model, base=entry.id, report=report)
    again = load_vit(entry, variant=kind)
    with torch.no_grad():
        pixels = vit.pixels([picture()])
        assert torch.equal(again.model(pixels), vit.model(pixels))
    known = {variant.id: variant for variant in get_model(str(folder)).variants}
    assert known[kind].path == entry.variant_path(kind)
    assert known[kind].summary.endswith("% of the converted weights")


def test_rules_for_more_layers(folder: Path) -> None:
    vit = load_vit(folder)
    report = convert_(vit.model, vit_rules("blast", layers="all", fraction=0.4, blocks=2))
    assert len(report.layers) == 8
    assert report.skipped == ("head",)
    assert {layer.structure.blocks for layer in report.layers} == {2}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="'paper' or 'all'"):
        vit_rules("blast", layers="most")


@pytest.mark.parametrize("variant", [None, "low_rank", "monarch", "blast"])
def test_untrained(folder: Path, variant: str | None) -> None:
    vit = load_vit(folder, untrained=True, variant=variant, dtype=torch.float16)
    assert vit.untrained
    for tensor in (*vit.model.parameters(), *vit.model.buffers()):
        assert tensor.dtype == torch.float16
        assert bool(torch.isfinite(tensor).all())
    assert len(converted_layers(vit.model)) == (0 if variant is None else 6)


def test_full_size_has_the_papers_sizes() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(86.6, abs=0.05)
    structures = untrained_variant_(model, "blast", PAPER_SIZES)
    assert len(structures) == 36
    assert {str(structure) for structure in structures.values()} == {"BLAST b3 r128"}
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    structures = untrained_variant_(model, "monarch", PAPER_SIZES)
    assert {str(structure) for structure in structures.values()} == {"Monarch b4 r128"}
    with pytest.raises(ValueError, match="none of the layers"):
        untrained_variant_(torch.nn.Sequential(), "blast", PAPER_SIZES)


def test_missing_and_broken_weights_are_named(tmp_path: Path) -> None:
    """C9."""
    folder = write_vit(tmp_path / "vit")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        load_vit(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors or pytorch_model\.bin is missing"):
        load_vit(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_vit(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="has no BLAST variant here"):
        load_vit(write_vit(tmp_path / "whole"), variant="blast")
    config = tmp_path / "whole" / "config.json"
    config.write_text(config.read_text().replace("vit_tiny_patch16_224", "vit_unheard_of"))
    with pytest.raises(ValueError, match="cannot be loaded: Unknown model"):
        load_vit(tmp_path / "whole")
    with pytest.raises(ValueError, match="expected one to classify"):
        load_vit("dit-xl-2-256")


@pytest.mark.skipif(not get_model("demo-vit").available(), reason="bundled models not built yet")
@pytest.mark.parametrize("variant", [None, "low_rank", "monarch", "blast"])
def test_bundled_model_runs(variant: str | None) -> None:
    vit = load_vit("demo-vit", variant=variant)
    (found,) = classify(vit, [picture()])
    assert len(found) == 5
    assert bool(converted_layers(vit.model)) == (variant is not None)
