"""round(x + scale · Σ_j a_j·Z_j) for real Gaussians Z_j, each a function of its own stream: rounded once, exactly.

Formal contract. Coordinate i of a stream defines one real Gaussian Z_j(i) by its infinite sequence of digits, the same
for every call. The sum is computed in double precision with an error bound that holds for all digits not drawn yet; if
the bound leaves one nearest integer, that is the result. Otherwise every Z_j of the coordinate is computed with 384
further digits and the sum is taken in 448-bit fixed point, with each coefficient as the exact value of its double
(docs/guarantees/noise.md, section 2). So the result is the integer of the real sum up to a total variation of 2⁻²⁶⁰ for
each of its terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sordino.randomness.exact import rounded_total

if TYPE_CHECKING:
    from sordino.randomness.stream import Stream

Array = npt.NDArray[np.float64]
BLOCK = 1 << 15
TOLERANCE = 2.0**-45  # error of one Z in double precision, except for extreme draws, which are computed exactly


def rounded_mixture(
    values: Sequence[npt.NDArray[np.floating]],
    out: npt.NDArray[np.floating],
    terms: Sequence[tuple[float, Stream]],
    scale: float,
    spacing: float,
    factor: float = 1.0,
) -> None:
    """out ← factor · spacing · round(values/spacing + scale · Σ a·Z), block by block.

    Args:
        values: vectors that are processed as one, in this order.
        out: a vector as long as all of them; float32 is rounded once more, after the noise.
        terms: (a, stream) of each Gaussian; the streams are at their beginning.
        scale: the scale of the noise, in units of the grid.
        spacing: the grid, a power of two.
        factor: a public number by which the result is multiplied.
    """
    weight = sum(abs(a) for a, _ in terms)
    # |Z| < 25: p products and p sums, each rounded by 2⁻⁵³ of at most 25·Σ|a|; then the factor and the offset
    tolerance = scale * weight * (TOLERANCE + (len(terms) + 3) * 2.0**-47) + 2.0**-50
    for start, part in _blocks(values):
        part *= 1.0 / spacing
        whole = np.rint(part)
        offset = part - whole  # exact, in [−½, ½]
        total = np.zeros(len(part))
        drawn = []
        for a, stream in terms:
            stream.work_in(terms[0][1])
            block = stream.gaussians(len(part))
            total += a * block.values()
            drawn.append((a, block))
        total *= scale
        total += offset
        rounded = np.rint(total)
        for i in np.flatnonzero(np.abs(total - rounded) > 0.5 - tolerance).tolist():
            rounded[i] = rounded_total([(a, block.exactly(i)) for a, block in drawn], scale, float(offset[i]))
        whole += rounded
        whole += 0.0  # the sum of two negative zeros would reveal the sign of the value
        out[start : start + len(part)] = whole * (spacing * factor)


def _blocks(values: Sequence[npt.NDArray[np.floating]]) -> Iterator[tuple[int, Array]]:
    """(position, a copy of up to BLOCK numbers) one after another, across the vectors, without a copy of the whole."""
    work, filled, place = np.empty(BLOCK), 0, 0
    for vector in values:
        start = 0
        while start < len(vector):
            count = min(BLOCK - filled, len(vector) - start)
            work[filled : filled + count] = vector[start : start + count]
            filled, start = filled + count, start + count
            if filled == BLOCK:
                yield place, work
                place, filled = place + BLOCK, 0
    if filled:
        yield place, work[:filled]
