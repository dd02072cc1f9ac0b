"""The SQLite file of a budget: its tables, its seal against damage and edits, and its transactions."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sordino.errors import InputError, SordinoError
from sordino.files import sync_folder

VERSION = 3
WAIT = 120.0  # seconds to wait for other runs that add up their cost
_TABLES = """
CREATE TABLE about (version INTEGER NOT NULL, key BLOB NOT NULL, seal BLOB);
CREATE TABLE datasets (
    digest TEXT PRIMARY KEY, name TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL, relation TEXT NOT NULL,
    filter_order REAL NOT NULL
);
CREATE TABLE runs (
    token TEXT PRIMARY KEY, digest TEXT NOT NULL REFERENCES datasets, folder TEXT NOT NULL, state TEXT NOT NULL,
    cost TEXT NOT NULL
);
"""


class _Damaged(Exception):
    """The file was not written by this package, or was changed."""


def _content(base: sqlite3.Connection) -> bytes:
    tables = [base.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in ("datasets", "runs")]
    return json.dumps(tables).encode()


def _seal(base: sqlite3.Connection, key: bytes) -> None:
    base.execute("UPDATE about SET seal = ?", (hmac.digest(key, _content(base), "sha256"),))


def _opened(base: sqlite3.Connection) -> bytes:
    """The key of a file whose seal matches. The seal detects damage and edits, but not a forger who reads the key."""
    rows = base.execute("SELECT * FROM about").fetchall()
    if len(rows) == 1 and rows[0][0] == 2:  # written by a version without seals
        base.execute("ALTER TABLE about ADD COLUMN seal BLOB")
        base.execute("UPDATE about SET version = ?", (VERSION,))
        _seal(base, rows[0][1])
        rows = base.execute("SELECT * FROM about").fetchall()
    if len(rows) != 1 or rows[0][0] != VERSION or not isinstance(rows[0][1], bytes) or len(rows[0][1]) != 32:
        raise _Damaged("it belongs to another version of sordino")
    _, key, seal = rows[0]
    try:
        content = _content(base)
    except TypeError as error:
        raise _Damaged("a cell has a wrong type") from error
    if not isinstance(seal, bytes) or not hmac.compare_digest(seal, hmac.digest(key, content, "sha256")):
        raise _Damaged("its rows do not match its seal")
    return bytes(key)


def create(path: Path) -> None:
    """Creates the file under a temporary name and then links it, so that it is never incomplete."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        os.close(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            with closing(sqlite3.connect(aside, isolation_level=None)) as base:
                for statement in _TABLES.split(";"):
                    base.execute(statement)
                key = secrets.token_bytes(32)
                base.execute("INSERT INTO about VALUES (?, ?, NULL)", (VERSION, key))
                _seal(base, key)
            os.link(aside, path)
        finally:
            os.unlink(aside)
        sync_folder(path.absolute().parent)
    except FileExistsError:
        return  # another process has created it
    except OSError as error:
        raise InputError(f"the budget file {path} can't be created: {error.strerror or error}") from error


@contextmanager
def transaction(path: Path) -> Iterator[tuple[sqlite3.Connection, bytes]]:
    """A transaction, (connection, key): atomic, one process at a time, on disk when the block ends."""
    try:
        base = sqlite3.connect(path, timeout=WAIT, isolation_level=None)
        try:
            base.execute("PRAGMA synchronous = EXTRA")
            base.execute("BEGIN IMMEDIATE")
            try:
                key = _opened(base)
                yield base, key
                _seal(base, key)
            except BaseException:
                base.execute("ROLLBACK")
                raise
            base.execute("COMMIT")
        finally:
            base.close()
    except sqlite3.OperationalError as error:
        raise SordinoError(f"the budget file {path} can't be used: {error}") from error
    except (sqlite3.DatabaseError, _Damaged) as error:
        raise InputError(
            f"{path} is not a budget file, or was damaged or edited: {error}. Nothing was counted; use the "
            "newest copy that you have, and count the runs since then"
        ) from error
