"""The ledger: what was released, on disk before anybody sees it.

Formal contract. A ledger is a file of JSON lines: first the plan, then one line for each release, appended
only. When `record` returns, the line is on the disk (written, fsynced); the caller hands out the value only
then. Hence, whatever kills the process and whenever, the ledger never says less than was released; it may
say more (a line whose value was lost), and that line counts as released. Each line carries a hash over itself and all
lines before it (`ledger_lines`), and the file is continued only where it was made (`ledger_place`).

| situation                                     | what happens                                              |
|-----------------------------------------------|-----------------------------------------------------------|
| last line torn by a kill                      | cut off at the next open: its value was never handed out   |
| another line is not JSON, or not a release    | InputError with file and line; nothing is repaired         |
| a line edited, removed, exchanged, put in     | InputError with file and line, from its hash               |
| lines missing at the end                      | `require_reached` with the head that a checkpoint kept     |
| the plan differs                              | InputError with the keys that differ                       |
| the file is a copy, or was moved or restored  | Refused, until `adopt` records that the original is gone   |
| the same release again, insecure source       | accepted, not written twice: a bit-identical replay        |
| the same (purpose, step) again, secure source | SordinoError: fresh noise on the same sum is a new release |
| disk full, file unwritable                    | SordinoError, and every later `record` fails as well       |
| a second process opens the file, or a fork    | SordinoError; the lock dies with its process               |
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from sordino.errors import InputError, Refused, SordinoError
from sordino.release.ledger_lines import (
    ADOPTED,
    FORMAT,
    OWN_KEYS,
    PLAN,
    RELEASE,
    WHOLE,
    Chain,
    Head,
    encode,
    parse,
    require_release,
    sealed,
)
from sordino.release.ledger_place import place_of

_NOT_COMPARED = ("time",)  # a replay happens later than what it repeats


Guard = Callable[[Mapping[str, Any]], None]
_NOTED: ContextVar[list[Path] | None] = ContextVar("ledgers that were opened", default=None)


@contextlib.contextmanager
def noted_ledgers() -> Iterator[list[Path]]:
    """A list of the ledger files that are opened inside: whoever finds one gone afterwards knows that it was there."""
    opened: list[Path] = []
    token = _NOTED.set(opened)
    try:
        yield opened
    finally:
        _NOTED.reset(token)


class Ledger:
    """Open with `Ledger.open`; one process at a time. With `path=None` it is kept in memory only."""

    def __init__(self, path: Path | None, descriptor: int | None, chain: Chain) -> None:
        self.path, self.header, self.run = path, chain.header, chain.run
        self._descriptor, self._opened = descriptor, chain
        self._hash = chain.hashes[-1]
        self._known: dict[tuple[str, int], dict[str, Any] | bytes] = {}  # in order; lines that nobody has asked for
        self._last: dict[str, int] = {}
        for entry in chain.entries:
            self._note(entry["purpose"], entry["step"], entry)
        self._failure: str | None = None
        self._guard: Guard | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._now: set[tuple[str, int]] = set()  # recorded since it was opened
        self.salt = os.urandom(16).hex()
        """Part of the address of noise that later steps use again: secret, and lost when the ledger is closed."""
        self._size = 0 if descriptor is None else os.fstat(descriptor).st_size

    @classmethod
    def open(cls, path: Path | None, header: Mapping[str, Any]) -> Ledger:
        """Creates the ledger, or opens the one that is there if it belongs to the same plan and lies where it did.

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
        wanted = _plan(header)
        if path is None:
            return cls(None, None, parse(sealed(_first(wanted, "memory", "memory"), b"")[0], Path("ledger in memory")))
        path = Path(path)
        if (noted := _NOTED.get()) is not None:
            noted.append(path)
        descriptor = _open_locked(path)
        try:
            _sync_directory(path)
            content = path.read_bytes()
            if _is_torn_header(content, wanted):  # new, or torn while the header was written
                os.ftruncate(descriptor, 0)
                run = os.urandom(16).hex()
                line, _ = sealed(_first(wanted, run, place_of(descriptor, run)), b"")
                _append(descriptor, line, path)
                return cls(path, descriptor, parse(line, path))
            chain = parse(content, path)
            _require_same_plan(chain.header, wanted, path)
            _require_same_place(chain, descriptor, path)
            if chain.newline_missing:
                _append(descriptor, b"\n", path)
            elif chain.complete < len(content):
                os.ftruncate(descriptor, chain.complete)
                os.fsync(descriptor)
            return cls(path, descriptor, chain)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def head(self) -> Head:
        """How far the ledger has come: the number of releases, and the hash that fixes all of them."""
        return Head(len(self._known), self._hash.hex())

    @property
    def name(self) -> str:
        """The run's own name: the same when its file is opened again, and another for each ledger in memory."""
        return self.salt if self.path is None or self.run is None else self.run

    @property
    def format(self) -> int:
        """1: begun by a version that wrote no hashes; 2: every line has one."""
        return self._opened.format

    @property
    def adoptions(self) -> int:
        """How often somebody stated that this is the only copy that goes on."""
        return max(0, len(self._opened.places) - 1)

    def require_reached(self, head: Head, said_by: str) -> None:
        """Refuses a ledger that does not contain everything up to `head`: it was lost, emptied, cut or rolled back.

        A ledger that has come further is what a kill leaves, and is accepted.

        Args:
            head: the number of releases and the hash that another file holds.
            said_by: that file, for the message.

        Raises:
            SordinoError: the ledger does not contain them.
        """
        at = {digest.hex(): count for digest, count in zip(self._opened.hashes, self._opened.counts, strict=True)}
        if at.get(head.hash) == head.entries:
            return
        found = len(self._opened.entries)
        what = (
            f"it holds {found} release{'' if found == 1 else 's'}, and {said_by} was written after {head.entries}"
            if found < head.entries
            else f"what it holds up to release {head.entries} is not what {said_by} was written after"
        )
        raise InputError(
            f"{self._place()} is not the ledger of this run as it was: {what}. It was lost, emptied, cut, rolled back "
            "or exchanged, so the number of releases can't be certified. Restore ledger.jsonl from a copy; where there "
            "is none, count this run's plan as spent and start anew in another directory"
        )

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

    def find(self, purpose: str, step: int, *, now: bool) -> Mapping[str, Any] | None:
        """The entry of a step; None where there is none.

        Args:
            purpose: What was released.
            step: Which one.
            now: Count what was recorded since the ledger was opened, and no more.
        """
        key = purpose, step
        return self._entry(key) if key in (self._now if now else self._known) else None

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
        if os.getpid() != self._process:  # the lock is shared with the parent, the entries in memory are not
            raise SordinoError(
                f"{self._place()} was opened by another process, of which this one is a fork: two processes would "
                "release under one lock. Open it where it is used."
            )
        with self._lock:  # two threads that record one step at once would both find it missing
            self._record(entry)

    def _record(self, entry: Mapping[str, Any]) -> None:
        if self._failure is not None:
            raise SordinoError(f"{self._place()}: {self._failure}; nothing more is released. Open the ledger again.")
        complete = {"kind": RELEASE, **entry}
        # the day alone: how long a step took would tell the size of its batch (docs/threat-model.md)
        complete.setdefault("time", datetime.now(UTC).date().isoformat())
        require_release(complete, f"{self._place()}, new entry")
        if "hash" in complete:
            raise InputError(f"{self._place()}: a release has no key 'hash' of its own")
        body, purpose, step = encode(complete, "the entry"), complete["purpose"], complete["step"]
        if (purpose, step) in self._known:
            self._require_replay(self._entry((purpose, step)), json.loads(body))
            return
        if self._guard is not None:
            self._guard(json.loads(body))
        line, digest = sealed(body, self._hash)
        if self._descriptor is not None:
            try:
                _require_whole(self._descriptor, self._size, self.path)
                _append(self._descriptor, line, self._place())
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
    chain = read_chain(path)
    return chain.header, chain.entries


def read_chain(path: Path) -> Chain:
    """A ledger file with its hashes, also of a live one.

    Raises:
        InputError: it can't be read, or a line is damaged, edited or out of its place.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"the ledger {path} can't be read: {error.strerror}. Give the run's ledger.jsonl.") from error
    return parse(content, path)


def adopt(path: Path) -> bool:
    """Records that the ledger lies here now and that no other copy of its run goes on: the owner's own statement.

    Returns:
        False where the ledger lies where it did, and nothing was written.
    """
    path = Path(path)
    read_chain(path)  # where there is no ledger, none is made
    descriptor = _open_locked(path)
    try:
        chain = read_chain(path)
        if chain.run is None or chain.places[-1] == (here := place_of(descriptor, chain.run)):
            return False
        os.ftruncate(descriptor, chain.complete)
        note = {"kind": ADOPTED, "place": here, "releases": len(chain.entries)}
        line, _ = sealed(encode(note, "the adoption"), chain.hashes[-1])
        _append(descriptor, (b"\n" if chain.newline_missing else b"") + line, path)
        return True
    finally:
        os.close(descriptor)


def _plan(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header as it comes back from JSON."""
    wanted: dict[str, Any] = json.loads(encode({"kind": PLAN, **header}, "the plan"))
    if wanted["kind"] != PLAN:
        raise InputError(f"a ledger's header has kind {PLAN!r}, got {wanted['kind']!r}")
    if own := [key for key in OWN_KEYS if key in wanted]:
        raise InputError(f"a plan has no keys {', '.join(own)}: they are the ledger's own")
    return wanted


def _first(wanted: Mapping[str, Any], run: str, place: str) -> bytes:
    return encode({**wanted, "format": FORMAT, "run": run, "place": place}, "the plan")


def _is_torn_header(content: bytes, wanted: Mapping[str, Any]) -> bool:
    """Whether the file is empty, or ends within the header that this plan has: nothing was released yet."""
    fixed = _first(wanted, "", "").partition(b'"run": "')[0]
    begun = fixed.startswith(content) or content.startswith(fixed)
    return b"\n" not in content and not WHOLE.search(content) and begun


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


def _require_whole(descriptor: int, size: int, path: Path | None) -> None:
    """Refuses to go on with a file that was deleted, emptied, written to or exchanged: its entries would be lost."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return
    how = "deleted" if not found.st_nlink else "changed" if found.st_size != size else ""
    if not how and path is not None:
        with contextlib.suppress(OSError):  # the directory may have been renamed; its ledger goes on
            how = "" if os.path.samestat(os.stat(path), found) else "exchanged"
    if how:
        raise SordinoError(
            f"{path} was {how} while the run was at work, so what was released can't be certified any more. Nothing "
            "more is released: restore the ledger from a copy"
        )


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


def _require_same_place(chain: Chain, descriptor: int, path: Path) -> None:
    """Refuses to continue a copy. A replay of an insecure seed gives the same values again, wherever it is made."""
    if chain.run is None or chain.header.get("insecure_seed") is not None:
        return
    if chain.places[-1] != place_of(descriptor, chain.run):
        raise Refused(
            f"{path} does not lie where it was written: the directory was copied, moved to another disk or machine, or "
            "restored. If the original is resumed too, the same steps are released twice and no ledger counts both. "
            "If no other copy will ever be resumed, say so with --adopt (sordino.release.adopt): the ledger records it"
        )


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
