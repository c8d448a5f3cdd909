"""What importing the package does and does not do, each in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
"""


def run(code: str, **environment: str) -> str:
    """Runs a program without the interpreter's variable, returns what it printed."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_package_and_structures_import_no_torch() -> None:
    run(
        "import sys, blr_kernels, blr_kernels.structures, blr_kernels.roofline\n"
        "from blr_kernels import Blast, structure_from_dict\n"
        "assert structure_from_dict(Blast(3, 8).to_dict()) == Blast(3, 8)\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )


def test_every_public_name_resolves() -> None:
    run(
        "import blr_kernels\n"
        "for name in blr_kernels.__all__:\n"
        "    assert getattr(blr_kernels, name) is not None\n"
        "    assert name in dir(blr_kernels)\n"
        "try:\n"
        "    blr_kernels.nothing\n"
        "except AttributeError as error:\n"
        "    assert 'nothing' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )


def test_importing_the_kernels_starts_no_cuda_and_opens_no_socket() -> None:
    """C13: importing works without a GPU, and touches none where there is one."""
    pytest.importorskip("triton")
    run(
        "import sys\n"
        "def watch(event, arguments):\n"
        "    assert not event.startswith('socket.connect'), (event, arguments)\n"
        "sys.addaudithook(watch)\n"
        "import blr_kernels.nn, blr_kernels.ops\n"
        "from blr_kernels.ops import triton_blast, triton_low_rank, triton_monarch\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )


USE_EVERYTHING_ELSE = """
import torch
from blr_kernels import Backend, BLRLinear, Blast, LowRank, Monarch, explain, triton_available

available, reason = triton_available()
for structure in (LowRank(4), Monarch(2, 4), Blast(2, 4)):
    for backend in (Backend.AUTO, Backend.TORCH):
        layer = BLRLinear.create(6, 8, structure, backend=backend)
        layer(torch.zeros(2, 6)).sum().backward()
        torch._dynamo.reset()
        torch.compile(layer, fullgraph=True, backend="eager")(torch.zeros(2, 6))
    told = explain(structure, 6, 8, dtype=torch.float32, device="cpu")
    assert told.implementation is Backend.TORCH, told
    layer.backend = Backend.TRITON
    try:
        layer(torch.zeros(2, 6))
    except RuntimeError as error:
        print(available, "|", reason, "|", told.others[Backend.TRITON], "|", error)
    else:
        raise AssertionError("Backend.TRITON ran")
"""


def test_everything_else_works_where_triton_is_absent() -> None:
    """C11, C13: on a Mac or Windows there is no Triton; its backend says so."""
    printed = run(WITHOUT_TRITON + USE_EVERYTHING_ELSE)
    for line in printed.strip().splitlines():
        available, reason, why_not, error = line.split(" | ")
        assert available == "False"
        assert "triton cannot be imported" in reason
        assert why_not == reason
        assert error == f"Backend.TRITON cannot run: {reason}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_triton_on_a_cpu_says_why_it_cannot_run() -> None:
    """C13: without a GPU and without the interpreter the launch is refused in words."""
    pytest.importorskip("triton")
    for line in run(USE_EVERYTHING_ELSE).strip().splitlines():
        available, reason, why_not, error = line.split(" | ")
        assert available == "False"
        assert "needs an NVIDIA GPU" in reason
        assert "TRITON_INTERPRET=1" in why_not
        assert error == f"Backend.TRITON cannot run: {why_not}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_triton_runs_interpreted_when_the_variable_is_set() -> None:
    pytest.importorskip("triton")
    printed = run(
        "import torch\n"
        "from blr_kernels import Backend, BLRLinear, Blast, triton_available\n"
        "layer = BLRLinear.create(6, 8, Blast(2, 4), backend=Backend.TRITON)\n"
        "torch.testing.assert_close(layer(torch.ones(1, 6)),\n"
        "    torch.nn.functional.linear(torch.ones(1, 6), layer.to_dense(), layer.bias))\n"
        "print(triton_available())\n",
        TRITON_INTERPRET="1",
    )
    assert printed.strip() == "(True, 'interpreted on the CPU (TRITON_INTERPRET=1)')"
