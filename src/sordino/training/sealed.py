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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from sordino.errors import SordinoError
from sordino.files import written_atomically

FORMAT = 2
_BLANK = "0" * 64
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')


class Damaged(SordinoError):
    """A file is not as it was written."""


def sealed(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> bytes:
    """The bytes of the file. The document must not have a key `format`: it is added."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    text = json.dumps({"format": FORMAT, **document})
    content = save(plain, metadata={"sordino": text, "sha256": _BLANK})
    start, end = _place(content)
    return b"".join((content[:start], _digest(content, start, end), content[end:]))


def write_sealed(
    path: Path | None,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    whole: Callable[[Tensor], Tensor],
    *,
    private: bool,
) -> None:
    """`sealed` into a file, one tensor at a time, so that no more than one is in memory whole.

    Args:
        path: Where to; None: the tensors are gathered for another process that writes them.
        tensors: The tensors, or shards of them, in the same order at every process.
        document: As for `sealed`.
        whole: A whole tensor of a shard; called once for each tensor, also if the file can't be written.
        private: Nobody but its owner may read the file.

    Raises:
        SordinoError: the file can't be written.
    """
    waiting = iter(tensors.values())
    try:
        if path is not None:
            text = json.dumps({"format": FORMAT, **document})
            header = _header(tensors, {"sha256": _BLANK, "sordino": text})
            start, _ = _place(header)
            digest = hashlib.sha256(header)
            with written_atomically(path, private=private) as file:
                file.write(header)
                for tensor in waiting:
                    content = whole(tensor).detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
                    digest.update(content)
                    file.write(content)
                file.seek(start)
                file.write(digest.hexdigest().encode())
    finally:
        for tensor in waiting:
            whole(tensor)


_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file: eight bytes of length and JSON, padded so that the tensors are aligned."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _KINDS:
            raise SordinoError(f"{name}: a tensor of {tensor.dtype} can't be saved")
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def open_sealed(path: Path) -> tuple[dict[str, Any], Callable[[str], Tensor], list[str]]:
    """(document, a reader of single tensors, their names) of a file that `sealed` or `write_sealed` made.

    Raises:
        Damaged: a byte is not as it was written, or it is no such file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = length.to_bytes(8, "little") + file.read(min(length, 1 << 28))
            start, end = _place(header)
            found = hashlib.sha256(header[:start] + _BLANK.encode() + header[end:])
            while block := file.read(1 << 22):
                found.update(block)
        document = json.loads(_metadata(header)["sordino"])
        reader = safe_open(path, "pt")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Damaged(f"{path} is damaged, or no file of sordino: {error}") from error
    if header[start:end] != found.hexdigest().encode() or document.get("format") != FORMAT:
        raise Damaged(f"{path} is damaged: its checksum does not fit its bytes")
    return document, reader.get_tensor, list(reader.keys())  # type: ignore[no-untyped-call]


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
