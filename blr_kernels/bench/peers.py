"""Calls the paper's own kernels, whose code is not part of this repository.

They are read from a folder that holds ``triton_funcs/blast_kernels.py`` and
``triton_funcs/monarch_kernels.py`` of github.com/pabillam/mem-efficient-blr. Their functions take
x as ``(1, tokens, in)``, add no bias and choose a launch config by timing, once for each size.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import Tensor

from blr_kernels.ops.triton_config import power_of_two

Prepare = Callable[..., tuple[Tensor, ...]]

_WARM_MS, _TIMED_MS = 2, 10  # for each config of theirs; by default it would be 25 and 100


def _blast_bmm(left: Tensor, coupling: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    """-> U ``(b, q, r)``, V ``(b, p, r)``, S ``(r, i, j)``."""
    return left, right.transpose(1, 2).contiguous(), coupling.permute(2, 0, 1).contiguous()


def _monarch_right(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    """-> w1 ``(b, p, l*m + j)``, w2 ``(b, q, r)``."""
    blocks, rank, columns = right.shape
    by_output = right.view(blocks, rank // blocks, blocks, columns).transpose(1, 2)
    return by_output.reshape(blocks, rank, columns).transpose(1, 2).contiguous(), left


def _monarch_right_left(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    """-> w1 ``(b, p, l*m + j)``, w2 ``(b, r, q)``."""
    return _monarch_right(left, right)[0], left.transpose(1, 2).contiguous()


# On an H200 their three products beat their partly fused BLAST at every size tried, by up to 2.7.
FUNCTIONS: dict[str, dict[str, tuple[str, Prepare]]] = {
    "blast": {"triton_blast_bmm_fp16": ("blast_kernels", _blast_bmm)},
    "monarch": {
        "triton_monarch_right_fp16": ("monarch_kernels", _monarch_right),
        "triton_monarch_right_left_fp16": ("monarch_kernels", _monarch_right_left),
    },
}


def _shorten_tuning(module: ModuleType) -> None:
    """Times each of their configs once, and for a shorter while than by default."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    for name, kernel in vars(module).items():
        if not isinstance(kernel, Autotuner):
            continue
        kernel.do_bench = functools.partial(do_bench, warmup=_WARM_MS, rep=_TIMED_MS)
        # A kernel without a loop has nothing to pipeline: its stages change nothing.
        looped = "sxv" not in name or "usxv" in name
        kept: dict[tuple[object, ...], object] = {}
        for config in kernel.configs:
            key = (*sorted(config.kwargs.items()), config.num_warps, looped and config.num_stages)
            kept.setdefault(key, config)
        kernel.configs = list(kept.values())


@functools.cache
def _load(folder: Path, name: str) -> ModuleType:
    # Their module takes one function from a "utils" that imports packages no kernel needs.
    stand_in = ModuleType("utils")
    stand_in.next_power_of_2 = power_of_two  # type: ignore[attr-defined]
    before = sys.modules.get("utils")
    sys.modules["utils"] = stand_in
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(f"triton_funcs.{name}")
    finally:
        sys.path.remove(str(folder))
        if before is None:
            del sys.modules["utils"]
        else:
            sys.modules["utils"] = before
    _shorten_tuning(module)
    return module


def functions(folder: Path, op: str) -> dict[str, tuple[Callable[..., Tensor], Prepare]]:
    """Their functions for an op by name: ``f(x (1, tokens, in), *prepare(*factors))``.

    Raises:
        FileNotFoundError: if the folder does not hold their kernels.
    """
    found = {}
    for name, (module, prepare) in FUNCTIONS.get(op, {}).items():
        path = folder / "triton_funcs" / f"{module}.py"
        if not path.is_file():
            raise FileNotFoundError(f"the paper's kernels must be at {path}")
        found[name] = (getattr(_load(folder.resolve(), module), name), prepare)
    return found
