"""Compiles int8 BLAST's kernels without a GPU, as ``blr_compile_targets`` does; prints JSON.

python blr_compile_int8.py 80 86 ...
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from blr_compile_targets import POINTERS, SHARED_KIB, Recorder, compile_launch, stack_bytes

from blr_kernels.ops import triton_blast_int8
from blr_kernels.ops.paths import Call, DeviceLimits

LAYERS: list[tuple[str, int, int, int, int, tuple[int, ...]]] = [
    ("DiT qkv", 9, 1152, 3456, 384, (16, 512, 4096)),
    ("ViT fc2", 3, 3072, 768, 128, (197, 6304)),
    ("Llama-1B", 16, 2048, 8192, 768, (4096,)),
]
KERNELS = ("int8_rows_kernel", "int8_mix_kernel", "int8_product_kernel")


def record(call: Call) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of one call with bias and GELU at the default config."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    kernels = {name: getattr(triton_blast_int8, name) for name in KERNELS}
    for name, kernel in kernels.items():
        setattr(triton_blast_int8, name, Recorder(kernel, launches))
    try:
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
        config = triton_blast_int8.default_config(call)
        triton_blast_int8.run(call, x, factors, bias, "gelu", out, config)
    finally:
        for name, kernel in kernels.items():
            setattr(triton_blast_int8, name, kernel)
    return launches[: len(KERNELS)]


def main(targets: list[int]) -> None:
    POINTERS[torch.int8] = "*i8"
    rows = []
    for target in targets:
        limits = DeviceLimits("", divmod(target, 10), SHARED_KIB[target] * 1024, 108)
        for label, b, n_in, n_out, rank, counts in LAYERS:
            for tokens in counts:
                call = Call("blast_int8", tokens, n_in, n_out, b, rank, torch.bfloat16, limits)
                for kernel, arguments, constants in record(call):
                    compiled = compile_launch(kernel, arguments, constants, target)
                    found = re.findall(
                        r"mma\.sync\S*|wgmma\.mma_async\S*|tcgen05\.mma\S*", compiled.asm["ptx"]
                    )
                    rows.append(
                        {
                            "target": target,
                            "what": f"{label} {tokens} tokens",
                            "kernel": kernel.__name__,
                            "tokens": tokens,
                            "shared": compiled.metadata.shared,
                            "limit": limits.shared_bytes,
                            "instructions": sorted(set(found)),
                            "stack": stack_bytes(compiled.asm["cubin"]),
                        }
                    )
    print(json.dumps(rows))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
