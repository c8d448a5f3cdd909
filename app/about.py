"""The tabs that explain: what a model is, and what this machine can do."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import gradio as gr

from app.cards import parameter_count
from app.context import Context, refusal
from app.controls import default_variant, variant_choices, variant_title
from app.engine import BACKENDS
from blr_kernels.structures import structure_from_dict
from model_zoo.headers import read_config
from model_zoo.registry import ModelEntry

_POLL_S = 0.5


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f'<dl class="facts">{body}</dl>'


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> str:
    """A plain table; one sentence where it would be empty."""
    if not rows:
        return f'<p class="quiet">{escape(empty)}</p>'
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="summary left"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# ---- Model


def layer_rows(config: dict[str, Any]) -> list[list[str]]:
    """One row a converted layer, from a checkpoint's metadata."""
    rows = []
    for name, layer in config.get("layers", {}).items():
        structure = structure_from_dict(layer["structure"])
        size_in, size_out = layer["in_features"], layer["out_features"]
        before = size_in * size_out
        after = structure.parameter_count(size_in, size_out)
        error = layer.get("relative_error")
        rows.append(
            [
                name,
                f"{size_in} → {size_out}",
                str(structure),
                f"{before:,}",
                f"{after:,}",
                f"{after / before:.0%}",
                "–" if error is None else f"{error:.3f}",
            ]
        )
    return rows


def model_text(entry: ModelEntry, variant_id: str) -> str:
    """What a model is, and how its variant is built, without loading it."""
    variant = next((v for v in entry.variants if v.id == variant_id), None)
    rows = [
        ("Task", {"generate": "pictures by class", "classify": "classes of a picture"}[entry.task]),
        ("Source", "comes with BLR Lab" if entry.bundled else entry.source),
        ("Licence", entry.licence),
        ("Classes", f"{len(entry.labels()):,}"),
        ("Weights", "bundled" if entry.bundled else "here" if entry.available() else "not here"),
    ]
    if not entry.available():
        rows.append(("How to get them", entry.how_to_get()))
    layers: list[list[str]] = []
    empty = (
        f"This variant is not here. Make it with: blr-lab convert {entry.id} "
        f"--structure {variant_id}"
    )
    if variant is not None and variant.path is not None:
        try:
            config = read_config(variant.path)
            layers = layer_rows(config)
        except (OSError, ValueError) as error:
            empty = str(error)
    if variant is not None:
        rows.append(("Variant", variant_title(variant)))
    title = f'<h3 class="section">{escape(entry.title)}</h3>'
    table = grid(
        ("layer", "in → out", "structure", "dense", "BLR", "kept", "relative error"),
        layers,
        empty,
    )
    total = ""
    if layers:
        before = sum(int(row[3].replace(",", "")) for row in layers)
        after = sum(int(row[4].replace(",", "")) for row in layers)
        total = (
            f'<p class="footnote">{len(layers)} converted layers: '
            f"{parameter_count(before)} parameters become {parameter_count(after)}, "
            f"{after / before:.0%} kept. The relative error is that of the factorization, "
            "before any further training.</p>"
        )
    return f'{title}{facts(rows)}<h3 class="section">Converted layers</h3>{table}{total}'


def model_tab(context: Context) -> None:
    """Build the tab inside the current `gr.Tab`."""
    entry = context.models.first("generate")
    with gr.Row(elem_classes=["task"]):
        with gr.Column(elem_classes=["card", "controls"], scale=0, min_width=276):
            model = gr.Dropdown(
                [(item.title, item.id) for item in context.models.all()],
                value=entry.id, label="Model", elem_id="about-model",
            )  # fmt: skip
            structure = gr.Dropdown(
                variant_choices(entry), value=default_variant(entry),
                label="Structure · converted layers kept", elem_id="about-structure",
            )  # fmt: skip
            gr.HTML(
                '<p class="explain">Read from the checkpoint’s header; no weights are loaded.</p>'
            )
        with gr.Column(elem_classes=["card", "results", "reading"], min_width=0):
            text = gr.HTML(model_text(entry, default_variant(entry)), elem_id="about-text")

    def choose(model_id: Any, structure_id: Any) -> list[Any]:
        try:
            chosen = context.models.get(model_id)
        except ValueError as error:
            raise refusal(error) from None
        known = [variant.id for variant in chosen.variants]
        picked = structure_id if structure_id in known else default_variant(chosen)
        return [
            gr.Dropdown(choices=variant_choices(chosen), value=picked),
            model_text(chosen, picked),
        ]

    gr.on(
        [model.input, structure.input], choose, [model, structure], [structure, text],
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip


# ---- About this machine


def until_ready(context: Context, seconds: float) -> Iterator[dict[str, Any]]:
    """What is known of the device, again each time that it changes, until all is known."""
    deadline = time.monotonic() + seconds
    last: dict[str, Any] | None = None
    while True:
        info = context.engine.device_info()
        if info != last:
            yield info
            last = info
        if info.get("ready") or info.get("error") or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def machine(context: Context, info: dict[str, Any]) -> str:
    """Device, versions and backends, with the reason for each that cannot run."""
    total, free = info.get("memory_total_mib"), info.get("memory_free_mib")
    memory = "not known yet"
    if total is not None and free is not None:
        memory = f"{free / 1024:.1f} of {total / 1024:.1f} GiB free"
    rows = [
        ("Device", f"{info.get('name') or info.get('device')} ({info.get('device')})"),
        ("Memory", memory),
        ("System", f"{platform.system()} {platform.release()}, {platform.machine()}"),
    ]
    rows += [(name, str(version)) for name, version in (info.get("versions") or {}).items()]
    rows.append(("gradio", gr.__version__))
    # Asked for untrained weights, so that only the machine is a reason.
    entry = next(entry for entry in context.models.all() if entry.untrained)
    status = {item.id: item for item in context.status(entry.id, default_variant(entry), True)}
    backends = [
        [
            item.title,
            item.description,
            "not known yet"
            if item.id not in status
            else "runs here"
            if status[item.id].available
            else status[item.id].reason,
        ]
        for item in BACKENDS
    ]
    return (
        f'<h3 class="section">This machine</h3>{facts(rows)}'
        f'<h3 class="section">Backends</h3>'
        f"{grid(('backend', 'what runs', 'on this machine'), backends, '')}"
    )


def machine_tab(context: Context) -> gr.HTML:
    """Build the tab inside the current `gr.Tab`; returns the component that holds it."""
    with gr.Column(elem_classes=["card", "reading", "alone"]):
        return gr.HTML(machine(context, context.engine.device_info()), elem_id="machine")
