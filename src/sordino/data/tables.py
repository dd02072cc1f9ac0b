"""Reads tables from CSV, Parquet, and the folders that Hugging Face's datasets write. Columns are accessed by name."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.data.files import read_bytes
from sordino.errors import InputError, SordinoError, did_you_mean

NEEDS = "needs pyarrow: install sordino[tables]"
_EXCEL = "an Excel workbook: save it from there as CSV UTF-8"
_NOT_CSV = {
    b"PK\x03\x04": _EXCEL,
    b"\xd0\xcf\x11\xe0": _EXCEL,
    b"PAR1": 'a Parquet file: write name = "parquet"',
    b"SQLite format 3": "a database: export its table as CSV",
    b"\x1f\x8b": "a compressed one: unpack it with gunzip",
}
"""How files that are given instead of a CSV begin, and what they are."""


@dataclass(frozen=True)
class Table:
    """Columns of equal length, and the line (or row) of the file for each entry, counted from 1."""

    path: Path
    columns: Mapping[str, Sequence[object]]
    lines: Sequence[int]
    named_by: str = "; the first line must name the columns"  # what is said where a column is missing

    def __len__(self) -> int:
        return len(self.lines)

    def need(self, names: Sequence[str]) -> None:
        """InputError unless all these columns exist. The first line may contain a record, so it is not shown."""
        for name in names:
            if name not in self.columns:
                alone = " (there is only one: is data.delimiter right?)" if len(self.columns) == 1 else ""
                raise InputError(
                    f"{self.path}: there is no column {name!r}{self.named_by}{alone}",
                    private=did_you_mean(name, self.columns),
                )


def read_table(path: Path, kind: str, delimiter: str = ",") -> Table:
    """The whole table. `kind`: csv, parquet or hf."""
    if not path.exists():
        raise InputError(f"there is no {path}")
    if kind == "csv":
        return _csv(path, delimiter)
    return _arrow(path, kind)


def _csv(path: Path, delimiter: str) -> Table:
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a CSV file")
    if not path.stat().st_size:
        raise InputError(f"{path}: the file is empty")
    if len(delimiter) != 1:
        raise InputError(f"data.delimiter = {delimiter!r} must be one character")
    raw = read_bytes(path)
    for begins, what in _NOT_CSV.items():
        if raw.startswith(begins):
            raise InputError(f"{path} is not a CSV file but {what}")
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text: save it as UTF-8 (in Excel: CSV UTF-8; in a shell: iconv -f latin1 -t utf8, with "
            "the file's own encoding)",
            private=f"{error.reason} at byte {error.start}",
        ) from error
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        names = [name.strip() for name in next(reader, [])]
        _check_names(path, names)
        for row in reader:
            if not row or (len(row) == 1 and not row[0].strip() and len(names) > 1):
                continue
            if len(row) != len(names):
                alone = " (the first has only one: is data.delimiter right?)" if len(names) == 1 else ""
                raise InputError(
                    f"{path}: a line has more or fewer fields than the first{alone}",
                    private=f"line {reader.line_num}: {len(row)} fields, the first line has {len(names)}",
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        long = f"a field has more than {csv.field_size_limit()} characters" if "limit" in str(error) else ""
        what = long or "truncated or not CSV (a quotation mark that is not closed)"
        raise InputError(f"{path}: {what}", private=f"line {reader.line_num}: {error}") from error
    return Table(path, {name: [row[at] for row in rows] for at, name in enumerate(names)}, lines)


def _check_names(path: Path, names: Sequence[str]) -> None:
    if not names or not any(names):
        raise InputError(f"{path}: the first line must name the columns")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: the first line repeats a column name", private=f"it is {twice!r}")


def frame_table(frame: Any) -> Table:
    """A data frame (pandas, polars) or a dict of columns as a table; what pandas calls missing is missing.

    Raises:
        InputError: two columns have the same name, or their lengths differ.
    """
    where, names = Path("the data frame"), [str(name) for name in getattr(frame, "columns", frame)]
    if len(set(names)) < len(names):
        raise InputError(f"{where}: two columns have the same name")
    columns = {name: _entries(frame[name]) for name in names if name in frame}
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise InputError(f"{where}: its columns have different lengths")
    return Table(where, columns, range(1, max(lengths, default=0) + 1), named_by="")


def _entries(column: Any) -> list[Any]:
    if isinstance(column, str) or not hasattr(column, "__len__"):
        raise InputError("the data frame: each column must be a list or an array of values")
    values = column.to_list() if hasattr(column, "to_list") else list(column)
    missing = column.isna().to_list() if hasattr(column, "isna") else [False] * len(values)
    return [None if gone else value for value, gone in zip(values, missing, strict=True)]


def _arrow(path: Path, kind: str) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SordinoError(f"reading {kind} {NEEDS}") from error
    try:
        if kind == "parquet":
            table = pq.read_table(path)
        else:
            parts = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in _hf_files(path)]
            table = pa.concat_tables(parts)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} can't be read as {kind}", private=str(error)) from error
    _check_names(path, table.column_names)
    columns: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in table.column_names}
    return Table(path, columns, range(1, table.num_rows + 1))


def _hf_files(folder: Path) -> list[Path]:
    """The Arrow files of `Dataset.save_to_disk`, in order."""
    state = folder / "state.json"
    if not state.is_file():
        inside = sorted(one.parent.name for one in folder.glob("*/state.json"))
        hint = f": it contains the splits {', '.join(inside)}; name one in data.path" if inside else ""
        raise InputError(f"{folder} is not a dataset that Dataset.save_to_disk wrote{hint}")
    try:
        document = json.loads(state.read_text(encoding="utf8"))
        named = document["_data_files"]
        if document.get(
            "_indices_data_files"
        ):  # an earlier version of datasets wrote all rows and a list of those chosen
            raise InputError(f"{folder} is a selection of rows: save it again, after Dataset.flatten_indices()")
        return [folder / Path(str(one["filename"])).name for one in named]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{state} can't be read: {error}") from error
