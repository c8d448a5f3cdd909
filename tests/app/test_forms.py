"""What a person or a program sends: checked on the server, refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gradio.utils import get_upload_folder
from PIL import Image

from app.context import Context, refusal
from app.engine import BackendStatus
from app.forms import (
    Models,
    check_variant,
    chosen_backends,
    class_choices,
    classify_job,
    find_class,
    generate_job,
    read_picture,
    uploaded_path,
)
from model_zoo.registry import ModelEntry, assets_dir, get_model

IMAGENET = get_model("dit-xl-2-256")
GOOD: dict[str, Any] = {
    "class_wanted": 2, "variant": "blast", "seed": 7, "steps": 25, "guidance": 4.0,
    "images": 1, "untrained": True,
}  # fmt: skip


def test_a_good_form_becomes_a_job() -> None:
    job = generate_job(IMAGENET, **GOOD)
    assert (job.model, job.class_id, job.steps, job.guidance) == ("dit-xl-2-256", 2, 25, 4.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("class_wanted", value)
            for value in (
                1001,
                -1,
                1000,
                [],
                None,
                "",
                "no such thing",
                2.5,
                "--5",
                "²",
                "9" * 5000,
            )
        ],
        *[("steps", value) for value in (0, 1001, -3, 2.5, "ten", None, float("nan"))],
        *[("guidance", value) for value in (float("nan"), float("inf"), -1, "4", None, 10**400)],
        *[("images", value) for value in (0, 9, 1.5, None)],
        *[("seed", value) for value in (-1, 1.5, "x", None, 2**80)],
        ("variant", "butterfly"),
        ("untrained", "yes"),
    ],
)
def test_wrong_values_never_reach_the_model(field: str, value: Any) -> None:
    """Ids, steps and guidance that break or fool a model are refused in one line (C8)."""
    with pytest.raises((TypeError, ValueError)) as caught:
        generate_job(IMAGENET, **(GOOD | {field: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("repeats", 0), ("repeats", 1001), ("batch", 0), ("batch", 65), ("batch", "2")],
)
def test_forwards_and_batch_are_bounded(tmp_path: Path, field: str, value: Any) -> None:
    """Values that would run for hours or fill the memory are refused (C8)."""
    path = tmp_path / "upload.png"
    Image.new("RGB", (8, 8), "red").save(path)
    good = {
        "image": read_picture(path), "variant": "blast", "repeats": 3, "batch": 1,
        "untrained": True,
    }  # fmt: skip
    entry = get_model("vit-b-16")
    assert classify_job(entry, **good).repeats == 3
    with pytest.raises((TypeError, ValueError), match=field):
        classify_job(entry, **(good | {field: value}))


@pytest.mark.parametrize("variant", ["butterfly", None, ["blast"], {}, 3])
def test_variants_are_known_or_refused(variant: Any) -> None:
    with pytest.raises(ValueError, match="variant must be one of low_rank, monarch, blast"):
        check_variant(variant)


@pytest.mark.parametrize("text", ["2", " great white shark", "GREAT WHITE SHARK", "White Shark"])
def test_classes_by_id_and_name_in_any_case(text: str) -> None:
    """The id and every name of a class find it; the second class is the great white shark (C7)."""
    assert find_class(IMAGENET, text) == 2


def test_a_name_of_two_classes_offers_each() -> None:
    """Two ImageNet classes are a crane (C7)."""
    with pytest.raises(ValueError, match=r"134") as caught:
        find_class(IMAGENET, "Crane")
    assert "517" in str(caught.value)
    cranes = [text for text, _ in class_choices(IMAGENET) if "crane" in text.casefold()]
    assert len(cranes) >= 2
    assert len(set(cranes)) == len(cranes)


def test_missing_weights_are_named_with_the_way_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model without weights says how to get them, and can be waived (C9)."""
    monkeypatch.setattr(ModelEntry, "available", lambda self: False)
    with pytest.raises(ValueError, match="hf download facebook/DiT-XL-2-256"):
        generate_job(IMAGENET, **(GOOD | {"untrained": False}))
    assert generate_job(IMAGENET, **GOOD).untrained


def test_backends_that_cannot_run_say_why() -> None:
    """Greyed backends are refused on the server too (C11)."""
    status = [BackendStatus("blr-triton", False, "needs an NVIDIA GPU")]
    with pytest.raises(ValueError, match="BLR Triton cannot run here: needs an NVIDIA GPU"):
        chosen_backends(["dense", "blr-triton"], status)
    assert chosen_backends(["blr-torch", "dense"], status) == ["dense", "blr-torch"]
    for wrong in ([], ["fast"], "dense", [1], None):
        with pytest.raises((TypeError, ValueError)):
            chosen_backends(wrong, status)


def test_models_of_the_other_task_are_refused(context: Context) -> None:
    with pytest.raises(ValueError, match="unknown model 'vit-b-16'"):
        context.models.get("vit-b-16", "generate")
    with pytest.raises(ValueError, match="expected one of"):
        context.models.get(["demo-dit"])


def test_only_uploads_are_read(tmp_path: Path) -> None:
    """A path on the server is no upload (C15)."""
    outside = tmp_path / "secret.png"
    Image.new("RGB", (4, 4)).save(outside)
    for wrong in (
        {"path": str(outside)},
        {"path": "/etc/passwd"},
        {"path": f"{get_upload_folder()}/../../etc/passwd"},
        {"path": ""},
        {"url": "http://127.0.0.1/"},
        "file.png",
    ):
        with pytest.raises(ValueError, match="must be an uploaded file"):
            uploaded_path(wrong)
    assert uploaded_path(None) is None


@pytest.mark.parametrize("content", [b"", b"not a picture", b"\x89PNG\r\n\x1a\nbroken"])
def test_what_is_no_picture_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """A bad file is one calm sentence, not a traceback (C5)."""
    path = tmp_path / "upload.png"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="upload") as caught:
        read_picture(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="choose a picture"):
        read_picture(None)


def test_refusals_are_one_sentence() -> None:
    assert refusal(ValueError("steps must be 1\nTraceback")).message == "Steps must be 1"
    assert len(refusal(ValueError(f"no class is named {'x' * 10**5}")).message) < 520


def test_a_folder_named_at_the_start_is_what_a_visitor_starts_with() -> None:
    """It has its folder's name; the other task keeps its bundled model."""
    folder = assets_dir() / "demo" / "dit"
    offered = Models([folder])
    assert (offered.first("generate").title, offered.first("generate").bundled) == ("dit", False)
    assert offered.first("generate").id == str(folder.resolve())
    assert offered.first("classify").id == "demo-vit"
    assert Models().first("generate").id == "demo-dit"
