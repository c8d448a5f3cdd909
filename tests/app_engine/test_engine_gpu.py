"""The engine on an NVIDIA GPU, on tiny models: eager, compiled and Triton workers.

A worker there takes many seconds to import and to compile, so each task has one comparison, of the
three backends that differ in how they run; the PyTorch kernels run here, as the reference.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from PIL import Image

from app import report as reports
from app.engine import ClassifyJob, Engine, Event, Failed, GenerateJob, Job, Result
from app.engine.spec import spec_for
from app.engine.worker.models import open_dit, open_vit
from app.engine.worker.session import resolve_dtype
from model_zoo.dit import decode, denoise
from model_zoo.vit import classify

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
BACKENDS = ("dense", "blr-triton", "compiled")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(DEVICE, max_models=len(BACKENDS)) as made:
        assert made.wait_ready(180)
        yield made


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def run(engine: Engine, job: Job) -> dict[str, Result]:
    events: list[Event] = list(engine.run(job, BACKENDS))
    assert [event.message for event in events if isinstance(event, Failed)] == []
    results = {event.backend: event for event in events if isinstance(event, Result)}
    assert set(results) == set(BACKENDS)
    return results


def test_three_backends_generate_and_their_memory_adds_up(engine: Engine, tmp_path: Path) -> None:
    folder = tiny_models.make_dit(tmp_path / "dit")
    job = GenerateJob(str(folder), class_id=1, steps=6, images=1, preview_every=0)
    results = run(engine, job)
    for result in results.values():
        memory = result.report["memory_mib"]
        assert result.report["recompiled_in_run"] == 0
        assert memory["peak"] >= memory["weights"] + memory["decoder"]
        assert memory["activations"] > 0
        assert memory["cache"] >= 0
    # The same state dict on the PyTorch kernels: the pictures are close to each other.
    spec = spec_for(job, "blr-torch", DEVICE)
    dit = open_dit(spec, resolve_dtype(None, torch.device(DEVICE)))
    *_, latents = denoise(
        dit, [job.class_id], seed=job.seed, steps=job.steps, guidance=job.guidance
    )
    wanted = [png(image) for image in decode(dit, latents)]
    difference = reports.picture_difference(wanted, results["blr-triton"].images or [])
    assert difference["identical"] or difference["psnr_db"] > 25


def test_three_backends_classify(engine: Engine, tmp_path: Path) -> None:
    folder = tiny_models.make_vit(tmp_path / "vit")
    picture = Image.linear_gradient("L").convert("RGB")
    job = ClassifyJob(str(folder), image=png(picture), repeats=5, top=10)
    results = run(engine, job)
    vit = open_vit(spec_for(job, "blr-torch", DEVICE), resolve_dtype(None, torch.device(DEVICE)))
    (wanted,) = classify(vit, [picture], top=10)
    shares = {index: share for index, _, share in wanted}
    for result in results.values():
        assert sum(share for _, _, share in result.top or []) == pytest.approx(1, abs=0.01)
    assert {i: share for i, _, share in results["blr-triton"].top or []} == pytest.approx(
        shares, abs=0.02
    )
