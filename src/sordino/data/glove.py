"""GloVe word vectors (Pennington et al. 2014): public, trained on Wikipedia and news, never on the records at hand.

Two layouts are read: the authors' glove.6B.50d.txt, and a table of vectors with an index of words (npy and Parquet).
Both list the words by their frequency in the corpus, so "the first 30,000" is a public vocabulary of common words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch
from torch import Tensor

from sordino.data.files import VARIABLE
from sordino.errors import InputError

PADDING = 0
TEXTS = ("glove.6B/glove.6B.50d.txt", "glove.6B.50d.txt", "glove-6b-50d/glove.6B.50d.txt")
TABLE, INDEX = "glove-6b-50d/glove_6B_50d_emb.npy", "glove-6b-50d/glove_6B_index.parquet"

FREQUENT = 150
"""The number of most frequent words that are left out of texts of limited length: they carry little information, and
are half of the words of a review. On held-out reviews a linear classifier of the mean of the last 64 vectors gets
72.1 % without them and 70.6 % with them (docs/clipping_bias.md). Words that negate or weigh a judgement are kept."""
TELLING = frozenset(
    ("not", "n't", "no", "but", "never", "nothing", "!", "?", "best", "better", "good", "well", "great", "bad", "like",
     "only", "even", "too", "least", "less", "little", "few", "most", "more")
)  # fmt: skip

_TAG = re.compile(r"<[^>]{1,20}>")
_WORD = re.compile(r"n't|'[a-z]+|[a-z]+(?=n't)|[a-z0-9]+|[!?]")  # "didn't" is "did", "n't", as in GloVe's corpus


@dataclass(frozen=True)
class WordVectors:
    """Word → id from 1 on, and the table (words + 1, features); id 0 is padding, and its vector is zero."""

    ids: Mapping[str, int]
    table: Tensor


@dataclass(frozen=True)
class VectorTokenizer:
    """Lower-cased words → ids of GloVe's words; words without a vector, and too frequent ones, are left out.

    Of a longer text the last (or first) `length` words are kept; a shorter one is padded with zeros *in front*, so that
    it ends with its last word.

    A public function of one text at a time. An empty text, or one of unknown words, is all padding.
    """

    words: WordVectors
    length: int = 64
    keep: Literal["end", "start"] = "end"
    frequent: int = FREQUENT  # the most frequent words are left out, except informative ones

    def __post_init__(self) -> None:
        if self.length < 1 or self.keep not in ("end", "start"):
            raise InputError(
                f"tokenizer: length must be at least 1 and keep 'end' or 'start', not {self.length} and {self.keep!r}"
            )

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(n,) strings → (n, length) int64."""
        out = torch.full((len(texts), self.length), PADDING, dtype=torch.int64)
        ids = {word: number for word, number in self.words.ids.items() if number > self.frequent or word in TELLING}
        for row, text in enumerate(texts):
            found = [ids[word] for word in _WORD.findall(_TAG.sub(" ", text.lower())) if word in ids]
            found = found[-self.length :] if self.keep == "end" else found[: self.length]
            if found:
                out[row, -len(found) :] = torch.tensor(found)
        return out


def standardised(words: WordVectors) -> WordVectors:
    """The vectors with mean 0 and variance 1 in each feature, over words weighted by Zipf's law: 1/(rank + 2.7).

    All constants are public: nothing is measured from texts. Published vectors share a large mean, which would be most
    of every record's gradient and carry no information about its class.
    """
    rank = torch.arange(1, len(words.table), dtype=torch.float64)
    weight = (1 / (rank + 2.7))[:, None]
    weight /= weight.sum()
    vectors = words.table[1:].double()
    mean = (weight * vectors).sum(0)
    std = (weight * (vectors - mean).square()).sum(0).sqrt().clamp_min(1e-12)
    table = torch.cat((torch.zeros(1, vectors.shape[1], dtype=torch.float64), (vectors - mean) / std))
    return WordVectors(words.ids, table.float())


def glove_file(root: Path) -> Path:
    """The file that lists the words by their frequency, in the first layout that is found in `root`."""
    text = next((root / name for name in TEXTS if (root / name).is_file()), None)
    if text is None and (root / TABLE).is_file() and (root / INDEX).is_file():
        return root / INDEX
    if text is None:
        raise InputError(
            f"no GloVe vectors in {root}: put {TEXTS[0]} there (glove.6B.zip of nlp.stanford.edu/projects/glove), or "
            f"set {VARIABLE} (or --data-dir) to the folder that contains it"
        )
    return text


def read_glove(root: Path, words: int = 30_000) -> WordVectors:
    """The vectors of the `words` most frequent words, from the first layout found in `root`."""
    found = glove_file(root)
    if found == root / INDEX:
        try:
            table = np.load(root / TABLE, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError, SyntaxError, OverflowError) as error:
            raise InputError(f"{root / TABLE}: truncated or not a table of vectors: {error}") from error
        index = _read_index(root / INDEX)
        if table.ndim != 2 or len(table) != len(index) or table.dtype.kind != "f" or not len(table):
            raise InputError(f"{root / TABLE}: shape {table.shape} does not fit the {len(index):,} words of {INDEX}")
        return _vectors(index[:words], np.array(table[:words], dtype=np.float32))
    return _vectors(*_read_text(found, words))


def _vectors(words: Sequence[str], vectors: np.ndarray) -> WordVectors:
    if not np.isfinite(vectors).all():
        raise InputError("a word vector is not finite: the file of GloVe is damaged; download it again")
    table = torch.from_numpy(np.concatenate((np.zeros_like(vectors[:1]), vectors)))
    return WordVectors({word: number for number, word in enumerate(words, 1)}, table)


def _read_text(path: Path, words: int) -> tuple[list[str], np.ndarray]:
    names: list[str] = []
    rows: list[np.ndarray] = []
    with _text_of(path) as lines:
        for number, line in enumerate(lines, 1):
            name, *values = line.rstrip("\n").split(" ")
            try:
                rows.append(np.array(values, dtype=np.float32))
            except ValueError as error:
                raise InputError(f"{path}, line {number}: not a word and its vector: {error}") from error
            if len(rows[-1]) != len(rows[0]) or not len(rows[-1]):
                raise InputError(f"{path}, line {number}: {len(values)} numbers, expected {len(rows[0])}")
            names.append(name)
            if len(names) == words:
                break
    if not names:
        raise InputError(f"{path}: the file is empty; download it again")
    return names, np.stack(rows)


@contextmanager
def _text_of(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf8") as lines:
            yield lines
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read as text: {error}") from error


def _read_index(path: Path) -> list[str]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise InputError(
            f"{path}: reading Parquet needs pyarrow: pip install 'sordino[glove]', or put {TEXTS[0]} next to it"
        ) from None
    try:
        column: list[str] = parquet.read_table(path).column(0).to_pylist()
    except (ArrowException, OSError, IndexError, ValueError) as error:
        raise InputError(f"{path}: truncated or not Parquet: {error}") from error
    if not all(isinstance(word, str) for word in column):
        raise InputError(f"{path}: its first column does not contain words")
    return column
