"""Tensors with a JSON document in one safetensors file that contains its own checksum.

The metadata holds the document under `sordino` and, under `sha256`, the hash of all bytes of the file with the 64
digits of that hash replaced by zeros. `read_sealed` detects every changed byte; other readers see an ordinary
safetensors file. A checksum detects damage, not forgery: someone who edits the file on purpose can write a new one
(`sordino.runs.verify` compares files with each other, and a signature with a key).

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
    """A file differs from what was written."""


def sealed(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> bytes:
    """The bytes of the file. The document must not have a key `format`, which is added."""
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
    """Writes what `sealed` returns to a file, one tensor at a time, so that only one whole tensor is in memory.

    Args:
        path: The file; None: the tensors are gathered for another process that writes them.
        tensors: The tensors, or shards of them, in the same order in every process.
        document: As for `sealed`.
        whole: Returns the whole tensor of a shard; called once for each tensor, also if the file can't be written.
        private: Only its owner may read the file.

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
        Damaged: a byte differs from what was written, or it is not such a file.
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
        raise Damaged(f"{path} is damaged, or not a file of sordino: {error}") from error
    if header[start:end] != found.hexdigest().encode() or document.get("format") != FORMAT:
        raise Damaged(f"{path} is damaged: its checksum does not match")
    return document, reader.get_tensor, list(reader.keys())  # type: ignore[no-untyped-call]


def read_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, document) of a file that `sealed` made, or an earlier version without a checksum.

    Raises:
        Damaged: a byte differs from what was written, or it is not such a file.
        OSError: it can't be read.
    """
    _require_length(path)
    content = path.read_bytes()
    try:
        metadata = _metadata(content)
        tensors = load(content)
        document = json.loads(metadata["sordino"]) if "sordino" in metadata else {}
        if not isinstance(document, dict):
            raise Damaged(f"{path} is damaged: its document is not a JSON object")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Damaged(f"{path} is damaged, or not a file of sordino: {error}") from error
    if set(metadata) == {"sordino", "sha256"} and document.get("format") == FORMAT:
        start, end = _place(content)
        if content[start:end] != _digest(content, start, end):
            raise Damaged(f"{path} is damaged: its checksum does not match")
    elif set(metadata) - {"sordino"} or "format" in document:
        raise Damaged(f"{path} is damaged: its checksum is missing")
    return tensors, document


def _require_length(path: Path) -> None:
    """Refuses a file that is longer than its header says before its content is read: it may be of any size."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, 1 << 28))
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        longer = path.stat().st_size > 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Damaged(f"{path} is damaged, or not a file of sordino: {error}") from error
    if longer:
        raise Damaged(f"{path} is damaged: it is longer than its header says")


def _metadata(content: bytes) -> dict[str, Any]:
    """The metadata in the header: eight bytes of length, then JSON (safetensors reads it from files only)."""
    length = int.from_bytes(content[:8], "little")
    found = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    return dict(found)


def _place(content: bytes) -> tuple[int, int]:
    """The position of the checksum's digits: the first match in the header, where the metadata comes first."""
    length = int.from_bytes(content[:8], "little")
    found = list(_CHECKSUM.finditer(content, 8, 8 + length))
    if len(found) != 1:
        raise Damaged("the checksum of the file is not where it should be")
    return found[0].span(1)


def _digest(content: bytes, start: int, end: int) -> bytes:
    found = hashlib.sha256(content[:start])
    found.update(_BLANK.encode())
    found.update(memoryview(content)[end:])
    return found.hexdigest().encode()
