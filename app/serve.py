"""Serve the page: engine, server and warm-up, until the process is told to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.context import Context


def quiet_environment() -> None:
    """No library may report usage or look for updates (C10); read when they are imported."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")


def serve(
    *,
    host: str,
    port: int | None,
    share: bool,
    device: str,
    max_models: int,
    max_file_size: str,
    folders: Sequence[Path],
    open_browser: bool,
) -> None:
    """Open the page, print its address, load the first backends, and wait.

    Raises:
        ValueError: for a device or a model folder that cannot be used.
        OSError: when the port is taken.
    """
    quiet_environment()
    from app.context import Context
    from app.engine import Engine
    from app.forms import Models
    from app.ui import build, launch_arguments

    models = Models(folders)
    with Engine(device=device, max_models=max_models) as engine:
        context = Context(engine, models, engine.device)
        page = build(context)
        _, url, public = page.launch(
            **launch_arguments(
                host=host, port=port, share=share, max_file_size=max_file_size,
                inbrowser=open_browser,
            )
        )  # fmt: skip
        print(f"BLR Lab is at {url}", flush=True)
        if public:
            print(f"Anyone with this address can use it: {public}", flush=True)
        warm_up(context)
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        # A wait without a limit would not be woken by Ctrl-C on Windows.
        while not ended.wait(0.5):
            pass
        page.close(verbose=False)


def warm_up(context: Context) -> None:
    """Load what a visitor's first click needs, in the background."""
    from app import generate

    job = generate.first_job(context)
    for backend in context.default_ticks:
        context.engine.warm_up(job, backend)
