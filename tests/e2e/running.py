"""The real app, started as a person starts it, and a browser that may only talk to it.

Any connection that leaves the machine fails the tests: the browser's are blocked and counted, and
those of the web process and its workers are refused and written to a file by the guard in
tests/app_engine/no_network.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, WebSocketRoute

ROOT = Path(__file__).resolve().parents[2]
GUARD = ROOT / "tests" / "app_engine" / "no_network"
OUTPUT = ROOT / "tests" / "output"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
SIZE = {"width": 1360, "height": 900}
LOCAL = {"127.0.0.1", "localhost", "::1"}
MAX_FILE = "1mb"


@dataclass
class Server:
    """A running app."""

    url: str
    process: subprocess.Popen[str]
    up_s: float
    network_log: Path
    lines: list[str] = field(default_factory=list)

    def refused(self) -> str:
        """Connections that a process of the app tried to make off the machine."""
        return self.network_log.read_text(encoding="utf-8") if self.network_log.exists() else ""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(folder: Path, *arguments: str, guard: Path = GUARD) -> Server:
    """Start `blr-lab app` on a free port and wait until its page answers.

    `guard` is the folder of the `sitecustomize` that its processes import.
    """
    port = free_port()
    log = folder / "network.log"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(guard), str(ROOT)]),
        "PYTHONUNBUFFERED": "1",
        "BLR_LAB_FORBID_NETWORK": "1",
        "BLR_LAB_NETWORK_LOG": str(log),
        "GRADIO_TEMP_DIR": str(folder / "cache"),
    }
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "app", "--port", str(port), *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", process, 0.0, log)

    def read() -> None:
        assert process.stdout is not None
        server.lines.extend(process.stdout)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            with urllib.request.urlopen(server.url, timeout=10) as answer:
                assert b"BLR Lab" in answer.read()
            break
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process.poll() is not None or time.monotonic() - begun > 90:
                process.kill()
                pytest.fail("the app did not come up:\n" + "".join(server.lines))
            time.sleep(0.1)
    server.up_s = time.monotonic() - begun
    return server


def end(server: Server) -> None:
    server.process.terminate()
    try:
        server.process.wait(20)
    except subprocess.TimeoutExpired:
        server.process.kill()


def find_browser() -> str:
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.fail(
        f"none of {', '.join(BROWSERS)} is installed; install one, "
        "for example with: apt-get install chromium"
    )


class Watched:
    """Opens pages of one test, and notes what they should not do."""

    def __init__(self, browser: Browser, server: Server) -> None:
        self._browser = browser
        self._server = server
        self._pages: list[Page] = []
        self.outside: list[str] = []
        self.errors: list[str] = []

    def open(self) -> Page:
        page = self._browser.new_page(viewport=SIZE, accept_downloads=True)  # type: ignore[arg-type]
        page.set_default_timeout(60_000)
        # Of the whole context, so that windows which the page opens are watched as well.
        page.context.route("**/*", self._only_here)
        page.context.route_web_socket(re.compile(""), self._only_sockets_here)
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._pages.append(page)
        page.goto(self._server.url)
        page.wait_for_selector("#generate-run")
        return page

    def _only_here(self, route: Route) -> None:
        url = urlsplit(route.request.url)
        if url.scheme in ("data", "blob") or url.hostname in LOCAL:
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def _only_sockets_here(self, socket: WebSocketRoute) -> None:
        if urlsplit(socket.url).hostname in LOCAL:
            socket.connect_to_server()
        else:
            self.outside.append(socket.url)
            socket.close()

    def close(self) -> None:
        for page in self._pages:
            page.close()
