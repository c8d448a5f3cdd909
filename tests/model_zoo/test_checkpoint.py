from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import randomize_, tiny_vit
from torch import nn

from blr_kernels import BLRLinear, LowRank
from model_zoo.checkpoint import (
    CheckpointError,
    load_model_,
    load_variant_,
    read_config,
    save_model,
    save_variant,
)
from model_zoo.convert import ConversionReport, convert_, replace_linears_
from model_zoo.headers import read_header
from model_zoo.vit import vit_rules


def converted(kind: str = "blast") -> tuple[nn.Module, ConversionReport]:
    model = tiny_vit()
    return model, convert_(model, vit_rules(kind))


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variant") / "vit-blast.safetensors"
    model, report = converted()
    save_variant(path, model, base="tiny", report=report, extra={"steps": 7})
    return path


def logits(model: nn.Module) -> torch.Tensor:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(x)


def edited(path: Path, out: Path, **changes: object) -> Path:
    """A copy with other metadata; a key of the config may be changed as config__key."""
    header = read_header(path)
    metadata = dict(header.metadata)
    config = json.loads(metadata["config"])
    for key, value in changes.items():
        if key.startswith("config__"):
            config[key.removeprefix("config__")] = value
        else:
            metadata[key] = str(value)
    metadata["config"] = json.dumps(config)
    save_file(load_file(path), out, metadata)
    return out


def refused(model: nn.Module, path: Path, match: str) -> None:
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(CheckpointError, match=match) as caught:
        load_variant_(model, path)
    assert "\n" not in str(caught.value)
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("kind", ["low_rank", "monarch", "blast"])
def test_a_variant_comes_back_the_same(kind: str, tmp_path: Path) -> None:
    model, report = converted(kind)
    path = tmp_path / "v.safetensors"
    save_variant(path, model, base="tiny", report=report)
    loaded = tiny_vit()
    load_variant_(loaded, path)
    assert torch.equal(logits(loaded), logits(model))
    assert set(read_header(path).tensors) == {
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if isinstance(module, BLRLinear)
        for leaf in dict(module.named_parameters())
    }


def test_config_says_what_the_file_is(variant: Path) -> None:
    config = read_config(variant)
    assert config["base"] == "tiny"
    assert config["extra"] == {"steps": 7}
    layer = config["layers"]["blocks.0.attn.qkv"]
    assert layer["structure"]["kind"] == "blast"
    assert (layer["in_features"], layer["out_features"]) == (36, 108)
    assert 0 < layer["relative_error"] < 1
    header = read_header(variant)
    assert (header.metadata["format"], header.metadata["version"]) == ("blr-lab", "1")


def test_config_is_read_without_torch(variant: Path) -> None:
    code = (
        "import sys; from model_zoo.headers import read_config; "
        f"print(read_config({str(variant)!r})['base'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tiny", "False"]


def test_half_precision_base_is_recognised(variant: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model = tiny_vit().to(dtype)
        load_variant_(model, variant)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_other_models_are_refused(variant: Path) -> None:
    refused(randomize_(tiny_vit(), seed=9), variant, "other weights of this architecture")
    refused(tiny_vit(classes=6), variant, "another model")
    model, _ = converted("low_rank")
    refused(model, variant, "is no linear here but a LowRankLinear")
    refused(nn.ModuleDict({"x": nn.Linear(2, 2)}), variant, "which this model lacks")
    wider = tiny_vit()
    wider.get_submodule("blocks.0.mlp").fc1 = nn.Linear(36, 145)
    refused(wider, variant, r"fc1 is 144 x 36 there and 145 x 36 here")


def test_damaged_files_are_refused(variant: Path, tmp_path: Path) -> None:
    data = variant.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for size, match in ((len(data) - 5, "truncated"), (400, "truncated"), (3, "not a safetensors")):
        bad.write_bytes(data[:size])
        refused(tiny_vit(), bad, match)
    bad.write_bytes(data + b"x")
    refused(tiny_vit(), bad, "foreign bytes")
    bad.write_bytes(b"PK\x03\x04" + bytes(400))
    refused(tiny_vit(), bad, "not a safetensors file")
    bad.write_bytes((40).to_bytes(8, "little") + b"[1, 2]".ljust(40))
    refused(tiny_vit(), bad, "not a safetensors file")
    refused(tiny_vit(), tmp_path / "none.safetensors", "No such file")


def test_wrong_content_is_refused(variant: Path, tmp_path: Path) -> None:
    out = tmp_path / "e.safetensors"
    refused(tiny_vit(), edited(variant, out, version="2"), "version '2'")
    refused(tiny_vit(), edited(variant, out, format="pt"), "not written by BLR Lab")
    refused(tiny_vit(), edited(variant, out, config__content="model"), "holds a model")
    refused(tiny_vit(), edited(variant, out, config__layers=3), "without layers")

    metadata = read_header(variant).metadata
    tensors = load_file(variant)
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first][:-1].clone()}, out, metadata)
    refused(tiny_vit(), out, "must have shape")
    save_file({k: v for k, v in tensors.items() if k != first}, out, metadata)
    refused(tiny_vit(), out, f"lacks {first}")
    save_file({**tensors, "stray": torch.zeros(1)}, out, metadata)
    refused(tiny_vit(), out, "has stray")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("in_features", None, "in_features must be an int"),
        ("out_features", "x", "out_features must be an int"),
        ("structure", [], "must be a mapping"),
        ("structure", {"kind": "blast", "blocks": 10**9, "rank": 1}, "at least blocks"),
        ("structure", {"kind": "blast", "blocks": 3, "rank": 10**12}, "has .* parameters, got"),
        ("parameters", 7, "has .* parameters, got 7"),
        ("relative_error", float("nan"), "relative_error must be a number"),
        ("relative_error", 10**400, "relative_error must be a number"),
    ],
)
def test_a_layer_of_wrong_facts_is_refused(
    variant: Path, tmp_path: Path, key: str, value: object, match: str
) -> None:
    """By everybody who reads the config, the page too."""
    layers = read_config(variant)["layers"]
    name = next(iter(layers))
    out = tmp_path / "e.safetensors"
    edited(variant, out, config__layers={**layers, name: {**layers[name], key: value}})
    with pytest.raises(CheckpointError, match=match):
        read_config(out)
    refused(tiny_vit(), out, match)
    missing = {k: v for k, v in layers[name].items() if k != key}
    refused(tiny_vit(), edited(variant, out, config__layers={name: missing}), f"lacks '{key}'")
    refused(tiny_vit(), edited(variant, out, config__layers={name: value}), name)


@pytest.mark.parametrize("values", [None, [], {}, {"a": "x"}, {"a": None}, {"nowhere.weight": 0.1}])
def test_values_of_the_base_that_cannot_be_are_refused(
    variant: Path, tmp_path: Path, values: object
) -> None:
    out = edited(variant, tmp_path / "e.safetensors", config__values=values)
    refused(tiny_vit(), out, r"without values|knows nowhere\.weight")


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_a_header_of_endless_depth_is_refused(tmp_path: Path, text: bytes) -> None:
    bad = tmp_path / "deep.safetensors"
    bad.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_config(bad)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool])
def test_factors_that_are_not_floating_are_refused(
    variant: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = load_file(variant)
    name = next(iter(tensors))
    out = tmp_path / "e.safetensors"
    save_file({**tensors, name: tensors[name].to(dtype)}, out, read_header(variant).metadata)
    refused(tiny_vit(), out, f"{name} must be one of F64, F32, F16, BF16, got [IUB]")


def test_weights_that_are_not_floating_are_refused(tmp_path: Path) -> None:
    model, report = converted()
    path = tmp_path / "m.safetensors"
    save_model(path, model, base="tiny", report=report)
    tensors = load_file(path)
    out = tmp_path / "e.safetensors"
    save_file(
        {**tensors, "head.weight": tensors["head.weight"].short()}, out, read_header(path).metadata
    )
    with pytest.raises(CheckpointError, match=r"head\.weight must be floating, got torch\.int16"):
        load_model_(tiny_vit(), out)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_that_are_not_finite_are_refused(
    variant: Path, tmp_path: Path, value: float
) -> None:
    tensors = load_file(variant)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = value
    out = tmp_path / "e.safetensors"
    save_file(tensors, out, read_header(variant).metadata)
    with pytest.raises(CheckpointError, match=f"{name} is not finite in torch.float32"):
        load_variant_(tiny_vit(), out)


def test_a_variant_may_have_any_name(variant: Path, tmp_path: Path) -> None:
    copy = tmp_path / "any name ü.dat"
    copy.write_bytes(variant.read_bytes())
    load_variant_(tiny_vit(), copy)


def test_a_whole_model_is_built_on_meta(tmp_path: Path) -> None:
    model, report = converted()
    path = tmp_path / "m.safetensors"
    save_model(path, model, base="tiny", report=report)
    with torch.device("meta"):
        loaded = tiny_vit()
    load_model_(loaded, path)
    assert torch.equal(logits(loaded), logits(model))
    load_model_(loaded := tiny_vit().to("meta"), path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    with torch.device("meta"), pytest.raises(CheckpointError, match="another model"):
        load_model_(tiny_vit(classes=7), path)
    with pytest.raises(CheckpointError, match="holds a model, expected a variant"):
        load_variant_(tiny_vit(), path)


def test_saving_without_converted_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no block low-rank layer"):
        save_variant(tmp_path / "v.safetensors", tiny_vit(), base="tiny")
    model, _ = converted()
    with torch.no_grad():
        model.get_submodule("blocks.0.mlp.fc1").left.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"fc1\.left is not finite"):
        save_variant(tmp_path / "v.safetensors", model, base="tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_variant_needs_something_to_know_its_base_by(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False))
    replace_linears_(model, {"0": LowRank(2)})
    with pytest.raises(ValueError, match="shares no parameter with its base"):
        save_variant(tmp_path / "v.safetensors", model, base="none")


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_person_wants(
    tmp_path: Path, umask: int, mode: int
) -> None:
    model, _ = converted("low_rank")
    before = os.umask(umask)
    try:
        save_variant(tmp_path / "v.safetensors", model, base="tiny")
        save_model(tmp_path / "m.safetensors", model, base="tiny")
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_nothing_is_left_of_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = converted("low_rank")
    for error in (SafetensorError("I/O error: full"), KeyboardInterrupt()):

        def save(_: object, path: Path, __: object, error: BaseException = error) -> None:
            path.write_bytes(b"half")
            raise error

        monkeypatch.setattr("model_zoo.checkpoint.save_file", save)
        expected = OSError if isinstance(error, Exception) else KeyboardInterrupt
        with pytest.raises(expected):
            save_variant(tmp_path / "v.safetensors", model, base="tiny")
        assert list(tmp_path.iterdir()) == []


MEMORY = """
import sys, threading, time, torch
from torch import nn
from model_zoo.checkpoint import load_model_, load_variant_

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(12))

def allocated():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

if sys.argv[1] == "model":
    with torch.device("meta"):
        net = Net()
    load = load_model_
else:
    net, load = Net(), load_variant_
    net.layers[11].weight.data.fill_(1)
start = peak = allocated()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, allocated())
        time.sleep(0.001)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
load(net, sys.argv[2])
end = allocated()
done = True
watcher.join()
print(peak - start, end - start)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's accounts")
def test_loading_takes_no_double_memory(tmp_path: Path) -> None:
    """Twelve layers of 16 MiB, eleven of them halved by conversion."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(12))
    model.layers[11].weight.data.fill_(1)
    replace_linears_(model, {f"layers.{i}": LowRank(512) for i in range(11)})
    stored = sum(parameter.nbytes for parameter in model.parameters())
    layer = 2048 * 2048 * 4
    save_model(tmp_path / "model.safetensors", model, base="net")
    save_variant(tmp_path / "variant.safetensors", model, base="net")

    def grown(kind: str) -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, kind, str(tmp_path / f"{kind}.safetensors")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peak, end = done.stdout.split()
        return int(peak), int(end)

    peak, end = grown("model")
    assert stored - layer < end < stored + layer
    assert peak < stored + 1.5 * layer
    peak, end = grown("variant")
    assert peak < 1.5 * layer  # a dense layer goes as its factors come
    assert end < -4 * layer
