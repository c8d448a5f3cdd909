"""Converted models as one safetensors file whose metadata holds a versioned config.

A *variant* holds only the factors (and biases) of the converted layers and is loaded onto its base
model, which it recognises. A *model* file holds every parameter.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from blr_kernels.nn import BLRLinear
from blr_kernels.ops import Backend
from blr_kernels.structures import Structure, structure_from_dict
from model_zoo.convert import ConversionReport, replace_linears_
from model_zoo.headers import (
    FORMAT,
    VERSION,
    CheckpointError,
    Header,
    config_of,
    is_finite_number,
    read_config,
    read_header,
)
from model_zoo.weights import Reader, fill_, open_weights, set_tensor_

__all__ = [
    "CheckpointError",
    "VariantFile",
    "fill_base_",
    "load_model_",
    "load_variant_",
    "read_config",
    "save_model",
    "save_variant",
]

_FLOATING = ("F64", "F32", "F16", "BF16")

# Base weights may be loaded in half precision, so they are recognised within its rounding.
_SAMPLES = 32
_SAMPLE_SIZE = 65536
_SAMPLE_TOLERANCE = 0.03


def save_variant(
    path: str | Path,
    model: nn.Module,
    *,
    base: str,
    report: ConversionReport | None = None,
    extra: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the factors and biases of the block low-rank layers of ``model``.

    Args:
        path: of the file, replaced only once it is whole.
        model: the converted model; the parameters it shares with its base are not stored.
        base: the base model, for people.
        report: gives each layer its relative error.
        extra: more plain data for the config (how it was trained, say).
        dtype: of the stored tensors; None keeps the model's.

    Raises:
        OSError: the file cannot be written; nothing of it is left.
        ValueError: the model has no block low-rank layer, none of its base's parameters is left to
            recognise the base by, or a parameter is not finite in ``dtype``.
    """
    layers = _blr_layers(model)
    if not layers:
        raise ValueError("the model has no block low-rank layer, so there is no variant to save")
    tensors = {
        f"{name}.{leaf}": parameter
        for name, layer in layers.items()
        for leaf, parameter in layer.named_parameters()
    }
    config = _config("variant", model, base, report, extra)
    config["values"] = _sample_values(model)
    if not config["values"]:
        raise ValueError(
            "the model shares no parameter with its base, so a variant could not recognise it; "
            "save the whole model"
        )
    _save(path, tensors, config, dtype)


def save_model(
    path: str | Path,
    model: nn.Module,
    *,
    base: str,
    report: ConversionReport | None = None,
    extra: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write every parameter and persistent buffer of a model, as :func:`save_variant` does.

    Raises:
        OSError: the file cannot be written; nothing of it is left.
        ValueError: a parameter is not finite in ``dtype``.
    """
    _save(path, model.state_dict(), _config("model", model, base, report, extra), dtype)


class VariantFile:
    """A variant's file: its checks and its two steps, for a model that is still on ``meta``.

    :func:`fill_base_` takes them in turn. A model that has its weights already is simpler:
    :func:`load_variant_`.

    Attributes:
        config: what the file says of itself.
        structures: structure of each converted layer.

    Raises:
        CheckpointError: no variant, another version, damaged, or inconsistent.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._header = read_header(self.path)
        self.config = _checked_config(self.path, self._header, "variant")
        self.structures = _structures(self.config)

    def check_(self, model: nn.Module) -> None:
        """Refuse a model that is not the base, or a file that lacks what its layers need.

        Raises:
            CheckpointError: one line that says what differs.
        """
        _check_base(self.path, self.config, model)
        expected = {
            f"{name}.{leaf}": shape
            for name, structure in self.structures.items()
            for leaf, shape in _layer_shapes(model.get_submodule(name), structure).items()
        }
        found = self._header.tensors
        for name, shape in expected.items():
            if name not in found:
                raise CheckpointError(f"{self.path} lacks {name}")
            if found[name].shape != shape:
                raise CheckpointError(
                    f"{self.path}: {name} must have shape {shape}, got {found[name].shape}"
                )
            if found[name].dtype not in _FLOATING:
                raise CheckpointError(
                    f"{self.path}: {name} must be one of {', '.join(_FLOATING)}, "
                    f"got {found[name].dtype}"
                )
        unexpected = sorted(set(found) - set(expected))
        if unexpected:
            raise CheckpointError(f"{self.path} has {unexpected[0]}, which none of its layers need")

    def check_values(self, model: nn.Module) -> None:
        """Refuse a base of the same architecture with other weights.

        Raises:
            CheckpointError: it names the parameter that differs.
        """
        parameters = dict(model.named_parameters())
        for name, expected in self.config["values"].items():
            if name not in parameters:
                raise CheckpointError(f"{self.path} knows {name}, which this model lacks")
            value = _sample_value(parameters[name])
            if not math.isclose(value, expected, abs_tol=_SAMPLE_TOLERANCE):
                raise CheckpointError(
                    f"{self.path} belongs to other weights of this architecture "
                    f"({self.config['base']}): {name} differs"
                )

    def fill_(self, model: nn.Module, *, device: torch.device | str, dtype: torch.dtype) -> None:
        """Give the block low-rank layers their factors and biases, one layer at a time.

        Raises:
            CheckpointError: a tensor that is not finite in ``dtype``.
        """
        with open_weights(self.path) as reader:
            for name in self.structures:
                layer = model.get_submodule(name)
                _fill_layer(layer, name, reader, device=device, dtype=dtype)


def load_variant_(model: nn.Module, path: str | Path, *, backend: Backend = Backend.AUTO) -> None:
    """Turn the dense base model into the variant, in place, one layer at a time.

    A dense weight is freed when its factors arrive. They take its device and dtype.

    Raises:
        CheckpointError: the file is no variant of this model, or damaged. The model is unchanged,
            unless it was a factor that is not finite.
    """
    variant = VariantFile(path)
    variant.check_(model)
    variant.check_values(model)
    with open_weights(variant.path) as reader:
        for name, structure in variant.structures.items():
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            device, dtype = linear.weight.device, linear.weight.dtype
            layer = BLRLinear.create(
                linear.in_features,
                linear.out_features,
                structure,
                linear.bias is not None,
                backend=backend,
                device="meta",
                dtype=dtype,
            )
            layer.train(linear.training)
            _fill_layer(layer, name, reader, device=device, dtype=dtype)
            model.set_submodule(name, layer)
            del linear


def fill_base_(
    model: nn.Module,
    reader: Reader,
    variant: VariantFile | None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: Backend = Backend.AUTO,
    parts: Mapping[str, Sequence[str]] | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Fill a base model on ``meta`` from its own weights, or a variant of it from both files.

    The dense weights of a variant's converted layers are never read.

    Args:
        model: dense, on ``meta``.
        reader: the base's weights.
        variant: None for the base itself.
        device: where the tensors go.
        dtype: of floating tensors.
        backend: of the block low-rank layers.
        parts: see :func:`model_zoo.weights.fill_`.
        ignore: names in the base's file that the model does not need.

    Raises:
        CheckpointError: one of the files does not fit, or is damaged.
    """
    if variant is None:
        fill_(model, reader, device=device, dtype=dtype, parts=parts, ignore=ignore)
        return
    variant.check_(model)
    parts, unread = dict(parts or {}), set(ignore)
    for name in variant.structures:
        for leaf, _ in model.get_submodule(name).named_parameters():
            unread.update(parts.pop(f"{name}.{leaf}", [f"{name}.{leaf}"]))
    replace_linears_(model, variant.structures, backend=backend)
    leave = variant.structures.keys()
    fill_(model, reader, device=device, dtype=dtype, parts=parts, leave=leave, ignore=unread)
    variant.fill_(model, device=device, dtype=dtype)
    variant.check_values(model)


def load_model_(
    model: nn.Module,
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: Backend = Backend.AUTO,
) -> None:
    """Fill a dense model that was built on ``meta`` from a file of :func:`save_model`.

    Its linears become block low-rank on ``meta`` first, so nothing is ever allocated twice.

    Args:
        model: the base architecture; what it holds is dropped.
        path: of the file.
        device: where the parameters go.
        dtype: of floating parameters; None keeps the file's.
        backend: of the block low-rank layers.

    Raises:
        CheckpointError: no such file, another model, or damaged.
    """
    path = Path(path)
    config = _checked_config(path, read_header(path), "model")
    _check_base(path, config, model)
    model.to("meta")
    replace_linears_(model, _structures(config), backend=backend)
    with open_weights(path) as reader:
        fill_(model, reader, device=device, dtype=dtype)


def _blr_layers(model: nn.Module) -> dict[str, BLRLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, BLRLinear)}


def _config(
    content: str,
    model: nn.Module,
    base: str,
    report: ConversionReport | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    errors = {layer.name: layer.relative_error for layer in report.layers} if report else {}
    layers = {}
    for name, layer in _blr_layers(model).items():
        layers[name] = {
            "structure": layer.structure.to_dict(),
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "in_padded": layer.in_padded,
            "out_padded": layer.out_padded,
            "parameters": layer.structure.parameter_count(layer.in_features, layer.out_features),
            "relative_error": errors.get(name),
        }
    return {
        "content": content,
        "base": base,
        "architecture": _architecture(model),
        "layers": layers,
        "extra": dict(extra or {}),
    }


def _save(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> None:
    path = Path(path)
    stored = {}
    for name, tensor in tensors.items():
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        stored[name] = tensor.detach().to("cpu", kind).contiguous().clone()
        if not bool(torch.isfinite(stored[name]).all()):
            raise ValueError(f"{name} is not finite in {kind}, so it is not saved")
    metadata = {"format": FORMAT, "version": VERSION, "config": json.dumps(config)}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    try:
        # Made by us first: safetensors puts a file in its place that only its owner may read.
        draft.write_bytes(b"")
        mode = draft.stat().st_mode
        save_file(stored, draft, metadata)
        draft.chmod(mode)
        os.replace(draft, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    finally:  # also when it was interrupted
        draft.unlink(missing_ok=True)


def _architecture(model: nn.Module) -> str:
    """Hash of the names and shapes of the base model's parameters.

    A converted layer counts as the linear that it replaces.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    layers = _blr_layers(model)
    for name, layer in layers.items():
        shapes[f"{name}.weight"] = (layer.out_features, layer.in_features)
        if layer.bias is not None:
            shapes[f"{name}.bias"] = (layer.out_features,)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] not in layers:
            shapes[name] = tuple(parameter.shape)
    text = "\n".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _sample_values(model: nn.Module) -> dict[str, float]:
    layers = _blr_layers(model)
    names = [
        name
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] not in layers and parameter.is_floating_point()
    ]
    step = max(1, len(names) // _SAMPLES)
    parameters = dict(model.named_parameters())
    return {name: _sample_value(parameters[name]) for name in names[::step][:_SAMPLES]}


def _sample_value(parameter: Tensor) -> float:
    """Projection of a parameter's first values on fixed signs, in units of their norm.

    About a standard normal over all weights, so two different ones seldom agree, while rounding
    to half precision moves it by less than a hundredth.
    """
    values = parameter.detach().flatten()[:_SAMPLE_SIZE].to("cpu", torch.float64)
    index = torch.arange(values.numel(), dtype=torch.int64)
    signs = ((index * 2654435761 >> 16) & 1) * 2 - 1
    norm = float(values.norm())
    return float((values * signs).sum()) / norm if norm else 0.0


def _checked_config(path: Path, header: Header, content: str) -> dict[str, Any]:
    config = config_of(path, header)
    if config.get("content") != content:
        raise CheckpointError(f"{path} holds a {config.get('content')}, expected a {content}")
    for key in ("base", "architecture"):
        if not isinstance(config.get(key), str):
            raise CheckpointError(f"{path} has a config without {key}")
    if content == "variant":
        values = config.get("values")
        numbers = isinstance(values, dict) and all(map(is_finite_number, values.values()))
        if not values or not numbers:
            raise CheckpointError(f"{path} has a config without values of its base")
    return config


def _structures(config: Mapping[str, Any]) -> dict[str, Structure]:
    layers = config["layers"].items()
    return {name: structure_from_dict(layer["structure"]) for name, layer in layers}


def _check_base(path: Path, config: Mapping[str, Any], model: nn.Module) -> None:
    base = config["base"]
    modules = dict(model.named_modules())
    for name, layer in config["layers"].items():
        module = modules.get(name)
        if module is None:
            hint = ""
            if name.endswith(".to_qkv") and name.removesuffix("to_qkv") + "to_q" in modules:
                hint = "; fuse q, k and v first"
            raise CheckpointError(f"{path} converts {name} of {base}, which this model lacks{hint}")
        if not isinstance(module, nn.Linear):
            raise CheckpointError(
                f"{path} converts {name} of {base}, which is no linear here but a "
                f"{type(module).__name__}"
            )
        expected = (layer["out_features"], layer["in_features"])
        found = (module.out_features, module.in_features)
        if expected != found:
            raise CheckpointError(
                f"{path} belongs to another model ({base}): {name} is {expected[0]} x "
                f"{expected[1]} there and {found[0]} x {found[1]} here"
            )
    if _architecture(model) != config["architecture"]:
        raise CheckpointError(f"{path} belongs to another model ({base}): other parameters")


def _layer_shapes(module: nn.Module, structure: Structure) -> dict[str, tuple[int, ...]]:
    assert isinstance(module, nn.Linear)
    shapes = structure.parameter_shapes(module.in_features, module.out_features)
    if module.bias is not None:
        shapes["bias"] = (module.out_features,)
    return shapes


def _fill_layer(
    layer: nn.Module,
    name: str,
    reader: Reader,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    for leaf, _ in list(layer.named_parameters(recurse=False)):
        tensor = reader.tensor(f"{name}.{leaf}")
        # A copy always: a tensor of the file's own memory would keep the whole file mapped.
        copied = tensor.to(device=device, dtype=dtype, copy=True)
        # The extremes show NaN too, and unlike isfinite take no memory.
        if not all(map(math.isfinite, (value.item() for value in torch.aminmax(copied)))):
            raise CheckpointError(f"{reader.path}: {name}.{leaf} is not finite in {dtype}")
        set_tensor_(layer, leaf, copied)
