"""Vision transformers from timm: its names, its folders, its transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from blr_kernels.ops import Backend
from blr_kernels.structures import DEFAULT_BLOCKS
from model_zoo.checkpoint import VariantFile, fill_base_, load_variant_
from model_zoo.convert import Rule, Saving
from model_zoo.headers import read_header
from model_zoo.registry import ModelEntry
from model_zoo.sources import entry_of, folder_of, variant_file
from model_zoo.untrained import PaperSizes, untrained_variant_
from model_zoo.weights import fill_random_, open_weights

__all__ = ["ViT", "classify", "load_vit", "top_classes", "vit_rules"]

PAPER_LAYERS = (r"attn\.qkv", r"mlp\.fc1", r"mlp\.fc2")
OTHER_LAYERS = (r"attn\.proj",)

PAPER_SIZES = PaperSizes(
    width=768,
    ranks={"attn.qkv": 128, "mlp.fc1": 128, "mlp.fc2": 128},
    blocks=DEFAULT_BLOCKS,
)
"""Of ViT-B."""


@dataclass
class ViT:
    """An image classifier, ready to run.

    Attributes:
        model: ``(n, 3, h, w)`` pixels -> ``(n, classes)`` logits.
        preprocess: RGB image -> ``(3, h, w)`` float32 on the CPU, as the model's own data config
            says (size, crop, interpolation, mean and deviation).
        labels: names of the classes by id.
        name: id of the model.
        untrained: whether the weights are random, so that classes mean nothing.
    """

    model: nn.Module
    preprocess: Callable[[Image.Image], Tensor]
    labels: dict[int, str]
    name: str
    untrained: bool

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's parameters."""
        return next(self.model.parameters()).dtype

    def pixels(self, images: Sequence[Image.Image]) -> Tensor:
        """Images -> ``(n, 3, h, w)`` on the model's device, in its dtype."""
        batch = torch.stack([self.preprocess(image.convert("RGB")) for image in images])
        return batch.to(device=self.device, dtype=self.dtype)


def load_vit(
    source: ModelEntry | str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    untrained: bool = False,
    variant: str | Path | None = None,
    backend: Backend = Backend.AUTO,
) -> ViT:
    """Load a timm model from its folder or the local cache, or build it with random weights.

    Where the file holds the model's own tensors, as timm writes it, the model is made on ``meta``
    and filled tensor by tensor in ``dtype``. Other files are left to timm, which holds the whole
    model in float32 first.

    Args:
        source: entry, id, full timm tag or folder (``config.json`` and ``model.safetensors``).
        dtype: of all parameters.
        device: where they go.
        untrained: random weights, for timing only; needs no file for a model known by name.
        variant: kind ("low_rank", "monarch", "blast") or file of a converted form. With
            ``untrained`` a kind, at the paper's ranks.
        backend: of the block low-rank layers.

    Raises:
        ValueError: weights or variant are not here, or do not fit; one line.
    """
    entry = entry_of(source, "classify")
    if untrained and entry.folder() is None and entry.untrained:
        name = entry.untrained
        weights = Path()
    else:
        folder = folder_of(entry)
        name = f"local-dir:{folder}"
        weights = folder / "model.safetensors"
        if not untrained and weights.is_file():
            read_header(weights)  # refuses a damaged file in one line
    try:
        if untrained:
            model = _on_meta(name)
            if variant is not None:
                untrained_variant_(model, str(variant), PAPER_SIZES, backend=backend)
            fill_random_(model, device=device, dtype=dtype)
            model.to(device=device, dtype=dtype)
        else:
            file = None if variant is None else VariantFile(variant_file(entry, variant))
            made = _from_file(name, weights, file, device=device, dtype=dtype, backend=backend)
            if made is None:
                made = timm.create_model(name, pretrained=True)
                if file is not None:
                    load_variant_(made, file.path, backend=backend)
                made.to(device=device, dtype=dtype)
            model = made
        data: dict[str, Any] = resolve_model_data_config(model)
        preprocess = create_transform(**data, is_training=False)
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # timm does what the folder's config says, so anything can come: an unknown architecture,
        # arguments that it does not take, tensors that do not fit, a foreign file.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{entry.id} cannot be loaded: {reason}") from None
    return ViT(
        model=model.eval(),
        preprocess=preprocess,
        labels=entry.labels(),
        name=entry.id,
        untrained=untrained,
    )


def classify(
    vit: ViT, images: Sequence[Image.Image], *, top: int = 5
) -> list[list[tuple[int, str, float]]]:
    """For each image its likeliest classes: id, label, probability, the likeliest first.

    Raises:
        ValueError: no image, or ``top`` below 1.
    """
    if not images:
        raise ValueError("images must hold at least one image, got none")
    with torch.inference_mode():
        logits = vit.model(vit.pixels(images))
    return top_classes(logits, vit.labels, top)


def top_classes(
    logits: Tensor, labels: dict[int, str], top: int
) -> list[list[tuple[int, str, float]]]:
    """``(n, classes)`` logits -> ``n`` lists of id, label and probability, the likeliest first.

    Raises:
        ValueError: ``top`` below 1.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    probabilities = logits.float().softmax(-1)
    values, classes = probabilities.topk(min(top, logits.shape[-1]))
    return [
        [
            (index, labels.get(index, f"class {index}"), value)
            for index, value in zip(row_classes, row_values, strict=True)
        ]
        for row_classes, row_values in zip(classes.tolist(), values.tolist(), strict=True)
    ]


def vit_rules(
    kind: str, *, layers: str = "paper", fraction: float = 0.5, blocks: int | None = None
) -> list[Rule]:
    """Rules for :func:`model_zoo.convert.convert_` on a ViT of timm, whose q/k/v are fused already.

    Args:
        kind: "low_rank", "monarch" or "blast".
        layers: "paper" converts q/k/v and both feed-forward layers, as the paper does; "all" also
            the attention's output.
        fraction: of each converted weight's parameters, to be removed.
        blocks: of Monarch (by default 4) and BLAST (by default 3).

    Raises:
        TypeError, ValueError: unknown ``layers``, or what
            :class:`~model_zoo.convert.Saving` refuses.
    """
    if layers not in ("paper", "all"):
        raise ValueError(f"layers must be 'paper' or 'all', got {layers!r}")
    patterns = PAPER_LAYERS if layers == "paper" else PAPER_LAYERS + OTHER_LAYERS
    convert = rf"blocks\.\d+\.({'|'.join(patterns)})"
    saving = Saving(kind, fraction, None if kind == "low_rank" else blocks)
    return [Rule(convert, saving, regex=True), Rule(r".*", None, regex=True)]


def _from_file(
    name: str,
    weights: Path,
    variant: VariantFile | None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: Backend,
) -> nn.Module | None:
    """The model filled tensor by tensor, or None where only timm can load it.

    That is so where a file has to be adapted (older names, another image size), and for an
    architecture with buffers that are computed and not stored: ``meta`` would lose them.
    """
    if not weights.is_file():
        return None
    try:
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False)
    except (NotImplementedError, RuntimeError):  # it looks at values while it is made
        return None
    wanted = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if any(key not in wanted for key, _ in model.named_buffers()):
        return None
    with open_weights(weights) as reader:
        if dict(reader.shapes()) != wanted:
            return None
        fill_base_(model, reader, variant, device=device, dtype=dtype, backend=backend)
    return model


def _on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False)
    if any(True for _ in model.buffers()):  # computed, not stored: meta would lose them
        return timm.create_model(name, pretrained=False)
    return model
