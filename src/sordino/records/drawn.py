"""Datasets whose items are drawn at random (augmentation in `__getitem__`): each record has its own random draws.

Formal property. Before each item is read, torch's, numpy's and Python's generators are seeded by the step's secret seed
(that of dropout masks, `randomness.masks`), the step and the item's place. So the draws of records are independent and
identically distributed, and whatever else is in the batch does not change them. They must be secret: a place is not the
record's own, because removing an earlier record shifts it, and with seeds that everybody knows all later records would
have other draws (a record moved the sum by 5.9 clip norms). With secret ones the two runs are compared with every
record keeping its draws, as with dropout (docs/guarantees/clipping_bias.md).

A dataset with its own generator is refused: it can't be seeded record by record. In every step one of 16 items is read
again and must be the same: items must not depend on what was read before (`items.py`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.errors import Refused
from sordino.randomness.masks import seed_masks
from sordino.records.items import read_otherwise, same

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_DEEPEST = 6  # depth to which a dataset's attributes are searched: transforms in lists in wrappers
_WIDEST = 1000  # number of entries of a list that are searched: further ones are data
_AGAIN = 16  # of so many items one is read again

State = tuple[Tensor, Any, Any]


class ItemReader:
    """Reads a dataset's items, with `workers` threads if there are any."""

    def __init__(self, dataset: Any, workers: int = 0) -> None:
        if _owns(dataset, _DEEPEST, set()):
            raise Refused(
                "the dataset has its own generator of random numbers: its items depend on how many were read "
                "before, so one record changes the rows of others. Draw from torch's, numpy's or Python's global "
                "generator in __getitem__ (each record then gets its own draws), or leave augmentation to the "
                "plan's views"
            )
        self._item, self._workers = dataset.__getitem__, workers
        self._random = False  # until it is seen to draw random numbers

    def __call__(self, places: list[int], step: int) -> list[Any]:
        """The items of these records at this step.

        Raises:
            Refused: an item is another one when it is read again.
        """
        items = self._read(places, step)
        again = [at for at, place in enumerate(places) if _hashed(f"again/{step}/{place}")[0] < 256 // _AGAIN]
        for at, found in zip(reversed(again), self._read([places[at] for at in reversed(again)], step), strict=True):
            if not same(items[at], found):
                raise read_otherwise()
        return items

    def _read(self, places: list[int], step: int) -> list[Any]:
        if self._workers:
            with ThreadPoolExecutor(self._workers) as pool:
                return list(pool.map(self._item, places))
        before, secret = _state(), torch.initial_seed()
        try:
            if not self._random:
                items = [self._item(place) for place in places]
                if _same(before, _state()):
                    return items
                self._random = True
            return [self._drawn(place, step, secret) for place in places]
        finally:
            _restore(before)

    def _drawn(self, place: int, step: int, secret: int) -> Any:
        """One item, after all generators were seeded for it."""
        address = _hashed(f"{secret}/{step}/{place}")
        seed_masks(int.from_bytes(address[:8], "little") >> 1)
        np.random.seed(int.from_bytes(address[8:12], "little"))  # noqa: NPY002 (what users' code draws from)
        random.seed(address)
        return self._item(place)


def _hashed(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"sordino/rows").digest()


def refuse_drawn(dataset: Any, places: list[int]) -> None:
    """Raises Refused if these items are drawn at random: threads that read them would share one generator."""
    before = _state()
    try:
        for place in places:
            dataset[place]
        drawn = not _same(before, _state())
    finally:
        _restore(before)
    if drawn:
        raise Refused(
            "the dataset draws its items at random, and threads that read them would share one generator: give "
            "num_workers=0, or leave augmentation to the plan's views"
        )


def _owns(value: Any, depth: int, seen: set[int]) -> bool:
    """Whether it is a generator, or contains one."""
    if isinstance(value, _GENERATORS):
        return True
    if depth == 0 or id(value) in seen or isinstance(value, (Tensor, np.ndarray, str, bytes, type)):
        return False
    seen.add(id(value))
    if isinstance(value, Mapping):
        held: Any = value.values()
    else:
        held = value if isinstance(value, (list, tuple, set)) else getattr(value, "__dict__", {}).values()
    return any(_owns(entry, depth - 1, seen) for entry in list(islice(held, _WIDEST)))


def _state() -> State:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def _same(one: State, other: State) -> bool:
    (_, words, place, *_), (_, again, there, *_) = one[1], other[1]
    return torch.equal(one[0], other[0]) and place == there and np.array_equal(words, again) and one[2] == other[2]


def _restore(state: State) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    random.setstate(state[2])
