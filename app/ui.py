"""The page: header, tabs, and how it is served."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr
from gradio import processing_utils

from app import about, api, classify, generate
from app.context import QUEUE_LIMIT, Context
from app.controls import box_updates, default_variant
from app.theme import STYLE_SHEET, theme
from model_zoo.registry import ModelEntry

TITLE = "BLR Lab"
DEVICE_WAIT_S = 120.0
_DAY = 24 * 60 * 60


def header(entry: ModelEntry | None) -> str:
    """The name, and beside it what kind of model a task's tab has chosen."""
    bundled = entry is not None and entry.bundled
    chip = '<span class="chip">bundled demo model</span>' if bundled else ""
    return f'<div class="brand"><h1>{TITLE}</h1>{chip}</div>'


def device_line(info: dict[str, Any]) -> str:
    """The device in one line: "NVIDIA H200 · 139.2 of 141 GB free · torch 2.14 · triton 3.8"."""
    if info.get("error"):
        return f'<p class="device">{escape(str(info["error"]))}</p>'
    parts = [str(info.get("name") or info.get("device"))]
    total, free = info.get("memory_total_mib"), info.get("memory_free_mib")
    if total and free is not None:
        parts.append(f"{free / 1024:.1f} of {total / 1024:.0f} GiB free")
    versions = info.get("versions") or {}
    parts += [f"{name} {versions[name]}" for name in ("torch", "triton") if versions.get(name)]
    if not info.get("ready"):
        parts.append("starting")
    return f'<p class="device">{escape(" · ".join(parts))}</p>'


def build(context: Context) -> gr.Blocks:
    """The whole page as Gradio blocks, ready to be served."""
    fetch_nothing()
    with gr.Blocks(
        title=TITLE, analytics_enabled=False, delete_cache=(_DAY, _DAY), fill_width=True
    ) as page:
        with gr.Row(elem_classes=["page-head"]):
            brand = gr.HTML(header(context.models.first("generate")))
            device = gr.HTML(device_line(context.engine.device_info()), elem_id="device")
        with gr.Tabs(elem_classes=["page-tabs"]):
            with gr.Tab("Generate", id="generate") as generate_tab:
                generate_controls = generate.tab(context)
            with gr.Tab("Classify", id="classify") as classify_tab:
                classify_controls = classify.tab(context)
            with gr.Tab("Model", id="model"):
                about.model_tab(context)
            with gr.Tab("About this machine", id="machine"):
                machine = about.machine_tab(context)
        api.mount(context)
        generate_boxes, classify_boxes = generate_controls.boxes, classify_controls.boxes

        def chosen(model: Any) -> str:
            known = {entry.id: entry for entry in context.models.all()}
            return header(known.get(model) if isinstance(model, str) else None)

        for tab, controls in ((generate_tab, generate_controls), (classify_tab, classify_controls)):
            gr.on(
                [tab.select, controls.model.input], chosen, controls.model, brand,
                queue=False, show_progress="hidden", api_visibility="private",
            )  # fmt: skip

        def settle(*ticks: bool) -> Iterator[list[Any]]:
            """Once the device has answered, say so everywhere."""
            for info in about.until_ready(context, DEVICE_WAIT_S):
                updates: list[Any] = [device_line(info), about.machine(context, info)]
                for task, own in (("generate", ticks[:5]), ("classify", ticks[5:])):
                    entry = context.models.first(task)
                    status = context.status(entry.id, default_variant(entry))
                    updates += box_updates(status, own, context.default_ticks)
                yield updates

        page.load(
            settle,
            [*generate_boxes, *classify_boxes],
            [device, machine, *generate_boxes, *classify_boxes],
            concurrency_limit=None,
            show_progress="hidden",
            api_visibility="private",
        )
        page.queue(max_size=QUEUE_LIMIT, api_open=False, default_concurrency_limit=4)
    return page


def fetch_nothing() -> None:
    """Take files as uploads only (C10, C15).

    Gradio would download an address that is sent in place of a file, and to judge the address
    it would ask a public name server; neither is of use here.
    """

    async def refuse(url: str, *_: Any, **__: Any) -> str:
        raise gr.Error("Send the file itself; addresses are not fetched.", print_exception=False)

    def refuse_now(url: str, *_: Any, **__: Any) -> str:
        raise gr.Error("Send the file itself; addresses are not fetched.", print_exception=False)

    for name, replacement in (
        ("async_ssrf_protected_download", refuse),
        ("ssrf_protected_download", refuse_now),
    ):
        if not hasattr(processing_utils, name):
            raise RuntimeError(f"this version of Gradio has no processing_utils.{name}")
        setattr(processing_utils, name, replacement)


def launch_arguments(
    *,
    host: str,
    port: int | None,
    share: bool,
    max_file_size: str,
    inbrowser: bool,
) -> dict[str, Any]:
    """How the page is served: nothing public, nothing stored, nothing from elsewhere (C15)."""
    return {
        "server_name": host,
        "server_port": port,
        "share": share,
        "inbrowser": inbrowser,
        "max_file_size": max_file_size,
        "allowed_paths": [],
        "enable_monitoring": False,
        "strict_cors": True,
        "show_error": False,
        "run_history": False,
        "ssr_mode": False,
        "pwa": False,
        "mcp_server": False,
        "footer_links": ["api"],
        "prevent_thread_lock": True,
        "quiet": True,
        "theme": theme(),
        "css_paths": [STYLE_SHEET],
    }
