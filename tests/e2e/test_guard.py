"""The guards of these tests themselves: what leaves the machine is stopped and counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page
from running import GUARD, Watched

FETCH = "url => fetch(url, {mode: 'no-cors'}).then(() => 'open', () => 'closed')"
SOCKET = """url => new Promise((done) => {
  const socket = new WebSocket(url);
  socket.onopen = () => setTimeout(() => done("open"), 500);
  socket.onclose = () => done("closed");
})"""
FRAME = """url => new Promise((done) => {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.onload = () => done("closed");
  frame.src = url;
})"""


@pytest.mark.parametrize(
    ("how", "address"),
    [
        (FETCH, "https://example.org/x"),
        (FETCH, "http://192.0.2.1/x"),
        (SOCKET, "wss://example.org/x"),
        (SOCKET, "ws://192.0.2.1/x"),
        (FRAME, "https://example.org/x"),
    ],
)
def test_what_leaves_the_machine_is_counted(
    page: Page, pages: Watched, how: str, address: str
) -> None:
    """C10: requests, WebSockets and frames."""
    assert page.evaluate(how, address) == "closed"
    assert pages.outside == [address]
    pages.outside.clear()


def test_what_stays_is_not_counted(page: Page, pages: Watched) -> None:
    assert page.evaluate(FETCH, page.url) == "open"
    # The app has no WebSocket; the attempt reaches it and is refused there.
    page.evaluate(SOCKET, page.url.replace("http", "ws", 1))
    assert pages.outside == []


@pytest.mark.parametrize(
    ("code", "noted"),
    [
        ("socket.create_connection(('192.0.2.1', 80), timeout=1)", "192.0.2.1"),
        ("socket.getaddrinfo('example.org', 443)", "example.org"),
        ("urllib.request.urlopen('http://example.org', timeout=1)", "example.org"),
        ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 53))", "192.0.2.1"),
        ("socket.create_server(('127.0.0.1', 0))", ""),
    ],
)
def test_what_a_process_tries_is_refused_and_noted(tmp_path: Path, code: str, noted: str) -> None:
    """C10: also where the caller swallows the error, and in a process that it starts."""
    log = tmp_path / "log"
    inner = f"import socket, urllib.request; {code}"
    outer = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {inner!r}]))"
    environment = os.environ | {
        "PYTHONPATH": str(GUARD), "BLR_LAB_FORBID_NETWORK": "1", "BLR_LAB_NETWORK_LOG": str(log),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", outer], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (noted == ""), done.stderr
    if noted:
        assert noted in log.read_text(encoding="utf-8")
    else:
        assert not log.exists()
