"""Datasets whose items are drawn at random (augmentation in `__getitem__`): each record has its own random draws.

Formal property. What `ItemReader` returns for record i at step t is a function of the record, i and t, whatever else is
in its batch: torch's, numpy's and Python's generators are seeded by (t, i) before each item is read. The seeds are
public; no guarantee depends on their secrecy. Otherwise removing a record from a batch would shift the draws of all
later records, and for an adversary who knows the generators' seeds the sum would change by more than one clip norm.

A dataset with its own generator is refused: it can't be seeded record by record.
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

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_DEEPEST = 6  # depth to which a dataset's attributes are searched: transforms in lists in wrappers
_WIDEST = 1000  # number of entries of a list that are searched: further ones are data

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
        """The items of these records at this step."""
        if self._workers:
            with ThreadPoolExecutor(self._workers) as pool:
                return list(pool.map(self._item, places))
        before = _state()
        try:
            if not self._random:
                items = [self._item(place) for place in places]
                if _same(before, _state()):
                    return items
                self._random = True
            return [self._drawn(place, step) for place in places]
        finally:
            _restore(before)

    def _drawn(self, place: int, step: int) -> Any:
        """One item, after all generators were seeded for it."""
        address = hashlib.blake2b(f"{step}/{place}".encode(), digest_size=16, person=b"sordino/rows").digest()
        seed_masks(int.from_bytes(address[:8], "little") >> 1)
        np.random.seed(int.from_bytes(address[8:12], "little"))  # noqa: NPY002 (what users' code draws from)
        random.seed(address)
        return self._item(place)


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
