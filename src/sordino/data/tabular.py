"""Encodes tables as vectors, with public bounds and lists given by the user; nothing is measured from the records.

    [data.columns]
    age     = { kind = "number", low = 0, high = 110 }
    glucose = { kind = "number", low = 40, high = 400, missing = true }
    sex     = { kind = "category", values = ["f", "m"] }
    ward    = { kind = "category", values = ["a", "b", "c"], other = true }
    note    = { kind = "text", buckets = 64 }

| kind     | becomes                                                                                          |
|----------|--------------------------------------------------------------------------------------------------|
| number   | (x − low)/(high − low), truncated to [0, 1]; `log`: of log(1 + x − low); `missing`: plus a flag   |
| category | one column per value; `other`: one for all values not listed; `missing`: one for missing values  |
| text     | counts of words, hashed into `buckets` columns, divided by their Euclidean norm                  |
| tokens   | the only column: the first `length` words as ids below `vocabulary`, padded with 0               |

A measured bound (the largest age that occurs), a list of the values that occur, a mean for missing values: each would
be a release without noise. So all of them are arguments, every row is encoded separately, and the encoding is saved
with the model and used again for predictions.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino import checks
from sordino.data.text import HashingTokenizer
from sordino.errors import InputError, did_you_mean

Values = Sequence[object]
Floats = npt.NDArray[np.float32]
ABSENT = frozenset(("", "na", "n/a", "nan", "null", "none", "?", "<na>"))
"""Texts that count as missing, in upper or lower case; a category whose list contains one takes it as a value."""
_WORD = re.compile(r"[^\W_]+", re.UNICODE)
_DATE = re.compile(r"\d[-/.]\d+[-/.]\d")
_SHOWN = 8


@dataclass(eq=False)
class Problems:
    """What is wrong with a file, without any value. Line numbers and counts are for its owner only."""

    where: str
    lines: Sequence[int]
    found: list[str] = field(default_factory=list)
    kinds: dict[str, None] = field(default_factory=dict)
    count: int = 0
    truncated: dict[str, int] = field(default_factory=dict)  # values outside the bounds, by column

    def mostly_truncated(self) -> list[str]:
        """The columns of which more than half of the values lie outside the bounds: likely in another unit."""
        return [name for name, values in self.truncated.items() if 2 * values > len(self.lines)]

    def add(self, row: int, column: str, what: str, name: str = "") -> None:
        """name: the name of the file, if each row is a file."""
        self.count += 1
        self.kinds[f"{column}: {what}"] = None
        if len(self.found) < _SHOWN:
            self.found.append(f"line {self.lines[row]}, {name or column}: {what}")

    def raise_any(self) -> None:
        """InputError with the kinds of problems, if there are any."""
        if self.count:
            more = f"; and {self.count - len(self.found)} more" if self.count > len(self.found) else ""
            raise InputError(
                f"{self.where}: {'; '.join(list(self.kinds)[:_SHOWN])}",
                private=f"{'; '.join(self.found)}{more}",
            )


def absent(value: object) -> bool:
    """Whether the value is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return isinstance(value, str) and value.strip().lower() in ABSENT


def plain(value: object) -> str:
    """A label or a category as text: whole numbers without a point, booleans in lower case, no outer spaces."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


@dataclass(frozen=True)
class Number:
    """A number between public bounds."""

    kind: ClassVar[str] = "number"
    low: float  # public; smaller values are replaced by it
    high: float  # public; larger values are replaced by it
    log: bool = False  # scale log(1 + x − low) instead, for amounts that span orders of magnitude
    missing: bool = False  # values may be missing: the number is then 0, and a flag next to it 1

    def __post_init__(self) -> None:
        if not checks.real("low", self.low) < checks.real("high", self.high):
            raise InputError(f"low = {self.low:g} must be below high = {self.high:g}")

    @property
    def width(self) -> int:
        return 1 + self.missing

    def encode(self, values: Values, name: str, problems: Problems) -> Floats:
        out, outside = np.zeros((len(values), self.width), dtype=np.float64), 0
        for row, value in enumerate(values):
            if absent(value):
                if self.missing:
                    out[row, 1] = 1
                else:
                    problems.add(row, name, "no value, and the column has no missing = true")
                continue
            try:
                if isinstance(value, str) and "_" in value:  # Python reads 1_000; tables do not mean that
                    raise ValueError
                number = float(value)  # type: ignore[arg-type]
            except (TypeError, ValueError):
                problems.add(row, name, "a date, not a number" if _DATE.search(str(value)) else "not a number")
                continue
            if math.isfinite(number):
                outside += not self.low <= number <= self.high
                out[row, 0] = self._scaled(number)
            else:
                problems.add(row, name, "not a finite number")
        problems.truncated[name] = outside
        return out.astype(np.float32)

    def _scaled(self, number: float) -> float:
        inside = min(max(number, self.low), self.high)
        if self.log:
            return math.log1p(inside - self.low) / math.log1p(self.high - self.low)
        return (inside - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Category:
    """One of a public list of values."""

    kind: ClassVar[str] = "category"
    values: tuple[str, ...]  # public: all values that may occur
    other: bool = False  # a column for values that are not listed; otherwise they are errors
    missing: bool = False  # a column for missing values; otherwise they are errors

    def __post_init__(self) -> None:
        if not isinstance(self.values, list | tuple) or not self.values:
            raise InputError("values must be a list of the values that may occur")
        object.__setattr__(self, "values", tuple(plain(value) for value in self.values))
        if len(set(self.values)) < len(self.values):
            raise InputError("values has a repeated entry")

    @property
    def width(self) -> int:
        return len(self.values) + self.other + self.missing

    def encode(self, values: Values, name: str, problems: Problems) -> Floats:
        out = np.zeros((len(values), self.width), dtype=np.float32)
        place = {value: number for number, value in enumerate(self.values)}
        for row, value in enumerate(values):
            at = None if value is None else place.get(plain(value))
            if at is None and absent(value):
                at = len(self.values) + self.other if self.missing else None
                why = "no value, and the column has no missing = true"
            elif at is None:
                at = len(self.values) if self.other else None
                why = "a value that is not in the column's public list, and the column has no other = true"
            if at is None:
                problems.add(row, name, why)
            else:
                out[row, at] = 1
        return out


@dataclass(frozen=True)
class Text:
    """Words, hashed by a public function into a fixed number of columns."""

    kind: ClassVar[str] = "text"
    buckets: int = 256  # columns; different words may share one

    def __post_init__(self) -> None:
        checks.whole("buckets", self.buckets, minimum=1)

    @property
    def width(self) -> int:
        return self.buckets

    def encode(self, values: Values, name: str, problems: Problems) -> Floats:
        out = np.zeros((len(values), self.buckets), dtype=np.float32)
        for row, value in enumerate(values):
            for word in _WORD.findall("" if absent(value) else str(value).lower()):
                out[row, zlib.crc32(word.encode()) % self.buckets] += 1
        norms = np.linalg.norm(out.astype(np.float64), axis=1, keepdims=True)
        scaled: Floats = (out / np.maximum(norms, 1e-12)).astype(np.float32)
        return scaled


@dataclass(frozen=True)
class Tokens:
    """Words as ids, for networks that read texts (gru, lstm, transformer): padded to a public length."""

    kind: ClassVar[str] = "tokens"
    vocabulary: int = 20_000  # number of ids, by hashing; 0 is padding
    length: int = 128  # public: longer texts are truncated, shorter ones padded

    def __post_init__(self) -> None:
        HashingTokenizer(self.vocabulary, self.length)

    @property
    def width(self) -> int:
        return self.length


Column = Number | Category | Text | Tokens
KINDS: Mapping[str, type[Column]] = {one.kind: one for one in (Number, Category, Text, Tokens)}


@dataclass(frozen=True)
class Encoding:
    """A table's columns, in order, and how each is encoded.

    Args:
        columns: The encoding of each column, by name.

    Raises:
        InputError: there is no column, or a column of kind tokens is not the only one.
    """

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        if not self.columns:
            raise InputError("[data.columns] is empty: list the columns that the model uses")
        if len(self.columns) > 1 and any(isinstance(column, Tokens) for column in self.columns.values()):
            raise InputError("a column of kind tokens must be the only one; encode a text next to others as kind text")

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Encoding:
        """From {name: {kind, …}}; InputError names the column and the key."""
        if not isinstance(columns, Mapping):
            raise InputError(f"data.columns must be a table of columns, not {columns!r}")
        return cls({str(name): _column(str(name), given) for name, given in columns.items()})

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(column.width for column in self.columns.values()),)

    def __call__(self, table: Mapping[str, Values], problems: Problems) -> Tensor:
        """(rows, width): float32 in [0, 1], or int64 ids of tokens. Problems are collected, not raised."""
        parts = []
        for name, column in self.columns.items():
            if isinstance(column, Tokens):
                texts = ["" if absent(value) else str(value) for value in table[name]]
                return HashingTokenizer(column.vocabulary, column.length)(texts)
            parts.append(column.encode(table[name], name, problems))
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def to_dict(self) -> dict[str, Any]:
        """The encoding as JSON-serialisable values; `of` is the inverse."""
        return {name: {"kind": column.kind, **asdict(column)} for name, column in self.columns.items()}


def _column(name: str, given: object) -> Column:
    where = f"[data.columns] {name}"
    if not isinstance(given, Mapping) or "kind" not in given:
        raise InputError(f'{where}: write {{ kind = "number", low = …, high = … }}, or another kind: {_kinds()}')
    options = {str(key): value for key, value in given.items() if key != "kind"}
    kind = given["kind"]
    if kind not in KINDS:
        if str(kind).lower() in ("date", "datetime", "time", "timestamp"):
            raise InputError(
                f"{where}: there is no kind {kind!r}: write a number into the file (days since a public date, an age) "
                f"or a category (the month); the kinds are {_kinds()}"
            )
        raise InputError(f"{where}: kind {kind!r} is unknown: {did_you_mean(str(kind), KINDS)}")
    known = [one.name for one in fields(KINDS[kind])]
    for key in options:
        if key not in known:
            raise InputError(f"{where}: unknown key {key!r}: {did_you_mean(key, known)}")
    for key in ("log", "missing", "other"):
        if not isinstance(options.get(key, False), bool):
            raise InputError(f"{where}: {key} must be true or false")
    try:
        made: Column = KINDS[kind](**options)
        return made
    except TypeError:
        need = "low and high, public bounds" if kind == "number" else "values, a public list"
        raise InputError(f"{where}: a {kind} needs {need}, given by you: they are never measured") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _kinds() -> str:
    return ", ".join(KINDS)


@dataclass(frozen=True)
class Labels:
    """The classes, as a public list; a label is one of them."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, classes: object) -> Labels:
        if isinstance(classes, int) and not isinstance(classes, bool):
            classes = list(range(checks.whole("data.classes", classes, minimum=2)))
        if not isinstance(classes, list | tuple) or len(classes) < 2:
            raise InputError(
                "data.classes must be the public list of labels, at least two (or their number, for labels 0, 1, …): "
                "it is never derived from the data"
            )
        names = tuple(plain(one) for one in classes)
        if len(set(names)) < len(names):
            raise InputError("data.classes has a repeated entry")
        return cls(names)

    def __call__(self, values: Values, column: str, problems: Problems) -> Tensor:
        place = {name: number for number, name in enumerate(self.names)}
        out = torch.zeros(len(values), dtype=torch.int64)
        for row, value in enumerate(values):
            at = None if value is None else place.get(plain(value))
            if at is None:
                problems.add(row, column, "a label that is not in data.classes")
            else:
                out[row] = at
        return out
