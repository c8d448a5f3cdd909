"""The app where Triton is not installed, as on a Mac or Windows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from gradio_client import Client
from running import GUARD, ROOT, Server, end, start

NO_TRITON = GUARD.with_name("no_triton")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("without"), guard=NO_TRITON)
    yield running
    end(running)
    assert running.refused() == ""


def test_triton_is_really_absent_there() -> None:
    code = """
import importlib.util, torch
from app.engine import machine
from blr_kernels import triton_available
assert importlib.util.find_spec("triton") is None
try:
    import triton
except ModuleNotFoundError as error:
    assert error.name == "triton"
else:
    raise AssertionError("triton was imported")
assert not triton_available()[0]
gpu = {"ready": True, "capability": (9, 0)}
assert machine.why_no_triton("cuda:0", gpu) == "triton is not installed"
assert machine.why_no_compile("cuda:0") == "triton is not installed"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(NO_TRITON)}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_everything_but_the_triton_backend_works(without: Server) -> None:
    """C11, C13: the Triton backend is greyed with its reason, the others run."""
    client = Client(without.url, verbose=False)
    found = {info["id"]: info for info in client.predict("demo-dit", api_name="/backends")}
    assert not found["blr-triton"]["available"]
    assert found["blr-triton"]["reason"] == "needs an NVIDIA GPU"
    for backend in ("dense", "blr-torch"):
        assert found[backend]["available"], found[backend]["reason"]
    result = client.predict("0", ["dense", "blr-torch"], steps=2, api_name="/generate")
    assert result["errors"] == {}
    assert [len(result["images"][backend]) for backend in ("dense", "blr-torch")] == [1, 1]
    maps = [
        Path(f"/proc/{process.pid}/maps")
        for process in psutil.Process(without.process.pid).children(recursive=True)
    ]
    for worker in maps:
        if worker.exists():
            libraries = worker.read_text(encoding="utf-8")
            assert "libtorch" in libraries
            assert "libtriton" not in libraries
