"""The tuner with a stand-in for the clock, its files, its command, and the configs we ship."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from blr_tuned import GPU, fake_path, make_call, write_configs

from blr_kernels.ops import choice
from blr_kernels.ops.choice import choose
from blr_kernels.ops.paths import Call, DeviceLimits, Path, find_path, limits_of, paths
from blr_kernels.tuning import __main__ as command
from blr_kernels.tuning import lookup, search
from blr_kernels.tuning.lookup import Entry, Result
from blr_kernels.tuning.search import Trial, combined, save, tune

CPU = torch.device("cpu")
ROOT = FilePath(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> Iterator[FilePath]:
    """An empty cache, and nothing remembered."""
    monkeypatch.setenv("BLR_KERNELS_CACHE", str(tmp_path))
    choice.forget()
    yield tmp_path
    choice.forget()


class Clock:
    """A timer that takes the time of a config from a table, and keeps what it was asked."""

    def __init__(self, times: Callable[[str, dict[str, int]], float]) -> None:
        self.times = times
        self.asked: list[tuple[str, dict[str, int], int]] = []

    def __call__(self, calls: Sequence[Any], replays: int) -> float:
        path, config = calls[0].args[:2]
        self.asked.append((path.name, dict(config), replays))
        for call in calls:
            call()
        return self.times(path.name, dict(config))


def use(monkeypatch: pytest.MonkeyPatch, *found: Path) -> None:
    """Makes these the only paths there are, for the tuner and for the choice."""
    monkeypatch.setattr(search, "paths", lambda op: found)
    monkeypatch.setattr(choice, "paths", lambda op: found)


def cpu_call(tokens: int = 5, op: str = "low_rank") -> Call:
    return make_call(tokens, op, limits_of(CPU))


def test_the_fastest_right_config_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster ones that are wrong, unwritten or fail do not count."""
    wrong = {2: 1.05, 3: float("nan"), 4: 0.0}
    use(
        monkeypatch,
        fake_path("a", configs=[1, 2, 3, 4, 5, 6], factor=wrong),
        fake_path("b", configs=[7]),
        fake_path("never", most_tokens=1),
        fake_path("bad", configs=[2], factor=wrong),
    )
    clock = Clock(lambda path, config: {1: 9.0, 5: 4.0, 6: 5.0, 7: 6.0}[config["size"]])
    told: list[Trial] = []
    entry = tune(cpu_call(), CPU, timer=clock, tell=told.append)
    assert entry is not None
    assert entry.path == "a"
    assert {name: (dict(r.config), r.us) for name, r in entry.paths.items()} == {
        "a": ({"size": 5}, 4.0),
        "b": ({"size": 7}, 6.0),
    }
    assert all(0 < result.rms < 4e-3 for result in entry.paths.values())
    failed = {(t.path, t.config["size"]): t.error for t in told if t.error}
    assert failed.keys() == {("a", 2), ("a", 3), ("a", 4), ("bad", 2)}
    assert failed["a", 2].startswith("wrong: error 5.0e-02 RMS")
    assert "not finite" in failed["a", 3]
    assert failed["a", 4] == "RuntimeError: out of resources"
    assert {size["size"] for _, size, _ in clock.asked} == {1, 5, 6, 7}


def test_few_replays_first_and_many_for_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_path("a", configs=[1, 2, 3, 4, 5]))
    clock = Clock(lambda path, config: 10.0 - config["size"])
    assert tune(cpu_call(), CPU, timer=clock) is not None
    assert [(config["size"], replays) for _, config, replays in clock.asked] == [
        (1, 5),
        (2, 5),
        (3, 5),
        (4, 5),
        (5, 5),
        (5, 15),
        (4, 15),
        (3, 15),
    ]


def test_nothing_right_is_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_path("a", factor={1: 2.0}))
    assert tune(cpu_call(), CPU, timer=Clock(lambda path, config: 1.0)) is None
    use(monkeypatch)
    assert tune(cpu_call(), CPU, timer=Clock(lambda path, config: 1.0)) is None


def test_only_the_paths_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_path("a"), fake_path("b"))
    entry = tune(cpu_call(), CPU, only=["b"], timer=Clock(lambda path, config: 1.0))
    assert entry is not None
    assert list(entry.paths) == ["b"]


def test_best_parts_are_combined() -> None:
    def trial(us: float | None, **sizes: int) -> Trial:
        config = {"mix_rows": 1, "mix_warps": 4, "product_rows": 1, "chunk": 0, **sizes}
        return Trial("a", config, us)

    default = trial(10.0)
    trials = [
        default,
        trial(9.0, mix_rows=2),
        trial(8.0, mix_rows=3, mix_warps=8),
        trial(9.5, product_rows=2),
        trial(11.0, chunk=128),
        trial(None, chunk=256),
        trial(1.0, mix_rows=5, product_rows=5),
    ]
    assert combined(default, trials) == {
        "mix_rows": 3,
        "mix_warps": 8,
        "product_rows": 2,
        "chunk": 0,
    }
    assert combined(default, trials[:3]) is None


def test_portable_kernels_are_tuned(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The real path on the interpreter or a GPU: every candidate runs, and the last part wins."""
    call = make_call(70, "monarch", limits_of(device))
    path = find_path("monarch", "triton")
    use(monkeypatch, path)
    wanted = path.candidates(call)[-1]
    clock = Clock(lambda name, config: 1.0 if config == wanted else 2.0)
    told: list[Trial] = []
    entry = tune(call, device, timer=clock, tell=told.append)
    assert entry is not None
    assert dict(entry.paths["triton"].config) == wanted
    assert not [trial for trial in told if trial.error]


def test_integers_are_tuned_and_run_as_tuned(device: torch.device, folder: FilePath) -> None:
    """Each candidate against the layer in floating point, within the bar of 8 bits."""
    pytest.importorskip("triton")
    call = make_call(70, "blast_int8", limits_of(device))
    (path,) = paths("blast_int8")
    wanted = path.candidates(call)[-1]
    clock = Clock(lambda name, config: 1.0 if config == wanted else 2.0)
    told: list[Trial] = []
    entry = tune(call, device, timer=clock, tell=told.append)
    assert entry is not None
    assert dict(entry.paths["triton"].config) == wanted
    assert 5e-3 < entry.paths["triton"].rms < 2e-2
    assert not [trial for trial in told if trial.error]
    assert wanted != choose(call).config
    save(call, entry, folder)
    choice.forget()
    assert choose(call).config == wanted


def test_what_was_tuned_is_found_again(monkeypatch: pytest.MonkeyPatch, folder: FilePath) -> None:
    """The whole way: tune, save, and choose in a process that remembers nothing."""
    use(monkeypatch, fake_path("a", configs=[1, 2]), fake_path("b", configs=[3, 4]))
    clock = Clock(lambda path, config: {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0}[config["size"]])
    assert choose(cpu_call()).config == {"size": 1}
    entry = tune(cpu_call(), CPU, timer=clock)
    assert entry is not None
    file = save(cpu_call(), entry, folder)
    assert choose(cpu_call()).config == {"size": 1}, "no file is read in the middle of a run"
    choice.forget()
    found = choose(cpu_call())
    assert (found.path.name, dict(found.config)) == ("b", {"size": 4})
    assert sorted(folder.rglob("*")) == [file.parent, file]


def test_saving_keeps_other_tokens_and_paths(folder: FilePath) -> None:
    def entry(**times: float) -> Entry:
        results = {name: Result({"size": 1}, us, 1e-3) for name, us in times.items()}
        return Entry(min(times, key=lambda name: times[name]), results)

    def read() -> dict[int, list[str]]:
        text = file.read_text()
        return {
            tokens: found.ranked()
            for tokens, found in lookup.parse(text, lookup.header(make_call()), "cache").items()
        }

    file = save(make_call(512), entry(a=1.23456, b=2), folder)
    save(make_call(16), entry(a=3), folder)
    assert read() == {16: ["a"], 512: ["a", "b"]}
    save(make_call(512), entry(b=1), folder, keep=True)
    assert read() == {16: ["a"], 512: ["b", "a"]}
    save(make_call(512), entry(c=5), folder)
    assert read() == {16: ["a"], 512: ["c"]}
    file.write_text("{")
    save(make_call(512), entry(a=5), folder)
    assert read() == {512: ["a"]}
    assert oct(file.stat().st_mode & 0o777) == "0o644"


def test_a_failed_save_leaves_the_file(folder: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("a", {"a": Result({"size": 1}, 1.0, 1e-3)})
    file = save(make_call(), entry, folder)
    before = file.read_text()

    def full(*arguments: object) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr(search, "_text", full)
    with pytest.raises(OSError, match="no space"):
        save(make_call(16), entry, folder)
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--op blast --in 8 --out 8 --blocks 2 --rank 4 --tokens 4", "no NVIDIA GPU was found"),
        ("--cases --device cpu", "must be a CUDA device: configs are timed on it, got 'cpu'"),
        ("--cases --device gpu0", "--device must be cuda:N, got 'gpu0'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_command_without_a_gpu(arguments: str, message: str) -> None:
    """One line in words, exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "blr_kernels.tuning", *arguments.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Lets the command tune on the CPU, with a clock that takes 5 us."""
    clock = Clock(lambda path, config: 5.0)
    monkeypatch.setattr(command, "_device", lambda name: CPU)
    monkeypatch.setattr(tune, "__kwdefaults__", {**tune.__kwdefaults__, "timer": clock})
    return clock


def test_command_tunes_and_prints(
    on_a_gpu: Clock, folder: FilePath, capsys: pytest.CaptureFixture[str], tmp_path: FilePath
) -> None:
    pytest.importorskip("triton")
    layer = ["--op", "low_rank", "--in", "24", "--out", "36", "--rank", "6", "--dtype", "float16"]
    layer += ["--tokens", "2", "5"]
    assert command.main([*layer, "--paths", "cublas"]) == 0
    printed = capsys.readouterr().out
    assert "low_rank 24 -> 36 b1 r6, 5 tokens" in printed
    assert " * cublas" in printed
    file = folder / lookup.file_name(cpu_call())
    assert str(file) in printed
    assert set(json.loads(file.read_text())["entries"]) == {"2", "5"}
    own = tmp_path / "own"
    assert command.main([*layer, "--paths", "cublas", "--out-dir", str(own)]) == 0
    assert (own / lookup.file_name(cpu_call())).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give --op, --in, --out, --rank and --tokens, or --cases"),
        ("--op blast --in 8 --out 8 --tokens 4", "give --op, --in, --out, --rank and --tokens"),
        ("--op blast --cases", "give either --op with its sizes, or --cases"),
        ("--op monarch --in 8 --out 8 --blocks 2 --rank 3 --tokens 4", "multiple of blocks = 2"),
        ("--op blast --in 8 --out 8 --blocks 9 --rank 3 --tokens 4", "at least blocks = 9, got 8"),
        ("--op blast --in 8 --out 8 --blocks 2 --rank 4 --tokens 0", "at least 1, got 0"),
        ("--layers nope", "layers must match one of dit.qkv"),
        ("--layers dit.qkv --paths warp", "--paths must be of apart, bmm, cublas, "),
    ],
)
def test_command_refuses_mistakes(
    arguments: str, message: str, on_a_gpu: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    assert command.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_cases_are_those_of_the_benchmark() -> None:
    """Each once: one grouped launch of many layers is no call of one layer."""
    options = command.parser().parse_args(["--cases"])
    sizes = command._sizes(options)
    assert len(set(sizes)) == len(sizes)
    assert ("blast", 1152, 3456, 9, 384, 16_384) in sizes
    assert ("monarch", 4096, 11008, 16, 1536, 1) in sizes
    assert ("low_rank", 768, 2304, 1, 128, 197) in sizes
    assert ("blast_int8", 1152, 4608, 9, 256, 4096) in sizes
    some = ["--layers", "vit.*", "--tokens", "197", "--ops", "monarch"]
    options = command.parser().parse_args(some)
    assert {size[0] for size in command._sizes(options)} == {"monarch"}
    assert len(command._sizes(options)) == 3
    options = command.parser().parse_args(["--layers", "vit.fc1", "--ops", "blast_int8"])
    assert command._sizes(options) == [
        ("blast_int8", 768, 3072, 3, 128, tokens) for tokens in (197, 6304)
    ]


SHIPPED = sorted(lookup.SHIPPED.rglob("*.json"))
GPUS = {"NVIDIA H200": GPU}


def shipped_layer(file: FilePath, limits: DeviceLimits) -> Callable[[int], Call]:
    """Makes calls of the layer that a file says it is for."""
    data = json.loads(file.read_text())

    def call(tokens: int) -> Call:
        return Call(
            data["op"],
            tokens,
            data["in_features"],
            data["out_features"],
            data["blocks"],
            data["rank"],
            getattr(torch, data["dtype"]),
            limits,
        )

    return call


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_configs(file: FilePath) -> None:
    """Well formed, in their place, right, and of paths and sizes that there are."""
    pytest.importorskip("triton")
    gpu = json.loads(file.read_text())["gpu"]
    assert gpu in GPUS, f"add the limits of {gpu} here"
    call = shipped_layer(file, GPUS[gpu])
    assert lookup.SHIPPED / lookup.file_name(call(1)) == file
    entries = lookup.parse(file.read_text(), lookup.header(call(1)), "shipped")
    assert entries
    known = {path.name: path for path in paths(call(1).op)}
    for tokens, entry in entries.items():
        fastest = min(result.us for result in entry.paths.values())
        assert entry.paths[entry.path].us == fastest
        for name, result in entry.paths.items():
            assert name in known
            assert 0 < result.rms <= search.largest_errors(call(tokens))[0]
            assert result.us > 0
            reason = known[name].why_not(call(tokens))
            if "cannot be imported" not in reason:
                assert reason == ""
                assert result.config.keys() == known[name].default_config(call(tokens)).keys()


def test_no_file_but_configs_is_shipped() -> None:
    assert sorted(p for p in lookup.SHIPPED.rglob("*") if p.is_file()) == SHIPPED


def test_a_shipped_file_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath) -> None:
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    use(monkeypatch, fake_path("a"))
    write_configs(tmp_path / "shipped", make_call(), {512: {"a": 77}})
    assert choose(make_call()).config == {"size": 77}
