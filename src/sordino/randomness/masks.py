"""Seeds torch's generator with the run's secret randomness, for dropout masks and whatever else a model draws.

On the CPU `torch.manual_seed` uses only 32 bits of its seed, so an adversary could try all of them and learn the masks.
Therefore the whole state of the generator (a Mersenne Twister of 624 words) is derived from all bits of the seed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from sordino.errors import SordinoError

_BYTES, _FIRST, _WORDS = 5056, 24, 624  # size of torch's state; offset and number of the twister's words in it


def seed_masks(seed: int, number: int = 0) -> None:
    """Seeds torch's CPU generator with all bits of a seed, and the generators of other devices as torch does.

    Args:
        seed: From 0 to 2^63 − 1; `torch.initial_seed` returns it afterwards.
        number: Each has other masks; those of other devices are the same.
    """
    if not _processor_alone():
        torch.manual_seed(seed)
    state = _seeded().clone()
    values = state.numpy()
    values[:8].view(np.uint64)[0] = seed
    text = f"sordino/masks/{seed}/{number}" if number else f"sordino/masks/{seed}"
    drawn = hashlib.shake_256(text.encode()).digest(4 * _WORDS)
    values[_FIRST : _FIRST + 8 * _WORDS].view(np.uint64)[:] = np.frombuffer(drawn, dtype="<u4")
    torch.set_rng_state(state)


def _processor_alone() -> bool:
    """Whether the CPU has the only generator to seed. `torch.manual_seed` takes long to find that out."""
    return _built_alone() and _own_device() == "privateuseone"


@functools.cache
def _built_alone() -> bool:
    others = (torch.version.cuda, torch.version.hip, getattr(torch.version, "xpu", None))
    return not any(others) and not torch.backends.mps.is_built()


def _own_device() -> str:
    """The name of the custom device registered with torch; "privateuseone" if there is none."""
    return str(torch._C._get_privateuse1_backend_name())


@functools.cache
def _seeded() -> Tensor:
    """The state of a generator that was seeded and has drawn nothing yet."""
    state = torch.Generator().manual_seed(0).get_state()
    if state.numel() != _BYTES:
        raise SordinoError(f"torch {torch.__version__} stores its random state in a format that sordino does not know")
    return state


@contextmanager
def masks_of(seed: int) -> Iterator[None]:
    """Seeds torch's generator for the block, and restores its previous state afterwards.

    Args:
        seed: As for `seed_masks`.
    """
    before = torch.get_rng_state()
    try:
        seed_masks(seed)
        yield
    finally:
        torch.set_rng_state(before)
