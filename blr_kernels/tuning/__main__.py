"""``python -m blr_kernels.tuning``: tunes layers for the GPU at hand."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from blr_kernels.ops.paths import Call
    from blr_kernels.tuning.search import Trial

OPS = ("blast", "blast_int8", "monarch", "low_rank")
DTYPES = ("bfloat16", "float16", "float32")


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m blr_kernels.tuning",
        description="Times every path and launch config that can run a layer, on this GPU, and "
        "keeps the fastest right ones where later calls find them.",
    )
    add = made.add_argument
    layer = made.add_argument_group("one layer")
    layer.add_argument("--op", choices=OPS)
    layer.add_argument("--in", dest="in_features", type=int, metavar="N")
    layer.add_argument("--out", dest="out_features", type=int, metavar="N")
    layer.add_argument("--blocks", type=int, default=1, metavar="B", help="1 for low_rank")
    layer.add_argument("--rank", type=int, metavar="R")
    many = made.add_argument_group("many layers")
    many.add_argument(
        "--cases",
        action="store_true",
        help="all layers of the benchmark but its grouped launches, which are not tuned",
    )
    many.add_argument("--layers", nargs="+", default=[], metavar="NAME",
        help="only these of the benchmark's, such as 'dit.*'; implies --cases")  # fmt: skip
    many.add_argument("--ops", nargs="+", choices=OPS, default=[], help="only these ops")
    add("--tokens", type=int, nargs="+", default=[], metavar="N",
        help="rows of the input; of the benchmark's only these")  # fmt: skip
    add("--dtype", choices=DTYPES, default=DTYPES[0])
    add("--paths", nargs="+", default=[], metavar="NAME",
        help="only these paths; what others have stays as it was")  # fmt: skip
    add("--device", default="cuda:0")
    add("--out-dir", type=Path, metavar="DIR", help="instead of the user's cache folder")
    add("--jobs", type=int, default=1, metavar="N",
        help="processes that compile everything before any timing (%(default)s)")  # fmt: skip
    add("--failures", action="store_true", help="print configs that failed too")
    add("--part", type=int, help=argparse.SUPPRESS)  # which of the processes of --jobs
    return made


def _sizes(arguments: argparse.Namespace) -> list[tuple[str, int, int, int, int, int]]:
    """(op, in, out, blocks, rank, tokens) of all calls to tune.

    Raises:
        ValueError: if the arguments do not say which, or do not fit one another.
    """
    from blr_kernels.structures import LowRank

    if arguments.cases or arguments.layers:
        from blr_kernels.bench.cases import select

        if arguments.op is not None:
            raise ValueError("give either --op with its sizes, or --cases or --layers")
        ops = arguments.ops or OPS
        kinds = [op.removesuffix("_int8") for op in ops]
        found = [
            (
                op,
                case.in_features,
                case.out_features,
                1 if isinstance(case.structure, LowRank) else case.structure.blocks,
                case.structure.rank,
                case.tokens,
            )
            for case in select(arguments.layers, arguments.tokens, kinds)
            if case.structure is not None and case.copies == 1
            for op, kind in zip(ops, kinds, strict=True)
            if kind == case.structure.kind
        ]
        return list(dict.fromkeys(found))
    sizes = (arguments.in_features, arguments.out_features, arguments.rank)
    if arguments.op is None or None in sizes or not arguments.tokens:
        raise ValueError("give --op, --in, --out, --rank and --tokens, or --cases or --layers")
    return [
        (arguments.op, sizes[0], sizes[1], arguments.blocks, sizes[2], tokens)
        for tokens in dict.fromkeys(arguments.tokens)
    ]


def _device(name: str) -> torch.device:
    """The GPU of that name.

    Raises:
        ValueError: if there is none, or Triton cannot be imported.
    """
    import torch

    from blr_kernels.ops import triton_available

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be cuda:N, got {name!r}") from None
    if device.type != "cuda":
        raise ValueError(f"--device must be a CUDA device: configs are timed on it, got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError("no NVIDIA GPU was found, and configs are tuned by timing them on one")
    if (device.index or 0) >= count:
        raise ValueError(f"--device must be below cuda:{count}, got {name!r}")
    usable, reason = triton_available()
    if not usable:
        raise ValueError(reason)
    torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


def _calls(arguments: argparse.Namespace, device: torch.device) -> list[Call]:
    """The calls to tune.

    Raises:
        ValueError: if sizes do not fit.
    """
    import torch

    from blr_kernels.ops.paths import Call, limits_of, paths
    from blr_kernels.tuning.search import structure_of

    found = []
    for op, n_in, n_out, blocks, rank, tokens in _sizes(arguments):
        structure = structure_of(op, blocks, rank)
        if tokens < 1:
            raise ValueError(f"--tokens must be at least 1, got {tokens}")
        # The kernels get padded layers.
        padded = structure.padded(n_in, n_out)
        dtype = getattr(torch, arguments.dtype)
        blocks = 1 if op == "low_rank" else blocks
        found.append(Call(op, tokens, *padded, blocks, rank, dtype, limits_of(device)))
    known = sorted({path.name for call in found for path in paths(call.op)})
    for name in arguments.paths:
        if name not in known:
            raise ValueError(f"--paths must be of {', '.join(known)}, got {name!r}")
    return found


def _compile(arguments: Sequence[str], jobs: int) -> None:
    """Lets ``jobs`` processes compile, each its part."""
    command = [sys.executable, "-m", "blr_kernels.tuning", *arguments]
    running = [
        subprocess.Popen([*command, "--jobs", str(jobs), "--part", str(part)])
        for part in range(jobs)
    ]
    for part, process in enumerate(running):
        if code := process.wait():
            print(
                f"warning: part {part} of the compilation ended with {code}; what it left is "
                f"compiled while tuning",
                file=sys.stderr,
            )


def _print_trial(trial: Trial, mark: str = " ") -> None:
    sizes = " ".join(f"{key}={value}" for key, value in trial.config.items())
    time = "-" if trial.us is None else f"{trial.us:.2f}"
    rms = "-" if trial.rms is None else f"{trial.rms:.1e}"
    print(f" {mark} {trial.path:<10} {time:>9} {rms:>8}  {trial.error or sizes}", flush=True)


def _tune(calls: Sequence[Call], device: torch.device, arguments: argparse.Namespace) -> int:
    """Tunes all calls; returns how many had no right config."""
    from blr_kernels.tuning import lookup
    from blr_kernels.tuning.search import Trial, able, save, tune

    folder = arguments.out_dir or lookup.cache_dir()
    missing = 0
    print(f"   {'path':<10} {'us':>9} {'rms':>8}  config")
    for call in calls:
        print(
            f"{call.op} {call.in_features} -> {call.out_features} b{call.blocks} r{call.rank}, "
            f"{call.tokens} tokens"
        )

        if not able(call, arguments.paths):
            print("   none of the paths can take it")
            continue

        def tell(trial: Trial) -> None:
            if arguments.failures and trial.error:
                _print_trial(trial, "!")

        entry = tune(call, device, only=arguments.paths, tell=tell)
        if entry is None:
            missing += 1
            print(" ! no config of any path gave a right output")
            continue
        for name in entry.ranked():
            result = entry.paths[name]
            mark = "*" if name == entry.path else " "
            _print_trial(Trial(name, result.config, result.us, result.rms), mark)
        file = save(call, entry, folder, keep=bool(arguments.paths))
        print(f"   in {file}")
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    try:
        device = _device(options.device)
        calls = _calls(options, device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.part is not None:
        from blr_kernels.tuning.search import compile_part

        compile_part(calls, device, options.paths, options.part, options.jobs)
        return 0
    if options.jobs > 1:
        _compile(given, options.jobs)
    return 1 if _tune(calls, device, options) else 0


if __name__ == "__main__":
    sys.exit(main())
