"""BLAST on Hopper by three kernels, for layers whose input blocks are wide.

``hopper_first`` computes the product of every input block, a small kernel mixes them, and
``hopper_product`` is the second product. Without the mixing's accumulators a program of the first
has registers for more tokens, so that ``right`` is read fewer times; what is written and read once
more is small where input blocks are wide. Few blocks are mixed on the ordinary cores, by the kernel
here; many, as ``hopper_mix_many`` does, on the tensor cores.
"""

# Triton gives a kernel's parameters their types at launch, and a tuple in it may grow.
# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blr_kernels.ops.alignment import aligned
from blr_kernels.ops.hopper_blast import is_mixed_apart, launch_product, unsupported_blast
from blr_kernels.ops.hopper_blast_config import (
    ALL_EARLY,
    MANY_TOKENS,
    bytes_per_token,
    product_configs,
)
from blr_kernels.ops.hopper_first import GROUP, first_configs, launch_first
from blr_kernels.ops.hopper_launch import unsupported
from blr_kernels.ops.hopper_mix_many import MOST_BLOCKS, launch_mix_many, mix_many_shapes
from blr_kernels.ops.hopper_scratch import TILE_TOKENS, chunk_tokens, walk
from blr_kernels.ops.paths import Call, Config, Path, with_parts
from blr_kernels.ops.triton_dependent import is_dependent, launch_options, release, wait
from blr_kernels.reference import Activation

_FEW_BLOCKS = 4
_ENOUGH_TOKENS = 256
_MOST_UNROLLED = 8  # blocks whose scales a thread's registers hold beside a tile of each
_WARP_TOKENS = 256  # of a row, 16 bytes a thread
_MAX_WARPS = 4


@triton.jit
def mix_apart_kernel(
    h_ptr,  # (BLOCKS, RANK, h_block), contiguous; tokens in any order; becomes z
    coupling_ptr,  # (BLOCKS, BLOCKS, RANK), contiguous
    tokens,  # of a row that are mixed, a multiple of 64
    h_block,  # a multiple of 64
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """``z[i, r, t] = sum_j coupling[i, j, r] * h[j, r, t]``."""
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_r = offs_r < RANK
    mask = mask_r[:, None] & (offs_t < tokens)[None, :]
    rank = offs_r.to(tl.int64)
    at = rank[:, None] * h_block + offs_t[None, :]
    plane = h_block.to(tl.int64) * RANK
    # The kernel after this one reads nothing but what is older than the op before it waits.
    release(DEPENDENT)
    scales = ()
    for n in tl.static_range(BLOCKS * BLOCKS):
        s = tl.load(coupling_ptr + n * RANK + rank, mask=mask_r, other=0.0)
        scales = scales + (s,)  # noqa: RUF005
    wait(DEPENDENT)
    blocks = ()
    for j in tl.static_range(BLOCKS):
        h = tl.load(h_ptr + j * plane + at, mask=mask, other=0.0)
        blocks = blocks + (h,)  # noqa: RUF005
    for i in tl.static_range(BLOCKS):
        z = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32)
        for j in tl.static_range(BLOCKS):
            s = scales[i * BLOCKS + j]
            z += s.to(tl.float32)[:, None] * blocks[j].to(tl.float32)
        # In the place of what this thread has read.
        tl.store(h_ptr + i * plane + at, z.to(h_ptr.dtype.element_ty), mask=mask)


def _is_many(call: Call) -> bool:
    return call.blocks > _MOST_UNROLLED


def launch_mix_apart(call: Call, h: Tensor, coupling: Tensor, tokens: int, config: Config) -> None:
    """Launches the kernel that mixes, once, after one that follows all of its call's inputs.

    Args:
        h: ``(b, r, h_block)``, contiguous, ``h_block`` a multiple of 64; becomes z, whole tiles of
            64 tokens.
        coupling: ``(b, b, r)``, contiguous.
        tokens: of h.
    """
    blocks, rank, h_block = h.shape
    whole = triton.cdiv(tokens, TILE_TOKENS) * TILE_TOKENS
    rows, columns = config["apart_rows"], config["apart_tokens"]
    # Gluon has no interpreter.
    if _is_many(call) and not unsupported(call):
        launch_mix_many(h, coupling, whole, rows=rows, columns=columns)
        return
    dependent = is_dependent(call.device)
    mix_apart_kernel[(triton.cdiv(whole, columns), triton.cdiv(rank, rows))](
        h,
        coupling,
        whole,
        h_block,
        BLOCKS=blocks,
        RANK=rank,
        DEPENDENT=dependent,
        BLOCK_R=rows,
        BLOCK_T=columns,
        num_warps=max(1, min(_MAX_WARPS, rows * columns // _WARP_TOKENS)),
        **launch_options(dependent),
    )


def mix_configs(call: Call, tokens: int) -> list[dict[str, int]]:
    """The mixing's part of configs, the likely best first.

    Args:
        tokens: that are walked at once.
    """
    if _is_many(call):
        shapes = mix_many_shapes(call, tokens)
    else:
        # A row of so many tokens is one warp's, so that its lanes share what they load of scales.
        columns = min(_WARP_TOKENS, triton.next_power_of_2(max(tokens, TILE_TOKENS)))
        shapes = [(4, columns), (2, 2 * columns), (2, columns)]
    return [{"apart_rows": rows, "apart_tokens": columns} for rows, columns in shapes]


def _candidates(call: Call) -> list[dict[str, int]]:
    tokens = chunk_tokens(call, bytes_per_token(call))
    first, mix = first_configs(call, tokens), mix_configs(call, tokens)
    # The mixing leaves room for the product's programs, which load their slab meanwhile.
    few = call.tokens <= MANY_TOKENS
    products = product_configs(call, early=ALL_EARLY) if few else product_configs(call)
    default = {**first[0], **mix[0], **products[0], "chunk": 0}
    parts = [*first[1:4], *mix[1:], *products[1:]]
    # An intermediate that the cache holds is read again from there.
    cached = call.tokens * bytes_per_token(call) <= call.device.l2_bytes // 2
    full = call.device.sms * TILE_TOKENS
    if not cached and full < tokens:
        parts.append({"chunk": full})
    return with_parts(default, parts)


def _default_config(call: Call) -> Config:
    return _candidates(call)[0]


def _why_not(call: Call) -> str:
    if reason := unsupported_blast(call):
        return reason
    if call.blocks > MOST_BLOCKS:
        return f"it takes up to {MOST_BLOCKS} blocks, got {call.blocks}"
    return ""


def run_products(
    call: Call,
    x: Tensor,
    factors: tuple[Tensor, Tensor | None, Tensor],
    bias: Tensor | None,
    activation: Activation | None,
    out: Tensor,
    config: Config,
    limit: int = 0,
) -> None:
    """Both products, chunk by chunk, mixed between them if there is a coupling.

    Args:
        factors: ``left (b, q, r)``, ``coupling (b, b, r)`` or None, ``right (b, r, p)``.
        limit: most tokens walked at once, 0 for no other limit than the scratch.
        call, x, bias, activation, out, config: as a path's ``run`` takes them.
    """
    left, right = aligned(factors[0]), aligned(factors[2])
    coupling = None if factors[1] is None else aligned(factors[1])
    bias = None if bias is None else aligned(bias)
    padded, parts = walk(call, x, bytes_per_token(call), limit)
    h = x.new_empty((call.blocks, call.rank, padded))
    for tokens, part, late in parts:
        launch_first(
            call,
            part,
            right,
            h,
            tokens_tile=config["first_tokens"],
            stages=config["first_stages"],
            grouped=False,
            early=late,
        )
        if coupling is not None:
            launch_mix_apart(call, h, coupling, part.shape[0], config)
        launch_product(call, h, left, bias, activation, out[tokens], config, group=GROUP.value)


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
    of_all = left, coupling, right
    run_products(call, x, of_all, bias, activation, out, config, config["chunk"])


def _suits(call: Call) -> bool:
    # Few blocks at few tokens are mixed as fast as a kernel starts.
    enough = call.tokens >= _ENOUGH_TOKENS or call.blocks > _FEW_BLOCKS
    return enough and is_mixed_apart(call)


PATH = Path(
    "apart",
    "blast",
    _why_not,
    _default_config,
    _candidates,
    _run,
    suits=_suits,
    separable=True,
)
