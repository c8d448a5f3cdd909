"""The benchmark's report, its ratios and its drawings, from numbers written by hand."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from blr_kernels.bench.command import main
from blr_kernels.bench.plot import SHOWN, achieved, intensity, roofline, speed, write_plots
from blr_kernels.bench.report import Ratios, Report, Row, table, times_as_fast

SVG = "{http://www.w3.org/2000/svg}"


def row(impl: str, us: float | None, op: str = "blast", tokens: int = 4096, **more: object) -> Row:
    facts = {
        "op": op, "layer": "dit.fc1", "tokens": tokens, "impl": impl,
        "structure": "dense" if op == "dense" else "BLAST b9 r256",
        "in_features": 1152, "out_features": 4608, "dtype": "bfloat16",
        "median_us": us, "rms": 2e-3, "max": 4e-3, "bytes": 40_000_000, "flops": 12_000_000_000,
    }  # fmt: skip
    return Row(**{**facts, **more})  # type: ignore[arg-type]


ROWS = (
    row("dense", 60.0, op="dense"),
    row("ref", 45.0, path="triton_blast_bmm_fp16"),
    row("eager", 300.0),
    row("compiled", 240.0),
    row("triton", 32.0, scratch_bytes=3 << 20),
    row("hopper", 29.0),
    row("auto", 30.0, path="hopper", percent_of_bound=51.2),
    row("broken", None, error="RuntimeError: out of memory"),
    row("dense", 12.0, op="dense", tokens=512, bytes=15_000_000),
    row("auto", 15.0, tokens=512, path="triton", bytes=10_000_000, flops=1_500_000_000),
)


@pytest.fixture
def report() -> Report:
    return Report(
        "NVIDIA H200", {"torch": "2.11.0"}, "abc", "2026-12-01T00:00:00+00:00", "how", ROWS
    )


def test_ratios_say_how_many_times_as_fast() -> None:
    """C16: computed one way, above 1 is faster, from numbers one can check by hand."""
    ratios = Ratios(ROWS)
    by_name = {r.impl: r for r in ROWS if r.tokens == 4096}
    assert ratios.vs_dense(by_name["auto"]) == 2.0
    assert ratios.vs_ref(by_name["auto"]) == 1.5
    assert ratios.vs_dense(by_name["eager"]) == 0.2
    assert ratios.vs_dense(by_name["dense"]) == 1.0
    assert ratios.vs_ref(by_name["ref"]) == 1.0
    assert ratios.vs_dense(ROWS[-1]) == 0.8  # the dense row of its own number of tokens


def test_ratios_without_a_time_or_a_base_are_none() -> None:
    """C16: nothing is compared with another layer, dtype or number of tokens."""
    ratios = Ratios(ROWS)
    assert ratios.vs_dense(row("broken", None)) is None
    assert ratios.vs_ref(ROWS[-1]) is None
    assert ratios.vs_dense(row("auto", 1.0, layer="dit.qkv")) is None
    assert ratios.vs_dense(row("auto", 1.0, dtype="float16")) is None
    assert ratios.vs_ref(row("auto", 1.0, op="monarch")) is None
    assert times_as_fast(row("auto", 5.0), row("dense", 10.0)) == 2.0


def test_achieved_and_intensity_of_known_numbers() -> None:
    """C16: 12 GFLOP in 30 us are 400 TFLOP/s; over 40 MB they are 300 FLOPs a byte."""
    auto = ROWS[6]
    assert achieved(auto) == pytest.approx(400.0)
    assert intensity(auto) == 300.0
    assert achieved(ROWS[7]) is None


def test_json_reads_back_and_keeps_a_row_a_line(report: Report) -> None:
    text = report.to_json()
    again = Report.from_json(text)
    assert replace(again, rows=tuple(again.rows)) == report
    lines = text.splitlines()
    assert sum(line.startswith('{"op"') for line in lines) == len(ROWS)
    assert "null" not in text


@pytest.mark.parametrize(
    "text", ["[]", '{"device": "x"}', '{"rows": [{"op": "blast", "speed": 1}]}']
)
def test_a_file_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"report|missing|unknown"):
        Report.from_json(text)


def test_table_shows_every_row(report: Report) -> None:
    lines = table(report).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert "NVIDIA H200" in lines[0]
    auto = next(line for line in lines if " auto " in line and " 4096 " in line)
    assert auto.split()[-3:] == ["2.00", "1.50", "hopper"]
    assert "51%" in auto
    assert any("out of memory" in line for line in lines)


def drawn(drawing: str) -> list[str]:
    root = ElementTree.fromstring(drawing)
    return [name for g in root.iter(f"{SVG}g") if (name := g.get("data-impl"))]


def test_roofline_has_a_line_for_every_timed_implementation(report: Report) -> None:
    """Of those asked for; by default our single paths and eager code are left out."""
    every = {row.impl for row in report.rows}
    timed = ["auto", "compiled", "dense", "eager", "hopper", "ref", "triton"]
    assert sorted(drawn(roofline(report.rows, impls=every))) == timed
    assert sorted(drawn(roofline(report.rows))) == ["auto", "compiled", "dense", "ref"]
    root = ElementTree.fromstring(roofline(report.rows))
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert {"auto", "ref", "dense", "512", "4,096", "BLAST  b9 r256"} <= words
    assert set(SHOWN) <= {*every, "dense_compiled", "cublas", "int8"}


def test_nothing_is_drawn_outside_a_drawing(report: Report) -> None:
    """Marks stay within the frame: the axes reach from the slowest row to the roof."""
    for drawing in (roofline(report.rows), speed(report)):
        root = ElementTree.fromstring(drawing)
        _, _, width, height = map(float, (root.get("viewBox") or "").split())
        for element in root.iter():
            x = float(element.get("x") or element.get("cx") or 0)
            y = float(element.get("y") or element.get("cy") or 0)
            assert 0 <= x + float(element.get("width") or 0 if element is not root else 0) <= width
            assert 0 <= y <= height


def test_speeds_stand_where_the_ratios_say(report: Report) -> None:
    """C16: the drawing shows the ratios of the table, on a logarithmic axis with dense at 1."""
    low_rank = row("cublas", 20.0, op="low_rank", structure="low rank r256")
    drawing = speed(replace(report, rows=(*ROWS, low_rank)))
    root = ElementTree.fromstring(drawing)
    marks = [
        (name, float(g.get("data-x") or 0))
        for g in root.iter(f"{SVG}g")
        if (name := g.get("data-impl"))
    ]
    # By tokens: 512 first, of which only ours was timed.
    assert [name for name, _ in marks] == ["auto", "ref", "compiled", "cublas", "auto"]
    one = float(re.search(r'class="one" d="M([\d.]+)', drawing)[1])  # type: ignore[index]
    unit = (marks[-1][1] - one) / math.log(2.0)
    ratios = [math.exp((x - one) / unit) for _, x in marks]
    assert ratios == pytest.approx([0.8, 60 / 45, 0.25, 3.0, 2.0], rel=0.01)
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert [word for word in words if word in ("0.80", "2.00")] == ["0.80", "2.00"]
    assert drawn(speed(report, impls=["ref"])) == ["auto", "ref", "auto"]


def test_what_cannot_be_drawn_is_named(report: Report) -> None:
    with pytest.raises(ValueError, match="no row has a time"):
        roofline([ROWS[7]])
    with pytest.raises(ValueError, match="gpt2s"):
        speed(report, ["gpt2s"])


def test_plots_of_a_file(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(report.to_json(), encoding="utf-8")
    assert main(["--from", str(file), "--plots", str(tmp_path / "plots")]) == 0
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"roofline-dit.fc1.svg", "speed-vision.svg"}
    for path in (tmp_path / "plots").iterdir():
        ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert {path.name for path in write_plots(report, tmp_path / "again")} == names
