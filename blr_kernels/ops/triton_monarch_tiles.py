"""Loads and stores of Monarch's kernels: strided factors in, interleaved outputs out."""

# Triton gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blr_kernels.ops.triton_dependent import fetch
from blr_kernels.ops.triton_product import activate


def matrix_descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of ``matrix (n, m)`` for tiles ``(rows, columns)``."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def right_descriptor(right: Tensor, lanes: int, rows: int, columns: int) -> Any:
    """A descriptor of ``right (b, r, p)`` for ``load_right``: (block l, row k*m + j, column)."""
    blocks, rank, p = right.shape
    return TensorDescriptor(right, [blocks, rank, p], [p, blocks * p, 1], [lanes, rows, columns])


@triton.jit
def interleave(parts):
    """1, 2 or 4 ``(T, S)`` tensors -> ``(T, S * len(parts))``, column ``s*len + l``."""
    count: tl.constexpr = len(parts)
    if count == 1:
        joined = parts[0]
    elif count == 2:
        joined = tl.interleave(parts[0], parts[1])
    else:
        tl.static_assert(count == 4)
        joined = tl.interleave(tl.interleave(parts[0], parts[2]), tl.interleave(parts[1], parts[3]))
    return joined


@triton.jit
def concatenate(parts):
    """A power of two of ``(T, J)`` tensors -> ``(T, len(parts) * J)``, one after another."""
    count: tl.constexpr = len(parts)
    if count == 1:
        whole = parts[0]
    else:
        if count == 2:
            first, second = parts[0], parts[1]
        else:
            first, second = concatenate(parts[: count // 2]), concatenate(parts[count // 2 :])
        both = tl.permute(tl.join(first, second), (0, 2, 1))
        whole = tl.reshape(both, (first.shape[0], 2 * first.shape[1]))
    return whole


@triton.jit
def fetch_share(
    source,  # pointer to ELEMENTS elements
    ELEMENTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Brings this program's share of a matrix to L2; the programs together bring all of it."""
    LINES: tl.constexpr = (ELEMENTS + LINE - 1) // LINE
    EACH: tl.constexpr = (LINES + PROGRAMS - 1) // PROGRAMS
    line = tl.program_id(0) * EACH + tl.arange(0, triton.next_power_of_2(EACH))
    fetch(source + tl.minimum(line, LINES - 1).to(tl.int64) * LINE)


@triton.jit
def narrow(acc, dtype: tl.constexpr, PIN: tl.constexpr):
    """fp32 -> ``dtype``, here and now.

    Compilers move a conversion down to its use, and so keep twice the registers until then. PIN
    forbids that; the interpreter has no assembler.
    """
    h = acc.to(dtype)
    if PIN and dtype.primitive_bitwidth == 16:
        h = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [h], dtype=h.dtype, is_pure=False, pack=2
        )
    return h


@triton.jit
def lanes_of(vector, COUNT: tl.constexpr):
    """``(S * COUNT)`` -> COUNT tensors ``(S)``, the inverse of ``interleave``."""
    if COUNT == 1:
        lanes = (vector,)
    else:
        first, second = tl.split(tl.reshape(vector, (vector.shape[0] // 2, 2)))
        even, odd = lanes_of(first, COUNT // 2), lanes_of(second, COUNT // 2)
        lanes = ()
        for i in tl.static_range(COUNT // 2):
            lanes += (even[i], odd[i])
    return lanes


@triton.jit
def load_tile(
    source,  # pointer to a matrix with strides (stride, 1), or its descriptor if TMA
    row,
    column,
    row_end,
    column_end,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """The tile ``(ROWS, COLUMNS)`` at ``(row, column)``, zero beyond the ends that are masked."""
    if TMA:
        tile = source.load([row, column])
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        base = source + tl.cast(row, tl.int64) * stride + column
        at = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        inside_rows = (rows < row_end - row)[:, None]
        inside_columns = (columns < column_end - column)[None, :]
        if MASK_ROWS and MASK_COLUMNS:
            tile = tl.load(at, mask=inside_rows & inside_columns, other=0.0)
        elif MASK_ROWS:
            tile = tl.load(at, mask=inside_rows, other=0.0)
        elif MASK_COLUMNS:
            tile = tl.load(at, mask=inside_columns, other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def load_right(
    source,  # (BLOCKS*INNER, BLOCKS, P): row k*INNER + j, block l, column c; descriptor if TMA
    row,
    j,
    lane,
    c,
    BLOCKS: tl.constexpr,
    INNER: tl.constexpr,
    P: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows of right that feed LANES output blocks: ``(LANES*BLOCK_J, BLOCK_P)``, block by block.

    The descriptor's dimensions are (block, row, column), so that a box comes in that order.
    """
    if TMA:
        tile = tl.reshape(source.load([lane, row + j, c]), (LANES * BLOCK_J, BLOCK_P))
    else:
        n = tl.arange(0, LANES * BLOCK_J)
        columns = tl.arange(0, BLOCK_P)
        rows = (row + j + n % BLOCK_J).to(tl.int64) * BLOCKS + lane + n // BLOCK_J
        at = source + rows[:, None] * P + (c + columns)[None, :]
        if INNER % BLOCK_J == 0 and P % BLOCK_P == 0:
            tile = tl.load(at)
        else:
            mask = (n % BLOCK_J < INNER - j)[:, None] & (columns < P - c)[None, :]
            tile = tl.load(at, mask=mask, other=0.0)
    return tile


@triton.jit
def separate(whole, COUNT: tl.constexpr):
    """``(T, COUNT * J)`` -> COUNT tensors ``(T, J)``, the inverse of ``concatenate``."""
    if COUNT == 1:
        parts = (whole,)
    else:
        halves = tl.reshape(whole, (whole.shape[0], 2, whole.shape[1] // 2))
        first, second = tl.split(tl.permute(halves, (0, 2, 1)))
        parts = separate(first, COUNT // 2) + separate(second, COUNT // 2)
    return parts


@triton.jit
def store_interleaved(
    parts,  # LANES accumulators (BLOCK_T, BLOCK_S), fp32
    bias_ptr,  # (Q*BLOCKS); unused unless HAS_BIAS
    out_ptr,  # (tokens, Q*BLOCKS), contiguous
    start,  # first token
    tokens,
    s,  # first row of the output blocks
    lane,  # first output block
    BLOCKS: tl.constexpr,
    Q: tl.constexpr,
    MASK_ROWS: tl.constexpr,  # whether rows may lie beyond Q
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Adds the bias, activates and stores column ``s*BLOCKS + l`` for each of the accumulators."""
    LANES: tl.constexpr = len(parts)
    offs = tl.arange(0, BLOCK_S * LANES)
    column = offs if LANES == BLOCKS else offs // LANES * BLOCKS + offs % LANES
    if HAS_BIAS:
        at_bias = bias_ptr + s * BLOCKS + lane + column
        if MASK_ROWS:
            bias = lanes_of(tl.load(at_bias, mask=offs // LANES < Q - s, other=0.0), LANES)
        else:
            bias = lanes_of(tl.load(at_bias), LANES)
    done = ()
    for i in tl.static_range(LANES):
        y = parts[i]
        if HAS_BIAS:
            # Before the interleaving, so that only one block's outputs are held in fp32.
            y += bias[i].to(tl.float32)[None, :]
        done += (activate(y, ACTIVATION).to(out_ptr.dtype.element_ty),)
    whole = interleave(done)
    local = tl.arange(0, BLOCK_T)
    base = out_ptr + tl.cast(start, tl.int64) * (Q * BLOCKS) + s * BLOCKS + lane
    at = base + local[:, None] * (Q * BLOCKS) + column[None, :]
    mask = (local < tokens - start)[:, None]
    if MASK_ROWS:
        mask = mask & (offs // LANES < Q - s)[None, :]
    tl.store(at, whole, mask=mask)
