"""What programs can call: `/models`, `/backends`, `/generate` and `/classify`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gradio as gr

from app.cards import data_uri
from app.classify import DEFAULT_REPEATS
from app.conclusion import conclude
from app.context import DEVICE_QUEUE, WAITING_RUNS, Context, refusal
from app.engine import BACKENDS, BackendId, Job
from app.forms import (
    check_variant,
    chosen_backends,
    classify_job,
    generate_job,
    read_picture,
    uploaded_path,
)
from app.generate import DEFAULT_GUIDANCE, DEFAULT_SEED, DEFAULT_STEPS
from app.live import LiveRun

HEARTBEAT_S = 1.0
"""A call says at least this often where it is, also when nothing has changed."""


def progress(live: LiveRun) -> dict[str, Any]:
    """Where a run is, as plain data."""
    view = live.current
    return {
        "queue_position": live.position,
        "backend": view.info.id if view is not None else None,
        "phase": view.phase if view is not None else "waiting",
        "step": view.step if view is not None else 0,
        "total": view.total if view is not None else 0,
    }


def outcome(live: LiveRun) -> dict[str, Any]:
    """What a finished run came to.

    `report` is the JSON report (None when no backend finished), `images` maps a backend to
    its pictures as PNG data URIs, `top` to its most probable classes, `errors` to a message.
    """
    return {
        "progress": progress(live),
        "report": conclude(live).report if live.reports() else None,
        "images": {
            key: [data_uri(png) for png in view.images]
            for key, view in live.views.items()
            if view.report is not None and view.images
        },
        "top": {
            key: [
                {"id": index, "label": label, "probability": share}
                for index, label, share in view.top
            ]
            for key, view in live.views.items()
            if view.top
        },
        "errors": {key: view.message for key, view in live.views.items() if view.message},
    }


def answers(run: Iterator[LiveRun]) -> Iterator[dict[str, Any]]:
    """What a caller gets of a run: its progress when that moves, and once a second, then the end.

    A cancelled call is closed at a yield, so one must come also while a worker is silent for long,
    loading, compiling or hung (C1).
    """
    last: dict[str, Any] | None = None
    told = 0.0
    for live in run:
        now = progress(live)
        if live.finished:
            if live.error:
                raise gr.Error(live.error, print_exception=False)
            yield outcome(live)
        elif now != last or time.monotonic() - told >= HEARTBEAT_S:
            last, told = now, time.monotonic()
            yield {"progress": now, "report": None, "images": {}, "top": {}, "errors": {}}


def mount(context: Context) -> None:
    """Add the endpoints to the current `gr.Blocks`."""

    def run(request: gr.Request, job: Job, backends: list[BackendId]) -> Iterator[dict[str, Any]]:
        return answers(context.watch(f"api:{request.session_hash}", job, backends))

    def models() -> list[dict[str, Any]]:
        """The models on offer: id, title, task, whether the weights are here, variants that are."""
        return [
            {
                "id": entry.id,
                "title": entry.title,
                "task": entry.task,
                "available": entry.available(),
                "bundled": entry.bundled,
                "licence": entry.licence,
                "how_to_get": "" if entry.available() else entry.how_to_get(),
                "variants": [variant.id for variant in entry.variants_here],
                "classes": len(entry.labels()),
            }
            for entry in context.models.all()
        ]

    def backends(model: str, variant: str = "blast") -> list[dict[str, Any]]:
        """The backends, and whether each can run this model here."""
        try:
            entry = context.models.get(model)
            known = context.status(entry.id, check_variant(variant))
        except ValueError as error:
            raise refusal(error) from None
        status = {item.id: item for item in known}
        return [
            {
                "id": info.id,
                "title": info.title,
                "description": info.description,
                "available": info.id not in status or status[info.id].available,
                "reason": status[info.id].reason if info.id in status else "",
            }
            for info in BACKENDS
        ]

    def generate(
        request: gr.Request,
        class_name: str,
        backends: list[str],
        model: str = "demo-dit",
        variant: str = "blast",
        seed: int = DEFAULT_SEED,
        steps: int = DEFAULT_STEPS,
        guidance: float = DEFAULT_GUIDANCE,
        images: int = 1,
        untrained: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Generate pictures of a class, given by name or id, on each backend from one noise."""
        try:
            entry = context.models.get(model, "generate")
            job = generate_job(
                entry, class_wanted=class_name, variant=variant, seed=seed, steps=steps,
                guidance=guidance, images=images, untrained=untrained,
            )  # fmt: skip
            chosen = chosen_backends(backends, context.status(entry.id, variant))
        except (TypeError, ValueError) as error:
            raise refusal(error) from None
        yield from run(request, job, chosen)

    def classify(
        request: gr.Request,
        image: gr.FileData,
        backends: list[str],
        model: str = "demo-vit",
        variant: str = "blast",
        repeats: int = DEFAULT_REPEATS,
        batch: int = 1,
        untrained: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Classify an uploaded picture on each backend."""
        try:
            entry = context.models.get(model, "classify")
            job = classify_job(
                entry, image=read_picture(uploaded_path(image)), variant=variant,
                repeats=repeats, batch=batch, untrained=untrained,
            )  # fmt: skip
            chosen = chosen_backends(backends, context.status(entry.id, variant))
        except (TypeError, ValueError) as error:
            raise refusal(error) from None
        yield from run(request, job, chosen)

    gr.api(models, api_name="models", queue=False)
    gr.api(backends, api_name="backends", queue=False)
    for endpoint in (generate, classify):
        gr.api(
            endpoint,
            api_name=endpoint.__name__,
            concurrency_limit=WAITING_RUNS,
            concurrency_id=DEVICE_QUEUE,
        )
