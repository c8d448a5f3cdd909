from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiTPipeline, DPMSolverMultistepScheduler
from PIL import Image
from safetensors.torch import load_file
from tiny import tiny_pipeline, tiny_transformer, write_dit

from blr_kernels import BLRLinear
from model_zoo.checkpoint import CheckpointError, save_variant
from model_zoo.convert import convert_
from model_zoo.dit import (
    PAPER_SIZES,
    Denoiser,
    DiT,
    decode,
    denoise,
    dit_rules,
    fuse_qkv_,
    load_dit,
    save_dit,
)
from model_zoo.registry import find_class, get_model
from model_zoo.untrained import untrained_variant_


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dit(tmp_path_factory.mktemp("dit") / "thousand", 1000, labels=False)


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dit(tmp_path_factory.mktemp("dit") / "five", 5)


def pictures(dit: DiT, ids: list[int], **options: Any) -> list[Image.Image]:
    request = {"seed": 5, "steps": 4, "guidance": 1.0, **options}
    *_, latents = denoise(dit, ids, **request)
    return decode(dit, latents)


def pipeline_pictures(
    pipeline: DiTPipeline, ids: list[int], *, steps: int = 4, guidance: float = 1.0
) -> list[Image.Image]:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        ids,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(5),
        num_inference_steps=steps,
    ).images


def largest_difference(ours: list[Image.Image], theirs: list[Image.Image]) -> int:
    assert len(ours) == len(theirs)
    assert np.asarray(theirs[0]).std() > 5, "a flat picture would hide differences"
    return max(
        int(np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)).max())
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("fuse", [False, True])
def test_guided_pictures_equal_those_of_diffusers(thousand: Path, fuse: bool) -> None:
    expected = pipeline_pictures(DiTPipeline.from_pretrained(thousand), [3, 999, 0], guidance=4.0)
    ours = pictures(load_dit(thousand, fuse_qkv=fuse), [3, 999, 0], guidance=4.0)
    assert largest_difference(ours, expected) <= (1 if fuse else 0)


@pytest.mark.parametrize("fuse", [False, True])
def test_unguided_pictures_equal_those_of_diffusers(five: Path, fuse: bool) -> None:
    expected = pipeline_pictures(DiTPipeline.from_pretrained(five), [3, 0])
    ours = pictures(load_dit(five, fuse_qkv=fuse), [3, 0])
    assert largest_difference(ours, expected) <= (1 if fuse else 0)


def test_other_schedulers_run_as_in_diffusers(thousand: Path, tmp_path: Path) -> None:
    pipeline = DiTPipeline.from_pretrained(thousand)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.save_pretrained(tmp_path / "dpm")
    ours = pictures(load_dit(tmp_path / "dpm"), [7], guidance=3.0, steps=5)
    assert largest_difference(ours, pipeline_pictures(pipeline, [7], guidance=3.0, steps=5)) <= 1


@pytest.mark.skipif(not get_model("demo-dit").available(), reason="bundled models not built yet")
def test_bundled_model_equals_diffusers_unguided_and_reloads_by_name(tmp_path: Path) -> None:
    """C6: the bundled pipeline saves, reloads and generates by name."""
    entry = get_model("demo-dit")
    folder = entry.folder()
    assert folder is not None
    pipeline = DiTPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    name = entry.labels()[7]
    ours = pictures(load_dit(entry), [find_class(entry.labels(), name)], steps=3)
    assert largest_difference(ours, pipeline_pictures(pipeline, [7], steps=3)) <= 1
    save_dit(load_dit(entry), tmp_path / "again")
    again = DiTPipeline.from_pretrained(tmp_path / "again")
    assert again.get_label_ids([name]) == [7]
    assert largest_difference(pipeline_pictures(again, [7], steps=3), ours) <= 1


def test_null_class_is_the_models_own(five: Path) -> None:
    """C6: diffusers takes the constant 1000, which this model does not have."""
    dit = load_dit(five)
    assert dit.num_classes == 5
    seen: list[list[int]] = []
    forward = dit.transformer.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["class_labels"].tolist())
        return forward(*args, **kwargs)

    dit.transformer.forward = spy  # type: ignore[method-assign]
    guided = pictures(dit, [1, 2], guidance=4.0, steps=1)
    assert seen == [[1, 2, 5, 5]]
    with pytest.raises(IndexError):
        pipeline_pictures(DiTPipeline.from_pretrained(five), [1, 2], guidance=4.0, steps=1)

    # The same by hand: classifier-free guidance from two separate forwards.
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    scheduler = copy.deepcopy(dit.scheduler)
    scheduler.set_timesteps(1)
    with torch.no_grad():
        run = {"timestep": scheduler.timesteps.expand(2), "return_dict": False}
        conditional = forward(noise, class_labels=torch.tensor([1, 2]), **run)[0][:, :4]
        free = forward(noise, class_labels=torch.tensor([5, 5]), **run)[0][:, :4]
        output = free + 4.0 * (conditional - free)
        latents = scheduler.step(output, scheduler.timesteps[0], noise).prev_sample
    assert largest_difference(guided, decode(dit, latents)) <= 1
    # Without guidance the model runs on the wanted classes alone.
    pictures(dit, [1, 2], steps=1)
    assert seen[-1] == [1, 2]


def test_out_channels_may_be_unset(tmp_path: Path) -> None:
    """C6: a TypeError in diffusers."""
    tiny_pipeline(5, out_channels=None).save_pretrained(tmp_path / "dit")
    dit = load_dit(tmp_path / "dit")
    assert dit.out_channels == 4
    assert len(pictures(dit, [0], guidance=2.0)) == 1


def test_labels_survive_saving(five: Path, tmp_path: Path) -> None:
    """C6: save, reload, generate by name."""
    dit = load_dit(five)
    save_dit(dit, tmp_path / "copy")
    assert sorted(path.suffix for path in (tmp_path / "copy").rglob("*.*")) == [
        *[".json"] * 4,
        *[".safetensors"] * 2,
    ]
    again = load_dit(tmp_path / "copy")
    assert again.labels == dit.labels
    index = find_class(again.labels, "ALIAS 3")
    assert index == 3
    assert largest_difference(pictures(again, [index]), pictures(dit, [3])) == 0
    theirs = DiTPipeline.from_pretrained(tmp_path / "copy")
    assert theirs.get_label_ids(["thing 3"]) == [3]
    assert largest_difference(pictures(again, [3]), pipeline_pictures(theirs, [3])) <= 1


def test_converted_model_saves_reloads_and_generates_by_name(five: Path, tmp_path: Path) -> None:
    """C6: a converted one is a variant of its base."""
    base = tmp_path / "base"
    save_dit(load_dit(five), base)
    dit = load_dit(base)
    report = convert_(dit.transformer, dit_rules("blast", blocks=3))
    assert {layer.name.split(".", 2)[2] for layer in report.layers} == {
        "attn1.to_qkv",
        "ff.net.0.proj",
        "norm1.linear",
    }
    with pytest.raises(ValueError, match="saved as a variant"):
        save_dit(dit, tmp_path / "x")
    entry = get_model(str(base))
    save_variant(entry.variant_path("blast"), dit.transformer, base=entry.id, report=report)
    again = load_dit(base, variant="blast")
    assert any(isinstance(module, BLRLinear) for module in again.transformer.modules())
    index = find_class(again.labels, "thing 4")
    assert largest_difference(pictures(again, [index]), pictures(dit, [4])) == 0
    assert largest_difference(pictures(again, [4]), pictures(load_dit(base), [4])) > 1

    with pytest.raises(ValueError, match="has no Monarch variant here"):
        load_dit(base, variant="monarch")
    with pytest.raises(CheckpointError, match="fuse q, k and v first"):
        load_dit(base, variant="blast", fuse_qkv=False)
    other = write_dit(tmp_path / "other", 5, seed=3)
    with pytest.raises(CheckpointError, match="other weights of this architecture"):
        load_dit(other, variant=entry.variant_path("blast"))


def test_published_format_is_read(five: Path, tmp_path: Path) -> None:
    """`.bin` files and the legacy class name, as facebook/DiT-XL-2-256 has them."""
    legacy = tmp_path / "legacy"
    tiny_pipeline(5).save_pretrained(legacy, safe_serialization=False)
    assert not list(legacy.rglob("*.safetensors"))
    index = legacy / "model_index.json"
    content = json.loads(index.read_text())
    content["transformer"] = ["diffusers", "Transformer2DModel"]
    index.write_text(json.dumps(content))
    path = legacy / "transformer" / "config.json"
    config = {
        **json.loads(path.read_text()),
        "_class_name": "Transformer2DModel",
        "cross_attention_dim": None,
        "num_vector_embeds": None,
        "use_linear_projection": False,
    }
    path.write_text(json.dumps(config))
    weights = legacy / "transformer" / "diffusion_pytorch_model.bin"
    tensors = torch.load(weights, weights_only=True)
    torch.save({**tensors, "pos_embed.pos_embed": torch.zeros(1, 16, 36)}, weights)
    ours = pictures(load_dit(legacy), [2])
    assert largest_difference(ours, pictures(load_dit(five), [2])) == 0


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("a pickle ran",))


def test_pickles_of_more_than_weights_are_not_opened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dit"
    tiny_pipeline(5).save_pretrained(folder, safe_serialization=False)
    torch.save({"x": Trap()}, folder / "transformer" / "diffusion_pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds more than weights"):
        load_dit(folder)
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(CheckpointError, match=r"no readable weights file|more than weights"):
        load_dit(folder)
    other = tmp_path / "other"
    tiny_pipeline(5).save_pretrained(other, safe_serialization=False)
    torch.save({"x": Trap()}, other / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"vae/diffusion_pytorch_model\.bin cannot be loaded"):
        load_dit(other)
    assert "a pickle ran" not in capfd.readouterr().out


def test_broken_folders_are_named(five: Path, tmp_path: Path) -> None:
    """C9: what is missing is named."""
    folder = tmp_path / "dit"
    save_dit(load_dit(five), folder)
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load_dit(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"diffusion_pytorch_model\.bin is missing from"):
        load_dit(folder)
    path.write_bytes(data)
    config = folder / "transformer" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "num_layers": 3}))
    with pytest.raises(CheckpointError, match=r"lacks transformer_blocks\.2"):
        load_dit(folder)
    config.write_text(json.dumps({**content, "num_embeds_ada_norm": 6}))
    with pytest.raises(CheckpointError, match=r"must have shape \(7, 36\), got \(6, 36\)"):
        load_dit(folder)
    config.write_text(json.dumps({**content, "_class_name": "UNet2DModel"}))
    with pytest.raises(ValueError, match="is of a UNet2DModel"):
        load_dit(folder)
    with pytest.raises(ValueError, match="expected one to generate"):
        load_dit("vit-b-16")


def test_dtype_and_half_precision(five: Path) -> None:
    dit = load_dit(five, dtype=torch.bfloat16)
    tensors = [*dit.transformer.parameters(), *dit.transformer.buffers(), *dit.vae.parameters()]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert dit.dtype == torch.bfloat16
    first, second = Denoiser(dit, [1], seed=3, steps=2, guidance=1.0), load_dit(five)
    exact = Denoiser(second, [1], seed=3, steps=2, guidance=1.0)
    assert torch.equal(first.latents, exact.latents.bfloat16())  # the same noise, rounded


def test_a_stored_tensor_is_read_once(five: Path) -> None:
    """The fused projections are the stored ones, row by row."""
    stored = load_file(five / "transformer" / "diffusion_pytorch_model.safetensors")
    fused = load_dit(five).transformer.get_submodule("transformer_blocks.1.attn1.to_qkv")
    name = "transformer_blocks.1.attn1.to_{}.{}"
    for leaf in ("weight", "bias"):
        expected = torch.cat([stored[name.format(part, leaf)] for part in "qkv"])
        assert torch.equal(getattr(fused, leaf), expected)


def test_fusing_removes_the_parts_and_keeps_the_output() -> None:
    model = tiny_transformer(5)
    count = sum(parameter.numel() for parameter in model.parameters())
    run = {
        "timestep": torch.tensor([10, 500]),
        "class_labels": torch.tensor([1, 4]),
        "return_dict": False,
    }
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = model(x, **run)[0]
        assert fuse_qkv_(model) == 2
        after = model(x, **run)[0]
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert fuse_qkv_(model) == 0
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    with torch.device("meta"):
        meta = tiny_transformer(5)
    assert fuse_qkv_(meta) == 2
    assert all(parameter.is_meta for parameter in meta.parameters())


BAD_REQUESTS = [
    ({"class_ids": [1001]}, ValueError, "class id must be between 0 and 999, got 1001"),
    ({"class_ids": [1000]}, ValueError, "class id must be between 0 and 999, got 1000"),
    ({"class_ids": [-1]}, ValueError, "got -1"),
    ({"class_ids": []}, ValueError, "1 to 64 ids, got 0"),
    ({"class_ids": [0] * 65}, ValueError, "1 to 64 ids, got 65"),
    ({"class_ids": [True]}, TypeError, "class id must be an int, got True"),
    ({"class_ids": [1.0]}, TypeError, "class id must be an int"),
    ({"class_ids": "12"}, TypeError, "list of ints"),
    ({"steps": 0}, ValueError, "steps must be between 1 and 1000, got 0"),
    ({"steps": 1001}, ValueError, "got 1001"),
    ({"steps": 2.0}, TypeError, "steps must be an int"),
    ({"guidance": float("nan")}, ValueError, "finite"),
    ({"guidance": float("inf")}, ValueError, "finite"),
    ({"guidance": -1.0}, ValueError, "not negative"),
    ({"guidance": "4"}, TypeError, "guidance must be a number"),
    ({"seed": -1}, ValueError, "seed must be between"),
    ({"seed": 2**63}, ValueError, "seed must be between"),
]


@pytest.mark.parametrize(("change", "error", "match"), BAD_REQUESTS)
def test_bad_requests_never_reach_the_model(
    thousand: Path, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    """C8."""
    dit = load_dit(thousand)

    def reached(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the model saw a bad request")

    dit.transformer.forward = reached  # type: ignore[method-assign]
    request = {"class_ids": [1], "seed": 0, "steps": 2, "guidance": 4.0, **change}
    with pytest.raises(error, match=match):
        denoise(dit, **request)


def test_steps_one_at_a_time(five: Path) -> None:
    dit = load_dit(five)
    run = Denoiser(dit, [1, 2], seed=1, steps=3, guidance=2.0)
    assert (run.index, run.total, run.done, run.guided) == (0, 3, False, True)
    states = [run.latents]
    while not run.done:
        states.append(run.step())
        assert len(decode(dit, run.latents)) == 2  # a preview changes nothing
    assert run.index == 3
    with pytest.raises(RuntimeError, match="all 3 steps"):
        run.step()
    repeated = list(denoise(dit, [1, 2], seed=1, steps=3, guidance=2.0))
    assert all(torch.equal(a, b) for a, b in zip(states[1:], repeated, strict=True))


def test_guidance_zero_forgets_the_class(five: Path) -> None:
    dit = load_dit(five)
    first, second = (
        list(denoise(dit, [index], seed=1, steps=2, guidance=0.0))[-1] for index in (1, 2)
    )
    assert torch.equal(first, second)


def test_rules_leave_the_rest_dense(five: Path) -> None:
    dit = load_dit(five)
    report = convert_(dit.transformer, dit_rules("low_rank", layers="all", fraction=0.4))
    assert len(report.layers) == 10
    assert all("emb" in name or "proj_out" in name for name in report.skipped), (
        "only embedders and the output stay dense"
    )
    assert all(layer.parameters_after <= 0.6 * layer.parameters_before for layer in report.layers)
    with pytest.raises(ValueError, match="'paper' or 'all'"):
        dit_rules("blast", layers="some")


@pytest.mark.parametrize("variant", [None, "low_rank", "monarch", "blast"])
def test_untrained_from_a_folder(five: Path, variant: str | None) -> None:
    dit = load_dit(five, untrained=True, variant=variant)
    assert dit.untrained
    for tensor in (*dit.transformer.parameters(), *dit.vae.parameters()):
        assert not tensor.is_meta
        assert bool(torch.isfinite(tensor).all())
        assert bool(tensor.any())
    converted = [m for m in dit.transformer.modules() if isinstance(m, BLRLinear)]
    assert len(converted) == (0 if variant is None else 6)
    first, second = pictures(dit, [0]), pictures(dit, [1])
    assert largest_difference(first, second) > 0  # open gates: the class matters
    repeated = load_dit(five, untrained=True, variant=variant)
    assert largest_difference(pictures(repeated, [0]), first) == 0


def test_full_size_has_the_papers_sizes() -> None:
    from model_zoo.dit import _TRANSFORMER, _transformer_on_meta

    model = _transformer_on_meta({**_TRANSFORMER, "sample_size": 32})
    # 675 M as published, plus the embedders that diffusers gives to every block.
    embedders = sum(p.numel() for p in model.transformer_blocks[0].norm1.emb.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert (total - 27 * embedders) / 1e6 == pytest.approx(675, abs=1)
    with pytest.raises(ValueError, match="none of the layers"):
        untrained_variant_(torch.nn.Sequential(), "blast", PAPER_SIZES)
    fuse_qkv_(model)
    structures = untrained_variant_(model, "blast", PAPER_SIZES)
    assert len(structures) == 84
    found = {str(structure) for structure in structures.values()}
    assert found == {"BLAST b9 r384", "BLAST b9 r256"}
    assert all(parameter.is_meta for parameter in model.parameters())
