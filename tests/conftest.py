"""Set-up of the whole suite: Triton's interpreter where there is no GPU, and the gpu marker."""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


def _interpret_triton() -> None:
    """Makes this process interpret Triton kernels on the CPU.

    Triton reads the variable at its import. It is taken back afterwards, so that programs the
    tests start see the machine as a person's programs do.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        import triton.language
    except ImportError:
        return
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    triton.knobs.runtime.interpret = True


if not HAS_CUDA:
    _interpret_triton()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
