"""Which backends can run a model on a device, with the reason where one cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.engine.jobs import BACKENDS, BackendInfo, BackendStatus
from app.engine.machine import why_no_compile, why_no_triton

if TYPE_CHECKING:
    from model_zoo.registry import ModelEntry

# Seconds that the first compilation of a model was seen to take: on two CPU cores with the bundled
# models, and on an H200 with the large ones (assets/benchmarks/h200-*.json). Later ones find their
# kernels in inductor's cache.
_COMPILE_S = {
    ("cpu", "generate"): {"compiled": 20.0, "blr-compiled": 40.0},
    ("cpu", "classify"): {"compiled": 10.0, "blr-compiled": 20.0},
    ("cuda", "generate"): {"compiled": 26.0, "blr-compiled": 42.0, "blr-triton": 33.0},
    ("cuda", "classify"): {"compiled": 11.0, "blr-compiled": 13.0, "blr-triton": 15.0},
}


def backend_statuses(
    entry: ModelEntry,
    variant: str,
    device: Mapping[str, Any],
    seen_compile_s: Mapping[tuple[str, str], float],
    *,
    untrained: bool,
) -> list[BackendStatus]:
    """The status of every backend, in the order of `BACKENDS`.

    Args:
        entry: the model.
        variant: the converted form that the BLR backends would run.
        device: the answer of `Engine.device_info`.
        seen_compile_s: measured compile times by (model id, backend).
        untrained: whether the model would run with untrained weights.
    """
    statuses = []
    for info in BACKENDS:
        reason = _why_not(info, entry, variant, device, untrained=untrained)
        seconds = None
        if compiles(info, str(device["kind"])):
            seconds = seen_compile_s.get(
                (entry.id, info.id), expected_compile_s(info.id, str(device["kind"]), entry.task)
            )
        statuses.append(BackendStatus(info.id, not reason, reason, seconds))
    return statuses


def compiles(info: BackendInfo, kind: str) -> bool:
    """Whether a backend runs under `torch.compile` on a device of this kind."""
    return info.compiles or (info.id == "blr-triton" and kind == "cuda")


def expected_compile_s(backend: str, kind: str, task: str) -> float:
    """About how long a backend that compiles takes to do so, the first time."""
    return _COMPILE_S[kind, task][backend]


def _why_not(
    info: BackendInfo,
    entry: ModelEntry,
    variant: str,
    device: Mapping[str, Any],
    *,
    untrained: bool,
) -> str:
    name = str(device["device"])
    if name != "cpu" and device.get("error"):
        return str(device["error"])
    if info.id == "blr-triton" and (reason := why_no_triton(name, device)):
        return reason
    if compiles(info, str(device["kind"])) and (reason := why_no_compile(name)):
        return reason
    if untrained:
        return "" if entry.untrained else f"{entry.id} runs with its own weights only"
    if not entry.available():
        return f"weights are not here. {entry.how_to_get()}"
    if info.block_low_rank and not _has_variant(entry, variant):
        return entry.how_to_make(variant)
    return ""


def _has_variant(entry: ModelEntry, variant: str) -> bool:
    return any(known.id == variant for known in entry.variants_here)
