"""Any picture a person may drop, as an upright 8-bit RGB image, or one line that says why not."""

from __future__ import annotations

import io
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

__all__ = ["MAX_PIXELS", "open_image"]

MAX_PIXELS = 100_000_000
"""Larger pictures are refused before they are decoded."""

# Formats that Pillow decodes by itself. EPS, PDF and the like would start other programs.
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM", "ICO", "TGA")
_HEIF_BRANDS = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}


def open_image(source: str | Path | bytes) -> Image.Image:
    """Decode a picture.

    Args:
        source: path of a file, or the bytes of one. HEIC needs the package pillow-heif.

    Returns:
        An RGB image of 8 bits a channel: upright as its EXIF says, the first frame of an animation,
        16-bit values scaled, transparency laid on white.

    Raises:
        ValueError: no picture, a broken one, too many pixels, or a format that cannot be read; one
            line.
    """
    name, data = _read(source)
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS and not _is_avif(data):
        formats = _heif_formats(name)
    else:
        formats = _FORMATS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=formats) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise Image.DecompressionBombError(f"{width}x{height}")
                image.seek(0)
                image.load()
                return _to_rgb(ImageOps.exif_transpose(image), name)
    except UnidentifiedImageError:
        raise ValueError(
            f"{name} is no picture in a format known here ({', '.join(_FORMATS)}, HEIC)"
        ) from None
    except Image.DecompressionBombError:
        raise ValueError(
            f"{name} has more than {MAX_PIXELS // 10**6} million pixels, which is the limit"
        ) from None
    except (OSError, SyntaxError, EOFError, RuntimeError, IndexError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name} is damaged or incomplete: {reason}") from None


def _read(source: str | Path | bytes) -> tuple[str, bytes]:
    if isinstance(source, bytes):
        name, data = "the image", source
    elif isinstance(source, str | Path):
        name = Path(source).name
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    else:
        raise TypeError(f"source must be a path or bytes, got {type(source).__name__}")
    if not data:
        raise ValueError(f"{name} is empty")
    return name, data


def _is_avif(data: bytes) -> bool:
    """Whether an ISO file of a generic brand is compatible with AVIF, which Pillow reads."""
    size = int.from_bytes(data[:4], "big")
    brands = data[8:size]
    return any(brands[at : at + 4] in (b"avif", b"avis") for at in range(0, len(brands), 4))


def _heif_formats(name: str) -> tuple[str, ...]:
    if find_spec("pillow_heif") is None:
        raise ValueError(
            f"{name} is a HEIC picture, which needs the package pillow-heif "
            "(pip install 'blr-lab[heic]'); or save it as PNG or JPEG"
        )
    import pillow_heif

    pillow_heif.register_heif_opener()
    return ("HEIF",)


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I"):
        return Image.fromarray(_eight_bits(np.asarray(image), name)).convert("RGB")
    if image.mode == "F":
        raise ValueError(f"{name} holds floating-point values, which have no agreed range")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _eight_bits(values: np.ndarray, name: str) -> np.ndarray:
    """Integers of 16 bits as 8 bits: 65535 becomes 255."""
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"{name} holds 32-bit values, which have no agreed range")
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
