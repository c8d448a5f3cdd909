"""Classify in a worker: one picture, forward after forward."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from app.engine.jobs import ClassifyJob
from app.engine.worker.measure import spread_ms, steady
from app.engine.worker.models import open_vit
from app.engine.worker.session import Check, Report, Session


class ClassifySession(Session):
    """A vision transformer with a classification head."""

    def imports(self) -> None:
        """Import the zoo's vision transformer."""
        import model_zoo.vit  # noqa: F401

    def load(self) -> nn.Module:
        """Read the weights.

        Raises:
            ValueError: when the model or its variant is missing or does not fit; one line.
        """
        self._vit = open_vit(self.spec, self.dtype)
        return self._vit.model

    def shape(self, job: ClassifyJob) -> tuple[Any, ...]:
        """The batch, in pictures."""
        return (job.batch,)

    def warm_steps(self, job: ClassifyJob) -> int:
        """As many untimed forwards as the job asks for, at least one."""
        return max(1, job.warmup)

    def _batch(self, job: ClassifyJob) -> Tensor:
        """The picture as the model wants it, (batch, 3, height, width) on the device."""
        with Image.open(io.BytesIO(job.image), formats=["PNG"]) as image:
            pixels = self._vit.pixels([image])
        return pixels.repeat(job.batch, 1, 1, 1)

    def _forward(self, batch: Tensor) -> Tensor:
        if self.compiles and self.kind == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            return self.model(batch)

    def fresh_step(self, job: ClassifyJob) -> Callable[[], object]:
        """One forward of the job's batch."""
        batch = self._batch(job)
        return lambda: self._forward(batch)

    def timed(self, job: ClassifyJob, report: Report, check: Check) -> dict[str, Any]:
        """Time each forward, in seconds; the classes are those of the last one's first row."""
        from model_zoo.vit import top_classes

        batch, preprocess_s, _ = self.clock.time(lambda: self._batch(job))
        seconds: list[float] = []
        wall_s = 0.0
        logits: Tensor | None = None
        with steady():
            for index in range(1, job.repeats + 1):
                check()
                logits, forward_s, forward_wall_s = self.clock.time(lambda: self._forward(batch))
                seconds.append(forward_s)
                wall_s += forward_wall_s
                report(
                    "step",
                    index=index,
                    total=job.repeats,
                    seconds=forward_s,
                    memory_mib=self.step_memory_mib(),
                )
        assert logits is not None
        (top,) = top_classes(logits[:1], self._vit.labels, job.top)
        return {
            "images": None,
            "top": top,
            "report": {
                "shape": {"batch": job.batch, "image": list(batch.shape[-2:])},
                "steps": job.repeats,
                "seed": None,
                "guidance": None,
                "step_ms": spread_ms(seconds),
                "preprocess_ms": 1e3 * preprocess_s,
                "decode_ms": None,
                "images_per_s": job.batch * job.repeats / wall_s,
                "top": top,
            },
        }
