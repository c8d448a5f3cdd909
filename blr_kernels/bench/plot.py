"""Draws a report as SVG: a roofline for each layer, and how fast ours is beside dense. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from blr_kernels.bench.cases import OPS, VISION_MODELS
from blr_kernels.bench.report import Ratios, Report, Row
from blr_kernels.roofline import H200_BF16, Device

TITLES = {"dense": "dense", "blast": "BLAST", "monarch": "Monarch", "low_rank": "low rank"}

SHOWN = ("dense", "dense_compiled", "cublas", "ref", "compiled", "int8", "auto")
"""What is drawn of a report unless asked for more."""

# Blue is ours, and the others that the app shows have its colours. Each has a mark of its own too,
# and a name beside it.
_LOOKS = {
    "auto": ("#0072b2", "circle"),
    "dense": ("var(--dense)", "square"),
    "dense_compiled": ("#c87604", "square-open"),
    "cublas": ("#8d6bb5", "up"),
    "int8": ("#0072b2", "square-open"),
    "eager": ("#009e73", "cross"),
    "compiled": ("#cc79a7", "down"),
    "ref": ("#d55e00", "diamond"),
}
_PATH_MARKS = ("circle-open", "up-open", "diamond-open", "down-open", "cross")
_SPEED_NAMES = {
    "ref": "the paper's kernels",
    "compiled": "torch.compile",
    "cublas": "low rank, cuBLAS",
    "int8": "ours, INT8",
    "auto": "ours",
}

_STYLE = (
    "<style>"
    "svg{--ink:#1b2430;--soft:#5c6773;--grid:#dde3e9;--roof:#1b2430;--page:#fff;--dense:#4b5563;"
    "font:11px system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--soft:#9aa6b2;--grid:#30363d;"
    "--roof:#e6edf3;--page:#0d1117;--dense:#9aa6b2}}"
    "text{fill:var(--ink)}.soft{fill:var(--soft)}.head{font-weight:600;font-size:12px}"
    ".end{text-anchor:end}.mid{text-anchor:middle}"
    ".grid{stroke:var(--grid);fill:none}.guide{stroke:var(--grid);stroke-dasharray:2 3}"
    ".roof{stroke:var(--roof);stroke-width:1.4;fill:none}.one{stroke:var(--ink)}"
    ".lead{stroke:var(--soft);stroke-width:.6;fill:none}"
    "</style>"
)


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(label)}">'
        f'{_STYLE}<rect width="{width:.0f}" height="{height:.0f}" fill="var(--page)"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(words)}</text>'


def _looks(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    paths = sorted({row.impl for row in rows} - set(_LOOKS))
    marks = zip(paths, itertools.cycle(_PATH_MARKS), strict=False)
    return {**_LOOKS, **{path: (_LOOKS["auto"][0], mark) for path, mark in marks}}


def _mark(x: float, y: float, look: tuple[str, str]) -> str:
    colour, shape = look
    shape, _, is_open = shape.partition("-")
    r = 3.6
    if shape == "circle":
        drawn = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}"'
    else:
        path = {
            "square": f"m-{r} -{r}h{2 * r}v{2 * r}h-{2 * r}z",
            "diamond": f"m0 -{r + 1}l{r + 1} {r + 1}l-{r + 1} {r + 1}l-{r + 1} -{r + 1}z",
            "up": f"m0 -{r + 1}l{r + 0.6} {2 * r}h-{2 * r + 1.2}z",
            "down": f"m0 {r + 1}l{r + 0.6} -{2 * r}h-{2 * r + 1.2}z",
            "cross": f"m-{r} -{r}l{2 * r} {2 * r}m0 -{2 * r}l-{2 * r} {2 * r}",
        }[shape]
        drawn = f'<path d="M{x:.1f} {y:.1f}{path}"'
    fill = "var(--page)" if is_open else colour
    return f'{drawn} fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'


@dataclass(frozen=True)
class _Log:
    """A logarithmic axis from ``low`` to ``high``, drawn from ``start`` to ``stop``."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten, with their doubles and halves where those alone would be few."""
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        digits = (1, 2, 5) if self.high < 40 * self.low else (1,)
        found = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        return [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]


def intensity(row: Row) -> float:
    """FLOPs per compulsory byte."""
    return (row.flops or 0) / (row.bytes or 1)


def achieved(row: Row) -> float | None:
    """TFLOP/s of a row; None if it was not timed."""
    return row.flops / row.median_us / 1e6 if row.flops and row.median_us else None


def _spread(wanted: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Positions in the order of ``wanted`` (ascending), ``gap`` apart, as near as that allows."""
    placed: list[float] = []
    for y in wanted:
        placed.append(max(y, placed[-1] + gap if placed else top))
    limit = bottom
    for i in range(len(placed) - 1, -1, -1):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return placed


_PANEL, _LABELS, _HEIGHT = 215, 92, 300
_TOP, _BOTTOM, _LEFT = 52, 40, 44


def roofline(
    rows: Sequence[Row], device: Device = H200_BF16, impls: Collection[str] = SHOWN
) -> str:
    """One layer: a panel for each op, achieved TFLOP/s over FLOPs per byte.

    All rows of one op at one number of tokens stand above each other, since both counts are those
    of the op; only INT8, which reads fewer bytes, stands to the right. A line joins the token
    counts of one implementation.

    Args:
        rows: those of one layer; the ones without a time are left out.
        device: whose roof is drawn.
        impls: what to draw.

    Raises:
        ValueError: if no row of them has a time.
    """
    timed = [row for row in rows if row.impl in impls and achieved(row)]
    if not timed:
        raise ValueError("no row has a time to draw")
    looks = _looks(timed)
    ops = [op for op in OPS if any(row.op == op for row in timed)]
    peak = device.flops_per_s / 1e12
    low_x = min(intensity(row) for row in timed) / 1.5
    high_x = max(max(intensity(row) for row in timed) * 1.5, low_x * 5)
    low_y = min(min(achieved(row) or peak for row in timed) / 2, peak / 10)
    bottom = _HEIGHT - _BOTTOM
    sy = _Log(low_y, peak * 2, bottom, _TOP)
    first = timed[0]
    size = f"{first.in_features:,} -> {first.out_features:,}"
    copies = f", {first.copies} layers with one input" if first.copies > 1 else ""
    title = f"{first.layer}: {size}{copies}"
    parts = [_text(_LEFT, 16, title, "head"), _text(4, _TOP - 22, "TFLOP/s", "soft")]
    for number, op in enumerate(ops):
        left = _LEFT + number * (_PANEL + _LABELS)
        own = [row for row in timed if row.op == op]
        sx = _Log(low_x, high_x, left, left + _PANEL)
        parts.append(_text(left, _TOP - 7, f"{TITLES[op]}  {_structure(own)}".rstrip()))
        parts += _grid(sx, sy, left, bottom, names=number == 0)
        parts += _roof(sx, sy, device)
        parts += _tokens(own, sx, bottom)
        parts += _lines(own, looks, sx, sy, left + _PANEL, bottom)
    width = _LEFT + len(ops) * (_PANEL + _LABELS)
    parts.append(_text(_LEFT, _HEIGHT - 6, "FLOPs per byte of compulsory traffic", "soft"))
    return _svg(width, _HEIGHT, f"Roofline of {title}", parts)


def _structure(rows: Sequence[Row]) -> str:
    """Blocks and rank alone: the op's name stands before."""
    words = rows[0].structure.split()
    return " ".join(word for word in words if word[0] in "br" and word[1:].isdigit())


def _grid(sx: _Log, sy: _Log, left: float, bottom: float, *, names: bool) -> list[str]:
    lines, words = [], []
    for value in sy.ticks():
        lines.append(f"M{left:.1f} {sy(value):.1f}h{_PANEL}")
        if names:
            words.append(_text(left - 6, sy(value) + 3.5, f"{value:,g}", "soft end"))
    for value in sx.ticks():
        lines.append(f"M{sx(value):.1f} {bottom}v4")
        words.append(_text(sx(value), bottom + 15, f"{value:,g}", "soft mid"))
    lines.append(f"M{left:.1f} {bottom}h{_PANEL}")
    return [f'<path class="grid" d="{"".join(lines)}"/>', *words]


def _roof(sx: _Log, sy: _Log, device: Device) -> list[str]:
    peak, slope = device.flops_per_s / 1e12, device.bytes_per_s / 1e12
    ridge = min(max(peak / slope, sx.low), sx.high)
    start = max(sx.low, sy.low / slope)
    points = [(x, min(peak, slope * x)) for x in (start, ridge, sx.high)]
    drawn = " ".join(f"{sx(x):.1f},{sy(y):.1f}" for x, y in points)
    return [f'<polyline class="roof" points="{drawn}"/>']


def _tokens(rows: Sequence[Row], sx: _Log, bottom: float) -> list[str]:
    """A guide line for each number of tokens; its name where the next one leaves room."""
    parts, free = [], math.inf
    for tokens, row in sorted({row.tokens: row for row in rows}.items(), reverse=True):
        x, words = sx(intensity(row)), f"{tokens:,}"
        parts.append(f'<path class="guide" d="M{x:.1f} {_TOP + 8}V{bottom}"/>')
        half = 3.2 * len(words)
        if x + half < free:
            parts.append(_text(x, _TOP + 6, words, "soft mid"))
            free = x - half - 2
    return parts


def _lines(
    rows: Sequence[Row],
    looks: dict[str, tuple[str, str]],
    sx: _Log,
    sy: _Log,
    right: float,
    bottom: float,
) -> list[str]:
    drawn: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.tokens):
        value = achieved(row)
        if value is not None:
            drawn.setdefault(row.impl, []).append((sx(intensity(row)), sy(value)))
    # The last one lies on top.
    names = sorted(drawn, key=lambda name: (name == "auto", drawn[name][-1][1]))
    by_height = sorted(drawn, key=lambda name: drawn[name][-1][1])
    places = _spread([drawn[name][-1][1] for name in by_height], 12.5, _TOP + 4, bottom)
    parts = []
    for name in names:
        colour, _ = looks[name]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn[name])
        marks = "".join(_mark(x, y, looks[name]) for x, y in drawn[name])
        (x, y), label = drawn[name][-1], places[by_height.index(name)]
        parts.append(
            f'<g data-impl="{escape(name)}">'
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>{marks}'
            f'<path class="lead" d="M{x + 6:.1f} {y:.1f}L{right + 2:.1f} {label:.1f}"/>'
            f"{_text(right + 5, label + 3.5, name)}</g>"
        )
    return parts


_NAME_W, _SPEED_W, _ROW_H = 215, 430, 17


def speed(
    report: Report, models: Sequence[str] = VISION_MODELS, impls: Collection[str] = SHOWN
) -> str:
    """How many times as fast as dense, each on its line: BLAST and Monarch, and low rank beside.

    Args:
        report: the run.
        models: whose layers to draw, by the first part of their names.
        impls: what to draw beside ours.

    Raises:
        ValueError: if there is nothing to compare.
    """
    ratios = Ratios(report.rows)
    groups: dict[str, dict[tuple[int, str], dict[str, float]]] = {}
    titles: dict[str, str] = {}
    low_rank: dict[tuple[str, int], float] = {}
    for row in report.rows:
        ratio = ratios.vs_dense(row)
        if ratio is None or row.layer.split(".")[0] not in models:
            continue
        if row.impl == "cublas":
            low_rank[row.layer, row.tokens] = ratio
        elif row.op in ("blast", "monarch") and row.impl in _SPEED_NAMES:
            key = (row.tokens, row.structure)
            groups.setdefault(row.layer, {}).setdefault(key, {})[row.impl] = ratio
            copies = f", {row.copies} layers" if row.copies > 1 else ""
            titles[row.layer] = f"{row.layer}: {row.in_features:,} -> {row.out_features:,}{copies}"
    lines: list[tuple[str, dict[str, float]]] = []
    for layer, found in groups.items():
        # By structure, in the order measured, and tokens within it.
        structures = list(dict.fromkeys(structure for _, structure in found))
        own = sorted(found, key=lambda key: (structures.index(key[1]), key[0]))
        kept = [key for key in own if "auto" in found[key]]
        lines += [(titles[layer], {})] if kept else []
        for tokens, structure in kept:
            marks = dict(found[tokens, structure])
            if (layer, tokens) in low_rank:
                marks["cublas"] = low_rank[layer, tokens]
            marks = {name: value for name, value in marks.items() if name in {*impls, "auto"}}
            lines.append((f"{structure}, {tokens:,}", marks))
    if not lines:
        raise ValueError(f"no layer of {', '.join(models)} was timed beside dense")
    every = [value for _, marks in lines for value in marks.values()]
    scale = _Log(min(0.5, *every) / 1.1, max(2, *every) * 1.1, _NAME_W, _NAME_W + _SPEED_W)
    shown = [name for name in _SPEED_NAMES if any(name in marks for _, marks in lines)]
    top, bottom = 74, 74 + _ROW_H * len(lines)
    right = _NAME_W + _SPEED_W + 44
    parts = [_text(8, 18, f"Times as fast as the dense layer, {report.device}", "head")]
    x = 14.0
    for name in reversed(shown):
        parts += [_mark(x, 35, _LOOKS[name]), _text(x + 10, 39, _SPEED_NAMES[name], "soft")]
        x += 32 + 6.2 * len(_SPEED_NAMES[name])
    parts.append(_text(8, top - 10, "structure, tokens", "soft"))
    parts.append(_text(right - 8, top - 10, "ours", "soft end"))
    for value in scale.ticks():
        kind, word = ("one", "dense") if value == 1 else ("grid", f"{value:g}")
        parts.append(f'<path class="{kind}" d="M{scale(value):.1f} {top - 4}V{bottom}"/>')
        parts.append(_text(scale(value), top - 10, word, "soft mid"))
    for number, (name, marks) in enumerate(lines):
        y = top + _ROW_H * (number + 0.5)
        if not marks:
            parts.append(_text(8, y + 4, name, "head"))
            continue
        ours = marks["auto"]
        parts.append(_text(_NAME_W - 8, y + 4, name, "end"))
        parts.append(_text(right - 8, y + 4, f"{ours:.2f}", "end"))
        parts.append(
            f'<path d="M{scale(1):.1f} {y:.1f}H{scale(ours):.1f}" '
            f'stroke="{_LOOKS["auto"][0]}" stroke-width="2.5"/>'
        )
        for impl in (impl for impl in shown if impl in marks):
            mark = _mark(scale(marks[impl]), y, _LOOKS[impl])
            parts.append(f'<g data-impl="{impl}" data-x="{scale(marks[impl]):.1f}">{mark}</g>')
    return _svg(right, bottom + 8, "Times as fast as the dense layer", parts)


def write_plots(report: Report, folder: Path, impls: Collection[str] = SHOWN) -> list[Path]:
    """Writes ``roofline-LAYER.svg`` for each layer, ``speed-vision.svg`` and ``speed-text.svg``.

    What has no times is left out.

    Args:
        report: the run.
        folder: made if need be.
        impls: what to draw.

    Returns:
        The files that were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, str] = {}
    for layer in dict.fromkeys(row.layer for row in report.rows):
        own = [row for row in report.rows if row.layer == layer]
        if any(row.impl in impls and achieved(row) for row in own):
            drawings[f"roofline-{layer}"] = roofline(own, impls=impls)
    models = list(dict.fromkeys(row.layer.split(".")[0] for row in report.rows))
    for name, group in (
        ("speed-vision", [model for model in models if model in VISION_MODELS]),
        ("speed-text", [model for model in models if model not in VISION_MODELS]),
    ):
        try:
            drawings[name] = speed(report, group, impls)
        except ValueError:
            continue
    written = []
    for name, drawing in drawings.items():
        path = folder / f"{name}.svg"
        path.write_text(drawing, encoding="utf-8")
        written.append(path)
    return written
