"""A built wheel, installed outside the clone, carries the bundled models and serves them."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradio_client import Client

from app.classify import examples

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def pip(*arguments: str | Path, cwd: Path) -> None:
    done = subprocess.run(
        [*PIP, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the wheel that it built."""
    folder = tmp_path_factory.mktemp("wheel")
    site = folder / "site"
    # Nothing is downloaded: the build's and the app's dependencies are those of this Python.
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT,
        cwd=folder)  # fmt: skip
    (wheel,) = folder.glob("blr_lab-*.whl")
    pip("install", "--no-index", "--no-deps", "--target", site, wheel, cwd=folder)
    return site


def test_wheel_holds_the_packages_and_the_demo(installed: Path) -> None:
    for name in (
        "app/__main__.py",
        "blr_kernels/structures.py",
        "model_zoo/registry.py",
        "model_zoo/assets/demo/dit/model_index.json",
        "model_zoo/assets/demo/vit/config.json",
        "bin/blr-lab",
    ):
        assert (installed / name).is_file(), name
    styles = {path.name for path in (ROOT / "app").glob("*.css")}
    assert {path.name for path in (installed / "app").glob("*.css")} == styles
    assert not (installed / "tests").exists()


def test_wheel_holds_the_pictures_to_classify_and_no_others(installed: Path) -> None:
    """The README's pictures of the page are not for those who installed it."""
    shipped = {path.name for path in (installed / "model_zoo/assets/examples").iterdir()}
    assert shipped == {path.name for path in examples()}
    assert not [name for name in shipped if name.startswith(("page-", "samples"))]


@pytest.fixture
def address(installed: Path, tmp_path: Path) -> Iterator[str]:
    """Where the installed app listens, started by its command from another folder."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONUNBUFFERED": "1"}
    # Not the clone, which this Python may have installed too.
    found = subprocess.run(
        [sys.executable, "-c", "import app, model_zoo as m; print(app.__file__, m.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.split() == [
        str(installed / name / "__init__.py") for name in ("app", "model_zoo")
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, installed / "bin" / "blr-lab", "app", "--port", str(port)],
            cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 90
    try:
        while status(url) != 200:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def status(url: str) -> int:
    """What an address answers, 0 for nothing."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return 0


def test_wheel_serves_the_demo_outside_the_clone(address: str, tmp_path: Path) -> None:
    """The page answers, and two backends generate a picture over HTTP."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.status == 200
        assert b"BLR Lab" in answer.read()
    client = Client(address, verbose=False, download_files=tmp_path)
    result = client.predict("0", ["dense", "blr-torch"], steps=2, api_name="/generate")
    assert result["errors"] == {}
    pictures = [picture for made in result["images"].values() for picture in made]
    assert len(pictures) == 2
    for picture in pictures:
        head, _, data = picture.partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
