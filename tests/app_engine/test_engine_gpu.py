"""The engine on an NVIDIA GPU: all five backends, on tiny models."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from PIL import Image

from app import report as reports
from app.engine import BACKENDS, ClassifyJob, Engine, Failed, GenerateJob, Result

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("cuda:0", max_models=5) as made:
        assert made.wait_ready(180)
        yield made


def test_five_backends_generate_and_their_memory_adds_up(engine: Engine, tmp_path: Path) -> None:
    folder = tiny_models.make_dit(tmp_path / "dit")
    job = GenerateJob(str(folder), class_id=1, steps=6, images=1, preview_every=0)
    events = list(engine.run(job, [info.id for info in BACKENDS]))
    assert [event.message for event in events if isinstance(event, Failed)] == []
    results = {event.backend: event for event in events if isinstance(event, Result)}
    assert set(results) == {info.id for info in BACKENDS}
    report = reports.build(
        [event.report for event in results.values()],
        {backend: event.images or [] for backend, event in results.items()},
    )
    for made in report["backends"]:
        memory = made["memory_mib"]
        assert made["recompiled_in_run"] == 0
        assert memory["peak"] >= memory["weights"] + memory["decoder"]
        assert memory["activations"] > 0
        assert memory["cache"] >= 0
    # The three BLR backends run one state dict: their pictures are close to each other.
    images = {backend: event.images or [] for backend, event in results.items()}
    for backend in ("blr-triton", "blr-compiled"):
        difference = reports.picture_difference(images["blr-torch"], images[backend])
        assert difference["identical"] or difference["psnr_db"] > 25


def test_five_backends_classify(engine: Engine, tmp_path: Path) -> None:
    folder = tiny_models.make_vit(tmp_path / "vit")
    out = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(out, "PNG")
    job = ClassifyJob(str(folder), image=out.getvalue(), repeats=5)
    events = list(engine.run(job, [info.id for info in BACKENDS]))
    assert [event.message for event in events if isinstance(event, Failed)] == []
    tops = {event.backend: event.top for event in events if isinstance(event, Result)}
    assert set(tops) == {info.id for info in BACKENDS}
    assert all(sum(share for _, _, share in top or []) <= 1.001 for top in tops.values())
