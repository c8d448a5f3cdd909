"""The real app in a real browser, driven as a person would."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from pathlib import Path

import psutil
import pytest
from person import (
    card,
    choose_picture,
    fill_number,
    median_ms,
    open_tab,
    run,
    step_of,
    type_over,
    wait_finished,
)
from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect
from running import OUTPUT, Server, Watched

# Follows one chart: whether its node stays, and the most points that a line ever had.
WATCH_CHART = """(id) => {
  const svg = document.querySelector(`#${id} svg.chart`);
  const seen = window[`watch-${id}`] = {svg, most: 0, updates: 0};
  new MutationObserver(() => {
    seen.updates += 1;
    for (const line of document.querySelectorAll(`#${id} polyline`))
      seen.most = Math.max(seen.most, line.getAttribute("points").split(" ").length);
  }).observe(svg, {attributes: true, childList: true, subtree: true});
}"""
CHART = """(id) => {
  const seen = window[`watch-${id}`];
  return {same: document.querySelector(`#${id} svg.chart`) === seen.svg && seen.svg.isConnected,
          most: seen.most, updates: seen.updates};
}"""
# Counts changes of one picture while its node stays.
WATCH_PICTURES = """() => {
  window.previews = {count: 0, nodes: new Set()};
  new MutationObserver((changes) => {
    for (const change of changes) {
      if (change.type === "attributes" && change.attributeName === "src") {
        window.previews.count += 1; window.previews.nodes.add(change.target);
      }
      for (const node of change.addedNodes || [])
        if (node.tagName === "IMG") { window.previews.count += 1; window.previews.nodes.add(node); }
    }
  }).observe(document.querySelector("#generate-cards"),
             {attributes: true, childList: true, subtree: true});
}"""


def drawing() -> Image.Image:
    image = Image.new("RGB", (160, 120), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((30, 10, 130, 110), fill="#ffcc33", outline="#7a4a00", width=4)
    return image


def test_the_page_is_up_quickly_and_light(server: Server) -> None:
    """Within ten seconds, and without a model library in the web process."""
    assert server.up_s < 10
    assert any(server.url in line for line in server.lines)
    mapped = Path(f"/proc/{server.process.pid}/maps")
    if mapped.exists():
        assert "libtorch" not in mapped.read_text(encoding="utf-8")


@pytest.mark.parametrize("first", ["Generate", "Classify", "Model", "About this machine"])
def test_each_tab_is_complete_when_it_is_opened_first(pages: Watched, first: str) -> None:
    """No tab is blank or frozen before any run (C2)."""
    page = pages.open()
    open_tab(page, first)
    task = first.lower()
    if first in ("Generate", "Classify"):
        expect(page.locator(f"#{task}-verdict")).to_contain_text("Ready to run")
        for backend in ("dense", "blr-torch"):
            expect(card(page, task, backend)).to_be_visible()
            expect(card(page, task, backend)).to_contain_text("median")
        for chart in ("latency", "memory"):
            svg = page.locator(f"#{task}-{chart} svg.chart")
            expect(svg).to_be_visible()
            assert svg.locator("text.empty").inner_html() != ""
        expect(page.locator(f"#{task}-table thead th")).to_have_count(
            12 if first == "Generate" else 11
        )
        expect(page.locator(f"#{task}-run")).to_be_enabled()
        expect(page.locator(f"#{task}-stop")).to_be_disabled()
        grey = page.locator(f"#{task}-compare .box-blr-triton")
        expect(grey.locator("input")).to_be_disabled()
        expect(grey).to_contain_text("needs an NVIDIA GPU")
        expect(page.locator(f"#{task}-compare .box-compiled")).to_contain_text("compiles")
        bottom = page.locator(f"#{task}-run").bounding_box()
        assert bottom is not None
        assert bottom["y"] + bottom["height"] <= 900, "Run must be visible without scrolling"
    elif first == "Model":
        text = page.locator("#about-text")
        expect(text).to_contain_text("Licence")
        expect(text.locator("tbody tr").first).to_contain_text("transformer_blocks")
    else:
        expect(page.locator("#machine")).to_contain_text("torch")
        expect(page.locator("#machine tbody tr")).to_have_count(5)
    assert pages.errors == []


def test_generate_with_two_backends(page: Page, pages: Watched) -> None:
    """Pictures, live charts, table and report of a first run."""
    page.evaluate(WATCH_CHART, "generate-latency")
    page.evaluate(WATCH_PICTURES)
    fill_number(page, "generate-steps", 50)
    run(page, "generate")
    expect(card(page, "generate", "dense").locator(".note")).to_contain_text(
        re.compile(r"step \d+ of 50"), timeout=60_000
    )
    verdict = wait_finished(page, "generate")
    assert re.search(
        r"BLR PyTorch is (\d+\.\d\d× (faster|slower) than|(about )?as fast as) Dense", verdict
    )

    for backend in ("dense", "blr-torch"):
        frames = card(page, "generate", backend).locator("img.final")
        expect(frames).to_have_count(2)
        sources = [str(frames.nth(i).get_attribute("src")) for i in range(2)]
        assert all(source.startswith("data:image/png;base64,") for source in sources)
        assert sources[0] != sources[1]
        assert frames.first.evaluate("image => image.naturalWidth") >= 64
        assert 0 < median_ms(page, "generate", backend) < 60_000

    # The chart's node stayed the same while it moved, and so did the pictures' (C3).
    chart = page.evaluate(CHART, "generate-latency")
    assert chart["same"]
    assert chart["updates"] > 10
    assert page.evaluate("window.previews.count") >= 20
    assert page.evaluate("window.previews.nodes.size") == 4
    lines = page.locator("#generate-latency g.line")
    expect(lines).to_have_count(2)
    assert [lines.nth(i).get_attribute("data-points") for i in range(2)] == ["50", "50"]
    strokes = page.locator("#generate-latency polyline")
    assert [strokes.nth(i).get_attribute("stroke") for i in range(2)] == ["#4b5563", "#009e73"]
    expect(page.locator("#generate-memory g.line")).to_have_count(2)

    rows = page.locator("#generate-table tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("1.00×")
    expect(rows.nth(1).locator("td").last).to_contain_text(re.compile(r"dB|identical"))
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download JSON").first.click()
    report = json.loads(Path(saved.value.path()).read_text(encoding="utf-8"))
    assert (report["schema"], report["version"]) == ("blr-lab/report", 1)
    assert [result["backend"] for result in report["backends"]] == ["dense", "blr-torch"]
    medians = [result["step_ms"]["median"] for result in report["backends"]]
    for backend, median in zip(("dense", "blr-torch"), medians, strict=True):
        assert median_ms(page, "generate", backend) == pytest.approx(median, rel=0.01)

    OUTPUT.mkdir(exist_ok=True)
    page.screenshot(path=OUTPUT / "generate.png")

    # The next run takes the last one's files away, and finds warm workers.
    button = page.get_by_role("button", name="Download JSON").first
    run(page, "generate")
    expect(button).to_be_disabled()
    wait_finished(page, "generate")
    expect(button).to_be_enabled()
    load = rows.nth(0).locator("td").first
    expect(load).to_have_attribute("title", re.compile("before this run"))
    expect(page.locator("#generate-table .footnote")).to_contain_text(
        re.compile(r"^Emoji DiT \(bundled\) · BLAST b\d+ r\d+(–\d+)? · class fox · 50 steps")
    )
    assert pages.errors == []


def test_stop_takes_effect_within_a_step(page: Page) -> None:
    """250 steps, Stop at step 5; the next run starts clean (C1)."""
    # Eight pictures take so long a step that a click is done within one.
    fill_number(page, "generate-steps", 250)
    fill_number(page, "generate-images", 8)
    run(page, "generate")
    page.wait_for_function(
        """() => /step ([5-9]|\\d\\d+) of 250/.test(
             document.querySelector("#generate-cards .card-dense .note").innerText)""",
        timeout=60_000,
    )
    before = step_of(page, "generate", "dense")
    page.locator("#generate-stop").click()
    stopped = page.locator("#generate-verdict .verdict", has_text="Stopped")
    stopped.wait_for(timeout=5_000)
    after = step_of(page, "generate", "dense")
    # The step under way, and those that the page had not shown yet.
    assert 5 <= before <= after <= before + 3, "the run went on after Stop"
    expect(card(page, "generate", "dense").locator(".note")).to_contain_text("stopped at step")
    peak = card(page, "generate", "dense").locator("dt:text-is('peak') + dd")
    expect(peak).to_have_text("–")
    expect(page.locator("#generate-run")).to_be_enabled()
    expect(page.locator("#generate-stop")).to_be_disabled()

    fill_number(page, "generate-steps", 3)
    fill_number(page, "generate-images", 1)
    run(page, "generate")
    wait_finished(page, "generate")
    lines = page.locator("#generate-latency g.line")
    assert [lines.nth(i).get_attribute("data-points") for i in range(2)] == ["3", "3"]


def test_others_see_their_place_and_stop_only_their_own(pages: Watched) -> None:
    """One run at a time on a device; Stop works while another event runs (C1)."""
    mine, theirs = pages.open(), pages.open()
    for page in (mine, theirs):
        fill_number(page, "generate-steps", 1000)
        page.locator("#generate-compare .box-blr-torch input").uncheck()
    run(mine, "generate")
    mine.wait_for_function(
        """() => /step \\d+ of/.test(
             document.querySelector("#generate-cards .card-dense .note").innerText)""",
        timeout=60_000,
    )
    run(theirs, "generate")
    expect(theirs.locator("#generate-verdict")).to_contain_text("1 run is ahead of yours")
    theirs.locator("#generate-stop").click()
    expect(theirs.locator("#generate-verdict")).to_contain_text("Stopped")

    # The tabs of one page are told apart too.
    open_tab(mine, "Classify")
    run(mine, "classify")
    expect(mine.locator("#classify-verdict")).to_contain_text("1 run is ahead of yours")
    mine.locator("#classify-stop").click()
    expect(mine.locator("#classify-verdict")).to_contain_text("Stopped")
    open_tab(mine, "Generate")
    before = step_of(mine, "generate", "dense")
    assert before > 0
    mine.wait_for_timeout(1000)
    assert step_of(mine, "generate", "dense") > before
    expect(mine.locator("#generate-stop")).to_be_enabled()
    mine.locator("#generate-stop").click()
    expect(mine.locator("#generate-verdict")).to_contain_text("Stopped at step")


def test_classify_an_uploaded_picture(page: Page, pages: Watched, tmp_path: Path) -> None:
    """The top five of an own picture, and charts that stay bounded (C3)."""
    path = tmp_path / "mine.png"
    drawing().save(path)
    open_tab(page, "Classify")
    choose_picture(page, path)
    expect(page.locator("#classify-image img")).to_be_visible()
    fill_number(page, "classify-repeats", 400)
    page.evaluate(WATCH_CHART, "classify-latency")
    run(page, "classify")
    verdict = wait_finished(page, "classify")
    assert "Dense" in verdict
    for backend in ("dense", "blr-torch"):
        bars = card(page, "classify", backend).locator(".bars li")
        expect(bars).to_have_count(5)
        shares = [float(bars.nth(i).locator(".share").inner_text().rstrip("%")) for i in range(5)]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 100.5
        assert bars.first.locator(".label").inner_text().strip()
    chart = page.evaluate(CHART, "classify-latency")
    assert chart["same"]
    assert 0 < chart["most"] <= 160
    expect(page.locator("#classify-table tbody tr")).to_have_count(2)
    OUTPUT.mkdir(exist_ok=True)
    page.screenshot(path=OUTPUT / "classify.png")
    assert pages.errors == []


def test_a_bad_file_is_refused_in_one_line(page: Page, tmp_path: Path) -> None:
    """No traceback for what is no picture; the page stays usable (C5)."""
    path = tmp_path / "broken.png"
    whole = io.BytesIO()
    drawing().save(whole, "PNG")
    path.write_bytes(whole.getvalue()[:200])
    open_tab(page, "Classify")
    choose_picture(page, path)
    page.wait_for_timeout(500)
    run(page, "classify")
    toast = page.get_by_test_id("toast-body")
    expect(toast).to_contain_text("broken.png")
    assert "Traceback" not in toast.inner_text()
    expect(page.locator("#classify-run")).to_be_enabled()


def test_classes_are_found_by_name_and_id(page: Page, pages: Watched) -> None:
    """Type "crane": every class of that name is offered, in any case, and by id (C7)."""
    page.locator("#generate-model input").click()
    page.get_by_role("option", name="DiT-XL/2 256").click()
    expect(page.locator("#generate-untrained")).to_be_visible()
    expect(page.locator(".missing").first).to_contain_text("hf download facebook/DiT-XL-2-256")
    expect(page.locator("#generate-verdict")).to_contain_text("are not here")
    field = page.locator("#generate-class input")
    found = []
    for typed in ("crane", "CRANE"):
        type_over(field, typed)
        options = page.get_by_role("option")
        expect(options.first).to_contain_text("crane")
        found.append(options.all_inner_texts())
    assert found[0] == found[1]
    cranes = [text for text in found[0] if re.search(r"\bcrane \(", text)]
    assert len(cranes) == 2
    assert any("134" in text for text in cranes)
    assert any("517" in text for text in cranes)
    type_over(field, "517")
    page.get_by_role("option", name=re.compile("crane")).first.click()
    assert field.input_value().endswith("517")

    # Without weights nothing runs by mistake; the waiver is explicit and frees the backends.
    dense = page.locator("#generate-compare .box-dense input")
    expect(dense).to_be_disabled()
    run(page, "generate")
    expect(page.get_by_test_id("toast-body").first).to_be_visible()
    page.locator("#generate-untrained input").check()
    expect(dense).to_be_enabled()
    expect(dense).to_be_checked()
    assert pages.errors == []


def test_compiling_is_shown_apart_and_happens_once(page: Page) -> None:
    """Compile time has progress and a cell of its own; the next run is steady (C12)."""
    open_tab(page, "Classify")
    page.locator("#classify-compare .box-blr-torch input").uncheck()
    page.locator("#classify-compare .box-compiled input").check()
    fill_number(page, "classify-repeats", 20)
    run(page, "classify")
    expect(card(page, "classify", "compiled").locator(".note")).to_contain_text(
        re.compile(r"compiling, \d+ of about \d+ s"), timeout=60_000
    )
    wait_finished(page, "classify")
    details = card(page, "classify", "compiled").locator(".details")
    expect(details).to_contain_text(
        re.compile(r"compile\s*\d+.* s, (pays back after|no payback seen)")
    )
    cells = page.locator("#classify-table tr[data-backend=compiled] td")
    expect(cells.nth(1)).to_contain_text(re.compile(r"\d s"))
    begun = time.monotonic()
    run(page, "classify")
    wait_finished(page, "classify")
    assert time.monotonic() - begun < 10


def test_untrained_weights_mark_every_output(page: Page) -> None:
    """A model whose weights are not here runs for timing only, and says so."""
    open_tab(page, "Classify")
    page.locator("#classify-model input").click()
    page.get_by_role("option", name="ViT-B/16").click()
    page.locator("#classify-untrained input").check()
    expect(page.locator("#classify-compare .box-blr-torch input")).to_be_checked()
    page.locator("#classify-compare .box-dense input").uncheck()
    fill_number(page, "classify-repeats", 3)
    run(page, "classify")
    assert "untrained" in wait_finished(page, "classify")
    expect(card(page, "classify", "blr-torch").locator(".note")).to_have_text("untrained weights")
    expect(page.locator("#classify-table .footnote")).to_contain_text("untrained")


def test_an_example_picture_is_one_click_away(page: Page) -> None:
    open_tab(page, "Classify")
    picture = page.locator("#classify-image img")
    before = picture.get_attribute("src")
    page.locator(".examples .gallery-item").nth(2).click()
    expect(picture).not_to_have_attribute("src", str(before))


def test_closing_the_page_frees_the_device(pages: Watched) -> None:
    """A run that nobody looks at any more stops (C1)."""
    left, stays = pages.open(), pages.open()
    fill_number(left, "generate-steps", 1000)
    run(left, "generate")
    expect(card(left, "generate", "dense").locator(".note")).to_contain_text(
        re.compile(r"step \d+ of 1000"), timeout=60_000
    )
    left.close()
    fill_number(stays, "generate-steps", 2)
    run(stays, "generate")
    wait_finished(stays, "generate")


def test_ticking_a_backend_shows_its_card(page: Page) -> None:
    expect(card(page, "generate", "compiled")).not_to_be_visible()
    page.locator("#generate-compare .box-compiled input").check()
    expect(card(page, "generate", "compiled")).to_be_visible()
    page.locator("#generate-compare .box-dense input").uncheck()
    expect(card(page, "generate", "dense")).not_to_be_visible()


def test_the_dice_draw_a_new_seed(page: Page) -> None:
    field = page.locator("#generate-seed input")
    before = field.input_value()
    page.locator("#generate-dice").click()
    expect(field).not_to_have_value(before)


def test_a_dark_browser_gets_the_same_page(pages: Watched) -> None:
    page = pages.open()
    page.emulate_media(color_scheme="dark")
    page.reload()
    page.wait_for_selector("#generate-run")
    ground = page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    text = page.evaluate(
        "getComputedStyle(document.querySelector('#generate-verdict .verdict')).color"
    )
    assert text != "rgb(255, 255, 255)"


OVERFLOW = """() => [...document.querySelectorAll('.card, .page-head')]
    .filter(card => card.offsetParent).flatMap(card => {
        const edge = card.getBoundingClientRect().right + 1;
        return [...card.querySelectorAll('b, dt, dd, span, p, img, .frame, button')]
            .filter(e => e.offsetParent && !e.closest('.summary, .chart-head'))
            .filter(e => e.getBoundingClientRect().right > edge)
            .map(e => `${e.tagName} ${e.textContent.slice(0, 30)}`);
    })"""


@pytest.mark.parametrize("width", [390, 800, 1024, 1360])
def test_nothing_sticks_out_at_any_width(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for tab in ("Generate", "Classify"):
        if not page.get_by_role("tab", name=tab, exact=True).is_visible():
            continue
        open_tab(page, tab)
        page.wait_for_timeout(300)
        assert page.evaluate(OVERFLOW) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_keyboard_is_enough(page: Page, pages: Watched) -> None:
    """Every control has a name, shows where the focus is, and Enter runs."""
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, [role=tab]')]
            .filter(e => e.offsetParent && !(e.ariaLabel || e.labels?.length || e.innerText.trim()))
            .map(e => e.outerHTML)"""
    )
    assert nameless == []
    box = page.locator("#generate-compare .box-compiled input")
    page.locator("#generate-compare .box-dense input").focus()
    page.keyboard.press("Tab")
    expect(box).to_be_focused()
    assert box.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    fill_number(page, "generate-steps", 2)
    page.locator("#generate-guidance input").focus()
    page.keyboard.press("Tab")
    expect(page.locator("#generate-run")).to_be_focused()
    page.keyboard.press("Enter")
    wait_finished(page, "generate")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", "", "Seed is empty; enter a number"),
        ("seed", "1.5", "Seed must be a whole number, got 1.5"),
        ("steps", "1001", "Steps must be between 1 and 1000, got 1001"),
        ("images", "0", "Images must be between 1 and 8, got 0"),
    ],
)
def test_a_wrong_number_is_named(page: Page, name: str, value: str, message: str) -> None:
    """The field and the value, and nothing runs (C8)."""
    field = page.locator(f"#generate-{name} input")
    field.fill(value)
    field.press("Tab")
    run(page, "generate")
    expect(page.get_by_text(message)).to_be_visible()
    expect(page.locator("#generate-stop")).to_be_disabled()


def test_the_whole_app_stays_small(page: Page, server: Server) -> None:
    """All its processes together, with three backends warm."""
    open_tab(page, "Classify")
    page.locator("#classify-compare .box-compiled input").check()
    fill_number(page, "classify-repeats", 3)
    run(page, "classify")
    wait_finished(page, "classify")
    main = psutil.Process(server.process.pid)
    workers = [p for p in main.children() if any("app.engine.worker" in a for a in p.cmdline())]
    assert len(workers) == 3
    for backend in ("dense", "blr-torch", "compiled"):
        assert median_ms(page, "classify", backend) > 0
    total = 0
    for process in (main, *main.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended takes nothing
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.uss)
    assert total < 4 * 2**30
