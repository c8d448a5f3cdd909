"""Line charts as SVG: drawn on the server, patched in place by the page.

`gr.HTML` compares old and new markup node by node, so a chart drawn here keeps its nodes while
only coordinates and texts change: no flicker, and tests can hold on to the very node. A native
`gr.LinePlot` that starts with an empty frame never draws its lines (seen on gradio 6.31).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

Point = tuple[float, float]

MAX_POINTS = 160
"""A line is never drawn with more points than this, however long the run."""

WIDTH, HEIGHT = 520, 156
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 17, 30
_DIGIT = 6.2  # width of one at the size of the labels
_PLOT_W, _PLOT_H = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM


@dataclass(frozen=True)
class Line:
    """One backend's points, in the order of x."""

    name: str
    colour: str
    points: Sequence[Point]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` of the points, keeping the lowest and highest of each stretch.

    A spike stays visible, and the first and last points stay where they are.
    """
    if limit < 4:
        raise ValueError(f"limit must be at least 4, got {limit}")
    if len(points) <= limit:
        return list(points)
    first, last, inner = points[0], points[-1], points[1:-1]
    buckets = (limit - 2) // 2
    kept: list[Point] = [first]
    for bucket in range(buckets):
        part = inner[bucket * len(inner) // buckets : (bucket + 1) * len(inner) // buckets]
        if not part:
            continue
        low = min(range(len(part)), key=lambda i: part[i][1])
        high = max(range(len(part)), key=lambda i: part[i][1])
        kept.extend(part[i] for i in sorted({low, high}))
    kept.append(last)
    return kept


def ticks(top: float, about: int = 3, *, whole: bool = False) -> list[float]:
    """Round values from 0 to at least `top`, `about` steps apart; `whole` ones for counts."""
    if not math.isfinite(top) or top <= 0:
        return [0.0, 1.0]
    raw = max(top / about, 1.0) if whole else top / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(
        m * unit
        for m in (1, 2, 2.5, 5, 10)
        if m * unit >= raw * (1 - 1e-9) and not (whole and m * unit % 1)
    )
    count = math.ceil(top / step - 1e-9)
    return [i * step for i in range(count + 1)]


def _number(value: float, step: float) -> str:
    # As many decimals as the step itself has: 0.25 has two, 2.5 has one.
    digits = next((d for d in range(7) if math.isclose(round(step, d), step)), 7)
    return f"{value:,.{digits}f}"


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_title: str,
    unit: str,
    empty: str,
    x_min: float = 0.0,
    x_max: float = 1.0,
    cut: float | None = None,
    whole_x: bool = False,
) -> str:
    """A chart as SVG markup.

    Args:
        lines: one a backend; those without points are left out.
        title: what a screen reader says.
        x_title: under the axis.
        unit: of y, shown when the pointer rests on the chart.
        empty: the sentence in the middle while there are no points.
        x_min: where the x axis starts.
        x_max: where it ends, at least; it grows with the data.
        cut: points above so many times the highest median are drawn at the top edge, and a note
            above it says how many and how high, so that one hiccup does not flatten the rest.
        whole_x: whether x counts something, so that only whole numbers label it.
    """
    drawn = [Line(line.name, line.colour, thin(line.points)) for line in lines if line.points]
    top = max((y for line in drawn for _, y in line.points), default=0.0)
    note = ""
    if cut is not None and drawn:
        limit = cut * max(median(y for _, y in line.points) for line in lines if line.points)
        if top > 1.5 * limit:
            above = sum(y > limit for line in lines for _, y in line.points)
            note = f"{above} above, up to {top:,.0f} {unit}"
            top = limit
    right = max([x_max, *(x for line in drawn for x, _ in line.points)])
    y_ticks = ticks(top) if drawn else [0.0, 1.0, 2.0, 3.0]
    x_all = ticks(right, 6, whole=whole_x) if drawn else []
    x_ticks = [t for t in x_all if x_min <= t <= right * (1 + 1e-9)]
    y_top = y_ticks[-1]

    def sx(x: float) -> float:
        return _LEFT + _PLOT_W * (x - x_min) / max(right - x_min, 1e-9)

    def sy(y: float) -> float:
        return _TOP + _PLOT_H * (1 - min(y / y_top, 1.0))

    grid, labels = [], []
    for value in y_ticks:
        grid.append(f"M{_LEFT} {sy(value):.1f}H{WIDTH - _RIGHT}")
        if drawn:
            text = _number(value, y_ticks[1])
            labels.append(
                f'<text x="{_LEFT - 8}" y="{sy(value) + 3.5:.1f}" class="y">{text}</text>'
            )
    for value in x_ticks:
        text = _number(value, x_all[1])
        x, style = sx(value), ""
        if x + _DIGIT * len(text) / 2 > WIDTH:  # the last one ends where the chart does
            x, style = WIDTH, ' style="text-anchor:end"'
        labels.append(f'<text x="{x:.1f}" y="{HEIGHT - 16}" class="x"{style}>{text}</text>')
    marks = "".join(
        f'<g class="line" data-name="{escape(line.name)}" data-points="{len(line.points)}">'
        f'<polyline points="{_path(line.points, sx, sy)}" stroke="{line.colour}"/>'
        f'<circle cx="{sx(line.points[-1][0]):.1f}" cy="{sy(line.points[-1][1]):.1f}" r="2.6" '
        f'fill="{line.colour}"/><title>{escape(_summary(line, unit))}</title></g>'
        for line in drawn
    )
    centre = _LEFT + _PLOT_W / 2
    middle = "" if drawn else escape(empty)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">'
        f'<path class="grid" d="{"".join(grid)}"/>'
        f'<text class="empty" x="{centre:.0f}" y="{_TOP + _PLOT_H / 2:.0f}">{middle}</text>'
        f'<text class="note" x="{WIDTH - _RIGHT}" y="{_TOP - 6}">{escape(note)}</text>'
        f'<text class="axis" x="{centre:.0f}" y="{HEIGHT - 2}">{escape(x_title)}</text>'
        f'<g class="labels">{"".join(labels)}</g><g class="lines">{marks}</g></svg>'
    )


def _path(
    points: Sequence[Point], sx: Callable[[float], float], sy: Callable[[float], float]
) -> str:
    return " ".join(f"{sx(x):.1f},{sy(y):.1f}" for x, y in points)


def _summary(line: Line, unit: str) -> str:
    values = sorted(y for _, y in line.points)
    return (
        f"{line.name}: last {line.points[-1][1]:,.3g} {unit}, "
        f"lowest {values[0]:,.3g}, highest {values[-1]:,.3g}"
    )


def legend(lines: Sequence[Line]) -> str:
    """The coloured names of the lines that have points."""
    return "".join(
        f'<span class="key"><i style="background:{line.colour}"></i>{escape(line.name)}</span>'
        for line in lines
        if line.points
    )
