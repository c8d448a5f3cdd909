"""The layers that are measured, by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from blr_kernels.roofline import Cost, layer_cost
from blr_kernels.structures import Blast, LowRank, Monarch, Structure

OPS = ("dense", "blast", "monarch", "low_rank")
VISION_MODELS = ("dit", "vit")


@dataclass(frozen=True)
class Layer:
    """A layer of a model, the structures it is tried with and the token counts it is called with.

    Attributes:
        name: model, dot, layer.
        in_features, out_features: multiples of the blocks of every structure.
        structures: tried beside the dense layer.
        tokens: rows of x.
        copies: layers of this kind that share one x; above 1 they are one call of the grouped op.
    """

    name: str
    in_features: int
    out_features: int
    structures: tuple[Structure, ...]
    tokens: tuple[int, ...]
    copies: int = 1


@dataclass(frozen=True)
class Case:
    """One layer with one structure (None is dense) at one number of tokens."""

    layer: str
    structure: Structure | None
    in_features: int
    out_features: int
    tokens: int
    copies: int = 1

    @property
    def op(self) -> str:
        """One of ``OPS``."""
        return "dense" if self.structure is None else self.structure.kind

    @property
    def vision(self) -> bool:
        """Whether it is a layer of DiT or ViT, where the slow variants are measured too."""
        return self.layer.split(".")[0] in VISION_MODELS

    def cost(self, itemsize: int) -> Cost:
        """Compulsory bytes and FLOPs of one call with bias; copies read x only once."""
        one = layer_cost(
            self.in_features, self.out_features, self.tokens, itemsize, self.structure, bias=True
        )
        again = (self.copies - 1) * self.tokens * self.in_features * itemsize
        return Cost(bytes=self.copies * one.bytes - again, flops=self.copies * one.flops)


_DIT_TOKENS = (512, 4096, 16384)
_VIT_TOKENS = (197, 32 * 197)
_ROWS = (2, 16)  # of the conditioning: one image with guidance, or a batch
_TEXT_TOKENS = (1, 16, 512, 1024, 4096)


def _dit(rank: int) -> tuple[Structure, ...]:
    return Blast(9, rank), LowRank(rank)


_VIT: tuple[Structure, ...] = (Blast(3, 128), Monarch(4, 128), LowRank(128))


def _text(blocks: int, rank: int, monarch_rank: int | None = None) -> tuple[Structure, ...]:
    return Blast(blocks, rank), Monarch(blocks, monarch_rank or rank), LowRank(rank)


LAYERS: tuple[Layer, ...] = (
    Layer("dit.qkv", 1152, 3456, _dit(384), _DIT_TOKENS),
    Layer("dit.fc1", 1152, 4608, _dit(256), _DIT_TOKENS),
    Layer("dit.adaln", 1152, 6912, _dit(256), _ROWS),
    Layer("dit.adaln28", 1152, 6912, _dit(256), _ROWS, copies=28),
    Layer("vit.qkv", 768, 2304, _VIT, _VIT_TOKENS),
    Layer("vit.fc1", 768, 3072, _VIT, _VIT_TOKENS),
    Layer("vit.fc2", 3072, 768, _VIT, _VIT_TOKENS),
    Layer("gpt2s.qkv", 768, 2304, _text(6, 192), _TEXT_TOKENS),
    Layer("gpt2s.fc1", 768, 3072, _text(6, 192), _TEXT_TOKENS),
    Layer("gpt2s.fc2", 3072, 768, _text(6, 192), _TEXT_TOKENS),
    Layer("llama1b.qo", 2048, 2048, _text(16, 256), _TEXT_TOKENS),
    Layer("llama1b.up", 2048, 8192, _text(16, 768), _TEXT_TOKENS),
    Layer("llama1b.down", 8192, 2048, _text(16, 768), _TEXT_TOKENS),
    Layer("llama7b.qkvo", 4096, 4096, _text(16, 1024), _TEXT_TOKENS),
    Layer("llama7b.up", 4096, 11008, _text(16, 1488, 1536), _TEXT_TOKENS),
    Layer("llama7b.down", 11008, 4096, _text(16, 1488, 1536), _TEXT_TOKENS),
)


def select(
    layers: Sequence[str] = (),
    tokens: Sequence[int] = (),
    ops: Sequence[str] = (),
    *,
    quick: bool = False,
) -> list[Case]:
    """The cases that pass every filter, the dense one of a layer and token count first.

    Args:
        layers: patterns such as ``dit.*``; any of them, all if there are none.
        tokens, ops: those to keep, all if there are none.
        quick: only the layers of DiT and ViT.

    Raises:
        ValueError: if a pattern, an op or a token count fits no layer, or the filters together
            leave nothing.
    """
    for pattern in layers:
        if not any(fnmatchcase(layer.name, pattern) for layer in LAYERS):
            known = ", ".join(layer.name for layer in LAYERS)
            raise ValueError(f"layers must match one of {known}, got {pattern!r}")
    for op in ops:
        if op not in OPS:
            raise ValueError(f"ops must be of {', '.join(OPS)}, got {op!r}")
    every = sorted({count for layer in LAYERS for count in layer.tokens})
    for count in tokens:
        if count not in every:
            raise ValueError(f"tokens must be of {', '.join(map(str, every))}, got {count}")
    found = [
        Case(layer.name, structure, layer.in_features, layer.out_features, count, layer.copies)
        for layer in LAYERS
        if not layers or any(fnmatchcase(layer.name, pattern) for pattern in layers)
        for count in layer.tokens
        if not tokens or count in tokens
        for structure in (None, *layer.structures)
    ]
    found = [case for case in found if not ops or case.op in ops]
    if quick:
        found = [case for case in found if case.vision]
    if not found:
        raise ValueError("no case is left: the filters exclude each other")
    return found
