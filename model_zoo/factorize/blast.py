"""BLAST by alternating least squares from an algebraic start (Lee et al., arXiv 2410.21262).

Block ``(i, j)`` of the weight is ``left[i] @ diag(coupling[i, j]) @ right[j]``. Three starts
compete:

* eigenvectors of products of block pairs. In ``A_0j pinv(A_ij) A_ik pinv(A_0k)`` every right
  factor cancels, and what is left is ``left[0]`` times a diagonal times its inverse. Exact for a
  weight of this structure whose rank is at most the size of a block.
* the truncated SVD of the whole weight, all couplings one.
* truncated SVDs of the blocks, each block with ranks of its own (a Latin square of couplings).

The best of them is refined by alternating least squares with extrapolation. A ridge proportional
to the squared error keeps components from growing against each other, which is where plain
alternating least squares stalls, and what half precision could not store; it vanishes as the fit
becomes exact.

The sweeps run in float32, several times quicker, as long as the error is far above its rounding,
and in float64 from there on.

When to stop: once ten sweeps together lower the error by less than ``tolerance`` of it (0.1 % by
default), or after ``max_iterations`` sweeps. A random weight of 3456 x 1152 with 9 blocks and rank
384 stops after about 120 sweeps, within 1 % of the error that 300 sweeps would reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BlastFit", "blast_factors"]

RIDGE = 0.1  # times the squared relative error; 0.01 to 0.1 ends lowest, 1 pulls too hard
RIDGE_FLOOR = 1e-13
RACE_SWEEPS = 10
EXACT = 1e-9
FINE = 0.05  # below this error float32 would round the square of the error by more than 0.1 %
WINDOW = 10  # the tolerance is asked of this many sweeps together


@dataclass(frozen=True)
class BlastFit:
    """Factors ``left (b, q, r)``, ``coupling (b, b, r)``, ``right (b, r, p)`` and the relative
    Frobenius error of the start and after each sweep, never rising."""

    left: Tensor
    coupling: Tensor
    right: Tensor
    errors: tuple[float, ...]


_Factors = tuple[Tensor, Tensor, Tensor]


def blast_factors(
    weight: Tensor,
    blocks: int,
    rank: int,
    *,
    max_iterations: int,
    tolerance: float,
    seed: int = 0,
) -> BlastFit:
    """Fit a BLAST matrix to ``weight (b * q, b * p)``.

    Args:
        weight: not all zero, finite, float64 where the device has it (the start and the last
            digits are computed in it).
        blocks: ``b``.
        rank: ``r``, at most ``b * min(p, q)`` (there the fit is exact).
        max_iterations: sweeps after the starts have raced.
        tolerance: stop when ten sweeps lower the error by less than this fraction of it.
        seed: of the random mixture of block pairs.

    Raises:
        ValueError: the rank is more than any weight of this shape needs.
    """
    q, p = weight.shape[0] // blocks, weight.shape[1] // blocks
    if rank > blocks * min(p, q):
        raise ValueError(
            f"BLAST with {blocks} blocks needs rank <= {blocks * min(p, q)} for a weight of shape "
            f"{tuple(weight.shape)}, got {rank}"
        )
    scale = weight.square().mean().sqrt()
    tiles = (weight / scale).reshape(blocks, q, blocks, p).permute(0, 2, 1, 3).contiguous()

    runs = []
    for start in _starts(tiles, rank, seed):
        run = _Run(tiles, start)
        run.sweeps(RACE_SWEEPS)
        runs.append(run)
        if run.error < EXACT:
            break
    best = min(runs, key=lambda run: run.error)
    best.sweeps(max_iterations, tolerance)

    left, coupling, right = _cast(best.factors, weight.dtype)
    root = scale.sqrt()
    return BlastFit(left * root, coupling, right * root, tuple(best.errors))


class _Run:
    """One descent: the best factors so far, their errors, and the state of the extrapolation."""

    def __init__(self, tiles: Tensor, start: _Factors) -> None:
        self.exact_tiles = tiles
        self.factors = _balanced(start)
        self.previous: _Factors | None = None
        self.momentum = 1
        self.ridge = RIDGE
        self.error = _error(tiles, self.factors)
        self.errors = [self.error]
        self._work_in(torch.float32 if self.error > FINE else tiles.dtype)

    def _work_in(self, dtype: torch.dtype) -> None:
        self.tiles = self.exact_tiles.to(dtype)
        self.energy = float(self.tiles.square().sum(dtype=self.exact_tiles.dtype))
        self.factors = _cast(self.factors, dtype)
        if self.previous is not None:
            self.previous = _cast(self.previous, dtype)

    def sweeps(self, count: int, tolerance: float = 0.0) -> None:
        """Up to ``count`` sweeps; fewer once the fit is exact or no longer improves."""
        begin = len(self.errors) - 1
        for _ in range(count):
            if self.error < EXACT or not self._sweep():
                return
            done = len(self.errors) - 1
            if done - begin >= WINDOW:
                gain = self.errors[-1 - WINDOW] - self.error
                if gain <= tolerance * self.error and self.momentum > WINDOW:
                    return

    def _sweep(self) -> bool:
        """Try one sweep, keep it if it is better. False once the ridge has shrunk to nothing."""
        start = self.factors
        if self.previous is not None:
            beta = self.momentum / (self.momentum + 3)
            u, s, v = (
                now + beta * (now - then)
                for now, then in zip(self.factors, self.previous, strict=True)
            )
            start = (u, s, v)
        ridge = max(self.ridge * self.error**2, RIDGE_FLOOR)
        candidate, error = _least_squares_sweep(self.tiles, self.energy, start, ridge)
        if error < self.error:
            self.previous, self.factors = self.factors, _balanced(candidate)
            self.error = error
            self.momentum += 1
            if error < FINE and self.tiles.dtype != self.exact_tiles.dtype:
                self._work_in(self.exact_tiles.dtype)
                self.error = _error(self.tiles, self.factors)
        elif self.previous is not None:  # the extrapolation overshot: go on without it
            self.previous, self.momentum = None, 1
        else:  # the ridge holds the fit back
            self.ridge /= 10
            if self.ridge < 1e-9:
                return False
        # Where the precision changes, the same factors may measure a last digit worse.
        self.errors.append(min(self.error, self.errors[-1]))
        return True


def _least_squares_sweep(
    tiles: Tensor, energy: float, factors: _Factors, ridge: float
) -> tuple[_Factors, float]:
    """Solve for left, then right, then coupling, each exactly given the others.

    Shapes: tiles ``(b, b, q, p)``, left ``(b, q, r)``, coupling ``(b, b, r)``, right ``(b, r, p)``.
    Returns the new factors and their relative error.
    """
    _, s, v = factors
    gram_v = v @ v.mT
    gram = torch.einsum("ijr,ijs,jrs->irs", s, s, gram_v)
    target = torch.einsum("ijqr,ijr->irq", tiles @ v.mT, s)
    u = _solve(gram, target, ridge).mT.contiguous()

    gram_u = u.mT @ u
    projected = u.mT[:, None] @ tiles  # (b, b, r, p)
    gram = torch.einsum("ijr,ijs,irs->jrs", s, s, gram_u)
    target = torch.einsum("ijrp,ijr->jrp", projected, s)
    v = _solve(gram, target, ridge)

    hadamard = gram_u[:, None] * (v @ v.mT)[None]  # (b, b, r, r)
    inner = torch.einsum("ijrp,jrp->ijr", projected, v)
    s = _solve(hadamard, inner[..., None], ridge)[..., 0]

    wide = torch.float32 if tiles.device.type == "mps" else torch.float64
    fitted = float((s * (hadamard @ s[..., None])[..., 0]).sum(dtype=wide))
    met = float((s * inner).sum(dtype=wide))
    error = (max(energy - 2 * met + fitted, 0.0) / energy) ** 0.5
    # The expanded square has lost its digits by here; subtract instead.
    if error < 1e-6:
        error = _error(tiles, (u, s, v))
    return (u, s, v), error


def _solve(gram: Tensor, target: Tensor, ridge: float) -> Tensor:
    """``(gram + ridge * mean(diag(gram)) * I)^-1 target``, raising the ridge if it must."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    tiny = torch.finfo(gram.dtype).tiny
    eps = 10 * torch.finfo(gram.dtype).eps
    for lift in (1.0, 1e3, 1e6, 1e9):
        lifted = gram.clone()
        shift = diagonal * min(max(ridge, eps) * lift, 1.0) + tiny
        lifted.diagonal(dim1=-2, dim2=-1).add_(shift)
        chol, info = torch.linalg.cholesky_ex(lifted)
        if not bool(info.any()):
            break
    return torch.cholesky_solve(target, chol)


def _error(tiles: Tensor, factors: _Factors) -> float:
    u, s, v = factors
    squared = tiles.new_zeros(())
    for i in range(tiles.shape[0]):  # one block row at a time: no second dense weight
        squared += (tiles[i] - (u[i] * s[i][:, None, :]) @ v).square().sum()
    return float((squared / tiles.square().sum()).sqrt())


def _cast(factors: _Factors, dtype: torch.dtype) -> _Factors:
    u, s, v = factors
    return u.to(dtype), s.to(dtype), v.to(dtype)


def _balanced(factors: _Factors) -> _Factors:
    """The same matrix with couplings of RMS one a rank, and left and right of equal norm a rank.

    Columns of one rank in different blocks get the same norm, so no factor is far from the others.
    """
    u, s, v = factors
    tiny = torch.finfo(u.dtype).tiny ** 0.5
    norm_u = u.norm(dim=1).clamp_min(tiny)  # (b, r)
    norm_v = v.norm(dim=2).clamp_min(tiny)
    s = s * norm_u[:, None] * norm_v[None]
    size = s.square().mean(dim=(0, 1)).sqrt().clamp_min(tiny)  # (r,)
    root = size.sqrt()
    return u / norm_u[:, None, :] * root, s / size, v / norm_v[:, :, None] * root[:, None]


def _starts(tiles: Tensor, rank: int, seed: int) -> list[_Factors]:
    b, _, q, p = tiles.shape
    starts: list[Callable[[], _Factors]] = []
    if b > 1 and rank <= min(p, q):
        starts.append(lambda: _eigen_start(tiles, rank, seed))
    starts.append(lambda: _whole_start(tiles, rank))
    if b > 1 and rank >= b:
        starts.append(lambda: _block_start(tiles, rank))
    made = []
    for make in starts:
        try:
            factors = make()
        except torch.linalg.LinAlgError:  # a degenerate weight; the other starts remain
            continue
        if all(bool(torch.isfinite(factor).all()) for factor in factors):
            made.append(factors)
    return made


def _eigen_start(tiles: Tensor, rank: int, seed: int, mixtures: int = 4) -> _Factors:
    b, _, q, p = tiles.shape
    generator = torch.Generator().manual_seed(seed)
    row = tiles[0].permute(1, 0, 2).reshape(q, b * p)
    basis = torch.linalg.svd(row, full_matrices=False)[0][:, :rank]
    mixed = tiles.new_zeros(rank, rank)
    for _ in range(mixtures):
        i = int(torch.randint(1, b, (), generator=generator))
        j, k = torch.randperm(b, generator=generator)[:2].tolist()
        product = tiles[0, j] @ _pinv(tiles[i, j], rank) @ tiles[i, k] @ _pinv(tiles[0, k], rank)
        product = basis.mT @ product @ basis
        mixed += product / product.norm() * float(torch.randn((), generator=generator))
    values, vectors = torch.linalg.eig(mixed)
    # A conjugate pair spans a real plane; its real and imaginary part are a basis of it.
    real = torch.where(values.imag < 0, vectors.imag, vectors.real)
    first = basis @ real
    v = torch.linalg.pinv(first) @ tiles[0]  # (b, r, p): coupling[0] is one
    u = tiles[:, 0] @ torch.linalg.pinv(v[0])  # (b, q, r): coupling[:, 0] is one
    u, _, v = _balanced((u, tiles.new_ones(b, b, rank), v))
    inner = torch.einsum("ijrp,jrp->ijr", u.mT[:, None] @ tiles, v)
    hadamard = (u.mT @ u)[:, None] * (v @ v.mT)[None]
    return u, _solve(hadamard, inner[..., None], 0.0)[..., 0], v


def _pinv(block: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(block, full_matrices=False)
    s = s[:rank].clamp_min(1e-9 * float(s[0]) + torch.finfo(block.dtype).tiny)
    return (vh[:rank].mT / s) @ u[:, :rank].mT


def _whole_start(tiles: Tensor, rank: int) -> _Factors:
    b, _, q, p = tiles.shape
    whole = tiles.permute(0, 2, 1, 3).reshape(b * q, b * p)
    u, s, vh = torch.linalg.svd(whole, full_matrices=False)
    root = s[:rank].sqrt()
    left = (u[:, :rank] * root).reshape(b, q, rank)
    right = (root[:, None] * vh[:rank]).reshape(rank, b, p).permute(1, 0, 2).contiguous()
    return left, tiles.new_ones(b, b, rank), right


def _block_start(tiles: Tensor, rank: int) -> _Factors:
    b, _, q, p = tiles.shape
    u, s, vh = torch.linalg.svd(tiles, full_matrices=False)
    root = s.sqrt()
    left, right = tiles.new_zeros(b, q, rank), tiles.new_zeros(b, rank, p)
    coupling = tiles.new_zeros(b, b, rank)
    begin = 0
    for group in range(b):
        width = rank // b + (group < rank % b)
        ranks = slice(begin, begin + width)
        begin += width
        for i in range(b):
            j = (group - i) % b
            left[i, :, ranks] = u[i, j, :, :width] * root[i, j, :width]
            right[j, ranks] = root[i, j, :width, None] * vh[i, j, :width]
            coupling[i, j, ranks] = 1
    return left, coupling, right
