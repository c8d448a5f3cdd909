"""The Classify tab: the classes of one picture, on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from app.context import DEVICE_QUEUE, WAITING_RUNS, Context, refusal
from app.controls import (
    box_updates,
    can_waive,
    card_updates,
    compare_boxes,
    default_variant,
    missing_note,
    model_choices,
    ticked_ids,
    variant_choices,
)
from app.engine import ClassifyJob
from app.forms import chosen_backends, classify_job, read_picture, uploaded_path
from app.panel import Panel, changed
from model_zoo.registry import assets_dir

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


def tab(context: Context) -> list[gr.Checkbox]:
    """Build the tab inside the current `gr.Tab`; returns the backends' boxes."""
    entry = context.models.first("classify")
    variant = default_variant(entry)
    pictures = [str(path) for path in examples()]
    with gr.Row(elem_classes=["task"]):
        with gr.Column(elem_classes=["card", "controls"], scale=0, min_width=276):
            model = gr.Dropdown(
                model_choices(context, "classify"), value=entry.id, label="Model",
                elem_id="classify-model",
            )  # fmt: skip
            note = gr.HTML(missing_note(entry), visible=not entry.available())
            untrained = gr.Checkbox(
                label="untrained weights, for timing only", value=False, container=False,
                visible=can_waive(entry), elem_classes=["untrained-box"],
                elem_id="classify-untrained",
            )  # fmt: skip
            gr.HTML('<p class="group">Picture</p>')
            # A file, not an array: the server decodes it with the checks of model_zoo.images.
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
            gr.HTML('<p class="group">Compare</p>')
            with gr.Column(elem_classes=["compare"], elem_id="classify-compare"):
                boxes = compare_boxes(context.status(entry.id, variant), context.default_ticks)
            structure = gr.Dropdown(
                variant_choices(entry), value=variant, label="Structure",
                elem_id="classify-structure",
            )  # fmt: skip
            with gr.Row(elem_classes=["pair"]):
                repeats = gr.Number(
                    DEFAULT_REPEATS, label="Forwards", precision=0, minimum=1, maximum=1000,
                    min_width=0, elem_id="classify-repeats",
                )  # fmt: skip
                batch = gr.Number(
                    1, label="Batch", precision=0, minimum=1, maximum=64, min_width=0,
                    elem_id="classify-batch",
                )  # fmt: skip
            with gr.Row(elem_classes=["actions"]):
                run = gr.Button("Run", variant="primary", min_width=0, elem_id="classify-run")
                stop = gr.Button(
                    "Stop", interactive=False, scale=0, min_width=72, elem_id="classify-stop"
                )
            gr.HTML(
                '<p class="explain">Same picture for every backend. '
                "They run one after another on this device.</p>"
            )
        with gr.Column(elem_classes=["results"], min_width=0):
            panel = Panel("classify", context.default_ticks, 0, context.device)

    def start(
        request: gr.Request, model_id: Any, upload: Any, structure_id: Any, repeats_: Any,
        batch_: Any, untrained_: Any, *ticks: bool,
    ) -> Iterator[list[Any]]:  # fmt: skip
        try:
            chosen = context.models.get(model_id, "classify")
            job = classify_job(
                chosen, image=read_picture(uploaded_path(upload)), variant=structure_id,
                repeats=repeats_, batch=batch_, untrained=untrained_,
            )  # fmt: skip
            backends = chosen_backends(
                ticked_ids(ticks), context.status(chosen.id, job.variant, job.untrained)
            )
        except (TypeError, ValueError) as error:
            raise refusal(error) from None
        sent: dict[int, str] = {}
        for live in context.watch(str(request.session_hash), job, backends):
            values = panel.finished(live) if live.finished else panel.running(live)
            yield [
                *changed(values, sent),
                gr.Button(interactive=live.finished),
                gr.Button(interactive=not live.finished),
            ]

    run.click(
        start,
        [model, image, structure, repeats, batch, untrained, *boxes],
        [*panel.outputs, run, stop],
        concurrency_limit=WAITING_RUNS,
        concurrency_id=DEVICE_QUEUE,
        show_progress="hidden",
        api_visibility="private",
        preprocess=False,  # gr.Image would decode the file before our checks see it
    )

    def halt(request: gr.Request) -> None:
        context.sessions.stop(str(request.session_hash))

    stop.click(halt, None, None, queue=False, show_progress="hidden", api_visibility="private")

    def choose_model(request: gr.Request, model_id: Any, *ticks: bool) -> list[Any]:
        try:
            chosen = context.models.get(model_id, "classify")
        except ValueError as error:
            raise refusal(error) from None
        missing = not chosen.available()
        busy = context.sessions.running(str(request.session_hash))
        return [
            gr.HTML(missing_note(chosen), visible=missing),
            gr.Checkbox(value=False, visible=can_waive(chosen)),
            gr.Dropdown(choices=variant_choices(chosen), value=default_variant(chosen)),
            *box_updates(
                context.status(chosen.id, default_variant(chosen)), ticks, context.default_ticks
            ),
            *([gr.skip()] * len(panel.outputs) if busy else panel.reset(chosen)),
        ]

    def settle(model_id: Any, structure_id: Any, untrained_: Any, *ticks: bool) -> list[Any]:
        """What can run depends on the variant, and on whether weights are needed."""
        try:
            chosen = context.models.get(model_id, "classify")
        except ValueError as error:
            raise refusal(error) from None
        status = context.status(chosen.id, str(structure_id), bool(untrained_))
        return box_updates(status, ticks, context.default_ticks)

    model.input(
        choose_model, [model, *boxes],
        [note, untrained, structure, *boxes, *panel.outputs],
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    gr.on(
        [structure.input, untrained.input], settle, [model, structure, untrained, *boxes], boxes,
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    gr.on(
        [box.change for box in boxes],
        lambda *ticks: card_updates(ticks),
        boxes,
        list(panel.columns.values()),
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
    return boxes
