"""Atomic writing of files, directories and locks, and the format of JSON documents."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sordino.errors import InputError, SordinoError

PARTIAL = ".partial"  # suffix of a file that is being written; a killed process may leave one behind


def strict_json(text: str) -> Any:
    """Parses JSON and refuses an object with a repeated key: readers disagree on which of the two values counts.

    Args:
        text: One JSON document.

    Raises:
        ValueError: the text is not JSON, or a key is repeated.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key in found if sum(other == key for other, _ in pairs) > 1)
            raise ValueError(f"the key {twice!r} is repeated")
        return found

    return json.loads(text, object_pairs_hook=once)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """The document as indented JSON with a newline at the end."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Writes a file and syncs it to disk; on failure (such as a full disk) the old file is unchanged.

    Args:
        path: The file; its folder must exist.
        content: The whole content.
        private: Create it so that only its owner can ever read it (mode 0600).

    Raises:
        SordinoError: the file can't be written.
    """
    with written_atomically(path, private=private) as file:
        file.write(content)


@contextmanager
def written_atomically(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` when the block ends without an error.

    Args:
        path: The file; its folder must exist.
        private: Create it so that only its owner can ever read it (mode 0600).

    Raises:
        SordinoError: the file can't be written.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        if private:
            partial.unlink(missing_ok=True)  # a killed process may have left one with another mode
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW  # never writes through a link
        handle = os.open(partial, flags, 0o600 if private else 0o666)
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise SordinoError(f"{path} can't be written: {error.strerror or error}") from error


def usable_folder(path: Path) -> None:
    """Checks, without writing, that `path` is a writable folder or can be created.

    Raises:
        InputError: the path is a file or a broken link, there is no permission, or a name is too long.
    """
    try:
        nearest = path
        while not _exists(nearest):
            if nearest.is_symlink():
                raise InputError(f"{nearest} is a broken link: give another directory")
            nearest = nearest.parent
        if not nearest.is_dir():
            raise InputError(f"{nearest} is a file, so {path} can't be a directory: give another one")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise InputError(f"{path} can't be written to: no permission in {nearest}; give another directory")
        _name_lengths(path, nearest)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be used as a directory: {getattr(error, 'strerror', None) or error}") from error


def _exists(path: Path) -> bool:
    """As Path.exists, but raises if the file system does not answer."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
    return True


def _name_lengths(path: Path, nearest: Path) -> None:
    longest = os.pathconf(nearest, "PC_NAME_MAX")
    room = len(PARTIAL) + len("model.safetensors")
    for part in path.parts:
        if len(os.fsencode(part)) > longest:
            raise InputError(
                f"the name {part[:20]!r}… of a directory is longer than {longest} bytes: give a shorter one"
            )
    if len(os.fsencode(path.absolute())) + room > os.pathconf(nearest, "PC_PATH_MAX"):
        raise InputError("the path of the directory is too long for this system: give a shorter one")


def make_folder(path: Path, *, private: bool = False) -> list[Path]:
    """Creates a folder and its missing parents, synced to disk; returns the created folders, the deepest first.

    Args:
        path: The folder; an existing one is left as it is.
        private: Only its owner may enter it (mode 0700).

    Raises:
        InputError: it can't be created; folders created before the failure are removed.
    """
    made: list[Path] = []
    try:
        missing = [path]
        while not _exists(missing[-1]):
            missing.append(missing[-1].parent)
        for folder in reversed(missing[:-1]):
            try:
                folder.mkdir(mode=0o700 if private and folder == path else 0o777)
            except FileExistsError:  # another process was faster
                if not folder.is_dir():
                    raise
                continue
            made.insert(0, folder)
            sync_folder(folder.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is a file of that name")
    except (OSError, ValueError) as error:
        remove_empty(made)
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"the directory {path} can't be created: {reason}") from error
    return made


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes the empty ones of the folders, in the given order."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder for this process; does nothing if the file system can't lock folders.

    Raises:
        SordinoError: another process has locked it, or it can't be opened.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SordinoError(f"{folder} can't be opened: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SordinoError(
                f"another run is using {folder}: wait until it ends, or give this run a directory of its own"
            ) from error
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                raise SordinoError(f"{folder} can't be locked: {error.strerror or error}") from error
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` durable, if the file system can sync folders.

    Raises:
        OSError: the folder can't be opened or synced.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


_DOCUMENTS, _LARGEST = (".json", ".jsonl", ".toml", ".html"), 1 << 30


def require_regular(folder: Path) -> None:
    """Refuses a folder that can't be read safely: with a pipe, a socket or a device in it, or a document of gigabytes.

    Reading the first could wait, or go on, forever; the second would not fit into memory, and no run writes one.

    Raises:
        InputError: there is one, or the folder can't be listed.
    """
    try:
        there = sorted(path for path in folder.iterdir() if _exists(path))
        odd = [path for path in there if not (path.is_file() or path.is_dir())]
        large = [path for path in there if path.suffix in _DOCUMENTS and path.stat().st_size > _LARGEST]
    except OSError as error:
        raise InputError(f"{folder} can't be read: {error.strerror or error}") from error
    if odd:
        raise InputError(f"{odd[0]} is a pipe, a socket or a device, not a file: remove it")
    if large:
        raise InputError(f"{large[0]} is larger than a gigabyte: no run writes such a document, and it was not read")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: The file.
        what: What the error message calls it, for example "the result of the run".

    Raises:
        InputError: it can't be read, or is not a JSON object.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}, {what}, can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, {what}, is damaged: it is not JSON") from error
    if not isinstance(document, dict):
        raise InputError(f"{path}, {what}, is damaged: expected a JSON object, got {type(document).__name__}")
    return document
