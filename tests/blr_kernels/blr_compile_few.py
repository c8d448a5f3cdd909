"""Compiles, without a GPU, the kernels for few and some tokens at their default configs; prints one
JSON list. A program of its own, as ``blr_compile_targets.py`` is.

    python blr_compile_few.py 80 90 ...
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from blr_compile_targets import SHARED_KIB, Recorder, compile_launch, stack_bytes

from blr_kernels.ops import triton_few, triton_small
from blr_kernels.ops.few_paths import few_config, run_few, run_small, small_config
from blr_kernels.ops.paths import Call, DeviceLimits

SMS = {80: 108, 86: 84, 90: 132, 100: 148, 120: 170}

LAYERS: list[tuple[str, tuple[int, int, int, int], int, int]] = [
    # layer, (blocks, p, q, rank), tokens, layers in one launch
    ("DiT adaLN", (9, 128, 768, 256), 1, 1),
    ("DiT adaLN", (9, 128, 768, 256), 2, 1),
    ("DiT adaLN", (9, 128, 768, 256), 16, 1),
    ("DiT adaLN", (9, 128, 768, 256), 2, 28),
    ("DiT adaLN", (9, 128, 768, 256), 16, 28),
    ("Llama-1B up", (16, 128, 512, 768), 1, 1),
    ("Llama-7B up", (16, 256, 688, 1488), 1, 1),
    ("Llama-7B up", (16, 256, 688, 1488), 16, 1),
    ("ViT fc2", (3, 1024, 256, 128), 1, 1),
    ("ViT qkv", (3, 256, 768, 128), 197, 1),
    ("ViT fc1", (3, 256, 1024, 128), 197, 1),
    ("ViT fc2", (3, 1024, 256, 128), 197, 1),
    ("DiT qkv", (9, 128, 384, 384), 512, 1),
    ("DiT fc1", (9, 128, 512, 256), 512, 1),
    ("DiT q, k, v", (9, 128, 128, 128), 512, 3),
]

KERNELS = (
    (triton_few, "few_mix_kernel"),
    (triton_few, "few_product_kernel"),
    (triton_small, "small_mix_kernel"),
    (triton_small, "small_product_kernel"),
)


def record(
    shape: tuple[int, int, int, int], tokens: int, groups: int, limits: DeviceLimits
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of one call in bfloat16 with bias and GELU."""
    b, p, q, r = shape
    dtype = torch.bfloat16
    call = Call("blast", tokens, b * p, b * q, b, r, dtype, limits)
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    found = [(module, name, getattr(module, name)) for module, name in KERNELS]
    for module, name, kernel in found:
        setattr(module, name, Recorder(kernel, launches))

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    factors = empty(groups, b, q, r), empty(groups, b, b, r), empty(groups, b, r, p)
    x, bias, out = empty(tokens, b * p), empty(groups, b * q), empty(groups, tokens, b * q)
    run, config = (run_few, few_config) if tokens <= 16 else (run_small, small_config)
    try:
        run(call, x, factors, bias, "gelu", out, config(call, groups))
    finally:
        for module, name, kernel in found:
            setattr(module, name, kernel)
    return launches


def main(targets: list[int]) -> None:
    rows = []
    for target in targets:
        limit = SHARED_KIB[target] * 1024
        limits = DeviceLimits(f"sm_{target}", divmod(target, 10), limit, SMS[target])
        for label, shape, tokens, groups in LAYERS:
            for kernel, arguments, constants in record(shape, tokens, groups, limits):
                # An option of the launch alone.
                constants.pop("launch_pdl", None)
                compiled = compile_launch(kernel, arguments, dict(constants), target)
                ptx = compiled.asm["ptx"]
                wide = [
                    line for line in ptx.splitlines() if ".v4" in line and "ld.global" in line
                ] + ["cp.async"] * ptx.count("cp.async.cg")
                before = ptx.partition("griddepcontrol.wait")[0]
                rows.append(
                    {
                        "target": target,
                        "what": f"{label} {shape} x{groups} {tokens} tokens {kernel.__name__}",
                        "shared": compiled.metadata.shared,
                        "limit": limit,
                        "stack": stack_bytes(compiled.asm["cubin"]),
                        "dependent": "griddepcontrol" in ptx,
                        "early": kernel.__name__ == "few_product_kernel"
                        or bool(constants.get("EARLY") and constants.get("UNROLL")),
                        "wide_loads": len(wide),
                        "wide_loads_before_wait": sum(
                            ".v4" in line and "ld.global" in line for line in before.splitlines()
                        ),
                    }
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
