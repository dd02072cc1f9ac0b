"""Where a ledger lies, so that a copy can be told from the original.

With secure noise a run's key is on no disk: whoever resumes a run draws the next steps anew. Two copies of one
directory that are both resumed release the same steps twice, each with its own batches and noise, and each ledger
counts them once. A file's place is its inode on its machine. A copy has another (so has a file that was moved to
another disk, or restored from a backup), and a ledger is continued only in the place that its last line of that kind
names. docs/howto/resume.md says what this excludes and what it can't.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

_MACHINE = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def place_of(descriptor: int, run: str) -> str:
    """A name of the open file's place: equal for the same inode on the same machine.

    It is keyed with the run's public name, so that the machine's identity can't be read off it, and places of
    different runs can't be compared.
    """
    name = f"{_machine()}/{os.fstat(descriptor).st_ino}".encode()
    return hashlib.blake2b(name, key=run.encode(), digest_size=16, person=b"sordino/place").hexdigest()


@cache
def _machine() -> str:
    """The machine's identity, or nothing where it has none (some containers)."""
    for path in _MACHINE:
        try:
            return path.read_text(encoding="utf8").strip()
        except (OSError, UnicodeDecodeError):
            continue
    return ""
