"""The import direction and what importing may not do."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A package may import itself and those after it.
ORDER = ("app", "model_zoo", "blr_kernels")
KERNEL_REQUIREMENTS = {"torch", "triton"}


def imported_roots(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere, also inside functions."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no sources in {package}"
    return files


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package: str) -> None:
    above = set(ORDER[: ORDER.index(package)]) | {"tests"}
    wrong = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in sources(package)
        if (found := imported_roots(path) & above)
    }
    assert wrong == {}


def test_kernels_need_only_torch_and_triton() -> None:
    allowed = KERNEL_REQUIREMENTS | {"blr_kernels"} | set(sys.stdlib_module_names)
    foreign = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in sources("blr_kernels")
        if (found := imported_roots(path) - allowed)
    }
    assert foreign == {}


# Runs in a fresh interpreter: every use of a socket, CUDA start and file of weights is noticed.
# urllib3, which diffusers brings, makes one socket to learn whether IPv6 exists: making one is
# therefore not counted, what would send or listen is.
PROBE = """
import builtins, importlib, json, socket, sys
opened = []
real_socket, real_open = socket.socket, builtins.open
class Noticed(real_socket):
    pass
def notice(name):
    real = getattr(real_socket, name)
    def noticed(self, *args):
        opened.append(name)
        return real(self, *args)
    setattr(Noticed, name, noticed)
for name in ("connect", "connect_ex", "sendto", "listen"):
    notice(name)
def noticing_open(file, *args, **kwargs):
    if str(file).endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt")):
        opened.append(str(file))
    return real_open(file, *args, **kwargs)
socket.socket, builtins.open = Noticed, noticing_open
importlib.import_module(sys.argv[1])
torch = sys.modules.get("torch")
print(json.dumps({
    "opened": opened,
    "cuda": bool(torch and torch.cuda.is_initialized()),
    "heavy": [name for name in ("torch", "diffusers", "timm", "gradio", "triton")
              if name in sys.modules],
}))
"""


def probe(module: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "module",
    [
        "blr_kernels",
        "blr_kernels.structures",
        "model_zoo",
        "model_zoo.registry",
        "model_zoo.images",
        "app",
        "app.engine",
        "app.report",
        "app.__main__",
    ],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    """The web process is up in seconds because these do not pull in torch (C13)."""
    assert probe(module) == {"opened": [], "cuda": False, "heavy": []}


@pytest.mark.parametrize(
    "module",
    ["blr_kernels.nn", "blr_kernels.ops", "model_zoo.convert", "model_zoo.dit", "model_zoo.vit"],
)
def test_heavy_modules_start_no_cuda_and_load_nothing(module: str) -> None:
    """Importing starts no CUDA, opens no socket and reads no weights (C13)."""
    result = probe(module)
    assert result["cuda"] is False
    assert result["opened"] == []
