"""Fixtures: one running app for all tests, one browser, and pages that are watched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from running import FLAGS, MAX_FILE, Server, Watched, end, find_browser, start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("app"), "--max-file-size", MAX_FILE)
    yield running
    end(running)
    assert running.refused() == "", "a process of the app tried to leave the machine"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_browser()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def pages(browser: Browser, server: Server) -> Iterator[Watched]:
    watched = Watched(browser, server)
    yield watched
    watched.close()
    assert watched.outside == [], "the browser tried to leave the machine (C10)"
    assert server.refused() == "", "a process of the app tried to leave the machine (C10)"


@pytest.fixture
def page(pages: Watched) -> Page:
    return pages.open()
