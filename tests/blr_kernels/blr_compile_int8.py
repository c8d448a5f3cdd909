"""Compiles int8 BLAST's kernels without a GPU, as ``blr_compile_targets`` does; prints JSON.

python blr_compile_int8.py 80 86 ...
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from blr_compile_targets import (
    COMPILED,
    DRIVER,
    compile_instead_of_launching,
    limits,
    stack_bytes,
)

from blr_kernels.ops.paths import Call
from blr_kernels.ops.triton_blast_int8 import PATH

LAYERS: list[tuple[str, int, int, int, int, tuple[int, ...]]] = [
    ("DiT qkv", 9, 1152, 3456, 384, (16, 512, 4096)),
    ("ViT fc2", 3, 3072, 768, 128, (197, 6304)),
    ("Llama-1B", 16, 2048, 8192, 768, (4096,)),
]


def launch(call: Call, config: dict[str, int]) -> None:
    """Runs the path on tensors of the meta device, with bias and GELU."""
    b, q, r, p = call.blocks, call.q, call.rank, call.p
    factors = (
        torch.empty(b, q, r, dtype=torch.int8, device="meta"),
        torch.empty(b, q, dtype=torch.float32, device="meta"),
        torch.empty(b, b, r, dtype=torch.float16, device="meta"),
        torch.empty(b, r, p, dtype=torch.int8, device="meta"),
    )
    x = torch.empty(call.tokens, call.in_features, dtype=call.dtype, device="meta")
    out = torch.empty(call.tokens, call.out_features, dtype=call.dtype, device="meta")
    bias = torch.empty(call.out_features, dtype=call.dtype, device="meta")
    PATH.run(call, x, factors, bias, "gelu", out, config)


def rows_of(target: int, label: str, call: Call, config: dict[str, int]) -> list[dict[str, Any]]:
    """What is worth knowing of each kernel that a call launches."""
    DRIVER.target = target
    COMPILED.clear()
    launch(call, config)
    rows = []
    for name, compiled in COMPILED.values():
        ptx = compiled.asm["ptx"]
        found = re.findall(r"mma\.sync\S*|wgmma\.mma_async\S*|tcgen05\.mma\S*", ptx)
        rows.append(
            {
                "target": target,
                "what": f"{label} {call.tokens} tokens",
                "kernel": name.rpartition(".")[2],
                "tokens": call.tokens,
                "shared": compiled.metadata.shared,
                "limit": call.device.shared_bytes,
                "instructions": sorted(set(found)),
                "waits": "griddepcontrol.wait" in ptx,
                "stack": stack_bytes(compiled.asm["cubin"]),
            }
        )
    return rows


def main(targets: list[int]) -> None:
    compile_instead_of_launching()
    rows = []
    for target in targets:
        for label, b, n_in, n_out, rank, counts in LAYERS:
            for tokens in counts:
                sizes = (tokens, n_in, n_out, b, rank, torch.bfloat16)
                call = Call("blast_int8", *sizes, limits(target))
                rows += rows_of(target, label, call, dict(PATH.default_config(call)))
                if target >= 90 and tokens == 512:
                    early = {**PATH.default_config(call), "early": 1}
                    rows += rows_of(target, f"{label} early", call, early)
    print(json.dumps(rows))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
