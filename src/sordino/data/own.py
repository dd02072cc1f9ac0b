"""Your own data in a recipe: a table, arrays, a folder of images, or a function of your code.

    [data]
    name = "csv"                     # or parquet, hf, npz, images, or module:function (with --allow-code)
    records = 5000                   # public: you give the number; sordino never counts the records
    path = "visits.csv"
    test_path = "held_out.csv"       # rows that the guarantee does not protect
    target = "readmitted"
    classes = ["no", "yes"]

Each source is a frozen dataclass whose fields are the keys of [data]. What a row becomes depends on that row and on
these keys only, so neighbouring files give neighbouring datasets. Wrong values are found here, before anything is
spent, and reported in an error that is shown on the terminal and not written to any file of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sordino import checks
from sordino.data.files import data_directory
from sordino.data.tables import Table, frame_table, read_table
from sordino.data.tabular import Encoding, Labels, Problems
from sordino.data.types import Dataset
from sordino.errors import InputError, did_you_mean
from sordino.records.users import may_have_been_single
from sordino.split import Split
from sordino.training.progress import tell_owner

LICENCE = "the owner's"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What every source has: its location, its public list of classes, and the rows held out."""

    kind: ClassVar[str]
    path: str  # a file or folder; searched here, then in --data-dir
    classes: Any  # the public list of labels, or their number
    test_path: str | None = None  # rows like those of `path`, for test metrics: the guarantee does not protect them
    test_fraction: float | None = None  # or: this fraction of the rows, chosen by their content, is declared public
    test_public: str | None = None  # why the rows of test_fraction (or test_column) need no protection: a sentence
    test_seed: int = 0  # the seed of the choice by content

    def __post_init__(self) -> None:
        Labels.of(self.classes)
        if self.test_fraction is not None:
            checks.within("data.test_fraction", self.test_fraction, 0, 1, open_low=True, open_high=True)
        chosen = [key for key in ("test_path", "test_fraction", "test_column") if getattr(self, key, None) is not None]
        if len(chosen) > 1:
            raise InputError(f"[data] has {' and '.join(chosen)}: give one of them")
        if chosen and chosen != ["test_path"] and not (self.test_public or "").strip():
            raise InputError(
                f"[data] {chosen[0]} removes the protection of some rows of the private file: say why they need none "
                'in test_public = "…", or give another file in test_path'
            )

    @property
    def labels(self) -> tuple[str, ...]:
        return Labels.of(self.classes).names

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one record, if it is known without reading the file."""
        return None

    def rows(self, path: Path, *, labelled: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(inputs, targets, the rows held out by a column) of a file like the training file."""
        raise NotImplementedError

    def users(self, path: Path) -> tuple[str, ...] | None:
        """The user of each row, if the source has users."""
        return None

    def read(self, data_dir: Path | None) -> Dataset:
        """Train and test; the test split is empty if none is declared.

        Raises:
            InputError: a file does not fit. Nothing was spent, and the message says so.
        """
        try:
            return self._read(data_dir)
        except InputError as error:
            raise error.within("nothing was spent") from error

    def _read(self, data_dir: Path | None) -> Dataset:
        path = found(self.path, data_dir)
        inputs, targets, held = self.rows(path, labelled=True)
        assert targets is not None
        if held is None:
            held = torch.zeros(len(targets), dtype=torch.bool)
        if self.test_fraction is not None:
            held = chosen_by_content(inputs, targets, self.test_fraction, self.test_seed)
        train, test = Split(inputs[~held], targets[~held]), Split(inputs[held], targets[held])
        if self.test_path is not None:
            other, answers, _ = self.rows(found(self.test_path, data_dir), labelled=True)
            assert answers is not None
            if other.shape[1:] != inputs.shape[1:]:
                raise InputError(f"{self.test_path}: its rows have a different shape than those of {self.path}")
            test = Split(other, answers)
        if not len(train):
            raise InputError(f"{self.path}: there is no row to train on")
        ids = self.users(path)
        users = None if ids is None else tuple(one for one, out in zip(ids, held.tolist(), strict=True) if not out)
        return Dataset(self.kind, train, test, len(self.labels), f"{self.kind} {Path(self.path).name}", LICENCE,
                       labels=self.labels, users=users)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TableSource(Source):
    """A table with a header: a row is a record."""

    kind: ClassVar[str] = "csv"
    target: str  # the column with the label
    columns: Mapping[str, Any] = field(default_factory=dict)  # how each column becomes numbers, with public bounds
    ignore: Any = ()  # columns that the model does not use; "others": all that are not in [data.columns]
    test_column: str | None = None  # rows whose entry here is "test" are held out
    user: str | None = None  # the column with the user's id, for privacy.unit = "user"; not an input of the model

    def __post_init__(self) -> None:
        super().__post_init__()
        encoding = Encoding.of(self.columns)
        if self.target in encoding.columns:
            raise InputError(f"[data.columns] contains the target {self.target!r}: it can't be an input of the model")
        if self.user is not None and self.user in (self.target, *encoding.columns):
            raise InputError(
                f"data.user = {self.user!r} is also the target or one of [data.columns]: it can't be an input"
            )
        if self.ignore != "others" and not (
            isinstance(self.ignore, list | tuple) and all(isinstance(one, str) for one in self.ignore)
        ):
            raise InputError('data.ignore must be a list of columns, or "others"')

    @property
    def encoding(self) -> Encoding:
        return Encoding.of(self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.encoding.shape

    def table(self, path: Path) -> Table:
        return read_table(path, self.kind)

    def rows(self, path: Path, *, labelled: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self._encoded(self.table(path), labelled)

    def framed(self, frame: Any) -> Tensor:
        """The rows of a data frame, or of a dict of columns, encoded like those of a file."""
        return self._encoded(frame_table(frame), False)[0]

    def _encoded(self, table: Table, labelled: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        path, encoding = table.path, self.encoding
        table.need([*encoding.columns, *([self.target] if labelled else [])])
        self._refuse_unknown(table, labelled)
        problems = Problems(str(path), table.lines)
        inputs = encoding(table.columns, problems)
        targets = Labels.of(self.classes)(table.columns[self.target], self.target, problems) if labelled else None
        problems.raise_any()
        if labelled and (wrong := problems.mostly_truncated()):
            tell_owner(
                f"{path}: most values of some columns lie outside their bounds, and are replaced by the bounds: is the "
                "unit right? Nothing has been spent yet",
                ", ".join(wrong),
            )
        if self.test_column is None or not labelled:
            return inputs, targets, None
        table.need([self.test_column])
        return inputs, targets, torch.tensor([str(v).strip() == "test" for v in table.columns[self.test_column]])

    def users(self, path: Path) -> tuple[str, ...] | None:
        if self.user is None:
            return None
        table = self.table(path)
        table.need([self.user])
        values = table.columns[self.user]
        floats = np.array([value for value in values if isinstance(value, float)])
        if not (np.abs(floats) < 2.0**53).all() or may_have_been_single(floats):  # NaN, or several ids in one
            raise InputError(f"data.user: the column {self.user!r} has ids that are missing or too large for a float")
        ids = ["" if value is None else str(value).strip() for value in values]
        return named(ids, f"data.user: the column {self.user!r}")

    def _refuse_unknown(self, table: Table, labelled: bool) -> None:
        """Refuses columns that are neither used nor ignored: a forgotten one would be left out silently."""
        if self.ignore == "others" or not labelled:
            return
        known = {*self.encoding.columns, self.target, self.test_column, self.user, *self.ignore}
        further = [name for name in table.columns if name not in known]
        if further:
            absent = [repr(name) for name in self.ignore if name not in table.columns]
            typo = f"; data.ignore has {', '.join(absent)}, which is not a column" if absent else ""
            raise InputError(
                f"{table.path} has columns that are neither in [data.columns] nor in data.ignore: describe them, or "
                f'write ignore = ["…"] or ignore = "others"{typo}',
                private=f"they are {', '.join(further)}",
            )


@dataclass(frozen=True, kw_only=True)
class CsvSource(TableSource):
    """A CSV file in UTF-8 with a header."""

    delimiter: str = ","  # one character

    def table(self, path: Path) -> Table:
        return read_table(path, "csv", self.delimiter)


@dataclass(frozen=True, kw_only=True)
class ParquetSource(TableSource):
    """A Parquet file."""

    kind: ClassVar[str] = "parquet"


@dataclass(frozen=True, kw_only=True)
class HfSource(TableSource):
    """A folder that Hugging Face's `Dataset.save_to_disk` wrote (of a DatasetDict: one of its splits)."""

    kind: ClassVar[str] = "hf"


def made(kinds: Mapping[str, type[Source]], name: str, options: Mapping[str, Any]) -> Source:
    """The source of a recipe's [data]; InputError names a key that is unknown, missing or wrong."""
    kind = kinds[name]
    known = {one.name: one for one in fields(kind)}
    for key in options:
        if key not in known:
            raise InputError(f"unknown key in [data] of {name}: {key!r}: {did_you_mean(key, known)}")
    missing = [
        key for key, one in known.items()
        if one.default is MISSING and one.default_factory is MISSING and key not in options
    ]  # fmt: skip
    if missing:
        raise InputError(f"[data] of {name} needs {', '.join(missing)}")
    for key in ("path", "target", "test_path", "test_public", "test_column", "delimiter", "user"):
        if key in options and not isinstance(options[key], str):
            raise InputError(f"data.{key} = {options[key]!r} must be a text")
    return kind(**options)


def named(ids: Sequence[str], where: str) -> tuple[str, ...]:
    """The ids of all rows; InputError where one is missing."""
    if any(one.lower() in ("", "nan", "none") for one in ids):
        raise InputError(f"{where} has rows without an id: the user of every row must be known")
    return tuple(ids)


def found(path: str, data_dir: Path | None) -> Path:
    """The path as it is given, if it exists or is absolute; else the path relative to --data-dir."""
    here = Path(path).expanduser()
    if here.exists() or here.is_absolute():
        return here
    there = data_directory(data_dir) / here
    if not there.exists():
        raise InputError(f"there is no {here}, neither here nor in {data_directory(data_dir)} (--data-dir)")
    return there


def chosen_by_content(inputs: Tensor, targets: Tensor, fraction: float, seed: int) -> Tensor:
    """(rows,) bool: whether a row is held out depends on its own content and the seed only.

    A split by position would move other rows when one is added, so neighbouring files would differ in many records.
    """
    rows = inputs.contiguous().numpy().reshape(len(inputs), -1)
    limit = int(fraction * 2**64)
    salt = f"sordino/test/{seed}".encode()
    held = [
        int.from_bytes(hashlib.blake2b(row.tobytes() + bytes([int(t) % 256]), digest_size=8, key=salt).digest()) < limit
        for row, t in zip(rows, targets.tolist(), strict=True)
    ]
    return torch.tensor(held, dtype=torch.bool)
