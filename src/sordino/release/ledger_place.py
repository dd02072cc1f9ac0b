"""Identifies where a ledger file is, so that a copy can be distinguished from the original.

With secure noise a run's key is not stored on disk: a resumed run draws its next steps with fresh randomness. If two
copies of one directory are both resumed, the same steps are released twice, each with its own batches and noise, and
each ledger counts them once. The place of a file is its inode on its machine. A copy has another place (so has a file
that was moved to another disk or restored from a backup), and a ledger is continued only at the last place that it
names. docs/howto/resume.md says what this prevents and what it can't prevent.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

_MACHINE = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def place_of(descriptor: int, run: str) -> str:
    """A digest of the open file's place: equal for the same inode on the same machine.

    It is keyed with the run's public name, so that it does not reveal the machine's identity and places of different
    runs can't be compared.
    """
    name = f"{_machine()}/{os.fstat(descriptor).st_ino}".encode()
    return hashlib.blake2b(name, key=run.encode(), digest_size=16, person=b"sordino/place").hexdigest()


@cache
def _machine() -> str:
    """The machine's identity; empty if it has none (as in some containers)."""
    for path in _MACHINE:
        try:
            return path.read_text(encoding="utf8").strip()
        except (OSError, UnicodeDecodeError):
            continue
    return ""
