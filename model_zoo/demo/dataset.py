"""The training designers' pictures as tensors."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from model_zoo.demo.names import CLASSES, IMAGE_SIZE, TRAINING_DESIGNERS

TRAINING_FILE = "train.npz"


@dataclass(frozen=True)
class Icons:
    """Pictures with transparency, and what they show."""

    rgba: Tensor
    """(n, 4, 128, 128) uint8, straight alpha."""
    classes: Tensor
    """(n,) int64; below len(CLASSES) a class, above it an auxiliary name."""
    designers: tuple[str, ...]
    """The designer of each picture."""

    def __len__(self) -> int:
        return len(self.designers)

    def select(self, keep: Tensor) -> Icons:
        """The pictures where `keep` (n,) bool is true."""
        flags = keep.tolist()
        return Icons(
            self.rgba[keep],
            self.classes[keep],
            tuple(d for d, flag in zip(self.designers, flags, strict=True) if flag),
        )

    def by(self, designers: tuple[str, ...]) -> Icons:
        """The pictures of some designers."""
        keep = torch.tensor([d in designers for d in self.designers], device=self.rgba.device)
        return self.select(keep)


def read_pack(path: Path, allowed: tuple[str, ...], device: str | torch.device) -> Icons:
    """Read a pack; ValueError if it holds a designer that is not in `allowed`."""
    with np.load(path, allow_pickle=False) as pack:
        blob, ends = pack["blob"].tobytes(), pack["ends"].tolist()
        designers = tuple(str(d) for d in pack["designers"])
        names = [str(n) for n in pack["names"]]
    foreign = sorted(set(designers) - set(allowed))
    if foreign:
        raise ValueError(f"{path}: expected pictures of {', '.join(allowed)}, got {foreign[0]}")
    starts = [0, *ends[:-1]]

    def decode(span: tuple[int, int]) -> np.ndarray:
        picture = Image.open(io.BytesIO(blob[span[0] : span[1]])).convert("RGBA")
        return np.asarray(picture).transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        pictures = list(pool.map(decode, zip(starts, ends, strict=True)))
    rgba = torch.from_numpy(np.stack(pictures))
    if rgba.shape[1:] != (4, IMAGE_SIZE, IMAGE_SIZE):
        raise ValueError(f"{path}: expected {IMAGE_SIZE} pixels square, got {tuple(rgba.shape)}")
    extra = sorted(set(names) - set(CLASSES))
    index = {name: i for i, name in enumerate([*CLASSES, *extra])}
    classes = torch.tensor([index[name] for name in names])
    return Icons(rgba.to(device), classes.to(device), designers)


def load_training(
    folder: Path, *, device: str | torch.device = "cpu", auxiliary: bool = False
) -> Icons:
    """The training designers' classes, and with `auxiliary` their other pictures too."""
    icons = read_pack(folder / TRAINING_FILE, TRAINING_DESIGNERS, device)
    return icons if auxiliary else icons.select(icons.classes < len(CLASSES))
