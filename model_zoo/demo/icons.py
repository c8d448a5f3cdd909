"""Fetch the icon sets with npm, draw their SVGs, and keep the pictures in one compact file."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from model_zoo.demo.names import CLASSES, IMAGE_SIZE, TRAINING_DESIGNERS, label

# Names that hold these words are people, flags, letters, signs or clocks: no good company for
# pictures of things.
_LEFT_OUT = """
    flag skin man woman person people clock keycap button letter family hand girl boy arrow thirty
    square circle mark sign symbol diamond input aquarius aries taurus gemini cancer leo virgo libra
    scorpio sagittarius capricorn pisces ophiuchus moon fist finger heart cross no- prohibited
    triangle
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class IconSet:
    """One designer's icons, as an Iconify JSON package."""

    designer: str
    icons: dict[str, Any]

    @classmethod
    def load(cls, node_modules: Path, designer: str) -> IconSet:
        """Read the package of `designer`; FileNotFoundError if it is not in `node_modules`."""
        path = node_modules / "@iconify-json" / designer / "icons.json"
        return cls(designer, json.loads(path.read_text(encoding="utf-8")))

    def names(self) -> set[str]:
        """Every name that can be drawn, aliases included."""
        return set(self.icons["icons"]) | set(self.icons.get("aliases", {}))

    def svg(self, name: str) -> str:
        """The SVG document of `name`; KeyError if this designer has no such icon."""
        aliases = self.icons.get("aliases", {})
        while name not in self.icons["icons"]:
            name = aliases[name]["parent"]
        icon = self.icons["icons"][name]
        left, top, width, height = (
            icon.get(key, self.icons.get(key, default))
            for key, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
        )
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
        )


def fetch(folder: Path, designers: Iterable[str]) -> Path:
    """Install the designers' npm packages (needs npm and a network); -> node_modules."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = [f"@iconify-json/{designer}" for designer in designers]
    subprocess.run(["npm", "install", "--no-save", "--prefix", str(folder), *packages], check=True)
    return folder / "node_modules"


def draw(svg: str, size: int = IMAGE_SIZE) -> Image.Image:
    """Draw an SVG document -> RGBA, `size` pixels square, transparent around the icon."""
    import resvg_py

    png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, skip_system_fonts=True)
    icon = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    picture = Image.new("RGBA", (size, size))
    picture.paste(icon, ((size - icon.width) // 2, (size - icon.height) // 2))
    return picture


def auxiliary_names(sets: Iterable[IconSet]) -> list[str]:
    """Names outside CLASSES that every set has: more pictures to learn shapes from."""
    shared = set.intersection(*(icons.names() for icons in sets)) - set(CLASSES)
    return sorted(name for name in shared if not any(word in name for word in _LEFT_OUT))


def write_pack(path: Path, entries: Iterable[tuple[IconSet, str]]) -> int:
    """Draw (set, name) pairs into one `.npz` of WebP pictures; -> how many."""
    pictures: list[bytes] = []
    designers: list[str] = []
    names: list[str] = []
    for icons, name in entries:
        buffer = io.BytesIO()
        # The classes themselves are kept exactly, the auxiliary pictures nearly so.
        draw(icons.svg(name)).save(
            buffer, "WEBP", lossless=name in CLASSES, quality=90, method=4, exact=False
        )
        pictures.append(buffer.getvalue())
        designers.append(icons.designer)
        names.append(name)
    ends = np.cumsum([len(picture) for picture in pictures]).astype(np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        blob=np.frombuffer(b"".join(pictures), np.uint8),
        ends=ends,
        designers=np.array(designers),
        names=np.array(names),
    )
    return len(pictures)


def build_training_pack(node_modules: Path, path: Path) -> int:
    """Draw every class and every auxiliary name of the training designers; -> how many pictures."""
    sets = [IconSet.load(node_modules, designer) for designer in TRAINING_DESIGNERS]
    names = [*CLASSES, *auxiliary_names(sets)]
    return write_pack(path, ((icons, name) for name in names for icons in sets))


# Only designers whose licence asks for no credit beside each picture (Apache-2.0, MIT).
EXAMPLES: tuple[tuple[str, str], ...] = (
    ("noto", "fox"),
    ("fluent-emoji", "hamburger"),
    ("fluent-emoji-flat", "rocket"),
    ("noto-v1", "castle"),
    ("noto", "guitar"),
    ("fluent-emoji", "owl"),
)
"""The example pictures for classifying: designer and name."""


def write_examples(node_modules: Path, folder: Path) -> None:
    """Draw the example pictures, 256 pixels square, each a little smaller than its page."""
    size, inner = 256, 208
    folder.mkdir(parents=True, exist_ok=True)
    for designer, name in EXAMPLES:
        icon = draw(IconSet.load(node_modules, designer).svg(name), inner)
        page = Image.new("RGB", (size, size), "white")
        page.paste(icon, ((size - inner) // 2,) * 2, icon)
        page.save(folder / f"{label(name).replace(' ', '-')}.png", optimize=True)
