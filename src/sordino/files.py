"""Files that are there whole or not at all, and the one form in which JSON documents are written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """The document as indented JSON with a newline at the end."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file and syncs it to disk; on failure (also a full disk) the old file is unchanged.

    Raises:
        SordinoError: the file can't be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SordinoError(f"{path} can't be written: {error.strerror or error}") from error
    sync_folder(path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for one process at a time; where the file system can't lock a folder, nothing is held.

    Raises:
        SordinoError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SordinoError(
                f"another run is at work in {folder}: wait until it ends, or give this one a directory of its own"
            ) from error
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                raise SordinoError(f"{folder} can't be locked: {error.strerror or error}") from error
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
