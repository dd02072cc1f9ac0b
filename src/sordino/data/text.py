"""Text: readers of IMDb (CSV, and the original folders) and a tokenizer whose vocabulary is public.

A vocabulary counted from private reviews would leak them (the presence of a rare word reveals one review), so words are
*hashed* into a fixed number of ids by a public function that does not depend on the data.
"""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sordino.data.files import read_bytes
from sordino.data.types import TextSplit
from sordino.errors import InputError

PADDING, FIRST_WORD = 0, 1
_WORD = re.compile(r"[a-z0-9']+|[!?]")
_TAG = re.compile(r"<[^>]{1,20}>")


@dataclass(frozen=True)
class HashingTokenizer:
    """Maps lower-cased words to ids in [1, vocabulary) by CRC-32; 0 is padding.

    It has no state: the id of a word depends on the word and `vocabulary` only, so it is public. Different words may
    share an id (with 20,000 ids and English reviews, mostly rare words). An empty text gives padding only.

    Args:
        vocabulary: The number of ids, including 0.
        length: The number of words that are used, from the beginning of a text; shorter texts are padded at the end.

    Raises:
        InputError: vocabulary is below 2, or length below 1.
    """

    vocabulary: int = 20_000
    length: int = 256

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.length < 1:
            raise InputError(
                f"tokenizer: vocabulary must be at least 2 and length at least 1, not {self.vocabulary} and "
                f"{self.length}"
            )

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(n,) strings → (n, length) int64."""
        out = torch.zeros(len(texts), self.length, dtype=torch.int64)
        known: dict[str, int] = {}
        for row, text in enumerate(texts):
            words = _WORD.findall(_TAG.sub(" ", text.lower()))[: self.length]
            for word in set(words).difference(known):
                known[word] = FIRST_WORD + zlib.crc32(word.encode()) % (self.vocabulary - FIRST_WORD)
            ids = [known[word] for word in words]
            if ids:
                out[row, : len(ids)] = torch.tensor(ids)
        return out


def text_bytes(texts: Sequence[str], length: int = 2048) -> Tensor:
    """(n,) strings → (n, length) uint8: UTF-8 with tags replaced by spaces, padded with zeros.

    Of a longer text the first and the last length/2 bytes are used. The result is the input of a public network that
    reads texts (features `minilm`).
    """
    out = torch.zeros(len(texts), length, dtype=torch.uint8)
    half = length // 2
    for row, text in enumerate(texts):
        content = _TAG.sub(" ", text).encode().replace(b"\0", b" ")
        if len(content) > length:
            content = content[:half] + content[half - length :]
        if content:
            out[row, : len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return out


def read_text_csv(path: Path, classes: int = 2) -> TextSplit:
    """A CSV with the columns text and label (also: review and sentiment; positive/negative count as 1/0)."""
    try:
        content = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text", private=str(error)) from error
    rows = csv.reader(io.StringIO(content, newline=""), strict=True)
    texts, labels = [], []
    try:
        header = [name.strip().lower() for name in next(rows, [])]
        text, label = _columns(path, header)
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise InputError(
                    f"{path}: a line without {len(header)} fields",
                    private=f"line {rows.line_num} has {len(row)} fields",
                )
            texts.append(row[text])
            labels.append(_label(path, rows.line_num, row[label], classes))
    except csv.Error as error:
        raise InputError(f"{path}: truncated or not CSV", private=f"line {rows.line_num}: {error}") from error
    if not texts:
        raise InputError(f"{path}: a header but no rows")
    return TextSplit(tuple(texts), torch.tensor(labels, dtype=torch.int64))


def _columns(path: Path, header: list[str]) -> tuple[int, int]:
    for text, label in (
        ("text", "label"),
        ("review", "sentiment"),
        ("text", "sentiment"),
        ("review", "label"),
    ):
        if text in header and label in header:
            return header.index(text), header.index(label)
    raise InputError(f"{path}: the first line does not name the columns text and label", private=f"it is {header!r}")


def _label(path: Path, line: int, value: str, classes: int) -> int:
    named = {"negative": 0, "neg": 0, "positive": 1, "pos": 1}.get(value.strip().lower())
    number = {str(label): label for label in range(classes)}.get(value.strip(), named)
    if number is None or not 0 <= number < classes:
        raise InputError(f"{path}: a label is not one of 0 to {classes - 1}", private=f"line {line}: {value!r}")
    return number


def read_text_folders(folder: Path) -> TextSplit:
    """aclImdb's layout: neg/*.txt and pos/*.txt, one review each, sorted by file name."""
    texts, labels = [], []
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise InputError(f"{folder / name}: no .txt files; unpack aclImdb_v1.tar.gz again")
        for path in paths:
            try:
                texts.append(path.read_text("utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                private = str(error) if isinstance(error, UnicodeDecodeError) else ""
                raise InputError(f"{path}: can't be read as UTF-8", private=private) from error
        labels += [label] * len(paths)
    return TextSplit(tuple(texts), torch.tensor(labels, dtype=torch.int64))
