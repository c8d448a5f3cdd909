"""Compiles, without a GPU, the very kernels the paths would launch; prints one JSON list.

A program of its own: Triton cannot both interpret and compile in one process. Paths run on tensors
of the meta device with a driver that only knows its target, so tiles, strides, constants and
what is known of them are the real ones.

    python blr_compile_targets.py 75 80 86 ...   every path at its default config
    python blr_compile_targets.py --shipped      the fastest path of every shipped config
    python blr_compile_targets.py --large        kernels that walk more than 2**31 weights
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from blr_kernels import Blast, LowRank, Monarch, Structure
from blr_kernels.ops.paths import Call, Config, DeviceLimits, Path, find_path, paths
from blr_kernels.tuning import lookup
from blr_kernels.tuning.search import structure_of

SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}
GPUS = {"NVIDIA H200": 90}

LAYERS: list[tuple[str, Structure, int, int, tuple[int, ...]]] = [
    ("DiT qkv", Blast(9, 384), 1152, 3456, (2, 512, 4096)),
    ("ViT fc1", Monarch(4, 128), 768, 3072, (197,)),
    ("ViT fc2", LowRank(128), 3072, 768, (6304,)),
]
"""Layers of the paper's models: few tokens, some, many."""


class TargetDriver:
    """What Triton asks a driver before it compiles; each target is a device of its own."""

    target = 80

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0


DRIVER = TargetDriver()
COMPILED: dict[int, tuple[str, Any]] = {}
"""Name and compiled kernel of the launches since it was cleared, each once."""


def compile_instead_of_launching() -> None:
    """From here on a launch compiles its kernel and adds it to ``COMPILED``."""
    triton.runtime.driver.set_active(DRIVER)
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: object, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        COMPILED[id(kernel)] = self.__name__, kernel
        return kernel

    JITFunction.run = run


def limits(target: int, name: str = "") -> DeviceLimits:
    """Of a GPU of compute capability ``target``."""
    return DeviceLimits(
        name or f"sm_{target}", divmod(target, 10), SHARED_KIB[target] * 1024, 132, 50 * 2**20
    )


def compile_call(path: Path, call: Call, config: Config) -> list[tuple[str, Any]]:
    """Name and compiled kernel of each launch of a call with bias and GELU."""
    COMPILED.clear()
    structure = structure_of(call.op, call.blocks, call.rank)
    shapes = structure.parameter_shapes(call.in_features, call.out_features)

    def empty(*shape: int, dtype: torch.dtype = call.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    factors = [empty(*shape) for shape in shapes.values()]
    if call.op == "blast_int8":
        factors = [
            empty(*shapes["left"], dtype=torch.int8),
            empty(call.blocks, call.q, dtype=torch.float32),
            empty(*shapes["coupling"], dtype=torch.float16),
            empty(*shapes["right"], dtype=torch.int8),
        ]
    path.run(
        call,
        empty(call.tokens, call.in_features),
        tuple(factors),
        empty(call.out_features),
        "gelu",
        empty(call.tokens, call.out_features),
        config,
    )
    return list(COMPILED.values())


def stack_bytes(cubin: bytes) -> int | None:
    """Bytes of registers spilled to the stack, None where the tool that tells is missing."""
    tool = FilePath(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    found = re.search(r"STACK:(\d+)", run.stdout)
    return int(found.group(1)) if found else None


def jobs_of(target: int) -> Iterator[tuple[Path, Call, Config]]:
    """Every path of this package at its default config, on the layers above."""
    half = torch.float16 if target < 80 else torch.bfloat16
    layers = [(*layer[:4], tokens, half) for layer in LAYERS for tokens in layer[4]]
    if target in (75, 90):
        layers.append((*LAYERS[0][:4], 512, torch.float32))
    for _, structure, n_in, n_out, tokens, dtype in layers:
        blocks = 1 if isinstance(structure, LowRank) else structure.blocks
        sizes = (n_in, n_out, blocks, structure.rank, dtype)
        call = Call(structure.kind, tokens, *sizes, limits(target))
        for path in paths(call.op):
            if not path.why_not(call):
                yield path, call, path.default_config(call)


def shipped_jobs() -> Iterator[tuple[int, Path, Call, Config]]:
    """Target, path, call and config of the fastest of every shipped entry."""
    for file in sorted(lookup.SHIPPED.rglob("*.json")):
        data = json.loads(file.read_text())
        target = GPUS[data["gpu"]]
        sizes = [data[key] for key in ("in_features", "out_features", "blocks", "rank")]
        dtype = getattr(torch, data["dtype"])
        for tokens, entry in data["entries"].items():
            call = Call(data["op"], int(tokens), *sizes, dtype, limits(target, data["gpu"]))
            path = find_path(call.op, entry["path"])
            yield target, path, call, entry["config"]


def large_rows() -> Iterator[dict[str, Any]]:
    """The code of kernels that multiply a block's index by the size of a block of weights."""
    DRIVER.target = 80
    blocks, rank, p = 5, 2**25, 16
    for op, name in (("blast", "triton"), ("blast", "small"), ("blast_int8", "triton")):
        sizes = (8, blocks * p, blocks * p, blocks, rank, torch.bfloat16, limits(80))
        path, call = find_path(op, name), Call(op, *sizes)
        for kernel, compiled in compile_call(path, call, path.default_config(call)):
            yield {
                "what": f"{op} {name}: {kernel}",
                "strides": [rank, rank * p],
                "code": compiled.asm["ttir"],
            }


def rows_of(target: int, path: Path, call: Call, config: Config) -> Iterator[dict[str, Any]]:
    """What is worth knowing of each kernel that a call launches."""
    DRIVER.target = target
    dtype = str(call.dtype).removeprefix("torch.")
    layer = f"{call.in_features} -> {call.out_features} b{call.blocks} r{call.rank}"
    for name, compiled in compile_call(path, call, config):
        ptx = compiled.asm["ptx"]
        instructions = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
        yield {
            "target": target,
            "what": f"{call.op} {layer} {call.tokens} tokens {dtype} {path.name}: {name}",
            "path": path.name,
            "dtype": dtype,
            "shared": compiled.metadata.shared,
            "limit": call.device.shared_bytes,
            "tensor_cores": [found for found in instructions if found in ptx],
            "tokens": call.tokens,
            "stack": stack_bytes(compiled.asm["cubin"]),
        }


def main(arguments: list[str]) -> None:
    compile_instead_of_launching()
    if arguments == ["--large"]:
        print(json.dumps(list(large_rows())))
        return
    if arguments == ["--shipped"]:
        jobs = list(shipped_jobs())
    else:
        jobs = [(target, *job) for target in map(int, arguments) for job in jobs_of(target)]
    print(json.dumps([row for job in jobs for row in rows_of(*job)]))


if __name__ == "__main__":
    main(sys.argv[1:])
