"""What a worker holds: one model, in one form, on one device."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.jobs import GenerateJob, Job, backend_info


@dataclass(frozen=True)
class WorkerSpec:
    """Two jobs with equal specs can share a warm worker.

    `variant` is `None` for the original model, so that dense workers serve every variant.
    `dtype` `None` means the device's default.
    """

    task: str
    model: str
    backend: str
    variant: str | None
    device: str
    dtype: str | None
    untrained: bool
    fuse_qkv: bool


def spec_for(job: Job, backend: str, device: str) -> WorkerSpec:
    """The worker that `job` needs on `backend`."""
    return WorkerSpec(
        task=job.task,
        model=job.model,
        backend=backend,
        variant=job.variant if backend_info(backend).block_low_rank else None,
        device=device,
        dtype=job.dtype,
        untrained=job.untrained,
        fuse_qkv=job.fuse_qkv if isinstance(job, GenerateJob) else True,
    )
