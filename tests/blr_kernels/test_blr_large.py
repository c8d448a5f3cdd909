"""Factors of more than 2**31 elements, of which the tests touch a few rows only; on a GPU, since
the interpreter's integers do not overflow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blr_expected import assert_close
from torch import Tensor

pytest.importorskip("triton")

from blr_kernels.ops import triton_blast, triton_blast_int8, triton_small
from blr_kernels.ops.paths import Call, find_path, limits_of
from blr_kernels.ops.triton_config import Tiles

BLOCKS, RANK, P = 5, 2**25, 16
"""The last block of right begins at element 2**31."""

ROWS = 16
"""Ranks of a tile: the launches below run the first tile's program alone."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def _memory() -> None:
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


class FirstProgram:
    """A kernel whose launches run their first program alone, whatever the grid."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Any:
        return self.kernel[(1, 1, 1)]


def filled(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``coupling (b, b, r)`` and ``right (b, r, p)``, with values in the first ranks alone."""
    coupling, right = zeros(BLOCKS, BLOCKS, RANK), zeros(BLOCKS, RANK, P, dtype=dtype)
    coupling[:, :, :ROWS] = torch.randn(BLOCKS, BLOCKS, ROWS, device="cuda") / 8
    right[:, :ROWS] = torch.randint(-9, 10, (BLOCKS, ROWS, P), device="cuda").to(dtype)
    return coupling, right


def mixed(x: Tensor, coupling: Tensor, right: Tensor) -> Tensor:
    """``x (tokens, b*p)`` -> z in fp32, of the first ranks: ``(b, tokens, ROWS)``."""
    hidden = torch.einsum("tjp,jrp->tjr", x.view(-1, BLOCKS, P).float(), right[:, :ROWS].float())
    return torch.einsum("ijr,tjr->itr", coupling[:, :, :ROWS].float(), hidden)


@pytest.mark.parametrize("module", ["triton_blast", "triton_small"])
def test_mixing(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coupling, right = filled(torch.float16)
    x, z = torch.randn(1, BLOCKS * P, device="cuda").half(), zeros(1, BLOCKS, 1, RANK)
    if module == "triton_blast":
        monkeypatch.setattr(triton_blast, "mix_kernel", FirstProgram(triton_blast.mix_kernel))
        triton_blast.launch_mix(x, coupling, right, z[0], Tiles(ROWS, 16, P, 4, 1), BLOCKS)
    else:
        kernel = FirstProgram(triton_small.small_mix_kernel)
        monkeypatch.setattr(triton_small, "small_mix_kernel", kernel)
        sizes = triton_small.Sizes(ROWS, 16, P, 1, 4, 1)
        triton_small.launch_small_mix(
            x, coupling[None], right[None], z, sizes, outputs=BLOCKS, dependent=False
        )
    assert_close(z[0, :, :, :ROWS], mixed(x, coupling, right))


def test_mixing_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    coupling, right = filled(torch.int8)
    size = BLOCKS * P
    call = Call("blast_int8", 1, size, size, BLOCKS, RANK, torch.float16, limits_of(right.device))
    config = {**find_path("blast_int8", "triton").default_config(call), "early": 0}
    config |= {"mix_rows": ROWS, "mix_tokens": 16, "mix_inner": 32, "mix_stages": 1}
    scratch = triton_blast_int8.Scratch(
        torch.randint(-9, 10, (1, size), dtype=torch.int8, device="cuda"),
        torch.ones(1, device="cuda"),
        zeros(BLOCKS, 1, RANK, dtype=torch.int8),
        zeros(1, RANK // ROWS, 1, dtype=torch.float32),
    )
    kernel = FirstProgram(triton_blast_int8.int8_mix_kernel)
    monkeypatch.setattr(triton_blast_int8, "int8_mix_kernel", kernel)
    triton_blast_int8.launch_mix(call, 1, coupling, right, scratch, config)
    z = scratch.z[:, :, :ROWS].float() * scratch.z_scale[0, 0, 0]
    wanted = mixed(scratch.x, coupling, right)
    assert (z - wanted).abs().max() <= 1e-2 * wanted.abs().max()
