"""The ledger as a file: its header, its lock, appended lines that are synced to disk, and the checks before reuse."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sordino.errors import InputError, Refused, SordinoError
from sordino.release.ledger_lines import FORMAT, OWN_KEYS, PLAN, WHOLE, Chain, encode
from sordino.release.ledger_place import place_of


def plan_header(header: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as it reads back from JSON; InputError if it has keys that belong to the file."""
    wanted: dict[str, Any] = json.loads(encode({"kind": PLAN, **header}, "the plan"))
    if wanted["kind"] != PLAN:
        raise InputError(f"a ledger's header has kind {PLAN!r}, got {wanted['kind']!r}")
    if own := [key for key in OWN_KEYS if key in wanted]:
        raise InputError(f"a plan can't have the keys {', '.join(own)}: they are reserved for the ledger file")
    return wanted


def first_line(wanted: Mapping[str, Any], run: str, place: str) -> bytes:
    """The first line of a ledger, without its hash."""
    return encode({**wanted, "format": FORMAT, "run": run, "place": place}, "the plan")


def is_torn_header(content: bytes, wanted: Mapping[str, Any]) -> bool:
    """Whether the file is empty or ends within this plan's header, so that nothing was released yet."""
    fixed = first_line(wanted, "", "").partition(b'"run": "')[0]
    begun = fixed.startswith(content) or content.startswith(fixed)
    return b"\n" not in content and not WHOLE.search(content) and begun


def open_locked(path: Path) -> int:
    """Opens the file for appending, creates it if needed, and locks it; returns the file descriptor."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InputError(f"the ledger {path} can't be opened for writing: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError(f"the ledger {path} is not a regular file; give a path on a disk")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SordinoError(
            f"the ledger {path} is in use by another run (or is open twice in this one). Wait until it ends, or "
            "give this run a directory of its own."
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_whole(descriptor: int, size: int, path: Path | None) -> None:
    """Refuses to append to a file that was deleted, truncated, written to or replaced: entries would be lost."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return
    how = "deleted" if not found.st_nlink else "changed" if found.st_size != size else ""
    if not how and path is not None:
        with contextlib.suppress(OSError):  # the directory may have been renamed; its ledger is continued
            how = "" if os.path.samestat(os.stat(path), found) else "exchanged"
    if how:
        raise SordinoError(
            f"{path} was {how} during the run, so what was released can't be certified any more. Nothing more is "
            "released: restore the ledger from a copy"
        )


def append(descriptor: int, line: bytes, place: Path | str) -> None:
    """Writes one line and syncs it to disk; on failure removes what was written, as far as the disk allows."""
    size = os.fstat(descriptor).st_size
    try:
        view = memoryview(line)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):  # if this fails, the incomplete line is removed when the file is next opened
            os.ftruncate(descriptor, size)
        raise SordinoError(
            f"{place} can't be written: {error.strerror}. The value was not released; free space and resume."
        ) from error


def sync_directory(path: Path) -> None:
    """Makes the file's name durable, also if the process that created it was killed before it could."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def require_same_place(chain: Chain, descriptor: int, path: Path) -> None:
    """Refuses to continue a copy. A run with an insecure seed may be replayed anywhere: its values are the same."""
    if chain.run is None or chain.header.get("insecure_seed") is not None:
        return
    if chain.places[-1] != place_of(descriptor, chain.run):
        raise Refused(
            f"{path} is not where it was written: the directory was copied, moved to another disk or machine, or "
            "restored. If the original is resumed too, the same steps are released twice and no ledger counts both. "
            "If no other copy will ever be resumed, say so with --adopt (sordino.release.adopt): the ledger records it"
        )


def require_same_plan(found: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """InputError if the file's plan differs from the wanted one."""
    different = differences(found, wanted, ())
    if different:
        raise InputError(
            f"{path} belongs to another plan: {different}. Resume with the recipe that began it, or give the "
            "new run a directory of its own."
        )


def differences(there: dict[str, Any], here: dict[str, Any], ignored: tuple[str, ...]) -> str:
    """The keys whose values differ, as text; empty if there are none."""
    absent = "(absent)"
    keys = [k for k in {**there, **here} if k not in ignored and there.get(k, absent) != here.get(k, absent)]
    return "; ".join(f"{k} is {there.get(k, absent)!r} there and {here.get(k, absent)!r} here" for k in keys)
