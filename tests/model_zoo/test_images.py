"""Every case of C5: decoded right, or refused in one line."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from model_zoo import images
from model_zoo.images import open_image


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png16(values: np.ndarray, colour: int) -> bytes:
    """A PNG of 16 bits a channel, written by hand: Pillow writes only grey ones."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def array(data: bytes) -> np.ndarray:
    image = open_image(data)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def refused(data: bytes | str | Path, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        open_image(data)
    assert "\n" not in str(caught.value)


PICTURE = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_rgb_is_unchanged(kind: str) -> None:
    data = encoded(Image.fromarray(PICTURE), kind)
    assert np.array_equal(array(data), PICTURE)


def test_16_bit_png_is_scaled() -> None:
    """C5: came out 99.6 % white elsewhere."""
    grey = np.array([[0, 257, 32768, 65535]])
    assert array(png16(grey, 0))[0, :, 0].tolist() == [0, 1, 128, 255]
    colour = np.array([[[0, 65535, 30000], [65535, 128, 25700]]])
    expected = np.array([[0, 255, 30000 / 257], [255, 0, 100]])
    assert np.abs(array(png16(colour, 2))[0] - expected).max() <= 1


def test_gif_gives_the_colours_of_its_first_frame() -> None:
    """C5: palette indices elsewhere."""
    red, blue = (Image.new("RGB", (4, 3), colour) for colour in ("red", "blue"))
    data = encoded(red, "GIF", save_all=True, append_images=[blue])
    assert np.array_equal(array(data), np.full((3, 4, 3), (255, 0, 0)))
    clear = Image.new("P", (2, 1), 0)
    clear.putpalette([10, 20, 30, 200, 100, 50])
    clear.putpixel((1, 0), 1)
    data = encoded(clear, "GIF", transparency=0)
    assert array(data)[0].tolist() == [[255, 255, 255], [200, 100, 50]]


def test_transparency_is_laid_on_white() -> None:
    """C5: RGBA, grey with alpha, palette with transparency."""
    rgba = Image.new("RGBA", (3, 1), (100, 50, 0, 255))
    rgba.putpixel((1, 0), (100, 50, 0, 128))
    rgba.putpixel((2, 0), (100, 50, 0, 0))
    mixed = [255 + (c - 255) * 128 / 255 for c in (100, 50, 0)]
    found = array(encoded(rgba, "PNG"))[0]
    assert np.abs(found - np.array([[100, 50, 0], mixed, [255] * 3])).max() <= 1
    grey = Image.new("LA", (1, 1), (0, 0))
    assert array(encoded(grey, "PNG"))[0, 0].tolist() == [255] * 3
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([1, 2, 3])
    assert array(encoded(palette, "PNG", transparency=b"\0"))[0, 0].tolist() == [255] * 3


def test_grey_cmyk_and_one_pixel() -> None:
    """C5: greyscale, CMYK, 1x1."""
    assert array(encoded(Image.new("L", (2, 2), 77), "PNG")).ravel().tolist() == [77] * 12
    assert array(encoded(Image.new("1", (1, 1), 1), "PNG"))[0, 0].tolist() == [255] * 3
    cmyk = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
    found = array(cmyk)[4, 4]
    assert found[0] > 240
    assert found[1:].max() < 15
    assert array(encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG"))[0, 0].tolist() == [9, 8, 7]


def test_exif_turns_the_picture_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated clockwise
    data = encoded(Image.fromarray(PICTURE), "PNG", exif=exif)
    assert np.array_equal(array(data), np.rot90(PICTURE, -1))


def test_colour_profile_does_not_stop_it() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = encoded(Image.fromarray(PICTURE), "PNG", icc_profile=profile)
    assert np.array_equal(array(data), PICTURE)


def heic(image: Image.Image) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    out = io.BytesIO()
    pillow_heif.from_pillow(image).save(out, quality=95)
    return out.getvalue()


def test_heic_is_decoded() -> None:
    """C5: a traceback elsewhere."""
    found = array(heic(Image.new("RGB", (32, 16), (200, 40, 90))))
    assert found.shape == (16, 32, 3)
    assert np.abs(found - np.array([200, 40, 90])).max() < 6


def test_heic_without_its_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """C5."""
    data = heic(Image.new("RGB", (16, 16), "red"))
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    refused(data, "HEIC picture, which needs the package pillow-heif")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_broken_files_are_refused(kind: str) -> None:
    """C5: corrupt."""
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    refused(data[: len(data) // 2], "the image is damaged or incomplete")


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    refused(b"", "is empty")
    refused(b"hello", "no picture in a format known here")
    refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture in a format")
    refused(tmp_path / "none.png", "none.png cannot be read: No such file")
    refused(encoded(Image.new("F", (2, 2), 0.5), "TIFF"), "floating-point")
    with pytest.raises(TypeError, match="path or bytes"):
        open_image(3)  # type: ignore[arg-type]


def test_too_many_pixels_are_refused_before_decoding() -> None:
    data = png16(np.zeros((1, 1)), 0)
    head = struct.pack(">II", 20_000, 20_000)
    body = b"IHDR" + head + data[24:29]
    bomb = data[:12] + body + struct.pack(">I", zlib.crc32(body)) + data[33:]
    refused(bomb, "more than 100 million pixels")


def test_paths_and_bytes_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.fromarray(PICTURE), "PNG"))
    for source in (path, str(path)):
        assert np.array_equal(np.asarray(open_image(source)), PICTURE)
