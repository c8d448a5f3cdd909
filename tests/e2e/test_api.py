"""The same through gradio_client, and what an attacker would try."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image
from running import ROOT, Server

EXAMPLE = Path(__file__).with_name("api_example.py")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    opened = Client(server.url, verbose=False)
    yield opened
    assert server.refused() == "", "a process of the app tried to leave the machine (C10)"


def picture(path: Path, **save: Any) -> Path:
    ramp = np.linspace(0, 255, 96 * 96 * 3).reshape(96, 96, 3).astype(np.uint8)
    Image.fromarray(ramp).save(path, **save)
    return path


def test_the_example_of_the_readme_runs(server: Server, tmp_path: Path) -> None:
    example = picture(tmp_path / "picture.png")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), server.url, str(example)],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "BLR PyTorch is" in done.stdout
    for backend in ("dense", "blr-torch"):
        with Image.open(tmp_path / f"{backend}.png") as image:
            assert image.format == "PNG"


def test_names_and_types_of_the_endpoints_are_stable(client: Client) -> None:
    endpoints = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    arguments = {
        name: [parameter["parameter_name"] for parameter in endpoint["parameters"]]
        for name, endpoint in endpoints.items()
    }
    assert arguments == {
        "/models": [],
        "/backends": ["model", "variant"],
        "/generate": [
            "class_name", "backends", "model", "variant", "seed", "steps", "guidance",
            "images", "untrained",
        ],
        "/classify": [
            "image", "backends", "model", "variant", "repeats", "batch", "untrained",
        ],
    }  # fmt: skip


def test_models_say_what_they_are_and_how_to_get_them(client: Client) -> None:
    found = {model["id"]: model for model in client.predict(api_name="/models")}
    assert list(found)[:2] == ["demo-dit", "demo-vit"]
    assert found["demo-dit"]["available"]
    assert found["demo-dit"]["bundled"]
    assert found["dit-xl-2-256"]["licence"]


def test_dense_differs_from_itself_by_nothing(client: Client) -> None:
    """The same seed gives the same pixels, byte for byte, run after run (C4)."""
    settings = {"class_name": "0", "backends": ["dense"], "steps": 4, "seed": 3}
    first, second = (client.predict(**settings, api_name="/generate") for _ in range(2))
    assert first["images"]["dense"] == second["images"]["dense"]
    assert first["report"]["ratios"]["dense"]["picture"] == {
        "identical": True, "max": 0, "psnr_db": None,
    }  # fmt: skip
    decoded = base64.b64decode(first["images"]["dense"][0].partition(",")[2])
    with Image.open(io.BytesIO(decoded)) as image:
        assert image.format == "PNG"


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"class_name": value} for value in ("1001", "-1", "1000", [], "", "no such thing")],
        *[{"class_name": value} for value in ("--5", "9" * 5000, "<b>" * 10**5)],
        *[{"steps": value} for value in (0, 1001, 2.5)],
        {"guidance": 10**400},
        {"images": 0},
        {"seed": "x"},
        {"backends": []},
        {"backends": ["fast"]},
        {"backends": ["blr-triton"]},
        {"model": "no-such-model"},
        {"model": "demo-vit"},
        {"variant": "butterfly"},
    ],
)
def test_wrong_values_are_refused_in_one_line(client: Client, wrong: dict[str, Any]) -> None:
    """Validated on the server before the model sees it, also through the API (C8)."""
    good = {"class_name": "0", "backends": ["dense"], "steps": 2}
    with pytest.raises(AppError) as caught:
        client.predict(**(good | wrong), api_name="/generate")
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 600
    assert "upstream Gradio app has raised" not in message


def post(url: str, body: bytes) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("guidance", ["NaN", "Infinity", "-1", '"4"', "null"])
def test_guidance_that_is_no_number_is_refused(server: Server, guidance: str) -> None:
    """NaN is no JSON, yet servers take it: it must not reach the model (C8)."""
    body = f'{{"data": ["0", ["dense"], "demo-dit", "blast", 1, 2, {guidance}, 1, false]}}'
    try:
        event = json.loads(post(f"{server.url}/gradio_api/call/generate", body.encode()))
    except urllib.error.HTTPError:
        return
    with urllib.request.urlopen(
        f"{server.url}/gradio_api/call/generate/{event['event_id']}", timeout=60
    ) as answer:
        text = answer.read().decode()
    assert "event: error" in text
    assert '"report"' not in text


def test_a_cancelled_job_frees_the_device(client: Client) -> None:
    """Cancelling stops within a step, and the next job starts at once (C1)."""
    job = client.submit(class_name="0", backends=["dense"], steps=500, api_name="/generate")
    deadline = time.monotonic() + 60
    while not any(out["progress"]["step"] >= 5 for out in job.outputs()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.cancel()
    begun = time.monotonic()
    client.predict(class_name="0", backends=["dense"], steps=1, api_name="/generate")
    assert time.monotonic() - begun < 20


def saved(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / f"picture.{kind}"
    grey = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    rgb = Image.fromarray(np.linspace(0, 255, 64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8))
    match kind:
        case "16bit.png":
            Image.fromarray(grey).save(path)
        case "rgba.png":
            rgb.convert("RGBA").save(path)
        case "cmyk.jpg":
            rgb.convert("CMYK").save(path)
        case "grey.png":
            rgb.convert("L").save(path)
        case "1x1.png":
            Image.new("RGB", (1, 1), "red").save(path)
        case "heic":
            heif = pytest.importorskip("pillow_heif")
            heif.from_pillow(rgb).save(path)
        case _:
            rgb.save(path)
    return path


@pytest.mark.parametrize(
    "kind",
    ["gif", "webp", "heic", "16bit.png", "rgba.png", "cmyk.jpg", "grey.png", "1x1.png"],
)
def test_every_kind_of_picture_is_classified(client: Client, tmp_path: Path, kind: str) -> None:
    """HEIC, GIF, 16 bit, transparent, CMYK, grey and tiny pictures are decoded (C5)."""
    result = client.predict(
        image=handle_file(saved(tmp_path, kind)), backends=["dense"], repeats=1,
        api_name="/classify",
    )  # fmt: skip
    shares = [entry["probability"] for entry in result["top"]["dense"]]
    assert len(shares) == 5
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"just text", b"\x89PNG\r\n\x1a\n" + b"x" * 50]
)
def test_what_is_no_picture_is_refused(client: Client, tmp_path: Path, content: bytes) -> None:
    """A bad file is one line, not a traceback (C5)."""
    path = tmp_path / "upload.png"
    path.write_bytes(content)
    with pytest.raises(AppError) as caught:
        client.predict(image=handle_file(path), backends=["dense"], api_name="/classify")
    assert "\n" not in str(caught.value)
    assert "upstream Gradio app has raised" not in str(caught.value)


# ---- what an attacker would try (C15)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/self/environ", str(ROOT / "pyproject.toml")]
)
def test_files_of_the_server_are_not_served(server: Server, path: str) -> None:
    """C15: what the app did not make is refused."""
    for prefix in ("/gradio_api/file=", "/file="):
        assert status(f"{server.url}{prefix}{path}") in (403, 404)
    assert status(f"{server.url}/gradio_api/file={path}") == 403


def test_uploads_are_bounded(server: Server) -> None:
    """C15: 3 MB over a limit of 1 MB."""
    boundary = "frontier"
    body = (
        f"--{boundary}\r\nContent-Disposition: form-data; name=\"files\"; filename=\"big.png\"\r\n"
        "Content-Type: image/png\r\n\r\n"
    ).encode() + b"\0" * 3_000_000 + f"\r\n--{boundary}--\r\n".encode()  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/gradio_api/upload", body,
        {"Content-Type": f"multipart/form-data; boundary={boundary}"},
    )  # fmt: skip
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 413


@pytest.mark.parametrize(
    "file",
    [
        {"path": "/etc/passwd"},
        {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
        {"path": "http://127.0.0.1:1/x.png", "meta": {"_type": "gradio.FileData"}},
        {"path": "http://169.254.169.254/latest", "meta": {"_type": "gradio.FileData"}},
        {"path": "x", "url": "http://localhost:1/x.png", "meta": {"_type": "gradio.FileData"}},
    ],
)
def test_paths_and_addresses_are_no_uploads(server: Server, file: dict[str, Any]) -> None:
    """C15: neither files of the server nor its neighbours are read through the app."""
    body = json.dumps({"data": [file, ["dense"], "demo-vit", "blast", 1, 1, False]}).encode()
    try:
        event = json.loads(post(f"{server.url}/gradio_api/call/classify", body))
    except urllib.error.HTTPError:
        return
    with urllib.request.urlopen(
        f"{server.url}/gradio_api/call/classify/{event['event_id']}", timeout=60
    ) as answer:
        text = answer.read().decode()
    assert "event: error" in text
    assert "root:" not in text


def test_there_is_no_monitoring_page(server: Server) -> None:
    """C15: usage of the app is nobody's business."""
    assert status(f"{server.url}/monitoring/summary") in (401, 403, 404)


def test_other_sites_may_not_read_answers(server: Server) -> None:
    """C15: no answer is shared with a page of another origin."""
    request = urllib.request.Request(
        f"{server.url}/config", headers={"Origin": "https://evil.example"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            allowed = answer.headers.get("Access-Control-Allow-Origin")
    except urllib.error.HTTPError as error:
        allowed = error.headers.get("Access-Control-Allow-Origin")
    assert allowed in (None, "")
