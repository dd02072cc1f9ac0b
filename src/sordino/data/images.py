"""Readers of image files, in the layouts that people already have. Each gives bytes; scaling comes later.

IDX (MNIST, Fashion-MNIST), CIFAR-10's binary batches, SVHN's cropped .mat, USPS in three forms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data.files import read_bytes
from sordino.errors import InputError

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Pair = tuple[Bytes, Labels]  # images (n, c, h, w), labels (n,)

IDX_UBYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Bytes:
    """An IDX file of bytes, plain or packed."""
    return parse_idx(read_bytes(path), path, dimensions)


def parse_idx(content: bytes, path: Path, dimensions: int) -> Bytes:
    """The content of an IDX file: 00 00 08 d, then d big-endian lengths, then the values. `path` is for
    errors.
    """
    header = 4 + 4 * dimensions
    magic, expected = int.from_bytes(content[:4], "big"), IDX_UBYTE << 8 | dimensions
    if magic != expected and len(content) >= 4:
        raise InputError(
            f"{path}: magic number 0x{magic:08x}, expected 0x{expected:08x} "
            f"(IDX, bytes, {dimensions} dimensions); this is another file"
        )
    if len(content) < header:
        raise InputError(f"{path}: {len(content)} bytes are too few for an IDX header of {header}; download it again")
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    size = header + int(np.prod(shape, dtype=np.int64))
    if len(content) != size:
        kind = "truncated" if len(content) < size else "too long"
        raise InputError(f"{path}: {kind}: {len(content):,} bytes, expected {size:,} for shape {shape}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_idx_pair(images: Path, labels: Path, classes: int) -> Pair:
    return pair_idx(read_bytes(images), read_bytes(labels), images, labels, classes)


def pair_idx(image_bytes: bytes, label_bytes: bytes, images: Path, labels: Path, classes: int) -> Pair:
    x, y = parse_idx(image_bytes, images, 3), parse_idx(label_bytes, labels, 1).astype(np.int64)
    _same_length(images, len(x), labels, len(y))
    _labels_below(labels, y, classes)
    return x[:, None], y


CIFAR_RECORD = 1 + 3 * 32 * 32


def read_cifar10(paths: tuple[Path, ...]) -> Pair:
    """CIFAR-10 binary batches: each record is one byte of label and 3072 bytes of pixels, channel by
    channel.
    """
    parts = []
    for path in paths:
        content = read_bytes(path)
        if len(content) % CIFAR_RECORD:
            raise InputError(
                f"{path}: {len(content):,} bytes are not a multiple of {CIFAR_RECORD} (one record); the "
                "file is truncated or not a CIFAR-10 binary batch (the original has 30,730,000 bytes)"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR_RECORD)
        _labels_below(path, records[:, 0].astype(np.int64), 10)
        parts.append(records)
    records = np.concatenate(parts)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_svhn(path: Path) -> Pair:
    """SVHN, cropped digits: X (32, 32, 3, n) bytes, y (n, 1) in 1..10, where 10 stands for the digit 0."""
    from scipy.io import loadmat

    try:
        content: dict[str, Any] = loadmat(str(path))
    except Exception as error:  # scipy raises many kinds for a broken file
        raise InputError(f"{path}: truncated or not a MATLAB 5 file: {error}; download it again") from error
    if "X" not in content or "y" not in content:
        found = ", ".join(sorted(key for key in content if not key.startswith("__"))) or "nothing"
        raise InputError(f"{path}: expected the variables X and y, found {found}")
    x, y = np.asarray(content["X"]), np.asarray(content["y"]).reshape(-1).astype(np.int64)
    if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.dtype != np.uint8:
        raise InputError(f"{path}: X is {x.dtype} of shape {x.shape}, expected uint8 of shape (32, 32, 3, n)")
    _same_length(path, x.shape[3], path, len(y))
    if len(y) and not (y.min() >= 1 and y.max() <= 10):
        raise InputError(f"{path}: labels from {y.min()} to {y.max()}, expected 1 to 10")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def read_usps_npz(path: Path) -> tuple[Pair, Pair]:
    """x_train, y_train, x_test, y_test: bytes (n, 16, 16) and classes. Never unpickles."""
    read_bytes(path)  # unreadable or empty files give their own error
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in ("x_train", "y_train", "x_test", "y_test")}
    except KeyError as error:
        raise InputError(f"{path}: the array {error} is missing; expected x_train, y_train, x_test, y_test") from error
    except Exception as error:  # zipfile, zlib and numpy raise many kinds for a broken file
        raise InputError(f"{path}: truncated or not an .npz of plain arrays: {error}") from error
    pairs = []
    for side in ("train", "test"):
        x, y = arrays[f"x_{side}"], arrays[f"y_{side}"].astype(np.int64)
        if x.ndim != 3 or x.shape[1:] != (16, 16) or x.dtype != np.uint8:
            raise InputError(f"{path}: x_{side} is {x.dtype} of shape {x.shape}, expected uint8 of shape (n, 16, 16)")
        _same_length(path, len(x), path, len(y))
        _labels_below(path, y, 10)
        pairs.append((x[:, None], y))
    return pairs[0], pairs[1]


def read_usps_lines(path: Path) -> Pair:
    """USPS as text: LIBSVM's `label index:value …` with labels 1..10 (usps.bz2), or `label value …` with
    labels 0..9 (zip.train.gz). Values lie in [−1, 1]."""
    lines = read_bytes(path).decode("ascii", "replace").splitlines()
    x, y = np.full((len(lines), 256), -1.0), np.zeros(len(lines), np.int64)
    for number, line in enumerate(lines):
        label, *values = line.split()
        try:
            y[number] = int(float(label))
            if ":" in line:  # LIBSVM: sparse, 1-based; an absent index is zero
                x[number] = 0.0
                y[number] -= 1
                for item in values:
                    index, value = item.split(":")
                    x[number, int(index) - 1] = float(value)
            else:
                x[number] = np.array(values, np.float64)
        except (ValueError, IndexError) as error:
            raise InputError(f"{path}, line {number + 1}: not a row of 256 values: {error}") from error
    _labels_below(path, y, 10)
    if len(x) and np.abs(x).max() > 1.0001:
        raise InputError(f"{path}: a value of {np.abs(x).max():g}, expected −1 to 1")
    return np.rint((x + 1) * 127.5).clip(0, 255).astype(np.uint8).reshape(-1, 1, 16, 16), y


def _same_length(images: Path, n_images: int, labels: Path, n_labels: int) -> None:
    if n_images != n_labels:
        raise InputError(f"{images} holds {n_images:,} images but {labels} holds {n_labels:,} labels")


def _labels_below(path: Path, labels: Labels, classes: int) -> None:
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise InputError(f"{path}: labels from {labels.min()} to {labels.max()}, expected 0 to {classes - 1}")
