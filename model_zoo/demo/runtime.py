"""What every training stage shares: its settings, the clock, averaged weights, files, logs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass
class Run:
    """Settings of one stage."""

    data: Path
    out: Path
    device: torch.device
    seconds: float
    batch: int | None = None
    resume: bool = False
    started: float = field(default_factory=time.monotonic)
    """Monotonic time from which `seconds` count."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is an NVIDIA GPU."""
        return self.device.type == "cuda"

    def batch_size(self, on_gpu: int) -> int:
        """The batch asked for, else the given one on a GPU and a tiny one elsewhere."""
        return self.batch or (on_gpu if self.on_gpu else 8)

    def elapsed(self) -> float:
        """Seconds since `started`."""
        return time.monotonic() - self.started

    def autocast(self) -> torch.autocast:
        """bf16 on a GPU, plain fp32 elsewhere."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu)

    def compile_(self, *modules: nn.Module) -> None:
        """Compile modules in place, on a GPU only; what cannot be compiled runs as it is."""
        if self.on_gpu:
            torch._dynamo.config.suppress_errors = True
            for module in modules:
                module.compile()


class Progress:
    """Runs a loop until the stage's time is up, and logs its speed and losses.

    Iterating yields (step, fraction of the time used).
    """

    def __init__(self, run: Run, name: str, samples_per_step: int, *, reserve: float = 0.0) -> None:
        self.run, self.name, self.samples = run, name, samples_per_step
        self.end = run.seconds - reserve
        self.first = run.elapsed()
        self.logged_at, self.logged_step = self.first, 0
        self.every = max(2.0, run.seconds / 15)

    def __iter__(self):  # type: ignore[no-untyped-def]
        step = 0
        while step == 0 or self.run.elapsed() < self.end:
            used = (self.run.elapsed() - self.first) / max(1e-9, self.end - self.first)
            yield step, min(1.0, used)
            step += 1

    def log(self, step: int, **values: Tensor | float) -> bool:
        """Print a line if one is due; reading the tensors waits for the device. -> printed."""
        now = self.run.elapsed()
        if step > 0 and now - self.logged_at < self.every:
            return False
        figures = " ".join(f"{key} {float(value):.5f}" for key, value in values.items())
        now = self.run.elapsed()
        rate = (step - self.logged_step) * self.samples / max(1e-9, now - self.logged_at)
        say(self.name, f"{now:6.1f}s step {step:6d} {rate:8.0f} samples/s {figures}")
        self.logged_at, self.logged_step = now, step
        return True


def say(name: str, text: str) -> None:
    """Print one line of a stage's log at once."""
    print(f"[{name}] {text}", flush=True)


def cosine(fraction: float, peak: float, *, step: int, warmup: int, floor: float = 0.0) -> float:
    """Learning rate: linear warm-up over steps, then a cosine over the fraction of time used."""
    return min(1.0, (step + 1) / warmup) * (
        floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * fraction))
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_gradients_(parameters: Iterable[nn.Parameter], limit: float = 1.0) -> None:
    """Clip the gradients' norm; a step that is not finite counts as no step."""
    trained = list(parameters)
    torch.nn.utils.clip_grad_norm_(trained, limit)
    for parameter in trained:
        if parameter.grad is not None:
            torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)


class Average:
    """Exponential moving average of a module's trained parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.live = [p.detach() for p in self.trained]
        self.mean = [p.clone() for p in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the present weights; the early average forgets faster."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.mean, self.live, 1 - decay)

    def state(self) -> dict[str, Tensor]:
        """The averaged weights by parameter name."""
        return dict(zip(self.names, self.mean, strict=True))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the averaged and the present weights (call again to undo)."""
        for mean, live in zip(self.mean, self.live, strict=True):
            kept = live.clone()
            live.copy_(mean)
            mean.copy_(kept)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file in fp16, which is what is bundled; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    save_file(
        {name: _half(t.detach()).cpu().contiguous() for name, t in tensors.items()},
        partial,
        metadata=dict(metadata or {}),
    )
    partial.replace(path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file -> (fp32 tensors on the CPU, metadata)."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        names = list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
    return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}, metadata


def _half(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of pictures in [-1, 1]."""
    error = torch.mean((a.float().clamp(-1, 1) - b.float().clamp(-1, 1)) ** 2)
    return float(10 * torch.log10(4 / error.clamp_min(1e-12)))
