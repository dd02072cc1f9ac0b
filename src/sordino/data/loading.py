"""load(name): a dataset as tensors, from the embedded files or from a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sordino.data import images
from sordino.data.adult import read_adult
from sordino.data.catalogue import Entry, entry
from sordino.data.files import data_directory, find_content, missing, read_bytes, sha256_of_bytes
from sordino.data.glove import VectorTokenizer, read_glove, standardised
from sordino.data.text import HashingTokenizer, read_text_csv, read_text_folders, text_bytes
from sordino.data.types import Dataset, TextSplit
from sordino.errors import InputError, SordinoError
from sordino.split import Split

EMBEDDED = Path(__file__).parent / "embedded"


def load(
    name: str,
    data_dir: Path | str | None = None,
    *,
    normalise: bool = True,
    tokenizer: HashingTokenizer | None = None,
) -> Dataset:
    """Reads a dataset of the catalogue.

    Images are float32 (n, c, h, w). Texts are token ids of a public hashing vocabulary (`imdb`), ids of GloVe's words
    with their vectors (`imdb-glove`), or bytes (`imdb-texts`); `load_texts` returns the strings.

    Args:
        name: The dataset (see `catalogue()`).
        data_dir: The folder with the datasets; None: $SORDINO_DATA, else ./data.
        normalise: Scale images by the catalogue's public mean and standard deviation; False: leave them in [0, 1].
        tokenizer: The tokenizer of `imdb`; None: HashingTokenizer().

    Returns:
        The training and the test set.

    Raises:
        InputError: the dataset is unknown, or a file is missing, truncated or wrong; the message names it.
    """
    known = entry(name)
    root = data_directory(data_dir)
    vectors: Tensor | None = None
    if tokenizer is not None and name != "imdb":
        raise InputError(f"only the dataset imdb takes a tokenizer: leave out `tokenizer` for {name!r}")
    if name == "imdb":
        cut = tokenizer or HashingTokenizer()
        train, test = (Split(cut(side.texts), side.targets) for side in load_texts(name, root))
    elif name == "imdb-glove":
        sides, words = load_texts(name, root), standardised(read_glove(root))
        cut_words, vectors = VectorTokenizer(words, known.shape[0]), words.table
        train, test = (Split(cut_words(side.texts), side.targets) for side in sides)
    elif name == "imdb-texts":
        train, test = (Split(text_bytes(side.texts), side.targets) for side in load_texts(name, root))
    elif name == "adult":
        paths = _locate(known, root)
        train, test = (Split(*read_adult(path)) for path in paths)
    else:
        pairs = _embedded() if known.embedded else _reader(known)(known, root)
        train, test = (Split(_scale(x, known, normalise), torch.from_numpy(y)) for x, y in pairs)
    return Dataset(name, train, test, known.classes, known.title, known.licence, vectors)


def load_texts(name: str, data_dir: Path | str | None = None) -> tuple[TextSplit, TextSplit]:
    """Reads the raw strings of a text dataset.

    Args:
        name: imdb, imdb-glove or imdb-texts, which have the same texts.
        data_dir: The folder with the datasets; None: $SORDINO_DATA, else ./data.

    Returns:
        The training and the test set.

    Raises:
        InputError: the dataset has no text, or a file is missing or damaged.
    """
    if name not in ("imdb", "imdb-glove", "imdb-texts"):
        raise InputError(f"dataset {entry(name).name!r} has no text; only imdb, imdb-glove and imdb-texts have")
    train, test = _locate(entry(name), data_directory(data_dir))
    if train.is_dir():
        return read_text_folders(train), read_text_folders(test)
    return read_text_csv(train), read_text_csv(test)


def _scale(x: images.Bytes, known: Entry, normalise: bool) -> Tensor:
    # copied, because the bytes of a file are read-only memory
    out = torch.from_numpy(x.astype(np.float32)).div_(255.0)
    if normalise:
        mean, std = torch.tensor(known.mean).view(-1, 1, 1), torch.tensor(known.std).view(-1, 1, 1)
        out.sub_(mean).div_(std)
    return out


def _locate(known: Entry, root: Path) -> tuple[Path, ...]:
    """The files of the first complete layout.

    Raises:
        InputError: no layout is complete; the message is about the most nearly complete one.
    """
    nearest: tuple[int, list[str]] = (-1, [])
    for layout in known.layouts:
        paths = [find_content(root, content.path) for content in layout]
        if all(path is not None for path in paths):
            return tuple(path for path in paths if path is not None)
        found = sum(path is not None for path in paths)
        if found > nearest[0]:
            nearest = (found, [c.path for c, path in zip(layout, paths, strict=True) if path is None])
    error = missing(known.name, nearest[1][0], root)
    raise InputError(f"{error}{_hint(known, root)}")


def _hint(known: Entry, root: Path) -> str:
    pickled = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}.get(known.name)
    if pickled is not None and (root / pickled).is_dir():
        return (
            f". There is {root / pickled}, the pickled version: sordino never unpickles; get the binary version "
            f"({known.remotes[0].path})"
        )
    return ""


_Pairs = tuple[images.Pair, images.Pair]


def _idx(known: Entry, root: Path) -> _Pairs:
    x, y, x_test, y_test = _locate(known, root)
    return images.read_idx_pair(x, y, known.classes), images.read_idx_pair(x_test, y_test, known.classes)


def _cifar10(known: Entry, root: Path) -> _Pairs:
    *train, test = _locate(known, root)
    return images.read_cifar10(tuple(train)), images.read_cifar10((test,))


def _cifar100(known: Entry, root: Path) -> _Pairs:
    train, test = _locate(known, root)
    return images.read_cifar100(train), images.read_cifar100(test)


def _svhn(known: Entry, root: Path) -> _Pairs:
    train, test = _locate(known, root)
    return images.read_svhn(train), images.read_svhn(test)


def _usps(known: Entry, root: Path) -> _Pairs:
    paths = _locate(known, root)
    if len(paths) == 1:
        return images.read_usps_npz(paths[0])
    return images.read_usps_lines(paths[0]), images.read_usps_lines(paths[1])


READERS: dict[str, Callable[[Entry, Path], _Pairs]] = {
    "fashion-mnist": _idx,
    "mnist": _idx,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
    "usps": _usps,
}
"""The reader of each dataset of images: its entry and the data folder → (images, labels) of train and of test."""


def _reader(known: Entry) -> Callable[[Entry, Path], _Pairs]:
    if known.name not in READERS:
        raise SordinoError(
            f"the dataset {known.name!r} is in the catalogue but has no reader: add one to READERS in {__name__}"
        )
    return READERS[known.name]


_PARTS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def _embedded() -> _Pairs:
    """The subset that comes with the package; its unpacked bytes must match SHA256SUMS."""
    pairs = []
    for side in ("train", "t10k"):
        paths = [EMBEDDED / f"fashion-mnist-mini-{side}-{part}.xz" for part in _PARTS]
        contents = []
        for path in paths:
            content = read_bytes(path)
            if why := _differs(path, content):
                raise InputError(f"{path}: {why}")
            contents.append(content)
        pairs.append(images.pair_idx(contents[0], contents[1], paths[0], paths[1], 10))
    return pairs[0], pairs[1]


def embedded_findings() -> tuple[tuple[Path, str | None], ...]:
    """Each embedded file, and what is wrong with it (None: nothing)."""
    findings: list[tuple[Path, str | None]] = []
    for side in ("train", "t10k"):
        for part in _PARTS:
            path = EMBEDDED / f"fashion-mnist-mini-{side}-{part}.xz"
            try:
                findings.append((path, _differs(path, read_bytes(path))))
            except SordinoError as error:
                findings.append((path, str(error).removeprefix(f"{path}: ")))
    return tuple(findings)


def _differs(path: Path, content: bytes) -> str | None:
    sums = EMBEDDED / "SHA256SUMS"
    try:
        lines = [line.split() for line in sums.read_text("ascii").splitlines()]
    except OSError as error:
        raise SordinoError(f"{sums}: can't be read: {error.strerror or error}; reinstall sordino") from error
    expected = {name: sha256 for sha256, name in lines}.get(path.stem)
    actual = sha256_of_bytes(content)
    return None if actual == expected else f"content has SHA-256 {actual}, expected {expected}; reinstall sordino"
