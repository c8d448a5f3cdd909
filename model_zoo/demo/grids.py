"""Sheets of pictures."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torch import Tensor


def to_image(picture: Tensor) -> Image.Image:
    """(3, h, w) in [-1, 1] -> RGB picture."""
    pixels = (picture.clamp(-1, 1).float() + 1).mul(127.5).round().byte()
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def save_grid(path: Path, pictures: Tensor, *, columns: int) -> None:
    """Write (n, 3, h, w) in [-1, 1] as one PNG, row by row."""
    n, _, height, width = pictures.shape
    rows = -(-n // columns)
    sheet = Image.new("RGB", (min(n, columns) * width, rows * height), "white")
    for i, picture in enumerate(pictures):
        sheet.paste(to_image(picture), (i % columns * width, i // columns * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)
