"""Searches the fastest path and config for one call, and writes what it found."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from blr_kernels.bench.cases import Case
from blr_kernels.bench.operands import Operands, draw, errors, expected, set_count
from blr_kernels.bench.report import significant
from blr_kernels.ops.paths import Call, Config, Path, execute, paths
from blr_kernels.quantize import quantize_blast
from blr_kernels.structures import Blast, LowRank, Monarch, Structure
from blr_kernels.tuning import lookup
from blr_kernels.tuning.lookup import Entry, Result

Timer = Callable[[Sequence[Callable[[], object]], int], float]
"""``timer(calls, replays)``: median microseconds of one of the calls, which differ in operands."""

LARGEST_RMS = {torch.float16: 4e-3, torch.bfloat16: 4e-3, torch.float32: 1e-4}
LARGEST_ERROR = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float32: 1e-3}
INT8_RMS, INT8_ERROR = 2e-2, 4e-2
"""Errors relative to fp32 beyond which a config counts as wrong, however fast it is."""

_QUICK_REPLAYS = 5
_REPLAYS = 15
_FINALISTS = 3
_MOST_SETS = 256


@dataclass(frozen=True)
class Trial:
    """What became of one config.

    Attributes:
        path: name of the path.
        config: its launch sizes.
        us: median microseconds of a call, None if it failed.
        rms: RMS error relative to fp32, None if it did not run.
        error: why it does not count, "" if it does.
    """

    path: str
    config: Config
    us: float | None = None
    rms: float | None = None
    error: str = ""


def structure_of(op: str, blocks: int, rank: int) -> Structure:
    """The structure that an op's name, blocks and rank stand for.

    Raises:
        ValueError: for an unknown op, or sizes that do not fit.
    """
    if op == "low_rank":
        return LowRank(rank)
    if op == "monarch":
        return Monarch(blocks, rank)
    if op in ("blast", "blast_int8"):
        return Blast(blocks, rank)
    raise ValueError(f"op must be one of blast, blast_int8, monarch, low_rank, got {op!r}")


def largest_errors(call: Call) -> tuple[float, float]:
    """RMS and largest error relative to fp32 beyond which an output of ``call`` is wrong."""
    if call.op == "blast_int8":
        return INT8_RMS, INT8_ERROR
    return LARGEST_RMS[call.dtype], LARGEST_ERROR[call.dtype]


def case_of(call: Call) -> Case:
    """The call as a case of the benchmark."""
    structure = structure_of(call.op, call.blocks, call.rank)
    return Case("tuned", structure, call.in_features, call.out_features, call.tokens)


def graph_timer(calls: Sequence[Callable[[], object]], replays: int) -> float:
    """Times on the current CUDA device, by replays of a graph."""
    from blr_kernels.bench.timing import time_calls

    return time_calls(calls, replays).median_us


def able(call: Call, only: Sequence[str] = ()) -> list[Path]:
    """The paths that can take the call, of those named in ``only`` if any are."""
    return [
        path
        for path in paths(call.op)
        if (not only or path.name in only) and not path.why_not(call)
    ]


def _as_taken(op: str, operands: Operands) -> Operands:
    """The operands with factors as the paths of ``op`` take them."""
    if op != "blast_int8":
        return operands
    factors = tuple(tuple(quantize_blast(*of_copy)) for of_copy in operands.factors)
    return replace(operands, factors=factors, stacked=())


class _Bench:
    """One call on its sets of operands: checks a config, and times it."""

    def __init__(self, call: Call, device: torch.device, sets: int, timer: Timer) -> None:
        case = case_of(call)
        self.call = call
        self.timer = timer
        first = draw(case, device, call.dtype)
        self.right = [y + b for y, b in zip(expected(case, first), first.biases, strict=True)]
        others = (draw(case, device, call.dtype, seed) for seed in range(1, sets))
        self.sets = [_as_taken(call.op, operands) for operands in chain([first], others)]
        self.outputs = [s.x.new_empty((call.tokens, call.out_features)) for s in self.sets]

    def run(self, path: Path, config: Config, operands: Operands, out: Tensor) -> None:
        execute(
            path,
            self.call,
            operands.x,
            operands.factors[0],
            operands.biases[0],
            None,
            out,
            config,
        )

    def check(self, path: Path, config: Config) -> tuple[float, str]:
        """RMS error of the first set's output, and what is wrong with it ("" if nothing is)."""
        out = self.outputs[0].fill_(torch.nan)  # so that what a kernel leaves out shows
        self.run(path, config, self.sets[0], out)
        rms, largest = errors([out], self.right)
        most_rms, most = largest_errors(self.call)
        if rms > most_rms or largest > most:
            return rms, f"wrong: error {rms:.1e} RMS, {largest:.1e} at most"
        return rms, ""

    def time(self, path: Path, config: Config, replays: int) -> float:
        calls = [
            partial(self.run, path, config, operands, out)
            for operands, out in zip(self.sets, self.outputs, strict=True)
        ]
        return self.timer(calls, replays)

    def trial(self, path: Path, config: Config, replays: int) -> Trial:
        """Checks and times one config; what it raises becomes the trial's error."""
        tried = Trial(path.name, dict(config))
        try:
            rms, wrong = self.check(path, config)
            if wrong:
                return replace(tried, rms=rms, error=wrong)
            return replace(tried, rms=rms, us=self.time(path, config, replays))
        # A config may fail in the compiler, the assembler or the driver, each with errors of its
        # own; the search goes on with the others.
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            return replace(tried, error=f"{type(error).__name__}: {text[0]}"[:200])


def _us(trial: Trial) -> float:
    return float("inf") if trial.us is None else trial.us


def _part(key: str) -> str:
    return key.partition("_")[0]


def combined(default: Trial, trials: Sequence[Trial]) -> Config | None:
    """The default config with each part as in the fastest trial that changed that part alone.

    None if fewer than two parts change, so that there is nothing to combine.
    """
    best: dict[str, Trial] = {}
    for trial in sorted(trials, key=_us, reverse=True):
        changed = {_part(k) for k, value in trial.config.items() if value != default.config.get(k)}
        if len(changed) == 1 and _us(trial) < _us(default):
            best[changed.pop()] = trial
    if len(best) < 2:
        return None
    return {
        key: (best[_part(key)].config if _part(key) in best else default.config)[key]
        for key in default.config
    }


def _search(path: Path, bench: _Bench) -> Iterator[Trial]:
    """All trials of one path; the last of a config is the one that counts."""
    candidates: list[Config] = [dict(path.default_config(bench.call))]
    for candidate in path.candidates(bench.call):
        if candidate not in candidates:
            candidates.append(dict(candidate))
    quick: list[Trial] = []
    for config in candidates:
        quick.append(bench.trial(path, config, _QUICK_REPLAYS))
        if quick[-1].error:
            yield quick[-1]
    finalists = sorted((t for t in quick if not t.error), key=_us)[:_FINALISTS]
    configs = [trial.config for trial in finalists]
    if path.separable and (both := combined(quick[0], quick)) is not None and both not in configs:
        configs.append(both)
    for config in configs:
        yield bench.trial(path, config, _REPLAYS)


def tune(
    call: Call,
    device: torch.device,
    *,
    only: Sequence[str] = (),
    timer: Timer = graph_timer,
    tell: Callable[[Trial], None] | None = None,
) -> Entry | None:
    """Finds the fastest config of every path for one call, among those whose output is right.

    Args:
        call: what to tune; its device limits are those of ``device``.
        device: where it runs.
        only: names of the paths to try, all if there are none.
        timer: how a config is timed.
        tell: gets every trial that counts or failed.

    Returns:
        The entry, None if no config of any path was right.

    Raises:
        RuntimeError: if a failure left the GPU unusable.
    """
    cost = case_of(call).cost(call.itemsize)
    # Factors of 8 bits are half as large as those of 16, so that twice as many pass the cache.
    size = cost.bytes // 2 if call.op == "blast_int8" else cost.bytes
    sets = min(set_count(size), _MOST_SETS) if device.type == "cuda" else 1
    bench = _Bench(call, device, sets, timer)
    found: dict[str, Result] = {}
    for path in able(call, only):
        for trial in _search(path, bench):
            if tell is not None:
                tell(trial)
            if trial.error:
                _check_alive(device, trial)
            elif trial.us is not None and trial.rms is not None:
                best = found.get(path.name)
                if best is None or trial.us < best.us:
                    found[path.name] = Result(trial.config, trial.us, trial.rms)
    if not found:
        return None
    return _entry(found)


def _entry(results: dict[str, Result]) -> Entry:
    return Entry(min(results, key=lambda name: results[name].us), results)


def _check_alive(device: torch.device, trial: Trial) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise RuntimeError(
            f"the GPU is unusable after path {trial.path} with {dict(trial.config)}: {trial.error}"
        ) from error


def compile_part(
    calls: Sequence[Call], device: torch.device, only: Sequence[str], part: int, parts: int
) -> None:
    """Runs every ``parts``-th config once, so that compilers of several processes work at once.

    What they compile is kept in Triton's own cache, where the search then finds it.
    """
    index = 0
    for call in calls:
        bench: _Bench | None = None
        for path in able(call, only):
            for config in path.candidates(call):
                index += 1
                if index % parts != part:
                    continue
                if bench is None:
                    bench = _Bench(call, device, 1, lambda calls, replays: 0.0)
                bench.trial(path, config, 0)


def _to_json(entry: Entry) -> dict[str, Any]:
    results = {
        name: {
            "config": dict(entry.paths[name].config),
            "us": significant(entry.paths[name].us, 4),
            "rms": significant(entry.paths[name].rms, 3),
        }
        for name in entry.ranked()
    }
    best = results[entry.path]
    return {"path": entry.path, "config": best["config"], "us": best["us"], "paths": results}


def _text(head: dict[str, Any], entries: dict[int, Entry]) -> str:
    """JSON with one line for each path's result, so that a change of one shows as one line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    blocks = []
    for tokens in sorted(entries):
        data = _to_json(entries[tokens])
        results = data.pop("paths")
        fields = [f"      {json.dumps(key)}: {json.dumps(value)}," for key, value in data.items()]
        rows = [f"        {json.dumps(name)}: {json.dumps(row)}" for name, row in results.items()]
        inner = "\n".join([*fields, '      "paths": {', ",\n".join(rows), "      }"])
        blocks.append(f'    "{tokens}": {{\n{inner}\n    }}')
    body = ",\n".join(blocks)
    return "{\n" + "\n".join(lines) + '\n  "entries": {\n' + body + "\n  }\n}\n"


def save(call: Call, entry: Entry, folder: FilePath, *, keep: bool = False) -> FilePath:
    """Adds an entry to its layer's file below ``folder``, replacing that of the same tokens.

    The file is replaced as a whole, so a reader never sees half of one.

    Args:
        call, entry: what was tuned, and what was found.
        folder: of configs.
        keep: keep what is known of other paths than those of the new entry.

    Returns:
        The file.
    """
    head = lookup.header(call)
    file = folder / lookup.file_name(call)
    entries = lookup.read(file, head, "cache")
    old = entries.get(call.tokens) or lookup.entries(call).get(call.tokens)
    if keep and old is not None:
        entry = _entry({**old.paths, **entry.paths})
    entries[call.tokens] = entry
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(_text(head, entries))
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
    return file
