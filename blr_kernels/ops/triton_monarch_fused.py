"""Monarch in one kernel: the hidden values of a token tile never leave the multiprocessor."""

# Triton gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops import triton_monarch_config as config_of
from blr_kernels.ops.alignment import is_aligned
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_dependent import (
    LINE_BYTES,
    is_dependent,
    launch_options,
    release,
    wait,
)
from blr_kernels.ops.triton_monarch_tiles import (
    concatenate,
    fetch_share,
    load_right,
    load_tile,
    matrix_descriptor,
    narrow,
    right_descriptor,
    separate,
    store_interleaved,
)
from blr_kernels.ops.triton_product import dot, input_precision, must_widen
from blr_kernels.reference import Activation


@triton.constexpr_function
def place(part: int, lane: int, pieces: int, together: int, blocks: int) -> int:
    """Where the first loop left piece ``part % pieces`` of input block ``part // pieces``, for
    output block ``lane``.
    """
    k, piece = divmod(part, pieces)
    return ((k // together * pieces + piece) * together + k % together) * blocks + lane


@triton.jit(do_not_specialize=["tokens"])
def fused_kernel(
    x_ptr,  # (tokens, BLOCKS*P), strides (x_token, 1)
    left_ptr,  # (BLOCKS*Q, BLOCKS*INNER), contiguous: row l*Q + s, column k*INNER + j
    right_ptr,  # (BLOCKS*INNER, BLOCKS*P), contiguous: row k*INNER + j, column l*P + c
    bias_ptr,  # (Q*BLOCKS); unused unless HAS_BIAS
    out_ptr,  # (tokens, Q*BLOCKS), contiguous
    left_data,  # as left_ptr and right_ptr, never a descriptor
    right_data,
    tokens,
    x_token,
    BLOCKS: tl.constexpr,
    INNER: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    PER_SLICE: tl.constexpr,
    TOGETHER: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    RIGHT_STAGES: tl.constexpr,
    LEFT_STAGES: tl.constexpr,
    TMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LINE: tl.constexpr,
    PIN: tl.constexpr,
):
    if DEPENDENT:
        fetch_share(right_data, BLOCKS * BLOCKS * INNER * P, PROGRAMS, LINE)
        fetch_share(left_data, BLOCKS * Q * BLOCKS * INNER, PROGRAMS, LINE)
    wait(DEPENDENT)
    release(DEPENDENT)
    PIECES: tl.constexpr = (INNER + BLOCK_J - 1) // BLOCK_J
    SLICES: tl.constexpr = (Q + PER_SLICE - 1) // PER_SLICE
    GROUPS: tl.constexpr = BLOCKS * PIECES // GROUP
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    first = program % SLICES * PER_SLICE
    start = program // SLICES * BLOCK_T
    # The last slice may have more tiles than there are, also where each of them is full.
    MASK_ROWS: tl.constexpr = Q % PER_SLICE != 0

    # Input blocks that are computed together share one pipeline, which fills and drains once.
    hidden = ()
    for first_k in tl.static_range(0, BLOCKS, TOGETHER):
        for piece in tl.static_range(PIECES):
            acc = ()
            for _ in tl.static_range(TOGETHER):
                acc += (tl.zeros((BLOCK_T, BLOCKS * BLOCK_J), dtype=tl.float32),)
            for c in tl.range(0, P, BLOCK_P, num_stages=RIGHT_STAGES):
                new = ()
                for n in tl.static_range(TOGETHER):
                    k = first_k + n
                    x = load_tile(
                        x_ptr, start, k * P + c, tokens, k * P + P, x_token,
                        BLOCK_T, BLOCK_P, True, P % BLOCK_P != 0, TMA,
                    )  # fmt: skip
                    w = load_right(
                        right_ptr, k * INNER, piece * BLOCK_J, 0, c,
                        BLOCKS, INNER, P, BLOCKS, BLOCK_J, BLOCK_P, TMA,
                    )  # fmt: skip
                    new += (dot(x, w.T, acc[n], INPUT_PRECISION, WIDEN),)
                acc = new
            for n in tl.static_range(TOGETHER):
                hidden = hidden + separate(narrow(acc[n], dtype, PIN), BLOCKS)

    # One product of depth GROUP * BLOCK_J instead of GROUP small ones that wait for each other.
    joined = ()
    for i in tl.static_range(BLOCKS):
        for g in tl.static_range(GROUPS):
            parts = ()
            for n in tl.static_range(GROUP):
                parts += (hidden[place(g * GROUP + n, i, PIECES, TOGETHER, BLOCKS)],)
            joined += (concatenate(parts),)

    for step in tl.range(0, PER_SLICE, BLOCK_S, num_stages=LEFT_STAGES):
        outputs = ()
        for i in tl.static_range(BLOCKS):
            y = tl.zeros((BLOCK_T, BLOCK_S), dtype=tl.float32)
            for g in tl.static_range(GROUPS):
                w_y = load_tile(
                    left_ptr, i * Q + first + step,
                    g * GROUP // PIECES * INNER + g * GROUP % PIECES * BLOCK_J,
                    i * Q + Q, g * GROUP // PIECES * INNER + INNER, BLOCKS * INNER,
                    BLOCK_S, GROUP * BLOCK_J, MASK_ROWS, INNER % BLOCK_J != 0, TMA,
                )  # fmt: skip
                y = dot(joined[i * GROUPS + g], w_y.T, y, INPUT_PRECISION, WIDEN)
            outputs += (y,)
        store_interleaved(
            outputs, bias_ptr, out_ptr, start, tokens, first + step, 0,
            BLOCKS, Q, MASK_ROWS, HAS_BIAS, ACTIVATION, BLOCK_T, BLOCK_S,
        )  # fmt: skip


def run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """``x (tokens, b*p)``, left, right -> ``out (tokens, b*q)`` in one launch."""
    left, right = factors
    left = left.view(call.blocks * call.q, call.rank)
    if config["tma"] and not is_aligned(x, left, right):
        config = config_of.fused_candidates(call, copy_engine=False)[0]
    tma, dependent = bool(config["tma"]), is_dependent(call.device) and x.device.type != "cpu"
    tokens, rows = config["tokens"], config["rows"]
    tile, step = config_of.inner_tile(call), config_of.step_over(call.p, config["columns"])
    group, per_slice = config_of.group(call), config_of.per_slice(call, rows, config["slices"])
    operands = (x, left, right)
    if tma:
        operands = (
            matrix_descriptor(x, tokens, step),
            matrix_descriptor(left, rows, group * tile),
            right_descriptor(right, call.blocks, tile, step),
        )
    programs = triton.cdiv(call.tokens, tokens) * triton.cdiv(call.q, per_slice)
    fused_kernel[(programs,)](
        *operands,
        bias,
        out,
        left,
        right,
        call.tokens,
        x.stride(0),
        BLOCKS=call.blocks,
        INNER=call.inner,
        P=call.p,
        Q=call.q,
        PER_SLICE=per_slice,
        TOGETHER=config["together"],
        GROUP=group,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        INPUT_PRECISION=input_precision(x.dtype),
        WIDEN=must_widen(x),
        BLOCK_T=tokens,
        BLOCK_S=rows,
        BLOCK_P=step,
        BLOCK_J=tile,
        RIGHT_STAGES=config["right_stages"],
        LEFT_STAGES=config["left_stages"],
        TMA=tma,
        DEPENDENT=dependent,
        # Few values, so that a number of tokens seldom means a new kernel.
        PROGRAMS=min(call.device.sms, triton.next_power_of_2(programs)),
        LINE=LINE_BYTES // call.itemsize,
        PIN=x.device.type != "cpu",
        num_warps=config["warps"],
        **launch_options(dependent),
    )


PATH = Path(
    name="fused",
    op="monarch",
    why_not=config_of.fused_why_not,
    default_config=lambda call: config_of.fused_candidates(call)[0],
    candidates=config_of.fused_candidates,
    run=run,
    suits=config_of.fused_suits,
)
"""Hidden values stay on the multiprocessor: one launch and no scratch."""
