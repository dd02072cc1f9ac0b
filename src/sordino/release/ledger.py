"""The ledger: a record of every release, on disk before the released value is returned.

Formal contract. A ledger is an append-only file of JSON lines: first the plan, then one line for each release. When
`record` returns, the line is on disk (written and synced), and only then does the caller return the value. So whenever
the process is killed, the ledger holds every release that was made. It may hold one more (a line whose value was lost),
and that line counts as a release. Each line contains a hash of itself and all lines before it (`ledger_lines`), and the
file is continued only at the place where it was created (`ledger_place`).

| situation                                       | result                                                     |
|-------------------------------------------------|------------------------------------------------------------|
| the last line is incomplete (killed process)    | removed at the next open: its value was never returned     |
| another line is not JSON, or not a release      | InputError with file and line; nothing is repaired         |
| a line was edited, removed, swapped or inserted | InputError with file and line, from its hash               |
| lines are missing at the end                    | `require_reached` with the head that a checkpoint stored   |
| the plan differs                                | InputError with the keys that differ                       |
| the file is a copy, or was moved or restored    | Refused, until `adopt` records that the original is gone   |
| the same release again, insecure source         | accepted, not written twice: a bit-identical replay        |
| the same (purpose, step) again, secure source   | SordinoError: fresh noise on the same sum is a new release |
| disk full, file unwritable                      | SordinoError, and every later `record` fails as well       |
| a second process opens the file, or a fork      | SordinoError; the lock ends with its process               |
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from sordino.errors import InputError, SordinoError
from sordino.release.ledger_file import (
    append,
    differences,
    first_line,
    is_torn_header,
    open_locked,
    plan_header,
    require_same_place,
    require_same_plan,
    require_whole,
    sync_directory,
)
from sordino.release.ledger_lines import ADOPTED, RELEASE, Chain, Head, encode, parse, require_release, sealed
from sordino.release.ledger_place import place_of

_NOT_COMPARED = ("time",)  # a replay happens later than the release that it repeats


Guard = Callable[[Mapping[str, Any]], None]
_NOTED: ContextVar[list[Path] | None] = ContextVar("ledgers that were opened", default=None)


@contextlib.contextmanager
def noted_ledgers() -> Iterator[list[Path]]:
    """Lists the ledger files that are opened inside the block, so that the caller can later detect a missing one."""
    opened: list[Path] = []
    token = _NOTED.set(opened)
    try:
        yield opened
    finally:
        _NOTED.reset(token)


class Ledger:
    """Every release of a run. Open it with `Ledger.open`, in one process at a time.

    Args:
        path: The file; None: the ledger is kept in memory.
        descriptor: The open file, if there is one.
        chain: The releases that the file contains already.
    """

    def __init__(self, path: Path | None, descriptor: int | None, chain: Chain) -> None:
        self.path, self.header, self.run = path, chain.header, chain.run
        self._descriptor, self._opened = descriptor, chain
        self._hash = chain.hashes[-1]
        self._known: dict[tuple[str, int], dict[str, Any] | bytes] = {}  # in order; bytes: not yet parsed
        self._last: dict[str, int] = {}
        for entry in chain.entries:
            self._note(entry["purpose"], entry["step"], entry)
        self._failure: str | None = None
        self._guard: Guard | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._now: set[tuple[str, int]] = set()  # recorded since it was opened
        self.salt = os.urandom(16).hex()
        """Part of the address of noise that later steps add again. Secret, and discarded when the ledger is closed."""
        self._size = 0 if descriptor is None else os.fstat(descriptor).st_size

    @classmethod
    def open(cls, path: Path | None, header: Mapping[str, Any]) -> Ledger:
        """Creates the ledger, or opens an existing one if it has the same plan and is where it was written.

        Args:
            path: The file; None keeps the ledger in memory.
            header: The plan, as `Plan.to_dict()` gives it.

        Returns:
            The open ledger, locked for this process; close it, or use it in a `with` statement.

        Raises:
            InputError: the file is damaged, was edited, can't be written, or belongs to another plan.
            Refused: it is a copy, or was moved or restored.
            SordinoError: another run has it open.
        """
        wanted = plan_header(header)
        if path is None:
            line, _ = sealed(first_line(wanted, "memory", "memory"), b"")
            return cls(None, None, parse(line, Path("ledger in memory")))
        path = Path(path)
        if (noted := _NOTED.get()) is not None:
            noted.append(path)
        descriptor = open_locked(path)
        try:
            sync_directory(path)
            content = path.read_bytes()
            if is_torn_header(content, wanted):  # new, or killed while the header was being written
                os.ftruncate(descriptor, 0)
                run = os.urandom(16).hex()
                line, _ = sealed(first_line(wanted, run, place_of(descriptor, run)), b"")
                append(descriptor, line, path)
                return cls(path, descriptor, parse(line, path))
            chain = parse(content, path)
            require_same_plan(chain.header, wanted, path)
            require_same_place(chain, descriptor, path)
            if chain.newline_missing:
                append(descriptor, b"\n", path)
            elif chain.complete < len(content):
                os.ftruncate(descriptor, chain.complete)
                os.fsync(descriptor)
            return cls(path, descriptor, chain)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def head(self) -> Head:
        """The number of releases so far, and the hash that commits to all of them."""
        return Head(len(self._known), self._hash.hex())

    @property
    def name(self) -> str:
        """Identifies the run: the same when its file is opened again, different for each ledger in memory."""
        return self.salt if self.path is None or self.run is None else self.run

    @property
    def format(self) -> int:
        """1: started by a version that wrote no hashes; 2: every line has a hash."""
        return self._opened.format

    @property
    def adoptions(self) -> int:
        """How often the owner stated that this is the only copy that is continued."""
        return max(0, len(self._opened.places) - 1)

    def require_reached(self, head: Head, stated_by: str) -> None:
        """Refuses a ledger that does not contain everything up to `head`: it was lost, truncated or rolled back.

        A ledger with further entries is what a killed process leaves, and is accepted.

        Args:
            head: The number of releases and the hash that another file states.
            stated_by: The name of that file, for the message.

        Raises:
            SordinoError: the ledger does not contain them.
        """
        at = {digest.hex(): count for digest, count in zip(self._opened.hashes, self._opened.counts, strict=True)}
        if at.get(head.hash) == head.entries:
            return
        found = len(self._opened.entries)
        what = (
            f"it holds {found} release{'' if found == 1 else 's'}, but {stated_by} was written after {head.entries}"
            if found < head.entries
            else f"its first {head.entries} releases are not those that {stated_by} was written after"
        )
        raise InputError(
            f"{self._place()} is not this run's complete ledger: {what}. It was lost, truncated, rolled back or "
            "replaced, so the number of releases can't be certified. Restore ledger.jsonl from a copy; if there is "
            "none, count this run's whole plan as spent and start again in another directory"
        )

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """All releases in the order in which they were recorded. Each access makes a copy."""
        return tuple(self._entry(key) for key in self._known)

    def last_step(self, purpose: str) -> int:
        """The highest step recorded for a purpose.

        Args:
            purpose: What was released, for example "gradient".

        Returns:
            The step, or −1 if there is none.
        """
        return self._last.get(purpose, -1)

    def find(self, purpose: str, step: int, *, now: bool) -> Mapping[str, Any] | None:
        """The entry of a step, or None.

        Args:
            purpose: What was released.
            step: The step.
            now: Look only among entries recorded since the ledger was opened.
        """
        key = purpose, step
        return self._entry(key) if key in (self._now if now else self._known) else None

    def guard(self, guard: Guard) -> None:
        """Sets a function that checks every new entry before it is written.

        Args:
            guard: Called with each new entry; it refuses the entry by raising.
        """
        self._guard = guard

    def record(self, entry: Mapping[str, Any]) -> None:
        """Writes one release to disk. When this returns, the entry is there; if it raises, nothing may be released.

        Args:
            entry: What is released: purpose, step, noise and sampling.

        Raises:
            SordinoError: the entry can't be written, or this step was released before with fresh noise.
            InputError: the entry is not a release.
        """
        if os.getpid() != self._process:  # the lock is shared with the parent, the entries in memory are not
            raise SordinoError(
                f"{self._place()} was opened before this process was forked: two processes would release under one "
                "lock. Open the ledger in the process that uses it."
            )
        with self._lock:  # otherwise two threads that record the same step at once would both find it missing
            self._record(entry)

    def _record(self, entry: Mapping[str, Any]) -> None:
        if self._failure is not None:
            raise SordinoError(f"{self._place()}: {self._failure}; nothing more is released. Open the ledger again.")
        complete = {"kind": RELEASE, **entry}
        # Only the day: the duration of a step would reveal the size of its batch (docs/threat-model.md).
        complete.setdefault("time", datetime.now(UTC).date().isoformat())
        require_release(complete, f"{self._place()}, new entry")
        if "hash" in complete:
            raise InputError(f"{self._place()}: a release can't have the key 'hash': the ledger file reserves it")
        body, purpose, step = encode(complete, "the entry"), complete["purpose"], complete["step"]
        if (purpose, step) in self._known:
            self._require_replay(self._entry((purpose, step)), json.loads(body))
            return
        if self._guard is not None:
            self._guard(json.loads(body))
        line, digest = sealed(body, self._hash)
        if self._descriptor is not None:
            try:
                require_whole(self._descriptor, self._size, self.path)
                append(self._descriptor, line, self._place())
            except SordinoError as error:
                self._failure = f"an earlier entry could not be written ({error})"
                raise
            self._size += len(line)
        self._hash = digest
        self._now.add((purpose, step))
        self._note(purpose, step, body)

    def _require_replay(self, known: dict[str, Any], again: dict[str, Any]) -> None:
        what = f"{self._place()}: step {known['step']} of {known['purpose']!r} was already released"
        if known.get("secure") is not False or again.get("secure") is not False:
            raise SordinoError(
                f"{what}. Fresh noise on it would be a second release that is not accounted for: continue after "
                f"step {self.last_step(known['purpose'])} (it counts as released even if its update was lost)."
            )
        unknown = () if "source" in known else ("source",)  # entries of earlier versions do not name it
        different = differences(known, again, (*_NOT_COMPARED, *unknown))
        if different:
            raise SordinoError(f"{what} with other settings, so this is not a replay: {different}.")

    def _note(self, purpose: str, step: int, entry: dict[str, Any] | bytes) -> None:
        self._known[purpose, step] = entry
        self._last[purpose] = max(self._last.get(purpose, -1), step)

    def _entry(self, key: tuple[str, int]) -> dict[str, Any]:
        """The entry as it reads back from its line; parsed on first use, not while a step is running."""
        known = self._known[key]
        if isinstance(known, bytes):
            known = self._known[key] = json.loads(known)
        return known

    def _place(self) -> str:
        return "ledger in memory" if self.path is None else str(self.path)

    def close(self) -> None:
        """Closes the file and releases its lock; recording afterwards raises."""
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
    """Reads a ledger file, which may be in use: an incomplete last line is left out.

    Args:
        path: The file.

    Returns:
        (header, releases): the plan as `Plan.to_dict()` gives it, and the entries in the order of the file.

    Raises:
        InputError: it can't be read, or a line is damaged, edited or out of order.
    """
    chain = read_chain(path)
    return chain.header, chain.entries


def read_chain(path: Path) -> Chain:
    """Reads a ledger file with its hashes; the file may be in use.

    Args:
        path: The file.

    Returns:
        The checked content.

    Raises:
        InputError: it can't be read, or a line is damaged, edited or out of order.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"the ledger {path} can't be read: {error.strerror}. Give the run's ledger.jsonl.") from error
    return parse(content, path)


def adopt(path: Path) -> bool:
    """Records the owner's statement that the ledger is now here and that no other copy of its run is continued.

    Args:
        path: The ledger file.

    Returns:
        False if the ledger is where it was written, so that nothing had to be recorded.

    Raises:
        InputError: there is no ledger, or it is damaged.
        SordinoError: another run has it open, or it can't be written.
    """
    path = Path(path)
    read_chain(path)  # raises if there is no ledger, so that none is created
    descriptor = open_locked(path)
    try:
        chain = read_chain(path)
        if chain.run is None or chain.places[-1] == (here := place_of(descriptor, chain.run)):
            return False
        os.ftruncate(descriptor, chain.complete)
        note = {"kind": ADOPTED, "place": here, "releases": len(chain.entries)}
        line, _ = sealed(encode(note, "the adoption"), chain.hashes[-1])
        append(descriptor, (b"\n" if chain.newline_missing else b"") + line, path)
        return True
    finally:
        os.close(descriptor)
