from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tiny import randomize_, write_vit

from blr_kernels import BLRLinear, LowRank
from model_zoo.checkpoint import CheckpointError, save_variant
from model_zoo.convert import Rule, convert_
from model_zoo.registry import get_model
from model_zoo.untrained import untrained_variant_
from model_zoo.vit import PAPER_SIZES, classify, load_vit, top_classes, vit_rules

ROTARY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}


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


def test_tensors_come_one_by_one_in_their_dtype(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model never exists in float32: it is made on meta, and timm loads nothing."""
    reference = timm.create_model(f"local-dir:{folder}", pretrained=True).half().eval()
    create = timm.create_model

    def on_meta(*arguments: object, **options: object) -> torch.nn.Module:
        model = create(*arguments, **options)
        assert all(parameter.is_meta for parameter in model.parameters())
        return model

    monkeypatch.setattr(timm, "create_model", on_meta)
    vit = load_vit(folder, dtype=torch.float16)
    found = dict(vit.model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert found[name].dtype == torch.float16
        assert torch.equal(found[name], parameter)


MEMORY = """
import sys, threading, time, torch
from model_zoo.vit import load_vit

def allocated():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

load_vit(sys.argv[1])  # imports and caches
start = peak = allocated()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, allocated())
        time.sleep(0.001)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
vit = load_vit(sys.argv[2], dtype=torch.float16)
done = True
watcher.join()
print(peak - start, sum(p.nbytes for p in vit.model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's accounts")
def test_loading_in_half_precision_takes_half_the_memory(folder: Path, tmp_path: Path) -> None:
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 768, "depth": 6, "num_heads": 6}
    wide = write_vit(tmp_path / "wide", arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder), str(wide)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, stored = map(int, done.stdout.split())
    assert stored > 80 * 2**20
    assert peak < 1.3 * stored


@pytest.mark.parametrize("variant", [None, "low_rank"])
def test_buffers_that_timm_computes_are_right(tmp_path: Path, variant: str | None) -> None:
    """Rotary embeddings are in no file, and meta would lose them."""
    model = timm.create_model("eva02_tiny_patch14_224", num_classes=5, **ROTARY)
    randomize_(model, 0)
    stored, buffers = model.state_dict(), dict(model.named_buffers())
    assert any(name not in stored for name in buffers)
    folder = write_vit(tmp_path / "eva", model=model, architecture="eva02_tiny_patch14_224",
                       arguments=ROTARY)  # fmt: skip
    if variant is not None:
        report = convert_(model, [Rule("head", LowRank(2)), Rule(".*", None, regex=True)])
        entry = get_model(str(folder))
        save_variant(entry.variant_path(variant), model, base=entry.id, report=report)
    vit = load_vit(folder, variant=variant)
    for name, buffer in vit.model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    pixels = vit.pixels([picture()])
    with torch.no_grad():
        assert torch.equal(vit.model(pixels), model(pixels))


def test_a_file_that_timm_must_adapt_is_left_to_timm(tmp_path: Path) -> None:
    """A position embedding of another image size is resampled."""
    folder = write_vit(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    config["model_args"]["img_size"] = 48
    config["pretrained_cfg"]["input_size"] = [3, 48, 48]
    (folder / "config.json").write_text(json.dumps(config))
    reference = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    vit = load_vit(folder)
    pixels = vit.pixels([picture()])
    assert pixels.shape == (1, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(vit.model(pixels), reference(pixels))


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
    with pytest.raises(ValueError, match=r"no BLAST variant here; .* --structure blast"):
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
