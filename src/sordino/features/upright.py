"""Puts an image's centre of mass into the middle and makes its main axis vertical: a function of that image alone.

Handwriting leans by different angles, which a linear layer on fixed features would have to learn. LeCun, Bottou, Bengio
& Haffner (1998) remove the slant ("deslanting") before training. Here as there the slant is a moment of the image's own
grey levels, so nothing is measured over the records, and there is no privacy cost.

    weights w = image − its least value;    c = mean position under w;    slope a = cov(x, y)/var(y) under w
    out(x, y) = image(x + a·y + c_x, y + c_y), linear between the pixels
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from sordino.errors import InputError

STEEPEST = 1.0
"""The largest slope, in units of width over height: a flat stroke has no slant that could be removed."""
CHUNK = 1024


def upright(images: Tensor) -> Tensor:
    """Images (n, channels, height, width), each centred and without slant; a constant image is not changed."""
    if images.dim() != 4 or not images.is_floating_point():
        raise InputError(
            "upright takes floating-point images (n, channels, height, width), "
            f"not {images.dtype} of shape {tuple(images.shape)}"
        )
    out = torch.empty_like(images)
    for start in range(0, len(images), CHUNK):
        some = images[start : start + CHUNK]
        least = some.amin((1, 2, 3), keepdim=True)
        points = affine_grid(_maps(some - least).to(images), list(some.shape), align_corners=False)
        out[start : start + CHUNK] = grid_sample(some - least, points, align_corners=False) + least
    return out


def _maps(weights: Tensor) -> Tensor:
    """(n, 2, 3): the affine map from a point of the result to one of the image, in units of half the image's sides."""
    mass = weights.double().sum(1)  # (n, h, w)
    height, width = mass.shape[1:]
    y, x = ((2 * torch.arange(side, dtype=torch.float64) + 1) / side - 1 for side in (height, width))
    total = mass.sum((1, 2))
    share = mass / total.clamp(min=1e-12)[:, None, None]
    rows, columns = share.sum(2), share.sum(1)  # (n, h), (n, w)
    down, across = rows @ y, columns @ x
    spread = rows @ y.square() - down.square()
    joint = (share @ x * y).sum(1) - down * across
    slope = (joint / spread.clamp(min=1e-12)).clamp(-STEEPEST, STEEPEST)
    slope = torch.where(spread > 1e-9, slope, 0.0)
    one, zero = torch.ones_like(total), torch.zeros_like(total)
    return torch.stack([torch.stack([one, slope, across], 1), torch.stack([zero, one, down], 1)], 1)
