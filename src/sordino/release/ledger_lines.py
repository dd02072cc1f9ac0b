"""The lines of a ledger file, and the hash chain that links them.

Formal contract (format 2). Line 0 is the plan, each further line a release or the adoption of a copy. With bodyᵢ the
bytes of line i without its last key, hash₀ = SHA-256(body₀) and hashᵢ = SHA-256(hashᵢ₋₁ ‖ bodyᵢ); the line is bodyᵢ
with `"hash": hashᵢ` as its last key. So each line commits to all bytes before it: anyone who knows hashₙ can detect
every edit, swap, removal or insertion up to line n. The chain alone does not show that lines are missing at the end, or
that the whole file was rewritten; for that the last hash is stored elsewhere (checkpoint, result, model, signature).

Ledgers of format 1 have no hashes. They are read as they are, and their lines are chained in memory by the same rule.
So a ledger that an earlier version started and this version continued is also committed to by its last hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.errors import InputError

PLAN, RELEASE, ADOPTED = "plan", "release", "adopted"
FORMAT = 2
OWN_KEYS = ("format", "run", "place", "hash")
"""Keys of a line that belong to the file, not to the plan or to a release."""

_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_SEAL = re.compile(rb', "hash": "([0-9a-f]{64})"\}$')
WHOLE = re.compile(rb', "hash": "[0-9a-f]{64}"\}')
"""Matches the end of a line that has its hash."""

_RESTORE = "restore it from a copy; a ledger that can't be certified is not continued"


@dataclass(frozen=True)
class Head:
    """The number of releases in a ledger, and the hash of its last line, which commits to all of them."""

    entries: int
    hash: str

    def to_dict(self) -> dict[str, Any]:
        """The head as JSON-serialisable values."""
        return {"entries": self.entries, "hash": self.hash}


@dataclass(frozen=True)
class Chain:
    """The checked content of a ledger file.

    `header` is the plan, `entries` the releases, both without the keys that belong to the file. `hashes[i]` is the hash
    of line i, `counts[i]` the number of releases up to it. `complete` is the number of bytes in complete lines.
    """

    format: int
    run: str | None
    places: tuple[str, ...]  # where the file was when it was created, and after each adoption
    header: dict[str, Any]
    entries: tuple[dict[str, Any], ...]
    hashes: tuple[bytes, ...]
    counts: tuple[int, ...]
    complete: int
    newline_missing: bool = False

    @property
    def head(self) -> Head:
        """The end of the ledger."""
        return Head(self.counts[-1], self.hashes[-1].hex())


def encode(value: Mapping[str, Any], what: str) -> bytes:
    """The value as one line of JSON without its newline."""
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} can't be written as JSON: {error}. Give plain finite values.") from error


def sealed(body: bytes, before: bytes) -> tuple[bytes, bytes]:
    """(line with hash and newline, hash) of `body`; `before` is the previous line's hash, b"" for the first line."""
    found = hashlib.sha256(before + body)
    return b'%b, "hash": "%b"}\n' % (body[:-1], found.hexdigest().encode()), found.digest()


def parse(content: bytes, path: Path) -> Chain:
    """The chain in a file's bytes; InputError names the first line that is damaged, edited or out of order."""
    complete, missing = _complete(content, path)
    lines = content[:complete].removesuffix(b"\n").split(b"\n") if complete else []
    if not lines:
        raise InputError(f"{path} is not a ledger: it has no complete first line with the plan")
    values, hashes, chained = [], [], False
    before = b""
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        values.append(_object(line, place))
        seal = _SEAL.search(line)
        if (chained and not seal) or ("hash" in values[-1]) is not bool(seal):
            raise InputError(f"{place}: the line has no hash at its end. The ledger was edited or damaged: {_RESTORE}")
        body = line if seal is None else line[: seal.start()] + b"}"
        before = hashlib.sha256(before + body).digest()
        if seal is not None and before.hex().encode() != seal[1]:
            raise InputError(
                f"{place}: the hash does not match. The line was edited or damaged, or lines before it were edited, "
                f"removed, swapped or inserted: {_RESTORE}"
            )
        chained = chained or seal is not None
        hashes.append(before)
    return _checked(values, hashes, complete, missing, path)


def _complete(content: bytes, path: Path) -> tuple[int, bool]:
    """The number of bytes in complete lines, and whether the last of them lacks its newline.

    A killed process may leave the beginning of a line. Its value was never returned, so the line does not count. A line
    that has its hash is complete and counts, with or without its newline.
    """
    complete = content.rfind(b"\n") + 1
    tail = content[complete:]
    whole = WHOLE.search(tail)
    if whole is None:
        return complete, False
    if whole.end() == len(tail):
        return len(content), True
    raise InputError(
        f"{path}: the last line has bytes after its hash, which a killed process can't cause. The ledger was edited "
        "or damaged: "
        f"{_RESTORE}"
    )


def _checked(
    values: list[dict[str, Any]], hashes: list[bytes], complete: int, newline_missing: bool, path: Path
) -> Chain:
    first, entries, counts, places = values[0], [], [0], []
    if first.get("kind") != PLAN:
        raise InputError(f"{path}, line 1: a ledger begins with the plan, but this line has kind {first.get('kind')!r}")
    form = _format(first, path)
    if form == FORMAT:
        places.append(str(first.get("place")))
    seen: dict[tuple[str, int], int] = {}
    for number, value in enumerate(values[1:], start=2):
        place = f"{path}, line {number}"
        if value.get("kind") == ADOPTED:
            places.append(str(value.get("place")))
        else:
            require_release(value, place)
            earlier = seen.setdefault((value["purpose"], value["step"]), number)
            if earlier != number:
                raise InputError(
                    f"{place}: step {value['step']} of {value['purpose']!r} is already on line {earlier}; the file was "
                    "edited or written by two runs, and its ε can't be certified"
                )
            entries.append(_without(value, "hash"))
        counts.append(len(entries))
    return Chain(
        format=form,
        run=str(first["run"]) if form == FORMAT else None,
        places=tuple(places),
        header=_without(first, *(OWN_KEYS if form == FORMAT else ())),
        entries=tuple(entries),
        hashes=tuple(hashes),
        counts=tuple(counts),
        complete=complete,
        newline_missing=newline_missing,
    )


def _format(header: Mapping[str, Any], path: Path) -> int:
    """1 for a header that is only a plan, 2 for one with all keys of the file; any other was edited, or is newer."""
    found = [key for key in OWN_KEYS if key in header]
    if not found:
        return 1
    if header.get("format") == FORMAT and len(found) == len(OWN_KEYS):
        return FORMAT
    if isinstance(header.get("format"), int) and header["format"] > FORMAT:
        raise InputError(f"{path} is a ledger of format {header['format']}, this version reads up to {FORMAT}: upgrade")
    raise InputError(f"{path}, line 1: one of the keys {', '.join(OWN_KEYS)} is missing: the ledger was edited")


def require_release(entry: Mapping[str, Any], place: str) -> None:
    """InputError unless the line is a release with a purpose and a step."""
    purpose, step = entry.get("purpose"), entry.get("step")
    if entry.get("kind") != RELEASE:
        raise InputError(f"{place}: expected kind {RELEASE!r}, got {entry.get('kind')!r}")
    if not isinstance(purpose, str) or not purpose:
        raise InputError(f"{place}: a release needs a purpose (a name), got {purpose!r}")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InputError(f"{place}: a release needs a step that counts from 0, got {step!r}")


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_once, parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:  # also a line that is not UTF-8
        raise InputError(f"{place}: not JSON ({error}). The ledger is damaged; restore it from a copy.") from error
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected a JSON object, got {type(value).__name__}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a repeated key is an error, because readers disagree on which of the two values counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is repeated")
    return found


def _not_finite(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _without(value: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: entry for key, entry in value.items() if key not in keys}
