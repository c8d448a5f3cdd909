"""Stand-ins for what choosing and tuning depend on: a GPU, paths, and folders of configs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from blr_kernels.ops.paths import Call, Config, DeviceLimits, Path
from blr_kernels.tuning import lookup

GPU = DeviceLimits("NVIDIA H200", (9, 0), 227 * 1024, 132, 60 * 2**20)


def make_call(tokens: int = 512, op: str = "low_rank", device: DeviceLimits = GPU) -> Call:
    """A small layer of 24 -> 36 on ``device``."""
    return Call(op, tokens, 24, 36, 1 if op == "low_rank" else 3, 6, torch.float16, device)


def fake_path(
    name: str,
    *,
    op: str = "low_rank",
    most_tokens: int = 10**9,
    suited_tokens: int = 10**9,
    configs: Sequence[int] = (1,),
    factor: Mapping[int, float] | None = None,
    library: bool = False,
) -> Path:
    """A path in plain PyTorch whose config is one number, ``size``.

    Args:
        name, op, library: of the path.
        most_tokens: beyond them it cannot take a call.
        suited_tokens: beyond them it is not likely to be the fastest.
        configs: its candidates, the default first.
        factor: by size what the output is multiplied with; 1 is right, and 0 raises.
    """

    def run(
        call: Call,
        x: Tensor,
        factors: tuple[Tensor, ...],
        bias: Tensor | None,
        activation: object,
        out: Tensor,
        config: Config,
    ) -> None:
        times = (factor or {}).get(config["size"], 1.0)
        if not times:
            raise RuntimeError("out of resources\nand more of it")
        left, right = factors
        y = x.float() @ right.float().t() @ left.float().t()
        out.copy_((y if bias is None else y + bias) * times)

    return Path(
        name,
        op,
        lambda call: "" if call.tokens <= most_tokens else f"more than {most_tokens} tokens",
        lambda call: {"size": configs[0]},
        lambda call: [{"size": size} for size in configs],
        run,
        suits=lambda call: call.tokens <= suited_tokens,
        library=library,
    )


def write_configs(
    folder: FilePath, call: Call, entries: Mapping[int, Mapping[str, float]], **changed: Any
) -> FilePath:
    """Writes a file of configs by hand.

    Args:
        folder: of configs.
        call: the layer it is for.
        entries: for each number of tokens the microseconds of each path, the first the fastest;
            the config of a path is its microseconds rounded, as ``size``.
        changed: fields of the header that differ.
    """
    data: dict[str, Any] = {**lookup.header(call), **changed, "entries": {}}
    for tokens, times in entries.items():
        results = {
            name: {"config": {"size": round(us)}, "us": us, "rms": 1e-3}
            for name, us in times.items()
        }
        best = next(iter(times))
        data["entries"][str(tokens)] = {**results[best], "path": best, "paths": results}
    file = folder / lookup.file_name(call)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data))
    return file
