"""A built wheel, installed outside the clone, carries the bundled models and serves them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Run outside the clone with the wheel first on the path: the demo models must be found in the
# wheel, run in a worker, and answer over HTTP.
SERVE = """
import json, pathlib, sys
import model_zoo.registry as registry
where = pathlib.Path(registry.__file__).resolve()
from app.engine import Engine
from app.engine.events import Failed, Result
from app.engine.jobs import GenerateJob
with Engine(device="cpu") as engine:
    job = GenerateJob(model="demo-dit", class_id=3, seed=1, steps=2, guidance=4.0, images=1)
    events = list(engine.run(job, ["dense", "blr-torch"]))
failed = [event.message for event in events if isinstance(event, Failed)]
results = [event for event in events if isinstance(event, Result)]
print(json.dumps({
    "where": str(where),
    "assets": str(registry.assets_dir().resolve()),
    "failed": failed,
    "pictures": [image[:8].hex() for result in results for image in result.images],
}))
"""


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("blr_lab-*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_wheel_holds_the_packages_and_the_demo(unpacked_wheel: Path) -> None:
    for name in (
        "app/__main__.py",
        "blr_kernels/structures.py",
        "model_zoo/registry.py",
        "model_zoo/assets/demo/dit/model_index.json",
        "model_zoo/assets/demo/vit/config.json",
    ):
        assert (unpacked_wheel / name).is_file(), name
    styles = {path.name for path in (ROOT / "app").glob("*.css")}
    assert {path.name for path in (unpacked_wheel / "app").glob("*.css")} == styles
    assert not (unpacked_wheel / "tests").exists()


def test_wheel_serves_the_demo_outside_the_clone(unpacked_wheel: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(unpacked_wheel)}
    script = tmp_path / "serve.py"
    script.write_text(f"if __name__ == '__main__':\n{_indented(SERVE)}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["where"]).is_relative_to(unpacked_wheel)
    assert Path(answer["assets"]).is_relative_to(unpacked_wheel)
    assert answer["failed"] == []
    assert answer["pictures"] == ["89504e470d0a1a0a"] * 2


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in code.splitlines())
