"""The page as a whole: what it imports, how it is served, what programs can call."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stand_in import Engine

from app.context import Context
from app.controls import box_updates
from app.engine import BACKENDS
from app.forms import Models
from app.theme import STYLE_SHEET, theme
from app.ui import build, device_line, header, launch_arguments

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(context: Context) -> dict[str, Any]:
    return dict(build(context).get_config_file())


def arguments() -> dict[str, Any]:
    return launch_arguments(
        host="127.0.0.1", port=None, share=False, max_file_size="10mb", inbrowser=False
    )


def test_the_page_is_served_with_safe_settings() -> None:
    """Nothing public, stored or unbounded (C15)."""
    expected = {
        "server_name": "127.0.0.1", "share": False, "max_file_size": "10mb",
        "allowed_paths": [], "enable_monitoring": False, "strict_cors": True,
        "show_error": False, "run_history": False, "ssr_mode": False,
    }  # fmt: skip
    given = arguments()
    assert {key: given[key] for key in expected} == expected


def test_requests_are_bounded_and_leave_nothing_behind(context: Context) -> None:
    page = build(context)
    assert page.max_queue_size if hasattr(page, "max_queue_size") else page._queue.max_size == 32
    assert page.delete_cache == (86400, 86400)
    assert page.analytics_enabled is False


def test_programs_can_call_four_endpoints(config: dict[str, Any]) -> None:
    public = {
        dependency["api_name"]
        for dependency in config["dependencies"]
        if dependency["api_visibility"] == "public"
    }
    assert public == {"models", "backends", "generate", "classify"}


def test_everything_on_the_device_shares_a_queue(context: Context) -> None:
    fns = build(context).fns.values()
    shared = [fn for fn in fns if fn.concurrency_id == "device"]
    assert len(shared) == 4
    assert all(fn.queue for fn in shared)


def test_a_visitor_finds_it_ready_to_run(config: dict[str, Any]) -> None:
    """On a CPU dense and BLR PyTorch are ticked; what cannot run is grey with its reason."""
    boxes = [
        component["props"]
        for component in config["components"]
        if "backend-box" in (component["props"].get("elem_classes") or [])
    ][:5]
    assert [box["label"] for box in boxes] == [info.title for info in BACKENDS]
    assert [box["value"] for box in boxes] == [True, False, False, True, False]
    assert [box["interactive"] for box in boxes] == [True, True, False, True, True]
    assert boxes[2]["info"] == "needs an NVIDIA GPU"
    assert "compiles, about 20 s" in boxes[1]["info"]


def test_a_gpu_that_has_not_answered_yet_is_given_the_benefit_of_the_doubt() -> None:
    """The page does not wait for a GPU, and what a visitor starts with stays ticked."""

    class Slow(Engine):
        answered = False

        def device_info(self) -> dict[str, Any]:
            return super().device_info() | {"ready": self.answered}

    engine = Slow("cuda:0", speed=0.0)
    context = Context(engine, Models(), "cuda:0")
    boxes = [
        component["props"]
        for component in build(context).get_config_file()["components"]
        if "backend-box" in (component["props"].get("elem_classes") or [])
    ][:5]
    assert [box["value"] for box in boxes] == [True, True, True, False, False]
    assert context.status("demo-dit", "blast") == []
    engine.answered = True
    kept = box_updates(
        context.status("demo-dit", "blast"), [True, True, True, False, False], ["dense"]
    )
    assert [update.value for update in kept] == [True, True, False, False, False]


def test_no_request_leaves_the_machine_for_looks(config: dict[str, Any]) -> None:
    """No font, script or style from elsewhere (C10)."""
    sheet = STYLE_SHEET.read_text(encoding="utf-8")
    assert re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.-]+", sheet) == []
    assert theme()._stylesheets == []
    texts = json.dumps([component["props"] for component in config["components"]])
    assert re.findall(r"<(?:script|link|iframe)", texts) == []


def test_each_backend_has_its_colour_in_the_sheet() -> None:
    sheet = STYLE_SHEET.read_text(encoding="utf-8")
    for info in BACKENDS:
        assert f".box-{info.id} {{ --lab-colour: {info.colour}; }}" in sheet


def test_labels_hold_no_emoji(config: dict[str, Any]) -> None:
    for component in config["components"]:
        label = component["props"].get("label")
        assert label is None or all(ord(letter) < 0x2600 for letter in label)


def test_the_device_in_one_line() -> None:
    line = device_line(
        {
            "name": "NVIDIA H200", "device": "cuda:0", "ready": True, "error": "",
            "memory_total_mib": 144_384.0, "memory_free_mib": 142_540.8,
            "versions": {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2"},
        }
    )  # fmt: skip
    assert "NVIDIA H200 · 139.2 of 141 GiB free · torch 2.11.0 · triton 3.6.0" in line


PAGE_LOAD = """
import sys, urllib.request
sys.path.insert(0, "tests/app")
from app.serve import quiet_environment
quiet_environment()
from stand_in import Engine
from app.context import Context
from app.controls import box_updates
from app.forms import Models
from app.ui import build, launch_arguments
page = build(Context(Engine(), Models(), "cpu"))
_, url, _ = page.launch(**launch_arguments(
    host="127.0.0.1", port=None, share=False, max_file_size="1mb", inbrowser=False))
assert b"BLR Lab" in urllib.request.urlopen(url, timeout=30).read()
page.close(verbose=False)
print(sorted({"torch", "diffusers", "timm", "triton", "transformers"} & set(sys.modules)))
"""


def test_the_web_process_loads_no_model_library() -> None:
    """After a page load neither torch, diffusers nor timm is imported (C13)."""
    done = subprocess.run(
        [sys.executable, "-c", PAGE_LOAD],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_only_a_bundled_model_is_called_so(context: Context) -> None:
    assert "bundled demo model" in header(context.models.first("generate"))
    assert "bundled" not in header(context.models.get("dit-xl-2-256"))
    assert "BLR Lab" in header(None)
