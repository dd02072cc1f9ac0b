"""Finding and opening the files of a dataset; every error names the file and what is wrong with it."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from sordino.errors import InputError, SordinoError

VARIABLE = "SORDINO_DATA"
PACKINGS = ("", ".gz", ".xz", ".bz2")


def data_directory(data_dir: Path | str | None = None) -> Path:
    """The folder that holds the datasets: the argument, else $SORDINO_DATA, else ./data."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    return Path(os.environ.get(VARIABLE) or "data").expanduser()


def find(folders: Iterable[Path], name: str, packings: Iterable[str] = PACKINGS) -> Path | None:
    """The first file called `name` in these folders, plain or packed."""
    for folder in folders:
        for packing in packings:
            path = folder / f"{name}{packing}"
            if path.is_file():
                return path
    return None


def missing(dataset: str, what: Iterable[str], folders: Iterable[Path], root: Path) -> InputError:
    looked = ", ".join(str(folder) for folder in folders)
    return InputError(
        f"dataset {dataset!r}: no file {' / '.join(what)} (looked in {looked}). Run `sordino data fetch "
        f"{dataset} --data-dir {root}`, or set {VARIABLE} (or --data-dir) to the folder that holds it; "
        "`sordino data list` shows the expected layout"
    )


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked according to its suffix."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SordinoError(f"{path}: can't be read: {error.strerror or error}") from error
    if not raw:
        raise InputError(f"{path}: the file is empty; download it again")
    try:
        match path.suffix:
            case ".gz":
                return gzip.decompress(raw)
            case ".xz":
                return lzma.decompress(raw)
            case ".bz2":
                return bz2.decompress(raw)
            case _:
                return raw
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise InputError(
            f"{path}: truncated or not a {path.suffix} file ({len(raw):,} bytes): {error}; download it again"
        ) from error


def sha256_of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
