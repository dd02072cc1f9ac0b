"""A digest of a dataset's content, so that a budget recognises the dataset under another name or order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from sordino import data
from sordino.data.own import found
from sordino.data.sources import source_of
from sordino.errors import InputError
from sordino.runs.recipe import Recipe


def content_digest(recipe: Recipe, data_dir: Path | None) -> bytes:
    """SHA-256 of a dataset's content: of its file, or of its rows in any order. Not keyed, so never to be stored."""
    source = source_of(recipe.data)
    if source is not None:
        place = found(source.path, data_dir)
        paths = [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else [place]
        parts = sorted(_of_file(path) for path in paths)
    else:
        parts = sorted(_rows(data.read(recipe.data, data_dir).train))
    return hashlib.sha256(b"".join(parts)).digest()


def _of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error


def _rows(split: data.Split) -> Iterator[bytes]:
    inputs = split.inputs.contiguous().numpy().reshape(len(split), -1)
    for row, target in zip(inputs, split.targets.tolist(), strict=True):
        yield hashlib.sha256(row.tobytes() + str(target).encode()).digest()
