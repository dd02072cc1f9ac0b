"""Public randomness addressed by a row's content: digests of rows, and the SplitMix64 sequences that start from them.

A record's views and companions are drawn from a sequence that depends on its own content, the public seed and the step
(Steele, Lea and Flood 2014). If it were addressed by the record's position in the dataset, removing one record would
redraw those of all later ones, and the sum would change by more than one record's contribution. None of it is secret.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.gradients.rows import tensors

Words = npt.NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment


def digests(inputs: Any, rows: int) -> Words:
    """(rows,) a 64-bit digest of each row's content.

    Equal content gives equal digests. Different rows may have equal digests: they would share the randomness of their
    views, which affects no bound, so the hash does not have to be collision-resistant.
    """
    total = np.zeros(rows, dtype=np.uint64)
    for number, t in enumerate(tensors(inputs)):
        if t.ndim and t.shape[0] == rows and t.numel():
            raw = t.detach().contiguous().cpu().numpy().reshape(rows, -1).view(np.uint8)
            wide = raw.shape[1] % 4 == 0
            words = raw.view(np.uint32) if wide else raw
            odd = mixed(np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _STEP + np.uint64(number)) | np.uint64(1)
            total = mixed(total + (words * odd).sum(1, dtype=np.uint64))
    return total


def mixed(z: Words) -> Words:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every output bit depends on every input bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Words = z ^ (z >> np.uint64(31))
    return found


def start(digest: Words, purpose: str, seed: int, step: int) -> Words:
    """The start of each row's sequence: a function of its digest, the purpose, the seed and the step."""
    name = hashlib.blake2b(f"sordino/{purpose}/{seed}/{step}".encode(), digest_size=8).digest()
    return mixed(digest + np.frombuffer(name, dtype="<u8")[0])


def sequence(begin: Words, length: int) -> Words:
    """(rows, length) the next words of each row's sequence."""
    return mixed(begin[:, None] + np.arange(1, length + 1, dtype=np.uint64) * _STEP)


def uniforms(begin: Words, views: int, draws: int) -> npt.NDArray[np.float64]:
    """(rows, views, draws) numbers uniform on [0, 1): the row's sequence, cut into views."""
    words = sequence(begin, views * draws)
    return ((words >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(len(begin), views, draws)
