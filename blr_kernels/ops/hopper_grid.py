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
