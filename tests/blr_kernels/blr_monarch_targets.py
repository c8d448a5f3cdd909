"""Compiles Monarch's paths without a GPU, as blr_compile_targets does for the portable kernels.

Default configs for every target named, all candidates for sm_90; prints one JSON list.

    python blr_monarch_targets.py 80 86 ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from blr_compile_targets import POINTERS, SHARED_KIB, Recorder, stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from blr_kernels.ops import triton_monarch_config as config_of
from blr_kernels.ops import triton_monarch_fused, triton_monarch_two
from blr_kernels.ops.paths import Call, Config, DeviceLimits, Path

BLOCKS, RANK = 4, 128
LAYERS = {"ViT fc1": (768, 3072), "ViT fc2": (3072, 768)}
TOKENS = (197, 6304)
OPTIONS = ("num_warps", "launch_pdl")

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def record(path: Path, call: Call, config: Config) -> list[Launch]:
    """The launches of one call with bias and GELU, on tensors of the meta device."""
    launches: list[Launch] = []
    modules = (
        (triton_monarch_fused, "fused_kernel"),
        (triton_monarch_two, "first_kernel"),
        (triton_monarch_two, "second_kernel"),
    )
    kernels = [getattr(module, name) for module, name in modules]
    for (module, name), kernel in zip(modules, kernels, strict=True):
        setattr(module, name, Recorder(kernel, launches))
    try:
        shapes = {
            "x": (call.tokens, call.in_features),
            "left": (call.blocks, call.q, call.rank),
            "right": (call.blocks, call.rank, call.p),
            "bias": (call.out_features,),
            "out": (call.tokens, call.out_features),
        }
        t = {k: torch.empty(v, dtype=call.dtype, device="meta") for k, v in shapes.items()}
        path.run(call, t["x"], (t["left"], t["right"]), t["bias"], "gelu", t["out"], config)
    finally:
        for (module, name), kernel in zip(modules, kernels, strict=True):
            setattr(module, name, kernel)
    return launches


def compile_launch(launch: Launch, target: int) -> Any:
    """Specialises the arguments as a launch would, then compiles for ``sm_<target>``."""
    kernel, arguments, constants = launch
    options = {key: value for key, value in constants.items() if key in OPTIONS}
    constexprs = {key: value for key, value in constants.items() if key not in OPTIONS}
    signature = dict.fromkeys(constexprs, "constexpr")
    aligned = {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, TensorDescriptor):
            element = POINTERS[value.base.dtype].removeprefix("*")
            signature[name] = f"tensordesc<{element}{value.block_shape}>"
            continue
        signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        if isinstance(value, torch.Tensor) or (value % 16 == 0 and name != "tokens"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def jobs(target: int) -> Iterator[tuple[Path, Call, Config, str]]:
    """Path, call, config and a label for each thing to compile."""
    limits = DeviceLimits("", (target // 10, target % 10), SHARED_KIB[target] * 1024, 132)
    for path in (triton_monarch_fused.PATH, triton_monarch_two.PATH):
        for layer, (n_in, n_out) in LAYERS.items():
            for tokens in TOKENS:
                call = Call("monarch", tokens, n_in, n_out, BLOCKS, RANK, torch.bfloat16, limits)
                wanted = [path.default_config(call)]
                if target == 90 and layer == "ViT fc1":
                    wanted = list(path.candidates(call))
                for config in wanted:
                    yield path, call, config, f"{path.name} {layer} {tokens} {dict(config)}"


def main(targets: list[int]) -> None:
    rows = []
    for target in targets:
        for path, call, config, label in jobs(target):
            if path.name == "fused":
                estimates = (config_of.fused_shared_bytes(call, config),)
            else:
                estimates = config_of.two_shared_bytes(call, config)
            for launch, estimate in zip(record(path, call, config), estimates, strict=True):
                compiled = compile_launch(launch, target)
                ptx = compiled.asm["ptx"]
                rows.append(
                    {
                        "target": target,
                        "what": f"sm_{target} {launch[0].__name__} {label}",
                        "tokens": launch[2]["BLOCK_T"],
                        "shared": compiled.metadata.shared,
                        "estimate": estimate,
                        "limit": call.device.shared_bytes,
                        "stack": stack_bytes(compiled.asm["cubin"]),
                        "tensor_cores": [
                            name
                            for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
                            if name in ptx
                        ],
                        "copy_engine": "cp.async.bulk.tensor" in ptx,
                        "waits": "griddepcontrol.wait" in ptx,
                    }
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
