"""Files that are there whole or not at all, and the one form in which JSON documents are written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
