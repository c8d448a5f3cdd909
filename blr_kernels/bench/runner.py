"""Measures cases one after the other."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_kernels.bench.cases import Case
from blr_kernels.bench.operands import Operands, draw, errors, expected, set_count
from blr_kernels.bench.report import Report, Row, significant
from blr_kernels.bench.timing import time_calls
from blr_kernels.bench.variants import Run, Variant, variants
from blr_kernels.roofline import H200_BF16, Device

METHOD = (
    "Microseconds of one call: a CUDA graph holds the call on rotating sets of random operands, "
    "together over 200 MB, so that weights come from memory; median, 10th and 90th percentile of "
    "{replays} replays. Error: of the output of set 0 in the last replay, against fp32 products "
    "with the dense weight of the same factors. Ours and dense add a bias, ref does not. "
    "Bound: compulsory bytes at 4.3 TB/s or FLOPs at 790 TFLOP/s."
)
CHECK_METHOD = "Errors alone, of one call; nothing was timed."


def ceilings(name: str) -> Device | None:
    """The measured ceilings of a GPU in fp16 and bf16, None for one that was not measured."""
    return H200_BF16 if "H200" in name else None


def device_name(device: torch.device) -> str:
    """As the driver tells it, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The commit of the clone that this file is in, with a "+" if tracked files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "-s", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def new_report(device: torch.device, method: str, commit_name: str | None = None) -> Report:
    """A report without rows, which takes them as they come."""
    return Report(
        device=device_name(device),
        versions=versions(),
        commit=commit_name or commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        method=method,
        rows=[],
    )


def _scratch(run: Run, operands: Operands) -> int:
    """Peak bytes asked for during a call, above its input and output."""
    key = "requested_bytes.all"
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[f"{key}.current"]
    outputs = run(operands)
    peak = torch.cuda.memory_stats()[f"{key}.peak"]
    return max(0, int(peak - before) - sum(y.nbytes for y in outputs))


def _measure(
    variant: Variant, sets: list[Operands], right: list[Tensor], replays: int
) -> dict[str, Any]:
    """The measured fields of a row; without a GPU, or with ``replays`` 0, only the errors.

    ``right`` are the exact outputs of the first set, without bias.
    """
    run = variant.build(sets)
    last = run(sets[0])
    found: dict[str, Any] = {}
    if sets[0].x.is_cuda:
        found["scratch_bytes"] = _scratch(run, sets[0])
        if replays:

            def first() -> object:
                nonlocal last
                last = run(sets[0])
                return last

            def other(operands: Operands) -> Callable[[], object]:
                return lambda: run(operands)

            timing = time_calls([first, *(other(operands) for operands in sets[1:])], replays)
            found["median_us"] = significant(timing.median_us)
            found["p10_us"] = significant(timing.p10_us)
            found["p90_us"] = significant(timing.p90_us)
    if variant.bias:
        right = [y + bias for y, bias in zip(right, sets[0].biases, strict=True)]
    rms, largest = errors(last, right)
    return {**found, "rms": significant(rms, 3), "max": significant(largest, 3)}


def _fastest(rows: list[Row]) -> list[Row]:
    """One row of several variants that go by the same name."""
    timed = [row for row in rows if row.error is None]
    return [min(timed or rows, key=lambda row: row.median_us or 0.0)] if rows else []


def measure_case(
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    *,
    replays: int = 15,
    compiled: bool = False,
    ref: Path | None = None,
    impls: Iterable[str] = (),
) -> Iterator[Row]:
    """Measures one case with every variant.

    Args:
        case, device, dtype: what is measured.
        replays: of each graph; 0 only checks the errors.
        compiled: whether to compile dense layers and references too.
        ref: the folder of the paper's kernels, None to leave them out.
        impls: names of the variants to keep, all if there are none.

    Yields:
        A row for each; one that fails has its error in words and the run goes on.

    Raises:
        RuntimeError: if a failure left the GPU unusable; the rows before it were yielded.
    """
    wanted = set(impls)
    cost = case.cost(dtype.itemsize)
    limits = ceilings(device_name(device))
    count = set_count(cost.bytes) if replays else 1
    sets = [draw(case, device, dtype, seed) for seed in range(count)]
    right = expected(case, sets[0])
    refs: list[Row] = []
    for variant in variants(case, sets[0], compiled=compiled, ref=ref):
        if wanted and variant.impl not in wanted:
            continue
        facts: dict[str, Any] = {
            "op": case.op,
            "layer": case.layer,
            "tokens": case.tokens,
            "impl": variant.impl,
            "structure": "dense" if case.structure is None else str(case.structure),
            "in_features": case.in_features,
            "out_features": case.out_features,
            "dtype": str(dtype).removeprefix("torch."),
            "copies": case.copies,
            "bytes": cost.bytes,
            "flops": cost.flops,
            "path": variant.path,
        }
        bounded = limits
        if variant.weight_bytes is not None and case.structure is not None:
            sizes = case.in_features, case.out_features, dtype.itemsize
            facts["bytes"] += variant.weight_bytes
            facts["bytes"] -= case.copies * case.structure.weight_bytes(*sizes)
            bounded = None  # other units multiply, whose ceiling is another
        try:
            found = _measure(variant, sets, right, replays)
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            row = Row(**facts, error=f"{type(error).__name__}: {text[0]}"[:200])
            _check_alive(device, row)
        else:
            if bounded is not None:
                bound = cost.seconds(bounded) * 1e6
                found["bound_us"] = significant(bound)
                if "median_us" in found:
                    found["percent_of_bound"] = significant(100 * bound / found["median_us"], 3)
            row = Row(**facts, **found)
        if variant.impl == "ref":
            refs.append(row)
            continue
        yield from _fastest(refs)
        refs.clear()
        yield row
    yield from _fastest(refs)


def _check_alive(device: torch.device, row: Row) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        where = f"{row.layer}, {row.tokens} tokens, {row.impl}"
        raise RuntimeError(f"the GPU is unusable after {where}: {row.error}") from error
