from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from model_zoo import registry
from model_zoo.labels import imagenet_labels
from model_zoo.registry import (
    ModelEntry,
    assets_dir,
    find_class,
    get_model,
    models,
    search_labels,
    variants_dir,
)

LABELS = {
    0: "tench, Tinca tinca",
    1: "crane (bird)",
    2: "crane (machine)",
    3: "White shark",
    12: "7",
}


def cached(cache: Path, repository: str, files: dict[str, str]) -> Path:
    """The layout of the hub's cache, as `hf download` leaves it."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / "abc123"
    for name, text in files.items():
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc123")
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("BLR_LAB_DATA", str(tmp_path / "data"))
    return folder


def test_search_by_id_and_name() -> None:
    """C7."""
    assert search_labels(LABELS, "CRANE") == [(1, "crane (bird)"), (2, "crane (machine)")]
    assert search_labels(LABELS, "white SHARK") == [(3, "White shark")]
    assert search_labels(LABELS, "tinca")[0][0] == 0
    assert search_labels(LABELS, "shark") == [(3, "White shark")]
    assert search_labels(LABELS, "12")[0] == (12, "7")
    assert search_labels(LABELS, "7") == [(12, "7")]
    assert search_labels(LABELS, " ") == sorted(LABELS.items())
    assert search_labels(LABELS, "no such thing") == []
    assert [i for i, _ in search_labels({0: "art", 1: "ran, car", 2: "car"}, "car")] == [1, 2]


def test_find_one_class() -> None:
    """C7."""
    assert find_class(LABELS, "tinca TINCA") == 0
    assert find_class(LABELS, "3") == 3
    with pytest.raises(ValueError, match=r"2 classes.*1 crane \(bird\); 2 crane \(machine\)"):
        find_class(LABELS, "crane")
    with pytest.raises(ValueError, match="near it: 3 White shark"):
        find_class(LABELS, "shark")
    with pytest.raises(ValueError, match="no class is named '99'"):
        find_class(LABELS, "99")


def test_imagenet_has_both_cranes() -> None:
    """C7."""
    labels = imagenet_labels()
    assert len(labels) == 1000
    found = search_labels(labels, "crane")
    assert [index for index, _ in found] == [134, 517]
    assert found[0][1] != found[1][1]
    assert find_class(labels, "white shark") == 2
    assert len(set(labels.values())) == 1000


def test_known_models() -> None:
    ids = [entry.id for entry in models()]
    assert ids == ["demo-dit", "demo-vit", "dit-xl-2-256", "dit-xl-2-512", "vit-b-16"]
    for entry in models():
        assert get_model(entry.id) == entry
        assert [variant.id for variant in entry.variants] == ["low_rank", "monarch", "blast"]
    assert assets_dir().name == "assets"
    with pytest.raises(
        ValueError, match="unknown model 'nope'; expected one of demo-dit, demo-vit"
    ):
        get_model("nope")


def test_missing_weights_say_how_to_get_them(cache: Path) -> None:
    """C9."""
    dit, vit = get_model("dit-xl-2-256"), get_model("vit-b-16")
    assert not dit.available()
    text = dit.how_to_get()
    assert "model_index.json is missing" in text
    assert str(cache) in text
    assert "hf download facebook/DiT-XL-2-256 (3.3 GB, licence CC-BY-NC-4.0)" in text
    assert "hf download timm/vit_base_patch16_224.augreg2_in21k_ft_in1k" in vit.how_to_get()
    assert "Apache-2.0" in vit.how_to_get()
    assert "\n" not in text
    assert len(dit.labels()) == len(vit.labels()) == 1000


def test_a_partial_download_names_the_missing_file(cache: Path) -> None:
    """C9."""
    entry = get_model("dit-xl-2-256")
    cached(
        cache,
        "facebook/DiT-XL-2-256",
        {
            "model_index.json": json.dumps({"_class_name": "DiTPipeline", "id2label": {"0": "a"}}),
            "scheduler/scheduler_config.json": "{}",
            "transformer/config.json": "{}",
            "vae/config.json": "{}",
            "vae/diffusion_pytorch_model.bin": "",
        },
    )
    assert entry.missing() == [
        "transformer/diffusion_pytorch_model.safetensors or transformer/diffusion_pytorch_model.bin"
    ]
    assert "transformer/diffusion_pytorch_model.bin is missing from" in entry.how_to_get()
    assert entry.labels() == {0: "a"}


def test_cached_weights_are_found_offline(cache: Path) -> None:
    """C9: also for any full timm tag."""
    snapshot = cached(
        cache,
        "timm/vit_small_patch16_224.augreg_in1k",
        {"config.json": '{"architecture": "x", "num_classes": 1000}', "model.safetensors": ""},
    )
    for name in ("vit_small_patch16_224.augreg_in1k", "timm/vit_small_patch16_224.augreg_in1k"):
        entry = get_model(name)
        assert entry.available()
        assert entry.folder() == snapshot
        assert len(entry.labels()) == 1000


def test_home_of_the_cache_is_respected_without_torch(tmp_path: Path) -> None:
    """C9: a fresh process with HF_HOME and HF_HUB_OFFLINE."""
    cached(
        tmp_path / "hub",
        "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
        {"config.json": "{}", "model.safetensors": ""},
    )
    code = (
        "import sys; from model_zoo.registry import get_model, models; "
        "print(get_model('vit-b-16').available(), get_model('dit-xl-2-512').available(), "
        "any(name in sys.modules for name in ('torch', 'timm', 'diffusers')))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "False"]


def test_local_folders(tmp_path: Path) -> None:
    vit = tmp_path / "my-vit"
    vit.mkdir()
    (vit / "config.json").write_text(
        json.dumps(
            {
                "architecture": "vit_tiny_patch16_224",
                "pretrained_cfg": {
                    "label_names": ["n1", "n2"],
                    "label_descriptions": {"n2": "two, deux"},
                },
            }
        )
    )
    entry = get_model(str(vit))
    assert entry == get_model(f"local-dir:{vit}")
    assert (entry.task, entry.id, entry.title) == ("classify", str(vit), "my-vit")
    assert entry.labels() == {0: "n1", 1: "two, deux"}
    assert "model.safetensors or pytorch_model.bin is missing" in entry.how_to_get()
    assert entry.variant_path("blast") == tmp_path / "my-vit-blast.safetensors"

    dit = tmp_path / "my-dit"
    (dit / "transformer").mkdir(parents=True)
    (dit / "model_index.json").write_text('{"_class_name": "DiTPipeline"}')
    (dit / "transformer" / "config.json").write_text('{"num_embeds_ada_norm": 3}')
    entry = get_model(str(dit))
    assert entry.task == "generate"
    assert entry.labels() == {0: "class 0", 1: "class 1", 2: "class 2"}

    (dit / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ValueError, match="holds a StableDiffusionPipeline, expected a DiTPipeline"):
        get_model(str(dit))
    (vit / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no architecture"):
        get_model(str(vit))
    with pytest.raises(ValueError, match="is no model"):
        get_model(str(tmp_path))


def test_variants_of_hub_models_are_in_the_data_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = get_model("vit-b-16")
    assert variants_dir() == cache.parent / "data" / "variants"
    path = entry.variant_path("monarch")
    assert path == variants_dir() / "vit-b-16-monarch.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"broken")
    found = {variant.id: variant for variant in entry.variants}
    assert found["monarch"].path == path
    assert "not a safetensors file" in found["monarch"].summary
    assert found["blast"].path is None
    with pytest.raises(ValueError, match="kind must be one of"):
        entry.variant_path("../x")
    monkeypatch.delenv("BLR_LAB_DATA")
    assert variants_dir().parts[-2:] == ("blr-lab", "variants")


def test_a_missing_variant_names_the_command_that_makes_it(tmp_path: Path) -> None:
    text = get_model("demo-vit").how_to_make("monarch")
    assert text == (
        "demo-vit has no Monarch variant here; make it with: "
        "blr-lab convert demo-vit --structure monarch"
    )
    folder = tmp_path / "my vit"
    folder.mkdir()
    (folder / "config.json").write_text('{"architecture": "x"}')
    entry = get_model(str(folder))
    assert entry.how_to_make("low_rank").endswith(
        f"blr-lab convert '{folder}' --structure low_rank"
    )
    with pytest.raises(ValueError, match="kind must be one of"):
        entry.how_to_make("x")


def test_only_variants_whose_file_is_here_are_offered(cache: Path) -> None:
    entry = get_model("vit-b-16")
    assert entry.variants_here == ()
    path = entry.variant_path("monarch")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"broken")
    assert [variant.id for variant in entry.variants_here] == ["monarch"]


def test_fetching_asks_for_the_needed_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked[repository] = allow_patterns
        return "/somewhere"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert get_model("vit-b-16").fetch() == Path("/somewhere")
    assert asked == {
        "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k": [
            "config.json",
            "model.safetensors",
            "pytorch_model.bin",
        ]
    }
    with pytest.raises(ValueError, match="nothing to download"):
        get_model("demo-dit").fetch()


def test_assets_inside_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "model_zoo"
    (package / "assets" / "demo").mkdir(parents=True)
    monkeypatch.setattr(registry, "__file__", str(package / "registry.py"))
    assert assets_dir() == package / "assets"


@pytest.mark.skipif(not get_model("demo-vit").available(), reason="bundled models not built yet")
@pytest.mark.parametrize("model", ["demo-dit", "demo-vit"])
def test_bundled_models_are_here_with_variants(model: str) -> None:
    entry: ModelEntry = get_model(model)
    assert entry.available()
    assert len(entry.labels()) >= 120
    for variant in entry.variants:
        assert variant.path is not None
        assert "of the converted weights" in variant.summary
