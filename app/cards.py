"""The results as HTML: the verdict, one card a backend, and the summary table."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from app.engine import BackendInfo, GenerateJob, Job
from app.live import BackendView, LiveRun

DASH = "–"


def duration(seconds: float | None) -> str:
    """Seconds for a person: "0.42 s", "12 s", "3 min 20 s"."""
    if seconds is None:
        return DASH
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def milliseconds(value: float | None) -> str:
    """Three significant digits, at most two decimals: "5.92 ms", "85.1 ms", "1,230 ms"."""
    if value is None:
        return DASH
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def spread(low: float, high: float, unit: bool = True) -> str:
    """A range of milliseconds, both ends with as many decimals as the larger: "36.7–45.5 ms"."""
    digits = 2 if high < 10 else 1 if high < 100 else 0
    return f"{low:,.{digits}f}–{high:,.{digits}f}" + (" ms" if unit else "")


def mebibytes(value: float | None, unit: bool = True) -> str:
    """A size in MiB: "57.3 MiB"; a dash for none."""
    if value is None:
        return DASH
    digits = 1 if value < 100 else 0
    return f"{value:,.{digits}f}" + (" MiB" if unit else "")


def parameter_count(value: int | None) -> str:
    """A count of parameters: "675 M", "2.98 M", "512 k"."""
    if value is None:
        return DASH
    if value >= 1e6:
        return f"{value / 1e6:.3g} M" if value < 1e9 else f"{value / 1e9:.3g} B"
    return f"{value / 1e3:.3g} k"


def rate(value: float | None) -> str:
    """Images per second, to three digits; a dash for none."""
    return DASH if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    """A quotient: "0.55×"; a dash for none."""
    return DASH if value is None else f"{value:.2f}×"


def _title(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def data_uri(png: bytes) -> str:
    """A PNG, byte for byte, as the source of an image (C4)."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


# ---- verdict


def verdict(text: str, *, tone: str = "calm") -> str:
    """The sentence above the cards; `tone` is calm, busy, done or bad."""
    return f'<p class="verdict {tone}" role="status">{text}</p>'


def progress_sentence(live: LiveRun) -> str:
    """What the run is doing, in words."""
    if live.position:
        ahead = "1 run is" if live.position == 1 else f"{live.position} runs are"
        return verdict(
            f"<b>Waiting for the device.</b> {ahead} ahead of yours; it starts by itself.",
            tone="busy",
        )
    view = live.current
    if view is None:
        return verdict("<b>Starting.</b>", tone="busy")
    done = sum(v.ended for v in live.views.values())
    place = f"backend {done + 1} of {len(live.views)}"
    doing = {
        "loading": "loads its weights",
        "compiling": f"compiles, usually about {duration(view.expected_s)}",
        "warming": "warms up",
        "decoding": "decodes the pictures",
    }.get(view.phase, f"is at {_step_word(live.job)} {view.step} of {view.total}")
    return verdict(f"<b>{escape(view.info.title)} {doing}</b> ({place}).", tone="busy")


# ---- what the figures are, shown when the pointer rests on them

_MEMORY_IS = {
    "weights": "bytes of the compared model's parameters and buffers",
    "peak": "the most memory that the model needs at once, known after the run",
    "process": "memory of the backend's process above its start",
}


def meanings(report: dict[str, Any] | None, word: str) -> dict[str, str]:
    """What each figure is, in words; of memory, as the report has it where there is one."""
    memory = _MEMORY_IS | ((report or {}).get("memory_labels") or {})
    return {
        "load": "reading the weights, without starting Python",
        "compile": f"torch.compile, before the first timed {word}",
        "warm-up": f"{word}s that are not timed, after loading",
        "median": f"half of the {word}s took less",
        "p10–p90": f"a tenth of the {word}s took less than the first, a tenth more than the second",
        "weights": memory["weights"],
        "peak": memory["peak"],
        "process": memory["process"],
    }


# ---- cards


def _step_word(job: Job) -> str:
    return "step" if isinstance(job, GenerateJob) else "forward"


def head(info: BackendInfo, view: BackendView | None, word: str) -> str:
    """Dot, title and what it is doing."""
    note = ""
    if view is not None:
        note = {
            "waiting": "waiting",
            "loading": f"loading, {view.elapsed:.0f} s",
            "compiling": f"compiling, {view.elapsed:.0f} of about {view.expected_s:.0f} s",
            "warming": "warming up",
            "running": f"{word} {view.step} of {view.total}" if view.total else "starting",
            "decoding": "decoding",
            "done": "",
            "failed": "did not finish",
            "stopped": f"stopped at {word} {view.step} of {view.total}"
            if view.step
            else "stopped before it began",
        }[view.phase]
        if view.report is not None and view.report.get("untrained"):
            note = "untrained weights"
    phase = view.phase if view is not None else "idle"
    return (
        f'<h3 class="card-head" data-backend="{info.id}" data-phase="{phase}">'
        f'<i class="dot" style="background:{info.colour}"></i>{escape(info.title)}'
        f'<span class="note">{escape(note)}</span></h3>'
    )


def pictures(info: BackendInfo, view: BackendView | None, count: int) -> str:
    """The pictures side by side, or their empty frames."""
    images = view.images if view is not None else None
    if view is not None and view.message:
        return f'<p class="failure">{escape(view.message)}</p>'
    frames = []
    for index in range(len(images) if images else count):
        if images:
            state = "final" if view is not None and view.report is not None else "preview"
            inner = (
                f'<img class="{state}" src="{data_uri(images[index])}" '
                f'alt="{escape(info.title)}, picture {index + 1}">'
            )
        else:
            inner = ""
        frames.append(f'<div class="frame">{inner}</div>')
    return f'<div class="pictures n{min(len(frames), 4)}">{"".join(frames)}</div>'


def bars(info: BackendInfo, view: BackendView | None, count: int = 5) -> str:
    """The most probable classes as bars, or their empty rows."""
    if view is not None and view.message:
        return f'<p class="failure">{escape(view.message)}</p>'
    top = view.top if view is not None else None
    rows = []
    for index in range(len(top) if top else count):
        if top:
            class_id, label, share = top[index]
            name, text = f'{escape(label)} <span class="id">{class_id}</span>', f"{share:.1%}"
        else:
            name, text, share = "", DASH, 0.0
        rows.append(
            f'<li><span class="label">{name}</span><span class="share">{text}</span>'
            f'<span class="track"><i style="width:{100 * share:.1f}%;background:{info.colour}">'
            "</i></span></li>"
        )
    return f'<ol class="bars">{"".join(rows)}</ol>'


def figures(
    info: BackendInfo,
    view: BackendView | None,
    word: str,
    pays_back: str = "",
    slowest_ms: float = 0.0,
) -> str:
    """The large number, a bar and the details under it.

    The bar tells the progress while the backend runs, then its median as a share of
    `slowest_ms`, the slowest backend's of this run.
    """
    report = view.report if view is not None else None
    if report is not None:
        step = report["step_ms"]
        memory = report["memory_mib"]
        number, note = milliseconds(step["median"]), f"per {word}, median"
        rows = [
            ("p10–p90", spread(step["p10"], step["p90"])),
            ("weights", mebibytes(memory.get("weights"))),
            ("peak", mebibytes(memory.get("peak"))),
            ("parameters", parameter_count(report.get("parameters"))),
        ]
        compile_s = report.get("compile_s") or 0.0
        if compile_s > 0:
            rows.append(("compile", duration(compile_s) + (f", {pays_back}" if pays_back else "")))
        share = step["median"] / max(slowest_ms, step["median"])
        bar = "the median, as a share of the slowest backend's"
    else:
        recent = sorted(y for _, y in view.latency) if view is not None else []
        number = milliseconds(recent[len(recent) // 2]) if recent else DASH
        note = f"per {word}, median" + (" so far" if recent else "")
        ready = view.ready if view is not None else None
        rows = [
            ("p10–p90", DASH),
            ("weights", mebibytes(ready.weights_bytes / 2**20 if ready else None)),
            ("peak", DASH),  # the chart shows the process meanwhile, which is another quantity
            ("parameters", parameter_count(ready.parameters if ready else None)),
        ]
        share = view.step / view.total if view is not None and view.total else 0.0
        bar = f"{word}s done"
    titles = meanings(report, word)
    details = "".join(
        f"<dt{_title(titles.get(name, ''))}>{name}</dt>"
        f"<dd{_title(titles.get(name, ''))}>{escape(text)}</dd>"
        for name, text in rows
    )
    return (
        f'<p class="big"><b>{number}</b> <span>{note}</span></p>'
        f'<div class="progress"{_title(bar)}>'
        f'<i style="width:{100 * share:.1f}%;background:{info.colour}"></i>'
        f'</div><dl class="details">{details}</dl>'
    )


# ---- table

COLUMNS = (
    "backend", "load", "compile", "warm-up", "median", "p10–p90", "images/s",
    "weights", "peak", "process", "vs Dense", "picture vs Dense",
)  # fmt: skip


EMPTY_FOOTNOTE = "Memory in MiB. Model, settings, device and versions stand here after a run."


Cell = tuple[str, str]
"""A text and what is shown when the pointer rests on it, or ""."""


def table(
    rows: Sequence[tuple[BackendInfo, Sequence[Cell]]],
    footnote: str = "",
    pictures: bool = True,
    titles: Mapping[str, str] | None = None,
) -> str:
    """The summary: one row a backend, cells in the order of `COLUMNS` after the first.

    Without `pictures` the last column, how they differ, is left out. `titles` says by column
    what it holds.
    """
    columns = COLUMNS if pictures else COLUMNS[:-1]
    titles = titles or {}
    cells = "".join(
        f'<th scope="col"{_title(titles.get(name, ""))}>{name}</th>' for name in columns
    )
    body = "".join(
        f'<tr data-backend="{info.id}"><th scope="row">'
        f'<i class="dot" style="background:{info.colour}"></i>{escape(info.title)}</th>'
        + "".join(
            f"<td{_title(title)}>{escape(text)}</td>" for text, title in row[: len(columns) - 1]
        )
        + "</tr>"
        for info, row in rows
    )
    if not rows:
        body = (
            f'<tr class="blank"><td colspan="{len(columns)}">'
            "Load, compile and run times of each backend appear here.</td></tr>"
        )
    note = f'<p class="footnote"{_title(footnote)}>{escape(footnote or EMPTY_FOOTNOTE)}</p>'
    return (
        f'<div class="summary"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{note}"
    )


def table_cells(
    report: dict[str, Any], speed: float | None, picture: str, phases: Collection[str]
) -> list[Cell]:
    """The cells of one backend's row, in the order of `COLUMNS` after the first.

    `phases` are those of this run: what a warm worker had done before is marked so.
    """
    step, memory = report["step_ms"], report["memory_mib"]
    compile_s = report.get("compile_s") or 0.0
    before = "done before this run, which found the backend warm"
    return [
        (duration(report.get("load_s")), "" if "loading" in phases else before),
        (
            duration(compile_s) if compile_s else DASH,
            before if compile_s and "compiling" not in phases else "",
        ),
        (duration(report.get("warmup_s")), "" if "warming" in phases else before),
        (milliseconds(step["median"]), ""),
        (spread(step["p10"], step["p90"], unit=False), ""),
        (rate(report.get("images_per_s")), ""),
        (mebibytes(memory.get("weights"), False), ""),
        (mebibytes(memory.get("peak"), False), ""),
        (mebibytes(memory.get("process"), False), ""),
        (ratio(speed), ""),
        (picture, ""),
    ]
