"""Items of a map-style dataset: is each of them its own record's?

`__getitem__` is the user's code. If an item depends on other records, one record changes the rows of many, and no
clipping of rows bounds that. Tested before training:

- items are read again in the reverse order, and must be the same. Otherwise they depend on what was read before: a
  counter, a running statistic, memory that items share. Containers to which the first reading added something (a
  vocabulary that grows, a cache) are as before it;
- items are read from datasets that lack the last record, or the second half of them, and must be the same. Otherwise
  they depend on the number of records, on statistics over all of them, or on other records (mixup, triplets, windows
  that overlap). Such a dataset is made where records are entries of lists, arrays, tensors or data frames that the
  dataset, or one inside it, has as attributes, also within tuples, lists and dicts. Where that can't be done, or where
  reading from it fails, nothing is known.

Not seen: what was computed from all records before, such as a mean that `__init__` has stored. That is as if the rows
had been given in that form: such statistics must be public or released (docs/threat-model.md).
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients.rows import tensors

_READ = 8  # items that are read again
_DEEPEST = 4  # datasets inside of datasets
_GROWING = 1 << 16  # entries of containers that may grow
_PARTS = 64  # containers with an entry for each column

OTHERWISE = (
    "so one record changes the rows of others. Make __getitem__ a function of its own record; random numbers may be "
    "drawn from torch's, numpy's or Python's global generator, which are seeded for every item, with num_workers=0"
)


def same(one: Any, other: Any) -> bool:
    """Whether two items have the same tensors; NaN equals NaN."""
    pairs = list(tensors(one)), list(tensors(other))
    return len(pairs[0]) == len(pairs[1]) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(*pairs, strict=True)
    )


class ReadOtherwise(Refused):
    """An item was read again in the same step and was another one."""


def read_otherwise() -> ReadOtherwise:
    """The error, with its message."""
    return ReadOtherwise(
        "an item of the dataset is another one when it is read again in the same step: it depends on what was read "
        "before (a counter, a running statistic, memory that items share) or on random numbers that several "
        f"threads draw from one generator, {OTHERWISE}"
    )


def refuse_dependent_items(dataset: Any, count: int, read: Any) -> None:
    """Tests some items of a map-style dataset.

    Args:
        dataset: The dataset.
        count: The number of its records.
        read: Makes of a dataset the function that reads items by their places: `records.reading.items_reader`.

    Raises:
        Refused: an item depends on what was read before it, or on other records.
    """
    if not count:
        return
    places = sorted({0, count - 1, *(secrets.randbelow(count) for _ in range(_READ - 2))})
    items, before = read(dataset), _containers(dataset)
    found = items(places)
    _put_back(before)
    if not all(map(same, reversed(found), items(places[::-1]))):
        raise read_otherwise()
    for kept in {count - 1, count // 2} - {0}:
        _put_back(before)
        shorter = _shortened(dataset, count, kept, _DEEPEST)
        if shorter is None:
            continue
        places = sorted({0, kept - 1, *(secrets.randbelow(kept) for _ in range(_READ - 2))})
        found = items(places)
        _put_back(before)
        try:
            fewer = read(shorter)(places)
        except Exception:  # it can't be shortened in this way
            continue
        if not all(map(same, found, fewer)):
            raise Refused(
                "an item of the dataset is another one if other records are missing: it depends on their number, on "
                "statistics over all of them, or on other records (mixup, a triplet, a window that overlaps with the "
                f"next), {OTHERWISE}. Statistics must be public, or released (`first`)"
            )


def _containers(dataset: Any) -> list[tuple[Any, Any]]:
    """(a dict, list or set that the dataset or one inside of it has as an attribute, a copy), unless it is large."""
    found: list[tuple[Any, Any]] = []
    waiting, seen = [dataset], set()
    while waiting:
        here = waiting.pop()
        seen.add(id(here))
        for value in list(getattr(here, "__dict__", {}).values()):
            if isinstance(value, (dict, list, set)) and len(value) <= _GROWING:
                found.append((value, copy.copy(value)))
            elif _length(value) is not None and hasattr(value, "__dict__") and id(value) not in seen:
                waiting.append(value)
    return found


def _put_back(before: list[tuple[Any, Any]]) -> None:
    """Takes out what was added since."""
    for value, copied in before:
        if len(value) != len(copied):
            value.clear()
            value.extend(copied) if isinstance(value, list) else value.update(copied)


def _shortened(dataset: Any, count: int, kept: int, depth: int) -> Any:
    """A copy whose lists, arrays and tensors of `count` entries have the first `kept` of them; None if it has none.

    Entries keep their places, so a dataset that also finds something by an index is not harmed.
    """
    attributes = getattr(dataset, "__dict__", None)
    if not attributes or depth == 0:
        return None
    changed = _shorter_parts(attributes, count, kept, depth)
    if not changed:
        return None
    try:
        made = object.__new__(type(dataset))
    except TypeError:  # not a class of Python's own
        return None
    made.__dict__.update(attributes | changed)
    return made


def _shorter_parts(parts: Mapping[Any, Any], count: int, kept: int, depth: int) -> dict[Any, Any]:
    """Those of the parts that have an entry for each record, shortened."""
    found = {key: _shorter(value, count, kept, depth) for key, value in parts.items()}
    return {key: value for key, value in found.items() if value is not None}


def _shorter(value: Any, count: int, kept: int, depth: int) -> Any:
    entries = value.shape[0] if getattr(value, "ndim", 0) else _length(value)
    if type(value) in (list, tuple, np.ndarray) or isinstance(value, Tensor):
        if entries == count:
            return value[:kept]
    elif entries == count and hasattr(value, "iloc"):  # a data frame
        return value.iloc[:kept]
    elif entries == count and hasattr(value, "__getitem__"):
        return _shortened(value, count, kept, depth - 1)
    if type(value) in (list, tuple, dict) and 0 < len(value) <= _PARTS and depth:  # (inputs, targets), {"x": …}
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        changed = {**parts, **found} if (found := _shorter_parts(parts, count, kept, depth - 1)) else None
        return changed if changed is None or isinstance(value, dict) else type(value)(changed.values())
    return None


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # it has none, or can't tell
        return None
