"""Which path and config a call gets, where they are from, and what a person is told of it."""

from __future__ import annotations

import json
import logging
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from blr_expected import assert_close, call, dense, expected, factors_for
from blr_tuned import GPU, fake_path, make_call, write_configs

from blr_kernels import Backend, Blast, BLRLinear, LowRank, Monarch, explain
from blr_kernels.ops import choice
from blr_kernels.ops import paths as paths_module
from blr_kernels.ops.choice import choose, why_not_others
from blr_kernels.ops.paths import Call, Path, call_of, find_path, limits_of, paths, run_path
from blr_kernels.reference import ACTIVATIONS, activate
from blr_kernels.tuning import lookup


@dataclass
class Folders:
    """Where configs are looked for."""

    shipped: FilePath
    cache: FilePath


@pytest.fixture(autouse=True)
def folders(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folders]:
    """Empty folders of configs, and nothing remembered."""
    found = Folders(tmp_path / "shipped", tmp_path / "cache")
    monkeypatch.setattr(lookup, "SHIPPED", found.shipped)
    monkeypatch.setenv("BLR_KERNELS_CACHE", str(found.cache))
    choice.forget()
    yield found
    choice.forget()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the paths it gets the only ones of every op."""

    def replace(*found: Path) -> None:
        monkeypatch.setattr(choice, "paths", lambda op: found)

    return replace


def picked(tokens: int, **options: bool) -> tuple[str, int]:
    """Path and size that a call of so many tokens gets."""
    found = choose(make_call(tokens), **options)
    return found.path.name, found.config["size"]


def test_preferred_path_where_nothing_is_tuned(use: Callable[..., None]) -> None:
    use(fake_path("few", most_tokens=16), fake_path("small", suited_tokens=100), fake_path("big"))
    assert [picked(tokens)[0] for tokens in (1, 16, 17, 100, 101)] == [
        "few",
        "few",
        "small",
        "small",
        "big",
    ]
    assert "computed default" in choose(make_call(3)).source


def test_unsuited_path_still_runs_what_no_other_can(use: Callable[..., None]) -> None:
    use(fake_path("small", suited_tokens=100), fake_path("few", most_tokens=16))
    assert picked(5000)[0] == "small"


def test_no_path_at_all_says_why(use: Callable[..., None]) -> None:
    use(fake_path("few", most_tokens=16), fake_path("some", most_tokens=99))
    with pytest.raises(RuntimeError, match=r"few: more than 16 tokens; some: more than 99 tokens"):
        choose(make_call(100))


def test_nearest_tokens_in_log_space(use: Callable[..., None], folders: Folders) -> None:
    use(fake_path("none"), fake_path("a"), fake_path("b"), fake_path("c"), fake_path("d"))
    table = {100: {"a": 3}, 196: {"b": 5}, 2048: {"c": 7}, 8192: {"d": 9}}
    write_configs(folders.shipped, make_call(), table)
    # 100 and 196 are equally far from 140, 2048 and 8192 from 4096.
    expected = {
        50: ("a", 3),
        100: ("a", 3),
        140: ("a", 3),
        141: ("b", 5),
        392: ("b", 5),
        1024: ("c", 7),
        2048: ("c", 7),
        4096: ("c", 7),
        4097: ("d", 9),
        10**6: ("d", 9),
    }
    assert {tokens: picked(tokens) for tokens in expected} == expected
    assert choose(make_call(196)).source == "tuned on NVIDIA H200 at 196 tokens (from the package)"
    assert "at 100 tokens, the nearest usable for 140" in choose(make_call(140)).source


def test_tokens_that_are_too_far_are_no_use(use: Callable[..., None], folders: Folders) -> None:
    """A tile for 64 tokens is bad advice for 200, and one for 4,096 is for 2,000."""
    use(fake_path("a"), fake_path("b", configs=[42]))
    write_configs(folders.shipped, make_call(), {64: {"b": 3}, 4096: {"b": 5}})
    near = {32: 3, 128: 3, 2048: 5, 8193: 5, 10**6: 5}
    assert {tokens: picked(tokens) for tokens in near} == {t: ("b", near[t]) for t in near}
    for tokens in (1, 31, 129, 1024, 2047):
        assert picked(tokens) == ("a", 1), tokens


def test_what_does_not_fill_the_device_counts_for_twice_as_many_only(
    use: Callable[..., None], folders: Folders
) -> None:
    use(fake_path("a"), fake_path("b"))
    for tuned, many in ((1024, ("a", 1)), (1025, ("b", 5))):
        write_configs(folders.shipped, make_call(), {tuned: {"b": 5}})
        choice.forget()
        assert picked(2 * tuned) == ("b", 5)
        assert picked(2 * tuned + 1) == many


def test_no_entry_counts_where_its_path_stops_to_suit(
    use: Callable[..., None], folders: Folders
) -> None:
    """Nor where it begins to; what it suits or does not suit at both is taken."""
    use(fake_path("few", suited_tokens=100), fake_path("b"), fake_path("c"))
    write_configs(folders.shipped, make_call(), {80: {"few": 2, "b": 3}, 240: {"few": 5}})
    assert [picked(tokens) for tokens in (80, 100)] == [("few", 2), ("few", 2)]
    # At 101 and 121 tokens "few" suits as little as at 240.
    assert picked(101) == ("b", 1)
    assert [picked(tokens) for tokens in (121, 480)] == [("few", 5), ("few", 5)]
    write_configs(folders.cache, make_call(), {160: {"c": 4}})
    choice.forget()
    assert picked(101) == ("c", 4)
    assert "at 160 tokens, the nearest usable for 101" in choose(make_call(101)).source


@pytest.mark.parametrize(
    ("structure", "sizes", "tokens"),
    [(Blast(3, 128), (768, 2304), 1024), (Blast(9, 256), (1152, 6912), 128)],
    ids=["ViT qkv", "DiT adaLN"],
)
def test_shipped_configs_of_far_fewer_tokens_do_not_count(
    structure: Blast, sizes: tuple[int, int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries are of 197 and 6,304 tokens, and of 2 and 16: none is near."""
    pytest.importorskip("triton")
    monkeypatch.setattr(lookup, "SHIPPED", FilePath(lookup.__file__).parent / "configs")
    asked = Call("blast", tokens, *sizes, structure.blocks, structure.rank, torch.bfloat16, GPU)
    assert lookup.entries(asked)
    assert lookup.nearest(asked) == []
    found = choose(asked)
    assert found.config == found.path.default_config(asked)
    assert found.source == "computed default, nothing tuned that this call can use"


def test_the_users_configs_win_over_the_shipped(use: Callable[..., None], folders: Folders) -> None:
    use(fake_path("a"), fake_path("b"))
    write_configs(folders.shipped, make_call(), {512: {"a": 3}, 4096: {"a": 4}})
    write_configs(folders.cache, make_call(), {512: {"b": 5}})
    assert picked(512) == ("b", 5)
    assert picked(4096) == ("a", 4)
    assert "from the user's cache" in choose(make_call(512)).source


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"BLR_KERNELS_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/blr_kernels"),
        ({"HOME": "/home/somebody"}, "/home/somebody/.cache/blr_kernels"),
    ],
)
def test_cache_folder(
    variables: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLR_KERNELS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert lookup.cache_dir() == FilePath(wanted)


def test_a_tuned_path_that_cannot_take_the_call(use: Callable[..., None], folders: Folders) -> None:
    """The best at 16 tokens takes no 17: the entry of 32 counts, far as it is."""
    use(fake_path("few", most_tokens=16), fake_path("a"), fake_path("b"))
    write_configs(folders.shipped, make_call(), {16: {"few": 2, "a": 8}, 32: {"b": 5, "a": 6}})
    assert picked(16) == ("few", 2)
    assert picked(17) == ("b", 5)
    found = choose(make_call(17))
    assert "at 32 tokens, the nearest usable for 17" in found.source
    assert why_not_others(make_call(17), found) == {
        "few": "cannot: more than 16 tokens",
        "a": "slower at 32 tokens: 6.0 us against 5.0",
    }


def test_a_tuned_path_that_is_not_here(use: Callable[..., None], folders: Folders) -> None:
    """The next best of the same entry runs: another path, or one that this device cannot have."""
    use(fake_path("never", most_tokens=0), fake_path("a"), fake_path("b"))
    times = {"unknown": 2, "never": 3, "b": 4, "a": 5}
    write_configs(folders.shipped, make_call(), {512: times})
    assert picked(512) == ("b", 4)


def test_kernels_only_leaves_the_library_out(use: Callable[..., None], folders: Folders) -> None:
    use(fake_path("cublas", library=True), fake_path("a"))
    assert picked(4) == ("cublas", 1)
    assert picked(4, kernels_only=True) == ("a", 1)
    write_configs(folders.shipped, make_call(), {512: {"cublas": 2, "a": 7}})
    choice.forget()
    assert picked(512) == ("cublas", 2)
    assert picked(512, kernels_only=True) == ("a", 7)
    reasons = why_not_others(make_call(512), choose(make_call(512), True), True)
    assert reasons == {"cublas": "calls PyTorch's library, and Backend.TRITON was asked for"}


def test_stale_config_is_told_and_ignored(
    use: Callable[..., None], folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    """A config from before a path's sizes were renamed."""
    use(find_path("low_rank", "triton"))
    write_configs(folders.shipped, make_call(), {512: {"triton": 3}})
    found = choose(make_call(512))
    assert found.config == found.path.default_config(make_call(512))
    assert "tune again: python -m blr_kernels.tuning --op low_rank" in caplog.text


def test_reasons_are_those_of_the_entry_that_was_taken(
    use: Callable[..., None], folders: Folders
) -> None:
    """A nearer entry knows all paths, but its best is no path of this call; times are of neither
    where a path was not timed.
    """
    stale = replace(fake_path("stale"), default_config=lambda call: {"rows": 1})
    late = fake_path("late", suited_tokens=1)
    use(fake_path("few", most_tokens=16), fake_path("a"), stale, fake_path("b"), late)
    near = {"few": 1.0, "a": 2.0, "b": 3.0, "stale": 4.0, "late": 5.0}
    write_configs(folders.shipped, make_call(), {16: near, 40: {"stale": 5, "b": 6.25, "a": 7.5}})
    found = choose(make_call(20))
    assert (found.path.name, found.tokens) == ("b", 40)
    assert why_not_others(make_call(20), found) == {
        "few": "cannot: more than 16 tokens",
        "a": "slower at 40 tokens: 7.5 us against 6.2",
        "stale": "its config tuned at 40 tokens has other sizes than it takes",
        "late": "not timed at 40 tokens; likely slower at these sizes",
    }
    default = choose(make_call(200))
    assert (default.path.name, default.entry) == ("a", None)
    assert why_not_others(make_call(200), default) == {
        "few": "cannot: more than 16 tokens",
        "stale": "comes after a",
        "b": "comes after a",
        "late": "likely slower at these sizes",
    }


BROKEN = {
    "empty": "",
    "cut": '{"format": 1, "gpu": "NVI',
    "no object": "[1, 2]",
    "deep": "[" * 100_000,
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_corrupt_file_is_one_warning(
    content: str | bytes,
    use: Callable[..., None],
    folders: Folders,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use(fake_path("a"), fake_path("b"))
    write_configs(folders.shipped, make_call(), {512: {"b": 3}})
    file = write_configs(folders.cache, make_call(), {512: {"a": 9}})
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert picked(512) == ("b", 3)
    assert picked(513) == ("b", 3)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert str(file) in warnings[0].getMessage()
    assert "delete the file, or tune the layer again" in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 2}, "format must be 1, got 2"),
        ({"gpu": "NVIDIA A40"}, "gpu must be 'NVIDIA H200', got 'NVIDIA A40'"),
        ({"rank": 7}, "rank must be 6, got 7"),
        ({"entries": []}, "entries must be an object"),
        ({"entries": {"many": {}}}, "tokens must be a positive number, got 'many'"),
        ({"entries": {"4": {"paths": {}}}}, "path must be one of its paths, got None"),
        ({"entries": {"4": {"paths": {"a": {"config": {"size": 1.5}}}}}}, "size must be an int"),
        ({"entries": {"4": {"paths": {"a": {"config": {}}}}}}, "us must be a number"),
    ],
)
def test_foreign_file_is_ignored(
    changed: dict[str, Any],
    message: str,
    use: Callable[..., None],
    folders: Folders,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use(fake_path("a"), fake_path("b"))
    file = write_configs(folders.cache, make_call(), {512: {"b": 3}})
    if "entries" in changed:
        data = {**lookup.header(make_call()), **changed}
        file.write_text(json.dumps(data))
    else:
        write_configs(folders.cache, make_call(), {512: {"b": 3}}, **changed)
    assert picked(512) == ("a", 1)
    assert message in caplog.text


def test_untuned_layer_logs_the_command_once(
    use: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    use(fake_path("a"))
    with caplog.at_level(logging.INFO, "blr_kernels"):
        for tokens in (512, 512, 4096):
            choose(make_call(tokens))
    assert [record.getMessage() for record in caplog.records] == [
        "no tuned config on NVIDIA H200; to tune: python -m blr_kernels.tuning --op low_rank "
        "--in 24 --out 36 --blocks 1 --rank 6 --tokens 512 --dtype float16"
    ]


def test_choosing_again_reads_nothing(
    use: Callable[..., None], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fake_path("a"))
    write_configs(folders.cache, make_call(), {512: {"a": 3}})
    choose(make_call())
    monkeypatch.setattr(lookup, "parse", None)
    assert timeit.timeit(lambda: choose(make_call()), number=1000) / 1000 < 100e-6


def test_explain_names_path_config_and_reasons(
    use: Callable[..., None], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("blr_kernels.ops.backend._capability", lambda device: (9, 0))
    monkeypatch.setattr(paths_module, "limits_of", lambda device: GPU)
    use(
        fake_path("few", most_tokens=16),
        fake_path("a"),
        fake_path("b"),
        fake_path("c"),
        fake_path("d", suited_tokens=1),
    )
    write_configs(folders.shipped, make_call(), {512: {"b": 36.0, "a": 41.2}})

    def told(tokens: int | None, **options: Any) -> Any:
        return explain(
            LowRank(6), 24, 36, dtype=torch.float16, device="cuda", tokens=tokens, **options
        )

    tuned = told(500)
    assert tuned.implementation is Backend.TRITON
    assert (tuned.path, dict(tuned.config)) == ("b", {"size": 36})
    assert tuned.source == (
        "tuned on NVIDIA H200 at 512 tokens, the nearest usable for 500 (from the package)"
    )
    assert tuned.other_paths == {
        "few": "cannot: more than 16 tokens",
        "a": "slower at 512 tokens: 41.2 us against 36.0",
        "c": "not timed at 512 tokens",
        "d": "not timed at 512 tokens; likely slower at these sizes",
    }
    for part in ("path b: size=36", tuned.source, "not a: slower at 512 tokens: 41.2 us"):
        assert part in str(tuned)
    assert told(512).other_paths["a"] == "slower here: 41.2 us against 36.0"
    assert told(512).other_paths["c"] == "not timed here"
    assert "computed default" in told(2).source
    assert told(None).path == ""
    assert told(None).implementation is Backend.TRITON
    assert told(512, backend=Backend.TORCH).path == ""
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        told(0)


def test_explain_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("blr_kernels.ops.backend._capability", lambda device: (9, 0))
    monkeypatch.setattr(paths_module, "limits_of", lambda device: GPU)
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "int8": True}
    told = explain(Blast(9, 384), 1152, 3456, tokens=4096, **sizes)
    asked = Call("blast_int8", 4096, 1152, 3456, 9, 384, torch.bfloat16, GPU)
    assert told.config == find_path("blast_int8", "triton").default_config(asked)
    assert "BLAST b9 r384 in int8 1152 -> 3456" in told.reason
    with pytest.raises(ValueError, match="int8 takes a BLAST structure, got low rank r6"):
        explain(LowRank(6), 24, 36, **sizes)


def test_explain_of_a_library_path(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("blr_kernels.ops.backend._capability", lambda device: (9, 0))
    monkeypatch.setattr(paths_module, "limits_of", lambda device: GPU)
    use(fake_path("cublas", library=True), fake_path("a"))
    arguments: dict[str, Any] = {"dtype": torch.float16, "device": "cuda", "tokens": 9}
    told = explain(LowRank(6), 24, 36, **arguments)
    assert (told.implementation, told.path) == (Backend.TORCH, "cublas")
    assert told.others == {Backend.TRITON: "a: comes after cublas"}
    asked = explain(LowRank(6), 24, 36, **arguments, backend=Backend.TRITON)
    assert (asked.implementation, asked.path) == (Backend.TRITON, "a")


OPS = ("blast", "blast_int8", "monarch", "low_rank")


def test_registered_paths() -> None:
    pytest.importorskip("triton")
    for op in OPS:
        names = [path.name for path in paths(op)]
        assert len(set(names)) == len(names)
        assert "triton" in names
        assert all(path.op == op for path in paths(op))
    library = {op: [path.name for path in paths(op) if path.library] for op in OPS}
    assert library == {
        "blast": ["bmm"],
        "blast_int8": [],
        "monarch": ["bmm"],
        "low_rank": ["cublas"],
    }
    with pytest.raises(ValueError, match=r"op must be one of blast, .*low_rank, got 'x'"):
        paths("x")


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tokens", [1, 16, 17, 197, 512, 6304, 16_384])
@pytest.mark.parametrize(
    ("op", "n_in", "n_out", "blocks", "rank"),
    [
        ("blast", 1152, 3456, 9, 384),
        ("blast", 768, 2304, 3, 128),
        ("blast", 4096, 11008, 16, 1488),
        ("monarch", 768, 3072, 4, 128),
        ("low_rank", 3072, 768, 1, 128),
        ("blast", 22, 33, 11, 5),
        ("blast_int8", 1152, 3456, 9, 384),
        ("blast_int8", 22, 33, 11, 5),
    ],
)
def test_candidates_are_few_and_hold_the_default(
    op: str, n_in: int, n_out: int, blocks: int, rank: int, tokens: int, itemsize: int
) -> None:
    pytest.importorskip("triton")
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    asked = Call(op, tokens, n_in, n_out, blocks, rank, dtype, GPU)
    for path in paths(op):
        if path.why_not(asked):
            continue
        candidates = [dict(config) for config in path.candidates(asked)]
        assert 1 <= len(candidates) <= 12
        assert all(config.keys() == candidates[0].keys() for config in candidates)
        assert path.default_config(asked) in candidates
        assert all(candidates.count(config) == 1 for config in candidates)


def test_path_whose_module_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older triton lacks what one path needs: the others run, and that one says so."""
    monkeypatch.setattr(
        paths_module,
        "_PATHS",
        {"low_rank": (("new", "missing.PATH"), ("cublas", "cublas_low_rank.PATH"))},
    )
    paths.cache_clear()
    try:
        assert choose(make_call()).path.name == "cublas"
        reason = why_not_others(make_call(), choose(make_call()))["new"]
        assert "cannot be imported" in reason
        assert "blr_kernels.ops.missing" in reason
    finally:
        paths.cache_clear()


@pytest.mark.parametrize(("structure", "op"), [(LowRank(6), "low_rank"), (Blast(3, 6), "blast")])
def test_run_path(structure: Any, op: str, device: torch.device) -> None:
    factors = factors_for(structure, 24, 36)
    ordered = [factors[key].float().to(device) for key in structure.parameter_shapes(24, 36)]
    x, bias = torch.randn(2, 5, 24, device=device), torch.randn(36, device=device)
    wanted = expected(x, dense(structure, factors), bias, "gelu_tanh")
    for path in paths(op):
        if not path.why_not(make_call(10, op, limits_of(device))):
            assert_close(run_path(path.name, op, x, ordered, bias, "gelu_tanh"), wanted)
    empty = run_path("triton", op, x[:0], ordered, bias)
    assert empty.shape == (0, 5, 36)
    with pytest.raises(ValueError, match=r"path of \w+ must be one of .*triton.*, got 'warp'"):
        run_path("warp", op, x, ordered)
    with pytest.raises(ValueError, match=r"'triton' cannot take this call of \w+: .*float64"):
        run_path("triton", op, x.double(), [f.double() for f in ordered])


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("structure", "n_in", "n_out"),
    [(Blast(9, 256), 1152, 4608), (Monarch(4, 128), 768, 3072), (LowRank(128), 3072, 768)],
    ids=str,
)
def test_every_path_on_layers_of_the_paper(
    structure: Any, n_in: int, n_out: int, dtype: torch.dtype, activation: Any
) -> None:
    """At its default config, with each activation, for few tokens and many."""
    factors = factors_for(structure, n_in, n_out)
    names = list(structure.parameter_shapes(n_in, n_out))
    ordered = [factors[name].to("cuda", dtype) for name in names]
    exact = BLRLinear.create(n_in, n_out, structure, dtype=torch.float64, device="cuda")
    exact.load_factors_(dict(zip(names, ordered, strict=True)))
    bias = torch.randn(n_out, device="cuda").to(dtype)
    for tokens in (2, 197, 4096):
        x = torch.randn(tokens, n_in, device="cuda").to(dtype)
        wanted = activate(x.double() @ exact.to_dense().t() + bias.double(), activation)
        asked = call_of(structure.kind, x, ordered[0])
        for path in paths(structure.kind):
            if not path.why_not(asked):
                y = run_path(path.name, structure.kind, x, ordered, bias, activation)
                assert_close(y, wanted)


def test_run_path_in_chunks(device: torch.device) -> None:
    """A config's chunk splits the tokens; 20 at once here, 5 in the last pass."""
    structure = Monarch(3, 6)
    factors = factors_for(structure, 24, 36)
    ordered = [factors[key].float().to(device) for key in ("left", "right")]
    x = torch.randn(65, 24, device=device)
    config = find_path("monarch", "triton").default_config(
        make_call(65, "monarch", limits_of(device))
    )
    y = run_path("triton", "monarch", x, ordered, config={**config, "chunk": 20})
    assert_close(y, expected(x, dense(structure, factors)))


def test_op_runs_the_tuned_config(
    folders: Folders, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file of configs to the kernel's launch, in the op and under a compiler."""
    structure = Blast(3, 6)
    factors = factors_for(structure, 24, 36)
    used = {key: value.half().to(device) for key, value in factors.items()}
    x = torch.randn(7, 24, device=device).half()
    asked = make_call(7, "blast", limits_of(device))
    path = find_path("blast", "triton")
    tuned = {**path.default_config(asked), "mix_outputs": 2, "product_tokens": 32, "chunk": 3}
    file = write_configs(folders.cache, asked, {7: {"triton": 1.0}})
    file.write_text(file.read_text().replace('{"size": 1}', json.dumps(tuned)))
    choice.forget()
    seen = []
    monkeypatch.setattr(
        "blr_kernels.ops.triton_blast.launch_mix",
        lambda *arguments, launch=path.run.__globals__["launch_mix"]: (
            seen.append((arguments[0].shape[0], arguments[-1])),
            launch(*arguments),
        ),
    )
    right = expected(x, dense(structure, used))
    assert_close(call(structure, x, used, backend=Backend.TRITON), right)
    assert seen == [(3, 2), (3, 2), (1, 2)]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: call(structure, x, used, backend=Backend.TRITON), fullgraph=True, backend="eager"
    )
    assert_close(compiled(x), right)
    assert len(seen) == 6
