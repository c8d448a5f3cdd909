"""Run a comparison without the page: `python -m app.engine --model demo-dit`.

Prints the summary table and the verdict, and writes the report as JSON. Needs no Gradio.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from app import report as reports
from app.engine import (
    BACKENDS,
    ClassifyJob,
    Compiling,
    Engine,
    Failed,
    GenerateJob,
    Job,
    Loading,
    Ready,
    Result,
    Step,
    backend_info,
)
from app.engine.jobs import DtypeName, VariantId

_PROBE_S = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 if every chosen backend gave a result."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        job = _job(options)
        with Engine(options.device, max_models=options.max_models) as engine:
            engine.wait_ready(_PROBE_S)
            console.print(f"{engine.device_info()['name']}, {job.model}, {job.task}")
            backends = _backends(options, engine, job, console)
            made, pictures, failures = _follow(engine, job, backends, console, options.json)
    except (ValueError, TypeError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    if not made:
        return 1
    report = reports.build(made, pictures, failures)
    console.print(_table(report))
    console.print(report["verdict"], markup=False)
    if options.pictures:
        _save(pictures, Path(options.pictures))
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app.engine", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="id of a model, or the folder of one")
    add("--task", choices=["generate", "classify"], help="by default what the model does")
    add("--untrained", action="store_true", help="random weights, for timing only")
    add("--backends", help="comma-separated ids; by default all that can run here")
    add("--device", default="cpu", help="cpu or cuda:N")
    add("--variant", default="blast", choices=get_args(VariantId))
    add("--dtype", choices=get_args(DtypeName), help="by default that of the device")
    add("--max-models", type=int, default=1, help="workers that stay loaded beside each other")
    add("--json", metavar="FILE", help="where to write the report")
    generate = parser.add_argument_group("generate")
    generate.add_argument("--class-id", type=int, default=0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--steps", type=int, default=25)
    generate.add_argument("--guidance", type=float, default=4.0)
    generate.add_argument("--images", type=int, default=1)
    generate.add_argument("--no-fuse-qkv", action="store_true", help="leave q, k and v apart")
    generate.add_argument("--pictures", metavar="FOLDER", help="where to write the pictures")
    classify = parser.add_argument_group("classify")
    classify.add_argument("--image", metavar="FILE", help="by default a plain test picture")
    classify.add_argument("--repeats", type=int, default=30)
    classify.add_argument("--warmup", type=int, default=3)
    classify.add_argument("--batch", type=int, default=1)
    return parser


def _job(options: argparse.Namespace) -> Job:
    from model_zoo.registry import get_model

    task = options.task or get_model(options.model).task
    if task == "generate":
        return GenerateJob(
            model=options.model,
            variant=options.variant,
            class_id=options.class_id,
            seed=options.seed,
            steps=options.steps,
            guidance=options.guidance,
            images=options.images,
            untrained=options.untrained,
            dtype=options.dtype,
            fuse_qkv=not options.no_fuse_qkv,
            preview_every=0,
        )
    return ClassifyJob(
        model=options.model,
        variant=options.variant,
        image=_picture(options.image),
        repeats=options.repeats,
        warmup=options.warmup,
        batch=options.batch,
        untrained=options.untrained,
        dtype=options.dtype,
    )


def _picture(path: str | None) -> bytes:
    """The PNG of a picture file, or of a smooth test picture."""
    from PIL import Image

    from model_zoo.images import open_image

    image = open_image(path) if path else Image.radial_gradient("L").convert("RGB")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _backends(options: argparse.Namespace, engine: Engine, job: Job, console: Console) -> list[str]:
    if options.backends:
        return [backend.strip() for backend in options.backends.split(",")]
    statuses = engine.backend_status(job.model, job.variant, untrained=job.untrained)
    for status in statuses:
        if not status.available:
            console.print(f"{status.id} cannot run here: {status.reason}", markup=False)
    return [status.id for status in statuses if status.available]


def _write(path: str, report: reports.Report) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _follow(
    engine: Engine, job: Job, backends: list[str], console: Console, path: str | None
) -> tuple[list[dict[str, Any]], dict[str, list[bytes]], dict[str, str]]:
    made: list[dict[str, Any]] = []
    pictures: dict[str, list[bytes]] = {}
    failures: dict[str, str] = {}
    for event in engine.run(job, backends):
        match event:
            case Loading():
                console.print(f"[{event.t:6.1f} s] {event.backend}: loading", markup=False)
            case Compiling():
                console.print(
                    f"[{event.t:6.1f} s] {event.backend}: compiling, "
                    f"about {event.expected_s:.0f} s",
                    markup=False,
                )
            case Ready():
                console.print(
                    f"[{event.t:6.1f} s] {event.backend}: {event.parameters / 1e6:.1f} M "
                    f"parameters, {event.weights_bytes / 2**20:.1f} MiB, loaded in "
                    f"{event.load_s:.1f} s, compiled in {event.compile_s:.1f} s",
                    markup=False,
                )
            case Step() if event.index == event.total:
                console.print(
                    f"[{event.t:6.1f} s] {event.backend}: {event.total} timed", markup=False
                )
            case Result():
                made.append(event.report)
                if event.images:
                    pictures[event.backend] = event.images
                if path:
                    # After every backend, so that an interrupted comparison keeps what it has.
                    _write(path, reports.build(made, pictures, failures))
                for class_id, label, share in event.top or []:
                    console.print(f"    {share:6.1%}  {label} ({class_id})", markup=False)
            case Failed():
                failures[event.backend] = event.message
                if path and made:
                    _write(path, reports.build(made, pictures, failures))
                title = backend_info(event.backend).title
                console.print(f"{title} failed: {event.message}", style="red", markup=False)
    return made, pictures, failures


def _table(report: reports.Report) -> Table:
    table = Table(*reports.SUMMARY_COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in reports.summary_rows(report):
        table.add_row(*row)
    return table


def _save(pictures: dict[str, list[bytes]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for backend in (info.id for info in BACKENDS):
        for index, data in enumerate(pictures.get(backend, [])):
            (folder / f"{backend}-{index}.png").write_bytes(data)


if __name__ == "__main__":
    raise SystemExit(main())
