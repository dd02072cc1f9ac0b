"""The ledger: what was released, on disk before anybody sees it.

Formal contract. A ledger is a file of JSON lines: first the plan, then one line for each release, appended
only. When `record` returns, the line is on the disk (written, fsynced); the caller hands out the value only
then. Hence, whatever kills the process and whenever, the ledger never says less than was released; it may
say more (a line whose value was lost), and that line counts as released.

| situation                                     | what happens                                              |
|-----------------------------------------------|-----------------------------------------------------------|
| last line torn by a kill                      | cut off at the next open: its value was never handed out   |
| another line is not JSON, or not a release    | InputError with file and line; nothing is repaired         |
| the plan differs                              | InputError with the keys that differ                       |
| the same release again, insecure source       | accepted, not written twice: a bit-identical replay        |
| the same (purpose, step) again, secure source | SordinoError: fresh noise on the same sum is a new release |
| disk full, file unwritable                    | SordinoError, and every later `record` fails as well       |
| a second process opens the file               | SordinoError; the lock dies with its process               |
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from sordino.errors import InputError, SordinoError

PLAN, RELEASE = "plan", "release"
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_NOT_COMPARED = ("time",)  # a replay happens later than what it repeats


Guard = Callable[[Mapping[str, Any]], None]


class Ledger:
    """Open with `Ledger.open`; one process at a time. With `path=None` it is kept in memory only."""

    def __init__(
        self, path: Path | None, descriptor: int | None, header: dict[str, Any], entries: list[dict[str, Any]]
    ) -> None:
        self.path = path
        self.header = header
        self._descriptor = descriptor
        self._known: dict[tuple[str, int], dict[str, Any] | bytes] = {}  # in order; lines that nobody has asked for
        self._last: dict[str, int] = {}
        for entry in entries:
            self._note(entry["purpose"], entry["step"], entry)
        self._failure: str | None = None
        self._guard: Guard | None = None
        self._process = os.getpid()

    @classmethod
    def open(cls, path: Path | None, header: Mapping[str, Any]) -> Ledger:
        """Creates the ledger, or opens the one that is there if it belongs to the same plan.

        Args:
            path: The file; None keeps the ledger in memory.
            header: The plan, as `Plan.to_dict()` gives it.

        Returns:
            The open ledger, locked for this process; close it, or use it in a `with` statement.

        Raises:
            InputError: the file is damaged, can't be written, or belongs to another plan.
            SordinoError: another run has it open.
        """
        line = _line({"kind": PLAN, **header}, "the plan")
        wanted = json.loads(line)
        if wanted["kind"] != PLAN:
            raise InputError(f"a ledger's header has kind {PLAN!r}, got {wanted['kind']!r}")
        if path is None:
            return cls(None, None, wanted, [])
        path = Path(path)
        descriptor = _open_locked(path)
        try:
            _sync_directory(path)
            content = path.read_bytes()
            if line.startswith(content) and content != line:  # new, or torn while the header was written
                os.ftruncate(descriptor, 0)
                _append(descriptor, line, path)
                return cls(path, descriptor, wanted, [])
            found, entries, complete = _parse(content, path)
            _require_same_plan(found, wanted, path)
            if complete < len(content):
                os.ftruncate(descriptor, complete)
                os.fsync(descriptor)
            return cls(path, descriptor, found, entries)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """All releases, in the order of their recording (a copy of the list: not for an inner loop)."""
        return tuple(self._entry(key) for key in self._known)

    def last_step(self, purpose: str) -> int:
        """The highest step recorded for a purpose.

        Args:
            purpose: What was released, for example "gradient".

        Returns:
            The step, −1 if there is none.
        """
        return self._last.get(purpose, -1)

    def guard(self, guard: Guard) -> None:
        """Has every new entry examined before it is written.

        Args:
            guard: Called with each new entry; it refuses the entry by raising.
        """
        self._guard = guard

    def record(self, entry: Mapping[str, Any]) -> None:
        """Puts one release on the disk. When this returns it is there; when it raises, nothing may be released.

        Args:
            entry: What is released: purpose, step, noise and sampling.

        Raises:
            SordinoError: the entry can't be written, or this step was released before with fresh noise.
            InputError: the entry is no release.
        """
        if self._failure is not None:
            raise SordinoError(f"{self._place()}: {self._failure}; nothing more is released. Open the ledger again.")
        if os.getpid() != self._process:  # the lock is shared with the parent, the entries in memory are not
            raise SordinoError(
                f"{self._place()} was opened by another process, of which this one is a fork: two processes would "
                "release under one lock. Open it where it is used."
            )
        complete = {"kind": RELEASE, **entry}
        complete.setdefault("time", datetime.now(UTC).isoformat(timespec="milliseconds"))
        _require_release(complete, f"{self._place()}, new entry")
        line, purpose, step = _line(complete, "the entry"), complete["purpose"], complete["step"]
        if (purpose, step) in self._known:
            self._require_replay(self._entry((purpose, step)), json.loads(line))
            return
        if self._guard is not None:
            self._guard(json.loads(line))
        if self._descriptor is not None:
            try:
                _append(self._descriptor, line, self._place())
            except SordinoError as error:
                self._failure = f"an earlier entry could not be written ({error})"
                raise
        self._note(purpose, step, line)

    def _require_replay(self, known: dict[str, Any], again: dict[str, Any]) -> None:
        what = f"{self._place()}: step {known['step']} of {known['purpose']!r} was already released"
        if known.get("secure") is not False or again.get("secure") is not False:
            raise SordinoError(
                f"{what}. Fresh noise on it would be a second release that is not accounted for: go on after "
                f"step {self.last_step(known['purpose'])} (it counts as released even if its update was lost)."
            )
        unknown = () if "source" in known else ("source",)  # entries of earlier versions do not name it
        different = _differences(known, again, (*_NOT_COMPARED, *unknown))
        if different:
            raise SordinoError(f"{what} with other settings, so this is no replay: {different}.")

    def _note(self, purpose: str, step: int, entry: dict[str, Any] | bytes) -> None:
        self._known[purpose, step] = entry
        self._last[purpose] = max(self._last.get(purpose, -1), step)

    def _entry(self, key: tuple[str, int]) -> dict[str, Any]:
        """As it is on the disk: read back from its line when it is first asked for, not in the midst of a step."""
        known = self._known[key]
        if isinstance(known, bytes):
            known = self._known[key] = json.loads(known)
        return known

    def _place(self) -> str:
        return "ledger in memory" if self.path is None else str(self.path)

    def close(self) -> None:
        """Give up the file and its lock; recording afterwards raises."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._failure = self._failure or "the ledger is closed"

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_ledger(path: Path) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """(header, releases) of a ledger file, also of a live one: a last line without its end is left out."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"the ledger {path} can't be read: {error.strerror}. Give the run's ledger.jsonl.") from error
    header, entries, _ = _parse(content, path)
    return header, tuple(entries)


def _open_locked(path: Path) -> int:
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


def _append(descriptor: int, line: bytes, place: Path | str) -> None:
    """Write one line and fsync it; on failure take back what was written, as far as the disk lets us."""
    size = os.fstat(descriptor).st_size
    try:
        view = memoryview(line)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):  # otherwise the torn line is cut off at the next open
            os.ftruncate(descriptor, size)
        raise SordinoError(
            f"{place} can't be written: {error.strerror}. The value was not released; free space and resume."
        ) from error


def _sync_directory(path: Path) -> None:
    """Make the file's name durable as well, also when the process that created it was killed before it could."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _line(value: Mapping[str, Any], what: str) -> bytes:
    try:
        return (_ENCODER.encode(value) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} can't be written as JSON: {error}. Give plain finite values.") from error


def _parse(content: bytes, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Header, releases, and the number of bytes in complete lines."""
    complete = content.rfind(b"\n") + 1
    lines = content[:complete].split(b"\n")[:-1]
    if not lines:
        raise InputError(f"{path} is not a ledger: it has no complete first line with the plan")
    values = [_object(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    header, entries = values[0], values[1:]
    if header.get("kind") != PLAN:
        raise InputError(f"{path}, line 1: a ledger begins with the plan, here is kind {header.get('kind')!r}")
    seen: dict[tuple[str, int], int] = {}
    for number, entry in enumerate(entries, start=2):
        _require_release(entry, f"{path}, line {number}")
        first = seen.setdefault((entry["purpose"], entry["step"]), number)
        if first != number:
            raise InputError(
                f"{path}, line {number}: step {entry['step']} of {entry['purpose']!r} is already on line {first}; "
                "the file was edited or written by two runs, and its ε can't be certified"
            )
    return header, entries, complete


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:  # also a line that is not UTF-8
        raise InputError(f"{place}: not JSON ({error}). The ledger is damaged; restore it from a copy.") from error
    if not isinstance(value, dict):
        raise InputError(f"{place}: a JSON object is expected, here is {type(value).__name__}")
    return value


def _require_release(entry: Mapping[str, Any], place: str) -> None:
    purpose, step = entry.get("purpose"), entry.get("step")
    if entry.get("kind") != RELEASE:
        raise InputError(f"{place}: kind {RELEASE!r} is expected, here is {entry.get('kind')!r}")
    if not isinstance(purpose, str) or not purpose:
        raise InputError(f"{place}: a release has a purpose (a name), here is {purpose!r}")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InputError(f"{place}: a release has a step that counts from 0, here is {step!r}")


def _require_same_plan(found: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    different = _differences(found, wanted, ())
    if different:
        raise InputError(
            f"{path} belongs to another plan: {different}. Resume with the recipe that began it, or give the "
            "new run a directory of its own."
        )


def _differences(there: dict[str, Any], here: dict[str, Any], ignored: tuple[str, ...]) -> str:
    absent = "(absent)"
    keys = [k for k in {**there, **here} if k not in ignored and there.get(k, absent) != here.get(k, absent)]
    return "; ".join(f"{k} is {there.get(k, absent)!r} there and {here.get(k, absent)!r} here" for k in keys)
