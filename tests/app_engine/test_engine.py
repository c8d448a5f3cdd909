"""The engine around its workers: order, Stop, crashes, the line, warm workers.

The workers here hold no model (see `stub_worker`), so these tests are about the engine alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import stub_worker

from app.engine import (
    Engine,
    Event,
    Failed,
    GenerateJob,
    Loading,
    Queued,
    Ready,
    Result,
    Step,
    Stopped,
    Warming,
)
from app.engine import engine as engine_module
from app.engine.events import Compiling, Decoding
from app.engine.jobs import BackendStatus
from app.engine.run import Limits


def job(class_id: int = 0, steps: int = 5) -> GenerateJob:
    return GenerateJob(
        model="dit-xl-2-256", class_id=class_id, steps=steps, untrained=True, preview_every=0
    )


@pytest.fixture(autouse=True)
def every_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_module,
        "backend_statuses",
        lambda *_, **__: [
            BackendStatus("dense", True),
            BackendStatus("compiled", True, compile_s=1.0),
            BackendStatus("blr-triton", False, "needs an NVIDIA GPU"),
            BackendStatus("blr-torch", True),
            BackendStatus("blr-compiled", True, compile_s=1.0),
        ],
    )


def make(**options: object) -> Engine:
    return Engine(worker_main="stub_worker", **options)  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make(limits=Limits(stop_s=0.5)) as made:
        yield made


def kinds(events: list[Event], backend: str) -> list[type]:
    return [type(event) for event in events if event.backend == backend]


def test_events_come_in_order_and_compiled_runs_last(engine: Engine) -> None:
    events = list(engine.run(job(steps=3), ["compiled", "blr-torch", "dense"]))
    order = list(dict.fromkeys(event.backend for event in events))
    assert order == ["dense", "blr-torch", "compiled"]
    tail = [Ready, Step, Step, Step, Decoding, Result]
    assert kinds(events, "dense") == [Loading, Warming, *tail]
    assert kinds(events, "compiled") == [Loading, Compiling, Warming, *tail]
    times = [event.t for event in events]
    assert times == sorted(times)
    assert [e.index for e in events if isinstance(e, Step) and e.backend == "dense"] == [1, 2, 3]


def test_a_backend_that_cannot_run_fails_with_its_reason_and_the_rest_runs(engine: Engine) -> None:
    events = list(engine.run(job(steps=2), ["blr-triton", "dense"]))
    failed = next(event for event in events if isinstance(event, Failed))
    assert (failed.backend, failed.message) == ("blr-triton", "needs an NVIDIA GPU")
    assert kinds(events, "dense")[-1] is Result


def test_stop_takes_effect_within_a_step_and_the_worker_stays_warm(engine: Engine) -> None:
    """C1: 250 steps, Stop at step 5: the sixth is under way, a seventh never begins."""
    run = engine.run(job(stub_worker.SLOW, steps=250), ["dense", "blr-torch"])
    seen: list[Event] = []
    for event in run:
        seen.append(event)
        if isinstance(event, Step) and event.index == 5:
            run.stop()
    assert [event.index for event in seen if isinstance(event, Step)] == [1, 2, 3, 4, 5, 6]
    assert isinstance(seen[-1], Stopped)
    assert not any(event.backend == "blr-torch" for event in seen)
    events = list(engine.run(job(steps=4), ["dense"]))
    assert kinds(events, "dense") == [Warming, Ready, *[Step] * 4, Decoding, Result]
    assert [event.index for event in events if isinstance(event, Step)] == [1, 2, 3, 4]


def test_stop_in_quick_steps_is_heard_at_the_next_report(engine: Engine) -> None:
    """C1: where steps take less than the engine waits, each report lets it look for Stop."""
    run = engine.run(job(steps=1000), ["dense"])
    begun = time.monotonic()
    for event in run:
        if isinstance(event, Step) and event.index == 5:
            run.stop()
            begun = time.monotonic()
    assert isinstance(event, Stopped)
    # A thousand steps would take 20 seconds.
    assert time.monotonic() - begun < 2


def test_stop_ends_a_worker_that_does_not_answer(engine: Engine) -> None:
    """C1: also while a worker loads, and while it is deaf; then the next run starts clean."""
    cases = ((stub_worker.HANG_LOADING, Loading), (stub_worker.DEAF, Step))
    for class_id, moment in cases:
        run = engine.run(job(class_id, steps=200), ["blr-torch"])
        for event in run:
            if isinstance(event, moment):
                break
        asked = time.monotonic()
        run.stop()
        rest = list(run)
        assert isinstance(rest[-1], Stopped)
        assert time.monotonic() - asked < 3
    events = list(engine.run(job(steps=2), ["blr-torch"]))
    assert kinds(events, "blr-torch")[0] is Loading
    assert kinds(events, "blr-torch")[-1] is Result


def test_a_hung_worker_is_ended_and_the_comparison_goes_on() -> None:
    with make(limits=Limits(load_s=1.0, compile_s=1.0)) as engine:
        events = list(engine.run(job(stub_worker.HANG_LOADING), ["blr-torch", "dense"]))
    assert kinds(events, "dense")[-1] is Result
    assert "silent for 1 s" in next(e.message for e in events if isinstance(e, Failed))


@pytest.mark.parametrize(
    ("class_id", "words"),
    [
        (stub_worker.CRASH, "SIGKILL; the machine may have run out of memory"),
        (stub_worker.FAIL, "out of memory: tried to allocate 5 GiB"),
        (stub_worker.EXIT, "exit code 3: something is wrong"),
    ],
)
def test_a_crash_is_that_backends_alone(engine: Engine, class_id: int, words: str) -> None:
    events = list(engine.run(job(class_id), ["dense", "blr-torch", "compiled"]))
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.backend for event in failed] == ["blr-torch"]
    assert words in failed[0].message
    assert kinds(events, "dense")[-1] is Result
    assert kinds(events, "compiled")[-1] is Result
    again = list(engine.run(job(), ["blr-torch"]))
    assert kinds(again, "blr-torch")[0] is Loading
    assert kinds(again, "blr-torch")[-1] is Result


def test_out_of_memory_is_tried_again_without_the_warm_workers(engine: Engine) -> None:
    list(engine.run(job(steps=1), ["dense"]))
    events = list(engine.run(job(stub_worker.FAIL), ["blr-torch"]))
    assert kinds(events, "blr-torch").count(Loading) == 2
    assert [e.message for e in events if isinstance(e, Failed)] == [
        "out of memory: tried to allocate 5 GiB"
    ]
    assert engine._pool.workers() == []


def test_a_dead_idle_worker_is_noticed_and_replaced(engine: Engine) -> None:
    list(engine.run(job(steps=1), ["dense"]))
    (worker,) = engine._pool.workers()
    os.kill(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while engine._pool.workers() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine._pool.workers() == []
    events = list(engine.run(job(steps=1), ["dense"]))
    assert kinds(events, "dense")[0] is Loading
    assert kinds(events, "dense")[-1] is Result


def test_runs_queue_and_see_their_place(engine: Engine) -> None:
    first = engine.run(job(steps=25), ["dense"])
    second = engine.run(job(steps=25), ["dense"])
    third = engine.run(job(steps=2), ["dense"])
    got: dict[str, list[Event]] = {}
    threads = [
        threading.Thread(target=lambda n=name, r=run: got.__setitem__(n, list(r)))
        for name, run in (("first", first), ("second", second), ("third", third))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    def positions(name: str) -> list[int]:
        return [event.position for event in got[name] if isinstance(event, Queued)]

    assert (positions("first"), positions("second"), positions("third")) == ([], [1], [2, 1])
    assert all(isinstance(events[-1], Result) for events in got.values())


def test_a_queued_run_can_be_stopped_and_gives_up_its_place(engine: Engine) -> None:
    first = engine.run(job(steps=40), ["dense"])
    second = engine.run(job(), ["dense"])
    third = engine.run(job(steps=1), ["dense"])
    second.stop()
    assert isinstance(list(second)[-1], Stopped)
    first.stop()
    assert isinstance(list(third)[-1], Result)


def test_a_forgotten_run_stops(engine: Engine) -> None:
    run = engine.run(job(steps=1000), ["dense"])
    next(run)
    del run
    events = list(engine.run(job(steps=1), ["dense"]))
    assert isinstance(events[-1], Result)


def test_the_least_recently_used_worker_makes_room() -> None:
    with make(max_models=2) as engine:
        list(engine.run(job(steps=1), ["dense"]))
        list(engine.run(job(steps=1), ["blr-torch"]))
        list(engine.run(job(steps=1), ["dense"]))
        before = {w.spec.backend: w.pid for w in engine._pool.workers() if w.spec}
        list(engine.run(job(steps=1), ["compiled"]))
        after = {w.spec.backend: w.pid for w in engine._pool.workers() if w.spec}
        assert set(after) == {"dense", "compiled"}
        assert after["dense"] == before["dense"]
        assert not psutil.pid_exists(before["blr-torch"])


def test_two_comparisons_in_a_row_do_not_evict_what_they_need_next() -> None:
    with make(max_models=2) as engine:
        three = ["dense", "blr-torch", "compiled"]
        list(engine.run(job(steps=1), three))
        events = list(engine.run(job(steps=1), three))
    reloaded = [event.backend for event in events if isinstance(event, Loading)]
    assert len(reloaded) < 3


def test_variants_share_the_dense_worker_and_have_their_own(engine: Engine) -> None:
    one, two = job(steps=1), GenerateJob(**{**vars(job(steps=1)), "variant": "monarch"})
    list(engine.run(one, ["dense", "blr-torch"]))
    events = list(engine.run(two, ["dense", "blr-torch"]))
    assert [event.backend for event in events if isinstance(event, Loading)] == ["blr-torch"]


def test_a_warm_up_saves_loading_and_makes_way_for_a_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_LOAD_S", "3")
    engine.warm_up(job(), "blr-torch")
    deadline = time.monotonic() + 5
    while not engine._pool.workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    (warming,) = engine._pool.workers()
    monkeypatch.setenv("STUB_LOAD_S", "0")
    seen_frozen = False
    for event in engine.run(job(steps=20), ["dense"]):
        if isinstance(event, Step):
            seen_frozen |= psutil.Process(warming.pid).status() == psutil.STATUS_STOPPED
    assert isinstance(event, Result)
    assert seen_frozen
    # The run that needs the very worker takes it over: no second process.
    events = list(engine.run(job(steps=1), ["blr-torch"]))
    assert isinstance(events[-1], Result)
    assert warming.pid in [worker.pid for worker in engine._pool.workers()]


def test_a_frozen_warm_up_goes_on_while_another_compiles(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a lock on the compiler's cache, for which the other would wait for ever."""
    monkeypatch.setenv("STUB_LOAD_S", "5")
    engine.warm_up(job(), "blr-compiled")
    while not engine._pool.workers():
        time.sleep(0.01)
    (warming,) = engine._pool.workers()
    monkeypatch.setenv("STUB_LOAD_S", "0")
    monkeypatch.setenv("STUB_COMPILE_S", "0.5")
    frozen_in_steps, thawed_in_compiling = False, False
    for event in engine.run(job(steps=20), ["compiled"]):
        time.sleep(0.01)
        frozen = psutil.Process(warming.pid).status() == psutil.STATUS_STOPPED
        frozen_in_steps |= frozen and isinstance(event, Step)
        thawed_in_compiling |= not frozen and isinstance(event, Compiling)
    assert frozen_in_steps
    assert thawed_in_compiling


def test_a_warm_up_that_ended_leaves_a_loaded_worker(engine: Engine) -> None:
    engine.warm_up(job(), "dense")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        workers = engine._pool.workers()
        if workers and workers[0].loaded and workers[0].pending is None:
            break
        time.sleep(0.02)
    events = list(engine.run(job(steps=1), ["dense"]))
    assert kinds(events, "dense")[:2] == [Warming, Ready]


def test_workers_end_with_the_engines_process_however_it_dies() -> None:
    paths = [os.path.dirname(stub_worker.__file__), os.getcwd()]
    code = f"""
import sys, time
sys.path[:0] = {paths!r}
import app.engine.engine as m
from app.engine import Engine, GenerateJob
from app.engine.jobs import BackendStatus
m.backend_statuses = lambda *a, **k: [BackendStatus("dense", True)]
e = Engine(worker_main="stub_worker")
list(e.run(GenerateJob("dit-xl-2-256", untrained=True, steps=1), ["dense"]))
worker = e._pool.workers()[0]
if sys.platform == "linux":
    worker.suspend()  # not even a frozen one stays behind
print(worker.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_closing_ends_every_worker() -> None:
    engine = make()
    list(engine.run(job(steps=1), ["dense", "blr-torch"]))
    pids = [worker.pid for worker in engine._pool.workers()]
    engine.close()
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
