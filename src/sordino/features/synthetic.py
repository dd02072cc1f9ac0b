"""Whitens features by a linear map from the statistics of *synthetic* images.

The directions of scattering features have very unequal variances, so gradient descent needs many steps, and every
private step adds noise. Whitening would help, but the covariance of the private records would have to be released. Here
the covariance is that of random shapes (ellipses and boxes with plain or striped grey levels, painted over each other),
drawn from a fixed public seed. It depends on no record and no dataset: the map is a public constant.

    features ↦ (features − m) V (Λ + floor·λ_max)^(−exponent/2) Vᵀ, then scaled to length one

m and V Λ Vᵀ are mean and covariance of the synthetic images' features. exponent 0 only centres, 1 whitens. The form is
symmetric, so signs and order of the eigenvectors don't matter, and NumPy's legacy generator has a frozen stream: a
model gets the same features on another machine, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IMAGES, SHAPES, SEED = 6000, 14, 0
FLOOR = 1e-4
"""Fraction of the largest eigenvalue that is added to all, so that rounding errors are not amplified."""


@dataclass(frozen=True)
class Whitening:
    """A public linear map on flattened features: (n, …) → (n, d), each of length one."""

    mean: Tensor  # (d,)
    matrix: Tensor  # (d, d)

    def __call__(self, maps: Tensor) -> Tensor:
        out = torch.empty(len(maps), self.matrix.shape[1], dtype=maps.dtype)
        for start in range(0, len(maps), 4096):
            rows = (maps[start : start + 4096].flatten(1) - self.mean.to(maps)) @ self.matrix.to(maps)
            out[start : start + 4096] = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return out


def whitening(extract: Callable[[Tensor], Tensor], shape: tuple[int, ...], exponent: float) -> Whitening:
    """The map for features of images of this shape (channels, height, width).

    Args:
        extract: Maps images to features, one image at a time.
        shape: The shape of one image.
        exponent: 0 centres, 1 whitens; values between them do so partly.
    """
    features = extract(pictures(IMAGES, shape)).flatten(1).double()
    mean = features.mean(0)
    features -= mean
    values, vectors = torch.linalg.eigh(features.T @ features / len(features))
    scales = (values.clamp(min=0.0) + FLOOR * values.max()).pow(-exponent / 2)
    return Whitening(mean, (vectors * scales) @ vectors.T)


def pictures(count: int, shape: tuple[int, ...], seed: int = SEED) -> Tensor:
    """Synthetic images (count, channels, height, width) with mean 0 and variance 1 over all of them.

    The first half has a black background and few shapes near the centre, the other half is covered by shapes.
    """
    channels, height, width = shape
    generator = np.random.RandomState(seed)
    down, across = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    black = (torch.arange(count) < count // 2).view(count, 1, 1, 1)

    def uniform(of: int = 1) -> Tensor:
        return torch.from_numpy(generator.random_sample((count, of, 1, 1))).float()

    def normal(*sizes: int) -> Tensor:
        return torch.from_numpy(generator.standard_normal((count, *sizes))).float()

    images = torch.where(black, 0.0, uniform(channels)).expand(count, channels, height, width).clone()
    for _ in range(SHAPES):
        there = uniform() < torch.where(black, 0.35, 0.9)
        x, y = (side * (0.5 + 0.35 * normal(1, 1, 1)) for side in (width, height))
        long, wide = (side * (0.05 + 0.4 * uniform() ** 1.5) for side in (width, height))
        angle = math.pi * uniform()
        p = (angle.cos() * (across - x) + angle.sin() * (down - y)) / long
        q = (angle.cos() * (down - y) - angle.sin() * (across - x)) / wide
        distance = torch.where(uniform() < 0.5, (p * p + q * q).sqrt(), torch.maximum(p.abs(), q.abs()))
        direction, pace = math.pi * uniform(), 0.3 + 2.0 * uniform()
        wave = torch.sin(pace * (direction.cos() * across + direction.sin() * down) + 2 * math.pi * uniform())
        depth = uniform() * (uniform() < 0.4)
        level = uniform(channels) * (1 - depth * (0.5 + 0.5 * wave))
        share = ((1 - distance) * 6).clamp(0, 1) * there
        images = images * (1 - share) + level * share
    images = (images + 0.02 * normal(channels, height, width) * (images > 0.02)).clamp(0, 1)
    return (images - images.mean()) / images.std()
