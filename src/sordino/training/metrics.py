"""metrics.jsonl: one JSON object per evaluation, appended during the run, truncated on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from sordino.errors import SordinoError
from sordino.files import make_folder, write_atomically


class MetricsLog:
    """The rows so far, in memory and (given a path) on disk.

    What is logged must be public or released, unless the log is `private`, which only its owner can read.
    """

    def __init__(self, path: Path | None, *, private: bool = False) -> None:
        self._path, self._private = path, private
        self._rows = read_metrics(path) if path is not None and path.exists() else []

    @property
    def rows(self) -> tuple[Mapping[str, float], ...]:
        return tuple(self._rows)

    @property
    def latest(self) -> Mapping[str, float] | None:
        return self._rows[-1] if self._rows else None

    def append(self, row: Mapping[str, float]) -> None:
        self._rows.append(dict(row))
        if self._path is None:
            return
        try:
            make_folder(self._path.parent, private=self._private)
            mode = 0o600 if self._private else 0o666
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
            with open(handle, "a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise SordinoError(f"{self._path} can't be written: {error.strerror or error}") from error

    def cut(self, step: int) -> None:
        """Drops rows after `step`: a resumed run measures them again."""
        kept = [row for row in self._rows if row["step"] <= step]
        if self._path is not None and self._path.exists():
            lines = "".join(json.dumps(row) + "\n" for row in kept)
            write_atomically(self._path, lines.encode(), private=self._private)
        self._rows = kept


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file; an incomplete last line (killed process) is left out.

    Raises:
        SordinoError: it can't be read, or a line is not a measurement.
    """
    try:
        lines = path.read_text(encoding="utf8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SordinoError(f"{path} can't be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise SordinoError(f"{path}, line {number}: the file is damaged, this line is not JSON") from error
        step = row.get("step") if isinstance(row, dict) else None
        if isinstance(step, bool) or not isinstance(step, int):
            raise SordinoError(f"{path}, line {number}: the file is damaged, this line is not a measurement at a step")
        rows.append(row)
    return rows
