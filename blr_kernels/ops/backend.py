"""Which implementation runs, and why another cannot. Nothing here falls back in silence."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from blr_kernels.structures import LowRank, Structure

if TYPE_CHECKING:
    from blr_kernels.ops.paths import Call

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_AUTO_CAPABILITY = (8, 0)


class Backend(enum.Enum):
    """What computes a block low-rank layer.

    ``AUTO`` takes the Triton kernels on a CUDA device that has tensor cores Triton can use, and
    PyTorch elsewhere. ``TRITON`` and ``TORCH`` take that one or raise.
    """

    AUTO = "auto"
    TRITON = "triton"
    TORCH = "torch"


@dataclass(frozen=True)
class Explanation:
    """Which implementation runs, why that one, and why not each other one.

    Attributes:
        implementation: what runs: kernels of this package, or PyTorch's products.
        reason: why.
        others: for each other implementation the reason why not.
        path: name of the path that runs, "" where the tokens were not told or the layer runs as
            plain PyTorch ops.
        config: its launch sizes.
        source: where they are from: tuned at so many tokens, or computed.
        other_paths: for each other path the reason why not.
    """

    implementation: Backend
    reason: str
    others: Mapping[Backend, str]
    path: str = ""
    config: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    other_paths: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.reason} ({self.implementation.value})"]
        if self.path:
            sizes = ", ".join(f"{name}={value}" for name, value in self.config.items())
            lines += [f"path {self.path}: {sizes}", f"config: {self.source}"]
        lines += [f"not {name}: {why}" for name, why in self.other_paths.items()]
        lines += [f"not {backend.value}: {why}" for backend, why in self.others.items()]
        return "\n".join(lines)


def _load_triton() -> tuple[bool, str]:
    """Whether the kernels are interpreted, and why Triton cannot be imported ("" if it can)."""
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        return False, f"triton cannot be imported ({error})"
    # The variable counts at the time when triton is imported: its own functions were wrapped then.
    interpreted = not isinstance(tl.cdiv, triton.JITFunction)
    return interpreted, ""


_INTERPRETED, _IMPORT_ERROR = _load_triton()


def triton_available() -> tuple[bool, str]:
    """Whether the Triton kernels can run on some device here, and the reason in words."""
    if _IMPORT_ERROR:
        return False, _IMPORT_ERROR
    if _INTERPRETED:
        return True, "interpreted on the CPU (TRITON_INTERPRET=1)"
    if not torch.cuda.is_available():
        return False, "needs an NVIDIA GPU"
    return True, "CUDA device found"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# A compiler takes both answers below as constants: they follow from what its guards check anyway.
@torch.compiler.assume_constant_result
def why_not_triton(device: torch.device, dtype: torch.dtype) -> str:
    """The reason why the Triton kernels cannot take this device and dtype, or ""."""
    if _IMPORT_ERROR:
        return _IMPORT_ERROR
    if torch.version.hip:
        return "the Triton kernels need an NVIDIA GPU, this torch is built for ROCm"
    if dtype not in TRITON_DTYPES:
        expected = ", ".join(str(d).removeprefix("torch.") for d in TRITON_DTYPES)
        return f"the Triton kernels take {expected}, got {str(dtype).removeprefix('torch.')}"
    if device.type == "cpu" and not _INTERPRETED:
        return "on a CPU the Triton kernels run only with TRITON_INTERPRET=1 set before import"
    # On a meta device the op gives shapes alone.
    if device.type not in ("cpu", "cuda", "meta"):
        return f"the Triton kernels run on CUDA devices, got {device.type}"
    if device.type == "cuda" and dtype is torch.bfloat16:
        capability = _capability(device)
        if capability < (8, 0):
            return f"bfloat16 needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    return ""


@torch.compiler.assume_constant_result
def why_not_auto(device: torch.device, dtype: torch.dtype) -> str:
    """The reason why ``AUTO`` does not take Triton although it may be able to run, or ""."""
    if device.type in ("cpu", "meta"):
        return f"without a GPU PyTorch's products are faster, the device is {device.type}"
    if device.type == "cuda":
        capability = _capability(device)
        if capability < MIN_AUTO_CAPABILITY:
            return (
                "Triton's dot uses no tensor cores below compute capability 8.0, "
                f"got {capability[0]}.{capability[1]}"
            )
    return ""


def runs_on_triton(backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    """Resolves ``backend`` for one call.

    Raises:
        RuntimeError: if ``Backend.TRITON`` is asked for and cannot run; the text says why.
        TypeError: if ``backend`` is no ``Backend``.
    """
    if backend is Backend.TORCH:
        return False
    if backend is Backend.TRITON:
        reason = why_not_triton(device, dtype)
        if reason:
            raise RuntimeError(f"Backend.TRITON cannot run: {reason}")
        return True
    if backend is Backend.AUTO:
        return not (why_not_triton(device, dtype) or why_not_auto(device, dtype))
    raise TypeError(f"backend must be a Backend, got {type(backend).__name__} {backend!r}")


def explain(
    structure: Structure,
    in_features: int,
    out_features: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend = Backend.AUTO,
    tokens: int | None = None,
    int8: bool = False,
) -> Explanation:
    """Says what a layer of this size runs on, and why something else does not.

    It speaks of a call of one layer. A grouped launch (``blast_linear_grouped`` and the like)
    has sizes of its own, which are computed and never tuned.

    Args:
        structure, in_features, out_features: of the layer.
        dtype, device: of its input and factors.
        backend: what is asked for.
        tokens: rows of its input; with them the explanation names path and launch config too.
        int8: whether it is a BLAST layer of 8-bit integers.

    Raises:
        ValueError: if the structure does not fit the sizes or ``int8``, or the tokens are not
            positive.
        RuntimeError: if ``Backend.TRITON`` is asked for and cannot run.
    """
    padded = structure.padded(in_features, out_features)
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    if int8 and structure.kind != "blast":
        raise ValueError(f"int8 takes a BLAST structure, got {structure}")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    op = "blast_int8" if int8 else structure.kind
    layer = f"{structure}{' in int8' if int8 else ''} {in_features} -> {out_features}"
    if runs_on_triton(backend, device, dtype):
        asked = backend is Backend.TRITON
        not_torch = "Backend.TRITON was asked for" if asked else "slower here"
        told = Explanation(
            Backend.TRITON,
            f"{layer}: {'asked for' if asked else 'the fastest on this device'}",
            {Backend.TORCH: not_torch},
        )
        if tokens is None:
            return told
        from blr_kernels.ops.paths import Call, limits_of

        blocks = 1 if isinstance(structure, LowRank) else structure.blocks
        call = Call(op, tokens, *padded, blocks, structure.rank, dtype, limits_of(device))
        return _with_path(told, call, kernels_only=asked)
    cannot = why_not_triton(device, dtype)
    if backend is Backend.TORCH:
        reason, not_triton = "asked for", cannot or "Backend.TORCH was asked for"
    else:
        reason = not_triton = cannot or why_not_auto(device, dtype)
    return Explanation(Backend.TORCH, f"{layer}: {reason}", {Backend.TRITON: not_triton})


def _with_path(told: Explanation, call: Call, *, kernels_only: bool) -> Explanation:
    """Adds the path of a call to an explanation of the package's kernels."""
    from blr_kernels.ops.choice import choose, why_not_others

    choice = choose(call, kernels_only)
    others = why_not_others(call, choice, kernels_only)
    if choice.path.library:
        not_triton = "; ".join(f"{name}: {why}" for name, why in others.items())
        told = Explanation(Backend.TORCH, told.reason, {Backend.TRITON: not_triton})
    return replace(
        told,
        path=choice.path.name,
        config=choice.config,
        source=choice.source,
        other_paths=others,
    )
