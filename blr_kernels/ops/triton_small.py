"""All three ops for some tokens (5 to about 1,024): products on tensor cores, bound by latency.

Two dependent launches with small tiles, so that all multiprocessors take part. BLAST's sum over the
input blocks with the coupling is done where it costs less: in the first kernel, which then holds
one accumulator per output block, or in the second, which then reads the intermediate of every
input block.
"""

# Triton gives a kernel's parameters their types at launch, and a tuple in it may grow.
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops.triton_dependent import LINE_BYTES, fetch, launch_options, release, wait
from blr_kernels.ops.triton_product import activate, dot, input_precision, must_widen
from blr_kernels.reference import Activation


@triton.jit(do_not_specialize=["tokens"])
def small_mix_kernel(
    x_ptr,  # (tokens, BLOCKS * P), strides (x_token, 1); all groups read it
    coupling_ptr,  # (groups, BLOCKS, BLOCKS, RANK), contiguous
    right_ptr,  # (groups, BLOCKS, RANK, P), contiguous
    z_ptr,  # (groups, BLOCKS, tokens, RANK), strides (z_group, z_block, RANK, 1)
    tokens,
    x_token,
    z_group,
    z_block,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    OUTPUTS: tl.constexpr,  # output blocks of a program
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LINE: tl.constexpr,  # elements of a line of the cache
    LINES: tl.constexpr,  # a power of two that covers BLOCK_R * P elements
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,  # products of BLOCK_K columns each in one turn of the loop
):
    """``z[g, i, t, :] = sum_j coupling[g, i, j, :] * (right[g, j] @ x[t, j*P : (j + 1)*P])``.

    Rank is the M dimension of the product. With UNROLL * BLOCK_K >= P there is one flat loop over
    the input blocks, whose loads stay several blocks ahead.
    """
    tiles_r: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    tile = tl.program_id(0)
    first = tl.program_id(1) * OUTPUTS
    group = tl.program_id(2).to(tl.int64)
    first_rank = (tile % tiles_r) * BLOCK_R
    offs_t = (tile // tiles_r) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_r = first_rank + tl.arange(0, BLOCK_R)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < tokens
    mask_r = offs_r < RANK
    token = offs_t.to(tl.int64)
    rank = offs_r.to(tl.int64)
    right_ptr += group * (BLOCKS * RANK * P)
    x_tile = x_ptr + token[None, :] * x_token + offs_k[:, None]
    right_tile = right_ptr + rank[:, None] * P + offs_k[None, :]
    coupling_row = coupling_ptr + (group * BLOCKS + first) * (BLOCKS * RANK) + rank
    if DEPENDENT:
        ahead = tl.minimum(tl.arange(0, LINES) * LINE, (RANK - first_rank).to(tl.int64) * P - 1)
        for n in tl.static_range(BLOCKS):
            fetch(right_ptr + (n * RANK + first_rank).to(tl.int64) * P + ahead)
    wait(DEPENDENT)
    release(DEPENDENT)

    accs = (tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32),)
    for _ in tl.static_range(1, OUTPUTS):
        accs = accs + (tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32),)  # noqa: RUF005
    for j in tl.range(0, BLOCKS):
        block = tl.cast(j, tl.int64)
        product = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32)
        for k in range(0, P, BLOCK_K * UNROLL):
            for u in tl.static_range(UNROLL):
                at = k + u * BLOCK_K
                mask_k = offs_k < P - at
                right = tl.load(
                    right_tile + block * (RANK * P) + at,
                    mask=mask_r[:, None] & mask_k[None, :],
                    other=0.0,
                )
                x = tl.load(x_tile + j * P + at, mask=mask_k[:, None] & mask_t[None, :], other=0.0)
                product = dot(right, x, product, INPUT_PRECISION, WIDEN)
        mixed = ()
        for i in tl.static_range(OUTPUTS):
            s = tl.load(
                coupling_row + (i * BLOCKS + block) * RANK,
                mask=mask_r & (first + i < BLOCKS),
                other=0.0,
            )
            mixed = mixed + (accs[i] + s.to(tl.float32)[:, None] * product,)  # noqa: RUF005
        accs = mixed

    z_tile = z_ptr + group * z_group + first.to(tl.int64) * z_block
    z_tile += token[:, None] * RANK + offs_r[None, :]
    mask_z = mask_t[:, None] & mask_r[None, :]
    for n in tl.static_range(OUTPUTS):
        z = tl.trans(accs[n]).to(z_ptr.dtype.element_ty)
        tl.store(z_tile + n * z_block, z, mask=mask_z & (first + n < BLOCKS))


@triton.jit(do_not_specialize=["tokens"])
def small_product_kernel(
    a_ptr,  # (groups, BLOCKS, tokens, K), strides (a_group, a_block, a_token, 1)
    coupling_ptr,  # (groups, BLOCKS, BLOCKS, K), contiguous; unused unless MIX
    w_ptr,  # (groups, BLOCKS, N, K), contiguous
    bias_ptr,  # (groups, BLOCKS * N), each as a row of out, contiguous; unused unless HAS_BIAS
    out_ptr,  # (groups, tokens, BLOCKS, N / LANES), strides (out_group, out_token, out_block,
    # out_column); lane l at l * out_lane
    tokens,
    a_group,
    a_block,
    a_token,
    out_group,
    out_token,
    out_block,
    out_column,
    out_lane,
    BLOCKS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,  # row j * LANES + l of w is column j of lane l
    INTERLEAVED: tl.constexpr,  # blocks alternate in out
    MIX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,  # whether w is older than the kernel before this one
    LINE: tl.constexpr,  # elements of a line of the cache
    LINES: tl.constexpr,  # a power of two that covers BLOCK_N * K elements
    ROWS_FIRST: tl.constexpr,  # rows of w are the M dimension of the product, not tokens
    UNROLL: tl.constexpr,  # load everything at once instead of piece by piece
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out[g, t, i] = act(w[g, i] @ a'[g, i, t] + bias[g, i])``, where a' is a or, with MIX,
    ``a'[g, i, t] = sum_j coupling[g, i, j] * a[g, j, t]``.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if INTERLEAVED:
        # Programs that share lines of out run together: L2 fills a line before it writes it.
        block, tile = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    else:
        block, tile = tl.program_id(1), tl.program_id(0)
    group = tl.program_id(2).to(tl.int64)
    first_row = (tile % tiles_n) * BLOCK_N
    offs_t = (tile // tiles_n) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = first_row + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < tokens
    mask_n = offs_n < N
    token = offs_t.to(tl.int64)
    of_group = group * BLOCKS + block
    w_block = w_ptr + of_group * (N * K)
    row = offs_n.to(tl.int64)
    if ROWS_FIRST:
        w_tile = w_block + row[:, None] * K + offs_k[None, :]
    else:
        w_tile = w_block + row[None, :] * K + offs_k[:, None]
    a_tile = a_ptr + group * a_group
    if not MIX:
        a_tile += block.to(tl.int64) * a_block
    if ROWS_FIRST and not MIX:
        a_tile += token[None, :] * a_token + offs_k[:, None]
    else:
        a_tile += token[:, None] * a_token + offs_k[None, :]

    ws = ()
    if UNROLL and EARLY:
        for s in tl.static_range(steps):
            ws = ws + (  # noqa: RUF005
                load_weight(w_tile + s * BLOCK_K, mask_n, offs_k < K - s * BLOCK_K, ROWS_FIRST),
            )
    elif DEPENDENT:
        ahead = tl.minimum(tl.arange(0, LINES) * LINE, (N - first_row).to(tl.int64) * K - 1)
        fetch(w_block + first_row.to(tl.int64) * K + ahead)
    couplings = ()
    if MIX:
        # As old as the weights, since only a second kernel mixes.
        for k in tl.static_range(0, K, BLOCK_K):
            for b in tl.static_range(BLOCKS):
                at = coupling_ptr + (of_group * BLOCKS + b) * K + k + offs_k
                couplings = couplings + (tl.load(at, mask=offs_k < K - k, other=0.0),)  # noqa: RUF005
    bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if HAS_BIAS:
        bias_row = bias_ptr + group * (BLOCKS * N) + block * out_block + offs_n * out_column
        bias = tl.load(bias_row, mask=mask_n, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)

    if ROWS_FIRST:
        acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    if UNROLL:
        inputs = ()
        for n in tl.static_range(steps):
            mask_k = offs_k < K - n * BLOCK_K
            if MIX:
                hidden = ()
                for j in tl.static_range(BLOCKS):
                    h = tl.load(
                        a_tile + j * a_block + n * BLOCK_K,
                        mask=mask_t[:, None] & mask_k[None, :],
                        other=0.0,
                    )
                    hidden = hidden + (h,)  # noqa: RUF005
                # Keeps the loads together, ahead of the first one's use.
                tl.debug_barrier()
                a = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
                for i in tl.static_range(BLOCKS):
                    c = couplings[n * BLOCKS + i].to(tl.float32)
                    a += c[None, :] * hidden[i].to(tl.float32)
                a = a.to(a_ptr.dtype.element_ty)
                if ROWS_FIRST:
                    a = tl.trans(a)
            elif ROWS_FIRST:
                a = tl.load(a_tile + n * BLOCK_K, mask=mask_k[:, None] & mask_t[None, :], other=0.0)
            else:
                a = tl.load(a_tile + n * BLOCK_K, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
            inputs = inputs + (a,)  # noqa: RUF005
        if not EARLY:
            for m in tl.static_range(steps):
                ws = ws + (  # noqa: RUF005
                    load_weight(w_tile + m * BLOCK_K, mask_n, offs_k < K - m * BLOCK_K, ROWS_FIRST),
                )
        for m in tl.static_range(steps):
            if ROWS_FIRST:
                acc = dot(ws[m], inputs[m], acc, INPUT_PRECISION, WIDEN)
            else:
                acc = dot(inputs[m], ws[m], acc, INPUT_PRECISION, WIDEN)
    else:
        for step in range(0, K, BLOCK_K):
            mask_left = offs_k < K - step
            w = load_weight(w_tile + step, mask_n, mask_left, ROWS_FIRST)
            if ROWS_FIRST:
                v = tl.load(a_tile + step, mask=mask_left[:, None] & mask_t[None, :], other=0.0)
                acc = dot(w, v, acc, INPUT_PRECISION, WIDEN)
            else:
                v = tl.load(a_tile + step, mask=mask_t[:, None] & mask_left[None, :], other=0.0)
                acc = dot(v, w, acc, INPUT_PRECISION, WIDEN)

    if ROWS_FIRST:
        acc = tl.trans(acc)
    if HAS_BIAS:
        acc += bias[None, :]
    acc = activate(acc, ACTIVATION)
    out_tile = out_ptr + group * out_group + block.to(tl.int64) * out_block
    if LANES > 1:
        column = (offs_n % LANES).to(tl.int64) * out_lane + (offs_n // LANES) * out_column
    else:
        column = offs_n * out_column
    out_tile += token[:, None] * out_token + column[None, :]
    tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_n[None, :])


@triton.jit
def load_weight(w_tile, mask_n, mask_k, ROWS_FIRST: tl.constexpr):
    """A tile of weights, ``(N, K)`` if ROWS_FIRST, else ``(K, N)``."""
    if ROWS_FIRST:
        w = tl.load(w_tile, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
    else:
        w = tl.load(w_tile, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
    return w


@dataclass(frozen=True)
class Sizes:
    """Sizes of one launch.

    Attributes:
        rows: rows of the weight that a program holds.
        tokens: tokens that it holds.
        inner: step of the summed dimension.
        unroll: mixing: steps in one turn of the loop. Product: 1 to load all steps at once.
        warps, stages: as Triton takes them.
    """

    rows: int
    tokens: int
    inner: int
    unroll: int
    warps: int
    stages: int


def launch_small_mix(
    x: Tensor,
    coupling: Tensor,
    right: Tensor,
    z: Tensor,
    sizes: Sizes,
    *,
    outputs: int,
    dependent: bool,
) -> None:
    """Launches ``small_mix_kernel`` once.

    Args:
        x: ``(tokens, b*p)`` with a contiguous last dimension.
        coupling: ``(g, b, b, r)``, contiguous.
        right: ``(g, b, r, p)``, contiguous.
        z: written; ``(g, b, tokens, r)``, the last two dimensions contiguous.
        sizes: of the launch; rows are those of the rank.
        outputs: output blocks that a program accumulates.
        dependent: whether it is launched as a dependent kernel.
    """
    groups, blocks, rank, p = right.shape
    tokens = x.shape[0]
    line = LINE_BYTES // x.element_size()
    grid = (
        triton.cdiv(tokens, sizes.tokens) * triton.cdiv(rank, sizes.rows),
        triton.cdiv(blocks, outputs),
        groups,
    )
    small_mix_kernel[grid](
        x,
        coupling,
        right,
        z,
        tokens,
        x.stride(0),
        z.stride(0),
        z.stride(1),
        BLOCKS=blocks,
        RANK=rank,
        P=p,
        OUTPUTS=outputs,
        INPUT_PRECISION=input_precision(x.dtype),
        WIDEN=must_widen(x),
        DEPENDENT=dependent,
        LINE=line,
        LINES=triton.next_power_of_2(triton.cdiv(sizes.rows * p, line)),
        BLOCK_R=sizes.rows,
        BLOCK_T=sizes.tokens,
        BLOCK_K=sizes.inner,
        UNROLL=sizes.unroll,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **launch_options(dependent),
    )


def launch_small_product(
    a: Tensor,
    weight: Tensor,
    out: Tensor,
    sizes: Sizes,
    *,
    coupling: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    lanes: int = 1,
    out_lane: int = 0,
    early: bool,
    dependent: bool,
) -> None:
    """Launches ``small_product_kernel`` once.

    Args:
        a: ``(g, b, tokens, k)`` with a contiguous last dimension; may be an expanded view.
        weight: ``(g, b, n, k)``, contiguous.
        out: written; ``(g, tokens, b, n / lanes)``, any strides; with a bias a view of a contiguous
            ``(g, tokens, b*n)``.
        sizes: of the launch; rows are those of the weight.
        coupling: ``(g, b, b, k)``, contiguous, to mix the blocks of ``a`` first, or None. Takes
            ``early``.
        bias: ``(g, b*n)`` in the order of a token's row of ``out``, contiguous, or None.
        activation: after the bias.
        lanes, out_lane: row ``j*lanes + l`` of the weight is column j of the lane that starts
            ``l * out_lane`` elements after ``out``: Monarch's permutation.
        early: whether weight, coupling and bias are older than the kernel launched before.
        dependent: whether it is launched as a dependent kernel.
    """
    groups, blocks, n, k = weight.shape
    tokens = a.shape[2]
    line = LINE_BYTES // a.element_size()
    tiles = triton.cdiv(tokens, sizes.tokens) * triton.cdiv(n, sizes.rows)
    interleaved = lanes == 1 and blocks > 1 and out.stride(3) > 1
    grid = (tiles * blocks, 1, groups) if interleaved else (tiles, blocks, groups)
    small_product_kernel[grid](
        a,
        coupling,
        weight,
        bias,
        out,
        tokens,
        a.stride(0),
        a.stride(1),
        a.stride(2),
        out.stride(0),
        out.stride(1),
        out.stride(2),
        out.stride(3),
        out_lane,
        BLOCKS=blocks,
        N=n,
        K=k,
        LANES=lanes,
        INTERLEAVED=interleaved,
        MIX=coupling is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        INPUT_PRECISION=input_precision(a.dtype),
        WIDEN=must_widen(a),
        DEPENDENT=dependent,
        EARLY=early,
        LINE=line,
        LINES=triton.next_power_of_2(triton.cdiv(sizes.rows * k, line)),
        # What is mixed is made in the layout it was loaded in, which suits the other operand.
        ROWS_FIRST=coupling is not None or (sizes.tokens < sizes.rows and sizes.tokens < 64),
        UNROLL=coupling is not None or sizes.unroll > 0,
        BLOCK_T=sizes.tokens,
        BLOCK_N=sizes.rows,
        BLOCK_K=sizes.inner,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **launch_options(dependent),
    )
