"""The command line of the layer benchmark. Imports no torch until something runs."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blr_kernels.bench.cases import OPS, Case, select
from blr_kernels.bench.report import HEADER, Ratios, Report, Row, line, table

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _counts(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers, got {text!r}") from None


def parser(prog: str) -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Measures single layers on a GPU: dense, low rank, PyTorch and every path of "
        "ours. Prints a table and writes one JSON file.",
    )
    add = made.add_argument
    add("--device", default="cuda:0", help="cuda:0, cuda:1, ...; cpu only with --check-only")
    add("--out", type=Path, metavar="FILE.json", help="write the report there")
    add("--plots", type=Path, metavar="DIR", help="draw it there as SVG files")
    add("--from", dest="source", type=Path, metavar="FILE.json",
        help="measure nothing; show and draw this report")  # fmt: skip
    add("--layers", type=_words, default=[], metavar="NAME,...", help="such as dit.qkv,vit.*")
    add("--tokens", type=_counts, default=[], metavar="N,...", help="only these token counts")
    add("--ops", type=_words, default=[], metavar="OP,...", help=f"of {','.join(OPS)}")
    add("--impls", type=_words, default=[], metavar="NAME,...",
        help="only these, such as dense,auto,triton; also what the plots show")  # fmt: skip
    add("--quick", action="store_true", help="only the layers of DiT and ViT")
    add("--dtype", choices=DTYPES, default=DTYPES[0])
    add("--replays", type=int, default=15, help="timed replays of each graph (%(default)s)")
    add("--compiled", action="store_true",
        help="also torch.compile, which takes long; for DiT and ViT")  # fmt: skip
    add("--ref", type=Path, metavar="DIR",
        help="also the paper's kernels, from a folder that holds its triton_funcs; "
        "for DiT and ViT")  # fmt: skip
    add("--slow-everywhere", action="store_true",
        help="--compiled and --ref for the other models too")  # fmt: skip
    add("--jobs", type=int, default=0, metavar="N",
        help="processes that compile it all before anything is timed (%(default)s)")  # fmt: skip
    add("--commit", help="shown as the commit, for a copy that is no clone")
    add("--check-only", action="store_true", help="time nothing, only check the errors")
    add("--part", metavar="I/N", help=argparse.SUPPRESS)  # one of the processes of --jobs
    return made


def _device(name: str, check_only: bool) -> torch.device:
    """The device to use.

    Raises:
        ValueError: if it is not there, or a CPU is to be timed.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be cpu or cuda:N, got {name!r}") from None
    if device.type == "cpu":
        if not check_only:
            raise ValueError("times are only taken on a GPU; --device cpu needs --check-only")
        return device
    if device.type != "cuda":
        raise ValueError(f"device must be cpu or cuda:N, got {name!r}")
    if not torch.cuda.is_available():
        raise ValueError("needs an NVIDIA GPU, and torch finds none here")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{name} is not there; torch finds {torch.cuda.device_count()} GPU(s)")
    torch.cuda.set_device(device)
    return device


def _compile_ahead(arguments: Sequence[str], jobs: int) -> None:
    """Runs every variant once in other processes, which leave their binaries in the disk caches."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "blr_kernels.bench", *arguments]
    started = [
        subprocess.Popen(
            [*command, "--part", f"{part}/{jobs}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in range(jobs)
    ]
    for part, process in enumerate(started):
        if code := process.wait():
            print(
                f"warning: part {part} of the compilation ended with {code}; what it left is "
                f"compiled while measuring",
                file=sys.stderr,
            )


def _part_of(cases: list[Case], part: str) -> list[Case]:
    index, _, count = part.partition("/")
    # Neighbours cost alike, so an even mixture makes the parts take about as long.
    random.Random(0).shuffle(cases)
    return cases[int(index) :: int(count)]


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[Report, bool]:
    """The report, and whether it came to its end."""
    cases = select(options.layers, options.tokens, options.ops, quick=options.quick)
    if options.replays < 2:
        raise ValueError(f"--replays must be at least 2, got {options.replays}")
    device = _device(options.device, options.check_only)
    if options.ref is not None and not options.ref.is_dir():
        raise ValueError(f"--ref must be a folder, got {options.ref}")

    import torch

    from blr_kernels.bench.runner import CHECK_METHOD, METHOD, measure_case, new_report

    if options.part is not None:
        cases = _part_of(cases, options.part)
    elif options.jobs > 0:
        _compile_ahead(arguments, options.jobs)
    replays = 0 if options.check_only or options.part is not None else options.replays
    method = METHOD.format(replays=replays) if replays else CHECK_METHOD
    rows: list[Row] = []
    report = replace(new_report(device, method, options.commit), rows=rows)
    finished = True
    print(HEADER, flush=True)
    try:
        for case in cases:
            slow = options.slow_everywhere or case.vision
            for row in measure_case(
                case,
                device,
                getattr(torch, options.dtype),
                replays=replays,
                compiled=options.compiled and slow,
                ref=options.ref if slow else None,
                impls=options.impls,
            ):
                rows.append(row)
                print(line(row, Ratios(rows)), flush=True)
            if options.part is None:
                # A run that is cut short has measured something too.
                _save(report, options.out)
    except RuntimeError as error:
        print(f"stopped: {error}", file=sys.stderr)
        finished = False
    return report, finished


def _save(report: Report, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.to_json(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None, prog: str = "python -m blr_kernels.bench") -> int:
    """Runs the command; returns its exit code: 2 for a mistake or no GPU, 1 if the GPU failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(prog).parse_args(arguments)
    finished = True
    try:
        if options.source is not None:
            report = Report.from_json(options.source.read_text(encoding="utf-8"))
            print(table(report))
        else:
            report, finished = _measure(options, arguments)
    except (OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    if options.part is not None:
        return 0
    _save(report, options.out)
    if options.out is not None:
        print(f"wrote {options.out}")
    if options.plots is not None:
        from blr_kernels.bench.plot import SHOWN, write_plots

        for path in write_plots(report, options.plots, options.impls or SHOWN):
            print(f"wrote {path}")
    return 0 if finished else 1
