"""What one call of a layer is, and the ways there are to compute it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from blr_kernels.ops.backend import why_not_triton
from blr_kernels.reference import Activation

Config = Mapping[str, int]
"""Sizes of a launch, by name; plain ints, so that a tuned one is a line of JSON."""

DEFAULT_SHARED_BYTES = 48 * 1024
"""Shared memory that every CUDA device grants a block; also the limit of an interpreted kernel."""


@dataclass(frozen=True)
class DeviceLimits:
    """What a launch may use on a device.

    Attributes:
        name: as the driver tells it, "cpu" for the interpreter.
        capability: compute capability, (0, 0) for the interpreter.
        shared_bytes: most shared memory a block may ask for.
        sms: streaming multiprocessors.
        l2_bytes: size of the cache that all of them share.
    """

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    sms: int
    l2_bytes: int = 32 * 2**20


@functools.cache
def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of ``device``; those of the interpreter for one that is no CUDA device."""
    if device.type != "cuda":
        return DeviceLimits("cpu", (0, 0), DEFAULT_SHARED_BYTES, 1)
    found = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        found.name,
        (found.major, found.minor),
        int(found.shared_memory_per_block_optin),
        found.multi_processor_count,
        int(found.L2_cache_size),
    )


@dataclass(frozen=True)
class Call:
    """One call of one layer: all that a choice of path or launch config may depend on.

    Attributes:
        op: "blast", "blast_int8", "monarch" or "low_rank".
        tokens: rows of x.
        in_features, out_features: of the layer, multiples of ``blocks``.
        blocks: b; 1 for low rank.
        rank: r.
        dtype: of x and output, and of the factors unless those are integers.
        device: limits of the device it runs on.
    """

    op: str
    tokens: int
    in_features: int
    out_features: int
    blocks: int
    rank: int
    dtype: torch.dtype
    device: DeviceLimits

    @property
    def p(self) -> int:
        """Columns of an input block."""
        return self.in_features // self.blocks

    @property
    def q(self) -> int:
        """Rows of an output block."""
        return self.out_features // self.blocks

    @property
    def inner(self) -> int:
        """Monarch's m: the rank that one input block gives to one output block."""
        return self.rank // self.blocks

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


Run = Callable[
    [Call, Tensor, tuple[Tensor, ...], Tensor | None, Activation | None, Tensor, Config], None
]


def _always(call: Call) -> bool:
    return True


@dataclass(frozen=True)
class Path:
    """One way to compute an op.

    Attributes:
        name: as in tuned configs and benchmarks.
        op: the op it computes.
        why_not: the reason why it cannot take a call, "" if it can.
        default_config: launch sizes that are safe wherever ``why_not`` is ""; the same keys for
            every number of tokens, so that a tuned config with others is known to be stale.
        candidates: launch sizes worth timing, the default among them.
        run: computes ``x (tokens, in)``, factors in the op's order, ``bias (out)`` or None,
            activation -> ``out (tokens, out)``, contiguous, written whole. x has a contiguous last
            dimension, the factors are contiguous, tokens is at least 1.
        suits: whether it is likely to be faster than the paths behind it, as far as one can tell
            without timing it here.
        library: whether it calls PyTorch's library for the products instead of kernels of ours.
        separable: whether sizes whose names differ before the first "_" are those of different
            launches, so that a tuner may combine the best of each.
    """

    name: str
    op: str
    why_not: Callable[[Call], str]
    default_config: Callable[[Call], Config]
    candidates: Callable[[Call], Sequence[Config]]
    run: Run
    suits: Callable[[Call], bool] = _always
    library: bool = False
    separable: bool = False


_PATHS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "blast": (
        ("few", "few_paths.FEW_BLAST"),
        ("bmm", "bmm_paths.BLAST"),
        ("apart", "hopper_apart.PATH"),
        ("hopper", "hopper_blast.PATH"),
        ("small", "few_paths.SMALL_BLAST"),
        ("triton", "triton_blast.PATH"),
    ),
    "blast_int8": (("triton", "triton_blast_int8.PATH"),),
    "monarch": (
        ("bmm", "bmm_paths.MONARCH"),
        ("hopper", "hopper_monarch.PATH"),
        ("fused", "triton_monarch_fused.PATH"),
        ("two", "triton_monarch_two.PATH"),
        ("triton", "triton_monarch.PATH"),
        ("few", "few_paths.FEW_MONARCH"),
        ("small", "few_paths.SMALL_MONARCH"),
    ),
    "low_rank": (
        ("few", "few_paths.FEW_LOW_RANK"),
        ("cublas", "cublas_low_rank.PATH"),
        ("hopper", "hopper_low_rank.PATH"),
        ("triton", "triton_low_rank.PATH"),
    ),
}
"""For each op the paths' names and where they are, in order of preference where nothing is tuned.

To add one, write a module here with a ``Path`` in it and name it in this table.
"""


def with_parts(default: dict[str, int], parts: Iterable[dict[str, int]]) -> list[dict[str, int]]:
    """The default, then it with each of ``parts`` in place of its own; each config once."""
    found = [default, *({**default, **part} for part in parts)]
    return [config for n, config in enumerate(found) if config not in found[:n]]


def _load(op: str, name: str, place: str) -> Path:
    module, _, attribute = place.rpartition(".")
    try:
        found = getattr(import_module(f"blr_kernels.ops.{module}"), attribute)
    except (ImportError, AttributeError) as error:
        # An older triton lacks parts that one path needs and the others do not.
        reason = f"it cannot be imported ({error})"

        def run(*_: object) -> None:
            raise RuntimeError(f"path {name!r} of {op}: {reason}")

        return Path(name, op, lambda call: reason, lambda call: {}, lambda call: (), run)
    if not isinstance(found, Path) or (found.name, found.op) != (name, op):
        raise TypeError(f"{place} must be the Path {name!r} of {op}, got {found!r}")
    return found


@functools.cache
def paths(op: str) -> tuple[Path, ...]:
    """The paths of an op, the preferred one first. Their modules are imported here, not before.

    Raises:
        ValueError: for an unknown op.
    """
    if op not in _PATHS:
        raise ValueError(f"op must be one of {', '.join(_PATHS)}, got {op!r}")
    return tuple(_load(op, name, place) for name, place in _PATHS[op])


def find_path(op: str, name: str) -> Path:
    """The path of that name.

    Raises:
        ValueError: for an unknown op or path.
    """
    for path in paths(op):
        if path.name == name:
            return path
    known = ", ".join(path.name for path in paths(op))
    raise ValueError(f"path of {op} must be one of {known}, got {name!r}")


def rows_of(x: Tensor) -> Tensor:
    """``x (..., n)`` -> ``(tokens, n)``, last dimension contiguous; copies only if it must."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@functools.lru_cache(maxsize=4096)
def _call(
    op: str,
    tokens: int,
    in_features: int,
    out_features: int,
    blocks: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Call:
    return Call(op, tokens, in_features, out_features, blocks, rank, dtype, limits_of(device))


def call_of(op: str, x: Tensor, left: Tensor) -> Call:
    """What ``x (tokens, in)`` and the factor ``left (b, q, r)`` or ``(out, r)`` tell of a call."""
    blocks, rows = left.shape[:2] if left.dim() == 3 else (1, left.shape[0])
    tokens, in_features = x.shape
    rank = left.shape[-1]
    return _call(op, tokens, in_features, blocks * rows, blocks, rank, x.dtype, x.device)


def output_like(x: Tensor, left: Tensor) -> Tensor:
    """``x (..., in)`` -> an empty output ``(..., out)``, contiguous."""
    return x.new_empty((*x.shape[:-1], math.prod(left.shape[:-1])))


def execute(
    path: Path,
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """Runs ``path`` on ``x (tokens, in)`` -> ``out (tokens, out)``; factors of any strides."""
    if bias is not None:
        bias = bias.contiguous()
    with torch.cuda.device_of(x):
        path.run(call, x, tuple(f.contiguous() for f in factors), bias, activation, out, config)


@torch.no_grad()
def run_path(
    name: str,
    op: str,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    config: Config | None = None,
) -> Tensor:
    """Computes an op by the path of that name and no other; for benchmarks, tuning and tests.

    Args:
        name: of the path.
        op: "blast", "monarch" or "low_rank".
        x: ``(..., in)``, any strides.
        factors: in the op's order, as its public function takes them; not validated here.
        bias: ``(out)`` or None.
        activation: after the bias.
        config: launch sizes; the path's default for this call if None.

    Returns:
        ``(..., out)``, contiguous, without a gradient.

    Raises:
        ValueError: for an unknown op or path, or one that cannot take the call; the text says why.
    """
    path = find_path(op, name)
    out = output_like(x, factors[0])
    if out.numel() == 0:
        return out
    rows = rows_of(x)
    call = call_of(op, rows, factors[0])
    reason = ("" if path.library else why_not_triton(x.device, x.dtype)) or path.why_not(call)
    if reason:
        raise ValueError(f"path {name!r} cannot take this call of {op}: {reason}")
    sizes = path.default_config(call) if config is None else config
    execute(path, call, rows, tuple(factors), bias, activation, out.view(call.tokens, -1), sizes)
    return out
