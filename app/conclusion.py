"""What a finished run comes to: its report, and how that reads on the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app import report as reports
from app.cards import DASH, Cell, table_cells
from app.engine import BackendInfo, backend_info
from app.live import LiveRun


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
                f"pays back after {after:,} {what}" if after is not None else "never pays back"
            )
    return Conclusion(
        report=report,
        sentence=report["verdict"],
        rows=rows,
        csv=reports.to_csv(report),
        payback=payback,
        footnote=footnote(done[0]),
    )


def footnote(result: dict[str, Any]) -> str:
    """What every number of the table was measured with."""
    shape = ", ".join(
        f"{name} {value if not isinstance(value, list) else '×'.join(map(str, value))}"
        for name, value in (result.get("shape") or {}).items()
    )
    versions = result.get("versions") or {}
    parts = [
        str(result.get("device_name") or result.get("device")),
        str(result.get("dtype")),
        shape,
        f"seed {result['seed']}" if result.get("seed") is not None else "",
        f"guidance {result['guidance']:g}" if result.get("guidance") is not None else "",
        f"torch {versions['torch']}" if versions.get("torch") else "",
        "memory in MiB",
        "untrained weights, for timing only" if result.get("untrained") else "",
    ]
    return " · ".join(part for part in parts if part)
