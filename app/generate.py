"""The Generate tab: pictures of one class, from the same noise on every backend."""

from __future__ import annotations

import random
from typing import Any

import gradio as gr

from app.context import Context
from app.controls import (
    Controls,
    compare_controls,
    default_variant,
    model_controls,
    run_controls,
)
from app.engine import GenerateJob
from app.engine.jobs import MAX_STEPS
from app.forms import MAX_PAGE_IMAGES, class_choices, default_class, generate_job
from app.panel import Panel
from app.wiring import connect
from model_zoo.registry import ModelEntry

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


def tab(context: Context) -> Controls:
    """Build the tab inside the current `gr.Tab`; returns the controls on its left."""
    entry = context.models.first("generate")
    with gr.Row(elem_classes=["task"]):
        with gr.Column(elem_classes=["card", "controls"], scale=0, min_width=276):
            model, note, untrained = model_controls(context, "generate")
            label = gr.Dropdown(
                class_choices(entry), value=default_class(entry), filterable=True,
                label="Class: name or id", elem_id="generate-class",
            )  # fmt: skip
            boxes, structure = compare_controls(context, "generate")
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
                    DEFAULT_STEPS, label="Steps", precision=0, minimum=1, maximum=MAX_STEPS,
                    min_width=0, elem_id="generate-steps",
                )  # fmt: skip
                guidance = gr.Number(
                    DEFAULT_GUIDANCE, label="Guidance", step=0.5, min_width=0,
                    elem_id="generate-guidance",
                )  # fmt: skip
            run, stop = run_controls("generate", "noise")
        with gr.Column(elem_classes=["results"], min_width=0):
            panel = Panel("generate", context.default_ticks, DEFAULT_IMAGES, context.device)

    def make_job(
        chosen: ModelEntry, label: Any, seed: Any, images: Any, steps: Any, guidance: Any,
        *, variant: Any, untrained: Any,
    ) -> GenerateJob:  # fmt: skip
        return generate_job(
            chosen, class_wanted=label, variant=variant, seed=seed, steps=steps,
            guidance=guidance, images=images, untrained=untrained,
        )  # fmt: skip

    controls = Controls(model, note, untrained, structure, boxes, run, stop)
    connect(
        context,
        "generate",
        controls,
        panel,
        [label, seed, images, steps, guidance],
        make_job,
        of_model=(
            label,
            lambda chosen: gr.Dropdown(choices=class_choices(chosen), value=default_class(chosen)),
        ),
    )
    dice.click(
        lambda: random.randrange(_SEEDS), None, seed, queue=False, show_progress="hidden",
        api_visibility="private",
    )  # fmt: skip
    # Typing replaces the class that stands there, as in a search box.
    label.focus(
        None, js="() => document.querySelector('#generate-class input').select()",
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    return controls
