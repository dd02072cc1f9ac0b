"""metrics.jsonl: one JSON object per evaluation, appended as the run goes, cut back on resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sordino.errors import SordinoError
from sordino.files import write_atomically


class MetricsLog:
    """The rows so far, in memory and (given a path) on disk. What is logged must be public or released."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
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
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise SordinoError(f"{self._path} can't be written: {error.strerror or error}") from error

    def cut(self, step: int) -> None:
        """Drops what lies beyond `step`: a resumed run will measure it again."""
        kept = [row for row in self._rows if row["step"] <= step]
        if self._path is not None and self._path.exists():
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._rows = kept


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file; a last line torn by a kill is left out."""
    lines = path.read_text(encoding="utf8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise SordinoError(f"{path}, line {number}: not a JSON object ({error.msg})") from error
    return rows
