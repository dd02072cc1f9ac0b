"""verify(name): checks that every file of a dataset is present and correct; one finding per file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sordino.data.catalogue import Content, Entry, entry
from sordino.data.files import data_directory, find_content, read_bytes, sha256_of_bytes, sha256_of_file
from sordino.data.glove import TABLE, TEXTS, read_glove
from sordino.data.loading import embedded_findings, load, load_texts
from sordino.data.types import Dataset
from sordino.errors import SordinoError
from sordino.split import Split

Status = Literal["ok", "missing", "wrong"]


@dataclass(frozen=True)
class Finding:
    """What `verify` found about one file. str() is a line.

    Args:
        path: The file.
        status: "ok", "missing" or "wrong".
        detail: What was checked, what is wrong, or what to do.
    """

    path: Path
    status: Status
    detail: str

    def __str__(self) -> str:
        return f"{self.status:7} {self.path}: {self.detail}"


def verify(name: str, data_dir: Path | str | None = None) -> tuple[Finding, ...]:
    """Checks that every file of a dataset is present and correct.

    Args:
        name: The dataset.
        data_dir: The folder with the datasets; None: $SORDINO_DATA, else ./data.

    Returns:
        One finding for each file, of the layout that is most nearly complete. The dataset is complete if all are "ok".

    Raises:
        InputError: the dataset is unknown.
    """
    known = entry(name)
    if known.embedded:
        return tuple(Finding(path, "wrong" if why else "ok", why or _CHECKED) for path, why in embedded_findings())
    return verify_entry(known, data_directory(data_dir))


_CHECKED = "SHA-256 as expected"


def verify_entry(known: Entry, root: Path) -> tuple[Finding, ...]:
    """As `verify`, for an entry that need not be in the catalogue."""
    return file_findings(known, root) + ((_word_vectors(root),) if known.vectors else ())


def _word_vectors(root: Path) -> Finding:
    """Reads GloVe's vectors completely: there is no canonical checksum for them."""
    path = next((root / name for name in (*TEXTS, TABLE) if (root / name).is_file()), None)
    try:
        words = read_glove(root)
    except SordinoError as error:
        return Finding(path or root / TEXTS[0], "missing" if path is None else "wrong", str(error))
    return Finding(path or root, "ok", f"contains vectors of {len(words.ids):,} words")


def file_findings(known: Entry, root: Path) -> tuple[Finding, ...]:
    """One finding for each file of the dataset, without the word vectors that it needs."""
    layout = max(known.layouts, key=lambda one: sum(find_content(root, c.path) is not None for c in one) / len(one))
    findings = tuple(_finding(known, root, content) for content in layout)
    if any(f.status != "ok" for f in findings) or all(f.detail == _CHECKED for f in findings):
        return findings
    return _readable(known, root, findings)


def _finding(known: Entry, root: Path, content: Content) -> Finding:
    path = find_content(root, content.path)
    if path is None:
        return Finding(root / content.path, "missing", f"run `sordino data fetch {known.name}`")
    if path.is_dir():
        return _folder(path, known)
    packed = next((remote.sha256 for remote in known.remotes if remote.path == content.path), None)
    if content.sha256 is None and packed is None:
        return Finding(path, "ok", "no canonical checksum exists for this file")
    try:
        actual = sha256_of_bytes(read_bytes(path)) if content.sha256 else sha256_of_file(path)
    except SordinoError as error:
        return Finding(path, "wrong", _message(error, path))
    expected = content.sha256 or packed
    if actual == expected:
        return Finding(path, "ok", _CHECKED)
    size = f"{path.stat().st_size:,} bytes"
    return Finding(
        path, "wrong", f"{size}, but its content has SHA-256 {actual}, expected {expected}; delete it and fetch again"
    )


def _folder(path: Path, known: Entry) -> Finding:
    expected = known.records[0 if path.name == "train" else 1]
    actual = sum(1 for label in ("neg", "pos") for _ in (path / label).glob("*.txt"))
    if actual != expected:
        return Finding(path, "wrong", f"{actual:,} labelled .txt files, expected {expected:,}")
    return Finding(path, "ok", f"{actual:,} labelled .txt files; no canonical checksum exists for a folder")


def _readable(known: Entry, root: Path, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Reads files without a checksum completely."""
    try:
        sides = load_texts(known.name, root) if known.name.startswith("imdb") else _sides(load(known.name, root))
    except SordinoError as error:
        return tuple(
            Finding(f.path, "wrong", _message(error, f.path)) if str(f.path) in str(error) else f for f in findings
        )
    train, test = (len(side.targets) for side in sides)
    sizes = f"contains {train:,} training and {test:,} test records"
    if (train, test) != known.records:
        sizes += f" (the original split has {known.records[0]:,} and {known.records[1]:,})"
    return tuple(f if f.detail == _CHECKED else Finding(f.path, "ok", f"{f.detail}; {sizes}") for f in findings)


def _message(error: SordinoError, path: Path) -> str:
    """The complete message, with private details: whoever verifies files is their owner."""
    return "; ".join(part for part in (str(error).removeprefix(f"{path}: "), error.private) if part)


def _sides(dataset: Dataset) -> tuple[Split, Split]:
    return dataset.train, dataset.test
