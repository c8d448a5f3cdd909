"""Random views of the icons, made on the training device.

Pictures go in as (n, 4, 128, 128) uint8 with straight alpha and come out as (n, 3, 128, 128)
floats in [-1, 1].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# RGB <-> YIQ: a hue turn is a rotation of the last two.
_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_RGB = torch.linalg.inv(_YIQ)


def premultiply(rgba: Tensor) -> Tensor:
    """(n, 4, h, w) uint8, straight alpha -> floats in [0, 1], premultiplied."""
    pixels = rgba.float() / 255
    return torch.cat([pixels[:, :3] * pixels[:, 3:], pixels[:, 3:]], 1)


def on_background(pixels: Tensor, background: Tensor | float) -> Tensor:
    """Premultiplied (n, 4, h, w) over a background (broadcast to n, 3, h, w) in [0, 1]."""
    return pixels[:, :3] + (1 - pixels[:, 3:]) * background


def affine_grid(
    scale: Tensor,
    shift: Tensor,
    size: int,
    *,
    angle: Tensor | None = None,
    skew: Tensor | None = None,
) -> Tensor:
    """Sampling grid (n, size, size, 2).

    scale (n, 2): drawn size of the icon, 1 fills the picture; shift (n, 2): of the icon, in half
    picture widths; angle (n,) in radians; skew (n,).
    """
    zero = torch.zeros_like(scale[:, 0])
    angle = zero if angle is None else angle
    skew = zero if skew is None else skew
    cos, sin = torch.cos(angle), torch.sin(angle)
    turn = torch.stack([torch.stack([cos, sin], 1), torch.stack([-sin, cos], 1)], 1)
    lean = torch.stack(
        [torch.stack([torch.ones_like(zero), skew], 1), torch.stack([zero, zero + 1], 1)], 1
    )
    matrix = torch.diag_embed(1 / scale) @ lean @ turn
    theta = torch.cat([matrix, -(matrix @ shift[:, :, None])], 2)
    return F.affine_grid(theta, [len(scale), 1, size, size], align_corners=False)


def light_views(rgba: Tensor) -> Tensor:
    """Views for the generator: on white, a little smaller than the picture, hardly moved."""
    n, device = len(rgba), rgba.device
    scale = torch.empty(n, 1, device=device).uniform_(0.84, 0.94).expand(n, 2)
    shift = torch.empty(n, 2, device=device).uniform_(-0.04, 0.04)
    pixels = F.grid_sample(
        premultiply(rgba), affine_grid(scale, shift, rgba.shape[-1]), align_corners=False
    )
    return on_background(pixels, 1.0) * 2 - 1


def _chance(n: int, p: float, device: torch.device) -> Tensor:
    return torch.rand(n, device=device) < p


def _warp(n: int, size: int, device: torch.device) -> Tensor:
    """Smooth random displacements (n, size, size, 2): as if drawn by another hand."""
    coarse = torch.randn(n, 2, 5, 5, device=device) * 0.07
    coarse = coarse * (torch.rand(n, 1, 1, 1, device=device) * 1.3 - 0.3).clamp_min(0)
    smooth = F.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=True)
    return smooth.permute(0, 2, 3, 1)


def _recolour(pixels: Tensor) -> Tensor:
    """Random hue, saturation, contrast and brightness of premultiplied (n, 4, h, w)."""
    n, device = len(pixels), pixels.device
    turn = torch.randn(n, device=device) * 0.25
    turn = torch.where(
        _chance(n, 0.06, device), turn + math.pi * torch.rand(n, device=device), turn
    )
    saturation = torch.empty(n, device=device).uniform_(0.5, 1.5)
    saturation = torch.where(_chance(n, 0.06, device), torch.zeros_like(saturation), saturation)
    contrast = torch.empty(n, device=device).uniform_(0.65, 1.35)
    brightness = torch.randn(n, device=device) * 0.1
    cos, sin = torch.cos(turn) * saturation, torch.sin(turn) * saturation
    zero, one = torch.zeros_like(cos), torch.ones_like(cos)
    rotation = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(n, 3, 3)
    matrix = _RGB.to(device) @ rotation @ _YIQ.to(device) * contrast[:, None, None]
    tint = torch.randn(n, 3, device=device) * 0.05
    offset = 0.5 * (1 - contrast)[:, None] + brightness[:, None] + tint
    colours = torch.einsum("nij,njhw->nihw", matrix, pixels[:, :3])
    alpha = pixels[:, 3:]
    colours = colours + offset[:, :, None, None] * alpha
    return torch.cat([torch.minimum(colours.clamp_min(0), alpha), alpha], 1)


def backgrounds(n: int, size: int, device: torch.device, *, white: float = 0.35) -> Tensor:
    """Random backgrounds (n, 3, size, size): white, plain, a gradient or soft blotches."""
    plain = torch.rand(n, 3, 1, 1, device=device)
    pale = 1 - 0.25 * torch.rand(n, 3, 1, 1, device=device)
    plain = torch.where(_chance(n, 0.5, device)[:, None, None, None], pale, plain)
    other = torch.rand(n, 3, 1, 1, device=device)
    axis = torch.linspace(-1, 1, size, device=device)
    angle = torch.rand(n, 1, 1, 1, device=device) * 2 * math.pi
    ramp = (
        torch.cos(angle) * axis[None, None, None, :] + torch.sin(angle) * axis[None, None, :, None]
    )
    gradient = torch.lerp(plain.expand(n, 3, size, size), other, (0.5 + 0.35 * ramp).clamp(0, 1))
    blotches = F.interpolate(
        torch.rand(n, 3, 6, 6, device=device), size=(size, size), mode="bicubic"
    )
    kind = torch.rand(n, 1, 1, 1, device=device)
    picked = torch.where(kind < white + 0.35, plain.expand(n, 3, size, size), gradient)
    picked = torch.where(kind > 0.88, blotches, picked)
    return torch.where(kind < white, torch.ones_like(picked), picked).clamp(0, 1)


def strong_views(rgba: Tensor) -> Tensor:
    """Views for the classifier, wide enough that another designer's drawing falls among them."""
    n, size, device = len(rgba), rgba.shape[-1], rgba.device
    scale = torch.empty(n, 1, device=device).uniform_(0.5, 1.12)
    stretch = torch.exp(torch.randn(n, 1, device=device) * 0.1)
    scale = torch.cat([scale * stretch, scale / stretch], 1)
    mirrored = _chance(n, 0.5, device)
    scale[:, 0] = torch.where(mirrored, -scale[:, 0], scale[:, 0])
    shift = torch.randn(n, 2, device=device) * 0.14
    grid = affine_grid(
        scale,
        shift,
        size,
        angle=torch.randn(n, device=device) * 0.2,
        skew=torch.randn(n, device=device) * 0.12,
    )
    grid = grid + _warp(n, size, device)
    pixels = F.grid_sample(premultiply(rgba), grid, align_corners=False)
    picture = on_background(_recolour(pixels), backgrounds(n, size, device))
    return _degrade(picture) * 2 - 1


def _degrade(picture: Tensor) -> Tensor:
    """Blur some pictures (n, 3, h, w), hide a rectangle of others, add noise to a few."""
    n, _, size, _ = picture.shape
    device = picture.device
    factor = 2 if torch.rand(()) < 0.5 else 4
    blurred = F.interpolate(
        F.avg_pool2d(picture, factor), size=(size, size), mode="bilinear", align_corners=False
    )
    picture = torch.where(_chance(n, 0.2, device)[:, None, None, None], blurred, picture)
    place = torch.arange(size, device=device)
    centre = torch.rand(n, 2, device=device) * size
    half = torch.empty(n, 2, device=device).uniform_(0.06, 0.22) * size
    rows = (place[None] - centre[:, :1]).abs() < half[:, :1]
    columns = (place[None] - centre[:, 1:]).abs() < half[:, 1:]
    hidden = rows[:, None, :, None] & columns[:, None, None, :]
    hidden = hidden & _chance(n, 0.4, device)[:, None, None, None]
    picture = torch.where(hidden, torch.rand(n, 3, 1, 1, device=device), picture)
    strength = (
        0.06 * torch.rand(n, 1, 1, 1, device=device) * _chance(n, 0.3, device)[:, None, None, None]
    )
    return (picture + strength * torch.randn_like(picture)).clamp(0, 1)


def fixed_views(rgba: Tensor, views: int, seed: int) -> Tensor:
    """Seeded views for evaluation (n * views, 3, 128, 128): scale, shift and background vary.

    The random numbers come from the CPU, so that every device makes the same views. View v of
    picture i is row i * views + v.
    """
    n, size, device = len(rgba) * views, rgba.shape[-1], rgba.device
    random = torch.Generator().manual_seed(seed)
    scale = (0.65 + 0.33 * torch.rand(n, 1, generator=random)).expand(n, 2)
    shift = (torch.rand(n, 2, generator=random) * 2 - 1) * (1 - scale + 0.02)
    top = torch.rand(n, 3, 1, 1, generator=random) * 0.5 + 0.5
    bottom = torch.rand(n, 3, 1, 1, generator=random) * 0.5 + 0.5
    kind = torch.rand(n, 1, 1, 1, generator=random)
    ramp = torch.linspace(0, 1, size)[None, None, :, None]
    background = torch.lerp(top.expand(n, 3, size, 1), bottom, ramp)
    background = torch.where(kind < 0.7, top.expand(n, 3, size, 1), background)
    background = torch.where(kind < 0.4, torch.ones_like(background), background).to(device)
    pixels = premultiply(rgba.repeat_interleave(views, 0))
    grid = affine_grid(scale.to(device), shift.to(device), size)
    return on_background(F.grid_sample(pixels, grid, align_corners=False), background) * 2 - 1
