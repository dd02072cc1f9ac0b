"""What every result file says about itself: the command, the commit, the versions and when it was written."""

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

COMMIT = commit(*sorted(Path(__file__).parent.glob("*.py")))  # of the source as it was when this process began


def origin(command: str) -> dict[str, Any]:
    """The entries that say where a result comes from."""
    return {"command": command, "commit": COMMIT, "environment": environment()}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Several processes share one result file: one at a time reads, adds to it and writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_runs(path: Path) -> dict[str, Any]:
    """The runs that a result file holds; none where there is no file."""
    return dict(json.loads(path.read_text(encoding="utf8"))["runs"]) if path.exists() else {}


def add_run(path: Path, command: str, key: str, run: Any, table: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Add one run to a result file, with the commit that made it, and make the file's table anew."""
    with locked(path):
        runs = read_runs(path) | {key: run | {"commit": COMMIT}}
        document = {**origin(command), "table": table(runs), "runs": runs}
        write_atomically(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return runs
