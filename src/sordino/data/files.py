"""Finds and opens the files of a dataset; every error names the file and the problem."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from sordino.errors import InputError, SordinoError

VARIABLE = "SORDINO_DATA"
PACKINGS = ("", ".gz", ".xz", ".bz2")


def data_directory(data_dir: Path | str | None = None) -> Path:
    """The folder with the datasets.

    Args:
        data_dir: The folder; None: $SORDINO_DATA, else ./data.

    Returns:
        The folder, with `~` expanded. It need not exist.
    """
    if data_dir is not None:
        return Path(data_dir).expanduser()
    return Path(os.environ.get(VARIABLE) or "data").expanduser()


def find_content(root: Path, relative: str) -> Path | None:
    """The folder root/relative, or the file, plain or compressed; None if there is neither.

    A name that already ends in .gz, .xz or .bz2 is not completed by a further suffix.
    """
    path = root / relative
    if path.is_dir():
        return path
    for packing in ("",) if path.suffix in PACKINGS[1:] else PACKINGS:
        candidate = path.with_name(f"{path.name}{packing}")
        if candidate.is_file():
            return candidate
    return None


def missing(dataset: str, relative: str, root: Path) -> InputError:
    """The error for a file that is not there; it says how to get it."""
    return InputError(
        f"dataset {dataset!r}: no file {relative} in {root}. Run `sordino data fetch {dataset} --data-dir "
        f"{root}`, or set {VARIABLE} (or --data-dir) to the folder that contains it"
    )


MOST = 1 << 30
"""Largest unpacked size of a file. The largest in the catalogue has 183 MB; a small .gz may unpack to endless zeros."""


def read_bytes(path: Path, declared: Callable[[bytes], int | None] = lambda head: None) -> bytes:
    """The content of a file, unpacked according to its suffix, up to the size that it may have.

    Args:
        path: The file.
        declared: Maps the first 64 bytes of the content to the size that it declares, or None. One byte more than that
            is read, so that a longer content is detected.

    Raises:
        InputError: empty, truncated, or larger than 1 GiB when unpacked.
        SordinoError: it can't be read.
    """
    try:
        with _opened(path) as file:
            head = file.read(64)
            size = declared(head)
            most = MOST if size is None else min(size, MOST)
            content = head + file.read(max(most + 1 - len(head), 0))
    except (EOFError, ValueError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: truncated or not a {path.suffix} file; download it again", private=str(error)
        ) from error
    except OSError as error:
        if error.errno is None:  # bz2 raises this for a file that is not bz2
            raise InputError(
                f"{path}: truncated or not a {path.suffix} file; download it again", private=str(error)
            ) from error
        raise SordinoError(f"{path}: can't be read: {error.strerror or error}") from error
    if not content:
        raise InputError(f"{path}: the file is empty; download it again")
    if len(content) > MOST:
        raise InputError(f"{path}: unpacks to more than {MOST:,} bytes, more than any dataset here; download it again")
    return content


def _opened(path: Path) -> IO[bytes]:
    match path.suffix:
        case ".gz":
            return cast(IO[bytes], gzip.open(path))
        case ".xz":
            return cast(IO[bytes], lzma.open(path))
        case ".bz2":
            return cast(IO[bytes], bz2.open(path))
        case _:
            return path.open("rb")


def sha256_of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SordinoError(f"{path}: can't be read: {error.strerror or error}") from error
