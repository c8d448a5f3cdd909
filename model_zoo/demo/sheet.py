"""The sheet of samples in README: every form of the bundled DiT with equal seeds."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from model_zoo.demo.names import CLASSES, LABELS, SAMPLE_SEED, SAMPLE_STEPS, SHOWN
from model_zoo.demo.runtime import say
from model_zoo.dit import decode, denoise, load_dit

ROWS: tuple[tuple[str, str | None], ...] = (
    ("Dense", None),
    ("Low rank", "low_rank"),
    ("Monarch", "monarch"),
    ("BLAST", "blast"),
)
GUIDANCE = 4.0

_LEFT, _TOP = 92, 24


def write_sheet(path: Path) -> None:
    """Generate from the bundled `demo-dit` on the CPU and write one labelled PNG."""
    size = load_dit("demo-dit").vae.config.sample_size
    sheet = Image.new("RGB", (_LEFT + size * len(SHOWN), _TOP + size * len(ROWS)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(15)
    ids = [CLASSES.index(name) for name in SHOWN]
    for column, index in enumerate(ids):
        place = (_LEFT + size * column + size // 2, _TOP // 2)
        draw.text(place, LABELS[index], "#374151", font, anchor="mm")
    for row, (title, variant) in enumerate(ROWS):
        dit = load_dit("demo-dit", variant=variant)
        *_, latents = denoise(dit, ids, seed=SAMPLE_SEED, steps=SAMPLE_STEPS, guidance=GUIDANCE)
        draw.text((10, _TOP + size * row + size // 2), title, "#374151", font, anchor="lm")
        for column, picture in enumerate(decode(dit, latents)):
            sheet.paste(picture, (_LEFT + size * column, _TOP + size * row))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)
    say("sheet", f"{path}: {sheet.width}x{sheet.height}, {path.stat().st_size:,} bytes")
