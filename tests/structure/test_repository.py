"""Promises about the repository as a whole: size, formats, README, cases."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CASES = [f"C{number}" for number in range(1, 17)]


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_a_clone_stays_light() -> None:
    assert sum(path.stat().st_size for path in tracked()) < 24 * MIB


def test_bundled_models_stay_light() -> None:
    size = sum(path.stat().st_size for path in (ROOT / "assets/demo").rglob("*") if path.is_file())
    assert 0 < size <= 20 * MIB


def test_weights_are_safetensors_only() -> None:
    pickled = [
        path for path in tracked() if path.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
    ]
    assert pickled == []


# The pipe between the engine and the workers that it started itself.
OWN_PIPE = ROOT / "app/engine/channel.py"


def test_no_file_is_unpickled() -> None:
    """A checkpoint never runs code: torch.load only with weights_only=True."""
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix == ".py" and path not in {OWN_PIPE, Path(__file__).resolve()}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"pickle\.loads?\(|torch\.load\(", line) and "weights_only=True" not in line
    ]
    assert wrong == []


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_named_in_a_test(case: str) -> None:
    """Faults that people met elsewhere: each has a test that names it."""
    named = re.compile(rf"\b{case}\b")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__).resolve()]
    assert any(named.search(path.read_text(encoding="utf-8")) for path in tests)


def test_readme_quotes_the_tested_api_example() -> None:
    example = (ROOT / "tests/e2e/api_example.py").read_text(encoding="utf-8").strip()
    assert example in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", readme)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_readme_code_runs() -> None:
    """The example of the library; the API's is run by the end-to-end tests."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = (ROOT / "tests/e2e/api_example.py").read_text(encoding="utf-8").strip()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    own = [block for block in blocks if block.strip() != example]
    assert own
    for block in own:
        names: dict[str, object] = {}
        exec(compile(block, "README.md", "exec"), names)
        assert tuple(names["y"].shape) == (197, 3072)  # type: ignore[attr-defined]
