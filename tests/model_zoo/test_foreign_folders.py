"""Folders of models that anybody may have written: used, or refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from model_zoo.dit import load_dit
from model_zoo.registry import assets_dir, get_model
from model_zoo.vit import load_vit


def copied(task: str, folder: Path, file: str = "", changes: Any = None) -> Path:
    """A copy of a bundled model, with other values in one of its JSON files."""
    target = folder / f"{task} <b>ü"
    shutil.copytree(assets_dir() / "demo" / task, target)
    if file:
        path = target / file
        content = json.loads(path.read_text(encoding="utf-8"))
        for key, value in changes.items():
            owner = content
            *parents, leaf = key.split(".")
            for parent in parents:
                owner = owner[parent]
            owner[leaf] = value
        path.write_text(json.dumps(content), encoding="utf-8")
    return target


def refusal(task: str, folder: Path) -> str:
    """The one line with which the model is refused, or "" when it loads."""
    try:
        load_dit(str(folder)) if task == "dit" else load_vit(str(folder))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("file", "key", "value", "match"),
    [
        ("model_index.json", "id2label", {"a": "x"}, "id2label must have ids as keys, got 'a'"),
        ("model_index.json", "id2label", {"-1": "x"}, "id2label must have ids as keys, got '-1'"),
        ("transformer/config.json", "num_attention_heads", 10**6, "between 1 and 1000"),
        ("transformer/config.json", "num_layers", 10**5, "between 1 and 1000"),
        ("transformer/config.json", "sample_size", 10**6, "between 1 and 512"),
        ("transformer/config.json", "patch_size", 0, "between 1 and 512"),
        ("transformer/config.json", "num_attention_heads", 1000, "must have shape"),
        ("transformer/config.json", "activation_fn", "nope", "makes no transformer"),
        ("transformer/config.json", "norm_type", "nope", "makes no transformer"),
        ("vae/config.json", "scaling_factor", float("nan"), "must be positive, got nan"),
        ("vae/config.json", "scaling_factor", 0, "must be positive, got 0"),
        ("scheduler/scheduler_config.json", "_class_name", 3, "is no scheduler"),
        ("scheduler/scheduler_config.json", "beta_schedule", "nope", "makes no scheduler"),
        (
            "scheduler/scheduler_config.json", "_class_name", "FlowMatchEulerDiscreteScheduler",
            "not for models that predict noise",
        ),
    ],
)  # fmt: skip
def test_a_generator_that_cannot_be_is_refused(
    tmp_path: Path, file: str, key: str, value: Any, match: str
) -> None:
    """No traceback, and no memory that a config asks for before its weights vouch for it."""
    reason = refusal("dit", copied("dit", tmp_path, file, {key: value}))
    assert match in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("architecture", ["x"], "cannot be loaded"),
        ("architecture", "resnet18", "cannot be loaded"),
        ("model_args", {"nope": 1}, "unexpected keyword argument 'nope'"),
        ("model_args", [1], "cannot be loaded"),
        ("pretrained_cfg.interpolation", "nope", "cannot be loaded"),
        ("pretrained_cfg.mean", "x", "cannot be loaded"),
        ("label_names", "abc", "label_names must be a list of names"),
        ("label_names", [[1]], "label_names must be a list of names"),
    ],
)
def test_a_classifier_that_cannot_be_is_refused(
    tmp_path: Path, key: str, value: Any, match: str
) -> None:
    reason = refusal("vit", copied("vit", tmp_path, "config.json", {key: value}))
    assert match in reason
    assert "\n" not in reason


@pytest.mark.parametrize("count", [10**9, -1, "x", 2.5])
def test_a_number_of_classes_that_cannot_be_is_refused(tmp_path: Path, count: Any) -> None:
    folder = copied("vit", tmp_path, "config.json", {"label_names": None, "num_classes": count})
    with pytest.raises(ValueError, match="the number of classes must be between"):
        get_model(str(folder)).labels()


def test_labels_are_one_line_each(tmp_path: Path) -> None:
    folder = copied("dit", tmp_path, "model_index.json", {"id2label": {"0": " a\nb\t<i>c</i> "}})
    assert get_model(str(folder)).labels() == {0: "a b <i>c</i>"}


def test_json_of_endless_depth_is_refused(tmp_path: Path) -> None:
    folder = copied("dit", tmp_path)
    (folder / "model_index.json").write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(ValueError, match=r"model_index\.json cannot be read"):
        get_model(str(folder))


class Touch:
    """Unpickled carelessly, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self.path}'",))


@pytest.mark.parametrize(
    ("task", "weights"),
    [
        ("vit", "model.safetensors"),
        ("dit", "transformer/diffusion_pytorch_model.safetensors"),
        ("dit", "vae/diffusion_pytorch_model.safetensors"),
    ],
)
def test_what_only_safetensors_itself_refuses_is_one_line(
    tmp_path: Path, task: str, weights: str
) -> None:
    """A number type that it does not know: our own look at the head lets it pass."""
    path = copied(task, tmp_path) / weights
    data = path.read_bytes()
    assert b'"dtype":"F16"' in data
    path.write_bytes(data.replace(b'"dtype":"F16"', b'"dtype":"F99"', 1))
    reason = refusal(task, tmp_path / f"{task} <b>ü")
    assert str(path) in reason
    assert "\n" not in reason


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("task", "weights"),
    [
        ("vit", "model.safetensors"),
        ("dit", "transformer/diffusion_pytorch_model.safetensors"),
        ("dit", "vae/diffusion_pytorch_model.safetensors"),
    ],
)
def test_no_pickle_runs_code(tmp_path: Path, task: str, weights: str, raw: bool) -> None:
    folder = copied(task, tmp_path)
    (folder / weights).unlink()
    name = "pytorch_model.bin" if task == "vit" else "diffusion_pytorch_model.bin"
    bad = (folder / weights).with_name(name)
    evil = {"weight": Touch(tmp_path / "ran")}
    if raw:
        bad.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, bad)
    assert refusal(task, folder)
    assert not (tmp_path / "ran").exists()


def test_running_out_of_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine then ends warm workers and tries again."""

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("model_zoo.weights.set_tensor_", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_vit("demo-vit")
