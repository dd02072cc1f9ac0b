"""Finds the files of published networks in the data folder; the error says how to get them."""

from __future__ import annotations

from pathlib import Path

from sordino.data.files import VARIABLE
from sordino.errors import InputError


def one_file(folder: Path, pattern: str, extractor: str, get: str) -> Path:
    """The only file in the folder that matches the pattern; `get` says in the error how to get it."""
    found = sorted(folder.glob(pattern)) if folder.is_dir() else []
    if not found:
        raise InputError(
            f"features {extractor!r}: no file {folder / pattern}; {get}, or set {VARIABLE} to the folder that contains "
            f"{folder.name}"
        )
    if len(found) > 1:
        raise InputError(f"features {extractor!r}: {', '.join(map(str, found))} all match; keep one of them")
    return found[0]
