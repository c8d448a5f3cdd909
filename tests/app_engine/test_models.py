"""The engine with real workers on tiny models: what is measured is right, and nothing leaks."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from PIL import Image
from safetensors import safe_open

from app import report as reports
from app.engine import (
    ClassifyJob,
    Compiling,
    Decoding,
    Engine,
    Event,
    Failed,
    GenerateJob,
    Job,
    Loading,
    Preview,
    Ready,
    Result,
    Step,
    Warming,
)
from app.engine import __main__ as headless
from model_zoo.dit import decode, denoise, load_dit
from model_zoo.vit import classify, load_vit

MIB = 2**20


@pytest.fixture(scope="module")
def dit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_dit(tmp_path_factory.mktemp("models") / "dit")


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_vit(tmp_path_factory.mktemp("models") / "vit")


@pytest.fixture(scope="module")
def network_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("network") / "log"


@pytest.fixture(scope="module")
def engine(network_log: Path) -> Iterator[Engine]:
    """One engine for the module, whose workers refuse every connection that leaves the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLR_LAB_FORBID_NETWORK", "1")
        patch.setenv("BLR_LAB_NETWORK_LOG", str(network_log))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "no_network"))
        with Engine(max_models=5, threads=1) as made:
            yield made


def generate(folder: Path, **changes: Any) -> GenerateJob:
    options = {"class_id": 3, "seed": 11, "steps": 4, "images": 2, "preview_every": 2}
    return GenerateJob(model=str(folder), **{**options, **changes})


def picture() -> Image.Image:
    return Image.linear_gradient("L").convert("RGB").resize((40, 40))


def classify_job(folder: Path, **changes: Any) -> ClassifyJob:
    out = io.BytesIO()
    picture().save(out, "PNG")
    return ClassifyJob(model=str(folder), image=out.getvalue(), **{"repeats": 6, **changes})


def run(engine: Engine, job: Job, *backends: str) -> list[Event]:
    events = list(engine.run(job, backends))
    assert [e.message for e in events if isinstance(e, Failed)] == []
    return events


def result(events: list[Event], backend: str) -> Result:
    return next(e for e in events if isinstance(e, Result) and e.backend == backend)


def stored_bytes(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(n).numel() * 4 for n in file.keys())  # noqa: SIM118


def test_generate_runs_on_both_eager_backends(engine: Engine, dit_folder: Path) -> None:
    events = run(engine, generate(dit_folder), "blr-torch", "dense")
    dense = [type(event) for event in events if event.backend == "dense"]
    assert dense == [*(Loading, Warming, Ready, Step, Step, Preview, Step, Step, Decoding, Result)]
    for backend in ("dense", "blr-torch"):
        found = result(events, backend)
        assert found.images is not None
        assert [Image.open(io.BytesIO(data)).size for data in found.images] == [(8, 8), (8, 8)]
        report = found.report
        assert report["backend"] == backend
        assert report["step_ms"]["n"] == len(report["step_ms"]["all"]) == 4
        assert report["step_ms"]["p10"] <= report["step_ms"]["median"] <= report["step_ms"]["p90"]
        assert report["shape"] == {
            **{"images": 2, "batch": 4, "tokens": 16, "latents": [2, 4, 8, 8]}
        }
        assert report["decode_ms"] > 0
        assert report["images_per_s"] > 0
        assert report["untrained"] is False
        assert report["dtype"] == "float32"
    assert result(events, "dense").report["structure"] is None
    assert "BLAST b3" in result(events, "blr-torch").report["structure"]


def test_pictures_are_those_of_the_zoo(engine: Engine, dit_folder: Path) -> None:
    """The worker's loop is the zoo's: the same request gives the same values."""
    found = result(run(engine, generate(dit_folder), "dense"), "dense").images
    dit = load_dit(dit_folder)
    *_, latents = denoise(dit, [3, 3], seed=11, steps=4, guidance=4.0)
    expected = decode(dit, latents)
    assert found is not None
    for data, image in zip(found, expected, strict=True):
        ours = torch.tensor(list(Image.open(io.BytesIO(data)).tobytes()), dtype=torch.int16)
        theirs = torch.tensor(list(image.tobytes()), dtype=torch.int16)
        # Another number of threads may round differently.
        assert (ours - theirs).abs().max() <= 1


def test_the_same_seed_gives_the_same_pictures(engine: Engine, dit_folder: Path) -> None:
    """C4: dense against dense differs by exactly nothing, and another seed does not."""
    first, again, other = (
        result(run(engine, generate(dit_folder, seed=seed), "dense"), "dense")
        for seed in (11, 11, 12)
    )
    assert first.images is not None
    assert again.images is not None
    assert other.images is not None
    assert reports.picture_difference(first.images, again.images)["identical"]
    assert not reports.picture_difference(first.images, other.images)["identical"]


def test_memory_is_what_the_tensors_take(engine: Engine, dit_folder: Path) -> None:
    events = run(engine, generate(dit_folder), "dense", "blr-torch")
    dense, blr = (result(events, b).report for b in ("dense", "blr-torch"))
    transformer = dit_folder / "transformer" / "diffusion_pytorch_model.safetensors"
    # Position embeddings are computed, not stored: 16 tokens of width 36.
    position = 16 * 36 * 4
    assert dense["weights_bytes"] == stored_bytes(transformer) + position
    assert dense["memory_mib"]["weights"] == dense["weights_bytes"] / MIB
    vae = dit_folder / "vae" / "diffusion_pytorch_model.safetensors"
    assert dense["memory_mib"]["decoder"] == pytest.approx(stored_bytes(vae) / MIB)
    assert blr["weights_bytes"] < dense["weights_bytes"]
    for report in (dense, blr):
        memory = report["memory_mib"]
        # At least the inputs (4, 4, 8, 8) and tokens (4, 16, 36), each once, as float32.
        assert memory["activations"] * MIB > 4 * (4 * 4 * 8 * 8 + 4 * 16 * 36)
        assert memory["activations"] < 5
        assert memory["peak"] == pytest.approx(
            memory["weights"] + memory["decoder"] + memory["activations"]
        )
        assert 0 < memory["process"] < 500
        assert set(report["memory_labels"]) == set(memory)
    ready = next(e for e in events if isinstance(e, Ready) and e.backend == "dense")
    assert ready.weights_bytes == dense["weights_bytes"]


def test_classify_agrees_with_the_zoo(engine: Engine, vit_folder: Path) -> None:
    events = run(engine, classify_job(vit_folder, top=3), "dense", "blr-torch")
    found = result(events, "dense")
    (expected,) = classify(load_vit(vit_folder), [picture()], top=3)
    assert found.top is not None
    assert [c for c, _, _ in found.top] == [c for c, _, _ in expected]
    assert [label for _, label, _ in found.top] == [label for _, label, _ in expected]
    for (_, _, ours), (_, _, theirs) in zip(found.top, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert found.images is None
    assert found.report["step_ms"]["n"] == 6
    assert found.report["decode_ms"] is None
    assert "BLAST b3" in result(events, "blr-torch").report["structure"]
    assert len([e for e in events if isinstance(e, Step) and e.backend == "dense"]) == 6


def test_a_missing_variant_is_said_and_the_rest_runs(engine: Engine, vit_folder: Path) -> None:
    events = list(engine.run(classify_job(vit_folder, variant="monarch"), ["dense", "blr-torch"]))
    failed = next(e for e in events if isinstance(e, Failed))
    assert failed.backend == "blr-torch"
    assert "has no Monarch variant here" in failed.message
    assert isinstance(events[-1], Failed)
    assert result(events, "dense").top is not None


def test_untrained_weights_are_marked(engine: Engine) -> None:
    job = dataclasses.replace(
        classify_job(Path("vit-b-16"), repeats=1, warmup=1, untrained=True), model="vit-b-16"
    )
    report = result(run(engine, job, "blr-torch"), "blr-torch").report
    assert report["untrained"] is True
    # The paper's layers, BLAST b3 r128 on q/k/v and both feed-forward layers of 12 blocks.
    assert report["structure"] == "BLAST b3 r128 (36 layers)"
    left = 86_567_656 - 12 * 768 * (2304 + 3072 + 3072)
    assert report["parameters"] == left + 12 * 128 * (768 * 3 + 2304 + 3072 * 2 + 27)


def test_headless_run_writes_the_report(
    vit_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    arguments = ["--model", str(vit_folder), "--backends", "dense", "--repeats", "3"]
    assert headless.main([*arguments, "--json", str(path)]) == 0
    assert '"schema": "blr-lab/report"' in path.read_text()
    assert "Dense" in capsys.readouterr().out
    assert headless.main(["--model", "nonsense", "--backends", "dense"]) == 2


def test_with_an_empty_path_dense_runs_and_the_engines_process_stays_light(
    vit_folder: Path, tmp_path: Path
) -> None:
    """C11: the compiled backend is refused with its reason, the eager one runs."""
    image = tmp_path / "picture.png"
    picture().save(image)
    code = f"""
import sys
from pathlib import Path
from app.engine import ClassifyJob, Engine, Failed, Result
job = ClassifyJob({str(vit_folder)!r}, image=Path({str(image)!r}).read_bytes(), repeats=2)
with Engine(threads=1) as engine:
    events = list(engine.run(job, ["dense", "compiled"]))
assert [e.message for e in events if isinstance(e, Failed)] == ["no C++ compiler found"], events
assert [e.backend for e in events if isinstance(e, Result)] == ["dense"], events
heavy = {{"torch", "torchvision", "diffusers", "timm", "gradio", "triton"}} & set(sys.modules)
assert not heavy, heavy
"""
    environment = {k: v for k, v in os.environ.items() if k != "CXX"} | {"PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compiling_is_told_apart_and_done_once_a_shape(engine: Engine, dit_folder: Path) -> None:
    """C12: the first run compiles, and says so; a new batch compiles again; else it is steady."""
    first = run(engine, generate(dit_folder, images=1), "compiled")
    assert next(event for event in first if isinstance(event, Compiling)).expected_s > 0
    ready = next(event for event in first if isinstance(event, Ready))
    report = result(first, "compiled").report
    assert report["compile_s"] == ready.compile_s > 0
    assert report["recompiled_in_run"] == 0
    # None of it is in the times of the steps.
    assert max(report["step_ms"]["all"]) / 1e3 < ready.compile_s / 5
    status = {s.id: s for s in engine.backend_status(str(dit_folder), "blast")}
    assert status["compiled"].compile_s == ready.compile_s

    # Other guidance is the same shape, and so are two pictures without guidance.
    for same in ({"guidance": 6.0}, {"images": 2, "guidance": 1.0}):
        again = run(engine, generate(dit_folder, **{"images": 1, **same}), "compiled")
        assert not any(isinstance(event, Compiling | Loading) for event in again)
        assert result(again, "compiled").report["recompiled_in_run"] == 0
    other = run(engine, generate(dit_folder, images=1, guidance=1.0), "compiled")
    assert next(e for e in other if isinstance(e, Compiling)).expected_s == ready.compile_s
    assert result(other, "compiled").report["recompiled_in_run"] == 0


def test_no_worker_left_the_machine(engine: Engine, network_log: Path, vit_folder: Path) -> None:
    """Runs last in this module: what its workers tried is in the log (C10)."""
    run(engine, classify_job(vit_folder), "dense")
    assert engine._pool.workers()
    for worker in engine._pool.workers():
        environment = psutil.Process(worker.pid).environ()
        assert environment["BLR_LAB_FORBID_NETWORK"] == "1"
        assert environment["HF_HUB_OFFLINE"] == "1"
        remote = [c for c in psutil.Process(worker.pid).net_connections() if c.raddr]
        assert remote == []
    assert not network_log.exists(), network_log.read_text()
