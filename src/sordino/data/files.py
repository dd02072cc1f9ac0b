"""Finding and opening the files of a dataset; every error names the file and what is wrong with it."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import zlib
from pathlib import Path

from sordino.errors import InputError, SordinoError

VARIABLE = "SORDINO_DATA"
PACKINGS = ("", ".gz", ".xz", ".bz2")


def data_directory(data_dir: Path | str | None = None) -> Path:
    """The folder that holds the datasets: the argument, else $SORDINO_DATA, else ./data."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    return Path(os.environ.get(VARIABLE) or "data").expanduser()


def find_content(root: Path, relative: str) -> Path | None:
    """root/relative as a folder, or as a file, plain or packed (a name that ends in .gz, … stands for itself)."""
    path = root / relative
    if path.is_dir():
        return path
    for packing in ("",) if path.suffix in PACKINGS[1:] else PACKINGS:
        candidate = path.with_name(f"{path.name}{packing}")
        if candidate.is_file():
            return candidate
    return None


def missing(dataset: str, relative: str, root: Path) -> InputError:
    return InputError(
        f"dataset {dataset!r}: no file {relative} in {root}. Run `sordino data fetch {dataset} --data-dir "
        f"{root}`, or set {VARIABLE} (or --data-dir) to the folder that holds it; `sordino data list` "
        "shows the layouts"
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
