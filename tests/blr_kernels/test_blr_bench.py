"""The layer benchmark without a GPU: cases, operands, errors, rows and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from blr_expected import dense
from typer.testing import CliRunner

from app.__main__ import cli
from blr_kernels.bench import peers, variants
from blr_kernels.bench.cases import LAYERS, Case, select
from blr_kernels.bench.command import main
from blr_kernels.bench.operands import SETS_BYTES, draw, errors, expected, set_count
from blr_kernels.bench.report import Report, Row
from blr_kernels.bench.runner import CHECK_METHOD, ceilings, measure_case, new_report
from blr_kernels.bench.timing import time_calls
from blr_kernels.quantize import quantize_blast
from blr_kernels.structures import Blast, LowRank, Monarch, Structure

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
TINY = (
    Case("tiny", None, 24, 36, 5),
    Case("tiny", Blast(3, 8), 24, 36, 5),
    Case("tiny", Monarch(4, 8), 24, 36, 5, copies=2),
    Case("tiny", Blast(3, 8), 24, 36, 5, copies=3),
    Case("tiny", LowRank(8), 24, 36, 5),
)


def weight(structure: Structure | None, factors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """``W (out, in)`` in fp32, worked out entry by entry."""
    if structure is None:
        return factors[0]
    names = (
        structure.parameter_shapes(1, 1)
        if structure.kind == "low_rank"
        else (structure.parameter_shapes(structure.blocks, structure.blocks))
    )
    return torch.from_numpy(dense(structure, dict(zip(names, factors, strict=True)))).float()


def test_every_layer_fits_its_structures_without_padding() -> None:
    for layer in LAYERS:
        for structure in layer.structures:
            sizes = layer.in_features, layer.out_features
            assert structure.padded(*sizes) == sizes, (layer.name, structure)


@pytest.mark.parametrize(
    ("name", "structure", "parameters"),
    [
        # b*q*r + b*r*p, with b*b*r for BLAST's coupling.
        ("dit.qkv", Blast(9, 384), 3456 * 384 + 384 * 1152 + 81 * 384),
        ("dit.fc1", Blast(9, 256), 4608 * 256 + 256 * 1152 + 81 * 256),
        ("dit.adaln28", Blast(9, 256), 28 * (6912 * 256 + 256 * 1152 + 81 * 256)),
        ("vit.fc2", Monarch(4, 128), 768 * 128 + 128 * 3072),
        ("gpt2s.qkv", Blast(6, 192), 2304 * 192 + 192 * 768 + 36 * 192),
        ("llama1b.qo", LowRank(256), 2048 * 256 + 256 * 2048),
        ("llama7b.down", Monarch(16, 1536), 4096 * 1536 + 1536 * 11008),
    ],
)
def test_cases_cost_what_their_parameters_do(
    name: str, structure: Blast | Monarch | LowRank, parameters: int
) -> None:
    layer = next(layer for layer in LAYERS if layer.name == name)
    (case,) = [case for case in select([name], layer.tokens[:1]) if case.structure == structure]
    tokens, copies = case.tokens, case.copies
    outputs = copies * case.out_features * (tokens + 1)  # with a bias for each copy
    cost = case.cost(2)
    assert cost.bytes == 2 * (parameters + tokens * case.in_features + outputs)
    coupling = copies * structure.blocks**2 * structure.rank if case.op == "blast" else 0
    assert cost.flops == 2 * tokens * (parameters - coupling)


def test_all_shapes_of_the_comparison_are_there() -> None:
    tokens = {case.layer: set() for case in select()}
    for case in select():
        tokens[case.layer].add(case.tokens)
    for layer in ("dit.qkv", "dit.fc1"):
        assert tokens[layer] == {512, 4096, 16384}
    for layer in ("dit.adaln", "dit.adaln28"):
        assert tokens[layer] == {2, 16}
    for layer in ("vit.qkv", "vit.fc1", "vit.fc2"):
        assert tokens[layer] == {197, 6304}
    text = [name for name in tokens if name.startswith(("gpt2s", "llama"))]
    assert len(text) == 9
    assert all(tokens[name] == {1, 16, 512, 1024, 4096} for name in text)


def test_filters_leave_what_they_name() -> None:
    found = select(["vit.*"], [197], ["dense", "monarch"])
    assert [(case.layer, case.op, case.tokens) for case in found] == [
        (layer, op, 197)
        for layer in ("vit.qkv", "vit.fc1", "vit.fc2")
        for op in ("dense", "monarch")
    ]
    assert {case.layer.split(".")[0] for case in select(quick=True)} == {"dit", "vit"}


def test_sets_of_operands_exceed_the_cache() -> None:
    for case in select():
        size = case.cost(2).bytes
        assert set_count(size) >= 3
        assert set_count(size) * size > SETS_BYTES, case


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.op}-{case.copies}")
def test_expected_is_the_product_with_the_dense_weight(case: Case) -> None:
    operands = draw(case, CPU, torch.float32)
    assert operands.x.shape == (5, 24)
    for name, factor in enumerate(operands.stacked):
        torch.testing.assert_close(factor, torch.stack([f[name] for f in operands.factors]))
    torch.testing.assert_close(operands.stacked_bias, torch.stack(operands.biases))
    found = expected(case, operands)
    assert len(found) == case.copies
    for y, factors, bias in zip(found, operands.factors, operands.biases, strict=True):
        assert bias.shape == (36,)
        assert all(factor.is_contiguous() for factor in factors)
        torch.testing.assert_close(y, operands.x @ weight(case.structure, factors).T)


def test_errors_are_relative_to_the_whole_output() -> None:
    right = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 12.0]])]
    rms, largest = errors([torch.tensor([[3.0, 4.0]]), torch.tensor([[1.3, 12.0]])], right)
    assert rms == pytest.approx(0.1)  # 1.3 of sqrt(9 + 16 + 144)
    assert largest == pytest.approx(1.3 / 12)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(torch.tensor([[1.0, float("nan")]]), "not finite"), (torch.ones(1, 3), "shapes")],
)
def test_a_wrong_output_is_no_small_error(wrong: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        errors([wrong], [torch.ones(1, 2)])


def test_timing_needs_calls_and_replays() -> None:
    with pytest.raises(ValueError, match="at least one call"):
        time_calls([])
    with pytest.raises(ValueError, match="at least 2"):
        time_calls([lambda: None], replays=1)


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.op}-{case.copies}")
def test_a_check_writes_errors_and_no_times(case: Case) -> None:
    rows = list(measure_case(case, CPU, torch.bfloat16, replays=0))
    names = {
        "dense": ["dense"],
        "low_rank": ["cublas", "auto"],
    }.get(case.op, ["eager", "auto"])
    assert [row.impl for row in rows] == names
    for row in rows:
        assert row.error is None
        assert row.median_us is None
        assert row.percent_of_bound is None
        assert 0 < (row.rms or 0) < 4e-3
        assert 0 < (row.max or 0) < 2e-2
        assert (row.op, row.tokens, row.dtype) == (case.op, 5, "bfloat16")


def test_a_failing_variant_is_a_row_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of everything\nand a second line")

    monkeypatch.setitem(variants._EAGER, "blast", broken)
    rows = list(measure_case(TINY[1], CPU, torch.bfloat16, replays=0))
    assert [(row.impl, row.error) for row in rows] == [
        ("eager", "RuntimeError: out of everything"),
        ("auto", None),
    ]


def test_draws_repeat() -> None:
    """A seed's set is the same in the next run, and another seed's is not."""
    case = Case("x", Blast(2, 4), 6, 8, 3)
    first, again, other = (draw(case, CPU, torch.float32, seed) for seed in (3, 3, 4))
    assert torch.equal(first.x, again.x)
    assert all(
        map(torch.equal, (*first.stacked, first.stacked_bias), (*again.stacked, again.stacked_bias))
    )
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(first.stacked[0], other.stacked[0])


def test_int8_reads_what_the_quantiser_makes() -> None:
    case = Case("tiny", Blast(3, 32), 96, 144, 5, copies=2)
    operands = draw(case, CPU, torch.bfloat16)
    (variant,) = [v for v in variants.int8_variants(case) if v.impl == "int8"]
    assert variant.weight_bytes == sum(quantize_blast(*f).nbytes for f in operands.factors)
    right = [y + b for y, b in zip(expected(case, operands), operands.biases, strict=True)]
    rms, largest = errors(variant.build([operands])(operands), right)
    assert 4e-3 < rms < 2e-2
    assert largest < 2e-2
    assert variants.int8_variants(TINY[2]) == []


def test_impls_are_filtered() -> None:
    rows = list(measure_case(TINY[1], CPU, torch.bfloat16, replays=0, impls=["auto"]))
    assert [row.impl for row in rows] == ["auto"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.op}-{case.copies}")
def test_a_case_is_timed_on_a_gpu(case: Case) -> None:
    """What it measures, not how long it takes."""
    rows = list(measure_case(case, torch.device("cuda"), torch.bfloat16, replays=3))
    assert rows[-1].impl == ("dense" if case.op == "dense" else "auto")
    for row in rows:
        assert row.error is None, row
        assert 0 < (row.p10_us or 0) <= (row.median_us or 0) <= (row.p90_us or 0)
        assert 0 < (row.rms or 0) < (2e-2 if row.impl == "int8" else 4e-3), row
        assert (row.scratch_bytes or 0) <= 64 << 20


@pytest.mark.gpu
def test_the_figure_is_one_call_of_the_graph() -> None:
    """Twice as many operand sets take as long a call; what a call returns is filled by replays."""
    outputs: list[torch.Tensor] = []
    x = torch.zeros(1 << 24, device="cuda")

    def call() -> torch.Tensor:
        outputs.append(x + 1)
        return outputs[-1]

    x.fill_(1)
    one, four = time_calls([call]), time_calls([call] * 4)
    assert one.median_us / 3 < four.median_us < one.median_us * 3
    assert all(bool((y == 2).all()) for y in outputs)


def test_a_report_says_what_it_was_taken_with() -> None:
    report = new_report(CPU, CHECK_METHOD, "abc")
    assert report.device == "cpu"
    assert report.commit == "abc"
    assert {"python", "torch"} <= set(report.versions)
    assert ceilings("NVIDIA H200") is not None
    assert ceilings("NVIDIA GeForce RTX 4090") is None


# The paper's kernels are not here: their argument layouts are spelled out as sums.
def test_the_papers_blast_layouts() -> None:
    left, coupling, right = torch.randn(2, 3, 4), torch.randn(2, 2, 4), torch.randn(2, 4, 5)
    U, V, S = peers.FUNCTIONS["blast"]["triton_blast_bmm_fp16"][1](left, coupling, right)
    x = torch.randn(7, 2, 5)
    y = torch.einsum("njp,jpr->rjn", x, V)
    z = torch.einsum("rij,rjn->irn", S, y)
    found = torch.einsum("irn,iqr->niq", z, U).reshape(7, 6)
    torch.testing.assert_close(
        found, x.reshape(7, 10) @ weight(Blast(2, 4), (left, coupling, right)).T
    )


@pytest.mark.parametrize("name", sorted(peers.FUNCTIONS["monarch"]))
def test_the_papers_monarch_layouts(name: str) -> None:
    left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    w1, w2 = peers.FUNCTIONS["monarch"][name][1](left, right)
    if name == "triton_monarch_right_fp16":
        w2 = w2.transpose(1, 2)
    assert w1.shape == (2, 5, 4)
    x = torch.randn(7, 2, 5)
    # Column l*m + j of w1 is for output block l, where block k's j stands at k*m + j.
    hidden = torch.einsum("nkp,kpr->nkr", x, w1).view(7, 2, 2, 2)  # (n, k, l, j)
    h = hidden.permute(2, 0, 1, 3).reshape(2, 7, 4)
    found = torch.einsum("lnr,lrs->nsl", h, w2).reshape(7, 6)
    torch.testing.assert_close(found, x.reshape(7, 10) @ weight(Monarch(2, 4), (left, right)).T)


def test_the_papers_kernels_are_read_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    package = tmp_path / "triton_funcs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "blast_kernels.py").write_text(
        "from utils import next_power_of_2\n"
        "def triton_blast_bmm_fp16(x, U, V, S):\n"
        "    assert next_power_of_2(9) == 16\n"
        "    b = len(U)\n"
        "    y = (x.view(-1, b, V.shape[1]).transpose(0, 1) @ V).permute(2, 0, 1)\n"
        "    z = (S @ y).permute(1, 2, 0)\n"
        "    return (z @ U.transpose(1, 2)).transpose(0, 1).reshape(*x.shape[:2], -1)\n"
    )
    for name in ("triton_funcs", "triton_funcs.blast_kernels"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    utils = sys.modules.get("utils")
    rows = list(measure_case(TINY[1], CPU, torch.float32, replays=0, ref=tmp_path))
    assert sys.modules.get("utils") is utils
    assert str(tmp_path) not in sys.path
    assert [row.impl for row in rows] == ["ref", "eager", "auto"]
    assert rows[0].path == "triton_blast_bmm_fp16"
    assert rows[0].error is None
    assert (rows[0].rms or 1) < 1e-5
    for name in ("triton_funcs", "triton_funcs.blast_kernels"):
        sys.modules.pop(name, None)


def test_without_the_papers_kernels_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="triton_funcs"):
        peers.functions(tmp_path, "monarch")


@NO_GPU
def test_the_command_without_a_gpu_says_so_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert (
        told.err == "python -m blr_kernels.bench: needs an NVIDIA GPU, and torch finds none here\n"
    )


@NO_GPU
def test_blr_lab_without_a_gpu_says_so_in_a_line() -> None:
    result = CliRunner().invoke(cli, ["bench", "layers", "--layers", "dit.*"])
    assert result.exit_code == 2
    assert result.output == "blr-lab bench layers: needs an NVIDIA GPU, and torch finds none here\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], "--check-only"),
        (["--device", "tpu"], "cpu or cuda:N"),
        (["--device", "cpu", "--check-only", "--layers", "dit.qkw"], "dit.qkv"),
        (["--device", "cpu", "--check-only", "--tokens", "3"], "tokens must be of"),
        (["--device", "cpu", "--check-only", "--ops", "sparse"], "ops must be of"),
        (["--device", "cpu", "--check-only", "--layers", "dit.*", "--tokens", "1"], "no case"),
        (["--device", "cpu", "--check-only", "--ref", "no-such-folder"], "--ref"),
        (["--from", "no-such-file.json"], "no-such-file.json"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_a_check_on_the_cpu_writes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "check.json"
    assert main([
        "--device", "cpu", "--check-only", "--layers", "gpt2s.qkv", "--tokens", "1",
        "--out", str(out), "--plots", str(tmp_path / "plots"), "--commit", "abc",
    ]) == 0  # fmt: skip
    data = json.loads(out.read_text(encoding="utf-8"))
    assert {"device", "versions", "commit", "date", "method", "rows"} == set(data)
    assert data["commit"] == "abc"
    assert [(row["op"], row["impl"]) for row in data["rows"]] == [
        ("dense", "dense"),
        ("blast", "eager"), ("blast", "auto"),
        ("monarch", "eager"), ("monarch", "auto"),
        ("low_rank", "cublas"), ("low_rank", "auto"),
    ]  # fmt: skip
    assert all("median_us" not in row for row in data["rows"])
    assert set(data["rows"][0]) <= {field.name for field in fields(Row)}
    assert Report.from_json(out.read_text(encoding="utf-8")).rows[0].op == "dense"
    assert list((tmp_path / "plots").iterdir()) == []
    assert "gpt2s.qkv" in capsys.readouterr().out


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from app.__main__ import cli\n"
        "try:\n"
        "    cli(['bench', 'layers', '--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "print([name for name in ('torch', 'triton', 'gradio') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--check-only" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
