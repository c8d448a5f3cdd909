"""`blr-lab convert`: a dense checkpoint becomes a file of block low-rank factors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from blr_kernels.structures import structure_from_dict
from model_zoo.checkpoint import save_variant
from model_zoo.convert import Rule, convert_
from model_zoo.dit import BLOCKS, dit_rules, load_dit
from model_zoo.registry import ModelEntry, get_model
from model_zoo.vit import load_vit, vit_rules

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
    """What becomes of each layer: by rank, or by the share of parameters to save.

    Raises:
        ValueError: both or values that no structure can have.
    """
    if rank is not None and fraction is not None:
        raise ValueError("give either a rank or a fraction, not both")
    if structure == "low_rank" and blocks is not None:
        raise ValueError("low_rank has no blocks")
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


def check_target(path: Path) -> None:
    """Find out before hours of work whether a file can be written where it belongs.

    Raises:
        ValueError: something else than a file is there, a folder or a device.
        OSError: its folder can neither be made nor written to.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is there and is no file; choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=path.parent):
        pass


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
    console: Console | None = None,
) -> Path:
    """Convert a model and write its variant; returns the file.

    Raises:
        ValueError: the model, the structure or the file cannot be used; one line.
    """
    show = console or Console()
    entry = get_model(source)
    path = entry.variant_path(structure) if out is None else out
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; choose another with --out, or pass --overwrite")
    for target in [path] if report is None else [path, report]:
        check_target(target)
    rules = rules_for(
        entry, structure=structure, blocks=blocks, rank=rank, fraction=fraction, layers=layers
    )
    with show.status(f"Loading {entry.title}"):
        model = load_dit(entry).transformer if entry.task == "generate" else load_vit(entry).model
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=show) as bar:
        task = bar.add_task("Factorizing", total=None)

        def progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name or "Factorized")

        done = convert_(model, rules, progress=progress)
    show.print(str(done), soft_wrap=True, highlight=False, markup=False)
    save_variant(path, model, base=entry.id, report=done)
    if report is not None:
        done.save_json(report)
    show.print(f"Written: {path} ({path.stat().st_size / 2**20:.1f} MiB)", highlight=False)
    return path
