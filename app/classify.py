"""The Classify tab: the classes of one picture, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from app.context import Context
from app.controls import (
    Controls,
    compare_controls,
    default_variant,
    model_controls,
    run_controls,
)
from app.engine import ClassifyJob
from app.engine.jobs import MAX_REPEATS
from app.forms import MAX_PAGE_BATCH, classify_job, read_picture, uploaded_path
from app.panel import Panel
from app.wiring import connect
from model_zoo.registry import ModelEntry, assets_dir

DEFAULT_REPEATS = 50
MAX_EXAMPLES = 6
MAX_EXAMPLE_SIZE = 256


def examples() -> list[Path]:
    """Example pictures that come with the app: the small square ones of their folder.

    The larger files beside them show samples and the page itself.
    """
    folder = assets_dir() / "examples"
    found = []
    for path in sorted(folder.glob("*.png")) if folder.is_dir() else []:
        with Image.open(path) as image:
            if image.width == image.height <= MAX_EXAMPLE_SIZE:
                found.append(path)
    return found[:MAX_EXAMPLES]


def first_job(context: Context) -> ClassifyJob | None:
    """What Run does on a page that nobody has touched; None without example pictures."""
    pictures = examples()
    if not pictures:
        return None
    entry = context.models.first("classify")
    return classify_job(
        entry,
        image=read_picture(pictures[0]),
        variant=default_variant(entry),
        repeats=DEFAULT_REPEATS,
        batch=1,
        untrained=not entry.available(),
    )


def tab(context: Context) -> Controls:
    """Build the tab inside the current `gr.Tab`; returns the controls on its left."""
    pictures = [str(path) for path in examples()]
    with gr.Row(elem_classes=["task"]):
        with gr.Column(elem_classes=["card", "controls"], scale=0, min_width=276):
            model, note, untrained = model_controls(context, "classify")
            gr.HTML('<p class="group">Picture</p>')
            image = gr.Image(
                pictures[0] if pictures else None, type="filepath", format="png",
                sources=["upload"], show_label=False, height=116, buttons=[],
                elem_id="classify-image", elem_classes=["upload"],
                placeholder="Drop a picture here, or click to choose one",
            )  # fmt: skip
            if pictures:
                with gr.Column(elem_classes=["examples"]):
                    gr.Examples(
                        pictures, image, label="Examples", examples_per_page=MAX_EXAMPLES,
                        cache_examples=False, api_visibility="private",
                    )  # fmt: skip
            boxes, structure = compare_controls(context, "classify")
            with gr.Row(elem_classes=["pair"]):
                repeats = gr.Number(
                    DEFAULT_REPEATS, label="Forwards", precision=0, minimum=1,
                    maximum=MAX_REPEATS, min_width=0, elem_id="classify-repeats",
                )  # fmt: skip
                batch = gr.Number(
                    1, label="Batch", precision=0, minimum=1, maximum=MAX_PAGE_BATCH,
                    min_width=0, elem_id="classify-batch",
                )  # fmt: skip
            run, stop = run_controls("classify", "picture")
        with gr.Column(elem_classes=["results"], min_width=0):
            panel = Panel("classify", context.default_ticks, 0, context.device)

    def make_job(
        chosen: ModelEntry, upload: Any, repeats: Any, batch: Any, *, variant: Any, untrained: Any
    ) -> ClassifyJob:
        return classify_job(
            chosen, image=read_picture(uploaded_path(upload)), variant=variant,
            repeats=repeats, batch=batch, untrained=untrained,
        )  # fmt: skip

    controls = Controls(model, note, untrained, structure, boxes, run, stop)
    connect(
        context,
        "classify",
        controls,
        panel,
        [image, repeats, batch],
        make_job,
    )
    return controls
