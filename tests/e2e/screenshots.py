"""Take the pictures of the page that README shows: python tests/e2e/screenshots.py"""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path

from person import card, choose_picture, open_tab, run, wait_finished
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from running import FLAGS, ROOT, SIZE, end, find_browser, start

TARGET = ROOT / "assets" / "examples"
PATIENCE_MS = 300_000


def save(page: Page, name: str) -> None:
    """The visible page as a small PNG."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)
    with Image.open(io.BytesIO(page.screenshot())) as image:
        path = TARGET / name
        image.convert("RGB").save(path, optimize=True)
    print(f"{path} ({path.stat().st_size / 1024:.0f} KiB)")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        # Compiling starts from nothing, as on a machine that never ran the model.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        server = start(Path(folder))
        browser = playwright.chromium.launch(executable_path=find_browser(), args=list(FLAGS))
        try:
            page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
            page.goto(server.url)
            page.wait_for_selector("#generate-run")
            page.locator("#generate-compare .box-compiled input").check()
            card(page, "generate", "compiled").wait_for()
            # The second run finds warm workers, as somebody who uses the page does.
            for _ in range(2):
                run(page, "generate")
                wait_finished(page, "generate", PATIENCE_MS)
            save(page, "page-generate.png")
            open_tab(page, "Classify")
            choose_picture(page, TARGET / "owl.png")
            run(page, "classify")
            wait_finished(page, "classify", PATIENCE_MS)
            save(page, "page-classify.png")
        finally:
            browser.close()
            end(server)


if __name__ == "__main__":
    main()
