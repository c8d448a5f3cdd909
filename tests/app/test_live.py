"""Runs as the page follows them: folded, throttled, stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from app.api import answers
from app.conclusion import conclude
from app.context import Context
from app.engine import Event, GenerateJob, Step, Stopped
from app.live import LiveRun, follow
from app.panel import Panel, changed

JOB = GenerateJob(model="demo-dit", steps=6, images=1, preview_every=2)


def test_a_run_ends_with_reports_lines_and_a_verdict(context: Context) -> None:
    live = LiveRun(JOB, ["dense", "blr-torch"])
    *_, last = follow(context.engine.run(JOB, ["dense", "blr-torch"]), live)
    assert last.finished
    assert [view.phase for view in last.views.values()] == ["done", "done"]
    assert [len(line.points) for line in last.latency_lines()] == [6, 6]
    end = conclude(last)
    assert [info.id for info, _ in end.rows] == ["dense", "blr-torch"]
    assert end.sentence.startswith("BLR PyTorch is ")
    assert end.report["ratios"]["dense"]["picture"]["identical"]
    assert end.csv.splitlines()[0] == "backend,index,ms"
    assert len(end.csv.splitlines()) == 1 + 12


def test_compiling_pays_back_or_not(context: Context) -> None:
    live = LiveRun(JOB, ["dense", "compiled"])
    *_, last = follow(context.engine.run(JOB, ["dense", "compiled"]), live)
    assert "pays back" in conclude(last).payback["compiled"]


class Steps:
    """A run of steps that come at once, or not at all."""

    def __init__(self, count: int, wait: float = 0.0) -> None:
        self.stopped = False
        self._count = count
        self._wait = wait

    def __iter__(self) -> Iterator[Event]:
        for index in range(1, self._count + 1):
            if self.stopped:
                yield Stopped(backend="dense", t=0.0)
                return
            time.sleep(self._wait)
            yield Step(backend="dense", t=0.0, index=index, total=self._count, seconds=0.001,
                       memory_mib=1.0)  # fmt: skip

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.stopped = True


def test_fast_steps_redraw_the_page_a_few_times_a_second() -> None:
    live = LiveRun(JOB, ["dense"])
    begun = time.monotonic()
    drawn = sum(1 for _ in follow(Steps(20_000), live))
    assert len(live.views["dense"].latency) == 20_000
    assert drawn <= 2 + (time.monotonic() - begun) / 0.25


def test_the_page_moves_while_nothing_comes() -> None:
    """Elapsed times go on, also while a model compiles (C12)."""
    live = LiveRun(JOB, ["dense"])
    assert sum(1 for _ in follow(Steps(1, wait=1.1), live)) >= 4


def test_a_cancelled_call_stops_while_nothing_comes() -> None:
    """A program's call can be closed also while a worker compiles or hangs (C1)."""
    run = Steps(1000, wait=3.0)
    told = answers(follow(run, LiveRun(JOB, ["dense"])))
    first = next(told)
    begun = time.monotonic()
    assert next(told) == first
    assert 0.5 < time.monotonic() - begun < 2.5
    told.close()
    assert run.stopped


def test_leaving_the_page_stops_the_run() -> None:
    run = Steps(1000, wait=0.01)
    shown = follow(run, LiveRun(JOB, ["dense"]))
    next(shown)
    shown.close()  # type: ignore[attr-defined]
    assert run.stopped


def test_a_stopped_run_ends_within_a_step(context: Context) -> None:
    """Stop ends the run, and says where (C1)."""
    run = Steps(250, wait=0.1)
    live = LiveRun(JOB, ["dense", "compiled"])
    asked = 0
    for _ in follow(run, live):
        if live.views["dense"].step >= 5 and not asked:
            asked = live.views["dense"].step
            run.stop()
    assert live.stopped
    # The step under way, and one on its way here.
    assert asked <= live.views["dense"].step <= asked + 2
    assert [view.phase for view in live.views.values()] == ["stopped", "stopped"]


class Broken(Steps):
    def __iter__(self) -> Iterator[Event]:
        raise RuntimeError("boom")
        yield


def test_an_unexpected_error_ends_the_run_calmly(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context.engine, "run", lambda job, backends: Broken(1))
    *_, last = context.watch("me", JOB, ["dense"])
    assert last.finished
    assert "server's log" in last.error
    assert "boom" not in last.error


def test_stop_reaches_ones_own_run_only(context: Context) -> None:
    mine, theirs = Steps(1), Steps(1)
    context.sessions.begin("me", mine)
    context.sessions.begin("them", theirs)
    assert context.sessions.stop("me")
    assert mine.stopped
    assert not theirs.stopped
    context.sessions.end("me", mine)
    assert not context.sessions.stop("me")


def test_unchanged_areas_are_not_sent_again() -> None:
    sent: dict[int, str] = {}
    assert changed(["a", "b"], sent) == ["a", "b"]
    again = changed(["a", "c"], sent)
    assert again[0] != "a"
    assert again[1] == "c"


def test_every_area_is_drawn_before_any_run() -> None:
    """Values are given when the page is built, so no tab is blank (C2)."""
    import gradio as gr

    with gr.Blocks(analytics_enabled=False):
        for task in ("generate", "classify"):
            panel = Panel(task, ["dense"], 2, "cpu")
            shown = [component.value for component in panel.outputs[:-2]]
            assert all(isinstance(value, str) and value for value in shown)
