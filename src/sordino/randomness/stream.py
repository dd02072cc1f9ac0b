"""Draws from one stream of the generator (`source`): bits, subsets, Gaussian and Laplace noise, rounded sums.

Distributions, given an ideal generator:

| call                    | law of the result                              | distance (total variation) |
|-------------------------|------------------------------------------------|----------------------------|
| bernoulli(p, n)         | ones with probability ⌊p·2⁶⁴⌋/2⁶⁴, never above p | < 2⁻⁶⁴ each, 0 for p = 0, 1 |
| below(bound, n)         | uniform on 0..bound−1                          | 0                          |
| permutation(n)          | uniform on all n! orders                       | 0                          |
| rounded_sum(x, s)       | round(x + s·Z), Z a real standard Gaussian     | < 2⁻²⁶⁰ each               |
| rounded_mixture         | the same with Σ a·Z over several streams (`mixture`) | < 2⁻²⁶⁰ each and term |
| rounded_normal(out, s)  | round(s·Z), Z a real standard Gaussian         | < 2⁻²⁶⁰ each               |
| rounded_laplace(out, s) | round(s·L), L a real standard Laplace variable | < 2⁻²⁶⁰ each               |

Running time is not constant: a rounding that is decided exactly takes longer (docs/guarantees/noise.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.errors import InputError
from sordino.native import boxmuller
from sordino.native.parts import Parts
from sordino.randomness import skips
from sordino.randomness.exact import as_double, exact_exponential, exact_normal, fixed_normal
from sordino.randomness.keystream import Keystream, extra_digits
from sordino.randomness.rounded_sum import RoundedSum

# Words drawn at a time. A block fits in the cache, and torch does not split a tensor this small over threads:
# on a busy machine twenty thread barriers a block cost more than the arithmetic.
_BLOCK = 1 << 15
_MASK63 = np.uint64((1 << 63) - 1)

# Where double precision may decide a rounding; derived in docs/guarantees/noise.md, section 3.
_TOLERANCE = 2.0**-45  # bound on the error of Z (or L) in double precision while log U is in the ranges below
_NORMAL_LOGS = (-18 * math.log(2.0), -(2.0**-17))  # below, U's undrawn digits matter; above, √ magnifies errors
_LAPLACE_LOGS = (-16 * math.log(2.0), math.inf)

NORMAL_SCALE = 2.0**28  # `normal` and `laplace` return multiples of 2⁻²⁸


class Stream:
    """Sequential draws from one stream; a result depends on the key and on the draws before it."""

    def __init__(self, key: bytes, refine_key: bytes) -> None:
        self._key, self._refine_key = key, refine_key
        self._keystream = Keystream(key)
        self._work: _Work | None = None
        self._words = 0  # 64-bit words drawn so far; also the address of a draw's extra digits

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The keys that define this stream, for another process that draws a part of it. Secret."""
        return self._key, self._refine_key

    def skip_to(self, coordinate: int) -> None:
        """Lets the next rounded sum begin at this coordinate of the noise, a multiple of `boxmuller.BLOCK`."""
        if coordinate % boxmuller.BLOCK:
            raise InputError(f"noise is drawn in blocks of {boxmuller.BLOCK}, and no block begins at {coordinate}")
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

        A uniform 64-bit number is compared with ⌊p·2⁶⁴⌋. Its last 48 bits are drawn only if the first 16 do not decide
        the comparison, which leaves the distribution unchanged and saves three quarters of the work.
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
        """The indices of the ones of `trials` Bernoulli(rate) bits, found by skipping to each success (`skips`)."""

        def draw(n: int) -> tuple[npt.NDArray[np.uint64], Callable[[int], bytes]]:
            begin = self._words
            return self.bits64(n), lambda place: self._extra(begin + place, 1)

        return skips.successes(draw, rate, trials)

    def below(self, bound: int, n: int) -> npt.NDArray[np.int64]:
        """n independent integers, exactly uniform on 0..bound−1 (words of the incomplete last cycle are rejected)."""
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
        """A uniform permutation of 0..n−1: the ranks of n random words, all drawn again if two are equal.

        Given that the words differ, all orders are equally likely, so the result is exactly uniform.
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
            raise InputError(f"a subset of {n} elements can't have {size} elements")
        wanted = min(size, n - size)  # the complement of a uniform subset is uniform too
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
        """Standard Laplace variables (scale 1, variance 2), rounded to multiples of 2⁻²⁸ and then once to `dtype`."""
        return self._standard(self.rounded_laplace, shape, dtype)

    def _standard(self, draw: Callable[[Tensor, float], None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            raise InputError(f"the dtype of noise must be a floating-point type, got {dtype}")
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

        `values` is float32 or float64, one-dimensional and contiguous; `spacing` is a power of two. The integers are
        exact: the integer nearest to values/spacing and the integer nearest to (remainder + scale · Z) are added in the
        dtype, so a sum beyond 24 or 53 bits is the true integer rounded once. Zero is always +0. The Z of a coordinate
        depends on its place only, not on the values or their dtype.
        """
        if not values.is_contiguous():
            raise InputError("a rounded sum overwrites its values: they must be contiguous")
        parts = Parts.of([values.numpy()])
        self.rounded_sum_of(parts, parts, scale, spacing)

    def rounded_sum_of(self, parts: Parts, results: Parts, scale: float, spacing: float, factor: float = 1.0) -> None:
        """results ← factor · spacing · round(values/spacing + scale · Z), with the values of `parts` in a row.

        `results` may be `parts`. It has the same dtype, or float32 where `parts` is float64; then every result is
        rounded once more, after the noise. Otherwise as `rounded_sum`.
        """
        if not 1.0 <= scale <= boxmuller.MAX_SCALE:
            raise InputError(f"a rounded sum needs a scale (noise over grid) between 1 and 2¹², got {scale}")
        narrower = parts.dtype == np.float64 and results.dtype == np.float32
        if parts.size != results.size or not (narrower or parts.dtype == results.dtype):
            raise InputError("a rounded sum needs as many results as values, of the same or a narrower dtype")
        RoundedSum(self._key, self._refine_key).store(parts, results, self._words, scale, spacing, factor)
        self._words += (parts.size + 1) // 2

    def work_in(self, other: Stream) -> None:
        """Uses the memory that another stream works in, if it has some; what that one computed there is overwritten."""
        self._work = other._work

    def gaussians(self, n: int) -> Gaussians:
        """The next n Gaussians, available in double precision and in exact fixed point."""
        pairs = (n + 1) // 2
        block = Gaussians(self, self._words, pairs, n)
        self._words += 2 * pairs
        return block

    def rounded_normal(self, out: Tensor, scale: float) -> None:
        """Fills `out` (float64, contiguous, one-dimensional) with independent integers round(scale · Z)."""
        self._rounded(self._normal_block, out, scale)

    def rounded_laplace(self, out: Tensor, scale: float) -> None:
        """Fills `out` (float64, contiguous, one-dimensional) with independent integers ±round(scale · E)."""
        self._rounded(self._laplace_block, out, scale)

    def _rounded(self, block: Callable[[Tensor, float], None], out: Tensor, scale: float) -> None:
        if not 1.0 <= scale <= 2.0**40:
            raise InputError(f"rounded noise needs a scale (noise over grid) between 1 and 2⁴⁰, got {scale}")
        for start in range(0, out.numel(), _BLOCK):
            block(out[start : start + _BLOCK], scale)

    def _normal_block(self, out: Tensor, scale: float) -> None:
        """Box–Muller: cosines into the first half of `out`, sines into the second; for odd sizes one is discarded."""
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
        result.view(np.uint64)[...] |= sign  # the sign bit of a double is the top bit of its word

    def _workspace(self, n: int) -> _Work:
        if self._work is None or len(self._work.words) != n:
            self._work = _Work(n)
        return self._work

    def _extra(self, address: int, words: int) -> bytes:
        return extra_digits(self._refine_key, address, words)


class Gaussians:
    """A block of Gaussians of a stream: cosines in the first half, sines in the second; one is discarded if odd."""

    def __init__(self, stream: Stream, address: int, pairs: int, count: int) -> None:
        self._stream, self._address, self._pairs, self._count = stream, address, pairs, count

    def values(self) -> npt.NDArray[np.float64]:
        """Doubles within 2⁻⁴⁵ of the real Gaussians; extreme draws are computed exactly."""
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
        """One of the Gaussians, in the fixed point of `exact.fixed_normal`."""
        i = place % self._pairs
        digits = np.empty(2, dtype="<u8")
        for row, at in enumerate((i, self._pairs + i)):
            self._stream._keystream.fill(digits[row : row + 1], self._address + at)
        u, v = int(digits[0] & _MASK63), int(digits[1:].view("<i8")[0])
        return fixed_normal(u, v, self._stream._extra(self._address + i, 2))[place // self._pairs]


class _Work:
    """Buffers for a block of n words and views into them, reused for all blocks of this size."""

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
    """The indices where U is too small, or too close to 1, for double precision."""
    values = log_u.numpy()  # NumPy compares doubles several times faster than torch
    return np.flatnonzero((values < bounds[0]) | (values > bounds[1]))


def _undecided(z: Tensor, rounded: Tensor, scale: float) -> npt.NDArray[np.intp]:
    """The indices where z is so close to a half-integer that its error may change the rounding. Overwrites z."""
    return np.flatnonzero(z.sub_(rounded).abs_().numpy() > 0.5 - scale * _TOLERANCE)
