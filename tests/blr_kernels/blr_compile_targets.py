"""Compiles, without a GPU, the very kernels the ops would launch; prints one JSON list.

A program of its own: Triton cannot both interpret and compile in one process. The launches are
recorded on tensors of the meta device, so tiles, strides and constants are the real ones.

    python blr_compile_targets.py 75 80 86 ...
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blr_kernels import Blast, LowRank, Monarch, Structure
from blr_kernels.ops import triton_blast, triton_product
from blr_kernels.ops.paths import Call, DeviceLimits, find_path

SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}

LAYERS: list[tuple[str, Structure, int, int, tuple[int, ...]]] = [
    ("DiT qkv", Blast(9, 384), 1152, 3456, (2, 512, 4096)),
    ("ViT fc1", Monarch(4, 128), 768, 3072, (197,)),
    ("ViT fc2", LowRank(128), 3072, 768, (6304,)),
]
"""Layers of the paper's models: few tokens, some, many."""

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}


class Recorder:
    """Stands in for a kernel and keeps its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.launches.append((self.kernel, arguments, constants))

        return launch


def record(
    structure: Structure,
    n_in: int,
    n_out: int,
    tokens: int,
    dtype: torch.dtype,
    limits: DeviceLimits,
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of one call with bias and GELU at the default config."""
    blocks = 1 if isinstance(structure, LowRank) else structure.blocks
    call = Call(structure.kind, tokens, n_in, n_out, blocks, structure.rank, dtype, limits)
    path = find_path(structure.kind, "triton")
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    kernels = triton_product.product_kernel, triton_blast.mix_kernel
    triton_product.product_kernel = Recorder(kernels[0], launches)
    triton_blast.mix_kernel = Recorder(kernels[1], launches)
    try:
        x = torch.empty(tokens, n_in, dtype=dtype, device="meta")
        bias = torch.empty(n_out, dtype=dtype, device="meta")
        shapes = structure.parameter_shapes(n_in, n_out).values()
        factors = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        out = torch.empty(tokens, n_out, dtype=dtype, device="meta")
        path.run(call, x, factors, bias, "gelu", out, path.default_config(call))
    finally:
        triton_product.product_kernel, triton_blast.mix_kernel = kernels
    return launches


def compile_launch(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], target: int
) -> Any:
    """Specialises the arguments as a launch would, then compiles for ``sm_<target>``."""
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    signature: dict[str, str] = {}
    constexprs = dict(constants)
    aligned = {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if value is None or (value == 1 and name != "tokens" if isinstance(value, int) else False):
            signature[name] = "constexpr"
            constexprs[name] = value
            continue
        signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        if isinstance(value, torch.Tensor) or (value % 16 == 0 and name != "tokens"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def stack_bytes(cubin: bytes) -> int | None:
    """Bytes of registers spilled to the stack, None where the tool that tells is missing."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
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


def main(targets: list[int]) -> None:
    rows = []
    for target in targets:
        limit = SHARED_KIB[target] * 1024
        limits = DeviceLimits(f"sm_{target}", divmod(target, 10), limit, 100)
        jobs = [
            (*layer[:4], tokens, torch.float16 if target < 80 else torch.bfloat16)
            for layer in LAYERS
            for tokens in layer[4]
        ]
        if target in (75, 90):
            jobs.append((*LAYERS[0][:4], 512, torch.float32))
        for label, structure, n_in, n_out, tokens, dtype in jobs:
            for kernel, arguments, constants in record(
                structure, n_in, n_out, tokens, dtype, limits
            ):
                compiled = compile_launch(kernel, arguments, constants, target)
                ptx = compiled.asm["ptx"]
                rows.append(
                    {
                        "target": target,
                        "what": f"{label} {structure} {tokens} tokens {dtype} {kernel.__name__}",
                        "dtype": str(dtype).removeprefix("torch."),
                        "shared": compiled.metadata.shared,
                        "limit": limit,
                        "tensor_cores": [
                            name
                            for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
                            if name in ptx
                        ],
                        "tokens": tokens,
                        "stack": stack_bytes(compiled.asm["cubin"]),
                    }
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
