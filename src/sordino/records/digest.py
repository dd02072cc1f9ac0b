"""A keyed digest of a dataset: shows whether a resumed run is given the records that it started with.

Formal property. The digest is BLAKE2b over the content of all records, in order, under a key of 32 random bytes.
Without the key it is a random number that reveals nothing about the records. With key and digest one can test a guess
of the whole dataset, so the key is for the data's owner only and is deleted with the checkpoints
(`sordino.training.witness`); no guarantee covers it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.rows import tensors
from sordino.randomness.masks import masks_of
from sordino.records.items import ReadOtherwise
from sordino.records.reading import count_records, row_reader, tensors_of

KEY_BYTES = 32
_PIECE = 1 << 26  # bytes hashed at once
_AT_ONCE = 1024  # records of a streamed dataset in memory at once
_PROBED = 8  # records that are read twice, to test whether reading is deterministic


def keyed_digest(dataset: Any, key: bytes) -> str | None:
    """The digest of all records in one pass; None if reading a record twice gives different content."""
    with masks_of(0):  # items that are drawn at random are the same in every process
        try:
            return _digest(dataset, key)
        except ReadOtherwise:
            return None


def _digest(dataset: Any, key: bytes) -> str | None:
    found = hashlib.blake2b(key=key, digest_size=32, person=b"sordino/data")
    found.update(str(count_records(dataset)).encode())
    pair = tensors_of(dataset)
    if pair is not None:
        _include(found, pair)
        return found.hexdigest()
    fetch, count = row_reader(dataset), count_records(dataset)
    for indices in torch.split(torch.arange(count), _AT_ONCE):
        rows = fetch(indices)
        if not int(indices[0]) and not _same(fetch, indices[:_PROBED]):
            return None
        _include(found, (rows.inputs, rows.targets))
        if rows.record is not None:  # whose rows they are
            _include(found, rows.record)
    return found.hexdigest()


def _same(fetch: Any, indices: Tensor) -> bool:
    """Whether these records have the same content when they are read again."""

    def content() -> str:
        rows = fetch(indices)
        found = hashlib.blake2b(digest_size=32)
        _include(found, (rows.inputs, rows.targets))
        return found.hexdigest()

    return content() == content()


def _include(found: Any, values: Any) -> None:
    """Adds types, shapes and bytes of every tensor, in order."""
    for t in tensors(values):
        found.update(f"{t.dtype} {tuple(t.shape)};".encode())
        flat = t.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            raw = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            for start in range(0, len(raw), _PIECE):
                found.update(raw[start : start + _PIECE])
