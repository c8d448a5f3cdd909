"""Serve the page: engine, server and warm-up, until the process is told to end."""

from __future__ import annotations

import os
import re
import signal
import socket
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


def check_address(host: str, port: int | None, max_file_size: str) -> None:
    """Raise ValueError for what Gradio would refuse only after many attempts, or unclearly."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[
            0
        ]
    except (OSError, UnicodeError):
        raise ValueError(f"host must be an address of this machine, got {host!r}") from None
    with socket.socket(family, kind) as trial:
        if os.name == "posix":  # as the server does, so that a port just left can be taken again
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
        except OSError as error:
            place = host if port is None else f"{host}:{port}"
            raise ValueError(f"cannot listen on {place}: {error.strerror}") from None
    if not re.fullmatch(r"[1-9]\d{0,5} ?(b|kb|mb|gb)", max_file_size, re.IGNORECASE):
        raise ValueError(f"max-file-size must be like 500kb or 10mb, got {max_file_size!r}")


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
        ValueError: for a device, a model folder or another setting that cannot be used.
        OSError: when the port is taken.
    """
    check_address(host, port, max_file_size)
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
        print(f"BLR Lab is at {url.replace('0.0.0.0', 'localhost')}", flush=True)
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
