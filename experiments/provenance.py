"""The origin of every result file (command, commit, versions, time), and the file of a resumable experiment."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sordino.files import write_atomically
from sordino.runs.origin import commit
from sordino.runs.results import environment

COMMIT = commit(*sorted(Path(__file__).parent.glob("*.py")))  # of the source when this process started


def origin(command: str) -> dict[str, Any]:
    """The entries that state where a result comes from."""
    return {"command": command, "commit": COMMIT, "environment": environment()}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a result file that several processes share: one at a time reads it, adds to it and writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_runs(path: Path) -> dict[str, Any]:
    """The runs in a result file; an empty dict if there is no file."""
    return dict(json.loads(path.read_text(encoding="utf8"))["runs"]) if path.exists() else {}


def add_run(path: Path, command: str, key: str, run: Any, table: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Adds one run, with the commit that made it, to a result file and computes the file's table again."""
    with locked(path):
        runs = read_runs(path) | {key: run | {"commit": COMMIT}}
        document = {**origin(command), "table": table(runs), "runs": runs}
        write_atomically(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return runs
