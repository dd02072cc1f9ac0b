"""Tensors with a JSON document in one safetensors file that carries its own checksum.

The metadata holds the document under `sordino` and, under `sha256`, the hash of all bytes of the file with the 64
digits of that hash taken as zeros. Whoever reads the file through `read_sealed` finds every byte that changed since;
for others it is a safetensors file like any other. A checksum finds damage, not forgery: who edits the file on purpose
can write a new one (`sordino.runs.verify` compares files with each other, and a signature with a key).

Files of earlier versions have no checksum and are read as they are; a document of this version without one is damaged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sordino.errors import SordinoError

FORMAT = 2
_BLANK = "0" * 64
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')


class Damaged(SordinoError):
    """A file is not as it was written."""


def sealed(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> bytes:
    """The bytes of the file. The document must not have a key `format`: it is added."""
    plain = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
    text = json.dumps({"format": FORMAT, **document})
    content = save(plain, metadata={"sordino": text, "sha256": _BLANK})
    start, end = _place(content)
    return b"".join((content[:start], _digest(content, start, end), content[end:]))


def read_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, document) of a file that `sealed` made, or an earlier version without a checksum.

    Raises:
        Damaged: a byte is not as it was written, or it is no such file.
        OSError: it can't be read.
    """
    content = path.read_bytes()
    try:
        metadata = _metadata(content)
        tensors = load(content)
        document = json.loads(metadata["sordino"]) if "sordino" in metadata else {}
        if not isinstance(document, dict):
            raise Damaged(f"{path} is damaged: its document is no JSON object")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Damaged(f"{path} is damaged, or no file of sordino: {error}") from error
    if set(metadata) == {"sordino", "sha256"} and document.get("format") == FORMAT:
        start, end = _place(content)
        if content[start:end] != _digest(content, start, end):
            raise Damaged(f"{path} is damaged: its checksum does not fit its bytes")
    elif set(metadata) - {"sordino"} or "format" in document:
        raise Damaged(f"{path} is damaged: its checksum is missing")
    return tensors, document


def _metadata(content: bytes) -> dict[str, Any]:
    """The metadata in the header: eight bytes of length, then JSON (safetensors' own reader gives it of files only)."""
    length = int.from_bytes(content[:8], "little")
    found = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    return dict(found)


def _place(content: bytes) -> tuple[int, int]:
    """Where the digits of the checksum stand: the first match in the header, where the metadata comes first."""
    length = int.from_bytes(content[:8], "little")
    found = list(_CHECKSUM.finditer(content, 8, 8 + length))
    if len(found) != 1:
        raise Damaged("the checksum of a file is not in its place")
    return found[0].span(1)


def _digest(content: bytes, start: int, end: int) -> bytes:
    found = hashlib.sha256(content[:start])
    found.update(_BLANK.encode())
    found.update(memoryview(content)[end:])
    return found.hexdigest().encode()
