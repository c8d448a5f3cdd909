"""A batched product with bias and activation in its epilogue: the kernel all three ops share."""

# Triton gives a kernel's parameters their types at launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops.backend import TRITON_DTYPES
from blr_kernels.ops.paths import Call
from blr_kernels.ops.triton_config import Tiles
from blr_kernels.reference import Activation


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    """``y`` of any shape in fp32 -> activated; ACTIVATION is "none" or one of the op's names."""
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u).
        y = y * tl.sigmoid(1.5957691216057308 * y * (1.0 + 0.044715 * y * y))
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def dot(a, b, acc, INPUT_PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """``acc + a @ b`` in fp32. WIDEN casts first: the interpreter cannot multiply bfloat16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=INPUT_PRECISION)


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    a_ptr,  # (batch, tokens, K), strides (a_batch, a_token, 1)
    w_ptr,  # (batch, N, K), contiguous
    bias_ptr,  # (batch, N), strides (bias_batch, bias_column); unused unless HAS_BIAS
    out_ptr,  # (batch, tokens, N), strides (out_batch, out_token, out_column)
    tokens,
    a_batch,
    a_token,
    bias_batch,
    bias_column,
    out_batch,
    out_token,
    out_column,
    out_group,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,  # column g * (N / GROUPS) + j reads row j * GROUPS + g of the weight
    INTERLEAVED: tl.constexpr,  # batches whose columns alternate in out, 1 if none do
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out[batch, t, n] = act(sum_k a[batch, t, k] * w[batch, n, k] + bias[batch, n])``.

    With GROUPS > 1 the columns are regrouped: group g is written at ``g * out_group``. That is
    Monarch's permutation, done on rows of the weight, which stay contiguous.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # Programs that share lines of out run together, so that L2 fills a line before it writes it.
    tile = tl.program_id(0) // INTERLEAVED
    batch = (tl.program_id(0) % INTERLEAVED + tl.program_id(1)).to(tl.int64)
    offs_t = (tile // tiles_n) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < tokens
    mask_n = offs_n < N
    inner: tl.constexpr = N // GROUPS
    w_row = (offs_n % inner) * GROUPS + offs_n // inner
    token = offs_t.to(tl.int64)
    a_tile = a_ptr + batch * a_batch + token[:, None] * a_token + offs_k[None, :]
    w_tile = w_ptr + batch * (N * K) + w_row.to(tl.int64)[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        mask_k = offs_k < K - k
        a = tl.load(a_tile + k, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        w = tl.load(w_tile + k, mask=mask_n[None, :] & mask_k[:, None], other=0.0)
        acc = dot(a, w, acc, INPUT_PRECISION, WIDEN)
    if HAS_BIAS:
        bias_at = bias_ptr + batch * bias_batch + offs_n.to(tl.int64) * bias_column
        acc += tl.load(bias_at, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION)
    y = acc.to(out_ptr.dtype.element_ty)
    out_batch_ptr = out_ptr + batch * out_batch
    if INTERLEAVED > 1:
        # A warp walks along a row: left to itself, Triton may take a column, a line per thread.
        flat = tl.arange(0, BLOCK_T * BLOCK_N)
        flat_t = (tile // tiles_n) * BLOCK_T + flat // BLOCK_N
        flat_n = (tile % tiles_n) * BLOCK_N + flat % BLOCK_N
        at = flat_t.to(tl.int64) * out_token + flat_n.to(tl.int64) * out_column
        y = tl.reshape(y, (BLOCK_T * BLOCK_N,))
        tl.store(out_batch_ptr + at, y, mask=(flat_t < tokens) & (flat_n < N))
    else:
        column = (offs_n % inner).to(tl.int64) * out_column
        column += (offs_n // inner).to(tl.int64) * out_group
        out_tile = out_batch_ptr + token[:, None] * out_token + column[None, :]
        tl.store(out_tile, y, mask=mask_t[:, None] & mask_n[None, :])


def input_precision(dtype: torch.dtype) -> str:
    """IEEE products in fp32 unless torch was told that its own may use TF32."""
    if dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def must_widen(x: Tensor) -> bool:
    """Whether the kernels have to cast before they multiply: bfloat16 under the interpreter."""
    return x.device.type == "cpu" and x.dtype is torch.bfloat16


def why_not(call: Call) -> str:
    """The reason why the portable kernels cannot take a call, or ""."""
    if call.dtype not in TRITON_DTYPES:
        return f"the Triton kernels take no {str(call.dtype).removeprefix('torch.')}"
    return ""


def launch_product(
    a: Tensor,
    weight: Tensor,
    out: Tensor,
    tiles: Tiles,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    groups: int = 1,
    out_group: int = 0,
) -> None:
    """Launches ``product_kernel`` once.

    Args:
        a: ``(batch, tokens, K)`` with a contiguous last dimension; batches may be views.
        weight: ``(batch, N, K)``, contiguous.
        out: written; ``(batch, tokens, N / groups)``, any strides.
        tiles: of the launch.
        bias: ``(batch, N)``, any strides, or None.
        activation: applied after the bias.
        groups, out_group: regrouping of the columns as ``product_kernel`` describes; group g
            starts ``g * out_group`` elements after ``out``. Takes contiguous columns.
    """
    batches, rows, inner = weight.shape
    tokens = a.shape[1]
    programs = triton.cdiv(tokens, tiles.tokens) * triton.cdiv(rows, tiles.rows)
    interleaved = 1 if out.stride(2) == 1 else batches
    grid = (programs * interleaved, batches // interleaved)
    product_kernel[grid](
        a,
        weight,
        bias,
        out,
        tokens,
        a.stride(0) if batches > 1 else 0,
        a.stride(1),
        0 if bias is None else bias.stride(0),
        0 if bias is None else bias.stride(1),
        out.stride(0) if batches > 1 else 0,
        out.stride(1),
        out.stride(2),
        out_group,
        N=rows,
        K=inner,
        GROUPS=groups,
        INTERLEAVED=interleaved,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        INPUT_PRECISION=input_precision(a.dtype),
        WIDEN=must_widen(a),
        BLOCK_T=tiles.tokens,
        BLOCK_N=tiles.rows,
        BLOCK_K=tiles.inner,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
