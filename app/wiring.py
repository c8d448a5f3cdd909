"""What the buttons and boxes of a task's tab do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr

from app.context import DEVICE_QUEUE, WAITING_RUNS, Context, refusal
from app.controls import (
    Controls,
    box_updates,
    can_waive,
    card_updates,
    default_variant,
    hint,
    missing_note,
    ticked_ids,
    variant_choices,
)
from app.engine import BACKENDS, Job
from app.forms import chosen_backends
from app.panel import Panel, changed
from model_zoo.registry import ModelEntry

MakeJob = Callable[..., Job]
"""Called with the entry, then variant=, untrained= and the task's own values in order."""

_QUIET = {"show_progress": "hidden", "api_visibility": "private"}
_AT_ONCE = _QUIET | {"queue": False}


def connect(
    context: Context,
    task: str,
    controls: Controls,
    panel: Panel,
    own: Sequence[gr.components.Component],
    make_job: MakeJob,
    *,
    of_model: tuple[gr.components.Component, Callable[[ModelEntry], Any]] | None = None,
) -> None:
    """Wire a tab inside the current `gr.Blocks`.

    Args:
        context: engine, models and sessions.
        task: "generate" or "classify".
        controls: the components that both tabs have.
        panel: where runs are drawn.
        own: the task's own inputs, whose values `make_job` gets.
        make_job: builds the checked job; raises TypeError or ValueError with one line.
        of_model: a component of the task that follows the model, and its update for an entry.
    """
    boxes, run, stop = controls.boxes, controls.run, controls.stop

    def session(request: gr.Request) -> str:
        return f"{task}:{request.session_hash}"

    def chosen(model: Any) -> ModelEntry:
        try:
            return context.models.get(model, task)
        except ValueError as error:
            raise refusal(error) from None

    def start(
        request: gr.Request, model: Any, variant: Any, untrained: Any, *values: Any
    ) -> Iterator[list[Any]]:
        given, ticks = values[: len(own)], values[len(own) :]
        entry = chosen(model)
        try:
            job = make_job(entry, *given, variant=variant, untrained=untrained)
            status = context.status(entry.id, job.variant, job.untrained)
            backends = chosen_backends(ticked_ids(ticks), status)
        except (TypeError, ValueError) as error:
            raise refusal(error) from None
        sent: dict[int, str] = {}
        for live in context.watch(session(request), job, backends):
            drawn = panel.finished(live) if live.finished else panel.running(live, begins=not sent)
            yield [
                *changed(drawn, sent),
                gr.Button(interactive=live.finished),
                gr.Button(interactive=not live.finished),
            ]

    def halt(request: gr.Request) -> None:
        context.sessions.stop(session(request))

    def choose_model(request: gr.Request, model: Any, *ticks: bool) -> list[Any]:
        entry = chosen(model)
        variant = default_variant(entry)
        busy = context.sessions.running(session(request))
        return [
            gr.HTML(missing_note(entry), visible=not entry.available()),
            gr.Checkbox(value=False, visible=can_waive(entry)),
            gr.Dropdown(choices=variant_choices(entry), value=variant),
            *box_updates(context.status(entry.id, variant), ticks, context.default_ticks),
            *([gr.skip()] * len(panel.outputs) if busy else panel.reset(entry)),
            *([of_model[1](entry)] if of_model is not None else []),
        ]

    def settle(model: Any, variant: Any, untrained: Any, *ticks: bool) -> list[Any]:
        """What can run depends on the variant, and on whether weights are needed."""
        status = context.status(chosen(model).id, str(variant), bool(untrained))
        return box_updates(status, ticks, context.default_ticks)

    def after(model: Any, variant: Any, untrained: Any) -> list[gr.Checkbox]:
        """What has compiled by now says how long it took."""
        known = {
            status.id: status
            for status in context.status(chosen(model).id, str(variant), bool(untrained))
        }
        return [gr.Checkbox(info=hint(known.get(info.id)) or "") for info in BACKENDS]

    ran = run.click(
        start,
        [controls.model, controls.structure, controls.untrained, *own, *boxes],
        [*panel.outputs, run, stop],
        concurrency_limit=WAITING_RUNS,
        concurrency_id=DEVICE_QUEUE,
        # Our own checks see what was sent: Gradio would round a seed of 1.5, name no field in its
        # errors, and decode a picture before its size is known.
        preprocess=False,
        **_QUIET,
    )
    ran.then(after, [controls.model, controls.structure, controls.untrained], boxes, **_AT_ONCE)
    stop.click(halt, None, None, **_AT_ONCE)
    controls.model.input(
        choose_model,
        [controls.model, *boxes],
        [
            controls.note, controls.untrained, controls.structure, *boxes, *panel.outputs,
            *([of_model[0]] if of_model is not None else []),
        ],
        **_AT_ONCE,
    )  # fmt: skip
    gr.on(
        [controls.structure.input, controls.untrained.input],
        settle,
        [controls.model, controls.structure, controls.untrained, *boxes],
        boxes,
        **_AT_ONCE,
    )
    gr.on(
        [box.change for box in boxes],
        lambda *ticks: card_updates(ticks),
        boxes,
        list(panel.columns.values()),
        **_AT_ONCE,
    )
