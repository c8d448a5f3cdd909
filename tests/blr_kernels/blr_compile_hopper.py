"""Compiles, without a GPU, what the Hopper path would launch on the layers below; prints one JSON
list. A program of its own, as ``blr_compile_targets.py`` is.

    python blr_compile_hopper.py default candidates unaligned
"""

from __future__ import annotations

import functools
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
from blr_compile_targets import COMPILED, DRIVER, compile_instead_of_launching, limits
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from blr_kernels import Blast
from blr_kernels.ops import hopper_blast_config, hopper_first, hopper_monarch
from blr_kernels.ops.hopper_mix_many import mix_many_bytes
from blr_kernels.ops.paths import Call, Config, Path, find_path

LAYERS: list[tuple[str, Blast, int, int]] = [
    ("DiT qkv", Blast(9, 384), 1152, 3456),
    ("DiT fc1", Blast(9, 256), 1152, 4608),
    ("ViT qkv", Blast(3, 128), 768, 2304),
    ("ViT fc1", Blast(3, 128), 768, 3072),
    ("ViT fc2", Blast(3, 128), 3072, 768),
    ("Llama-1B attention", Blast(16, 256), 2048, 2048),
    ("two blocks", Blast(2, 64), 128, 256),
    ("odd rank", Blast(9, 40), 648, 1152),
    ("one block", Blast(1, 40), 1024, 192),
    ("many blocks", Blast(20, 40), 1280, 1280),
]

MONARCH = {"ViT qkv": (768, 2304), "ViT fc1": (768, 3072), "ViT fc2": (3072, 768)}

LOW_RANK = [(768, 2304, 128), (3072, 768, 128), (1152, 3456, 384), (264, 192, 40)]

COUNTED = {
    "hopper_mix_kernel": hopper_blast_config.mix_bytes,
    "hopper_product_kernel": hopper_blast_config.product_bytes,
    "hopper_first_kernel": lambda call, config: hopper_first.first_bytes(
        call, config["first_tokens"], config["first_stages"]
    ),
    "mix_apart_kernel": lambda call, config: 0,
    "mix_many_kernel": lambda call, config: mix_many_bytes(
        call.blocks, config["apart_rows"], call.itemsize
    ),
    "hopper_monarch_second_kernel": lambda call, config: hopper_monarch._second_bytes(config),
}
"""What the host says that a kernel takes of shared memory."""


class Scratch(TorchDispatchMode):
    """Notes in ``peak`` the most bytes that were held at once in tensors made inside."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in inputs}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in self.known:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            live = (bytes_ for reference, bytes_ in self.made.values() if not reference.expired())
            self.peak = max(self.peak, sum(live))
        return result


def call_of(layer: tuple[str, Blast, int, int], tokens: int, dtype: torch.dtype) -> Call:
    _, structure, n_in, n_out = layer
    device = limits(90, "NVIDIA H200")
    return Call("blast", tokens, n_in, n_out, structure.blocks, structure.rank, dtype, device)


def monarch_call(layer: str, tokens: int) -> Call:
    device = limits(90, "NVIDIA H200")
    return Call("monarch", tokens, *MONARCH[layer], 4, 128, torch.bfloat16, device)


def low_rank_call(sizes: tuple[int, int, int], tokens: int) -> Call:
    n_in, n_out, rank = sizes
    device = limits(90, "NVIDIA H200")
    return Call("low_rank", tokens, n_in, n_out, 1, rank, torch.bfloat16, device)


def compile_call(
    path: Path, call: Call, config: Config, activation: Any = None, *, unaligned: str = ""
) -> tuple[list[tuple[str, Any]], int]:
    """Name and compiled kernel of each launch of a call with bias, and its scratch in bytes.

    Args:
        path: of the call's op.
        unaligned: the operand whose address is no multiple of 16, "" for none.
    """
    COMPILED.clear()

    def empty(name: str, *shape: int) -> Tensor:
        if not unaligned:
            return torch.empty(shape, dtype=call.dtype, device="meta")
        # Only tensors with memory have an address.
        size = torch.Size(shape).numel()
        flat = torch.empty(size + 8, dtype=call.dtype)
        start = -flat.data_ptr() // flat.element_size() % 8 + (name == unaligned)
        return flat[start : start + size].view(shape)

    b, r = call.blocks, call.rank
    x = empty("x", call.tokens, call.in_features)
    shapes: dict[str, tuple[int, ...]]
    shapes = {"left": (b, call.q, r), "coupling": (b, b, r), "right": (b, r, call.p)}
    if call.op != "blast":
        del shapes["coupling"]
    if call.op == "low_rank":
        shapes = {"left": (call.q, r), "right": (r, call.p)}
    factors = tuple(empty(name, *shape) for name, shape in shapes.items())
    bias = empty("bias", call.out_features)
    out = empty("out", call.tokens, call.out_features)
    with Scratch(x, *factors, bias, out) as scratch:
        path.run(call, x, factors, bias, activation, out, config)
    return list(COMPILED.values()), scratch.peak


@functools.cache
def assembled(ptx: str) -> str | None:
    """What the assembler tells of a kernel, None where it is missing."""
    tool = FilePath(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not tool.exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = FilePath(folder) / "kernel.ptx"
        source.write_text(ptx)
        run = subprocess.run(
            [str(tool), "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/kernel.cubin"],
            capture_output=True,
            text=True,
            check=True,
        )
    return run.stdout + run.stderr


def path_of(kind: str) -> Path:
    """The path whose launches are compiled."""
    if kind.startswith("apart "):
        return find_path("blast", "apart")
    if kind.startswith("low rank "):
        return find_path("low_rank", "hopper")
    return find_path("monarch" if kind.startswith("monarch ") else "blast", "hopper")


def jobs_of(kind: str) -> Iterator[tuple[Call, Config, str | None, str]]:
    """Call, config, activation and unaligned operand of what is compiled."""
    path = path_of(kind)
    kind = kind.removeprefix("apart ")
    half, short = torch.bfloat16, torch.float16
    if kind == "default":
        for layer in LAYERS:
            for tokens in (64, 1000, 16_384):
                call = call_of(layer, tokens, half)
                yield call, path.default_config(call), None, ""
        for layer in LAYERS[:2]:
            call = call_of(layer, 512, half)
            yield call, path.default_config(call), None, ""
        for layer in LAYERS[1:3]:
            call = call_of(layer, 16_384, short)
            yield call, path.default_config(call), None, ""
        # The most tokens of which the scratch holds the intermediate, and no multiple of a tile.
        per_token = 9 * 384 * 2 * (2 if path.name == "apart" else 1)
        call = call_of(LAYERS[0], 2**26 // per_token, half)
        yield call, path.default_config(call), None, ""
    elif kind == "activations":
        for layer in LAYERS:
            for activation in ("gelu", "gelu_tanh", "silu"):
                call = call_of(layer, 16_384, half)
                yield call, path.default_config(call), activation, ""
    elif kind == "candidates":
        for layer in LAYERS:
            for tokens in (1000, 16_384):
                call = call_of(layer, tokens, half)
                for config in path.candidates(call):
                    yield call, config, None, ""
    elif kind == "unaligned":
        for operand in ("x", "left", "coupling", "right", "bias"):
            call = call_of(LAYERS[2], 1000, half)
            yield call, path.default_config(call), None, operand
        call = call_of(LAYERS[4], 16_384, half)
        yield call, path.default_config(call), None, "x"
    elif kind in ("low rank default", "low rank candidates"):
        for sizes in LOW_RANK:
            # At the last the scratch holds exactly the intermediate, then one token less.
            for tokens in (197, 6304, 2**26 // (2 * sizes[2]), 2**26 // (2 * sizes[2]) + 1):
                call = low_rank_call(sizes, tokens)
                found = (
                    path.candidates(call) if "candidates" in kind else [path.default_config(call)]
                )
                for config in found:
                    yield call, config, "gelu" if "candidates" in kind else None, ""
    elif kind == "low rank unaligned":
        for operand in ("x", "left", "right", "bias"):
            call = low_rank_call(LOW_RANK[0], 1000)
            yield call, path.default_config(call), None, operand
    elif kind in ("monarch default", "monarch candidates"):
        only_default = kind == "monarch default"
        for layer in MONARCH:
            for tokens in (197, 1000, 6304):
                call = monarch_call(layer, tokens)
                found = [path.default_config(call)] if only_default else path.candidates(call)
                for config in found:
                    yield call, config, None if only_default else "gelu", ""
    elif kind == "monarch unaligned":
        for operand in ("x", "left", "right", "bias"):
            # x at the last takes more than the scratch.
            for tokens in (197, 2**26 // (3072 * 2) + 1) if operand == "x" else (197,):
                call = monarch_call("ViT fc2", tokens)
                yield call, path.default_config(call), None, operand
    elif kind == "monarch activations":
        for activation in ("gelu_tanh", "silu"):
            for layer in MONARCH:
                call = monarch_call(layer, 6304)
                yield call, path.default_config(call), activation, ""
    elif kind == "monarch chunks":
        # The most tokens of which the scratch holds the intermediate, and one more than it holds.
        for tokens in (2**26 // (512 * 2) - 128, 2**26 // (512 * 2) + 1):
            call = monarch_call("ViT fc2", tokens)
            yield call, path.default_config(call), None, ""
    else:
        raise ValueError(f"what to compile must be one of those above, got {kind!r}")


def rows_of(kind: str) -> Iterator[dict[str, Any]]:
    """What is worth knowing of each kernel that a call launches."""
    for call, config, activation, unaligned in jobs_of(kind):
        layer = f"{call.in_features} -> {call.out_features} b{call.blocks} r{call.rank}"
        what = f"{layer} {call.tokens} tokens {call.dtype} {activation} {dict(config)}"
        row = {"kind": kind, "layer": layer, "tokens": call.tokens, "unaligned": unaligned}
        try:
            kernels, scratch = compile_call(
                path_of(kind), call, config, activation, unaligned=unaligned
            )
        except Exception as error:
            yield {**row, "what": what, "failed": f"{type(error).__name__}: {error}"}
            continue
        for name, compiled in kernels:
            ptx = compiled.asm["ptx"]
            most, threads = (re.search(rf"\.{word} (\d+)", ptx) for word in ("maxnreg", "reqntid"))
            yield {
                **row,
                "what": f"{name} {what}",
                "kernel": name,
                "failed": "",
                "scratch": scratch,
                "shared": compiled.metadata.shared,
                "counted": COUNTED[name](call, config),
                "limit": call.device.shared_bytes,
                # Parameters whose descriptors are prefetched, and all that are descriptors.
                "fetched": re.findall(r"mov\.b64 %a, (\w+);", ptx),
                "descriptors": re.findall(r"\.param \.align \d+ \.b8 (\w+)\[128\]", ptx),
                "registers": int(most[1]) * int(threads[1]) if most and threads else None,
                "mma": ptx.count("wgmma.mma_async") + ptx.count("mma.sync"),
                "narrow": len(re.findall(r"st\.global(?!\S*\.v4)", ptx)),
                "assembler": assembled(ptx),
            }


if __name__ == "__main__":
    compile_instead_of_launching()
    DRIVER.target = 90
    print(json.dumps([row for kind in sys.argv[1:] for row in rows_of(kind)]))
