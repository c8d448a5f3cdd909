"""One report of a comparison: JSON, a verdict in words, table rows, CSV. Imports no torch.

Units never vary: times are milliseconds (`*_ms`) or seconds (`*_s`), memory is MiB
(2**20 bytes). Ratios are computed in one way, by `speedup` and `memory_ratio`: above 1, a
speed-up means faster than dense; below 1, a memory ratio means less than dense.

What runs under `torch.compile` would beat eager dense by that alone. So the words compare a
compiled backend with the compiled original, its like, wherever that ran too, and say so where it
did not.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from app.engine.jobs import BACKENDS, backend_info

SCHEMA = "blr-lab/report"
VERSION = 1
BASE = "dense"
COMPILED_BASE = "compiled"

_SAME = 1.02
"""Up to this ratio two medians are called equal."""
_FEW = 10
"""With fewer timed steps than these, the words say so."""

Report = dict[str, Any]


def speedup(dense: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Dense median time over the other's: 2.0 is twice as fast, 0.5 half as fast."""
    return dense["step_ms"]["median"] / other["step_ms"]["median"]


def memory_ratio(dense: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float | None:
    """The other's memory over dense's: 0.5 is half of it. `None` where either is not known."""
    base, value = dense["memory_mib"].get(key), other["memory_mib"].get(key)
    if base is None or value is None or base <= 0:
        return None
    return value / base


def build(
    results: Sequence[Mapping[str, Any]],
    images: Mapping[str, Sequence[bytes]] | None = None,
    failures: Mapping[str, str] | None = None,
) -> Report:
    """Put the reports of one run's backends together.

    Args:
        results: the `report` of each `Result` event, of one job.
        images: the PNGs of each backend, from which differences to dense are computed; those of
            untrained weights mean nothing and are left out.
        failures: why a backend gave no result, by backend.

    Returns:
        A dict that `json.dumps` takes as it is. `backends` holds the results; `ratios` has for
        each backend `speedup`, `memory_weights`, `memory_peak`, `memory_process`,
        `compile_pays_after` and, where there are pictures, `picture`, all against dense; and
        `like`, the backend that differs in the layers alone, with `speedup_like` against it.
        `verdict` says it in words.

    Raises:
        ValueError: if the results belong to different jobs or a backend comes twice.
    """
    by_backend = {str(result["backend"]): result for result in results}
    if len(by_backend) != len(results):
        raise ValueError("each backend can have one result in a report")
    for key in ("task", "model", "device", "steps", "seed", "guidance", "dtype", "untrained"):
        values = {str(result[key]) for result in results}
        if len(values) > 1:
            raise ValueError(f"results of one report must share {key}, got {sorted(values)}")
    order = [info.id for info in BACKENDS if info.id in by_backend]
    dense = by_backend.get(BASE)
    report: Report = {
        "schema": SCHEMA,
        "version": VERSION,
        "units": {"time": "s or ms as named", "memory": "MiB"},
        "base": BASE if dense is not None else None,
        "untrained": any(result["untrained"] for result in results),
        "backends": [dict(by_backend[backend]) for backend in order],
        "ratios": {},
        "failures": dict(failures or {}),
    }
    if dense is not None:
        for backend in order:
            like = by_backend.get(like_of(by_backend[backend]))
            report["ratios"][backend] = _ratios(dense, like, by_backend[backend])
            pictures = {} if report["untrained"] else images or {}
            if pictures.get(BASE) and pictures.get(backend):
                difference = picture_difference(pictures[BASE], pictures[backend])
                report["ratios"][backend]["picture"] = difference
    report["verdict"] = verdict(report)
    return report


def like_of(result: Mapping[str, Any]) -> str:
    """The backend that runs the original model in the same way: eager, or compiled."""
    if result["backend"] == COMPILED_BASE:
        return BASE
    return COMPILED_BASE if result["compile_s"] else BASE


def _ratios(
    dense: Mapping[str, Any], like: Mapping[str, Any] | None, other: Mapping[str, Any]
) -> dict[str, Any]:
    ratios: dict[str, Any] = {
        "speedup": speedup(dense, other),
        "like": like["backend"] if like else None,
        "speedup_like": speedup(like, other) if like else None,
    }
    for key in ("weights", "peak", "process"):
        ratios[f"memory_{key}"] = memory_ratio(dense, other, key)
    ratios["compile_pays_after"] = pays_after(dense, other)
    return ratios


def pays_after(dense: Mapping[str, Any], other: Mapping[str, Any]) -> int | None:
    """After how many images (or forwards) compiling has paid back, against dense.

    Two digits, rounded up: the times do not hold more. `None` where nothing was compiled, or where
    it is not clearly faster.
    """
    if not other["compile_s"] or speedup(dense, other) <= _SAME or _overlap(dense, other):
        return None
    # One image needs `steps` denoising steps, one forward is a step.
    steps = other["steps"] if other["task"] == "generate" else 1
    per_run = (dense["step_ms"]["median"] - other["step_ms"]["median"]) / 1e3 * steps
    pictures = other["shape"].get("images", 1) if other["task"] == "generate" else 1
    after = math.ceil(other["compile_s"] / per_run) * pictures
    unit_of_two_digits = 10 ** max(0, len(str(after)) - 2)
    return math.ceil(after / unit_of_two_digits) * unit_of_two_digits


def _overlap(base: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether neither is faster in at least three of four pairs of their timed steps."""
    ours, theirs = base["step_ms"]["all"], other["step_ms"]["all"]
    won = sum((a < b) + 0.5 * (a == b) for a in ours for b in theirs)
    return 0.25 < won / (len(ours) * len(theirs)) < 0.75


def picture_difference(dense: Sequence[bytes], other: Sequence[bytes]) -> dict[str, Any]:
    """How far pictures are from dense's, from the 8-bit values of the PNGs.

    Returns:
        `identical`; `max`, the largest difference of a value, 0 to 255; `psnr_db`, `None` for
        identical pictures, whose PSNR is infinite.

    Raises:
        ValueError: if there are not as many pictures, or they have another size.
    """
    import numpy as np
    from PIL import Image

    if len(dense) != len(other):
        raise ValueError(f"expected {len(dense)} pictures to compare, got {len(other)}")
    squares, count, largest = 0.0, 0, 0
    for ours, theirs in zip(dense, other, strict=True):
        a, b = (
            np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.int32)
            for data in (ours, theirs)
        )
        if a.shape != b.shape:
            raise ValueError(f"pictures to compare must have one size, got {a.shape}, {b.shape}")
        delta = np.abs(a - b)
        squares += float((delta.astype(np.float64) ** 2).sum())
        count += delta.size
        largest = max(largest, int(delta.max(initial=0)))
    psnr = 10 * math.log10(255**2 * count / squares) if squares else None
    return {"identical": largest == 0, "max": largest, "psnr_db": psnr}


def verdict(report: Mapping[str, Any]) -> str:
    """What came out, in words: one sentence a backend, against dense."""
    by_backend = {result["backend"]: result for result in report["backends"]}
    if not by_backend:
        return "Nothing was measured."
    sentences = []
    if report["base"] is None:
        sentences.append("Dense did not run, so nothing is compared with it.")
    for backend, ratios in report["ratios"].items():
        if backend != BASE:
            base = by_backend[ratios["like"] or BASE]
            sentences.append(_sentence(by_backend[backend], base, ratios))
    if report["base"] is not None and len(by_backend) == 1:
        title = backend_info(BASE).title
        sentences.append(
            f"{title} takes {_ms(by_backend[BASE]['step_ms']['median'])} a "
            f"{unit(by_backend[BASE])}; tick another backend to compare."
        )
    if report["untrained"]:
        sentences.append("The weights are untrained: only times and memory mean anything.")
    elif answers := _answers(report["backends"]):
        sentences.append(answers)
    return " ".join(sentences)


def unit(result: Mapping[str, Any]) -> str:
    """What one timed thing is called."""
    return "step" if result["task"] == "generate" else "forward"


def speed_words(ratio: float) -> str:
    """A speed-up in words: "1.2x slower than", "as fast as"."""
    if 2 - _SAME <= ratio <= _SAME:
        return "as fast as"
    if ratio > 1:
        return f"{ratio:.2f}x faster than"
    return f"{1 / ratio:.2f}x slower than"


def _comparison(result: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Faster or slower than `base`, and no surer than the times allow."""
    words, title = speed_words(speedup(base, result)), backend_info(base["backend"]).title
    count = min(base["step_ms"]["n"], result["step_ms"]["n"])
    if words == "as fast as":
        return f"as fast as {title} here"
    if count < _FEW:
        plural = "s" if count != 1 else ""
        return f"{words} {title} here (from only {count} {unit(result)}{plural})"
    if _overlap(base, result):
        median = words.removesuffix(" than")
        return f"about as fast as {title} here (median {median}, but the times overlap)"
    return f"{words} {title} here"


def _sentence(result: Mapping[str, Any], base: Mapping[str, Any], ratios: Mapping[str, Any]) -> str:
    """`base` is the result's like where that ran, else dense."""
    text = f"{backend_info(result['backend']).title} is {_comparison(result, base)}"
    weights = ratios["memory_weights"]
    if weights is not None and abs(weights - 1) >= 0.005:
        text += f" and stores {weights:.2f}x the weights"
    if ratios["like"] is None:
        compiled = backend_info(COMPILED_BASE).title
        text += f" (it is compiled, Dense is not: tick {compiled} to compare like with like)"
    if result["compile_s"]:
        text += f"; its {result['compile_s']:.0f} s of compiling {_payback(result, base, ratios)}"
    return text + "."


def _payback(result: Mapping[str, Any], base: Mapping[str, Any], ratios: Mapping[str, Any]) -> str:
    what = "images" if result["task"] == "generate" else "forwards"
    against = "" if base["backend"] == BASE else " against Dense"
    after = ratios["compile_pays_after"]
    if after is not None:
        return f"pay back{against} after {after:,} {what}"
    if ratios["speedup"] < 2 - _SAME:
        return f"never pay back{against}"
    return f"gain too little{against} to pay back"


def _answers(results: Sequence[Mapping[str, Any]]) -> str:
    """Whether the backends of a classification name the same class first; "" for pictures."""
    named = {
        backend_info(result["backend"]).title: result["top"][0][1]
        for result in results
        if result.get("top")
    }
    if len(named) < 2:
        return ""
    if len(set(named.values())) == 1:
        return f"All name the same class first: {next(iter(named.values()))}."
    return "They differ: " + ", ".join(f"{who} names {what}" for who, what in named.items()) + "."


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


SUMMARY_COLUMNS = (
    "Backend",
    "Load s",
    "Compile s",
    "Warm-up s",
    "Median ms",
    "p10 ms",
    "p90 ms",
    "Images/s",
    "Weights MiB",
    "Peak MiB",
    "Process MiB",
    "Speed vs dense",
    "Picture vs dense",
)


def summary_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The summary table, one row a backend under `SUMMARY_COLUMNS`, all as text."""
    rows = []
    for result in report["backends"]:
        ratios = report["ratios"].get(result["backend"], {})
        step, memory = result["step_ms"], result["memory_mib"]
        rows.append(
            [
                backend_info(result["backend"]).title,
                _number(result["load_s"], 1),
                _number(result["compile_s"], 1),
                _number(result["warmup_s"], 1),
                _number(step["median"], 2),
                _number(step["p10"], 2),
                _number(step["p90"], 2),
                _number(result["images_per_s"], 2),
                _number(memory.get("weights"), 1),
                _number(memory.get("peak"), 1),
                _number(memory.get("process"), 0),
                f"{ratios['speedup']:.2f}x" if ratios else "",
                picture_words(ratios.get("picture")),
            ]
        )
    return rows


def picture_words(difference: Mapping[str, Any] | None) -> str:
    """A picture difference in words: "identical", "31.4 dB PSNR"; nothing for none."""
    if difference is None:
        return ""
    return "identical" if difference["identical"] else f"{difference['psnr_db']:.1f} dB PSNR"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def to_csv(report: Mapping[str, Any]) -> str:
    """Every timed step as CSV: backend, index, milliseconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["backend", "index", "ms"])
    for result in report["backends"]:
        for index, ms in enumerate(result["step_ms"]["all"], 1):
            writer.writerow([result["backend"], index, f"{ms:.6f}"])
    return out.getvalue()
