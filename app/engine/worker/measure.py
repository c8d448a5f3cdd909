"""Clocks, memory meters and statistics. Everything in seconds, bytes as MiB."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import torch
from torch import nn

T = TypeVar("T")
MIB = 2**20


class Clock(Protocol):
    """Times one piece of work on one kind of device."""

    def time(self, work: Callable[[], T]) -> tuple[T, float, float]:
        """Run `work` once: what it returned, seconds on the device, seconds on the wall."""
        ...


class CpuClock:
    """`perf_counter` around the work and nothing else."""

    def time(self, work: Callable[[], T]) -> tuple[T, float, float]:
        """Run `work`; both times are the same, in seconds."""
        start = time.perf_counter()
        out = work()
        seconds = time.perf_counter() - start
        return out, seconds, seconds


class CudaClock:
    """CUDA events around the work; both synchronisations are outside of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def time(self, work: Callable[[], T]) -> tuple[T, float, float]:
        """Run `work`: seconds between the events, seconds on the wall until the device is done."""
        torch.cuda.synchronize(self._device)
        wall = time.perf_counter()
        self._start.record()
        out = work()
        self._end.record()
        torch.cuda.synchronize(self._device)
        wall = time.perf_counter() - wall
        return out, self._start.elapsed_time(self._end) / 1e3, wall


class CpuMemory:
    """Memory of a CPU worker: resident memory above its baseline, before the model was loaded.

    PSS would not do: a worker's share of the libraries falls when another worker starts, so the
    difference to the baseline can even be negative. Activations are the tensor bytes that torch's
    CPU allocator handed out during one step, counted in a pass of its own because a process does
    not give freed memory back at once.
    """

    def __init__(self) -> None:
        # What the profiler itself takes, once, belongs to the baseline.
        cpu_peak_bytes(lambda: torch.zeros(1))
        gc.collect()
        self._process = psutil.Process()
        self._baseline = self._process.memory_info().rss
        self._activations: dict[Any, int] = {}

    def live_mib(self) -> float:
        """Resident memory above the baseline, now."""
        return (self._process.memory_info().rss - self._baseline) / MIB

    def learn(self, shape: Any, step: Callable[[], object]) -> None:
        """Count the activations of one step of this shape, outside every timed region."""
        self._activations[shape] = cpu_peak_bytes(step)

    def start(self) -> None:
        """A timed part begins."""

    def summary(self, shape: Any, weights: int, decoder: int) -> dict[str, float | None]:
        """The report's `memory_mib` for a learnt shape; `weights` and `decoder` in bytes.

        Raises:
            KeyError: for a shape that was not learnt.
        """
        activations = self._activations[shape]
        return {
            "weights": weights / MIB,
            "decoder": decoder / MIB,
            "activations": activations / MIB,
            "peak": (weights + decoder + activations) / MIB,
            "cache": None,
            "process": self.live_mib(),
        }

    def labels(self) -> dict[str, str]:
        """What each figure of `summary` is, in words."""
        return {
            "weights": "bytes of the compared model's parameters and buffers",
            "decoder": "bytes of the autoencoder, the same for every backend",
            "activations": "most tensor bytes allocated at once during one step, by torch's "
            "allocator, in a separate pass",
            "peak": "weights + decoder + activations",
            "cache": "not kept apart on a CPU",
            "process": "resident memory of the worker above what it had before the model was "
            "loaded",
        }


class CudaMemory:
    """Memory of a GPU worker, as torch's allocator counts it.

    A CUDA graph keeps the memory of its activations, but the allocator shows it as used only
    while the graph is recorded; so the peak includes the recording of the same shape.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: dict[Any, int] = {}
        self._peak = 0

    def live_mib(self) -> float:
        """The peak of the last step."""
        peak = torch.cuda.max_memory_allocated(self._device)
        self._peak = max(self._peak, peak)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak / MIB

    def learn(self, shape: Any, step: Callable[[], object]) -> None:
        """Note the peak of one step of this shape, in which its CUDA graph may be recorded."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        self._recorded[shape] = max(self._recorded.get(shape, 0), peak)

    def start(self) -> None:
        """A timed part begins: earlier peaks are forgotten, recorded ones are not."""
        self._peak = 0
        torch.cuda.reset_peak_memory_stats(self._device)

    def summary(self, shape: Any, weights: int, decoder: int) -> dict[str, float | None]:
        """The report's `memory_mib` of the timed part; `weights` and `decoder` in bytes."""
        peak = max(self._peak, self._recorded.get(shape, 0))
        reserved = torch.cuda.memory_reserved(self._device)
        return {
            "weights": weights / MIB,
            "decoder": decoder / MIB,
            "activations": (peak - weights - decoder) / MIB,
            "peak": peak / MIB,
            "cache": (reserved - torch.cuda.memory_allocated(self._device)) / MIB,
            "process": reserved / MIB if self._driver_mib() is None else self._driver_mib(),
        }

    def labels(self) -> dict[str, str]:
        """What each figure of `summary` is, in words."""
        return {
            "weights": "bytes of the compared model's parameters and buffers",
            "decoder": "bytes of the autoencoder, the same for every backend",
            "activations": "peak - weights - decoder",
            "peak": "most bytes allocated at once during the steps, or while their CUDA graph was "
            "recorded",
            "cache": "reserved by torch's allocator beyond what is allocated, CUDA graphs included",
            "process": "reserved by torch's allocator; the driver does not tell more"
            if self._driver_mib() is None
            else "GPU memory of the worker process as the driver counts it",
        }

    def _driver_mib(self) -> float | None:
        return _gpu_process_mib(self._device)


def _gpu_process_mib(device: torch.device) -> float | None:
    """GPU memory of this process as the driver counts it; `None` where it does not tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory / MIB
    except Exception:  # any failure of the driver's library means that it does not tell
        return None
    return None


def cpu_peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator had handed out at once during `work`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        out = work()
        del out
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    changes = sorted(
        (event["ts"], event["args"]["Ev Idx"], event["args"]["Bytes"])
        for event in trace["traceEvents"]
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    now = peak = 0
    for _, _, size in changes:
        now += size
        peak = max(peak, now)
    return peak


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def quantile(values: Iterable[float], q: float) -> float:
    """Linear interpolation between order statistics, 0 <= q <= 1."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread_ms(seconds: list[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile and all values, in milliseconds."""
    ms = [1e3 * s for s in seconds]
    return {
        "median": quantile(ms, 0.5),
        "p10": quantile(ms, 0.1),
        "p90": quantile(ms, 0.9),
        "n": len(ms),
        "all": ms,
    }


@contextmanager
def steady() -> Iterator[None]:
    """No garbage collection inside, which would fall on one step and not on another."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
