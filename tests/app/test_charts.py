"""Charts: bounded, complete without data, drawn to scale."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from app.charts import HEIGHT, MAX_POINTS, WIDTH, Line, legend, line_chart, thin, ticks


def chart(lines: list[Line]) -> ET.Element:
    markup = line_chart(lines, title="t", x_title="step", unit="ms", empty="nothing yet")
    return ET.fromstring(markup)


def test_long_lines_are_thinned_and_keep_their_extremes() -> None:
    """Points stay bounded however long the run (C3)."""
    points = [(float(i), 5.0) for i in range(10_000)]
    points[1234] = (1234.0, 90.0)
    points[4321] = (4321.0, 0.5)
    kept = thin(points)
    assert len(kept) <= MAX_POINTS
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert {(1234.0, 90.0), (4321.0, 0.5)} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@pytest.mark.parametrize("count", [0, 1, 2, 159, 160])
def test_short_lines_stay_as_they_are(count: int) -> None:
    points = [(float(i), float(i)) for i in range(count)]
    assert thin(points) == points


def test_thinning_needs_room() -> None:
    with pytest.raises(ValueError, match="at least 4, got 3"):
        thin([(0.0, 0.0)], 3)


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (6, [0, 2, 4, 6]),
        (1500, [0, 500, 1000, 1500]),
        (0.07, [0, 0.025, 0.05, 0.075]),
        (0, [0, 1]),
        (float("nan"), [0, 1]),
    ],
)
def test_ticks_are_round_and_cover_the_data(top: float, expected: list[float]) -> None:
    assert ticks(top) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("top", "expected"),
    [(2, [0, 1, 2]), (5, [0, 1, 2, 3, 4, 5]), (15, [0, 5, 10, 15]), (150, [0, 25, 50, 75, 100])],
)
def test_counts_have_whole_ticks(top: float, expected: list[float]) -> None:
    found = ticks(top, 6, whole=True)
    assert found[: len(expected)] == expected
    assert all(value == int(value) for value in found)


def x_labels(points: list[tuple[float, float]], **settings: bool) -> list[ET.Element]:
    lines = [Line("Dense", "#4b5563", points)]
    markup = line_chart(lines, title="t", x_title="s", unit="ms", empty="", **settings)
    return [node for node in ET.fromstring(markup).iter("text") if node.get("class") == "x"]


def test_labels_have_the_decimals_of_their_step() -> None:
    """0.25 is not rounded to 0.2, and 2.5 has no second decimal."""
    lines = [Line("Dense", "#4b5563", [(0.0, 0.7), (14.0, 0.1)])]
    root = ET.fromstring(line_chart(lines, title="t", x_title="s", unit="ms", empty=""))
    by_class = {
        name: [node.text for node in root.iter("text") if node.get("class") == name]
        for name in ("x", "y")
    }
    assert by_class["y"] == ["0.00", "0.25", "0.50", "0.75"]
    assert by_class["x"] == ["0.0", "2.5", "5.0", "7.5", "10.0", "12.5"]


def test_no_label_sticks_out_of_the_chart() -> None:
    *others, last = x_labels([(0.0, 1.0), (10_000.0, 1.0)])
    assert (last.text, last.get("x"), last.get("style")) == ("10,000", "520.0", "text-anchor:end")
    assert all(node.get("style") is None for node in others)
    assert [node.text for node in x_labels([(0.0, 1.0), (3.0, 1.0)], whole_x=True)] == list("0123")


def test_a_chart_without_data_says_what_will_be_there() -> None:
    """No blank chart before the first run (C2)."""
    root = chart([Line("Dense", "#4b5563", [])])
    texts = [node.text for node in root.iter("text")]
    assert "nothing yet" in texts
    assert "step" in texts
    assert list(root.iter("polyline")) == []


def test_lines_are_drawn_to_scale_in_their_colours() -> None:
    root = chart(
        [
            Line("Dense", "#4b5563", [(0, 0), (1, 30), (2, 60)]),
            Line("BLR <b>", "#0072b2", [(0, 30)]),
        ]
    )
    first, second = root.iter("polyline")
    assert first.get("stroke") == "#4b5563"
    assert second.get("stroke") == "#0072b2"
    points = [tuple(map(float, p.split(","))) for p in str(first.get("points")).split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert 0 <= x0 < x2 <= WIDTH
    assert 0 <= y2 < y0 <= HEIGHT
    assert [g.get("data-name") for g in root.iter("g") if g.get("class") == "line"] == [
        "Dense",
        "BLR <b>",
    ]


def test_one_hiccup_does_not_flatten_the_chart() -> None:
    """A few slow steps are cut at the top edge, and the chart says so."""
    points = [(float(i), 5.0) for i in range(50)]
    points[20] = (20.0, 900.0)
    lines = [Line("Dense", "#4b5563", points)]
    markup = line_chart(lines, title="t", x_title="s", unit="ms", empty="", cut=4.0)
    texts = [node.text for node in ET.fromstring(markup).iter("text")]
    assert "1 above, up to 900 ms" in texts
    assert "20" in texts
    assert "900" not in texts
    assert "above" not in line_chart(lines, title="t", x_title="s", unit="ms", empty="")


def test_a_chart_has_one_structure_with_and_without_data() -> None:
    """The page patches nodes in place, so the same nodes must stand in the same places (C3)."""
    empty = chart([])
    full = chart([Line("Dense", "#4b5563", [(0, 1), (1, 2)])])
    assert [node.tag for node in empty] == [node.tag for node in full]


def test_a_long_run_keeps_its_nodes_and_its_size() -> None:
    """After ten thousand points the same nodes stand there, and the page gets no more (C3)."""

    def drawn(count: int) -> ET.Element:
        return chart([Line("Dense", "#4b5563", [(float(i), 5.0 + i % 7) for i in range(count)])])

    def nodes(root: ET.Element) -> list[tuple[str, str | None]]:
        # The labels of the axes come and go with the range.
        return [(n.tag, n.get("class")) for n in root.iter() if n.get("class") not in ("x", "y")]

    short = drawn(10)
    for count in (161, 1_000, 10_000):
        long = drawn(count)
        assert nodes(long) == nodes(short)
        (line,) = long.iter("polyline")
        assert len(str(line.get("points")).split()) <= MAX_POINTS
        assert len(ET.tostring(long)) < 5_000


def test_the_legend_names_lines_that_have_points() -> None:
    text = legend([Line("Dense", "#111111", [(0, 0)]), Line("Compiled", "#222222", [])])
    assert re.findall(r"</i>([^<]+)<", text) == ["Dense"]
