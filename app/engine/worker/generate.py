"""Generate in a worker: the denoising loop, one timed step at a time."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import nn

from app.engine.jobs import GenerateJob
from app.engine.worker.measure import spread_ms, steady, tensor_bytes
from app.engine.worker.models import open_dit
from app.engine.worker.session import Check, Report, Session

if TYPE_CHECKING:
    from model_zoo.dit import Denoiser


class GenerateSession(Session):
    """A class-conditional diffusion transformer."""

    def imports(self) -> None:
        """Import the zoo's diffusion transformer."""
        import model_zoo.dit  # noqa: F401

    def load(self) -> nn.Module:
        """Read the weights.

        Raises:
            ValueError: when the model or its variant is missing or does not fit; one line.
        """
        self._dit = open_dit(self.spec, self.dtype)
        return self._dit.transformer

    def shape(self, job: GenerateJob) -> tuple[Any, ...]:
        """The batch of a forward, in latents."""
        return (self._batch(job),)

    def _batch(self, job: GenerateJob) -> int:
        """How many latents a forward takes: with guidance each picture's twice."""
        return job.images * (1 if job.guidance == 1 else 2)

    def _denoiser(self, job: GenerateJob) -> Denoiser:
        from model_zoo.dit import Denoiser

        return Denoiser(
            self._dit,
            [job.class_id] * job.images,
            seed=job.seed,
            steps=job.steps,
            guidance=job.guidance,
        )

    def fresh_step(self, job: GenerateJob) -> Callable[[], object]:
        """One denoising step from new noise."""

        def step() -> None:
            # A new denoiser each time, since a job may have fewer steps than a warm-up.
            self._step(self._denoiser(job))

        return step

    def _step(self, denoiser: Denoiser) -> None:
        if self.compiles and self.kind == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        denoiser.step()

    def warm_rest(self, job: GenerateJob) -> None:
        """Decode once."""
        self._pictures(self._denoiser(job).latents)

    def decoder_bytes(self) -> int:
        """Bytes of the autoencoder's parameters and buffers."""
        return tensor_bytes(self._dit.vae)

    def timed(self, job: GenerateJob, report: Report, check: Check) -> dict[str, Any]:
        """Time each step and the decoding, in seconds; previews are outside of both."""
        denoiser = self._denoiser(job)
        seconds: list[float] = []
        wall_s = 0.0
        with steady():
            # Some schedules take a few steps more than were asked for.
            total = denoiser.total
            for index in range(1, total + 1):
                check()
                _, step_s, step_wall_s = self.clock.time(lambda: self._step(denoiser))
                seconds.append(step_s)
                wall_s += step_wall_s
                report(
                    "step",
                    index=index,
                    total=total,
                    seconds=step_s,
                    memory_mib=self.step_memory_mib(),
                )
                if job.preview_every and index % job.preview_every == 0 and index < total:
                    pictures = [_png(image) for image in self._pictures(denoiser.latents)]
                    report("preview", images=pictures, step=index)
        check()
        report("decoding")
        images, decode_s, decode_wall_s = self.clock.time(lambda: self._pictures(denoiser.latents))
        wall_s += decode_wall_s
        return {
            "images": [_png(image) for image in images],
            "top": None,
            "report": {
                "shape": self._shape_words(job, denoiser),
                "steps": total,
                "seed": job.seed,
                "guidance": job.guidance,
                "class_id": job.class_id,
                "step_ms": spread_ms(seconds),
                "decode_ms": 1e3 * decode_s,
                "images_per_s": job.images / wall_s,
            },
        }

    def _pictures(self, latents: torch.Tensor) -> list[Image.Image]:
        from model_zoo.dit import decode

        return decode(self._dit, latents)

    def _shape_words(self, job: GenerateJob, denoiser: Denoiser) -> dict[str, Any]:
        return {
            "images": job.images,
            "batch": self._batch(job),
            "tokens": self._dit.tokens,
            "latents": list(denoiser.latents.shape),
        }


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()
