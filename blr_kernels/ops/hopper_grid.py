"""Programmatic dependent launch in Gluon: kernels that start before the one ahead has ended."""

# Gluon gives a function's parameters their types where it is called.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def grid_wait():
    """Waits until the kernels this one depends on have ended and their writes are visible."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def grid_launch_dependents():
    """Lets the next kernel's programs start where there is room for them."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _prefetches(kernel, indices):
    """Assembly text with which the first thread prefetches parameters that are descriptors."""
    each = "".join(
        f" mov.b64 %a, {kernel}_param_{index}; cvta.param.u64 %a, %a; @%p prefetch.tensormap [%a];"
        for index in indices
    )
    return (
        "{ .reg .pred %p; .reg .b32 %t; .reg .b64 %a;"
        f" mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;{each} mov.u32 $0, 0; }}"
    )


@gluon.jit
def prefetch_descriptors(KERNEL: gl.constexpr, INDICES: gl.constexpr):
    """Brings TMA descriptors to the unit that reads them, before the first copy waits for that.

    KERNEL is the name of the kernel, INDICES are those of its parameters after lowering, where a
    descriptor of n dimensions is 1 + 2n of them.
    """
    gl.inline_asm_elementwise(
        _prefetches(KERNEL, INDICES), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
