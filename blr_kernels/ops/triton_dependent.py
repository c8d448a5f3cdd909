"""Dependent launch: a kernel starts while the one before it still runs, and waits inside.

Every kernel that is launched this way keeps to one rule, so that a whole chain of them is ordered
as if each started after the one before had ended: it reads what an earlier kernel may have written,
and writes anything at all, only after ``wait``. The first kernel of an op waits before it reads and
before it calls ``release``, so that a later one of the same op may read earlier what is older than
the op: weights, say. Some later ones release before they wait, so what follows them in the op may
read early nothing but that either, and another op may follow only with a first kernel. Until it
waits, any may fetch what it will read into L2, which is always coherent.
"""

# Triton gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from blr_kernels.ops.paths import DeviceLimits

MIN_CAPABILITY = (9, 0)
"""Least compute capability that has dependent launch."""

LINE_BYTES = 128
"""What one ``fetch`` of a pointer brings to L2."""


def is_dependent(limits: DeviceLimits) -> bool:
    """Whether kernels are launched as dependent ones on such a device."""
    return limits.capability >= MIN_CAPABILITY


def launch_options(dependent: bool) -> dict[str, bool]:
    """Keyword arguments of the launch; older devices and the interpreter know none of them."""
    return {"launch_pdl": True} if dependent else {}


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Waits until every kernel before this one has ended and its writes can be seen."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Lets the next kernel start as soon as every program of this one has come here."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(pointers):
    """Asks for the line at each pointer (any shape) to be brought to L2; all must be valid."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
