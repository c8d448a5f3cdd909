"""The guard of the browser tests itself: what leaves the machine is stopped and counted."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page
from running import Watched

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
