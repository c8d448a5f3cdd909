"""Which backends run here, and why one does not."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from app.engine import Engine, machine
from app.engine.channel import ANSWERED, read_message
from app.engine.jobs import BackendStatus
from app.engine.worker.loop import Outbox


def statuses(engine: Engine, **options: bool) -> dict[str, BackendStatus]:
    found = engine.backend_status("vit-b-16", "blast", **options)
    return {status.id: status for status in found}


def test_on_a_cpu_triton_needs_a_gpu_and_the_rest_runs() -> None:
    """C13: without a GPU everything but the Triton kernels works, and the reason is given."""
    with Engine() as engine:
        found = statuses(engine, untrained=True)
    assert list(found) == ["dense", "compiled", "blr-triton", "blr-torch", "blr-compiled"]
    assert not found["blr-triton"].available
    assert found["blr-triton"].reason == "needs an NVIDIA GPU"
    assert all(found[i].available for i in ("dense", "blr-torch"))
    assert found["compiled"].compile_s is not None
    assert found["compiled"].compile_s > 0
    assert found["dense"].compile_s is None


def test_without_a_compiler_what_compiles_is_off_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C11: an empty PATH."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with Engine() as engine:
        found = statuses(engine, untrained=True)
    for backend in ("compiled", "blr-compiled"):
        assert not found[backend].available
        assert found[backend].reason == "no C++ compiler found"
    assert found["dense"].available
    assert found["blr-torch"].available


def test_a_named_compiler_that_is_not_there_counts_as_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert machine.find_cxx() is None


def test_clang_is_taken_where_gcc_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "clang++"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine.find_cxx() == "clang++"
    assert machine.worker_env("cpu", 1, offline=True)["CXX"] == "clang++"


def test_a_model_without_weights_says_how_to_get_them() -> None:
    """C9: the command, in the reason."""
    with Engine() as engine:
        reason = statuses(engine)["dense"].reason
    assert "hf download timm/vit_base_patch16_224" in reason


def test_an_old_gpu_is_refused_by_the_kernels() -> None:
    """C14: below compute capability 8.0."""
    probe = {"ready": True, "error": "", "capability": (7, 5)}
    reason = machine.why_no_triton("cuda:0", probe)
    assert "8.0 or newer, this one has 7.5" in reason
    assert machine.why_no_triton("cuda:0", {"ready": False}) == "looking at the GPU"


def test_a_missing_gpu_is_said_and_hangs_nothing() -> None:
    """C13: asking for a GPU on a machine without one."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with Engine("cuda:0") as engine:
        assert engine.device_info()["name"] == "cuda:0"
        assert engine.wait_ready(60)
        assert "no NVIDIA GPU" in engine.device_info()["error"]
        found = statuses(engine, untrained=True)
    assert not any(status.available for status in found.values())


def test_workers_on_a_cpu_sleep_while_they_wait_and_stay_offline() -> None:
    env = machine.worker_env("cpu", 2, offline=True)
    assert env["OMP_WAIT_POLICY"] == "passive"
    assert env["GOMP_SPINCOUNT"] == "0"
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_the_process_that_uses_the_engine_imports_no_torch() -> None:
    code = """
import sys
from app.engine import Engine
import app.report
with Engine() as engine:
    engine.device_info()
    engine.backend_status("dit-xl-2-256", "blast")
heavy = {"torch", "torchvision", "diffusers", "timm", "gradio", "triton"} & set(sys.modules)
sys.exit(", ".join(heavy) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_worker_can_report_a_field_called_name() -> None:
    """The facts on a GPU hold its name; they once clashed with the report's own."""
    stream = io.BytesIO()
    outbox = Outbox(stream)
    outbox(ANSWERED, name="NVIDIA H200", capability=(9, 0))
    stream.seek(0)
    assert read_message(stream) == (
        0,
        ANSWERED,
        {"name": "NVIDIA H200", "capability": (9, 0)},
    )
