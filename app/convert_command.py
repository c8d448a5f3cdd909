"""`blr-lab convert`: a dense checkpoint becomes a file of block low-rank factors.

What can be wrong is looked for before anything heavy is imported or loaded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from app.engine.machine import QUIET_THREADS, normal_device
from blr_kernels.structures import Structure, structure_from_dict
from model_zoo.registry import ModelEntry, get_model

if TYPE_CHECKING:
    from torch import nn

    from model_zoo.convert import Rule

_VIT_BLOCKS = {"monarch": 4, "blast": 3}


def rules_for(
    entry: ModelEntry,
    *,
    structure: str,
    blocks: int | None,
    rank: int | None,
    fraction: float | None,
    layers: str,
) -> list[Rule]:
    """What becomes of each layer: by rank, or by the share of parameters to remove.

    Raises:
        ValueError: both or values that no structure can have.
    """
    from model_zoo.dit import BLOCKS, dit_rules
    from model_zoo.vit import vit_rules

    saving = 0.5 if fraction is None else fraction
    if entry.task == "generate":
        blocks = BLOCKS if blocks is None else blocks
        rules = dit_rules(structure, layers=layers, fraction=saving, blocks=blocks)
    else:
        blocks = _VIT_BLOCKS.get(structure) if blocks is None else blocks
        rules = vit_rules(structure, layers=layers, fraction=saving, blocks=blocks)
    if rank is None:
        return rules
    sizes = {"rank": rank} if structure == "low_rank" else {"blocks": blocks, "rank": rank}
    target = structure_from_dict({"kind": structure, **sizes})
    return [rule if rule.target is None else replace(rule, target=target) for rule in rules]


def convert_model(
    source: str,
    out: Path | None,
    *,
    structure: str,
    blocks: int | None,
    rank: int | None,
    fraction: float | None,
    layers: str,
    report: Path | None,
    overwrite: bool,
    device: str = "cpu",
    max_iterations: int | None = None,
    console: Console | None = None,
) -> Path:
    """Convert a model and write its variant; returns the file.

    Args:
        source: model id or folder.
        out: file to write; None writes where the app looks for it.
        structure: "low_rank", "monarch" or "blast".
        blocks: a side, for Monarch and BLAST; None takes the paper's.
        rank: of every layer; or else
        fraction: of each layer's parameters, to be removed.
        layers: "paper" or "all".
        report: JSON file for the report, or None.
        overwrite: whether ``out`` may exist.
        device: "cpu" or "cuda:N", where the weights are factorized one at a time.
        max_iterations: sweeps of a BLAST fit at most; None takes the factorizer's.
        console: where progress and report go.

    Raises:
        OSError, ValueError: the model, the structure, a path or the device cannot be used; one
            line, before the model is loaded wherever it can be known then.
    """
    show = console or Console()
    device = normal_device(device)
    if rank is not None and fraction is not None:
        raise ValueError("give either a rank or a fraction, not both")
    if structure == "low_rank" and blocks is not None:
        raise ValueError("low_rank has no blocks")
    entry = get_model(source)
    path = entry.variant_path(structure) if out is None else out
    check_writable(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; choose another with --out, or pass --overwrite")
    if report is not None:
        check_writable(report)
        if report.absolute() == path.absolute():
            raise ValueError(f"{report} cannot hold both the variant and its report")

    calm_threads()
    import torch

    from model_zoo.checkpoint import save_variant
    from model_zoo.convert import convert_, plan
    from model_zoo.dit import load_dit
    from model_zoo.factorize import MAX_ITERATIONS
    from model_zoo.vit import load_vit

    rules = rules_for(
        entry, structure=structure, blocks=blocks, rank=rank, fraction=fraction, layers=layers
    )
    if device != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(device.removeprefix("cuda:")) >= count:
            raise ValueError(f"{device} is not here: torch sees {count} NVIDIA GPUs")
    with show.status(f"Loading {entry.title}"):
        model = load_dit(entry).transformer if entry.task == "generate" else load_vit(entry).model
    work = _work(model, plan(model, rules))
    with _progress(show) as bar:
        task = bar.add_task("", total=sum(work.values()), layers="", begun=0.0)
        costs = list(work.values())

        def progress(done: int, total: int, name: str) -> None:
            bar.update(
                task,
                completed=sum(costs[:done]),
                description=name or "Factorized",
                layers=f"{done}/{total}",
                begun=bar.tasks[0].elapsed or 0.0,
            )

        done = convert_(
            model,
            rules,
            progress=progress,
            device=device,
            max_iterations=MAX_ITERATIONS if max_iterations is None else max_iterations,
        )
    show.print(str(done), soft_wrap=True, highlight=False, markup=False)
    save_variant(path, model, base=entry.id, report=done)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        done.save_json(report)
    show.print(f"Written: {path} ({path.stat().st_size / 2**20:.1f} MiB)", highlight=False)
    return path


def calm_threads() -> None:
    """Let OpenMP's threads sleep while they wait, unless the person chose otherwise.

    Must come before torch is imported: its OpenMP reads the environment then.
    """
    for name, value in QUIET_THREADS.items():
        os.environ.setdefault(name, value)


def check_writable(path: Path) -> None:
    """Refuse a path where no file can be written, and leave nothing there.

    Raises:
        ValueError: a folder is there, or its folder takes no file; one line.
    """
    try:
        if path.exists() and not path.is_file():  # a folder, or a device that must stay
            raise ValueError(f"{path} is there and is no file; choose another")
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{path} cannot be written: it is read-only")
        folder = path.absolute().parent
        while not folder.exists():  # the missing ones will be made
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
        if len(os.fsencode(path.name)) > 250:  # ".part" is added while it is written
            raise ValueError(f"{path} cannot be written: its name is too long")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


def _work(model: nn.Module, planned: Mapping[str, Structure | None]) -> dict[str, int]:
    """About what each layer takes, in one unit: the product that a sweep or an SVD repeats."""
    sizes: dict[str, Any] = dict(model.named_modules())
    return {
        name: sizes[name].in_features * sizes[name].out_features * structure.rank
        for name, structure in planned.items()
        if structure is not None
    }


def remaining_seconds(completed: float, total: float, begun: float, elapsed: float) -> float | None:
    """Seconds that are left, from the pace so far; None before anything is done.

    Args:
        completed: work that is done.
        total: work in all.
        begun: seconds after the start when that much was done.
        elapsed: seconds after the start now, inside the next piece.
    """
    if completed <= 0:
        return None
    return max(0.0, begun / completed * (total - completed) - (elapsed - begun))


class _Remaining(ProgressColumn):
    """Time that is left; rich's own column forgets a pace of more than 30 seconds a step."""

    def render(self, task: Task) -> Text:
        begun = task.fields["begun"]
        left = remaining_seconds(task.completed, task.total or 0, begun, task.elapsed or 0.0)
        if left is None:
            return Text("estimating")
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"about {hours}:{minutes:02}:{seconds:02} left")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[layers]}"),
        TimeElapsedColumn(),
        _Remaining(),
        console=console,
    )
