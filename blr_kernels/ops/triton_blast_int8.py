"""BLAST in 8-bit integers on Triton: x to int8, from it a mixed int8 intermediate, from that y."""

# Triton gives a kernel's parameters their types at launch, and a tuple in it may grow.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops.backend import TRITON_DTYPES
from blr_kernels.ops.int8 import LEAST as _LEAST
from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import (
    accumulators,
    power_of_two,
    smaller_chunks,
    tile_of,
    tokens_per_chunk,
)
from blr_kernels.ops.triton_dependent import is_dependent, launch_options
from blr_kernels.ops.triton_product import activate
from blr_kernels.reference import Activation

LEAST = tl.constexpr(_LEAST)

_LARGE_TOKENS = 1024
_SMALL_TOKENS = 16
_EARLY_TOKENS = 4096
"""Tokens from which such a start gains; at 512 waiting inside costs more."""


@triton.jit
def rounded(x, inverse):
    """The nearest integer to ``x * inverse``, ties to even, in the low 8 bits of an int32.

    It must lie within -127 and 127. Adding 1.5 * 2**23 leaves it in the low bits of the sum: one
    instruction, and none of the conversions for which a GPU has few units.
    """
    return (x * inverse + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def int8_rows_kernel(
    x_ptr,  # (tokens, SIZE), strides (x_token, 1)
    out_ptr,  # (tokens, SIZE) int8, contiguous
    scale_ptr,  # (tokens,) fp32
    tokens,
    x_token,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Each row of x to int8 with the scale ``max |x| / 127``, NaN for a row that is not finite."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask_t = token < tokens
    mask = mask_t[:, None] & (offs < SIZE)[None, :]
    x = tl.load(x_ptr + token[:, None] * x_token + offs[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    size = tl.abs(x)
    # The maximum ignores NaN, so that becomes infinite first.
    largest = tl.max(tl.where(size < float("inf"), size, float("inf")), 1)
    largest = tl.maximum(largest, LEAST)
    finite = largest < float("inf")
    integers = rounded(tl.where(finite[:, None], x, 0.0), (127.0 / largest)[:, None]).to(tl.int8)
    tl.store(out_ptr + token[:, None] * SIZE + offs[None, :], integers, mask=mask)
    tl.store(scale_ptr + token, tl.where(finite, largest * (1 / 127), float("nan")), mask=mask_t)


@triton.jit(do_not_specialize=["tokens"])
def int8_mix_kernel(
    x_ptr,  # (tokens, BLOCKS * P) int8, contiguous
    x_scale_ptr,  # (tokens,) fp32
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    right_ptr,  # (BLOCKS, RANK, P) int8, contiguous
    z_ptr,  # (BLOCKS, tokens, RANK) int8, strides (z_block, RANK up to a multiple of 16, 1)
    z_scale_ptr,  # (groups, tiles of rank, tokens) fp32, strides (tiles * s_tile, s_tile, 1)
    tokens,
    z_block,
    s_tile,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    ACCUMULATORS: tl.constexpr,  # blocks of a group
    SHIFT: tl.constexpr,  # sums of z / SHIFT, which fp16 holds
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``z[i, t, :] = sum_j coupling[i, j, :] * (right[j] @ x[t, j*P : (j + 1)*P])`` in int8.

    A program owns a tile of rank and tokens for a group of output blocks i, so each product with
    ``right[j]`` is computed once for all of them, and so it can choose a scale: one per token
    for all it holds. Rank is the M dimension of the dot: a thread then holds few rows, and needs
    few values of the coupling.
    """
    tiles_r: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    tile = tl.program_id(0)
    group = tl.program_id(1)
    first = group * ACCUMULATORS
    tile_r = tile % tiles_r
    offs_t = (tile // tiles_r) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Row m of a tile is rank 16 * (m // 16) + 2 * (m % 8) + (m % 16) // 8. A thread holds the rows
    # m and m + 8 of a dot's result: their two bytes of z are then neighbours.
    rows = tl.arange(0, BLOCK_R)
    offs_r = tile_r * BLOCK_R + rows // 16 * 16 + rows % 8 * 2 + rows % 16 // 8
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < tokens
    mask_r = offs_r < RANK
    token = offs_t.to(tl.int64)
    rank = offs_r.to(tl.int64)
    x_tile = x_ptr + token[None, :] * (BLOCKS * P) + offs_k[:, None]
    right_tile = right_ptr + rank[:, None] * P + offs_k[None, :]
    coupling_row = coupling_ptr + first.to(tl.int64) * (BLOCKS * RANK) + rank
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    # z is rounded to 8 bits next: fp16 costs it nothing, and halves the registers.
    accs = (tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float16),)
    for _ in tl.static_range(1, ACCUMULATORS):
        accs = accs + (tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float16),)  # noqa: RUF005
    for j in tl.range(0, BLOCKS):
        block = tl.cast(j, tl.int64)
        product = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.int32)
        for k in range(0, P, BLOCK_K):
            mask_k = offs_k < P - k
            right = tl.load(
                right_tile + block * (RANK * P) + k,
                mask=mask_r[:, None] & mask_k[None, :],
                other=0,
            )
            x = tl.load(x_tile + j * P + k, mask=mask_k[:, None] & mask_t[None, :], other=0)
            product = tl.dot(right, x, product, out_dtype=tl.int32)
        hidden = (product.to(tl.float32) * (1 / SHIFT)).to(tl.float16)
        mixed = ()
        for i in tl.static_range(ACCUMULATORS):
            s = tl.load(
                coupling_row + (i * BLOCKS + block) * RANK,
                mask=mask_r & (first + i < BLOCKS),
                other=0.0,
            )
            mixed = mixed + (accs[i] + s.to(tl.float16)[:, None] * hidden,)  # noqa: RUF005
        accs = mixed

    largest = tl.abs(accs[0])
    for n in tl.static_range(1, ACCUMULATORS):
        largest = tl.maximum(largest, tl.abs(accs[n]))
    largest = tl.maximum(tl.max(largest, 0).to(tl.float32), LEAST)
    inverse = 127.0 / largest
    x_scale = tl.load(x_scale_ptr + token, mask=mask_t, other=0.0)
    s_row = z_scale_ptr + (group.to(tl.int64) * tiles_r + tile_r) * s_tile + token
    tl.store(s_row, largest * (SHIFT / 127) * x_scale, mask=mask_t)
    # Two ranks are one element of the store.
    z_row: tl.constexpr = (RANK + 15) // 16 * 8
    pair = tile_r * (BLOCK_R // 2) + tl.arange(0, BLOCK_R // 2)
    z_pair = z_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    z_tile = z_pair + first.to(tl.int64) * (z_block // 2) + token[:, None] * z_row + pair[None, :]
    mask_z = mask_t[:, None] & (pair < z_row)[None, :]
    for m in tl.static_range(ACCUMULATORS):
        z = rounded(accs[m].to(tl.float32), inverse[None, :])
        z = tl.permute(tl.reshape(z, (BLOCK_R // 16, 2, 8, BLOCK_T)), (0, 2, 3, 1))
        low, high = tl.split(z)
        z = ((low & 0xFF) | (high << 8)).to(tl.int16)
        z = tl.trans(tl.reshape(z, (BLOCK_R // 2, BLOCK_T)))
        tl.store(z_tile + m * (z_block // 2), z, mask=mask_z & (first + m < BLOCKS))


@triton.jit(do_not_specialize=["tokens"])
def int8_product_kernel(
    z_ptr,  # (BLOCKS, tokens, RANK) int8, strides (z_block, RANK up to a multiple of 16, 1)
    z_scale_ptr,  # (groups, tiles of rank, tokens) fp32, strides (tiles * s_tile, s_tile, 1)
    left_ptr,  # (BLOCKS, Q, RANK) int8, contiguous
    left_scale_ptr,  # (BLOCKS, Q) fp32, contiguous
    bias_ptr,  # (BLOCKS * Q,), unused unless HAS_BIAS
    out_ptr,  # (tokens, BLOCKS * Q), contiguous
    tokens,
    z_block,
    s_tile,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    Q: tl.constexpr,
    GROUP: tl.constexpr,  # blocks that share the scales of z
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,  # the tile of rank that has one scale
    EARLY: tl.constexpr,
):
    """``out[t, i*Q + n] = act(left_scale[i, n] * sum_r z[i, t, r] * left[i, n, r] + bias)``.

    Integers add up within a tile of rank, fp32 across them.
    """
    tiles_n: tl.constexpr = (Q + BLOCK_N - 1) // BLOCK_N
    tiles_r: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    tile = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64)
    offs_t = (tile // tiles_n) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    mask_t = offs_t < tokens
    mask_n = offs_n < Q
    token = offs_t.to(tl.int64)
    row = offs_n.to(tl.int64)
    z_row: tl.constexpr = (RANK + 15) // 16 * 16
    z_tile = z_ptr + block * z_block + token[:, None] * z_row + offs_r[None, :]
    s_row = z_scale_ptr + (block // GROUP) * tiles_r * s_tile + token
    left_tile = left_ptr + block * (Q * RANK) + row[None, :] * RANK + offs_r[:, None]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for step in tl.range(0, tiles_r):
        mask_r = offs_r < RANK - step * BLOCK_R
        z = tl.load(z_tile + step * BLOCK_R, mask=mask_t[:, None] & mask_r[None, :], other=0)
        left = tl.load(left_tile + step * BLOCK_R, mask=mask_n[None, :] & mask_r[:, None], other=0)
        s = tl.load(s_row + step * s_tile, mask=mask_t, other=0.0)
        product = tl.dot(z, left, out_dtype=tl.int32)
        acc += product.to(tl.float32) * s[:, None]
    column = block * Q + row
    acc *= tl.load(left_scale_ptr + column, mask=mask_n, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION)
    out_tile = out_ptr + token[:, None] * (BLOCKS * Q) + column[None, :]
    tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_n[None, :])


def fp16_shift(columns: int) -> int:
    """The power of two by which a product over ``columns`` is divided before fp16 holds it.

    The quotient is at most 2**15, so that a sum weighted by couplings that add up to at most 1
    stays finite.
    """
    return power_of_two(max(1, -(-columns * 127 * 127 // 2**15)))


def _row_bytes(rank: int) -> int:
    """Bytes of a row of z: its rows start at multiples of 16."""
    return -(-rank // 16) * 16


def bytes_per_token(call: Call, config: Config) -> int:
    """Scratch of all kinds that a token takes."""
    tiles, groups = _tiles_and_groups(call, config)
    return call.in_features + 4 + call.blocks * _row_bytes(call.rank) + 4 * groups * tiles


def why_not(call: Call) -> str:
    """The reason why the kernels cannot take ``call``, "" if they can."""
    if call.dtype not in TRITON_DTYPES:
        return f"int8 BLAST takes float16, bfloat16 and float32, got {call.dtype}"
    major, minor = call.device.capability
    if (0, 0) < (major, minor) < (8, 0):
        return f"int8 products need compute capability 8.0, got {major}.{minor}"
    return ""


def default_config(call: Call) -> Config:
    """Launch sizes that fit any device: stages by its shared memory, tiles by registers."""
    small, large = call.tokens <= _SMALL_TOKENS, call.tokens > _LARGE_TOKENS
    mix_rows = tile_of(call.rank, 64, least=32)
    mix_tokens = 16 if small else 64 if large else 32
    mix_inner = tile_of(call.p, 256, least=32)
    if call.p > 256:
        mix_inner = 128
    product_tokens = 16 if small else 64
    tiles = call.blocks * -(-call.tokens // product_tokens) * -(-call.q // 128)
    wide = large or (not small and tiles >= call.device.sms)
    product_rows = tile_of(call.q, 128 if wide else 64, least=32)
    shared = call.device.shared_bytes
    mix_stage = (mix_rows + mix_tokens) * mix_inner
    out_stage = (product_tokens + product_rows) * mix_rows
    return {
        "mix_outputs": accumulators(call.blocks),
        "mix_rows": mix_rows,
        "mix_tokens": mix_tokens,
        "mix_inner": mix_inner,
        "mix_warps": 8 if mix_tokens == 64 and mix_rows == 64 else 4,
        "mix_stages": max(1, min(3, shared // mix_stage)),
        "product_tokens": product_tokens,
        "product_rows": product_rows,
        "product_warps": 4,
        "product_stages": max(1, min(4, shared // out_stage)),
        "early": int(is_dependent(call.device) and call.tokens >= _EARLY_TOKENS),
        "chunk": 0,
    }


def candidates(call: Call) -> list[Config]:
    """Each differs from the default in one of its parts: mixing, product, launch or chunk."""
    default = default_config(call)
    shared = call.device.shared_bytes
    found = [default]
    for rows, tokens, warps in ((64, 64, 8), (64, 32, 4), (128, 64, 8), (128, 32, 8), (64, 16, 4)):
        stage = (rows + tokens) * default["mix_inner"]
        of_product = (default["product_rows"] + default["product_tokens"]) * rows
        too_large = max(stage, of_product * default["product_stages"]) > shared
        if rows >= 2 * call.rank or too_large:
            continue
        mix = {"mix_rows": rows, "mix_tokens": tokens, "mix_warps": warps}
        found.append({**default, **mix, "mix_stages": min(3, shared // stage)})
    for tokens, rows, warps in ((128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4)):
        stage = (rows + tokens) * default["mix_rows"]
        if stage > shared:
            continue
        product = {"product_rows": rows, "product_tokens": tokens, "product_warps": warps}
        found.append({**default, **product, "product_stages": min(4, shared // stage)})
    if is_dependent(call.device):
        found.append({**default, "early": 1 - default["early"]})
    per_token = bytes_per_token(call, default)
    for chunk in smaller_chunks(call.tokens, per_token, call.device.l2_bytes)[:1]:
        found.append({**default, "chunk": chunk})
    return [config for i, config in enumerate(found) if config not in found[:i]]


@dataclass(frozen=True)
class Scratch:
    """What lies between the kernels, for the tokens of one chunk.

    Attributes:
        x: ``(tokens, in)`` int8.
        x_scale: ``(tokens,)`` fp32.
        z: ``(b, tokens, r up to a multiple of 16)`` int8.
        z_scale: ``(groups, tiles of rank, tokens)`` fp32.
    """

    x: Tensor
    x_scale: Tensor
    z: Tensor
    z_scale: Tensor


def make_scratch(call: Call, config: Config, device: torch.device) -> Scratch:
    """Room for as many tokens as are walked at once; together at most 64 MiB."""
    chunk = tokens_per_chunk(call.tokens, bytes_per_token(call, config), config["chunk"])
    tiles, groups = _tiles_and_groups(call, config)
    return Scratch(
        torch.empty((chunk, call.in_features), dtype=torch.int8, device=device),
        torch.empty((chunk,), dtype=torch.float32, device=device),
        torch.empty((call.blocks, chunk, _row_bytes(call.rank)), dtype=torch.int8, device=device),
        torch.empty((groups, tiles, chunk), dtype=torch.float32, device=device),
    )


def launch_rows(x: Tensor, scratch: Scratch, config: Config) -> None:
    """``x (tokens, in)``, its last dimension contiguous -> ``scratch.x`` and its scales."""
    tokens, size = x.shape
    block = power_of_two(size)
    rows = max(1, min(4, 4096 // block)) if tokens > _LARGE_TOKENS else 1
    int8_rows_kernel[(triton.cdiv(tokens, rows),)](
        x,
        scratch.x,
        scratch.x_scale,
        tokens,
        x.stride(0),
        SIZE=size,
        BLOCK_T=rows,
        BLOCK=block,
        EARLY=bool(config["early"]),
        num_warps=4 if rows * block <= 4096 else 8,
        num_stages=1,
    )


def launch_mix(
    call: Call, tokens: int, coupling: Tensor, right: Tensor, scratch: Scratch, config: Config
) -> None:
    """``scratch.x``, ``coupling (b, b, r)``, ``right (b, r, p)`` -> ``scratch.z``, its scales."""
    tiles, groups = _tiles_and_groups(call, config)
    int8_mix_kernel[(triton.cdiv(tokens, config["mix_tokens"]) * tiles, groups)](
        scratch.x,
        scratch.x_scale,
        coupling,
        right,
        scratch.z,
        scratch.z_scale,
        tokens,
        scratch.z.stride(0),
        scratch.z_scale.shape[2],
        BLOCKS=call.blocks,
        RANK=call.rank,
        P=call.p,
        ACCUMULATORS=config["mix_outputs"],
        SHIFT=fp16_shift(call.p),
        BLOCK_R=config["mix_rows"],
        BLOCK_T=config["mix_tokens"],
        BLOCK_K=config["mix_inner"],
        EARLY=bool(config["early"]),
        num_warps=config["mix_warps"],
        num_stages=config["mix_stages"],
        **launch_options(bool(config["early"])),
    )


def launch_product(
    call: Call,
    left: Tensor,
    left_scale: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    scratch: Scratch,
    config: Config,
) -> None:
    """``scratch.z``, ``left (b, q, r)``, ``left_scale (b, q)``, ``bias (b*q)`` -> ``out``,
    ``(tokens, b*q)``, contiguous.
    """
    tokens = out.shape[0]
    tiles = triton.cdiv(tokens, config["product_tokens"]) * triton.cdiv(
        call.q, config["product_rows"]
    )
    int8_product_kernel[(tiles, call.blocks)](
        scratch.z,
        scratch.z_scale,
        left,
        left_scale,
        bias,
        out,
        tokens,
        scratch.z.stride(0),
        scratch.z_scale.shape[2],
        BLOCKS=call.blocks,
        RANK=call.rank,
        Q=call.q,
        GROUP=config["mix_outputs"],
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "none",
        BLOCK_T=config["product_tokens"],
        BLOCK_N=config["product_rows"],
        BLOCK_R=config["mix_rows"],
        EARLY=bool(config["early"]),
        num_warps=config["product_warps"],
        num_stages=config["product_stages"],
        **launch_options(bool(config["early"])),
    )


def run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    """``x (tokens, b*p)``, left ``(b, q, r)`` int8, its scales ``(b, q)``, coupling ``(b, b, r)``,
    right ``(b, r, p)`` int8, ``bias (b*q)`` -> ``out (tokens, b*q)``.
    """
    left, left_scale, coupling, right = factors
    scratch = make_scratch(call, config, x.device)
    chunk = scratch.x.shape[0]
    for start in range(0, call.tokens, chunk):
        x_part, out_part = x[start : start + chunk], out[start : start + chunk]
        launch_rows(x_part, scratch, config)
        launch_mix(call, x_part.shape[0], coupling, right, scratch, config)
        launch_product(call, left, left_scale, bias, activation, out_part, scratch, config)


def _tiles_and_groups(call: Call, config: Config) -> tuple[int, int]:
    return -(-call.rank // config["mix_rows"]), -(-call.blocks // config["mix_outputs"])


PATH = Path("triton", "blast_int8", why_not, default_config, candidates, run, separable=True)
