"""Load, warm up, run and measure models, each backend in a worker process of its own.

This package and the process that uses it import neither torch, diffusers, timm nor gradio.
"""

from app.engine.engine import Engine, Run
from app.engine.events import (
    Compiling,
    Decoding,
    Event,
    Failed,
    Loading,
    Preview,
    Queued,
    Ready,
    Result,
    Step,
    Stopped,
    Warming,
)
from app.engine.jobs import (
    BACKENDS,
    BackendId,
    BackendInfo,
    BackendStatus,
    ClassifyJob,
    GenerateJob,
    Job,
    backend_info,
)

__all__ = [
    "BACKENDS",
    "BackendId",
    "BackendInfo",
    "BackendStatus",
    "ClassifyJob",
    "Compiling",
    "Decoding",
    "Engine",
    "Event",
    "Failed",
    "GenerateJob",
    "Job",
    "Loading",
    "Preview",
    "Queued",
    "Ready",
    "Result",
    "Run",
    "Step",
    "Stopped",
    "Warming",
    "backend_info",
]
