"""What a finished run comes to: its report, and how that reads on the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app import report as reports
from app.cards import DASH, Cell, table_cells
from app.engine import BackendInfo, GenerateJob, Job, backend_info
from app.live import LiveRun
from model_zoo.registry import get_model

MAX_NAME = 40
"""Characters of a model's or a class's name under the table."""

_TIMES = re.compile(r"(?<=\d)x\b")


@dataclass(frozen=True)
class Conclusion:
    """Everything that is drawn once a run has ended; `payback` is in words, by backend."""

    report: dict[str, Any]
    sentence: str
    rows: list[tuple[BackendInfo, list[Cell]]]
    csv: str
    payback: dict[str, str]
    footnote: str


def conclude(live: LiveRun) -> Conclusion:
    """The report of a run and its parts.

    Raises:
        ValueError: when no backend has finished.
    """
    done = live.reports()
    if not done:
        raise ValueError("no backend has finished, there is nothing to report")
    report = reports.build(
        done,
        images={
            key: view.images for key, view in live.views.items() if view.report and view.images
        },
        failures={key: view.message for key, view in live.views.items() if view.message},
    )
    rows, payback = [], {}
    what = "images" if report["backends"][0]["task"] == "generate" else "forwards"
    for result in report["backends"]:
        key = result["backend"]
        ratios = report["ratios"].get(key, {})
        if key == "dense" or not ratios.get("picture"):
            picture = DASH
        else:
            picture = reports.picture_words(ratios["picture"])
        cells = table_cells(result, ratios.get("speedup"), picture, live.views[key].phases)
        rows.append((backend_info(key), cells))
        after = ratios.get("compile_pays_after")
        if result.get("compile_s") and ratios:
            payback[key] = (
                f"pays back after {after:,} {what}" if after is not None else "no payback seen"
            )
    return Conclusion(
        report=report,
        sentence=_TIMES.sub("×", report["verdict"]),
        rows=rows,
        csv=reports.to_csv(report),
        payback=payback,
        footnote=footnote(live.job, done),
    )


def footnote(job: Job, done: Sequence[dict[str, Any]]) -> str:
    """What every number of the table was measured with; two runs can be told apart by it."""
    result = done[0]
    entry = get_model(job.model)
    shape = ", ".join(
        f"{name} {value if not isinstance(value, list) else '×'.join(map(str, value))}"
        for name, value in (result.get("shape") or {}).items()
    )
    versions = result.get("versions") or {}
    structure = next((r["structure"] for r in done if r.get("structure")), "")
    picture = ""
    if isinstance(job, GenerateJob):
        picture = f"class {_short(entry.labels().get(job.class_id, str(job.class_id)))}"
    parts = [
        _short(entry.title),
        compact_structure(structure),
        picture,
        f"{result['steps']} {'steps' if picture else 'forwards'}",
        f"seed {result['seed']}" if result.get("seed") is not None else "",
        f"guidance {result['guidance']:g}" if result.get("guidance") is not None else "",
        shape,
        str(result.get("device_name") or result.get("device")),
        str(result.get("dtype")),
        f"torch {versions['torch']}" if versions.get("torch") else "",
        "memory in MiB",
        "untrained weights, for timing only" if result.get("untrained") else "",
    ]
    return " · ".join(part for part in parts if part)


def compact_structure(structure: str) -> str:
    """A report's structures with their ranks as a range.

    "BLAST b3 r34 (6 layers), BLAST b3 r61 (2 layers)" becomes "BLAST b3 r34–61".
    """
    ranks: dict[str, list[int]] = {}
    for name in structure.split(", "):
        found = re.match(r"(.+) r(\d+)\b", name)
        if found is None:
            return structure
        ranks.setdefault(found[1], []).append(int(found[2]))
    return ", ".join(
        f"{name} r{min(all_of)}" + (f"–{max(all_of)}" if max(all_of) > min(all_of) else "")
        for name, all_of in ranks.items()
    )


def _short(text: str) -> str:
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…"
