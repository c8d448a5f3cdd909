"""Measure what the app promises on a CPU: python tests/e2e/limits.py [report.json]

A fresh app with the bundled models, driven in a browser: seconds until the page is up, until the
first result after the first click, per image of 25 steps on each eager backend, and the memory of
the whole app with three backends warm. Figures belong to the machine that the report names.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from person import card, fill_number, run, wait_finished
from playwright.sync_api import sync_playwright
from running import FLAGS, SIZE, end, find_browser, start

from app.engine.machine import cpu_name, versions

PATIENCE_MS = 300_000


def app_pss_mib(pid: int) -> float:
    """PSS of a process and all its descendants, in MiB."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in family) / 2**20


def main() -> None:
    figures: dict[str, Any] = {"device": cpu_name(), "versions": versions()}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = start(Path(folder))
        figures["page_up_s"] = server.up_s
        browser = playwright.chromium.launch(executable_path=find_browser(), args=list(FLAGS))
        try:
            page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
            page.goto(server.url)
            page.wait_for_selector("#generate-run")
            begun = time.monotonic()
            run(page, "generate")
            card(page, "generate", "dense").locator("img.final").first.wait_for(timeout=PATIENCE_MS)
            figures["first_result_s"] = time.monotonic() - begun
            wait_finished(page, "generate", PATIENCE_MS)

            fill_number(page, "generate-images", 1)
            for name in ("dense", "blr-torch"):
                for other in ("dense", "blr-torch"):
                    page.locator(f"#generate-compare .box-{other} input").set_checked(other == name)
                # The first run warms the worker for this shape, the second is what is asked.
                for _ in range(2):
                    begun = time.monotonic()
                    run(page, "generate")
                    wait_finished(page, "generate", PATIENCE_MS)
                figures[f"one_image_{name}_s"] = time.monotonic() - begun

            for name in ("dense", "compiled", "blr-torch"):
                page.locator(f"#generate-compare .box-{name} input").set_checked(True)
            run(page, "generate")
            wait_finished(page, "generate", PATIENCE_MS)
            family = psutil.Process(server.process.pid).children(recursive=True)
            figures["app_pss_mib"] = app_pss_mib(server.process.pid)
            figures["processes"] = 1 + len(family)
        finally:
            browser.close()
            end(server)
    text = json.dumps(figures, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
