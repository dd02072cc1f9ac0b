"""A text as the set of its words, hashed: a public function of one text at a time, so it has no privacy cost.

A vocabulary or frequencies counted from private texts would be a release. So a word's index and sign are its CRC-32
(feature hashing, Weinberger et al. 2009), which depends on no text. A word that occurs k times counts k^power. Frequent
words carry little information; with `ranks` = a, a word is weighted by a/(a + f) (Arora, Liang and Ma 2017), where
f = 0.1/rank is Zipf's law and the rank is that of GloVe's word list, which was counted in public text; words that are
not in the list have weight 1. The vector is scaled to length one; a text without words gives zeros.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sordino.errors import InputError
from sordino.features.minilm import decode

ZIPF = 0.1
"""The share of the most frequent word in running text, by Zipf's law for English."""
_WORD = re.compile(r"[a-z0-9']+|[!?]")


@dataclass(frozen=True)
class WordBag:
    """Texts as bytes (n, bytes) → (n, dimensions), each of length one.

    Attributes:
        dimensions: the number of indices that words are hashed to.
        power: the exponent of a word's count; 0: each word counts once.
        weights: word → factor; a word that is not in it has factor one.
    """

    dimensions: int = 8192
    power: float = 0.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.dimensions
        if not isinstance(size, int) or isinstance(size, bool) or not 2 <= size <= 2**20:
            raise InputError(f"features 'word-bag': dimensions must be an integer from 2 to {2**20}, not {size!r}")
        if isinstance(self.power, bool) or not isinstance(self.power, int | float) or not 0 <= self.power <= 4:
            raise InputError(f"features 'word-bag': power must be a number from 0 to 4, not {self.power!r}")

    def __call__(self, texts: Tensor) -> Tensor:
        places: dict[str, tuple[int, float]] = {}
        at: list[int] = []
        factors: list[float] = []
        counted: list[int] = []
        for row, text in enumerate(decode(texts)):
            counts = Counter(_WORD.findall(text.lower()))
            for word in counts.keys() - places.keys():
                places[word] = self._place(word)
            start = row * self.dimensions
            for word, count in counts.items():
                place, factor = places[word]
                at.append(start + place)
                factors.append(factor)
                counted.append(count)
        out = torch.zeros(len(texts), self.dimensions)
        values = torch.tensor(factors, dtype=torch.float32) * torch.tensor(counted, dtype=torch.float32) ** self.power
        out.view(-1).index_add_(0, torch.tensor(at, dtype=torch.int64), values)
        return normalize(out, dim=1)

    def _place(self, word: str) -> tuple[int, float]:
        """(index, signed factor): the hash's highest bit is the sign, the rest is the index."""
        hashed = zlib.crc32(word.encode())
        sign = 1.0 if hashed >> 31 else -1.0
        return (hashed & 0x7FFFFFFF) % self.dimensions, sign * self.weights.get(word, 1.0)


def entries(features: Tensor) -> Tensor:
    """(n, d) → (3, entries) of int32: row, column and the bits of every number that is not zero, for the cache."""
    rows, columns = features.nonzero(as_tuple=True)
    bits = features[rows, columns].view(torch.int32)
    return torch.stack([rows.to(torch.int32), columns.to(torch.int32), bits])


def whole(found: Tensor, rows: int, dimensions: int) -> Tensor:
    """The matrix (rows, dimensions) whose `entries` are these, bit for bit."""
    out = torch.zeros(rows, dimensions)
    out[found[0].long(), found[1].long()] = found[2].contiguous().view(torch.float32)
    return out


def by_rank(ids: Mapping[str, int], level: float) -> dict[str, float]:
    """Factors of words from their ranks, from 1 on, in a list of words by frequency: level/(level + 0.1/rank)."""
    return {word: level / (level + ZIPF / rank) for word, rank in ids.items()}
