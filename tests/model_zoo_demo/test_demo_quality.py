"""The bundled models do what they are for, in every form that is shipped, through the product."""

from __future__ import annotations

import pytest

from model_zoo.dit import decode, denoise, load_dit
from model_zoo.images import open_image
from model_zoo.registry import assets_dir
from model_zoo.vit import classify, load_vit

FORMS = [None, "low_rank", "monarch", "blast"]
# Eight of the 128 classes, one sample each.
CLASSES = list(range(3, 128, 16))


@pytest.mark.parametrize("variant", FORMS)
def test_samples_are_recognised_by_the_bundled_vit(variant: str | None) -> None:
    dit, vit = load_dit("demo-dit", variant=variant), load_vit("demo-vit")
    *_, latents = denoise(dit, CLASSES, seed=3, steps=12, guidance=4.0)
    seen = [top[0][0] for top in classify(vit, decode(dit, latents))]
    # Of 1,024 samples 96 % and more are recognised; chance is below 1 %.
    assert sum(a == b for a, b in zip(seen, CLASSES, strict=True)) >= 7


@pytest.mark.parametrize("variant", FORMS)
def test_examples_are_classified_as_their_names(variant: str | None) -> None:
    vit = load_vit("demo-vit", variant=variant)
    examples = {
        path.stem: path
        for path in (assets_dir() / "examples").glob("*.png")
        if path.stem in vit.labels.values()
    }
    assert len(examples) >= 6
    seen = classify(vit, [open_image(path) for path in examples.values()])
    assert [top[0][1] for top in seen] == list(examples)
