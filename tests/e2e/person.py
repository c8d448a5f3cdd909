"""What a person does on the page, in one place."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

FINISHED_MS = 120_000


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def fill_number(page: Page, name: str, value: int | float) -> None:
    field = page.locator(f"#{name} input")
    field.fill(str(value))
    field.press("Tab")


def type_over(field: Locator, text: str) -> None:
    """Click into a search box, whose text is marked by that, and type key by key."""
    field.page.keyboard.press("Escape")
    field.blur()
    field.click()
    field.page.wait_for_timeout(200)
    field.press_sequentially(text)


def choose_picture(page: Page, path: Path) -> None:
    """Take the example picture away and upload another."""
    page.locator("#classify-image").get_by_role("button", name="Remove Image").click()
    page.locator("#classify-image input[type=file]").set_input_files(path)


def run(page: Page, task: str) -> None:
    page.locator(f"#{task}-run").click()


def wait_finished(page: Page, task: str, timeout: int = FINISHED_MS) -> str:
    """Wait for the verdict; returns it."""
    verdict = page.locator(f"#{task}-verdict .verdict.done")
    expect(page.locator(f"#{task}-run")).to_be_disabled()
    verdict.wait_for(timeout=timeout)
    expect(page.locator(f"#{task}-run")).to_be_enabled(timeout=10_000)
    return verdict.inner_text()


def card(page: Page, task: str, backend: str) -> Locator:
    return page.locator(f"#{task}-cards .card-{backend}")


def median_ms(page: Page, task: str, backend: str) -> float:
    text = card(page, task, backend).locator(".big b").inner_text()
    found = re.fullmatch(r"([\d,]+(?:\.\d+)?) ms", text)
    assert found, f"expected a number of milliseconds, got {text!r}"
    return float(found[1].replace(",", ""))


def step_of(page: Page, task: str, backend: str) -> int:
    """The step that a card says it is at, 0 before the first."""
    note = card(page, task, backend).locator(".note").inner_text()
    found = re.search(r"(?:step|forward) (\d+) of", note)
    return int(found[1]) if found else 0
