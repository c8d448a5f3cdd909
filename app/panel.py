"""The right side of a task's tab: verdict, cards, charts, table and downloads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr
from gradio.processing_utils import save_bytes_to_cache

from app import cards
from app.charts import Line, legend, line_chart
from app.conclusion import Conclusion, conclude
from app.engine import BACKENDS, GenerateJob
from app.live import LiveRun
from model_zoo.registry import ModelEntry

_WORDS = {"generate": "step", "classify": "forward"}
_IDLE = {
    "generate": (
        "<b>Ready to run.</b> Every ticked backend denoises the same noise; "
        "pictures, times and memory appear below as they come."
    ),
    "classify": (
        "<b>Ready to run.</b> Every ticked backend classifies the same picture many times over; "
        "classes, times and memory appear below as they come."
    ),
}


class Panel:
    """The components of one task's results, and how a run is drawn on them.

    `outputs` lists the components in the order of `idle`, `running` and `finished`.
    """

    def __init__(self, task: str, ticked: Sequence[str], placeholders: int, device: str) -> None:
        self.task = task
        self._memory_is = (
            "of the process, above its start" if device == "cpu" else "allocated on the GPU"
        )
        self._word = _WORDS[task]
        self._placeholders = placeholders
        self.verdict = gr.HTML(elem_id=f"{task}-verdict")
        self.columns: dict[str, gr.Column] = {}
        self.parts: list[gr.HTML] = []
        with gr.Row(elem_classes=["cards", task], elem_id=f"{task}-cards"):
            for info in BACKENDS:
                with (
                    gr.Column(
                        elem_classes=["card", f"card-{info.id}"],
                        visible=info.id in ticked,
                        min_width=0,
                    ) as column,
                    gr.Column(elem_classes=["card-parts"], min_width=0),
                ):
                    self.parts += [gr.HTML(), gr.HTML(), gr.HTML()]
                self.columns[info.id] = column
        with gr.Row(elem_classes=["charts"]):
            with gr.Column(elem_classes=["card"], min_width=0):
                self.latency = gr.HTML(elem_id=f"{task}-latency")
            with gr.Column(elem_classes=["card"], min_width=0):
                self.memory = gr.HTML(elem_id=f"{task}-memory")
        with gr.Column(elem_classes=["card", "summary-card"]):
            self.table = gr.HTML(elem_id=f"{task}-table")
            with gr.Row(elem_classes=["downloads"]):
                self.json_file = gr.DownloadButton(
                    "Download JSON", size="sm", interactive=False, scale=0, min_width=0
                )
                self.csv_file = gr.DownloadButton(
                    "Download CSV", size="sm", interactive=False, scale=0, min_width=0
                )
        self.outputs = [
            self.verdict, *self.parts, self.latency, self.memory, self.table,
            self.json_file, self.csv_file,
        ]  # fmt: skip
        # A value given when a component is made is drawn before any event (C2).
        for component, value in zip(self.outputs, self.idle(), strict=True):
            component.value = value

    # ---- what to draw

    def idle(self, sentence: str = "") -> list[Any]:
        """Every area before the first run (C2); `sentence` instead of "ready to run"."""
        first = cards.verdict(sentence or _IDLE[self.task])
        return [first, *self._areas(None, None), None, None]

    def reset(self, entry: ModelEntry) -> list[Any]:
        """Every area for a model that has not run yet."""
        sentence = ""
        if not entry.available():
            sentence = f"<b>The weights of {escape(entry.title)} are not here.</b> " + (
                "See how to get them on the left, or tick “untrained weights, for timing only”."
                if entry.untrained
                else "See on the left what is missing."
            )
        off = gr.DownloadButton(value=None, interactive=False)
        return [*self.idle(sentence)[:-2], off, off]

    def running(self, live: LiveRun, *, begins: bool = False) -> list[Any]:
        """Every area while a run goes on; as it `begins`, earlier files are taken away."""
        off = gr.DownloadButton(value=None, interactive=False) if begins else gr.skip()
        return [cards.progress_sentence(live), *self._areas(live, None), off, off]

    def finished(self, live: LiveRun) -> list[Any]:
        """Every area after a run that ended, was stopped or failed."""
        if live.error:
            sentence = cards.verdict(
                f"<b>The run ended early.</b> {escape(live.error)}", tone="bad"
            )
        elif live.stopped:
            view = next((v for v in live.views.values() if v.phase == "stopped" and v.step), None)
            where = (
                f" at {self._word} {view.step} of {view.total} of {escape(view.info.title)}"
                if view
                else ""
            )
            sentence = cards.verdict(f"<b>Stopped</b>{where}. The next run starts clean.")
        else:
            sentence = ""
        failures = [v.info.title for v in live.views.values() if v.phase == "failed"]
        if not live.reports():
            sentence = sentence or cards.verdict(
                f"<b>{escape(', '.join(failures))} did not finish.</b> The card says why.",
                tone="bad",
            )
            return [
                sentence, *self._areas(live, None),
                gr.DownloadButton(value=None, interactive=False),
                gr.DownloadButton(value=None, interactive=False),
            ]  # fmt: skip
        end = conclude(live)
        text = json.dumps(end.report, indent=2, allow_nan=False)
        if not sentence:
            missing = f" {escape(', '.join(failures))} did not finish." if failures else ""
            sentence = cards.verdict(escape(end.sentence) + missing, tone="done")
        return [
            sentence,
            *self._areas(live, end),
            self._file(text, "json", self.json_file),
            self._file(end.csv, "csv", self.csv_file),
        ]

    def _file(self, text: str, suffix: str, button: gr.DownloadButton) -> gr.DownloadButton:
        name = f"blr-lab-{self.task}.{suffix}"
        path = save_bytes_to_cache(text.encode(), name, button.GRADIO_CACHE)
        return gr.DownloadButton(value=path, interactive=True)

    def _areas(self, live: LiveRun | None, end: Conclusion | None) -> list[str]:
        drawn: list[str] = []
        done = live.reports() if live is not None else []
        slowest_ms = max((report["step_ms"]["median"] for report in done), default=0.0)
        for info in BACKENDS:
            view = live.views.get(info.id) if live is not None else None
            drawn.append(cards.head(info, view, self._word))
            if self.task == "generate":
                job = live.job if live is not None else None
                count = job.images if isinstance(job, GenerateJob) else self._placeholders
                drawn.append(cards.pictures(info, view, count))
            else:
                drawn.append(cards.bars(info, view))
            payback = end.payback.get(info.id, "") if end is not None else ""
            drawn.append(cards.figures(info, view, self._word, payback, slowest_ms))
        drawn.append(self._latency_chart(live))
        drawn.append(self._memory_chart(live))
        rows = end.rows if end is not None else []
        footnote = end.footnote if end is not None else ""
        titles = cards.meanings(done[0] if done else None, self._word)
        drawn.append(cards.table(rows, footnote, pictures=self.task == "generate", titles=titles))
        return drawn

    def _latency_chart(self, live: LiveRun | None) -> str:
        lines = live.latency_lines() if live is not None else []
        total = max((v.total for v in live.views.values()), default=0) if live is not None else 0
        svg = line_chart(
            lines,
            title=f"Latency per {self._word} in milliseconds, one line a backend",
            x_title=self._word,
            unit="ms",
            empty=f"One point a {self._word}, one line a backend",
            x_min=1.0,
            x_max=float(max(total, 2)),
            cut=4.0,
            whole_x=True,
        )
        return _chart(f"Latency per {self._word}, ms", lines, svg)

    def _memory_chart(self, live: LiveRun | None) -> str:
        lines = live.memory_lines() if live is not None else []
        svg = line_chart(
            lines,
            title="Memory in mebibytes over the run, one line a backend",
            x_title="seconds since Run",
            unit="MiB",
            empty="Memory of the running backend over time",
            x_min=0.0,
            x_max=1.0,
        )
        return _chart("Memory, MiB", lines, svg, self._memory_is)


def _chart(title: str, lines: Sequence[Line], svg: str, what: str = "") -> str:
    name = f'<span>{title}<span class="what">{what}</span></span>'
    return f'<h4 class="chart-head">{name}<span class="keys">{legend(lines)}</span></h4>{svg}'


def changed(values: Sequence[Any], sent: dict[int, str]) -> list[Any]:
    """`values` with those that the page already shows replaced by "leave it"."""
    out: list[Any] = []
    for index, value in enumerate(values):
        if isinstance(value, str) and sent.get(index) == value:
            out.append(gr.skip())
        else:
            if isinstance(value, str):
                sent[index] = value
            out.append(value)
    return out
