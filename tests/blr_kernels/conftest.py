"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(
    params=[
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(HAS_CUDA, reason="the interpreter is off where a GPU is"),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the Triton kernels run: interpreted on the CPU, or on a GPU."""
    if request.param == "cpu":
        pytest.importorskip("triton")
    return torch.device(request.param)


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fills new uninitialised tensors with NaN, so that an output nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
