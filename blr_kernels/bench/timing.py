"""Time of a call on a GPU: replays of one CUDA graph that holds the call on rotating operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

_WARM_REPLAYS = 3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call over the replays: the median, and the 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 15) -> Timing:
    """Times calls that differ only in their operands, on the current CUDA device.

    All calls are recorded in one graph, so neither Python nor launches from the host are in the
    figure. What a call returns stays alive until the end: no two calls share an output.

    Args:
        calls: one for each set of operands; the sets together should exceed the L2 cache.
        replays: how many replays of the graph are timed, at least 2.

    Raises:
        ValueError: if there is no call, or too few replays for a percentile.
    """
    if not calls:
        raise ValueError("calls must hold at least one call, got none")
    if replays < 2:
        raise ValueError(f"replays must be at least 2, got {replays}")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [call() for call in calls]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * replays)]
    for _ in range(_WARM_REPLAYS):
        graph.replay()
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    us = [
        start.elapsed_time(end) * 1e3 / len(calls)
        for start, end in zip(events[::2], events[1::2], strict=True)
    ]
    del results, graph
    deciles = quantiles(us, n=10, method="inclusive")
    return Timing(median_us=median(us), p10_us=deciles[0], p90_us=deciles[-1])
