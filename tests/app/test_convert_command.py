"""`blr-lab convert`: what is wrong is said before the work, and the machine stays usable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.__main__ import cli
from app.convert_command import remaining_seconds
from app.engine.machine import QUIET_THREADS

QUICK = ("convert", "demo-vit", "--structure", "low_rank", "--rank", "6")


def convert(*arguments: object) -> Result:
    environment = {"COLUMNS": "300", "TERM": "dumb"}
    return CliRunner().invoke(cli, [*QUICK, *map(str, arguments)], env=environment)


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET_THREADS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded before the mistake was seen")

    monkeypatch.setattr("model_zoo.vit.load_vit", load)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("option", ["--out", "--report"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is there and is no file"),
        ("file/below", "cannot be written: "),
        ("/proc/x", "/proc/x cannot be written: "),
        ("/dev/null", "/dev/null is there and is no file"),
        ("x" * 252, "name is too long"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_paths_are_checked_before_the_work(
    tmp_path: Path, option: str, name: str, message: str
) -> None:
    (tmp_path / "file").write_text("")
    others = () if option == "--out" else ("--out", tmp_path / "v.safetensors")
    result = convert("--overwrite", option, tmp_path / name, *others)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "gpu"), "device must be cpu or cuda:N, got 'gpu'"),
        (("--device", "cuda:99"), "cuda:99 is not here: torch sees"),
        (("--max-iterations", "-1"), "--max-iterations"),
        (("--report", "v.safetensors"), "cannot hold both the variant and its report"),
    ],
)
def test_other_mistakes_are_seen_before_the_work(
    tmp_path: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = convert("--out", "v.safetensors", *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_device_and_sweeps_reach_the_factorizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import model_zoo.convert
    from model_zoo.factorize import factorize

    seen = []

    def spy(weight: Any, structure: Any, **options: Any) -> Any:
        seen.append((str(weight.device), options))
        return factorize(weight, structure, **options)

    monkeypatch.setattr(model_zoo.convert, "factorize", spy)
    folder = tmp_path / "new" / "folder"
    result = convert(
        "--out", folder / "v.safetensors", "--report", tmp_path / "other" / "r.json",
        "--device", "cpu", "--max-iterations", 7,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert set(map(str, seen)) == {str(("cpu", {"max_iterations": 7}))}
    assert [path.name for path in folder.iterdir()] == ["v.safetensors"]
    assert json.loads((tmp_path / "other" / "r.json").read_text())["layers"]


def test_a_file_that_cannot_be_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or Ctrl-C while it is written."""
    from safetensors import SafetensorError

    import model_zoo.checkpoint

    end: BaseException = SafetensorError("I/O error: No space left on device")

    def save(_: Any, path: Path, __: Any) -> None:
        path.write_bytes(b"half")
        raise end

    monkeypatch.setattr(model_zoo.checkpoint, "save_file", save)
    out = tmp_path / "v.safetensors"
    result = convert("--out", out)
    assert result.exit_code == 2
    assert f"{out} cannot be written: I/O error: No space left" in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []
    end = KeyboardInterrupt()
    result = convert("--out", out)
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []


def test_threads_sleep_unless_the_person_chose(tmp_path: Path) -> None:
    """Set before torch is imported, whose OpenMP reads them then."""
    code = (
        "import os, sys, builtins\n"
        "real = builtins.__import__\n"
        "def spy(name, *rest, **more):\n"
        "    if name == 'torch':\n"
        "        print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))\n"
        "        sys.stdout.flush(); os._exit(0)\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = spy\n"
        "from app.__main__ import cli\n"
        "cli(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, *QUICK, "--out", str(tmp_path / "v.safetensors")]
    clean = {key: value for key, value in os.environ.items() if key not in QUIET_THREADS}
    for chosen, expected in (({}, "passive 0"), ({"OMP_WAIT_POLICY": "active"}, "active 0")):
        done = subprocess.run(
            command,
            env=clean | chosen,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


def test_the_time_that_is_left() -> None:
    assert remaining_seconds(0, 10, 0, 5) is None
    assert remaining_seconds(2, 10, 40, 40) == 160
    assert remaining_seconds(2, 10, 40, 55) == 145
    assert remaining_seconds(9, 10, 90, 150) == 0
