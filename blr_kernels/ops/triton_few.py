"""All three ops for 1 to 4 tokens: products on CUDA cores, bound by reading the weights.

Two kernels. The first turns x into the mixed intermediate, a program per few rows of the rank and
all input blocks; the second makes the output, a program per few rows of one output block. Both hold
their share of the weights in registers, with every load of it in flight at once. The second is a
dependent launch and reads its weights while the first one runs.
"""

# Triton gives a kernel's parameters their types at launch, and a tuple in it may grow.
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops.triton_dependent import LINE_BYTES, fetch, launch_options, release, wait
from blr_kernels.ops.triton_product import activate
from blr_kernels.reference import Activation

MAX_TOKENS = 4
"""Tokens that one program takes; each is one more copy of its sums."""


@triton.jit
def side_by_side(rows, COUNT: tl.constexpr):
    """1, 2 or 4 tensors ``(n,)`` as the columns of one ``(n, COUNT)``."""
    tl.static_assert(COUNT == 1 or COUNT == 2 or COUNT == 4)
    if COUNT == 1:
        columns = rows[0][:, None]
    elif COUNT == 2:
        columns = tl.join(rows[0], rows[1])
    else:
        pairs = tl.join(tl.join(rows[0], rows[2]), tl.join(rows[1], rows[3]))
        columns = tl.reshape(pairs, (rows[0].shape[0], 4))
    return columns


@triton.jit(do_not_specialize=["tokens"])
def few_mix_kernel(
    x_ptr,  # (tokens, BLOCKS * P), strides (x_token, 1); all groups read it
    coupling_ptr,  # (groups, BLOCKS, BLOCKS, RANK), contiguous; unused unless COUPLED
    right_ptr,  # (groups, BLOCKS, RANK, P), contiguous
    z_ptr,  # (groups, BLOCKS, tokens, RANK), contiguous
    tokens,
    x_token,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    COUPLED: tl.constexpr,  # without it z is Monarch's; with one block that is right[0] @ x
    DEPENDENT: tl.constexpr,
    LINE: tl.constexpr,  # elements of a line of the cache
    LINES: tl.constexpr,  # a power of two that covers BLOCK_R * P elements
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,  # at least BLOCKS
    BLOCK_I: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PIECES: tl.constexpr,  # pieces of BLOCK_P columns that are loaded at once
):
    """``z[g, i, t, :] = sum_j coupling[g, i, j, :] * (right[g, j] @ x[t, j*P : (j + 1)*P])``.

    Monarch's is ``z[g, l, t, k*m + n] = right[g, k, n*BLOCKS + l] @ x[t, k*P : (k + 1)*P]``, where
    m is ``RANK / BLOCKS``.
    """
    group = tl.program_id(2).to(tl.int64)
    first_token = tl.program_id(1) * TOKENS
    first_rank = tl.program_id(0) * BLOCK_R
    right_ptr += group * (BLOCKS * RANK * P)
    z_ptr += group * BLOCKS * tokens * RANK

    row = tl.arange(0, BLOCK_J * BLOCK_R)
    j, r = row // BLOCK_R, first_rank + row % BLOCK_R
    mask_row = (j < BLOCKS) & (r < RANK)
    offs_p = tl.arange(0, BLOCK_P)
    right_row = right_ptr + (j * RANK + r).to(tl.int64) * P
    if COUPLED:
        coupling_ptr += group * (BLOCKS * BLOCKS * RANK)
    if DEPENDENT:
        ahead = tl.minimum(tl.arange(0, LINES) * LINE, (RANK - first_rank).to(tl.int64) * P - 1)
        block = tl.minimum(tl.arange(0, BLOCK_J), BLOCKS - 1).to(tl.int64) * RANK + first_rank
        fetch(right_ptr + block[:, None] * P + ahead[None, :])
        if COUPLED:
            start = coupling_ptr + first_rank
            pair = tl.arange(0, BLOCK_J * BLOCK_J)
            fetch(start + tl.minimum(pair, BLOCKS * BLOCKS - 1) * RANK)
    wait(DEPENDENT)
    release(DEPENDENT)

    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros((BLOCK_J * BLOCK_R, BLOCK_P), dtype=tl.float32),)  # noqa: RUF005
    for c in range(0, P, BLOCK_P * PIECES):
        rights = ()
        xs = ()
        for piece in tl.static_range(PIECES):
            at = c + piece * BLOCK_P + offs_p
            mask = mask_row[:, None] & (at < P)[None, :]
            right = tl.load(right_row[:, None] + at[None, :], mask=mask, other=0.0)
            rights = rights + (right,)  # noqa: RUF005
            for t in tl.static_range(TOKENS):
                token = first_token + t
                x_row = x_ptr + token.to(tl.int64) * x_token + j * P
                x = tl.load(x_row[:, None] + at[None, :], mask=mask & (token < tokens), other=0.0)
                xs = xs + (x,)  # noqa: RUF005
        # Keeps the loads together: otherwise some of them are moved behind the first products.
        tl.debug_barrier()
        added = ()
        for n in tl.static_range(TOKENS):
            total = sums[n]
            for m in tl.static_range(PIECES):
                total += rights[m].to(tl.float32) * xs[m * TOKENS + n].to(tl.float32)
            added = added + (total,)  # noqa: RUF005
        sums = added
    hidden = ()
    for n in tl.static_range(TOKENS):
        hidden = hidden + (tl.sum(sums[n], axis=1),)  # noqa: RUF005
    by_token = side_by_side(hidden, TOKENS)

    offs_t = first_token + tl.arange(0, TOKENS)
    mask_t = offs_t < tokens
    if COUPLED:
        # Columns are pairs of rank and token, the token running faster.
        pair_of = tl.arange(0, BLOCK_R * TOKENS)
        r_of, t_of = first_rank + pair_of // TOKENS, first_token + pair_of % TOKENS
        mask_pair = (r_of < RANK) & (t_of < tokens)
        for i in tl.static_range(0, BLOCKS, BLOCK_I):
            offs_i = i + tl.arange(0, BLOCK_I)
            mask_i = offs_i < BLOCKS
            s = tl.load(
                coupling_ptr + (offs_i[:, None] * BLOCKS + j[None, :]) * RANK + r[None, :],
                mask=mask_i[:, None] & mask_row[None, :],
                other=0.0,
            ).to(tl.float32)
            mixed = s[:, :, None] * by_token[None, :, :]
            z = tl.sum(tl.reshape(mixed, (BLOCK_I, BLOCK_J, BLOCK_R * TOKENS)), axis=1)
            at = (offs_i.to(tl.int64) * tokens)[:, None] + t_of[None, :]
            tl.store(
                z_ptr + at * RANK + r_of[None, :],
                z.to(z_ptr.dtype.element_ty),
                mask=mask_i[:, None] & mask_pair[None, :],
            )
    else:
        lane, column = r % BLOCKS, j * (RANK // BLOCKS) + r // BLOCKS
        at = (lane.to(tl.int64) * tokens)[:, None] + offs_t[None, :]
        tl.store(
            z_ptr + at * RANK + column[:, None],
            by_token.to(z_ptr.dtype.element_ty),
            mask=mask_row[:, None] & mask_t[None, :],
        )


@triton.jit(do_not_specialize=["tokens"])
def few_product_kernel(
    z_ptr,  # (groups, BLOCKS, tokens, RANK), contiguous
    left_ptr,  # (groups, BLOCKS, Q, RANK), contiguous
    bias_ptr,  # (groups, BLOCKS * Q), contiguous; unused unless HAS_BIAS
    out_ptr,  # (groups, tokens, BLOCKS * Q), contiguous
    tokens,
    BLOCKS: tl.constexpr,
    Q: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # row s of block i is output s*BLOCKS + i, not i*Q + s
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out[g, t, i*Q : (i + 1)*Q] = act(left[g, i] @ z[g, i, t] + bias[g, i*Q : (i + 1)*Q])``,
    with INTERLEAVED for the outputs ``i::BLOCKS``.

    All weights of a program are loaded before it waits for z.
    """
    group = tl.program_id(2).to(tl.int64)
    tiles_q: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    if INTERLEAVED:
        # Programs that share lines of out run together.
        block, tile = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    else:
        block, tile = tl.program_id(0) // tiles_q, tl.program_id(0) % tiles_q
    first_token = tl.program_id(1) * TOKENS
    offs_q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offs_k = tl.arange(0, BLOCK_K)
    mask_q = offs_q < Q
    of_group = group * BLOCKS + block
    left_row = left_ptr + of_group * (Q * RANK) + offs_q.to(tl.int64) * RANK
    column = offs_q * BLOCKS + block if INTERLEAVED else block * Q + offs_q
    lefts = ()
    for k in tl.static_range(0, RANK, BLOCK_K):
        left = tl.load(
            left_row[:, None] + k + offs_k[None, :],
            mask=mask_q[:, None] & (offs_k < RANK - k)[None, :],
            other=0.0,
        )
        lefts = lefts + (left,)  # noqa: RUF005
    if HAS_BIAS:
        bias = tl.load(bias_ptr + group * (BLOCKS * Q) + column, mask=mask_q, other=0.0)
        bias = bias.to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)

    pieces: tl.constexpr = (RANK + BLOCK_K - 1) // BLOCK_K
    zs = ()
    for t in tl.static_range(TOKENS):
        token = first_token + t
        z_row = z_ptr + (of_group * tokens + token) * RANK
        for n in tl.static_range(pieces):
            at = n * BLOCK_K + offs_k
            z = tl.load(z_row + at, mask=(at < RANK) & (token < tokens), other=0.0)
            zs = zs + (z,)  # noqa: RUF005
    ys = ()
    for m in tl.static_range(TOKENS):
        total = tl.zeros((BLOCK_Q, BLOCK_K), dtype=tl.float32)
        for i in tl.static_range(pieces):
            total += lefts[i].to(tl.float32) * zs[m * pieces + i].to(tl.float32)[None, :]
        ys = ys + (tl.sum(total, axis=1),)  # noqa: RUF005
    y = side_by_side(ys, TOKENS)
    if HAS_BIAS:
        y += bias[:, None]
    y = activate(y, ACTIVATION)
    offs_t = first_token + tl.arange(0, TOKENS)
    row = (group * tokens + offs_t) * (BLOCKS * Q)
    tl.store(
        out_ptr + row[None, :] + column[:, None],
        y.to(out_ptr.dtype.element_ty),
        mask=mask_q[:, None] & (offs_t < tokens)[None, :],
    )


def launch_few_mix(
    x: Tensor,
    coupling: Tensor | None,
    right: Tensor,
    z: Tensor,
    *,
    rows: int,
    columns: int,
    pieces: int,
    tokens: int,
    warps: int,
    dependent: bool,
) -> None:
    """Launches ``few_mix_kernel`` once.

    Args:
        x: ``(tokens, b*p)`` with a contiguous last dimension.
        coupling: ``(g, b, b, r)``, contiguous, or None for Monarch and low rank, whose b is 1.
        right: ``(g, b, r, p)``, contiguous.
        z: written; ``(g, b, tokens, r)``, contiguous.
        rows: rows of the rank that a program holds, for every input block.
        columns: width of the pieces that it loads of them; each is summed by as many threads as
            read it, 8 columns at a time, so that a narrow one costs fewer steps.
        pieces: how many it loads at once.
        tokens: tokens of a program, 1, 2 or 4.
        warps: of a program.
        dependent: whether it is launched as a dependent kernel.
    """
    groups, blocks, rank, p = right.shape
    grid = (triton.cdiv(rank, rows), triton.cdiv(x.shape[0], tokens), groups)
    line = LINE_BYTES // x.element_size()
    few_mix_kernel[grid](
        x,
        coupling,
        right,
        z,
        x.shape[0],
        x.stride(0),
        BLOCKS=blocks,
        RANK=rank,
        P=p,
        COUPLED=coupling is not None,
        DEPENDENT=dependent,
        LINE=line,
        LINES=triton.next_power_of_2(triton.cdiv(rows * p, line)),
        TOKENS=tokens,
        BLOCK_R=rows,
        BLOCK_J=triton.next_power_of_2(blocks),
        BLOCK_I=min(16, triton.next_power_of_2(blocks)),
        BLOCK_P=columns,
        PIECES=pieces,
        num_warps=warps,
        num_stages=1,
        **launch_options(dependent),
    )


def launch_few_product(
    z: Tensor,
    left: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    *,
    interleaved: bool,
    rows: int,
    inner: int,
    tokens: int,
    warps: int,
    dependent: bool,
) -> None:
    """Launches ``few_product_kernel`` once.

    Args:
        z: ``(g, b, tokens, r)``, contiguous.
        left: ``(g, b, q, r)``, contiguous.
        bias: ``(g, b*q)``, contiguous, or None.
        activation: after the bias.
        out: written; ``(g, tokens, b*q)``, contiguous.
        interleaved: whether row s of block i is output ``s*b + i``, as Monarch's is.
        rows: rows of an output block that a program holds.
        inner: width of the pieces that it loads of them, all at once.
        tokens: tokens of a program, 1, 2 or 4.
        warps: of a program.
        dependent: whether it is launched as a dependent kernel.
    """
    groups, blocks, q, rank = left.shape
    grid = (triton.cdiv(q, rows) * blocks, triton.cdiv(z.shape[2], tokens), groups)
    few_product_kernel[grid](
        z,
        left,
        bias,
        out,
        z.shape[2],
        BLOCKS=blocks,
        Q=q,
        RANK=rank,
        INTERLEAVED=interleaved and blocks > 1,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        DEPENDENT=dependent,
        TOKENS=tokens,
        BLOCK_Q=rows,
        BLOCK_K=inner,
        num_warps=warps,
        num_stages=1,
        **launch_options(dependent),
    )
