"""Monarch in two kernels: the hidden values go through global memory, where L2 keeps them."""

# Triton gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops import triton_monarch_config as config_of
from blr_kernels.ops.alignment import is_aligned
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import tokens_per_chunk
from blr_kernels.ops.triton_dependent import (
    LINE_BYTES,
    is_dependent,
    launch_options,
    release,
    wait,
)
from blr_kernels.ops.triton_monarch_tiles import (
    fetch_share,
    load_right,
    load_tile,
    matrix_descriptor,
    right_descriptor,
    store_interleaved,
)
from blr_kernels.ops.triton_product import dot, input_precision, must_widen
from blr_kernels.reference import Activation


@triton.jit(do_not_specialize=["tokens"])
def first_kernel(
    x_ptr,  # (tokens, BLOCKS*P), strides (x_token, 1)
    right_ptr,  # (BLOCKS*INNER, BLOCKS, P), contiguous: row k*INNER + j, block l, column c
    hidden_ptr,  # (BLOCKS, tokens, BLOCKS*INNER), contiguous: block l, token, column k*INNER + j
    right_data,  # as right_ptr, never a descriptor
    tokens,
    x_token,
    BLOCKS: tl.constexpr,
    INNER: tl.constexpr,
    P: tl.constexpr,
    LANES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LINE: tl.constexpr,
):
    """``hidden[l, t, k*m + j] = sum_c x[t, k*p + c] * right[k, j*b + l, c]``."""
    if DEPENDENT:
        fetch_share(right_data, BLOCKS * BLOCKS * INNER * P, PROGRAMS, LINE)
    wait(DEPENDENT)
    release(DEPENDENT)
    PIECES: tl.constexpr = (INNER + BLOCK_J - 1) // BLOCK_J
    PER_TILE: tl.constexpr = BLOCKS * PIECES * (BLOCKS // LANES)
    program = tl.program_id(0)
    start = program // PER_TILE * BLOCK_T
    k = program % BLOCKS
    j = program // BLOCKS % PIECES * BLOCK_J
    lane = program // (BLOCKS * PIECES) % (BLOCKS // LANES) * LANES
    h = tl.zeros((BLOCK_T, LANES * BLOCK_J), dtype=tl.float32)
    for c in tl.range(0, P, BLOCK_P, num_stages=STAGES):
        x = load_tile(
            x_ptr, start, k * P + c, tokens, k * P + P, x_token,
            BLOCK_T, BLOCK_P, True, P % BLOCK_P != 0, TMA,
        )  # fmt: skip
        w = load_right(
            right_ptr, k * INNER, j, lane, c, BLOCKS, INNER, P, LANES, BLOCK_J, BLOCK_P, TMA
        )
        h = dot(x, w.T, h, INPUT_PRECISION, WIDEN)
    n = tl.arange(0, LANES * BLOCK_J)
    local = tl.arange(0, BLOCK_T)
    block = (lane + n // BLOCK_J).to(tl.int64) * tokens
    column = block * (BLOCKS * INNER) + k * INNER + j + n % BLOCK_J
    base = hidden_ptr + tl.cast(start, tl.int64) * (BLOCKS * INNER)
    mask = (local < tokens - start)[:, None]
    if INNER % BLOCK_J != 0:
        mask = mask & (n % BLOCK_J < INNER - j)[None, :]
    at = base + local[:, None] * (BLOCKS * INNER) + column[None, :]
    tl.store(at, h.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def second_kernel(
    hidden_ptr,  # (BLOCKS, tokens, BLOCKS*INNER), contiguous
    left_ptr,  # (BLOCKS*Q, BLOCKS*INNER), contiguous: row l*Q + s, column k*INNER + j
    bias_ptr,  # (Q*BLOCKS); unused unless HAS_BIAS
    out_ptr,  # (tokens, Q*BLOCKS), contiguous
    left_data,  # as left_ptr, never a descriptor
    tokens,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    Q: tl.constexpr,
    LANES: tl.constexpr,
    PER_SLICE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LINE: tl.constexpr,
):
    """``out[t, s*b + l] = act(sum_n hidden[l, t, n] * left[l, s, n] + bias[s*b + l])``."""
    if DEPENDENT:
        fetch_share(left_data, BLOCKS * Q * RANK, PROGRAMS, LINE)
    wait(DEPENDENT)
    release(DEPENDENT)
    SLICES: tl.constexpr = (Q + PER_SLICE - 1) // PER_SLICE
    program = tl.program_id(0)
    lane = program % (BLOCKS // LANES) * LANES
    first = program // (BLOCKS // LANES) % SLICES * PER_SLICE
    start = program // (BLOCKS // LANES * SLICES) * BLOCK_T
    # The last slice may have more tiles than there are, also where each of them is full.
    MASK_ROWS: tl.constexpr = Q % PER_SLICE != 0
    if BLOCK_R >= RANK:
        # All of the tile's hidden values stay on the multiprocessor while rows of left go past.
        hidden = ()
        for i in tl.static_range(LANES):
            h_i = load_tile(
                hidden_ptr + tl.cast(lane + i, tl.int64) * tokens * RANK, start, 0, tokens, RANK,
                RANK, BLOCK_T, BLOCK_R, True, RANK < BLOCK_R, False,
            )  # fmt: skip
            hidden += (h_i,)
        for step in tl.range(0, PER_SLICE, BLOCK_S, num_stages=STAGES):
            s = first + step
            lanes = ()
            for i in tl.static_range(LANES):
                w = load_tile(
                    left_ptr, (lane + i) * Q + s, 0, (lane + i) * Q + Q, RANK, RANK,
                    BLOCK_S, BLOCK_R, MASK_ROWS, RANK < BLOCK_R, TMA,
                )  # fmt: skip
                y = tl.zeros((BLOCK_T, BLOCK_S), dtype=tl.float32)
                lanes += (dot(hidden[i], w.T, y, INPUT_PRECISION, WIDEN),)
            store_interleaved(
                lanes, bias_ptr, out_ptr, start, tokens, s, lane,
                BLOCKS, Q, MASK_ROWS, HAS_BIAS, ACTIVATION, BLOCK_T, BLOCK_S,
            )  # fmt: skip
    else:
        tl.static_assert(PER_SLICE == BLOCK_S)
        acc = ()
        for _ in tl.static_range(LANES):
            acc += (tl.zeros((BLOCK_T, BLOCK_S), dtype=tl.float32),)
        for n in tl.range(0, RANK, BLOCK_R, num_stages=STAGES):
            new = ()
            for i in tl.static_range(LANES):
                h = load_tile(
                    hidden_ptr + tl.cast(lane + i, tl.int64) * tokens * RANK, start, n, tokens,
                    RANK, RANK, BLOCK_T, BLOCK_R, True, RANK % BLOCK_R != 0, False,
                )  # fmt: skip
                v = load_tile(
                    left_ptr, (lane + i) * Q + first, n, (lane + i) * Q + Q, RANK, RANK,
                    BLOCK_S, BLOCK_R, MASK_ROWS, RANK % BLOCK_R != 0, TMA,
                )  # fmt: skip
                new += (dot(h, v.T, acc[i], INPUT_PRECISION, WIDEN),)
            acc = new
        store_interleaved(
            acc, bias_ptr, out_ptr, start, tokens, first, lane,
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
    """``x (tokens, b*p)``, left, right -> ``out (tokens, b*q)``; chunks bound the scratch."""
    left, right = factors
    blocks, rank = call.blocks, call.rank
    left = left.view(blocks * call.q, rank)
    if config["tma"] and not is_aligned(x, left, right):
        config = config_of.two_candidates(call, copy_engine=False)[0]
    tma, dependent = bool(config["tma"]), is_dependent(call.device) and x.device.type != "cpu"
    tile, step = config_of.inner_tile(call), config_of.step_over(call.p, config["right_columns"])
    right_lanes, lanes, rows = config["right_lanes"], config["left_lanes"], config["left_rows"]
    rank_step = config_of.rank_step(call, config)
    per_slice = rows
    if config_of.is_resident(call, config):
        per_slice = config_of.per_slice(call, rows, config["left_slices"])
    both = {
        "INPUT_PRECISION": input_precision(x.dtype),
        "WIDEN": must_widen(x),
        "TMA": tma,
        "DEPENDENT": dependent,
        "PROGRAMS": call.device.sms,
        "LINE": LINE_BYTES // call.itemsize,
        **launch_options(dependent),
    }
    weights = (right, left)
    if tma:
        weights = (
            right_descriptor(right, right_lanes, tile, step),
            matrix_descriptor(left, rows, rank_step),
        )
    chunk = tokens_per_chunk(call.tokens, blocks * rank * call.itemsize)
    hidden = x.new_empty((blocks, chunk, rank))
    for start in range(0, call.tokens, chunk):
        x_part, out_part = x[start : start + chunk], out[start : start + chunk]
        tokens = out_part.shape[0]
        programs = triton.cdiv(tokens, config["right_tokens"]) * (blocks // right_lanes)
        first_kernel[(programs * blocks * config_of.pieces(call),)](
            matrix_descriptor(x_part, config["right_tokens"], step) if tma else x_part,
            weights[0],
            hidden,
            right,
            tokens,
            x.stride(0),
            BLOCKS=blocks,
            INNER=call.inner,
            P=call.p,
            LANES=right_lanes,
            BLOCK_T=config["right_tokens"],
            BLOCK_J=tile,
            BLOCK_P=step,
            STAGES=config["right_stages"],
            num_warps=config["right_warps"],
            **both,
        )
        programs = triton.cdiv(tokens, config["left_tokens"]) * (blocks // lanes)
        second_kernel[(programs * triton.cdiv(call.q, per_slice),)](
            hidden,
            weights[1],
            bias,
            out_part,
            left,
            tokens,
            BLOCKS=blocks,
            RANK=rank,
            Q=call.q,
            LANES=lanes,
            PER_SLICE=per_slice,
            HAS_BIAS=bias is not None,
            ACTIVATION=activation or "none",
            BLOCK_T=config["left_tokens"],
            BLOCK_S=rows,
            BLOCK_R=rank_step,
            STAGES=config["left_stages"],
            num_warps=config["left_warps"],
            **both,
        )


PATH = Path(
    name="two",
    op="monarch",
    why_not=config_of.why_not,
    default_config=lambda call: config_of.two_candidates(call)[0],
    candidates=config_of.two_candidates,
    run=run,
    # Measured on an H200; else the two products of "triton" are faster.
    suits=lambda call: call.tokens > 1024 and call.rank * call.p < 2**18,
    separable=True,
)
"""Each factor has a kernel of its own, the second with the output interleaved."""
