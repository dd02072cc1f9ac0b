"""Random generators of Python and numpy in a pass: their states carry nothing from one pass to another.

A model may seed a generator with a value that it has read, or draw more numbers for one record than for another; a
later batch would draw other numbers then. So in every pass these generators begin with numbers of the run's own
randomness, and afterwards they are as they were before: ``random``, ``numpy.random``, and generators that the model
keeps. The checks of a pass begin with the same numbers as the pass. Torch's own generator is seeded in every step;
`renew` separates the chunks of one step.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sordino.randomness.masks import seed_masks

_numpys: Any = np.random  # its types lack the two functions that exchange the generator
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)


class Numbers:
    """The seeds of the passes of one training: another one for every chunk, and the same for its checks.

    needed: in the first pass, and later if any pass has drawn from these generators, has read values or knows the
    number of rows. Otherwise nothing can reach them, and to exchange them would take a hundredth of a small model's
    step.
    """

    def __init__(self) -> None:
        self.turns = 0
        self.seed = seed_of(0)
        self.needed = True
        self.read = False  # whether any pass has read values
        self._known = False

    def turn(self) -> None:
        """Called before a chunk's first pass."""
        self.turns += 1
        self.seed = seed_of(self.turns)

    def after(self, read: bool, sized: bool) -> None:
        """Called after a chunk's passes. read, sized: one of them has read values, or knows the number of rows."""
        self.read = self.read or read
        self.needed = self._known = self._known or read or sized

    @contextmanager
    def drawing(self, own: Sequence[Any]) -> Iterator[None]:
        """As `drawing`, with the present seed, if it is needed."""
        if not (self.needed or own):
            yield
            return
        with drawing(self.seed, own):
            before = None if self._known else _global_state()
            yield
            self._known = self._known or bool(own) or before != _global_state()


def seed_of(number: int) -> int:
    """From the seed of torch's generator, which is the run's secret, without drawing from it."""
    text = f"{torch.initial_seed()}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16, person=b"sordino/pass").digest(), "little")


def _global_state() -> Any:
    """The states of Python's and numpy's generators, in objects that `==` compares."""
    return random.getstate(), _comparable(np.random.get_state(legacy=False))  # noqa: NPY002 (users' code draws from it)


def _comparable(state: Any) -> Any:
    """The arrays in a state as bytes: to print their 624 numbers took as long as a small model's step."""
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


@contextmanager
def drawing(seed: int | None, own: Sequence[Any] = ()) -> Iterator[None]:
    """Within it, Python's and numpy's generators and `own` begin with the numbers of a seed; afterwards they are as
    before. Without a seed they are only put back."""
    python, numpys = random.getstate(), _numpys.get_bit_generator()
    states = [state_of(one) for one in own]
    ours = _spare.pop() if _spare else np.random.MT19937(0)
    try:
        if seed is None:
            ours.state = numpys.state if isinstance(numpys, np.random.MT19937) else ours.state
        else:
            random.seed(seed)
        _numpys.set_bit_generator(ours)
        if seed is not None:
            np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (what users' code draws from)
            for place, one in enumerate(own, 1):
                _reseed(one, seed + place)
        yield
    finally:
        _numpys.set_bit_generator(numpys)
        random.setstate(python)
        for one, state in zip(own, states, strict=True):
            _restore(one, state)
        _spare.append(ours)


_spare: list[Any] = []  # numpy takes long to make one


def is_generator(obj: Any) -> bool:
    """Has it a state of random numbers?"""
    return _is_kind(type(obj))  # type: ignore[arg-type]


@functools.lru_cache(1 << 12)
def _is_kind(kind: Any) -> bool:
    return issubclass(kind, GENERATORS) and not issubclass(kind, random.SystemRandom)


def state_of(one: Any) -> Any:
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, np.random.RandomState):
        return one.get_state(legacy=False)
    return (one.bit_generator if isinstance(one, np.random.Generator) else one).state


def _restore(one: Any, state: Any) -> None:
    if isinstance(one, random.Random):
        one.setstate(state)
    elif isinstance(one, (torch.Generator, np.random.RandomState)):
        one.set_state(state)
    else:
        (one.bit_generator if isinstance(one, np.random.Generator) else one).state = state


def _reseed(one: Any, seed: int) -> None:
    if isinstance(one, random.Random):
        one.seed(seed)
    elif isinstance(one, torch.Generator):
        one.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    elif isinstance(one, np.random.RandomState):
        one.set_state({**type(one._bit_generator)(seed).state, "has_gauss": 0, "gauss": 0.0})
    else:
        kind = one.bit_generator if isinstance(one, np.random.Generator) else one
        kind.state = type(kind)(seed).state


def renew(before: Any, number: int) -> None:
    """Called after a pass that read values: if it changed the state of torch's generator, the next pass begins with a
    state that depends on the run's seed and the number of the pass alone. before: the state before the pass."""
    if not torch.equal(torch.get_rng_state(), before):
        seed_masks(torch.initial_seed(), number)
