"""fetch(name): downloads a dataset from its canonical addresses and checks it.

A download is written to `<file>.part`, which is renamed if its SHA-256 is correct: a file under its own name is always
complete. An interrupted download is continued (HTTP Range), also by the next call; if the server ignores Range, it
starts again. If the checksum is wrong, `<file>.part` is deleted.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from sordino.data.catalogue import Entry, Remote, entry
from sordino.data.checking import Finding, file_findings, verify, verify_entry
from sordino.data.files import VARIABLE, data_directory, sha256_of_file
from sordino.errors import SordinoError

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in total (None: unknown)
ATTEMPTS = 4
TIMEOUT = 30.0  # seconds without an answer
BLOCK = 1 << 18


def fetch(name: str, data_dir: Path | str | None = None, progress: Progress | None = None) -> tuple[Finding, ...]:
    """Downloads the files of a dataset that are missing or wrong.

    Args:
        name: The dataset.
        data_dir: The folder with the datasets; None: $SORDINO_DATA, else ./data.
        progress: Called with the name of the file, the bytes so far, and the bytes in total (None: unknown).

    Returns:
        The findings of `verify` afterwards.

    Raises:
        InputError: the dataset is unknown.
        SordinoError: no address can be reached (the message says how to get the file by hand), or a file has a wrong
            SHA-256.
    """
    known = entry(name)
    if known.embedded:
        return verify(name)
    return fetch_entry(known, data_directory(data_dir), progress)


def fetch_entry(known: Entry, root: Path, progress: Progress | None = None) -> tuple[Finding, ...]:
    if all(finding.status == "ok" for finding in file_findings(known, root)):
        return verify_entry(known, root)
    for remote in known.remotes:
        if remote.members is None and _is_right(root / remote.path, remote):
            continue
        archive = download(known, remote, root, progress)
        if remote.members is not None:
            unpack(archive, remote.members, root)
            archive.unlink()
    return verify_entry(known, root)


def _is_right(path: Path, remote: Remote) -> bool:
    return path.is_file() and sha256_of_file(path) == remote.sha256


def download(known: Entry, remote: Remote, root: Path, progress: Progress | None = None) -> Path:
    """One file, complete and checked, at root / remote.path."""
    target = root / remote.path
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SordinoError(f"{target.parent}: can't be created: {error.strerror or error}") from error
    troubles = []
    for address in remote.addresses:
        trouble = _from(address, remote, part, progress)
        if trouble is None:
            os.replace(part, target)
            return target
        troubles.append(f"{address}: {trouble}")
    raise SordinoError(_advice(known, remote, root, troubles, part))


def _from(address: str, remote: Remote, part: Path, progress: Progress | None) -> str | None:
    """Downloads to `part` until it is complete and correct; returns None, or the reason for failure."""
    trouble = "no answer"
    for _ in range(ATTEMPTS):
        before = part.stat().st_size if part.is_file() else 0
        try:
            complete = _receive(address, remote, part, progress)
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # nothing after our last byte: complete, or too long
                complete = True
            else:
                return f"HTTP {error.code} {error.reason}"
        except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
            trouble = f"{getattr(error, 'reason', None) or error or type(error).__name__}"
            if not part.is_file() or part.stat().st_size == before:
                return trouble  # no progress: retrying the same address would not help
            continue
        except OSError as error:
            raise SordinoError(f"{part}: can't be written: {error.strerror or error}") from error
        if not complete:
            trouble = f"the connection was interrupted at {part.stat().st_size:,} bytes"
            continue
        actual = sha256_of_file(part)
        if actual == remote.sha256:
            return None
        trouble = f"SHA-256 is {actual}, expected {remote.sha256} ({part.stat().st_size:,} bytes)"
        part.unlink()
        if not before:
            return trouble  # downloaded from the start and wrong: the address serves another file
    return trouble


def _receive(address: str, remote: Remote, part: Path, progress: Progress | None) -> bool:
    """Appends to `part` from its end. True if everything that the server announced has arrived."""
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "sordino", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if resumed else 0
        announced = answer.headers.get("Content-Length")
        total = have + int(announced) if announced and announced.isdigit() else None
        with part.open("ab" if resumed else "wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                have += len(block)
                if progress is not None:
                    progress(remote.path, have, total or remote.size)
    return total is None or have == total


def _advice(known: Entry, remote: Remote, root: Path, troubles: list[str], part: Path) -> str:
    kept = f" {part.stat().st_size:,} bytes are kept in {part} for the next call." if part.is_file() else ""
    where = root / remote.path
    then = f" and unpack it there (`tar xzf`) so that {root / remote.members} exists" if remote.members else ""
    return (
        f"dataset {known.name!r}: {remote.path} could not be downloaded. {'; '.join(troubles)}.{kept} "
        f"Without a network: get {remote.addresses[0]} (SHA-256 {remote.sha256}) on another machine, put "
        f"it at {where}{then}, then run `sordino data verify {known.name}`; or set {VARIABLE} to a folder "
        "that already has it"
    )


def unpack(archive: Path, folder: str, root: Path) -> None:
    """Unpacks the regular files under `folder` in a .tar.gz to a temporary place, then moves them to root/folder."""
    try:
        with tempfile.TemporaryDirectory(dir=root, prefix=".unpack.") as aside:
            with tarfile.open(archive, "r:gz") as tar:
                for member in tar:
                    name = PurePosixPath(member.name)
                    if not member.isfile() or name.is_absolute() or ".." in name.parts or "unsup" in name.parts:
                        continue
                    source = tar.extractfile(member)
                    if name.parts[0] != folder or source is None:
                        continue
                    path = Path(aside, *name.parts)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as file:
                        shutil.copyfileobj(source, file)
            _move_in(Path(aside, folder), root / folder)
    except (tarfile.TarError, EOFError) as error:
        raise SordinoError(f"{archive}: truncated or not a .tar.gz: {error}; delete it and fetch again") from error
    except OSError as error:
        raise SordinoError(f"{archive}: can't be unpacked into {root}: {error.strerror or error}") from error


def _move_in(source: Path, target: Path) -> None:
    if not target.exists():
        os.replace(source, target)
        return
    for path in sorted(source.rglob("*")):
        if path.is_file():
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, destination)
