"""The report: units and ratios on known numbers, words that agree with them."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app import report as reports


def result(backend: str, median: float, weights: float, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "backend": backend,
        "task": "generate",
        "model": "demo-dit",
        "variant": "blast" if backend.startswith("blr") else None,
        "device": "cpu",
        "dtype": "float32",
        "shape": {"images": 1, "batch": 2, "tokens": 256},
        "steps": 25,
        "seed": 0,
        "guidance": 4.0,
        "load_s": 1.0,
        "compile_s": 0.0,
        "warmup_s": 0.5,
        "step_ms": {"median": median, "p10": median, "p90": median, "n": 25, "all": [median] * 25},
        "decode_ms": 30.0,
        "images_per_s": 1.0,
        "memory_mib": {
            "weights": weights,
            "decoder": 3.0,
            "activations": 10.0,
            "peak": weights + 13.0,
            "cache": None,
            "process": 2 * weights,
        },
        "parameters": 1,
        "weights_bytes": int(weights * 2**20),
        "untrained": False,
    }
    return made | changes


def test_ratios_are_computed_one_way() -> None:
    """C16: 29 of 58 is one half; a time of 20 against 40 is twice as fast, not half."""
    report = reports.build([result("dense", 40.0, 58.0), result("blr-torch", 20.0, 29.0)])
    ratios = report["ratios"]["blr-torch"]
    assert ratios["speedup"] == 2.0
    assert ratios["memory_weights"] == 0.5
    assert ratios["memory_peak"] == pytest.approx((29 + 13) / (58 + 13))
    assert report["ratios"]["dense"]["speedup"] == 1.0
    assert report["ratios"]["dense"]["memory_weights"] == 1.0


def test_a_compiled_backend_is_compared_with_the_compiled_original() -> None:
    """What compiling alone gives is not credited to block low rank (C16)."""
    results = [
        result("dense", 28.8, 1430.0),
        result("compiled", 3.2, 1430.0, compile_s=26.0),
        result("blr-triton", 4.8, 797.0, compile_s=33.0),
        result("blr-torch", 36.0, 797.0),
    ]
    report = reports.build(results)
    ratios = report["ratios"]
    assert ratios["blr-triton"]["like"] == "compiled"
    assert ratios["blr-triton"]["speedup_like"] == pytest.approx(3.2 / 4.8)
    assert ratios["blr-triton"]["speedup"] == pytest.approx(6.0)
    assert ratios["blr-torch"]["like"] == ratios["compiled"]["like"] == "dense"
    assert "BLR Triton is 1.50x slower than Compiled here" in report["verdict"]
    assert "BLR PyTorch is 1.25x slower than Dense here" in report["verdict"]

    without = reports.build([results[0], results[2]])
    assert without["ratios"]["blr-triton"]["like"] is None
    assert "6.00x faster than Dense here" in without["verdict"]
    assert "tick Compiled to compare like with like" in without["verdict"]


def test_words_and_table_agree_with_the_numbers() -> None:
    """C16: what takes longer is called slower."""
    report = reports.build([result("dense", 40.0, 100.0), result("blr-torch", 48.0, 55.0)])
    assert "BLR PyTorch is 1.20x slower than Dense here" in report["verdict"]
    assert "stores 0.55x the weights" in report["verdict"]
    rows = {row[0]: row for row in reports.summary_rows(report)}
    speed = reports.SUMMARY_COLUMNS.index("Speed vs dense")
    assert rows["Dense"][speed] == "1.00x"
    assert rows["BLR PyTorch"][speed] == "0.83x"
    faster = reports.build([result("dense", 40.0, 100.0), result("blr-torch", 16.0, 55.0)])
    assert "BLR PyTorch is 2.50x faster than Dense" in faster["verdict"]
    same = reports.build([result("dense", 40.0, 100.0), result("blr-torch", 40.3, 55.0)])
    assert "BLR PyTorch is as fast as Dense" in same["verdict"]


def test_words_are_no_surer_than_the_times() -> None:
    """C16: a median that differs inside the spread, or of three steps, is no verdict."""

    def even(backend: str, low: float, high: float, n: int = 25) -> dict[str, Any]:
        """n times spread evenly over an interval."""
        times = [float(ms) for ms in np.linspace(low, high, n)]
        middle = (low + high) / 2
        step_ms = {"median": middle, "p10": low, "p90": high, "n": n, "all": times}
        compile_s = 8.0 if backend == "compiled" else 0.0
        return result(backend, middle, 58.0, step_ms=step_ms, compile_s=compile_s)

    # Of values even in 80..120 and 70..110 the second is smaller in 1 - 0.75^2 / 2 = 72 % of pairs.
    unclear = reports.build([even("dense", 80, 120), even("compiled", 70, 110)])
    assert "Compiled is about as fast as Dense here" in unclear["verdict"]
    assert "median 1.11x faster, but the times overlap" in unclear["verdict"]
    assert "gain too little to pay back" in unclear["verdict"]
    # In 80..120 and 60..100 it is smaller in 1 - 0.5^2 / 2 = 88 %.
    clear = reports.build([even("dense", 80, 120), even("compiled", 60, 100)])
    assert "Compiled is 1.25x faster than Dense here" in clear["verdict"]
    few = reports.build([even("dense", 130, 130, 3), even("blr-torch", 60, 60, 3)])
    assert "2.17x faster than Dense here (from only 3 steps)" in few["verdict"]
    same = reports.build([even("dense", 99, 101), even("compiled", 99, 100)])
    assert same["ratios"]["compiled"]["compile_pays_after"] is None


def test_payback_has_two_digits() -> None:
    """The times do not hold more than that; rounded up."""
    report = reports.build(
        [result("dense", 40.0, 58.0), result("compiled", 30.0, 58.0, compile_s=37.3)]
    )
    # 37.3 s / (10 ms x 25 steps) = 149.2 images.
    assert report["ratios"]["compiled"]["compile_pays_after"] == 150


def test_classes_that_differ_are_said() -> None:
    def named(backend: str, label: str) -> dict[str, Any]:
        return result(backend, 40.0, 58.0, task="classify", top=[(0, label, 0.9)])

    same = reports.build([named("dense", "fox"), named("blr-torch", "fox")])
    assert "All name the same class first: fox." in same["verdict"]
    other = reports.build([named("dense", "cookie"), named("blr-torch", "chick")])
    assert "Dense names cookie, BLR PyTorch names chick" in other["verdict"]


def test_compiling_pays_back_after_a_known_number_of_images() -> None:
    """C12: 10 ms saved a step, 25 steps an image: 20 s of compiling are saved in 80 images."""
    report = reports.build(
        [result("dense", 40.0, 58.0), result("compiled", 30.0, 58.0, compile_s=20.0)]
    )
    assert report["ratios"]["compiled"]["compile_pays_after"] == 80
    assert "20 s of compiling pay back after 80 images" in report["verdict"]
    never = reports.build(
        [result("dense", 40.0, 58.0), result("compiled", 41.0, 58.0, compile_s=20.0)]
    )
    assert never["ratios"]["compiled"]["compile_pays_after"] is None
    assert "never pay back" in never["verdict"]


def test_two_images_at_a_time_pay_back_twice_as_fast() -> None:
    shape = {"images": 2, "batch": 4, "tokens": 256}
    report = reports.build(
        [
            result("dense", 40.0, 58.0, shape=shape),
            result("compiled", 30.0, 58.0, shape=shape, compile_s=20.0),
        ]
    )
    assert report["ratios"]["compiled"]["compile_pays_after"] == 160


def png(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(values.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def test_dense_against_dense_differs_by_exactly_nothing() -> None:
    """C4: a noisy picture, which a lossy format would change."""
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3))
    difference = reports.picture_difference([png(noise)], [png(noise)])
    assert difference == {"identical": True, "max": 0, "psnr_db": None}
    assert reports.picture_words(difference) == "identical"


def test_psnr_of_a_known_difference() -> None:
    """C4: a constant difference of 5 levels is 20 log10(255 / 5) = 34.15 dB."""
    base = np.full((8, 8, 3), 100)
    difference = reports.picture_difference([png(base)], [png(base + 5)])
    assert difference["max"] == 5
    assert difference["psnr_db"] == pytest.approx(34.1514, abs=1e-3)
    assert reports.picture_words(difference) == "34.2 dB PSNR"


def test_untrained_weights_and_failures_are_said() -> None:
    report = reports.build(
        [result("dense", 40.0, 58.0, untrained=True)], failures={"compiled": "no C++ compiler"}
    )
    assert report["untrained"] is True
    assert "untrained" in report["verdict"]
    assert report["failures"] == {"compiled": "no C++ compiler"}


def test_without_dense_nothing_is_compared() -> None:
    report = reports.build([result("blr-torch", 40.0, 58.0)])
    assert report["ratios"] == {}
    assert "nothing is compared" in report["verdict"]
    assert reports.summary_rows(report)[0][-2:] == ["", ""]


def test_results_of_different_jobs_do_not_mix() -> None:
    with pytest.raises(ValueError, match="share seed"):
        reports.build([result("dense", 1.0, 1.0), result("blr-torch", 1.0, 1.0, seed=1)])
    with pytest.raises(ValueError, match="one result"):
        reports.build([result("dense", 1.0, 1.0), result("dense", 1.0, 1.0)])


def test_the_report_is_json_and_the_csv_has_every_step() -> None:
    report = reports.build([result("dense", 40.0, 58.0), result("blr-torch", 20.0, 29.0)])
    assert json.loads(json.dumps(report)) == report
    assert (report["schema"], report["version"]) == ("blr-lab/report", 1)
    lines = reports.to_csv(report).splitlines()
    assert lines[0] == "backend,index,ms"
    assert len(lines) == 1 + 2 * 25
    assert lines[1] == "dense,1,40.000000"
