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
    ("wrong", "words"),
    [
        *[({"class_name": id}, "between 0 and 127, got " + id) for id in ("1001", "-1", "1000")],
        ({"class_name": []}, "Class must be an id or a name, got []"),
        ({"class_name": ""}, "No class is named ''"),
        ({"class_name": "no such thing"}, "No class is named 'no such thing'"),
        ({"class_name": "--5"}, "No class is named '--5'"),
        ({"class_name": "9" * 5000}, "No class is named '999"),
        ({"class_name": "<b>" * 10**5}, "No class is named '<b>"),
        ({"steps": 0}, "Steps must be between 1 and 1000, got 0"),
        ({"steps": 1001}, "Steps must be between 1 and 1000, got 1001"),
        ({"steps": 2.5}, "Steps must be a whole number, got 2.5"),
        ({"guidance": 10**400}, "Guidance must be a finite number between 0 and 100"),
        ({"images": 0}, "Images must be between 1 and 8, got 0"),
        ({"seed": "x"}, "Seed must be a whole number, got 'x'"),
        ({"backends": []}, "Choose at least one backend"),
        ({"backends": ["fast"]}, "Unknown backend 'fast'"),
        ({"backends": ["blr-triton"]}, "BLR Triton cannot run here: needs an NVIDIA GPU"),
        ({"model": "no-such-model"}, "Unknown model 'no-such-model'"),
        ({"model": "demo-vit"}, "Unknown model 'demo-vit'; expected one of demo-dit"),
        ({"variant": "butterfly"}, "Variant must be one of low_rank, monarch, blast"),
    ],
)
def test_wrong_values_are_refused_in_one_line(
    client: Client, wrong: dict[str, Any], words: str
) -> None:
    """Validated on the server before the model sees it, also through the API (C8)."""
    good = {"class_name": "0", "backends": ["dense"], "steps": 2}
    with pytest.raises(AppError) as caught:
        client.predict(**(good | wrong), api_name="/generate")
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 600
    assert "upstream Gradio app has raised" not in message


def call(server: Server, endpoint: str, body: str) -> tuple[str, Any]:
    """Call an endpoint without a client's help: the last event's name, and its data.

    An answer other than 200, as for an endpoint that does not exist, raises HTTPError.
    """
    url = f"{server.url}/gradio_api/call/{endpoint}"
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{url}/{event}", timeout=60) as answer:
        lines = answer.read().decode().strip().splitlines()
    return lines[-2].removeprefix("event: "), json.loads(lines[-1].removeprefix("data: "))


@pytest.mark.parametrize(
    ("guidance", "words"),
    [
        ("NaN", "between 0 and 100, got nan"),
        ("Infinity", "between 0 and 100, got inf"),
        ("-1", "between 0 and 100, got -1"),
        ('"4"', "must be a number, got '4'"),
        ("null", "is empty"),
    ],
)
def test_guidance_that_is_no_number_is_refused(server: Server, guidance: str, words: str) -> None:
    """NaN is no JSON, yet servers take it: it must not reach the model (C8)."""
    body = f'{{"data": ["0", ["dense"], "demo-dit", "blast", 1, 2, {guidance}, 1, false]}}'
    event, told = call(server, "generate", body)
    assert event == "error"
    assert told["error"].startswith("Guidance")
    assert words in told["error"]


def test_the_same_call_with_right_values_runs(server: Server) -> None:
    """So the refusals above are of the values, not of the call."""
    body = '{"data": ["0", ["dense"], "demo-dit", "blast", 1, 2, 4.0, 1, false]}'
    event, (result,) = call(server, "generate", body)
    assert event == "complete"
    assert list(result["images"]) == ["dense"]


def test_a_cancelled_job_frees_the_device(client: Client) -> None:
    """Cancelling stops the job, and the next one need not wait for its end (C1)."""
    job = client.submit(class_name="0", backends=["dense"], steps=1000, api_name="/generate")

    def step() -> int:
        return max((out["progress"]["step"] for out in job.outputs()), default=0)

    def wait_for(wanted: int) -> float:
        deadline = time.monotonic() + 60
        while step() < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return time.monotonic()

    first = wait_for(1)
    begun, done = wait_for(first_steps := 20), step()
    job.cancel()
    rest = (1000 - done) * (begun - first) / first_steps
    client.predict(class_name="0", backends=["dense"], steps=1, api_name="/generate")
    assert time.monotonic() - begun < rest / 2, "the next job waited for the cancelled one"


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
    ("content", "words"),
    [
        (b"", "upload.png is empty"),
        (b"GIF89a", "upload.png is no picture in a format known here"),
        (b"just text", "upload.png is no picture in a format known here"),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 50, "upload.png is damaged or incomplete"),
    ],
)
def test_what_is_no_picture_is_refused(
    client: Client, tmp_path: Path, content: bytes, words: str
) -> None:
    """A bad file is one line that names it, not a traceback (C5)."""
    path = tmp_path / "upload.png"
    path.write_bytes(content)
    with pytest.raises(AppError) as caught:
        client.predict(image=handle_file(path), backends=["dense"], api_name="/classify")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


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


def upload(server: Server, name: str, content: bytes) -> str:
    """Send a file as a browser does; returns the path that the server keeps it under."""
    boundary = "frontier"
    body = (
        f"--{boundary}\r\n"
        f'Content-Disposition: form-data; name="files"; filename="{name}"\r\n'
        "Content-Type: image/png\r\n\r\n"
    ).encode() + content + f"\r\n--{boundary}--\r\n".encode()  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/gradio_api/upload", body,
        {"Content-Type": f"multipart/form-data; boundary={boundary}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        (path,) = json.load(answer)
    return str(path)


def test_uploads_are_bounded(server: Server) -> None:
    """C15: 3 MB over a limit of 1 MB."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        upload(server, "big.png", bytes(3_000_000))
    assert caught.value.code == 413


def classify_body(file: dict[str, Any]) -> str:
    return json.dumps({"data": [file, ["dense"], "demo-vit", "blast", 1, 1, False]})


@pytest.mark.parametrize("named", [{}, {"meta": {"_type": "gradio.FileData"}}])
def test_an_upload_is_served_and_classified(
    server: Server, tmp_path: Path, named: dict[str, Any]
) -> None:
    """So the refusals around are of what is asked for, not of how it is asked."""
    path = upload(server, "picture.png", picture(tmp_path / "picture.png").read_bytes())
    assert status(f"{server.url}/gradio_api/file={path}") == 200
    event, (result,) = call(server, "classify", classify_body({"path": path, **named}))
    assert event == "complete"
    assert len(result["top"]["dense"]) == 5


FILE = {"meta": {"_type": "gradio.FileData"}}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"path": "/etc/passwd"}, "Image must be an uploaded file, got a path on the server"),
        # Gradio itself refuses these two, and tells a stranger no more than that.
        ({"path": "/etc/passwd", **FILE}, None),
        ({"path": "x", "url": "http://localhost:1/x.png", **FILE}, None),
        ({"path": "http://127.0.0.1:1/x.png", **FILE}, "addresses are not fetched"),
        ({"path": "http://169.254.169.254/latest", **FILE}, "addresses are not fetched"),
    ],
)
def test_paths_and_addresses_are_no_uploads(
    server: Server, file: dict[str, Any], words: str | None
) -> None:
    """C15: neither files of the server nor its neighbours are read through the app."""
    event, told = call(server, "classify", classify_body(file))
    assert event == "error"
    if words is None:
        assert told == {"error": None}
    else:
        assert words in told["error"]


def test_there_is_no_monitoring_page(server: Server) -> None:
    """C15: usage of the app is nobody's business."""
    for page in ("monitoring", "monitoring/summary"):
        assert status(f"{server.url}/{page}") == 403


def test_other_sites_may_not_read_answers(server: Server) -> None:
    """C15: no answer is shared with a page of another origin."""

    def shared_with(origin: str) -> str | None:
        request = urllib.request.Request(f"{server.url}/config", headers={"Origin": origin})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.headers.get("Access-Control-Allow-Origin")

    assert shared_with(server.url) == server.url
    assert shared_with("https://evil.example") is None
    assert shared_with("null") is None
