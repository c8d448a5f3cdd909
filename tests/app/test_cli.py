"""The command line: quick, light, and clear when something is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.__main__ import cli

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "diffusers", "timm", "gradio", "triton")
RUN = """
import sys
from app.__main__ import cli
try:
    cli(sys.argv[1:])
except SystemExit as end:
    assert end.code in (0, None), end.code
print("HEAVY", [name for name in {heavy} if name in sys.modules])
"""


def run_light(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(heavy=HEAVY), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments", [("--help",), ("app", "--help"), ("info", "--help"), ("info",)]
)
def test_help_and_info_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert run_light(*arguments).splitlines()[-1] == "HEAVY []"


def test_info_names_device_models_and_backends() -> None:
    shown = run_light("info")
    for word in ("torch", "demo-dit", "vit-b-16", "blr-triton", "hf download"):
        assert word in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["app", "--device", "tpu"], "cpu or cuda:N"),
        (["app", "--max-file-size", "much"], "like 500kb or 10mb"),
        (["app", "--host", "300.1.1.1"], "address of this machine"),
        (["app", "--max-file-size", "0mb"], "like 500kb or 10mb"),
        (["app", "--max-file-size", "9999999gb"], "like 500kb or 10mb"),
        (["app", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1: "),
        (["app", "--model", "no-such-folder"], "unknown model"),
        (["info", "--device", "gpu0"], "cpu or cuda:N"),
        (["convert", "no-such-model"], "unknown model"),
        (["convert", "~no-such-user/model"], "unknown model"),
        (["convert", "demo-vit", "--rank", "8", "--fraction", "0.5"], "not both"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str, tmp_path: Path) -> None:
    if arguments[0] == "convert":
        arguments = [*arguments, "--out", str(tmp_path / "out.safetensors")]
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli, ["app", "--port", port], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}: " in result.output


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_convert_looks_where_it_writes_before_it_works(option: str, tmp_path: Path) -> None:
    """Neither a folder nor a device is replaced, and a file is no folder."""
    (tmp_path / "file").touch()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    places = {
        tmp_path: "is no file",
        pipe: "is no file",
        tmp_path / "file" / "x": "cannot be written: ",
    }
    for place, message in places.items():
        arguments = ["convert", "demo-vit", "--overwrite", option, str(place)]
        if option == "--report":
            arguments += ["--out", str(tmp_path / "out.safetensors")]
        result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "300", "TERM": "dumb"})
        assert result.exit_code == 2
        assert message in result.output
        assert "Loading" not in result.output
    assert pipe.is_fifo()


def test_convert_writes_a_variant_and_prints_its_report(tmp_path: Path) -> None:
    out, report = tmp_path / "vit-low_rank.safetensors", tmp_path / "report.json"
    arguments = [
        "convert", "demo-vit", "--structure", "low_rank", "--rank", "6",
        "--out", str(out), "--report", str(report),
    ]  # fmt: skip
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    assert "layers converted" in result.output
    assert "low rank r6" in result.output
    layers = json.loads(report.read_text(encoding="utf-8"))["layers"]
    assert {layer["structure"]["rank"] for layer in layers} == {6}
    from model_zoo.headers import read_config

    assert set(read_config(out)["layers"]) == {layer["name"] for layer in layers}
    again = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert again.exit_code == 2
    assert "exists" in again.output
