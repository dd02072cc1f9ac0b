"""Convolutional features whose filters are patches of synthetic pictures.

Every patch of an image is centred, whitened and compared with a fixed set of patches ("atoms") that were cut from
synthetic pictures (sordino.features.synthetic); the similarity above a threshold is averaged over the cells of a coarse
grid. Coates, Lee and Ng (2011) learn the atoms from the records, which would have a privacy cost; here whitening
and atoms come from a fixed public seed. No record and no public dataset is used: the map is a public constant.

    patch p ↦ q = W(p − mean p);    similarity to atom a: z = ⟨a, q⟩ / (‖q‖ + soften)
    maps: max(z − threshold, 0) and max(−z − threshold, 0), averaged over each of the grid × grid cells

NumPy's legacy generator has a frozen stream, and W is symmetric, so a model gets the same features on another machine,
up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, conv2d

from sordino.errors import InputError
from sordino.features.synthetic import pictures

PICTURES, EACH, SEED = 4000, 20, 7
"""The number of synthetic pictures, and of patches cut from each."""
FLOOR = 0.1
"""Added to all eigenvalues of the patches' covariance, relative to their mean: limits the noise of single pixels."""
LARGEST = 16384
"""The largest number of atoms, which bounds the memory of the features."""


@dataclass(frozen=True)
class Patches:
    """Images (n, channels, height, width) → (n, 2·atoms, grid, grid), each image separately.

    Attributes:
        side: the side of a patch, in pixels.
        atoms: the number of synthetic patches with which every patch is compared.
        grid: the number of cells in each direction over which similarities are averaged.
        threshold: the part of a similarity above it counts; similarities are at most one.
        soften: added to a patch's length before it is divided by it, so that flat patches count little.
        mirror: use the mean of the features of an image and of its mirror image (left and right).
        chunk: the number of images in one pass: few, so that their maps stay in the cache; the result does not depend
            on it, up to rounding.
    """

    side: int = 6
    atoms: int = 256
    grid: int = 3
    threshold: float = 0.2
    soften: float = 0.3
    mirror: bool = False
    chunk: int = 8

    def __post_init__(self) -> None:
        for name, most in (("side", 64), ("atoms", LARGEST), ("grid", 64), ("chunk", 2**31)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InputError(f"patches: {name} must be an integer from 1 to {most}, not {value!r}")
        if self.side < 2:
            raise InputError("patches: side must be at least 2: a patch of one pixel is equal to its mean")
        for name, largest in (("threshold", 1.0), ("soften", 1e6)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < largest:
                raise InputError(f"patches: {name} must be a number from 0 to {largest:g}, not {value!r}")
        if not isinstance(self.mirror, bool):
            raise InputError(f"patches: mirror must be true or false, not {self.mirror!r}")

    def __call__(self, images: Tensor) -> Tensor:
        self._check(images)
        whiten, compare = self._filters(tuple(images.shape[1:]))
        out = images.new_empty(len(images), 2 * self.atoms, self.grid, self.grid)
        with torch.no_grad():
            for start in range(0, len(images), self.chunk):
                some = images[start : start + self.chunk]
                maps = self._maps(some, whiten, compare)
                if self.mirror:
                    maps = (maps + self._maps(some.flip(3), whiten, compare)) / 2
                out[start : start + self.chunk] = maps
        return out

    def _maps(self, images: Tensor, whiten: Tensor, compare: Tensor) -> Tensor:
        lengths = conv2d(images, whiten).square().sum(1, keepdim=True).sqrt_()
        near = conv2d(images, compare) / (lengths + self.soften).clamp_(min=1e-12)
        signed = ((near - self.threshold).clamp_(min=0), (-near - self.threshold).clamp_(min=0))
        return torch.cat([adaptive_avg_pool2d(one, self.grid) for one in signed], 1)

    def _filters(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(whitening (d, c, s, s), comparison with the atoms (atoms, c, s, s)); both centre a patch first."""
        channels = shape[0]
        patches = self._patches(shape)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        whitening = (vectors * (values.clamp(min=0) + FLOOR * values.mean()).rsqrt()) @ vectors.T
        atoms = patches[: self.atoms] @ whitening
        atoms /= atoms.norm(dim=1, keepdim=True)
        centred = whitening - whitening.mean(1, keepdim=True)  # W(I − 11ᵀ/d), W symmetric
        both = (centred, atoms @ centred)
        first, second = (one.float().reshape(len(one), channels, self.side, self.side).contiguous() for one in both)
        return first, second

    def _patches(self, shape: tuple[int, ...]) -> Tensor:
        """Patches (m, c·s·s) of synthetic pictures, centred and of length one, flat ones left out; m ≥ atoms."""
        generator = np.random.RandomState(SEED)
        images = pictures(PICTURES, shape, seed=SEED)
        rows, columns = (
            torch.from_numpy(generator.randint(0, side - self.side + 1, (PICTURES, EACH))) for side in shape[1:]
        )
        windows = images.unfold(2, self.side, 1).unfold(3, self.side, 1)  # a view: (n, c, h', w', s, s)
        found = windows[torch.arange(PICTURES)[:, None], :, rows, columns].flatten(0, 1).flatten(1).double()
        found -= found.mean(1, keepdim=True)
        lengths = found.norm(dim=1)
        found = found[lengths > lengths.median() / 2]
        order = torch.from_numpy(generator.permutation(len(found)))
        kept: Tensor = found[order] / found[order].norm(dim=1, keepdim=True)
        return kept

    def _check(self, images: Tensor) -> None:
        if images.dim() != 4:
            raise InputError(f"patches takes images (n, channels, height, width), not {tuple(images.shape)}")
        if not images.is_floating_point():
            raise InputError(f"patches takes floating-point images, not {images.dtype}; divide bytes by 255 first")
        if min(images.shape[2:]) - self.side + 1 < self.grid:
            raise InputError(
                f"patches: images of {images.shape[2]}×{images.shape[3]} have fewer than {self.grid} positions for "
                f"patches of {self.side} pixels in a direction: give a smaller side or grid"
            )
