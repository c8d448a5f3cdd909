"""Controls that both tasks have: model, backends to compare, structure, untrained weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from app.cards import duration
from app.context import Context
from app.engine import BACKENDS, BackendId, BackendStatus
from model_zoo.headers import read_config
from model_zoo.registry import ModelEntry, Variant


def model_choices(context: Context, task: str) -> list[tuple[str, str]]:
    """Title and id of each model of the task."""
    return [(entry.title, entry.id) for entry in context.models.for_task(task)]


def variant_title(variant: Variant) -> str:
    """A variant in words, from its file's header: "BLAST · 9 blocks · 50% kept"."""
    if variant.path is None:
        return variant.title
    try:
        layers = list(read_config(variant.path)["layers"].values())
        dense = sum(layer["in_features"] * layer["out_features"] for layer in layers)
        kept = sum(layer["parameters"] for layer in layers) / dense
        blocks = {layer["structure"].get("blocks") for layer in layers} - {None}
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return variant.title
    parts = [variant.title]
    if len(blocks) == 1:
        parts.append(f"{blocks.pop()} blocks")
    return " · ".join([*parts, f"{kept:.0%} kept"])


def variant_choices(entry: ModelEntry) -> list[tuple[str, str]]:
    """Title and id of each variant that the model has."""
    return [(variant_title(variant), variant.id) for variant in entry.variants]


def default_variant(entry: ModelEntry) -> str:
    """BLAST, or the first variant of a model that has others only."""
    ids = [variant.id for variant in entry.variants]
    return "blast" if "blast" in ids or not ids else ids[0]


def hint(status: BackendStatus | None) -> str | None:
    """The small line under a backend: why it is grey, or what its first run costs."""
    if status is None:
        return None
    if not status.available:
        return status.reason.split(". ")[0]
    if status.compile_s:
        return f"first run compiles, about {duration(max(1.0, float(round(status.compile_s))))}"
    return None


def compare_boxes(status: Sequence[BackendStatus], ticked: Sequence[str]) -> list[gr.Checkbox]:
    """One box a backend, in the colour it has everywhere; greyed where it cannot run."""
    known = {entry.id: entry for entry in status}
    boxes = []
    for info in BACKENDS:
        entry = known.get(info.id)
        available = entry is None or entry.available
        boxes.append(
            gr.Checkbox(
                label=info.title,
                info=hint(entry),
                value=info.id in ticked and available,
                interactive=available,
                container=False,
                elem_id=None,
                elem_classes=["backend-box", f"box-{info.id}"],
            )
        )
    return boxes


def box_updates(
    status: Sequence[BackendStatus], ticks: Sequence[bool], default: Sequence[str]
) -> list[Any]:
    """What changes on the boxes when the model or the machine turns out otherwise.

    Ticks stay where their backend can run; where none is left, the default ones are ticked.
    """
    known = {entry.id: entry for entry in status}
    can = [info.id not in known or known[info.id].available for info in BACKENDS]
    kept = [bool(ticked) and able for ticked, able in zip(ticks, can, strict=True)]
    if not any(kept):
        kept = [info.id in default and able for info, able in zip(BACKENDS, can, strict=True)]
    return [
        gr.Checkbox(value=value, interactive=able, info=hint(known.get(info.id)) or "")
        for info, value, able in zip(BACKENDS, kept, can, strict=True)
    ]


def ticked_ids(ticks: Sequence[bool]) -> list[BackendId]:
    """Ids of the ticked backends; `ticks` is in the order of `BACKENDS`."""
    return [info.id for info, ticked in zip(BACKENDS, ticks, strict=True) if ticked]


def can_waive(entry: ModelEntry) -> bool:
    """Whether a model without its weights can run with untrained ones, for timing."""
    return bool(entry.untrained) and not entry.available()


def missing_note(entry: ModelEntry) -> str:
    """How to get weights that are not here; empty for those that are."""
    if entry.available():
        return ""
    return f'<p class="missing">{escape(entry.how_to_get())}</p>'


def card_updates(ticks: Sequence[bool]) -> list[Any]:
    """Cards of the ticked backends are shown."""
    return [gr.Column(visible=bool(ticked)) for ticked in ticks]


@dataclass(frozen=True)
class Controls:
    """The components that both tabs have on the left."""

    model: gr.Dropdown
    note: gr.HTML
    untrained: gr.Checkbox
    structure: gr.Dropdown
    boxes: list[gr.Checkbox]
    run: gr.Button
    stop: gr.Button


def model_controls(context: Context, task: str) -> tuple[gr.Dropdown, gr.HTML, gr.Checkbox]:
    """The model, how to get it where it is not here, and the waiver of its weights."""
    entry = context.models.first(task)
    model = gr.Dropdown(
        model_choices(context, task), value=entry.id, label="Model", elem_id=f"{task}-model"
    )
    note = gr.HTML(missing_note(entry), visible=not entry.available())
    untrained = gr.Checkbox(
        label="untrained weights, for timing only",
        value=False,
        container=False,
        visible=can_waive(entry),
        elem_classes=["untrained-box"],
        elem_id=f"{task}-untrained",
    )
    return model, note, untrained


def compare_controls(context: Context, task: str) -> tuple[list[gr.Checkbox], gr.Dropdown]:
    """The backends to compare, and the structure of the BLR ones."""
    entry = context.models.first(task)
    variant = default_variant(entry)
    gr.HTML('<p class="group">Compare</p>')
    with gr.Column(elem_classes=["compare"], elem_id=f"{task}-compare"):
        boxes = compare_boxes(context.status(entry.id, variant), context.default_ticks)
    structure = gr.Dropdown(
        variant_choices(entry),
        value=variant,
        label="Structure · converted layers kept",
        elem_id=f"{task}-structure",
    )
    return boxes, structure


def run_controls(task: str, same: str) -> tuple[gr.Button, gr.Button]:
    """Run, Stop and one calm line; `same` is what all backends start from."""
    with gr.Row(elem_classes=["actions"]):
        run = gr.Button("Run", variant="primary", min_width=0, elem_id=f"{task}-run")
        stop = gr.Button("Stop", interactive=False, scale=0, min_width=72, elem_id=f"{task}-stop")
    gr.HTML(
        f'<p class="explain">Same {same} for every backend. '
        "They run one after another on this device.</p>"
    )
    return run, stop
