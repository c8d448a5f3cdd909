"""The bundled models through the engine: every variant runs, within the limits of two cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app import report as reports
from app.engine import (
    ClassifyJob,
    Decoding,
    Engine,
    Event,
    Failed,
    GenerateJob,
    Loading,
    Preview,
    Ready,
    Result,
    Step,
    Stopped,
    Warming,
)
from app.engine.__main__ import _picture


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_models=3) as made:
        yield made


def test_the_first_result_of_a_cold_start_is_the_quick_backends() -> None:
    """Compiling comes after it, and what came before it is told: loading and warming up."""
    job = GenerateJob("demo-dit", class_id=5, images=2)
    events: list[Event] = []
    with Engine() as cold:
        run = cold.run(job, ["compiled", "dense"])
        for event in run:
            events.append(event)
            if isinstance(event, Result):
                break
        run.stop()
    assert {event.backend for event in events} == {"dense"}
    assert [type(event) for event in events if not isinstance(event, Step | Preview)] == [
        Loading, Warming, Ready, Decoding, Result,
    ]  # fmt: skip
    ready = next(event for event in events if isinstance(event, Ready))
    assert ready.load_s > 0
    assert ready.warmup_s > 0
    assert ready.compile_s == 0
    assert event.t < 120


def test_one_picture_of_25_steps_takes_seconds_on_each_eager_backend(engine: Engine) -> None:
    events = list(engine.run(GenerateJob("demo-dit", class_id=5), ["dense", "blr-torch"]))
    assert [event.message for event in events if isinstance(event, Failed)] == []
    for backend in ("dense", "blr-torch"):
        ready = next(e for e in events if isinstance(e, Ready) and e.backend == backend)
        result = next(e for e in events if isinstance(e, Result) and e.backend == backend)
        assert result.t - ready.t < 10
    results = [event for event in events if isinstance(event, Result)]
    report = reports.build(
        [result.report for result in results],
        {result.backend: result.images or [] for result in results},
    )
    assert report["ratios"]["dense"]["picture"]["identical"]
    assert report["ratios"]["blr-torch"]["memory_weights"] < 1


def test_stop_takes_effect_within_a_step_and_the_next_run_is_clean(engine: Engine) -> None:
    """C1: 250 steps, Stop at step 5, while the sixth is under way or just done."""
    short = GenerateJob("demo-dit", class_id=3, steps=2, images=8, preview_every=0)
    *_, before = engine.run(short, ["dense"])
    seen: list[Event] = []
    stopped = engine.run(dataclasses.replace(short, steps=250), ["dense", "blr-torch"])
    for event in stopped:
        seen.append(event)
        if isinstance(event, Step) and event.index == 5:
            stopped.stop()
    done = [event.index for event in seen if isinstance(event, Step)]
    assert done in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7])
    assert isinstance(seen[-1], Stopped)
    events = list(engine.run(short, ["dense"]))
    assert not any(isinstance(event, Loading) for event in events)
    assert [event.index for event in events if isinstance(event, Step)] == [1, 2]
    after = events[-1]
    assert isinstance(before, Result)
    assert isinstance(after, Result)
    assert reports.picture_difference(before.images or [], after.images or [])["identical"]


@pytest.mark.parametrize("variant", ["low_rank", "monarch"])
def test_the_other_variants_generate(engine: Engine, variant: str) -> None:
    job = GenerateJob("demo-dit", variant=variant, steps=2)  # type: ignore[arg-type]
    events = list(engine.run(job, ["blr-torch"]))
    assert isinstance(events[-1], Result), events[-1]


@pytest.mark.parametrize("variant", ["low_rank", "monarch", "blast"])
def test_every_variant_classifies(engine: Engine, variant: str) -> None:
    job = ClassifyJob("demo-vit", variant=variant, image=_picture(None), repeats=3)  # type: ignore[arg-type]
    events = list(engine.run(job, ["blr-torch"]))
    assert isinstance(events[-1], Result), events[-1]
    assert len(events[-1].top or []) == 5


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's PSS")
def test_three_warm_workers_fit_in_memory(engine: Engine) -> None:
    job = GenerateJob("demo-dit", steps=1, images=2)
    for variant in ("blast", "monarch"):
        run = engine.run(dataclasses.replace(job, variant=variant), ["dense", "blr-torch"])
        assert [type(event) for event in run][-1] is Result
    workers = engine._pool.workers()
    assert len(workers) == 3
    assert all(worker.loaded for worker in workers)
    total = sum(psutil.Process(worker.pid).memory_full_info().pss for worker in workers)
    # The whole app has 4 GiB; the web process needs its part of it.
    assert total < 3 * 2**30
