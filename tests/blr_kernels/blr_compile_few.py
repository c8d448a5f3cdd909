"""Compiles, without a GPU, the kernels for few and some tokens at their default configs; prints one
JSON list. A program of its own, as ``blr_compile_targets.py`` is.

    python blr_compile_few.py 80 90 ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from blr_compile_targets import (
    COMPILED,
    DRIVER,
    compile_instead_of_launching,
    limits,
    stack_bytes,
)

from blr_kernels.ops.few_paths import few_config, run_few, run_small, small_config
from blr_kernels.ops.paths import Call
from blr_kernels.ops.triton_few import MAX_TOKENS

SMS = {80: 108, 86: 84, 90: 132, 100: 148, 120: 170}

LAYERS: list[tuple[str, tuple[int, int, int, int], int, int]] = [
    # layer, (blocks, p, q, rank), tokens, layers in one launch; BLAST
    ("DiT adaLN", (9, 128, 768, 256), 2, 1),
    ("DiT adaLN", (9, 128, 768, 256), 16, 1),
    ("DiT adaLN", (9, 128, 768, 256), 2, 28),
    ("DiT adaLN", (9, 128, 768, 256), 16, 28),
    ("Llama-7B up", (16, 256, 688, 1488), 1, 1),
    ("Llama-7B up", (16, 256, 688, 1488), 16, 1),
    ("ViT qkv", (3, 256, 768, 128), 197, 1),
    ("ViT fc2", (3, 1024, 256, 128), 197, 1),
    ("DiT qkv", (9, 128, 384, 384), 512, 1),
    ("DiT fc1", (9, 128, 512, 256), 512, 1),
    ("DiT q, k, v", (9, 128, 128, 128), 512, 3),
]

GROUPED: list[tuple[str, str, tuple[int, int, int, int], int, int]] = [
    # layer, op, the same
    ("DiT adaLN", "low_rank", (1, 1152, 6912, 256), 2, 28),
    ("DiT adaLN", "low_rank", (1, 1152, 6912, 256), 16, 28),
    ("DiT q, k, v", "low_rank", (1, 1152, 1152, 128), 512, 3),
    ("Llama-7B q, k, v", "low_rank", (1, 4096, 4096, 1024), 16, 3),
    ("DiT adaLN", "monarch", (4, 288, 1728, 128), 2, 28),
    ("DiT adaLN", "monarch", (4, 288, 1728, 128), 16, 28),
    ("DiT adaLN", "monarch", (4, 288, 1728, 128), 64, 28),
    ("ViT q, k, v", "monarch", (4, 192, 192, 128), 2, 3),
    ("ViT q, k, v", "monarch", (4, 192, 192, 128), 197, 3),
    ("Llama-7B q, k, v", "monarch", (16, 256, 256, 512), 16, 3),
]


def compile_call(
    op: str, shape: tuple[int, int, int, int], tokens: int, groups: int, target: int
) -> list[tuple[str, Any]]:
    """Name and compiled kernel of each launch of a call in bfloat16 with bias and GELU."""
    COMPILED.clear()
    DRIVER.target = target
    b, p, q, r = shape
    dtype = torch.bfloat16
    device = replace(limits(target), sms=SMS[target])
    call = Call(op, tokens, b * p, b * q, b, r, dtype, device)

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    coupling = empty(groups, b, b, r) if op == "blast" else None
    factors = empty(groups, b, q, r), coupling, empty(groups, b, r, p)
    x, bias, out = empty(tokens, b * p), empty(groups, b * q), empty(groups, tokens, b * q)
    run, config = (run_few, few_config) if tokens <= MAX_TOKENS else (run_small, small_config)
    run(call, x, factors, bias, "gelu", out, config(call, groups))
    return list(COMPILED.values())


def rows_of(target: int) -> Iterator[dict[str, Any]]:
    """What is worth knowing of each kernel, in the order of the launches."""
    alone = [(label, "blast", *rest) for label, *rest in LAYERS]
    for label, op, shape, tokens, groups in [*alone, *GROUPED]:
        for number, (name, compiled) in enumerate(compile_call(op, shape, tokens, groups, target)):
            lines = compiled.asm["ptx"].splitlines()
            wide = [
                n
                for n, line in enumerate(lines)
                if ("ld.global" in line and ".v4" in line) or "cp.async.cg" in line
            ]
            waits = [n for n, line in enumerate(lines) if "griddepcontrol.wait" in line]
            yield {
                "target": target,
                "what": f"{label} {op} {shape} x{groups} {tokens} tokens {name}",
                "shared": compiled.metadata.shared,
                "limit": limits(target).shared_bytes,
                "stack": stack_bytes(compiled.asm["cubin"]),
                "second": number == 1,
                "waits": len(waits),
                "fetches": "prefetch.global.L2" in compiled.asm["ptx"],
                "wide_loads": len(wide),
                "wide_loads_before": sum(n < waits[0] for n in wide) if waits else 0,
            }


if __name__ == "__main__":
    compile_instead_of_launching()
    print(json.dumps([row for argument in sys.argv[1:] for row in rows_of(int(argument))]))
