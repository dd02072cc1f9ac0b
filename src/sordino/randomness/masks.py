"""The run's secret randomness in torch's generator, for dropout masks and whatever else a model draws.

`torch.manual_seed` keeps 32 bits of its seed on the processor: whoever tries all of them knows the masks. So the whole
state of the generator (a Mersenne Twister of 624 words) is filled, from all bits of the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from sordino.errors import SordinoError

_BYTES, _FIRST, _WORDS = 5056, 24, 624  # of torch's state, and where in it the words of the twister are


def seed_masks(seed: int) -> None:
    """Seeds torch's generator on the processor with all 64 bits of a seed.

    Args:
        seed: From 0 to 2^64 − 1; `torch.initial_seed` tells it afterwards.
    """
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    if state.numel() != _BYTES:
        raise SordinoError(f"torch {torch.__version__} keeps its random state in another way than sordino knows")
    drawn = hashlib.shake_256(f"sordino/masks/{seed}".encode()).digest(4 * _WORDS)
    words = np.frombuffer(drawn, dtype="<u4").astype(np.uint64)
    state.numpy()[_FIRST : _FIRST + 8 * _WORDS].view(np.uint64)[:] = words
    torch.set_rng_state(state)


@contextmanager
def masks_of(seed: int) -> Iterator[None]:
    """Inside, models draw what follows from the seed; afterwards torch's generator is what it was.

    Args:
        seed: As for `seed_masks`.
    """
    with torch.random.fork_rng(devices=[]):
        seed_masks(seed)
        yield
