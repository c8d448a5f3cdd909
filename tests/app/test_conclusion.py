"""What stands under the table and above the cards once a run has ended."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from app.conclusion import compact_structure, conclude
from app.context import Context
from app.engine import ClassifyJob, GenerateJob, Job
from app.live import LiveRun
from app.panel import Panel


def finished(context: Context, job: Job) -> LiveRun:
    live = LiveRun(job, ["dense", "blr-torch"])
    for event in context.engine.run(job, ["dense", "blr-torch"]):
        live.fold(event)
    live.finish()
    return live


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ("BLAST b3 r34 (6 layers), BLAST b3 r61 (2 layers)", "BLAST b3 r34–61"),
        ("low rank r128 (12 layers)", "low rank r128"),
        ("Monarch b4 r8 (1 layers), low rank r2 (1 layers)", "Monarch b4 r8, low rank r2"),
        ("", ""),
    ],
)
def test_ranks_become_a_range(structure: str, text: str) -> None:
    assert compact_structure(structure) == text


def test_two_runs_can_be_told_apart(context: Context) -> None:
    """Model, structure, class and steps come first in the line under the table."""
    job = GenerateJob(model="demo-dit", class_id=2, steps=4, images=1)
    first, other = (
        conclude(finished(context, each)).footnote for each in (job, replace(job, class_id=3))
    )
    label = context.models.get("demo-dit").labels()[2]
    assert first.startswith(f"Emoji DiT (bundled) · BLAST b9 r24 · class {label} · 4 steps · ")
    assert first != other
    forwards = conclude(
        finished(context, ClassifyJob(model="demo-vit", image=b"\x89PNG\r\n\x1a\n", repeats=5))
    )
    assert "Emoji ViT (bundled) · BLAST b9 r24 · 5 forwards · " in forwards.footnote


def test_the_sentence_has_the_sign_of_the_table(context: Context) -> None:
    sentence = conclude(finished(context, GenerateJob(model="demo-dit", steps=4))).sentence
    assert re.search(r"\d×", sentence)
    assert not re.search(r"\dx\b", sentence)


def test_a_run_takes_the_files_of_the_last_one_away(context: Context) -> None:
    """Nobody downloads the report of an earlier run for that of this one."""
    job = GenerateJob(model="demo-dit", steps=4)
    panel = Panel("generate", ["dense"], 2, "cpu")
    *_, report, table = panel.running(LiveRun(job, ["dense"]), begins=True)
    for button in (report, table):
        assert button.value is None
        assert not button.interactive
    *_, report, table = panel.finished(finished(context, job))
    assert report.interactive
    assert table.interactive
