"""Which implementation runs, and why another cannot. Nothing here falls back in silence."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from blr_kernels.structures import Structure

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
    """Which implementation runs, why that one, and why not each other one."""

    implementation: Backend
    reason: str
    others: Mapping[Backend, str]


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
) -> Explanation:
    """Says which implementation a layer of this size runs on, and why another does not.

    Raises:
        ValueError: if the structure does not fit the sizes.
        RuntimeError: if ``Backend.TRITON`` is asked for and cannot run.
    """
    structure.padded(in_features, out_features)
    device = torch.device(device)
    layer = f"{structure} {in_features} -> {out_features}"
    if runs_on_triton(backend, device, dtype):
        why = "asked for" if backend is Backend.TRITON else "the fastest on this device"
        not_torch = "Backend.TRITON was asked for" if backend is Backend.TRITON else "slower here"
        return Explanation(Backend.TRITON, f"{layer}: {why}", {Backend.TORCH: not_torch})
    cannot = why_not_triton(device, dtype)
    if backend is Backend.TORCH:
        reason, not_triton = "asked for", cannot or "Backend.TORCH was asked for"
    else:
        reason = not_triton = cannot or why_not_auto(device, dtype)
    return Explanation(Backend.TORCH, f"{layer}: {reason}", {Backend.TRITON: not_triton})
