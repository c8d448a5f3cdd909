"""The denoising loop of a DiT, one step at a time, and the way from latents to pictures.

The mathematics of diffusers' ``DiTPipeline``, with three differences. The id of "no class" is the
model's own number of classes, not the constant 1000. The scheduler moves one set of latents instead
of two equal ones. And guidance below 1 is what the formula says, where diffusers has none.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from model_zoo.dit import DiT

__all__ = ["MAX_IMAGES", "MAX_STEPS", "Denoiser", "check_request", "decode", "denoise"]

MAX_STEPS = 1000
MAX_IMAGES = 64


def check_request(
    num_classes: int, class_ids: Sequence[int], *, seed: int, steps: int, guidance: float
) -> None:
    """Refuse what a model of ``num_classes`` classes cannot or should not run.

    Raises:
        TypeError, ValueError: one line with what was expected and what came.
    """
    if isinstance(class_ids, str) or not isinstance(class_ids, Sequence):
        raise TypeError(f"class_ids must be a list of ints, got {class_ids!r}")
    if not 1 <= len(class_ids) <= MAX_IMAGES:
        raise ValueError(f"class_ids must hold 1 to {MAX_IMAGES} ids, got {len(class_ids)}")
    for index in class_ids:
        _check_int("class id", index, 0, num_classes - 1)
    _check_int("seed", seed, 0, 2**63 - 1)
    _check_int("steps", steps, 1, MAX_STEPS)
    if isinstance(guidance, bool) or not isinstance(guidance, int | float):
        raise TypeError(f"guidance must be a number, got {guidance!r}")
    if not 0 <= guidance <= sys.float_info.max:  # NaN is not, either
        raise ValueError(f"guidance must be finite and not negative, got {guidance}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")


class Denoiser:
    """One run from noise to latents. Nothing is computed before the first :meth:`step`.

    Attributes:
        latents: ``(n, c, s, s)``, the current state; the noise at first. It is drawn on the CPU in
            float32 from the seed, so every backend, device and dtype starts from the same.
        index: steps done.
        total: steps of the schedule. Some schedulers take a few more than were asked for.
    """

    def __init__(
        self, dit: DiT, class_ids: Sequence[int], *, seed: int, steps: int, guidance: float
    ) -> None:
        """Check the request, draw the noise and set the schedule.

        Args:
            dit: the model.
            class_ids: one id an image.
            seed: of the noise.
            steps: of denoising, 1 to 1000.
            guidance: strength of classifier-free guidance. At 1 there is none, and a step is one
                forward of ``n`` images instead of ``2 n``; at 0 the classes count for nothing.

        Raises:
            TypeError, ValueError: see :func:`check_request`.
        """
        check_request(dit.num_classes, class_ids, seed=seed, steps=steps, guidance=guidance)
        self._dit = dit
        self._guidance = float(guidance)
        self._scheduler = copy.deepcopy(dit.scheduler)
        trained = int(self._scheduler.config.num_train_timesteps)
        if steps > trained:
            raise ValueError(f"steps must be at most {trained} for this scheduler, got {steps}")
        self._scheduler.set_timesteps(steps)
        self._timesteps = self._scheduler.timesteps
        self._generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(len(class_ids), *dit.latent_shape, generator=self._generator)
        noise = noise * getattr(self._scheduler, "init_noise_sigma", 1.0)
        self.latents = noise.to(device=dit.device, dtype=dit.dtype)
        ids = list(class_ids)
        if self.guided:
            ids += [dit.num_classes] * len(ids)
        self._ids = torch.tensor(ids, device=dit.device)
        self._model_timesteps = self._timesteps.to(dit.device)
        takes = inspect.signature(self._scheduler.step).parameters
        self._step_arguments = {"generator": self._generator} if "generator" in takes else {}
        self.index = 0
        self.total = len(self._timesteps)

    @property
    def guided(self) -> bool:
        """Whether each step also runs the model without a class."""
        return self._guidance != 1

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self.index >= self.total

    @torch.no_grad()
    def step(self) -> Tensor:
        """Make the next step; returns the new latents ``(n, c, s, s)``.

        Raises:
            RuntimeError: all steps are made already.
        """
        if self.done:
            raise RuntimeError(f"all {self.total} steps are made")
        timestep = self._timesteps[self.index]
        scaled = self._scheduler.scale_model_input(self.latents, timestep)
        inputs = torch.cat([scaled, scaled]) if self.guided else scaled
        output = self._dit.transformer(
            inputs,
            timestep=self._model_timesteps[self.index].expand(inputs.shape[0]),
            class_labels=self._ids,
            return_dict=False,
        )[0]
        channels = self.latents.shape[1]
        if self._dit.out_channels == 2 * channels:  # the learned variance is not used
            output = output[:, :channels]
        if self.guided:
            conditional, free = output.chunk(2)
            output = free + self._guidance * (conditional - free)
        self.latents = self._scheduler.step(
            output, timestep, self.latents, return_dict=False, **self._step_arguments
        )[0]
        self.index += 1
        return self.latents


def denoise(
    dit: DiT, class_ids: Sequence[int], *, seed: int, steps: int, guidance: float
) -> Iterator[Tensor]:
    """The latents after each step. The request is checked at once, before the first ``next``.

    Raises:
        TypeError, ValueError: see :class:`Denoiser`.
    """
    denoiser = Denoiser(dit, class_ids, seed=seed, steps=steps, guidance=guidance)

    def run() -> Iterator[Tensor]:
        while not denoiser.done:
            yield denoiser.step()

    return run()


@torch.no_grad()
def decode(dit: DiT, latents: Tensor) -> list[Image.Image]:
    """Latents ``(n, c, s, s)`` -> ``n`` RGB images."""
    pixels = dit.vae.decode(latents / dit.scaling_factor, return_dict=False)[0]
    pixels = (pixels / 2 + 0.5).clamp(0, 1)
    arrays = (pixels.permute(0, 2, 3, 1).float().cpu().numpy() * 255).round().astype("uint8")
    return [Image.fromarray(array) for array in arrays]
