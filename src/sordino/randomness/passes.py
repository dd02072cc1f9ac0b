"""What the draws of a stream work in, and the passes of numpy over a block of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.native.boxmuller import Pairs

TOLERANCE = 2.0**-45  # on the error of Z (or L) in double precision, in the ranges of log U of docs/guarantees/noise.md


class Open(NamedTuple):
    """Pairs that single precision left undecided, and their values as they were."""

    addresses: npt.NDArray[np.intp]
    places: npt.NDArray[np.intp]  # of the cosines, of the sines
    digits: npt.NDArray[np.uint32]  # of U, of V

    @classmethod
    def joined(cls, parts: Sequence[Open]) -> Open:
        return (
            parts[0] if len(parts) == 1 else cls(*(np.concatenate(rows, axis=-1) for rows in zip(*parts, strict=True)))
        )


def by_passes(values: npt.NDArray[Any], work: Pairs, scale: float, spacing: float, step: float) -> npt.NDArray[np.intp]:
    """values ← step · round(values/spacing + scale · Z), but for the pairs returned, which stay as they were."""
    n, kind = len(values), values.dtype.type
    np.multiply(values, kind(1.0 / spacing), out=values)
    whole = np.rint(values, out=work.whole[:n])
    offset = np.subtract(values, whole, out=values)  # exact, in [−½, ½]
    slots = work.single(offset, scale)
    places = np.concatenate([slots, slots[slots < n - len(work.words)] + len(work.words)])
    left = (whole[places] + offset[places]) * kind(spacing)  # exact again
    np.add(whole, work.rounded[:n], out=values)
    np.add(values, kind(0), out=values)  # two negative zeros would tell the sign of the value
    np.multiply(values, kind(step), out=values)
    values[places] = left
    return slots


class Work:
    """The buffers of a block of n words and the views into them, made once for all blocks of this size."""

    def __init__(self, n: int) -> None:
        half = n // 2
        self.words = np.empty(n, dtype="<u8")
        self.signed = self.words.view("<i8")
        self.first_words = self.words[:half]
        self.first, self.second = torch.from_numpy(self.signed[:half]), torch.from_numpy(self.signed[half:])
        self.log = torch.empty(half, dtype=torch.float64)
        self.z = torch.empty(n, dtype=torch.float64)
        self.left, self.right = self.z[:half], self.z[half:]


def outside(log_u: Tensor, bounds: tuple[float, float]) -> npt.NDArray[np.intp]:
    """Where U is too small, or too close to 1, for double precision."""
    values = log_u.numpy()  # numpy compares doubles several times faster than torch does
    return np.flatnonzero((values < bounds[0]) | (values > bounds[1]))


def undecided_of(z: Tensor, rounded: Tensor, scale: float) -> npt.NDArray[np.intp]:
    """Where z lies so close to a half-integer that its error may change the rounding. Overwrites z."""
    return np.flatnonzero(z.sub_(rounded).abs_().numpy() > 0.5 - scale * TOLERANCE)
