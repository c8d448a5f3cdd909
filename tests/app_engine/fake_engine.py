"""A stand-in for `app.engine.Engine` that runs no model: for tests of the page only.

It has the same methods and emits the same kinds of events in the same order as the real
engine, with invented figures and small noise pictures.
"""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from app.engine import events as ev
from app.engine.jobs import BACKENDS, BackendStatus, ClassifyJob, GenerateJob, Job

_MEDIAN_MS = {
    "dense": 40.0, "compiled": 30.0, "blr-triton": 20.0, "blr-torch": 45.0, "blr-compiled": 33.0
}  # fmt: skip
_ORDER = ["dense", "blr-torch", "blr-triton", "blr-compiled", "compiled"]


def _picture(seed: int, size: int = 128, noise: float = 0.0) -> bytes:
    draw = random.Random(seed)
    small = Image.new("RGB", (8, 8))
    small.putdata([tuple(draw.randrange(256) for _ in range(3)) for _ in range(64)])
    image = small.resize((size, size), Image.Resampling.BICUBIC)
    if noise:
        grain = Image.effect_noise((size, size), 200).convert("RGB")
        image = Image.blend(image, grain, noise)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


class FakeRun:
    def __init__(self, job: Job, backends: Sequence[str], speed: float, queued: int) -> None:
        self._stop = threading.Event()
        self._events = self._generate(job, [b for b in _ORDER if b in backends], speed, queued)

    def __iter__(self) -> Iterator[ev.Event]:
        return self

    def __next__(self) -> ev.Event:
        return next(self._events)

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._stop.set()

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self, job: Job, backends: list[str], speed: float, queued: int
    ) -> Iterator[ev.Event]:
        start = time.monotonic()
        draw = random.Random(7)

        def kw(backend: str) -> dict[str, Any]:
            return {"backend": backend, "t": time.monotonic() - start}

        for position in range(queued, 0, -1):
            yield ev.Queued(**kw(""), position=position)
            if self._stop.wait(0.5 * speed):
                yield ev.Stopped(**kw(""))
                return
        for backend in backends:
            yield ev.Loading(**kw(backend))
            self._stop.wait(0.5 * speed)
            if backend == "blr-triton":
                yield ev.Failed(**kw(backend), message="needs an NVIDIA GPU")
                continue
            compile_s = 0.0
            if backend in ("compiled", "blr-compiled"):
                yield ev.Compiling(**kw(backend), expected_s=20.0)
                self._stop.wait(2.0 * speed)
                compile_s = 19.2
            yield ev.Warming(**kw(backend))
            self._stop.wait(0.2 * speed)
            blr = backend.startswith("blr-")
            weights = 7_000_000 if blr else 12_000_000
            yield ev.Ready(
                **kw(backend), load_s=0.4, compile_s=compile_s, warmup_s=0.2,
                weights_bytes=weights, parameters=weights // 4,
            )  # fmt: skip
            total = job.steps if isinstance(job, GenerateJob) else job.repeats
            seconds: list[float] = []
            for index in range(1, total + 1):
                if self._stop.is_set():
                    yield ev.Stopped(**kw(backend))
                    return
                s = _MEDIAN_MS[backend] / 1e3 * draw.uniform(0.9, 1.2)
                time.sleep(s * speed)
                seconds.append(s)
                yield ev.Step(
                    **kw(backend), index=index, total=total, seconds=s,
                    memory_mib=weights / 2**20 + draw.uniform(90, 110),
                )  # fmt: skip
                if (
                    isinstance(job, GenerateJob)
                    and job.preview_every
                    and index % job.preview_every == 0
                    and index < total
                ):
                    pictures = [
                        _picture(job.seed + i, noise=1 - index / total) for i in range(job.images)
                    ]
                    yield ev.Preview(**kw(backend), images=pictures, step=index)
            images, top = None, None
            if isinstance(job, GenerateJob):
                yield ev.Decoding(**kw(backend))
                images = [_picture(job.seed + i) for i in range(job.images)]
            else:
                shares = [0.62, 0.2, 0.09, 0.05, 0.04]
                top = [(i, f"label {i}", p) for i, p in enumerate(shares[: job.top])]
            yield ev.Result(
                **kw(backend), images=images, top=top,
                report=_report(job, backend, seconds, weights, compile_s),
            )  # fmt: skip


def _report(
    job: Job, backend: str, seconds: list[float], weights: int, compile_s: float
) -> dict[str, Any]:
    generate = isinstance(job, GenerateJob)
    ms = [1e3 * s for s in seconds]
    ordered = sorted(ms)
    return {
        "backend": backend,
        "task": job.task,
        "model": job.model,
        "variant": job.variant if backend.startswith("blr-") else None,
        "structure": "BLAST b9 r24" if backend.startswith("blr-") else None,
        "device": "cpu",
        "device_name": "Fake CPU",
        "dtype": "float32",
        "shape": {"batch": job.images * 2, "tokens": 256}
        if generate
        else {"batch": job.batch, "tokens": 65, "image": [128, 128]},
        "steps": len(ms),
        "seed": job.seed if generate else None,
        "guidance": job.guidance if generate else None,
        "versions": {"torch": "0", "python": "3"},
        "load_s": 0.4,
        "compile_s": compile_s,
        "warmup_s": 0.2,
        "step_ms": {
            "median": ordered[len(ms) // 2],
            "p10": ordered[len(ms) // 10],
            "p90": ordered[(9 * len(ms)) // 10],
            "n": len(ms),
            "all": ms,
        },
        "decode_ms": 30.0 if generate else None,
        "images_per_s": (job.images if generate else len(ms)) / sum(seconds),
        "memory_mib": {
            "weights": weights / 2**20,
            "decoder": 3.0 if generate else 0.0,
            "activations": 40.0,
            "peak": weights / 2**20 + (43.0 if generate else 40.0),
            "cache": None,
            "process": 150.0,
        },
        "parameters": weights // 4,
        "weights_bytes": weights,
        "untrained": job.untrained,
    }


class FakeEngine:
    """`speed` scales every wait: 0 for none; `queued` runs are said to be ahead of each run."""

    def __init__(
        self, device: str = "cpu", max_models: int = 3, *, speed: float = 0.1, queued: int = 0
    ) -> None:
        self.device = device
        self._speed = speed
        self._queued = queued
        self._runs: list[FakeRun] = []

    def device_info(self) -> dict[str, Any]:
        return {
            "device": self.device, "kind": "cpu", "name": "Fake CPU, 2 cores", "ready": True,
            "memory_total_mib": 16000.0, "memory_free_mib": 9000.0,
            "versions": {"torch": "0", "triton": "0"}, "error": "",
        }  # fmt: skip

    def backend_status(self, model: str, variant: str) -> list[BackendStatus]:
        return [
            BackendStatus(
                info.id,
                available=info.id != "blr-triton",
                reason="needs an NVIDIA GPU" if info.id == "blr-triton" else "",
                compile_s=20.0 if info.compiles else None,
            )
            for info in BACKENDS
        ]

    def warm_up(self, job: Job, backend: str) -> None:
        pass

    def run(self, job: Job, backends: Sequence[str]) -> FakeRun:
        if not isinstance(job, GenerateJob | ClassifyJob):
            raise TypeError(f"job must be a GenerateJob or a ClassifyJob, got {job!r}")
        run = FakeRun(job, backends, self._speed, self._queued)
        self._runs.append(run)
        return run

    def stop(self) -> None:
        for run in self._runs:
            run.stop()

    def close(self) -> None:
        self.stop()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
