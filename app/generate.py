"""The Generate tab: pictures of one class, from the same noise on every backend."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import gradio as gr

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
from app.engine import GenerateJob
from app.forms import (
    MAX_PAGE_IMAGES,
    chosen_backends,
    class_choices,
    default_class,
    generate_job,
)
from app.panel import Panel, changed

DEFAULT_IMAGES = 2
DEFAULT_STEPS = 25
DEFAULT_GUIDANCE = 4.0
DEFAULT_SEED = 7
_SEEDS = 10_000


def first_job(context: Context) -> GenerateJob:
    """What Run does on a page that nobody has touched."""
    entry = context.models.first("generate")
    return generate_job(
        entry,
        class_wanted=default_class(entry),
        variant=default_variant(entry),
        seed=DEFAULT_SEED,
        steps=DEFAULT_STEPS,
        guidance=DEFAULT_GUIDANCE,
        images=DEFAULT_IMAGES,
        untrained=not entry.available(),
    )


def tab(context: Context) -> list[gr.Checkbox]:
    """Build the tab inside the current `gr.Tab`; returns the backends' boxes."""
    entry = context.models.first("generate")
    variant = default_variant(entry)
    with gr.Row(elem_classes=["task"]):
        with gr.Column(elem_classes=["card", "controls"], scale=0, min_width=276):
            model = gr.Dropdown(
                model_choices(context, "generate"), value=entry.id, label="Model",
                elem_id="generate-model",
            )  # fmt: skip
            note = gr.HTML(missing_note(entry), visible=not entry.available())
            untrained = gr.Checkbox(
                label="untrained weights, for timing only", value=False, container=False,
                visible=can_waive(entry), elem_classes=["untrained-box"],
                elem_id="generate-untrained",
            )  # fmt: skip
            label = gr.Dropdown(
                class_choices(entry), value=default_class(entry), filterable=True,
                label="Class: name or id", elem_id="generate-class",
            )  # fmt: skip
            gr.HTML('<p class="group">Compare</p>')
            with gr.Column(elem_classes=["compare"], elem_id="generate-compare"):
                boxes = compare_boxes(context.status(entry.id, variant), context.default_ticks)
            structure = gr.Dropdown(
                variant_choices(entry), value=variant, label="Structure",
                elem_id="generate-structure",
            )  # fmt: skip
            with gr.Row(elem_classes=["pair"]):
                with gr.Row(elem_classes=["seed"]):
                    seed = gr.Number(
                        DEFAULT_SEED, label="Seed", precision=0, minimum=0, min_width=0,
                        elem_id="generate-seed",
                    )  # fmt: skip
                    dice = gr.Button(
                        "New seed", elem_classes=["dice"], min_width=0, scale=0,
                        elem_id="generate-dice",
                    )  # fmt: skip
                images = gr.Number(
                    DEFAULT_IMAGES, label="Images", precision=0, minimum=1,
                    maximum=MAX_PAGE_IMAGES, min_width=0, elem_id="generate-images",
                )  # fmt: skip
            with gr.Row(elem_classes=["pair"]):
                steps = gr.Number(
                    DEFAULT_STEPS, label="Steps", precision=0, minimum=1, maximum=1000,
                    min_width=0, elem_id="generate-steps",
                )  # fmt: skip
                guidance = gr.Number(
                    DEFAULT_GUIDANCE, label="Guidance", step=0.5, min_width=0,
                    elem_id="generate-guidance",
                )  # fmt: skip
            with gr.Row(elem_classes=["actions"]):
                run = gr.Button("Run", variant="primary", min_width=0, elem_id="generate-run")
                stop = gr.Button(
                    "Stop", interactive=False, scale=0, min_width=72, elem_id="generate-stop"
                )
            gr.HTML(
                '<p class="explain">Same noise for every backend. '
                "They run one after another on this device.</p>"
            )
        with gr.Column(elem_classes=["results"], min_width=0):
            panel = Panel("generate", context.default_ticks, DEFAULT_IMAGES, context.device)

    def start(
        request: gr.Request, model_id: Any, class_wanted: Any, structure_id: Any, seed_: Any,
        images_: Any, steps_: Any, guidance_: Any, untrained_: Any, *ticks: bool,
    ) -> Iterator[list[Any]]:  # fmt: skip
        try:
            chosen = context.models.get(model_id, "generate")
            job = generate_job(
                chosen, class_wanted=class_wanted, variant=structure_id, seed=seed_,
                steps=steps_, guidance=guidance_, images=images_, untrained=untrained_,
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
        [model, label, structure, seed, images, steps, guidance, untrained, *boxes],
        [*panel.outputs, run, stop],
        concurrency_limit=WAITING_RUNS,
        concurrency_id=DEVICE_QUEUE,
        show_progress="hidden",
        api_visibility="private",
    )

    def halt(request: gr.Request) -> None:
        context.sessions.stop(str(request.session_hash))

    stop.click(halt, None, None, queue=False, show_progress="hidden", api_visibility="private")
    dice.click(
        lambda: random.randrange(_SEEDS), None, seed, queue=False, show_progress="hidden",
        api_visibility="private",
    )  # fmt: skip

    def choose_model(request: gr.Request, model_id: Any, *ticks: bool) -> list[Any]:
        try:
            chosen = context.models.get(model_id, "generate")
        except ValueError as error:
            raise refusal(error) from None
        missing = not chosen.available()
        busy = context.sessions.running(str(request.session_hash))
        return [
            gr.HTML(missing_note(chosen), visible=missing),
            gr.Checkbox(value=False, visible=can_waive(chosen)),
            gr.Dropdown(choices=class_choices(chosen), value=default_class(chosen)),
            gr.Dropdown(choices=variant_choices(chosen), value=default_variant(chosen)),
            *box_updates(
                context.status(chosen.id, default_variant(chosen)), ticks, context.default_ticks
            ),
            *([gr.skip()] * len(panel.outputs) if busy else panel.reset(chosen)),
        ]

    def settle(model_id: Any, structure_id: Any, untrained_: Any, *ticks: bool) -> list[Any]:
        """What can run depends on the variant, and on whether weights are needed."""
        try:
            chosen = context.models.get(model_id, "generate")
        except ValueError as error:
            raise refusal(error) from None
        status = context.status(chosen.id, str(structure_id), bool(untrained_))
        return box_updates(status, ticks, context.default_ticks)

    # Typing replaces the class that stands there, as in a search box.
    label.focus(
        None, js="() => document.querySelector('#generate-class input').select()",
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    model.input(
        choose_model, [model, *boxes],
        [note, untrained, label, structure, *boxes, *panel.outputs],
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
