"""spacing · round(values/spacing + scale · Z): Gaussian noise added to values and rounded as the real sum would be.

Single precision decides nearly every rounding. Where its error bound leaves two integers possible, double precision
with 32 further random digits decides; where that is not enough, fixed-point arithmetic with 384 further digits does
(`exact`; docs/guarantees/noise.md). The C kernels and the NumPy code return the same bits. The Z of a coordinate
depends on the stream's keys and its address only: not on the values, their dtype, or the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sordino.native import boxmuller
from sordino.native.boxmuller import Pairs
from sordino.native.kernels import Kernels, compiled
from sordino.native.parts import Parts, Room, Rules, kinds_of
from sordino.native.threads import share
from sordino.randomness.exact import exact_normal
from sordino.randomness.keystream import Further, Keystream, extra_digits

_SPAN = 8  # blocks of a rounded sum that a thread takes at a time: about a millisecond
_rules = functools.lru_cache(Rules)  # training asks for the same ones at each step
_KINDS: dict[int, Any] = {4: ctypes.c_float, 8: ctypes.c_double}  # floats in memory, by their size in bytes


@dataclass(frozen=True)
class RoundedSum:
    """The rounded sums of one stream.

    Args:
        key: The key of the stream's words.
        refine_key: The key of the further digits.
    """

    key: bytes
    refine_key: bytes

    def store(
        self, parts: Parts, results: Parts, begin: int, scale: float, spacing: float, factor: float = 1.0
    ) -> None:
        """results ← factor · spacing · round(values/spacing + scale · Z), with the values of `parts` in a row.

        Args:
            parts: The values.
            results: Where the results go; may be `parts`.
            begin: The address of the first pair of Gaussians, in 64-bit words of the stream.
            scale: The standard deviation of the noise in grid units.
            spacing: The grid, a power of two.
            factor: A public number that the results are multiplied by.
        """
        kernels = compiled()
        if kernels is not None:
            self._by_kernels(kernels, parts, results, begin, _rules(scale, spacing, spacing * factor))
            return
        flat = parts.joined()
        step = spacing * factor
        with np.errstate(divide="ignore", invalid="ignore"):  # U = 0 gives infinities, which the exact path replaces
            undecided = self._blocks(flat, begin, scale, spacing, step)
            if any(len(part.addresses) for part in undecided):
                self._refine(flat, _Open.joined(undecided), scale, spacing, step)
        results.store(flat)

    def _by_kernels(self, kernels: Kernels, parts: Parts, results: Parts, begin: int, rules: Rules) -> None:
        """By the C kernels, in threads. A block's digits do not depend on the thread that computes it."""
        span, kinds = _SPAN * boxmuller.BLOCK, kinds_of(parts, results)

        def make() -> Callable[[int], None]:
            room, keystream = Room(min(parts.size, boxmuller.BLOCK)), Keystream(self.key)
            further = Further(self.refine_key)

            def work(piece: int) -> None:
                count, last = 0, min((piece + 1) * span, parts.size)
                for start in range(piece * span, last, boxmuller.BLOCK):
                    n, address = min(boxmuller.BLOCK, last - start), begin + start // 2
                    if count > room.ready:
                        self._decide(kernels, kinds, rules, room, further, count)
                        count = 0
                    keystream.fill(room.words((n + 1) // 2), address)
                    count = kernels.rounded_sum(parts, results, start, n, rules, room, address, count)
                if count:
                    self._decide(kernels, kinds, rules, room, further, count)

            return work

        share(make, -(-parts.size // span))

    def _decide(
        self, kernels: Kernels, kinds: tuple[int, int], rules: Rules, room: Room, more: Further, count: int
    ) -> None:
        """Decides the pairs that single precision left open: in double precision, then exactly."""
        counters = room.counters(count)
        further = more.digits(counters)
        left = kernels.rounded_again(kinds, further, rules, room, count)
        for i in room.left(left):
            here = slice(16 * i, 16 * i + 8)
            self._settle(
                kinds, room.open(count)[i], int.from_bytes(counters[here], sys.byteorder), further[here], rules
            )

    def _settle(self, kinds: tuple[int, int], pair: Any, address: int, further: bytes, rules: Rules) -> None:
        """Decides exactly one pair that double precision left open."""
        dtype = np.dtype(_KINDS[kinds[0]])
        values = [_KINDS[kinds[0]].from_address(at).value for at in pair["values"].tolist() if at]
        places = [_KINDS[kinds[1]].from_address(at) for at in pair["results"].tolist() if at]
        scaled = np.array(values, dtype) * dtype.type(1.0 / rules.spacing)
        whole = np.rint(scaled)
        offsets = [*(scaled - whole).tolist(), 0.0]  # the last sine of an odd block has no coordinate
        digits = np.array([[pair["u"]], [pair["v"]]])
        u, v = boxmuller.extended(digits, np.frombuffer(further, "<u4")[:, None])
        extra = extra_digits(self.refine_key, address, 2)
        rounded = exact_normal(int(u[0]), int(v[0]), extra, rules.scale, (offsets[0], offsets[1]))
        whole += np.array(rounded[: len(places)], dtype)
        whole += 0
        for place, value in zip(places, (whole * dtype.type(rules.step)).tolist(), strict=True):
            place.value = value

    def _blocks(self, flat: npt.NDArray[Any], begin: int, scale: float, spacing: float, step: float) -> list[_Open]:
        """Adds noise block by block in single precision: cosines in a block's first half, sines in its second.

        Returns:
            The undecided pairs of each block, whose values are left as they were.
        """
        keystream, work, found = Keystream(self.key), None, []
        for start in range(0, len(flat), boxmuller.BLOCK):
            values = flat[start : start + boxmuller.BLOCK]
            pairs, address = (len(values) + 1) // 2, begin + start // 2
            if work is None or len(work.words) != pairs:
                work = Pairs(pairs, values.dtype)
            keystream.fill(work.words, address)
            slots = _by_passes(values, work, scale, spacing, step)
            found.append(_Open(address + slots, slots + np.array([[start], [start + pairs]]), work.digits[:, slots]))
        return found

    def _refine(self, flat: npt.NDArray[Any], pairs: _Open, scale: float, spacing: float, step: float) -> None:
        """Decides the pairs: with 32 further digits each in double precision, then with 384 more exactly."""
        counters = np.zeros((len(pairs.addresses), 2), "<u8")
        counters[:, 0] = pairs.addresses
        words = np.frombuffer(Further(self.refine_key).digits(counters.tobytes()), dtype="<u4").reshape(-1, 4)
        u, v = boxmuller.extended(pairs.digits, words[:, :2].T)
        scaled = flat.take(pairs.places, mode="clip") * flat.dtype.type(1.0 / spacing)
        whole = np.rint(scaled)
        offset = (scaled - whole).astype(np.float64)  # exact, in [−½, ½]
        rounded, undecided = boxmuller.double(u, v, offset, scale)
        for i in undecided:
            extra = extra_digits(self.refine_key, int(pairs.addresses[i]), 2)
            offsets = float(offset[0, i]), float(offset[1, i])
            rounded[:, i] = exact_normal(int(u[i]), int(v[i]), extra, scale, offsets)
        whole += rounded.astype(flat.dtype)
        whole += 0
        whole *= step
        inside = pairs.places < len(flat)  # the last sine of an odd block has no coordinate
        flat[pairs.places[inside]] = whole[inside]


class _Open(NamedTuple):
    """Pairs of Gaussians whose rounding single precision could not decide."""

    addresses: npt.NDArray[np.intp]
    places: npt.NDArray[np.intp]  # coordinates of the cosines and of the sines
    digits: npt.NDArray[np.uint32]  # first digits of U and of V

    @classmethod
    def joined(cls, parts: Sequence[_Open]) -> _Open:
        return (
            parts[0] if len(parts) == 1 else cls(*(np.concatenate(rows, axis=-1) for rows in zip(*parts, strict=True)))
        )


def _by_passes(
    values: npt.NDArray[Any], work: Pairs, scale: float, spacing: float, step: float
) -> npt.NDArray[np.intp]:
    """values ← step · round(values/spacing + scale · Z), except for the returned pairs, which keep their values."""
    n, kind = len(values), values.dtype.type
    np.multiply(values, kind(1.0 / spacing), out=values)
    whole = np.rint(values, out=work.whole[:n])
    offset = np.subtract(values, whole, out=values)  # exact, in [−½, ½]
    slots = work.single(offset, scale)
    places = np.concatenate([slots, slots[slots < n - len(work.words)] + len(work.words)])
    left = (whole[places] + offset[places]) * kind(spacing)  # exactly the values before
    np.add(whole, work.rounded[:n], out=values)
    np.add(values, kind(0), out=values)  # turns −0 into +0: the sum of two −0 would reveal the sign of the value
    np.multiply(values, kind(step), out=values)
    values[places] = left
    return slots
