"""Cards and tables: numbers as a person reads them, pictures byte for byte."""

from __future__ import annotations

import base64
import re

import pytest

from app import cards
from app.context import Context
from app.engine import GenerateJob, backend_info
from app.live import LiveRun


def finished(context: Context, backends: list[str], **settings: object) -> LiveRun:
    job = GenerateJob(model="demo-dit", steps=6, images=2, preview_every=2, **settings)  # type: ignore[arg-type]
    live = LiveRun(job, backends)  # type: ignore[arg-type]
    for event in context.engine.run(job, backends):  # type: ignore[arg-type]
        live.fold(event)
    live.finish()
    return live


@pytest.mark.parametrize(
    ("value", "text"), [(5.918, "5.92 ms"), (85.14, "85.1 ms"), (1234.6, "1,235 ms"), (None, "–")]
)
def test_milliseconds(value: float | None, text: str) -> None:
    assert cards.milliseconds(value) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(5.9, 5.97, "5.90–5.97 ms"), (87.3, 167.0, "87–167 ms"), (36.71, 45.49, "36.7–45.5 ms")],
)
def test_both_ends_of_a_range_have_the_same_decimals(low: float, high: float, text: str) -> None:
    assert cards.spread(low, high) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.418, "0.42 s"), (21.3, "21 s"), (200, "3 min 20 s"), (None, "–")]
)
def test_durations(value: float | None, text: str) -> None:
    assert cards.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(675_129_632, "675 M"), (2_760_080, "2.76 M"), (512_000, "512 k"), (1_200_000_000, "1.2 B")],
)
def test_parameter_counts(value: int, text: str) -> None:
    assert cards.parameter_count(value) == text


def test_pictures_reach_the_page_byte_for_byte(context: Context) -> None:
    """No lossy format between the model and the eye (C4)."""
    live = finished(context, ["dense"])
    view = live.views["dense"]
    assert view.images is not None
    markup = cards.pictures(view.info, view, 2)
    sent = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", markup)]
    assert sent == view.images
    assert all(png.startswith(b"\x89PNG") for png in sent)
    assert markup.count('class="final"') == 2


def test_text_from_elsewhere_is_escaped(context: Context) -> None:
    live = finished(context, ["dense"])
    view = live.views["dense"]
    view.message = "<script>alert(1)</script>"
    assert "<script" not in cards.pictures(view.info, view, 1)
    view.message = ""
    view.top = [(3, "<img src=x>", 0.5)]
    assert "<img" not in cards.bars(view.info, view)


def test_a_finished_bar_is_the_share_of_the_slowest(context: Context) -> None:
    view = finished(context, ["dense"]).views["dense"]
    assert view.report is not None
    median = view.report["step_ms"]["median"]
    assert "width:50.0%" in cards.figures(view.info, view, "step", slowest_ms=2 * median)
    assert "width:100.0%" in cards.figures(view.info, view, "step", slowest_ms=median)


def test_empty_cards_are_complete(context: Context) -> None:
    """Every area is there before the first run (C2)."""
    info = backend_info("dense")
    assert cards.pictures(info, None, 2).count('class="frame"') == 2
    assert cards.bars(info, None).count("<li>") == 5
    assert "per step, median" in cards.figures(info, None, "step")
    assert "appear here" in cards.table([])


def test_untrained_weights_mark_the_card(context: Context) -> None:
    view = finished(context, ["dense"], untrained=True).views["dense"]
    assert "untrained weights" in cards.head(view.info, view, "step")


def test_a_failed_backend_says_why(context: Context) -> None:
    view = finished(context, ["dense", "blr-triton"]).views["blr-triton"]
    assert "did not finish" in cards.head(view.info, view, "step")
    assert "needs an NVIDIA GPU" in cards.pictures(view.info, view, 2)


def test_the_table_leaves_out_pictures_for_classes() -> None:
    assert "picture vs Dense" in cards.table([])
    assert "picture vs Dense" not in cards.table([], pictures=False)


def test_a_card_has_no_peak_until_it_is_known(context: Context) -> None:
    """The memory of steps is the process's; the peak is that of weights and activations."""
    view = finished(context, ["dense"]).views["dense"]
    assert view.memory
    assert re.search(r">peak</dt><dd[^>]*>[\d.]+ MiB<", cards.figures(view.info, view, "step"))
    view.report = None
    assert re.search(r">peak</dt><dd[^>]*>–<", cards.figures(view.info, view, "step"))


def test_figures_of_a_warm_backend_are_marked(context: Context) -> None:
    """Load and warm-up are those of the first run, whatever run shows them."""
    report = finished(context, ["dense"]).views["dense"].report
    assert report is not None
    first = cards.table_cells(report, 1.0, "", {"loading", "warming", "running"})
    assert first[0] == ("0.40 s", "")
    warm = cards.table_cells(report, 1.0, "", {"running"})
    assert [("before this run" in title) for _, title in warm[:4]] == [True, False, True, False]
    assert len(warm) == len(cards.COLUMNS) - 1


def test_figures_say_what_they_are(context: Context) -> None:
    """The report's own words for memory, where it has them."""
    view = finished(context, ["dense"]).views["dense"]
    assert view.report is not None
    view.report["memory_labels"] = {"peak": "all of it & more"}
    assert 'title="all of it &amp; more"' in cards.figures(view.info, view, "step")
    assert '<th scope="col" title=' in cards.table([], titles=cards.meanings(None, "step"))
