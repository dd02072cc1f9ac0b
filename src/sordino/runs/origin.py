"""The origin of a result: the command, the commit of the source, and the versions it was measured with."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from sordino import __version__
from sordino.runs.results import environment

SOURCE = Path(__file__).parents[1]


def commit(*further: Path) -> str:
    """The commit of the source code, with "+changes" if its tracked files differ from it.

    Args:
        further: Other places of the same checkout whose tracked files count too.

    Returns:
        Ten digits of the hash; or why there is none: the package is not in a checkout, or git is missing.
    """
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "-uno", "--", ".", *map(str, further))
    except (OSError, subprocess.SubprocessError):
        return f"no checkout: sordino {__version__}"
    return head + ("+changes" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=SOURCE, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def origin(command: str) -> dict[str, Any]:
    """The first entries of every result file."""
    return {"command": command, "commit": commit(), "environment": environment()}
