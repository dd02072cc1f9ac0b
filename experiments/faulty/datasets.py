"""Damaged files of every dataset and layout, which are read and verified."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from scipy.io import savemat

from faulty import mutate
from faulty.outcome import Tally, tried
from sordino import data
from sordino.errors import SordinoError

_ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "United-States, <=50K"
)
Files = dict[str, bytes]


def _pixels(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) * 37 % 256).astype(np.uint8).reshape(shape)


def _idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def _mnist(packing: str, pack: Callable[[bytes], bytes]) -> Files:
    images, labels = _idx(_pixels(3, 28, 28)), _idx(np.arange(3, dtype=np.uint8))
    return {
        f"MNIST/raw/{side}-{kind}-ubyte{packing}": pack(content)
        for side in ("train", "t10k")
        for kind, content in (("images-idx3", images), ("labels-idx1", labels))
    }


def _cifar() -> Files:
    batch = np.concatenate([np.arange(2, dtype=np.uint8)[:, None], _pixels(2, 3072)], axis=1).tobytes()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return {f"cifar-10-batches-bin/{name}.bin": batch for name in names}


def _svhn() -> Files:
    file = io.BytesIO()
    savemat(cast(Any, file), {"X": _pixels(32, 32, 3, 2), "y": np.array([[1], [10]], np.uint8)}, do_compression=True)
    return {f"SVHN/{side}_32x32.mat": file.getvalue() for side in ("train", "test")}


def _usps_npz() -> Files:
    file, x, y = io.BytesIO(), _pixels(3, 16, 16), np.arange(3)
    np.savez_compressed(file, x_train=x, y_train=y, x_test=x, y_test=y)
    return {"USPS/usps.npz": file.getvalue()}


def _usps_lines() -> Files:
    rows = [f"{label} " + " ".join(f"{i}:{(i % 7) / 7:.3f}" for i in range(1, 257)) for label in (1, 4, 10)]
    content = bz2.compress("\n".join(rows).encode())
    return {"USPS/usps.bz2": content, "USPS/usps.t.bz2": content}


def _adult() -> Files:
    content = f"{_ADULT}\n{_ADULT.replace('39,', '41,')}\n".encode()
    return {"Adult/adult.data": content, "Adult/adult.test": b"|1x3 Cross validator\n" + content}


def _imdb_csv() -> Files:
    content = b'text,label\ngood movie,1\n"bad, ""really"" bad",0\nnever again,negative\n'
    return {"IMDb/train.csv": content, "IMDb/test.csv": content}


def _imdb_folders() -> Files:
    return {
        f"aclImdb/{side}/{label}/{number}.txt": f"a {label} review, number {number}".encode()
        for side in ("train", "test") for label in ("neg", "pos") for number in range(2)
    }  # fmt: skip


def _glove() -> Files:
    words = b"".join(w + b" " + b" ".join(b"%.3f" % (i / 50) for i in range(50)) + b"\n" for w in (b"good", b"bad"))
    return {**_imdb_csv(), "glove.6B/glove.6B.50d.txt": words}


WORLDS: tuple[tuple[str, Files], ...] = (
    ("mnist", _mnist("", bytes)),
    ("mnist", _mnist(".gz", gzip.compress)),
    ("mnist", _mnist(".xz", lzma.compress)),
    ("mnist", _mnist(".bz2", bz2.compress)),
    ("cifar10", _cifar()),
    ("svhn", _svhn()),
    ("usps", _usps_npz()),
    ("usps", _usps_lines()),
    ("adult", _adult()),
    ("imdb", _imdb_csv()),
    ("imdb", _imdb_folders()),
    ("imdb-texts", _imdb_csv()),
    ("imdb-glove", _glove()),
)


def _unpacked(path: str, content: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    packings: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        ".gz": (gzip.decompress, gzip.compress),
        ".xz": (lzma.decompress, lzma.compress),
        ".bz2": (bz2.decompress, bz2.compress),
    }
    if Path(path).suffix not in packings:
        return content, bytes
    unpack, pack = packings[Path(path).suffix]
    return unpack(content), pack


def _damaged(seed: int, folder: Path) -> tuple[str, str]:
    """Writes a dataset with one damaged file, inside its compressed content or outside; returns (name, that file)."""
    draw = random.Random(seed)
    name, files = WORLDS[draw.randrange(len(WORLDS))]
    damaged = draw.choice(sorted(files))
    content, pack = _unpacked(damaged, files[damaged])
    new = pack(mutate.content(draw, content)) if draw.random() < 0.7 else mutate.content(draw, files[damaged])
    shutil.rmtree(folder, ignore_errors=True)
    for path, kept in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(new if path == damaged else kept)
    return name, damaged


def complaint(seed: int, folder: Path) -> str:
    """The public part of the error message about a damaged private file, without its path; empty if it can be read.

    Word vectors (GloVe) are public."""
    name, damaged = _damaged(seed, folder)
    try:
        data.load(name, folder)
    except SordinoError as error:
        return "" if "glove" in damaged else str(error).replace(str(folder / damaged), "FILE")
    return ""


def fuzz(seed: int, tally: Tally, folder: Path) -> None:
    """One damaged file."""
    name, damaged = _damaged(seed, folder)

    def read() -> int:
        data.verify(name, folder)
        try:
            data.load(name, folder)
        except SordinoError as error:
            return error.exit_code
        return 0

    tally.add(tried(read), f"{name}: {damaged}, seed {seed}")
