"""The reads from one stream of the generator (`source`): bits, subsets, and rounded sums with noise.

Distributions, up to the generator being ideal:

| call                    | law of the result                              | distance (total variation) |
|-------------------------|------------------------------------------------|----------------------------|
| bernoulli(p, n)         | ones with probability ⌊p·2⁶⁴⌋/2⁶⁴, never above p | < 2⁻⁶⁴ each, 0 for p = 0, 1 |
| below(bound, n)         | uniform on 0..bound−1                          | 0                          |
| permutation(n)          | uniform on all n! orders                       | 0                          |
| rounded_sum(x, s)       | round(x + s·Z), Z a real standard Gaussian     | < 2⁻¹⁰⁰ each               |
| rounded_mixture         | the same with Σ a·Z over several streams (`mixture`) | < 2⁻¹⁰⁰ each and term |
| rounded_normal(out, s)  | round(s·Z), Z a real standard Gaussian         | < 2⁻¹⁰⁰ each               |
| rounded_laplace(out, s) | round(s·L), L a real standard Laplace variable | < 2⁻¹⁰⁰ each               |

Nothing is said of time: the exact path of a rounding takes longer, see docs/guarantees/noise.md.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.errors import InputError
from sordino.native import boxmuller
from sordino.native.boxmuller import Pairs
from sordino.native.kernels import Kernels, Parts, Room, Rules, compiled, kinds_of
from sordino.native.threads import share
from sordino.randomness import skips
from sordino.randomness.exact import EXTRA_BITS, as_double, exact_exponential, exact_normal, fixed_normal
from sordino.randomness.keystream import Further, Keystream

# Words drawn at a time. A block stays in the cache, and torch does not split a tensor this small over threads:
# twenty barriers a block cost more than the arithmetic when the machine is busy.
_BLOCK = 1 << 15
_SPAN = 8  # blocks of a rounded sum that a thread takes at a time: about a millisecond
_rules = functools.lru_cache(Rules)  # a training asks for the same ones at each step
_KINDS: dict[int, Any] = {4: ctypes.c_float, 8: ctypes.c_double}  # numbers in memory, by their bytes
_MASK63 = np.uint64((1 << 63) - 1)

# Bounds of the part that double precision may decide, derived in docs/guarantees/noise.md section 3.
_TOLERANCE = 2.0**-45  # on the error of Z (or L) in double precision while log U stays in the ranges below
_NORMAL_LOGS = (-18 * math.log(2.0), -(2.0**-17))  # below, U's unknown digits matter; above, √ magnifies errors
_LAPLACE_LOGS = (-16 * math.log(2.0), math.inf)

NORMAL_SCALE = 2.0**28  # `normal` and `laplace` return multiples of 2⁻²⁸


class Stream:
    """Sequential reads from one stream; a result depends on the key and on the reads made before it."""

    def __init__(self, key: bytes, refine_key: bytes) -> None:
        self._key, self._refine_key = key, refine_key
        self._keystream = Keystream(key)
        self._work: _Work | None = None
        self._pairs: Pairs | None = None
        self._words = 0  # 64-bit words read so far: the address under which a draw finds its extra digits

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """What this stream is made of, for another process that draws a part of it. Secret."""
        return self._key, self._refine_key

    def skip_to(self, coordinate: int) -> None:
        """The next rounded sum begins at this coordinate of the stream's noise: a multiple of `boxmuller.BLOCK`."""
        if coordinate % boxmuller.BLOCK:
            raise InputError(f"noise is drawn in blocks of {boxmuller.BLOCK}, and {coordinate} begins none")
        self._words = coordinate // 2

    def bits64(self, n: int) -> npt.NDArray[np.uint64]:
        """n independent uniform 64-bit words."""
        words = np.empty(n, dtype="<u8")
        self._fill(words)
        return words.astype(np.uint64, copy=False)

    def _fill(self, words: npt.NDArray[np.uint64]) -> None:
        self._keystream.fill(words, self._words)
        self._words += len(words)

    def uniform(self, n: int) -> npt.NDArray[np.float64]:
        """n uniform midpoints (k + ½)·2⁻⁵²: strictly inside (0, 1)."""
        return ((self.bits64(n) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def bernoulli(self, p: float, n: int) -> npt.NDArray[np.bool_]:
        """n independent bits, each 1 with probability ⌊p·2⁶⁴⌋/2⁶⁴.

        A uniform 64-bit number is compared with ⌊p·2⁶⁴⌋; its last 48 bits are drawn only where the first 16
        leave the comparison open, which changes nothing in the law and saves three quarters of the work.
        """
        if not 0.0 <= p <= 1.0:
            raise InputError(f"a probability lies in [0, 1], got {p}")
        threshold = math.floor(Fraction(p) * 2**64)
        if threshold == 1 << 64:
            return np.ones(n, dtype=np.bool_)
        head, tail = threshold >> 48, threshold & ((1 << 48) - 1)
        first = self.bits64((n + 3) // 4).view("<u2")[:n]
        result = first < np.uint16(head)
        open_ = np.flatnonzero(first == np.uint16(head))
        result[open_] = (self.bits64(len(open_)) >> np.uint64(16)) < np.uint64(tail)
        return result

    def successes(self, rate: float, trials: int) -> npt.NDArray[np.int64]:
        """Where `bernoulli(rate, trials)` could be 1, by skipping from one success to the next (`skips`)."""

        def draw(n: int) -> tuple[npt.NDArray[np.uint64], Callable[[int], bytes]]:
            begin = self._words
            return self.bits64(n), lambda place: self._extra(begin + place, 1)

        return skips.successes(draw, rate, trials)

    def below(self, bound: int, n: int) -> npt.NDArray[np.int64]:
        """n independent integers, exactly uniform on 0..bound−1 (rejection of the incomplete last cycle)."""
        if not 1 <= bound <= 1 << 63:
            raise InputError(f"below() needs a bound between 1 and 2⁶³, got {bound}")
        last = np.uint64((1 << 64) - 1 - (1 << 64) % bound)
        words = self.bits64(n)
        rejected = np.flatnonzero(words > last)
        while len(rejected):
            words[rejected] = self.bits64(len(rejected))
            rejected = rejected[words[rejected] > last]
        return (words % np.uint64(bound)).astype(np.int64)

    def permutation(self, n: int) -> npt.NDArray[np.int64]:
        """A uniform order of 0..n−1: the ranks of n random words, drawn again as a whole if two are equal.

        Given that the words differ, every order is equally likely, so the result is exactly uniform.
        """
        while True:
            words = self.bits64(n)
            order = np.argsort(words)
            ranked = words[order]
            if not np.any(ranked[1:] == ranked[:-1]):
                return order.astype(np.int64)

    def subset(self, n: int, size: int) -> npt.NDArray[np.int64]:
        """A uniform subset of 0..n−1, sorted: the first `size` distinct values of a uniform sequence."""
        if not 0 <= size <= n:
            raise InputError(f"a subset of {size} out of {n} does not exist")
        wanted = min(size, n - size)  # the complement of a uniform subset is one
        chosen = np.empty(0, dtype=np.int64)
        while len(chosen) < wanted:
            chosen = np.union1d(chosen, self.below(n, wanted - len(chosen)))
        if wanted == size:
            return chosen
        keep = np.ones(n, dtype=np.bool_)
        keep[chosen] = False
        return np.flatnonzero(keep)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard Gaussians, rounded to multiples of 2⁻²⁸ and then once to `dtype`."""
        return self._standard(self.rounded_normal, shape, dtype)

    def laplace(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard Laplace variables (scale 1, variance 2), rounded to multiples of 2⁻²⁸ and then once."""
        return self._standard(self.rounded_laplace, shape, dtype)

    def _standard(self, draw: Callable[[Tensor, float], None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            raise InputError(f"noise has a floating-point type, got {dtype}")
        result = torch.empty(tuple(shape), dtype=dtype)
        flat = result.view(-1)
        work = torch.empty(min(flat.numel(), _BLOCK), dtype=torch.float64)
        for start in range(0, flat.numel(), _BLOCK):
            part = flat[start : start + _BLOCK]
            noise = work[: part.numel()]
            draw(noise, NORMAL_SCALE)
            part.copy_(noise.mul_(1.0 / NORMAL_SCALE))
        return result

    def rounded_sum(self, values: Tensor, scale: float, spacing: float = 1.0) -> None:
        """values ← spacing · round(values/spacing + scale · Z), in place, with independent Z.

        `values` is float32 or float64 of one dimension, contiguous; `spacing` a power of two. The integers are exact:
        the nearest integer of values/spacing and that of (the rest + scale · Z) are added in the dtype, so that a sum
        beyond its 24 or 53 bits is the true integer rounded once. Zero is always +0. The Z of a coordinate depends on
        its place alone, not on the values nor on their dtype.
        """
        if not values.is_contiguous():
            raise InputError("a rounded sum is made in place: give contiguous values")
        parts = Parts.of([values.numpy()])
        self.rounded_sum_of(parts, parts, scale, spacing)

    def rounded_sum_of(self, parts: Parts, results: Parts, scale: float, spacing: float, factor: float = 1.0) -> None:
        """results ← factor · spacing · round(values/spacing + scale · Z): the values are those of the parts, in a row.

        The results may be the parts. They are of their dtype, or float32 where that is float64: then every result is
        rounded once more, after the noise. Otherwise as `rounded_sum`.
        """
        if not 1.0 <= scale <= boxmuller.MAX_SCALE:
            raise InputError(f"a rounded sum needs a scale (noise over grid) between 1 and 2¹², got {scale}")
        narrower = parts.dtype == np.float64 and results.dtype == np.float32
        if parts.size != results.size or not (narrower or parts.dtype == results.dtype):
            raise InputError("a rounded sum has as many results as values, of their dtype or of a narrower one")
        kernels = compiled()
        if kernels is not None:
            self._sum_by_loops(kernels, parts, results, _rules(scale, spacing, spacing * factor))
            return
        flat = parts.joined()
        with np.errstate(divide="ignore", invalid="ignore"):  # U = 0: the exact path takes its place
            blocks = range(0, len(flat), boxmuller.BLOCK)
            undecided = [self._sum_block(flat, start, scale, spacing, spacing * factor) for start in blocks]
            if any(len(part.addresses) for part in undecided):
                self._refine(flat, _Open.joined(undecided), scale, spacing, spacing * factor)
        results.store(flat)

    def _sum_by_loops(self, kernels: Kernels, parts: Parts, results: Parts, rules: Rules) -> None:
        """Blocks in threads: which thread works on a block changes none of its digits, and so no result."""
        begin, span, kinds = self._words, _SPAN * boxmuller.BLOCK, kinds_of(parts, results)

        def make() -> Callable[[int], None]:
            room, keystream = Room(min(parts.size, boxmuller.BLOCK)), Keystream(self._key)
            further = Further(self._refine_key)

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
        self._words = begin + (parts.size + 1) // 2

    def _decide(
        self, kernels: Kernels, kinds: tuple[int, int], rules: Rules, room: Room, more: Further, count: int
    ) -> None:
        """The pairs that the first stage left open: in double precision, and exactly where that is not enough."""
        counters = room.counters(count)
        further = more.digits(counters)
        left = kernels.rounded_again(kinds, further, rules, room, count)
        for i in room.left(left):
            here = slice(16 * i, 16 * i + 8)
            self._settle(
                kinds, room.open(count)[i], int.from_bytes(counters[here], sys.byteorder), further[here], rules
            )

    def _settle(self, kinds: tuple[int, int], pair: Any, address: int, further: bytes, rules: Rules) -> None:
        """One pair that is open after both stages, exactly."""
        dtype = np.dtype(_KINDS[kinds[0]])
        values = [_KINDS[kinds[0]].from_address(at).value for at in pair["values"].tolist() if at]
        places = [_KINDS[kinds[1]].from_address(at) for at in pair["results"].tolist() if at]
        scaled = np.array(values, dtype) * dtype.type(1.0 / rules.spacing)
        whole = np.rint(scaled)
        offsets = [*(scaled - whole).tolist(), 0.0]  # the last sine of an odd block has no coordinate
        digits = np.array([[pair["u"]], [pair["v"]]])
        u, v = boxmuller.extended(digits, np.frombuffer(further, "<u4")[:, None])
        rounded = exact_normal(int(u[0]), int(v[0]), self._extra(address, 2), rules.scale, (offsets[0], offsets[1]))
        whole += np.array(rounded[: len(places)], dtype)
        whole += 0
        for place, value in zip(places, (whole * dtype.type(rules.step)).tolist(), strict=True):
            place.value = value

    def _sum_block(self, flat: npt.NDArray[Any], start: int, scale: float, spacing: float, step: float) -> _Open:
        """Cosines for the first half of the block, sines for the second; one too many is lost."""
        values = flat[start : start + boxmuller.BLOCK]
        pairs = (len(values) + 1) // 2
        if self._pairs is None or len(self._pairs.words) != pairs or self._pairs.whole.dtype != values.dtype:
            self._pairs = Pairs(pairs, values.dtype)
        work = self._pairs
        address = self._words
        self._fill(work.words)
        slots = _by_passes(values, work, scale, spacing, step)
        return _Open(address + slots, slots + np.array([[start], [start + pairs]]), work.digits[:, slots])

    def _refine(self, flat: npt.NDArray[Any], pairs: _Open, scale: float, spacing: float, step: float) -> None:
        """Decides the pairs: with 32 further digits each in double precision, then with 128 more exactly."""
        counters = np.zeros((len(pairs.addresses), 2), "<u8")
        counters[:, 0] = pairs.addresses
        words = np.frombuffer(Further(self._refine_key).digits(counters.tobytes()), dtype="<u4").reshape(-1, 4)
        u, v = boxmuller.extended(pairs.digits, words[:, :2].T)
        scaled = flat.take(pairs.places, mode="clip") * flat.dtype.type(1.0 / spacing)
        whole = np.rint(scaled)
        offset = (scaled - whole).astype(np.float64)  # exact, in [−½, ½]
        rounded, undecided = boxmuller.double(u, v, offset, scale)
        for i in undecided:
            extra = self._extra(int(pairs.addresses[i]), 2)
            offsets = float(offset[0, i]), float(offset[1, i])
            rounded[:, i] = exact_normal(int(u[i]), int(v[i]), extra, scale, offsets)
        whole += rounded.astype(flat.dtype)
        whole += 0
        whole *= step
        inside = pairs.places < len(flat)  # the last sine of an odd block has no coordinate
        flat[pairs.places[inside]] = whole[inside]

    def work_in(self, other: Stream) -> None:
        """Uses the memory that another stream works in, if it has some; what that one computed there is overwritten."""
        self._work = other._work

    def gaussians(self, n: int) -> Gaussians:
        """The next n Gaussians: in double precision, and exactly where that is asked for."""
        pairs = (n + 1) // 2
        block = Gaussians(self, self._words, pairs, n)
        self._words += 2 * pairs
        return block

    def rounded_normal(self, out: Tensor, scale: float) -> None:
        """Fill `out` (float64, contiguous, one dimension) with independent integers round(scale · Z)."""
        self._rounded(self._normal_block, out, scale)

    def rounded_laplace(self, out: Tensor, scale: float) -> None:
        """Fill `out` (float64, contiguous, one dimension) with independent integers ±round(scale · E)."""
        self._rounded(self._laplace_block, out, scale)

    def _rounded(self, block: Callable[[Tensor, float], None], out: Tensor, scale: float) -> None:
        if not 1.0 <= scale <= 2.0**40:
            raise InputError(f"rounded noise needs a scale (noise over grid) between 1 and 2⁴⁰, got {scale}")
        for start in range(0, out.numel(), _BLOCK):
            block(out[start : start + _BLOCK], scale)

    def _normal_block(self, out: Tensor, scale: float) -> None:
        """Box–Muller: cosines into the first half of `out`, sines into the second; one too many is lost."""
        pairs = (out.numel() + 1) // 2
        work = self._workspace(2 * pairs)
        address = self._words
        self._fill(work.words)
        work.first_words &= _MASK63
        log_u = work.log.copy_(work.first).mul_(2.0**-63).log_()  # U ∈ (u, u+1)·2⁻⁶³
        slow = _outside(log_u, _NORMAL_LOGS)
        radius = log_u.mul_(-2.0 * scale * scale).sqrt_()  # scale · √(−2 ln U)
        angle = work.right.copy_(work.second).mul_(2.0 * math.pi * 2.0**-64)  # V ∈ (v, v+1)·2⁻⁶⁴ ⊂ [−½, ½]
        torch.cos(angle, out=work.left).mul_(radius)
        angle.sin_().mul_(radius)
        z, signed = work.z, work.signed
        rounded = torch.round(z, out=out if out.numel() == 2 * pairs else torch.empty_like(z))
        undecided = _undecided(z, rounded, scale)
        result = rounded.numpy()
        for i in {*slow.tolist(), *(undecided % pairs).tolist()}:
            extra = self._extra(address + i, 2)
            cos, sin = exact_normal(int(signed[i]), int(signed[pairs + i]), extra, scale)
            result[i], result[pairs + i] = cos, sin
        if rounded is not out:
            out.copy_(rounded[: out.numel()])

    def _laplace_block(self, out: Tensor, scale: float) -> None:
        work = self._workspace(out.numel())
        address = self._words
        words = work.words
        self._fill(words)
        sign = words & ~_MASK63
        words &= _MASK63
        z = work.z.copy_(torch.from_numpy(work.signed)).mul_(2.0**-63).log_()
        slow = _outside(z, _LAPLACE_LOGS)
        rounded = torch.round(z.mul_(-scale), out=out)
        undecided = _undecided(z, rounded, scale)
        result = rounded.numpy()
        for i in {*slow.tolist(), *undecided.tolist()}:
            result[i] = exact_exponential(int(words[i]), self._extra(address + i, 1), scale)
        result.view(np.uint64)[...] |= sign  # the sign bit of a double sits where that of the word was

    def _workspace(self, n: int) -> _Work:
        if self._work is None or len(self._work.words) != n:
            self._work = _Work(n)
        return self._work

    def _extra(self, address: int, words: int) -> bytes:
        """The further digits of the draw at this address, from a key of their own."""
        size = words * EXTRA_BITS // 8
        return hashlib.blake2b(address.to_bytes(16, "little"), digest_size=size, key=self._refine_key).digest()


class Gaussians:
    """A block of Gaussians of a stream: cosines in the first half, sines in the second; one too many is lost."""

    def __init__(self, stream: Stream, address: int, pairs: int, count: int) -> None:
        self._stream, self._address, self._pairs, self._count = stream, address, pairs, count

    def values(self) -> npt.NDArray[np.float64]:
        """Each within 2⁻⁴⁵ of the real number; extreme draws are made exactly."""
        work = self._stream._workspace(2 * self._pairs)
        self._stream._keystream.fill(work.words, self._address)
        work.first_words &= _MASK63
        log_u = work.log.copy_(work.first).mul_(2.0**-63).log_()  # U ∈ (u, u+1)·2⁻⁶³
        slow = _outside(log_u, _NORMAL_LOGS)
        radius = log_u.mul_(-2.0).sqrt_()
        angle = work.right.copy_(work.second).mul_(2.0 * math.pi * 2.0**-64)  # V ∈ (v, v+1)·2⁻⁶⁴ ⊂ [−½, ½]
        torch.cos(angle, out=work.left).mul_(radius)
        angle.sin_().mul_(radius)
        found: npt.NDArray[np.float64] = work.z.numpy()[: self._count]
        for i in slow.tolist():
            for place in (i, i + self._pairs):
                if place < self._count:
                    found[place] = as_double(self.exactly(place))
        return found

    def exactly(self, place: int) -> int:
        """One of them in the fixed point of `exact.fixed_normal`."""
        i = place % self._pairs
        digits = np.empty(2, dtype="<u8")
        for row, at in enumerate((i, self._pairs + i)):
            self._stream._keystream.fill(digits[row : row + 1], self._address + at)
        u, v = int(digits[0] & _MASK63), int(digits[1:].view("<i8")[0])
        return fixed_normal(u, v, self._stream._extra(self._address + i, 2))[place // self._pairs]


class _Open(NamedTuple):
    """Pairs that single precision left undecided, and their values as they were."""

    addresses: npt.NDArray[np.intp]
    places: npt.NDArray[np.intp]  # of the cosines, of the sines
    digits: npt.NDArray[np.uint32]  # of U, of V

    @classmethod
    def joined(cls, parts: Sequence[_Open]) -> _Open:
        return (
            parts[0] if len(parts) == 1 else cls(*(np.concatenate(rows, axis=-1) for rows in zip(*parts, strict=True)))
        )


def _by_passes(
    values: npt.NDArray[Any], work: Pairs, scale: float, spacing: float, step: float
) -> npt.NDArray[np.intp]:
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


class _Work:
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


def _outside(log_u: Tensor, bounds: tuple[float, float]) -> npt.NDArray[np.intp]:
    """Where U is too small, or too close to 1, for double precision."""
    values = log_u.numpy()  # numpy compares doubles several times faster than torch does
    return np.flatnonzero((values < bounds[0]) | (values > bounds[1]))


def _undecided(z: Tensor, rounded: Tensor, scale: float) -> npt.NDArray[np.intp]:
    """Where z lies so close to a half-integer that its error may change the rounding. Overwrites z."""
    return np.flatnonzero(z.sub_(rounded).abs_().numpy() > 0.5 - scale * _TOLERANCE)
