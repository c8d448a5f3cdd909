"""What every task does alike: load, compile, warm up, then a timed part."""

from __future__ import annotations

import importlib
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from app.engine import machine
from app.engine.availability import compiles, expected_compile_s
from app.engine.jobs import Job, backend_info
from app.engine.spec import WorkerSpec
from app.engine.worker.measure import (
    Clock,
    CpuClock,
    CpuMemory,
    CudaClock,
    CudaMemory,
    tensor_bytes,
)
from model_zoo.weights import parameter_count

_WARM_STEPS = 3
_WARM_S = 0.2

# A backend that is asked for many shapes must compile each of them, not fall back to eager.
_MAX_SHAPES = 256


class Report(Protocol):
    """Sends one report of the current command to the engine."""

    def __call__(self, name: str, /, **fields: Any) -> None: ...


Check = Callable[[], None]


@dataclass(frozen=True)
class Prepared:
    """What getting ready for one shape took, in seconds."""

    compile_s: float
    warmup_s: float


class Session(ABC):
    """One loaded model in this process.

    Subclasses import their libraries in `imports`, read the weights in `load`, which returns
    the compared model, and say how one step of a job is run.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.info = backend_info(spec.backend)
        self.device = torch.device(spec.device)
        self.kind = self.device.type
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
        self.dtype = resolve_dtype(spec.dtype, self.device)
        self.compiles = compiles(self.info, self.kind)
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self.imports()
        if self.compiles:
            importlib.import_module("torch._inductor.compile_fx")
        self.clock: Clock = CpuClock() if self.kind == "cpu" else CudaClock(self.device)
        self.memory: CpuMemory | CudaMemory = (
            CpuMemory() if self.kind == "cpu" else CudaMemory(self.device)
        )
        start = time.perf_counter()
        self.model = self.load()
        self._synchronise()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        self.load_s = time.perf_counter() - start
        self.weights_bytes = tensor_bytes(self.model)
        self.parameters = parameter_count(self.model)
        if self.compiles:
            _compile_(self.model, self.kind)

    @abstractmethod
    def imports(self) -> None:
        """Import what loading needs, so that the memory baseline holds it."""

    @abstractmethod
    def load(self) -> nn.Module:
        """Read the weights; the returned module is the one that backends differ in."""

    @abstractmethod
    def shape(self, job: Any) -> tuple[Any, ...]:
        """What a compiled model would compile again for."""

    @abstractmethod
    def fresh_step(self, job: Any) -> Callable[[], object]:
        """One step of the job as a call, on state of its own."""

    @abstractmethod
    def timed(self, job: Any, report: Report, check: Check) -> dict[str, Any]:
        """Run the job; returns the fields of `Result`."""

    def warm_rest(self, job: Any) -> object:
        """Warm up what runs outside the steps: by default nothing."""
        return None

    def warm_steps(self, job: Any) -> int:
        """How many untimed steps come before the timed ones, at least."""
        return _WARM_STEPS

    def decoder_bytes(self) -> int:
        """Bytes of models that are loaded beside the compared one."""
        return 0

    def prepare(self, job: Job, report: Report, check: Check) -> Prepared:
        """Compile and warm up for the job's shape, or one step if that was done before."""
        shape = self.shape(job)
        step = self.fresh_step(job)
        known = self._prepared.get(shape)
        check()
        if known is not None:
            report("warming")
            self._warm(step, 1, check)
            return known
        compile_s = 0.0
        if self.compiles:
            report(
                "compiling",
                expected_s=expected_compile_s(self.spec.backend, self.kind, self.spec.task),
            )
            start = time.perf_counter()
            step()
            if self.kind == "cuda":
                # The second call records the CUDA graph.
                self.memory.learn(shape, step)
            self._synchronise()
            compile_s = time.perf_counter() - start
            check()
        report("warming")
        start = time.perf_counter()
        self._warm(step, self.warm_steps(job), check)
        self.memory.learn(shape, step)
        self.warm_rest(job)
        self._synchronise()
        prepared = Prepared(compile_s, time.perf_counter() - start)
        self._prepared[shape] = prepared
        return prepared

    def _warm(self, step: Callable[[], object], count: int, check: Check) -> None:
        """At least `count` steps, and for at least a moment: small models need more of them."""
        end = time.perf_counter() + _WARM_S
        while count > 0 or time.perf_counter() < end:
            step()
            self._synchronise()
            check()
            count -= 1

    def run(self, job: Job, report: Report, check: Check) -> dict[str, Any]:
        """Run the job from preparation to its result."""
        prepared = self.prepare(job, report, check)
        report(
            "ready",
            load_s=self.load_s,
            compile_s=prepared.compile_s,
            warmup_s=prepared.warmup_s,
            weights_bytes=self.weights_bytes,
            parameters=self.parameters,
        )
        self.memory.start()
        graphs = _compiled_graphs()
        result = self.timed(job, report, check)
        result["report"] |= self._common(job, prepared)
        result["report"]["recompiled_in_run"] = _compiled_graphs() - graphs
        return result

    def step_memory_mib(self) -> float:
        """Memory after a step, in MiB: resident above the baseline on a CPU, the peak on a GPU."""
        return self.memory.live_mib()

    def _synchronise(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def _common(self, job: Job, prepared: Prepared) -> dict[str, Any]:
        memory = self.memory.summary(self.shape(job), self.weights_bytes, self.decoder_bytes())
        versions = machine.versions()
        if self.kind == "cuda":
            versions["cuda"] = torch.version.cuda or "none"
        return {
            "backend": self.spec.backend,
            "task": self.spec.task,
            "model": self.spec.model,
            "variant": self.spec.variant,
            "structure": structure_summary(self.model),
            "device": self.spec.device,
            "device_name": device_name(self.device),
            "threads": torch.get_num_threads() if self.kind == "cpu" else None,
            "platform": platform.platform(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "fuse_qkv": self.spec.fuse_qkv,
            "compile": _mode_words(self.kind) if self.compiles else None,
            "versions": versions,
            "load_s": self.load_s,
            "compile_s": prepared.compile_s,
            "warmup_s": prepared.warmup_s,
            "memory_mib": memory,
            "memory_labels": self.memory.labels(),
            "parameters": self.parameters,
            "weights_bytes": self.weights_bytes,
            "untrained": self.spec.untrained,
        }


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype to run in: fp32 on a CPU, bf16 on a GPU that has it in hardware, else fp16."""
    if name is not None:
        return {
            "float32": torch.float32,
            "float16": torch.float16,
            "bfloat16": torch.bfloat16,
        }[name]
    if device.type == "cpu":
        return torch.float32
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if ampere else torch.float16


def device_name(device: torch.device) -> str:
    """The device in words, "NVIDIA H200" or the CPU's model and cores."""
    if device.type == "cpu":
        return machine.cpu_name()
    return torch.cuda.get_device_name(device)


def structure_summary(model: nn.Module) -> str | None:
    """Which structures the model's layers have, "BLAST b9 r24 (42 layers)"; `None` for dense."""
    from blr_kernels import BLRLinear

    counts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, BLRLinear):
            name = str(module.structure)
            counts[name] = counts.get(name, 0) + 1
    if not counts:
        return None
    return ", ".join(f"{name} ({count} layers)" for name, count in counts.items())


def _mode(kind: str) -> str | None:
    # On a GPU small models wait for launches: CUDA graphs remove those.
    return "reduce-overhead" if kind == "cuda" else None


def _mode_words(kind: str) -> str:
    return f"torch.compile, mode {_mode(kind) or 'default'}, static shapes"


def _compile_(model: nn.Module, kind: str) -> None:
    config = importlib.import_module("torch._dynamo").config
    config.recompile_limit = _MAX_SHAPES
    config.accumulated_recompile_limit = 64 * _MAX_SHAPES
    config.fail_on_recompile_limit_hit = True
    model.compile(mode=_mode(kind), dynamic=False)


def _compiled_graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def open_session(spec: WorkerSpec) -> Session:
    """Load what `spec` names."""
    if spec.task == "generate":
        from app.engine.worker.generate import GenerateSession

        return GenerateSession(spec)
    from app.engine.worker.classify import ClassifySession

    return ClassifySession(spec)
