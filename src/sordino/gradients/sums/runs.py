"""Blocks of records that do not change when a record is removed, so that they may be summed in single precision.

The rounding of a sum in single precision depends on all of its terms. If a batch were cut every 64 records, removing
one record would shift all later ones, and so change the rounding of all blocks: by up to N · 2⁻¹⁷ clip norms for N
records. So blocks are defined by the records' numbers in the data set, their keys: a block consists of the batch's
records in one of the ranges [j·2^k, (j+1)·2^k), the largest ranges with at most `most` records. Removing a record
changes one block or merges two blocks; all others stay the same (docs/guarantees/noise.md, section 6).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

RUN = 64  # records in a block: its rounding stays below 64² · 2⁻²⁴ = 2⁻¹² clip norms


def stable(keys: npt.NDArray[Any] | Sequence[int], most: int = RUN) -> npt.NDArray[np.int64]:
    """The bounds of the blocks, from 0 to the number of keys. Keys are non-negative integers in increasing order."""
    checked = np.asarray(keys, np.int64)
    if len(checked) and (checked[0] < 0 or bool((checked[1:] <= checked[:-1]).any())):
        raise ValueError("the records' keys must be sorted and distinct")
    if len(checked) <= most:
        return np.array([0, len(checked)] if len(checked) else [0], np.int64)
    numbers: list[int] = checked.tolist()  # a search in a list takes a tenth of the time of one in an array
    bounds, top = [0], numbers[-1].bit_length()
    waiting = [(0, len(numbers), 0, top)]  # from, to, first key of the range, its bits
    while waiting:
        lo, hi, first, bits = waiting.pop()
        if hi - lo <= most:
            if hi > lo:
                bounds.append(hi)
            continue
        middle = first + (1 << (bits - 1))
        cut = bisect_left(numbers, middle, lo, hi)
        waiting += [(cut, hi, middle, bits - 1), (lo, cut, first, bits - 1)]
    return np.array(bounds, np.int64)
