"""Compiles Monarch's paths without a GPU: default configs for every target named, all candidates
for sm_90; prints one JSON list. A program of its own, as ``blr_compile_targets.py`` is.

    python blr_monarch_targets.py 80 86 ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from blr_compile_targets import (
    DRIVER,
    compile_call,
    compile_instead_of_launching,
    limits,
    stack_bytes,
)

from blr_kernels.ops import triton_monarch_config as config_of
from blr_kernels.ops.paths import Call, Config, Path, find_path

LAYERS = {"ViT fc1": (768, 3072), "ViT fc2": (3072, 768)}
TOKENS = (197, 6304)


def jobs_of(target: int) -> Iterator[tuple[Path, Call, Config]]:
    """Path, call and config of each thing to compile."""
    for path in (find_path("monarch", "fused"), find_path("monarch", "two")):
        for layer, sizes in LAYERS.items():
            for tokens in TOKENS:
                call = Call("monarch", tokens, *sizes, 4, 128, torch.bfloat16, limits(target))
                if path.name == "fused" and not path.suits(call):
                    continue
                if target == 90 and layer == "ViT fc1":
                    yield from ((path, call, config) for config in path.candidates(call))
                else:
                    yield path, call, path.default_config(call)


def rows_of(target: int, path: Path, call: Call, config: Config) -> Iterator[dict[str, Any]]:
    """What is worth knowing of each kernel that a call launches."""
    DRIVER.target = target
    estimates: tuple[int, ...]
    names: tuple[str, ...]
    if path.name == "fused":
        estimates, names = (config_of.fused_shared_bytes(call, config),), ("tokens",)
    else:
        estimates, names = config_of.two_shared_bytes(call, config), ("right_tokens", "left_tokens")
    launches = compile_call(path, call, config)
    for (name, compiled), estimate, tokens in zip(launches, estimates, names, strict=True):
        ptx = compiled.asm["ptx"]
        instructions = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
        yield {
            "target": target,
            "what": f"sm_{target} {name} {call.in_features} {call.tokens} tokens {dict(config)}",
            "tokens": config[tokens],
            "shared": compiled.metadata.shared,
            "estimate": estimate,
            "limit": call.device.shared_bytes,
            "stack": stack_bytes(compiled.asm["cubin"]),
            "tensor_cores": [found for found in instructions if found in ptx],
            "copy_engine": "cp.async.bulk.tensor" in ptx,
            "waits": "griddepcontrol.wait" in ptx,
            "fetches": "prefetch.global.L2" in ptx,
        }


if __name__ == "__main__":
    compile_instead_of_launching()
    jobs = [(target, *job) for target in map(int, sys.argv[1:]) for job in jobs_of(target)]
    print(json.dumps([row for job in jobs for row in rows_of(*job)]))
