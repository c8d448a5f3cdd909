"""What a person gives is checked before any worker sees it."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import pytest
from PIL import Image

from app.engine import BACKENDS, ClassifyJob, Engine, GenerateJob
from app.engine.spec import spec_for
from app.engine.validate import check_backends, check_job

GENERATE = {"model": "dit-xl-2-256", "untrained": True}


def png(size: tuple[int, int] = (3, 2), kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 30, 10)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("class_id", -1, "between 0 and"),
        ("class_id", [], "whole number"),
        ("class_id", 3.0, "whole number"),
        ("class_id", True, "whole number"),
        ("class_id", None, "whole number"),
        ("steps", 0, "between 1 and 1000, got 0"),
        ("steps", 1001, "between 1 and 1000, got 1001"),
        ("steps", 2.5, "whole number"),
        ("guidance", math.nan, "finite"),
        ("guidance", math.inf, "finite"),
        ("guidance", -math.inf, "finite"),
        ("guidance", -1.0, "between 0 and"),
        ("guidance", "4", "number"),
        ("seed", -1, "seed"),
        ("seed", 2**63, "seed"),
        ("images", 0, "images"),
        ("images", 65, "images"),
        ("preview_every", -1, "preview_every"),
        ("variant", "svd", "variant must be one of low_rank, monarch, blast, got 'svd'"),
        ("dtype", "int8", "dtype"),
        ("model", "", "model"),
        ("untrained", 1, "true or false"),
    ],
)
def test_a_generate_job_refuses_what_no_model_could_run(field: str, value: Any, words: str) -> None:
    """C8: in one line that says what was expected."""
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        GenerateJob(**{**GENERATE, field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("image", b"", "choose a picture"),
        ("image", b"GIF89a...", "PNG"),
        ("image", "file.png", "bytes"),
        ("repeats", 0, "repeats"),
        ("warmup", -1, "warmup"),
        ("batch", 0, "batch"),
        ("top", 0, "top"),
    ],
)
def test_a_classify_job_refuses_what_no_model_could_run(field: str, value: Any, words: str) -> None:
    """C8."""
    with pytest.raises((TypeError, ValueError), match=words):
        ClassifyJob(**{"model": "vit-b-16", "image": png(), field: value})


def test_class_ids_are_those_of_the_model() -> None:
    """C8: an ImageNet model has classes 0 to 999; 1000 is its null class and no class."""
    for class_id in (0, 999):
        check_job(GenerateJob(**GENERATE, class_id=class_id))
    for class_id in (1000, 1001):
        with pytest.raises(ValueError, match=rf"class {class_id} is not one of the 1000 classes"):
            check_job(GenerateJob(**GENERATE, class_id=class_id))


def test_the_engine_refuses_before_it_starts_a_worker() -> None:
    """C8."""
    with Engine(worker_main="does_not_exist") as engine:
        with pytest.raises(ValueError, match="class 1001"):
            engine.run(GenerateJob(**GENERATE, class_id=1001), ["dense"])
        with pytest.raises(ValueError, match="unknown model"):
            engine.run(GenerateJob(model="sdxl"), ["dense"])
        with pytest.raises(ValueError, match="it cannot classify"):
            engine.run(ClassifyJob(model="dit-xl-2-256", image=png()), ["dense"])
        with pytest.raises(TypeError, match="got dict"):
            engine.run({}, ["dense"])  # type: ignore[arg-type]
        assert engine._pool.workers() == []


def test_a_broken_png_is_refused_in_one_line() -> None:
    job = ClassifyJob(model="vit-b-16", image=png((64, 64))[:-30], untrained=True)
    with pytest.raises(ValueError, match="not a readable PNG") as caught:
        check_job(job)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backends", [[], ["dense", "dense"], ["turbo"], "dense"])
def test_backends_are_checked(backends: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_backends(backends)


def test_colours_and_ids_are_one_each() -> None:
    assert len({info.colour for info in BACKENDS}) == len({info.id for info in BACKENDS}) == 5


def test_a_spec_tells_workers_apart_by_what_they_hold() -> None:
    job = GenerateJob(**GENERATE)
    other = dataclasses.replace(job, variant="monarch", seed=7, steps=9, class_id=3)
    assert spec_for(job, "dense", "cpu") == spec_for(other, "dense", "cpu")
    assert spec_for(job, "blr-torch", "cpu") != spec_for(other, "blr-torch", "cpu")
    assert spec_for(job, "dense", "cpu") != spec_for(job, "compiled", "cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0", "", None])
def test_an_unknown_device_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="device must be cpu or cuda:N"):
        Engine(device)


def test_a_limit_of_no_models_is_refused() -> None:
    with pytest.raises(ValueError, match="max_models"):
        Engine(max_models=0)
