"""The default launch configs fit every GPU they may meet; tried by compiling, without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blr_kernels.ops.triton_config import (
    MAX_ACCUMULATORS,
    SCRATCH_BYTES,
    accumulators,
    mix_tiles,
    product_tiles,
    smaller_chunks,
    tokens_per_chunk,
)
from blr_kernels.tuning import lookup

TARGETS = [75, 80, 86, 87, 89, 90, 100, 120]
ROOT = Path(__file__).parents[2]


def run_compiler(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows that ``blr_compile_targets.py`` prints."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    environment["PYTHONPATH"] = str(ROOT)
    script = Path(__file__).with_name("blr_compile_targets.py")
    run = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    return rows


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_compiler(tmp_path_factory.mktemp("triton"), *map(str, TARGETS))


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_within_the_targets_limit(
    compiled: list[dict[str, Any]], target: int
) -> None:
    """C14: T4 75, A100 80, A40 86, Orin 87, L4 89, H200 90, B200 100, consumer Blackwell 120."""
    rows = [row for row in compiled if row["target"] == target]
    assert len(rows) >= 10
    over = [(row["what"], row["shared"]) for row in rows if row["shared"] > row["limit"]]
    assert not over


@pytest.mark.parametrize("target", [target for target in TARGETS if target >= 80])
def test_tensor_cores_are_used(compiled: list[dict[str, Any]], target: int) -> None:
    """C14: every half-precision product is a matrix instruction, on Hopper's own where it fits."""
    rows = [r for r in compiled if r["target"] == target and r["dtype"] != "float32"]
    rows = [row for row in rows if row["path"] == "triton"]
    assert all(row["tensor_cores"] for row in rows)
    newest = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(target, "mma.sync")
    assert all(newest in row["tensor_cores"] for row in rows if row["tokens"] >= 64)


@pytest.mark.parametrize("target", [target for target in TARGETS if target >= 80])
def test_no_register_spills(compiled: list[dict[str, Any]], target: int) -> None:
    rows = [r for r in compiled if r["target"] == target and r["stack"] is not None]
    assert not [(row["what"], row["stack"]) for row in rows if row["stack"]]


def test_offsets_of_large_factors_are_wide(tmp_path: Path) -> None:
    """A block's index times the weights of a block: 2**31 at the last of 5 blocks here."""
    rows = [row for row in run_compiler(tmp_path, "--large") if "mix_kernel" in row["what"]]
    assert len(rows) == 3
    for row in rows:
        for stride in row["strides"]:
            products = re.findall(rf"arith\.muli [^\n]*%c{stride}_i(\d+)\S* : i(\d+)", row["code"])
            assert set(products) == {("64", "64")}, (row["what"], stride)


@pytest.mark.slow
@pytest.mark.skipif(not any(lookup.SHIPPED.rglob("*.json")), reason="no tuned config is shipped")
def test_shipped_configs_fit_their_gpu(tmp_path: Path) -> None:
    rows = run_compiler(tmp_path, "--shipped")
    assert rows
    assert not [(row["what"], row["shared"]) for row in rows if row["shared"] > row["limit"]]


@pytest.mark.parametrize("limit_kib", [48, 64, 99, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tokens", [1, 16, 17, 512, 4096])
def test_tiles_fit_any_limit(tokens: int, itemsize: int, limit_kib: int) -> None:
    """C14: stages are what the device's shared memory holds."""
    for rows, inner in ((3, 5), (48, 36), (128, 192), (384, 1152)):
        for tiles in (
            product_tiles(tokens, rows, inner, itemsize=itemsize, shared_limit=limit_kib * 1024),
            mix_tiles(tokens, rows, inner, itemsize=itemsize, shared_limit=limit_kib * 1024),
        ):
            assert tiles.shared_bytes(itemsize) <= limit_kib * 1024
            assert min(tiles.rows, tiles.tokens, tiles.inner) >= 16
            assert tiles.stages >= 1


def test_accumulators_cover_the_blocks_evenly() -> None:
    assert [accumulators(b) for b in (1, 3, 9, 10, 16, 27)] == [1, 3, 9, 5, 8, 9]
    for blocks in range(1, 40):
        share = accumulators(blocks)
        assert share <= MAX_ACCUMULATORS
        assert -(-blocks // share) * share - blocks < share


def test_chunks_bound_the_scratch_and_are_even() -> None:
    """DiT-XL/2's qkv at 16,384 tokens would need 108 MiB between its two kernels."""
    per_token = 9 * 384 * 2
    assert SCRATCH_BYTES == 64 * 2**20
    assert tokens_per_chunk(16_384, per_token) == 8192
    assert tokens_per_chunk(512, per_token) == 512
    assert tokens_per_chunk(3, SCRATCH_BYTES) == 1
    for tokens in (1, 127, 128, 130, 4096, 9710, 16_384, 20_000, 100_003):
        for chunk in (0, 1, 100, 128, 130, 3000, 10**6):
            found = tokens_per_chunk(tokens, per_token, chunk)
            assert 1 <= found <= (chunk or tokens)
            assert found * per_token <= SCRATCH_BYTES
            passes, last = -(-tokens // found), tokens - (-(-tokens // found) - 1) * found
            # The last pass lacks at most the rounding of the others to whole tiles.
            assert last > 0
            assert found - last <= max(128, found % 128) * passes
    assert smaller_chunks(16_384, per_token, 50 * 2**20) == [3328, 1664]
    assert smaller_chunks(512, per_token, 50 * 2**20) == []
