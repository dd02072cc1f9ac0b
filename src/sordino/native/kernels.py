"""Optional C kernels, used if a compiler was available at installation. Compared with the Python versions:

| loop            | replaces                               | its results                                              |
|-----------------|----------------------------------------|----------------------------------------------------------|
| `rounded_sum`   | `boxmuller.Pairs.single`, pass by pass | the same integers; both report what they can't decide     |
| `rounded_again` | `boxmuller.double`, pass by pass       | the same integers, likewise                               |
| `key_stream`    | OpenSSL's AES-256-CTR (`keystream`)    | the same bytes; it does not hold Python's global lock     |
| `squares`       | products in double, and their sums     | the same up to 2⁻¹⁷ (docs/guarantees/noise.md, section 6) |
| `scaled`        | a product, and another one for the sum | the same up to the rounding of double precision           |
| `gathered`      | a vector times a matrix, in double     | likewise                                                  |
| `scattered`     | torch's `index_add_`, in double        | likewise                                                  |
| `blocked`       | a product of matrices for each block   | the same up to the rounding of a block                    |
| `merged`        | a sort and sums of equal neighbours, in float32 | the same up to rounding                         |
| `placed`        | torch's `index_add_` in double, rounded once | the same up to the rounding of double precision    |
| `largest`       | a minimum and a maximum                | the same                                                  |
| `few_outputs`   | a linear map, and `squares` of its input | the same up to rounding, and 2⁻¹⁷ for the squares       |
| `patches`       | a contiguous copy of strided windows   | the same                                                  |
| `lstm_*`        | a loop over the steps of an LSTM       | the same up to 2⁻²¹ of each gate, or of 1, and rounding  |
| `products`      | a product for each record, and `squares` of it | the same up to the rounding of a record          |
| `maps`          | a linear map                           | the same up to rounding                                  |
| `grouped`       | short convolutions, and their sum      | the same up to rounding                                  |
| `depthwise`     | a convolution's gradient, one group for each channel of each record | the same up to rounding      |

`compiled()` is None without the library, and also if the library, tested on a block of digits, rounds differently from
exact arithmetic (a stale build, a broken compiler): then numpy is used. So the noise does not depend on whether the
library is present, only the time does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import math
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sordino.native.parts import Array, Pair, Parts, Room, Rules, kinds_of

if TYPE_CHECKING:
    from torch import Tensor

Window = tuple[Pair, Pair, Pair]  # stride, dilation, padding
EVERY = 1 << 40  # rows of a block that are summed together: all of them
FEW_OUTPUTS = 24  # up to this number `blocked` does not sum the records of a block separately
_SUFFIX = {4: "f32", 8: "f64"}  # by the bytes of a number


def readable(t: Tensor) -> bool:
    """Is it plain memory: not on a device, not a negated view, not an expanded tensor?"""
    return t.is_cpu and not t.is_neg() and (t.data_ptr() != 0 or t.numel() == 0)


class Kernels:
    """The functions of the library. Memory is passed by address; the caller guarantees its size and layout."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = library[name]
            found.argtypes, found.restype = arguments, result
            return found

        def functions(name: str, result: Any, *arguments: Any) -> dict[int, Any]:
            return {n: function(name.replace("*", suffix), result, *arguments) for n, suffix in _SUFFIX.items()}

        sizes, pointers = [c_int64] * 3, [c_void_p] * 3
        block = c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_uint64, *pointers, c_int64
        names = {(4, 4): "rounded_sum_f32", (8, 8): "rounded_sum_f64", (8, 4): "rounded_sum_f64_f32"}
        self._sums = {sizes_: function(name, c_int64, *block) for sizes_, name in names.items()}
        again = c_int64, c_void_p, c_int64, *pointers
        self._again = {sizes_: function(f"{name}_again", *again) for sizes_, name in names.items()}
        self.squares = functions("squares_*", None, c_void_p, *sizes, c_void_p, c_void_p)
        self.scaled = functions("scaled_*", None, c_void_p, *sizes, *pointers)
        self.gathered = functions("gathered_*", None, c_void_p, *sizes, c_void_p, c_void_p)
        self.scattered = functions("scattered_*", None, c_void_p, c_int64, c_int64, *pointers, c_void_p)
        self._merged = function("merged_f32", c_int64, *pointers, c_int64, c_int64, *pointers, c_void_p)
        self._placed = function("placed_f32", None, c_void_p, *sizes[:2], *pointers, c_int64, *pointers)
        self._blocked = function("block_sums_f32", None, *[c_void_p] * 8)
        self._room = function("blocked_room", c_int64, c_int64, c_int64)
        self._patches = functions("patches_*", None, c_void_p, c_void_p, c_int64, c_void_p)
        dots = c_void_p, *sizes, c_void_p, c_int64, c_void_p, c_void_p, c_void_p
        self.few_outputs = functions("few_outputs_*", None, *dots)
        self._depthwise = functions("depthwise_*", None, *pointers, c_int64, c_void_p, c_void_p)
        self._key_stream = function("key_stream", c_int32, c_char_p, c_uint64, c_int64, c_void_p)
        self._lstm = [function(f"lstm_{name}_f32", None, *[c_void_p] * 10) for name in ("forward", "backward")]
        self._lstm_room = function("lstm_room", c_int64, c_int64)
        self._products = function("products_f32", None, *pointers, *pointers, c_int32)
        self._products_room = function("products_room", c_int64, *sizes)
        self._maps = function("maps_f32", None, *pointers, *pointers, c_int32)
        self._maps_room = function("maps_room", c_int64)
        self.maps_pay = bool(function("maps_pay", c_int32)())
        self.grouped = function("grouped_f64", None, *[c_void_p] * 6)
        self._largest = functions("largest_*", c_double, c_void_p, c_int64)

    def rounded_sum(
        self, parts: Parts, results: Parts, start: int, n: int, rules: Rules, room: Room, address: int, count: int
    ) -> int:
        """results ← step · round(values/spacing + scale · Z), for a block: n values from `start` on among the parts.

        Cosines for its first half, sines for the second. `room` contains its words and the open pairs: `count`
        before the call, and the returned number after it. Their values are unchanged; the last pair of an odd number of
        values is always open. `address` is that of the first pair's digits. The results may overwrite the parts, or be
        narrower.
        """
        kinds, rest = kinds_of(parts, results), (rules.first_at, address, room.mask_at, room.open_at, room.counters_at)
        after: int = self._sums[kinds](parts.at, results.at, start, n, room.words_at, *rest, count)
        return after

    def rounded_again(self, kinds: Pair, further: bytes, rules: Rules, room: Room, count: int) -> int:
        """The same for the open pairs, with 32 further digits of U and of V at the beginning of each 16 bytes.

        kinds: as returned by `kinds_of`. Returns the number of pairs that are still open: `room.left` has their
        indices.
        """
        left: int = self._again[kinds](room.open_at, count, further, rules.second_at, room.left_at)
        return left

    def key_stream(self, key: bytes, first: int, words: npt.NDArray[np.uint64]) -> bool:
        """words ← AES-256-CTR under the key from its block number `first` on; False without the instructions for it."""
        if len(key) != 32 or not words.flags.c_contiguous:
            raise ValueError("a key of 32 bytes and contiguous words are needed")
        return bool(self._key_stream(key, first, words.nbytes, words.ctypes.data))

    def blocked(
        self,
        left: Pair,
        right: Pair,
        shape: Pair,
        bounds: Array,
        weights: Array,
        total: int,
        each: int = EVERY,
        narrow: bool = False,
    ) -> None:
        """total (p, q) += Σ_b weights_b · Σ_k left_k ⊗ right_k over the rows bounds_b ≤ k < bounds_(b+1), in float32.

        left and right: address and stride of the rows. Blocks are summed in double precision. each: this many rows of a
        block belong to one record and are summed first; only for p > FEW_OUTPUTS. narrow: the total is in float32 and
        is replaced by the sum over the blocks, rounded once; only for p > FEW_OUTPUTS.
        """
        sizes = array("q", [len(weights), *shape, left[1], right[1], each])
        room = np.empty(self._room(int(bounds[-1] - bounds[0]), shape[0]), np.float32)
        tables = sizes.buffer_info()[0], bounds.ctypes.data, weights.ctypes.data, room.ctypes.data
        self._blocked(left[0], right[0], *tables, *((0, total) if narrow else (total, 0)))

    def merged(self, rows: int, at: int, shape: Sequence[int], size: int, skip: int, found: Sequence[int]) -> int:
        """Sums the rows (m, S, d) of each record and place: values, places and owners go to the addresses `found`.

        rows, at: addresses of the rows and of their places, in a table of `size` rows; place `skip` is left out.
        Returns their number; −1 if a place is outside of the table.
        """
        sizes, last = array("q", shape), np.empty(size, np.int64)
        count: int = self._merged(rows, at, sizes.buffer_info()[0], size, skip, last.ctypes.data, *found)
        return count

    def placed(self, rows: int, shape: Sequence[int], place: int, owner: int, weight: int, total: Tensor) -> None:
        """total (size, d) ← Σ weight[owner_j] · rows_j by place_j, in double precision, rounded once to float32.

        rows, place, owner, weight: addresses. shape: of the rows, (n, d).
        """
        if bool(total.shape[1] != shape[1]) or not total.is_contiguous():
            raise ValueError("rows and total have different numbers of columns, or the total is not contiguous")
        room, sums = np.empty(len(total) + 1 + shape[0], np.int64), np.empty(shape[1])
        to = room.ctypes.data, sums.ctypes.data, total.data_ptr()
        self._placed(rows, *shape, place, owner, weight, len(total), *to)

    def products(
        self,
        left: int,
        right: int,
        shape: Sequence[int],
        strides: Sequence[int],
        out: int,
        norm2: int,
        narrow: bool = False,
    ) -> None:
        """out (n, p, q) ← Σ_k left_k ⊗ right_k for each record, in float32; norm2 (n) ← their squared norms, float64.

        left (n, S, p) and right (n, S, q) by address. shape: n, S, p, q. strides: three of left, the first two of
        right, whose third is 1. out: 0 if only the norms are needed. narrow: use vectors of 256 bits.
        """
        sizes = array("q", [*shape, *strides])
        room = np.empty(self._products_room(*shape[1:]), np.float32)
        self._products(left, right, sizes.buffer_info()[0], room.ctypes.data, out, norm2, narrow)

    def maps(self, x: int, matrix: int, bias: int, sizes: Sequence[int], out: int, narrow: bool = False) -> None:
        """out (n, q) ← x (n, p) · matrix (p, q) + bias, in float32, by address; bias may be 0.

        sizes: n, p, q, the strides of the rows of x and of the matrix, and whether the matrix is stored as (q, p).
        narrow: use vectors of 256 bits.
        """
        table, room = array("q", sizes), np.empty(self._maps_room(), np.float32)
        self._maps(x, matrix, bias, table.buffer_info()[0], room.ctypes.data, out, narrow)

    def lstm(
        self,
        backwards: bool,
        tensors: Sequence[int],
        sizes: Sequence[int],
        results: Sequence[int],
        narrow: bool = False,
    ) -> None:
        """All steps of an LSTM's forward or backward pass for some of its records, as lstm.c describes them.

        tensors and results by address. sizes: steps, records, hidden units, reversed, two strides, first, end.
        """
        table, room = array("q", [*sizes, narrow]), np.empty(self._lstm_room(sizes[2]), np.float32)
        self._lstm[backwards](*tensors, table.buffer_info()[0], room.ctypes.data, *results)

    def largest(self, parts: Parts) -> float:
        """The largest magnitude: NaN if there is one, 0 if there is none."""
        most: float = self._largest[parts.dtype.itemsize](parts.at, parts.count)
        return most

    def patches(self, images: Array, kernel: Pair, stride: Pair, dilation: Pair, out: Array) -> bool:
        """(n, C, H, W) → (n, places, C·kernel): the patch under the kernel at each position, written to `out`.

        False if the memory has an unsupported layout or another size: then nothing is written.
        """
        if images.dtype not in (np.float32, np.float64) or out.dtype != images.dtype:
            return False
        n, channels, *size = images.shape
        places = [(i - d * (k - 1) - 1) // t + 1 for i, k, t, d in zip(size, kernel, stride, dilation, strict=True)]
        fits = min(places) > 0 and out.size == n * places[0] * places[1] * channels * kernel[0] * kernel[1]
        if not (fits and images.flags.c_contiguous and out.flags.c_contiguous):
            return False
        shape = np.array([channels, *size, *kernel, *stride, *dilation, *places], np.int64)
        self._patches[images.itemsize](images.ctypes.data, out.ctypes.data, n, shape.ctypes.data)
        return True

    def depthwise(self, images: Array, gradients: Array, window: Window, out: Array) -> bool:
        """(m, S, C, H, W) and (m, S, C, places) → (m, C, kernel): per-record gradients of depthwise kernels.

        False if the memory has an unsupported layout or another size: then nothing is written.
        """
        if out.dtype not in (np.float32, np.float64) or not images.dtype == gradients.dtype == out.dtype:
            return False
        m, many, channels, *size = images.shape
        places, kernel, (stride, dilation, padding) = gradients.shape[3:], out.shape[2:], window
        fits = gradients.shape[:3] == (m, many, channels) and out.shape[:2] == (m, channels)
        ends = [s * (p - 1) + d * (k - 1) for s, p, d, k in zip(stride, places, dilation, kernel, strict=True)]
        inside = all(e < i + 2 * p for e, i, p in zip(ends, size, padding, strict=True))
        if not (fits and inside and all(a.flags.c_contiguous for a in (images, gradients, out))):
            return False
        shape = np.array([channels, *size, *kernel, *stride, *dilation, *places, *padding, many], np.int64)
        lanes = 64 // out.itemsize
        work = np.empty(lanes * (math.prod(size) + math.prod(places) + math.prod(kernel)), out.dtype)
        memory = images.ctypes.data, gradients.ctypes.data, out.ctypes.data
        self._depthwise[out.itemsize](*memory, m, shape.ctypes.data, work.ctypes.data)
        return True


@functools.cache
def compiled() -> Kernels | None:
    """The library, or None."""
    spec = importlib.util.find_spec("sordino.native._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        found = Kernels(spec.origin)
    except (OSError, AttributeError):
        return None
    return found if agrees(found) else None


# digest of the 8,192 sums that `trial` describes, rounded exactly (tests/native/test_kernels.py computes it)
_ROUNDED_EXACTLY = "f084a03fdfa140f0a266ab66d88b6e3c"


def trial(pairs: int = 4096) -> tuple[Array, Array, Array]:
    """Digits of U and V, further digits of both, and offsets, for a block on which a library is tested."""
    stream = hashlib.shake_128(b"sordino/kernels").digest(18 * pairs)
    digits = np.frombuffer(bytearray(stream[: 8 * pairs]), "<u4").reshape(2, pairs)
    digits[0, :2] = 0, (1 << 32) - 1  # never decided
    further = np.frombuffer(stream[8 * pairs : 16 * pairs], "<u4").reshape(2, pairs)
    return digits, further, np.frombuffer(stream[16 * pairs :], np.int8).astype(np.float32) / np.float32(256)


def agrees(kernels: Kernels) -> bool:
    """Does it round as exact arithmetic does, nearly always, and are the sums of the other loops correct?

    It is compared with known values, not with numpy, which would load a megabyte of functions that nothing else needs.
    """
    return _decides(kernels, *trial()) and _adds_up(kernels) and _encrypts(kernels)


# digest of blocks 0 to 36 of AES-256-CTR under the key 00 01 … 1f (tests/randomness/test_keystream.py: by OpenSSL)
_ENCRYPTED = "e6ce71feb7f998d541dd6a06d6f236c1"


def _encrypts(kernels: Kernels) -> bool:
    """Returns the same bytes as OpenSSL, if it has the instructions; in pieces that use all of its loops."""
    key, words = bytes(range(32)), np.zeros(74, np.uint64)
    for first, last in ((0, 33), (33, 37)):
        if not kernels.key_stream(key, first, words[2 * first : 2 * last]):
            return True
    return hashlib.blake2b(words.tobytes(), digest_size=16).hexdigest() == _ENCRYPTED


def _decides(kernels: Kernels, digits: Array, further: Array, values: Array) -> bool:
    pairs, rules = digits.shape[1], Rules(100.0, 1.0, 1.0)
    room, parts = Room(2 * pairs), Parts.of([values])
    room.words(pairs).view("<u4")[:] = digits.reshape(-1)
    count = kernels.rounded_sum(parts, parts, 0, 2 * pairs, rules, room, 0, 0)
    places, words = np.frombuffer(room.counters(count), np.int64)[::2], np.zeros((count, 4), "<u4")
    words[:, :2] = further[:, places].T
    left = kernels.rounded_again(kinds_of(parts, parts), words.tobytes(), rules, room, count)
    return (
        places[room.left(left)].tolist() == [0, 1]
        and count < 0.02 * pairs
        and hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest() == _ROUNDED_EXACTLY
    )


def _adds_up(kernels: Kernels) -> bool:
    """On small integers, for which all sums are exact."""
    n, columns, weights = 5, 150, [1.0, 2.0, 0.0, 0.5, 4.0]
    numbers = [[(7 * i + 3 * j) % 11 - 5.0 for j in range(columns)] for i in range(n)]
    rows, out = (array("f", [x for row in numbers for x in row]) for _ in range(2))
    weight = array("d", weights)
    squares, total, tiles, apart = (array("d", [0.0] * size) for size in (n, columns, columns**2, n * columns))
    room = rows, weight, squares, out, total, tiles, apart
    at, scales, to, product, sums, tiled, spread = (a.buffer_info()[0] for a in room)
    order = array("q", range(n))
    kernels.squares[4](at, n, columns, columns, scales, to)
    kernels.scaled[4](at, n, columns, columns, scales, product, sums)
    kernels.gathered[4](at, n, columns, columns, scales, sums)
    kernels.scattered[4](at, n, columns, order.buffer_info()[0], order.buffer_info()[0], scales, spread)
    scaled = [[w * x for x in row] for w, row in zip(weights, numbers, strict=True)]
    rows_of = np.array([0, 2, 2, 5], np.int64), np.array([1.0, 3.0, 2.0])
    kernels.blocked((product, columns), (at, columns), (columns, columns), *rows_of, tiled)
    gram, product_of, norm2 = array("f", [0.0] * n * n), array("f", [0.0] * columns**2), array("d", [0.0])
    kernels.maps(at, at, 0, (n, columns, n, columns, columns, 1), gram.buffer_info()[0])
    shape, strides = (1, n, columns, columns), (0, columns, 1, 0, columns)
    kernels.products(at, at, shape, strides, product_of.buffer_info()[0], norm2.buffer_info()[0])
    terms = [[row[0] * x for row, x in zip(scaled, column, strict=True)] for column in zip(*numbers, strict=True)]
    by_block = [sum(t[:2]) + 2 * sum(t[2:]) for t in terms]
    return (
        squares.tolist() == [w * sum(x * x for x in row) for w, row in zip(weights, numbers, strict=True)]
        and out.tolist() == [x for row in scaled for x in row]
        and total.tolist() == [2 * sum(column) for column in zip(*scaled, strict=True)]
        and tiles[:columns].tolist() == by_block
        and gram.tolist() == [sum(x * y for x, y in zip(a, b, strict=True)) for a in numbers for b in numbers]
        and product_of[:columns].tolist()
        == [sum(row[0] * x for row, x in zip(numbers, c, strict=True)) for c in zip(*numbers, strict=True)]
        and norm2[0] == sum(x * x for x in gram)
        and apart.tolist() == out.tolist()
        and kernels.largest(Parts.of([np.frombuffer(rows, np.float32)])) == 5.0
    )
