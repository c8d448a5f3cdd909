"""BLAST on Triton: one kernel from x to the mixed intermediate, one product from it to y."""

# Triton gives a kernel's parameters their types at launch, and a tuple in it may grow.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops.paths import Call, Config, Path
from blr_kernels.ops.triton_config import (
    Tiles,
    accumulators,
    mix_candidates,
    mix_tiles,
    product_candidates,
    product_tiles,
    smaller_chunks,
    tokens_per_chunk,
)
from blr_kernels.ops.triton_product import (
    dot,
    input_precision,
    launch_product,
    must_widen,
    why_not,
)
from blr_kernels.reference import Activation

_FEW_TOKENS = 512


@triton.jit(do_not_specialize=["tokens"])
def mix_kernel(
    x_ptr,  # (tokens, BLOCKS * P), strides (x_token, 1)
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    right_ptr,  # (BLOCKS, RANK, P), contiguous
    z_ptr,  # (BLOCKS, tokens, RANK), strides (z_block, RANK, 1)
    tokens,
    x_token,
    z_block,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    ACCUMULATORS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``z[i, t, :] = sum_j coupling[i, j, :] * (right[j] @ x[t, j*P : (j + 1)*P])``.

    A program owns a tile of rank and tokens for ACCUMULATORS output blocks i, so each product
    with ``right[j]`` is computed once for all of them. Rank is the M dimension of the dot: a
    thread then holds few rows, and needs few values of the coupling.
    """
    tiles_r: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    tile = tl.program_id(0)
    first = tl.program_id(1) * ACCUMULATORS
    offs_t = (tile // tiles_r) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_r = (tile % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < tokens
    mask_r = offs_r < RANK
    token = offs_t.to(tl.int64)
    rank = offs_r.to(tl.int64)
    x_tile = x_ptr + token[None, :] * x_token + offs_k[:, None]
    right_tile = right_ptr + rank[:, None] * P + offs_k[None, :]
    coupling_row = coupling_ptr + first.to(tl.int64) * (BLOCKS * RANK) + rank

    accs = (tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32),)
    for _ in tl.static_range(1, ACCUMULATORS):
        accs = accs + (tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32),)  # noqa: RUF005
    for j in tl.range(0, BLOCKS):
        block = tl.cast(j, tl.int64)
        product = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32)
        for k in range(0, P, BLOCK_K):
            mask_k = offs_k < P - k
            right = tl.load(
                right_tile + block * (RANK * P) + k,
                mask=mask_r[:, None] & mask_k[None, :],
                other=0.0,
            )
            x = tl.load(x_tile + j * P + k, mask=mask_k[:, None] & mask_t[None, :], other=0.0)
            product = dot(right, x, product, INPUT_PRECISION, WIDEN)
        mixed = ()
        for i in tl.static_range(ACCUMULATORS):
            s = tl.load(
                coupling_row + (i * BLOCKS + block) * RANK,
                mask=mask_r & (first + i < BLOCKS),
                other=0.0,
            )
            mixed = mixed + (accs[i] + s.to(tl.float32)[:, None] * product,)  # noqa: RUF005
        accs = mixed

    z_tile = z_ptr + first.to(tl.int64) * z_block + token[:, None] * RANK + offs_r[None, :]
    mask_z = mask_t[:, None] & mask_r[None, :]
    for n in tl.static_range(ACCUMULATORS):
        z = tl.trans(accs[n]).to(z_ptr.dtype.element_ty)
        tl.store(z_tile + n * z_block, z, mask=mask_z & (first + n < BLOCKS))


def launch_mix(
    x: Tensor, coupling: Tensor, right: Tensor, z: Tensor, tiles: Tiles, outputs: int
) -> None:
    """Launches ``mix_kernel`` once.

    Args:
        x: ``(tokens, b*p)`` with a contiguous last dimension.
        coupling: ``(b, b, r)``, contiguous.
        right: ``(b, r, p)``, contiguous.
        z: written; ``(b, tokens, r)``, the last two dimensions contiguous.
        tiles: of the launch.
        outputs: output blocks that a program accumulates.
    """
    blocks, rank, columns = right.shape
    tokens = x.shape[0]
    grid = (
        triton.cdiv(tokens, tiles.tokens) * triton.cdiv(rank, tiles.rows),
        triton.cdiv(blocks, outputs),
    )
    mix_kernel[grid](
        x,
        coupling,
        right,
        z,
        tokens,
        x.stride(0),
        z.stride(0),
        BLOCKS=blocks,
        RANK=rank,
        P=columns,
        ACCUMULATORS=outputs,
        INPUT_PRECISION=input_precision(x.dtype),
        WIDEN=must_widen(x),
        BLOCK_R=tiles.rows,
        BLOCK_T=tiles.tokens,
        BLOCK_K=tiles.inner,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _bytes_per_token(call: Call) -> int:
    return call.blocks * call.rank * call.itemsize


def _default_config(call: Call) -> dict[str, int]:
    limits = {"itemsize": call.itemsize, "shared_limit": call.device.shared_bytes}
    return {
        **mix_tiles(call.tokens, call.rank, call.p, **limits).to_config("mix"),
        "mix_outputs": accumulators(call.blocks),
        **product_tiles(call.tokens, call.q, call.rank, **limits).to_config("product"),
        "chunk": 0,
    }


def _candidates(call: Call) -> list[dict[str, int]]:
    """Each differs from the default in one of its parts: mixing, product or chunk."""
    limits = {"itemsize": call.itemsize, "shared_limit": call.device.shared_bytes}
    default = _default_config(call)
    outputs = default["mix_outputs"]
    parts: list[dict[str, int]] = [
        tiles.to_config("mix")
        for tiles in mix_candidates(call.tokens, call.rank, call.p, outputs, **limits)[:4]
    ]
    if outputs > 2 and call.tokens <= _FEW_TOKENS:
        # More programs, each with less to hold: few tokens do not fill a GPU.
        parts.append({"mix_outputs": -(-outputs // 3)})
    parts += [
        tiles.to_config("product")
        for tiles in product_candidates(call.tokens, call.q, call.rank, **limits)[:4]
    ]
    parts += [
        {"chunk": chunk}
        for chunk in smaller_chunks(call.tokens, _bytes_per_token(call), call.device.l2_bytes)
    ]
    return [default, *({**default, **part} for part in parts)]


def _run(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, ...],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
) -> None:
    left, coupling, right = factors
    tokens, blocks, rows = call.tokens, call.blocks, call.q
    mix, product = Tiles.from_config(config, "mix"), Tiles.from_config(config, "product")
    y3 = out.view(tokens, blocks, rows).transpose(0, 1)
    by_block = None if bias is None else bias.view(blocks, rows)
    chunk = tokens_per_chunk(tokens, _bytes_per_token(call), config["chunk"])
    hidden = x.new_empty((blocks, chunk, call.rank))
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        z = hidden[:, : stop - start]
        launch_mix(x[start:stop], coupling, right, z, mix, config["mix_outputs"])
        launch_product(z, left, y3[:, start:stop], product, bias=by_block, activation=activation)


PATH = Path("triton", "blast", why_not, _default_config, _candidates, _run, separable=True)
