"""Readers of image files in their usual layouts. They return bytes; scaling comes later.

IDX (MNIST, Fashion-MNIST), the binary batches of CIFAR-10 and CIFAR-100, SVHN's cropped .mat, USPS in three forms.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data.files import MOST, read_bytes
from sordino.errors import InputError

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Pair = tuple[Bytes, Labels]  # images (n, c, h, w), labels (n,)

IDX_UBYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Bytes:
    """An IDX file of bytes, plain or compressed; at most the size that its header declares is unpacked."""
    return parse_idx(read_bytes(path, _declared), path, dimensions)


def _declared(head: bytes) -> int | None:
    """The size that an IDX header declares; None if this is not such a header."""
    dimensions = head[3] if len(head) > 3 else 0
    if head[:3] != bytes([0, 0, IDX_UBYTE]) or not 1 <= dimensions <= 3 or len(head) < 4 + 4 * dimensions:
        return None
    return 4 + 4 * dimensions + math.prod(_shape(head, dimensions))


def _shape(content: bytes, dimensions: int) -> tuple[int, ...]:
    return tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))


def parse_idx(content: bytes, path: Path, dimensions: int) -> Bytes:
    """The content of an IDX file: 00 00 08 d, then d big-endian lengths, then the values.

    `path` is named in errors.
    """
    header = 4 + 4 * dimensions
    magic, expected = int.from_bytes(content[:4], "big"), IDX_UBYTE << 8 | dimensions
    if magic != expected and len(content) >= 4:
        raise InputError(
            f"{path}: the magic number is not 0x{expected:08x} (IDX, bytes, {dimensions} dimensions): another file",
            private=f"it is 0x{magic:08x}",
        )
    if len(content) < header:
        raise InputError(
            f"{path}: too few bytes for an IDX header of {header}; download it again",
            private=f"{len(content)} bytes",
        )
    shape = _shape(content, dimensions)
    size = header + math.prod(shape)
    if len(content) != size:
        kind = "truncated" if len(content) < size else "too long"
        raise InputError(
            f"{path}: {kind}: its header declares another size; download it again",
            private=f"{len(content):,} bytes, expected {size:,} for shape {shape}",
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_idx_pair(images: Path, labels: Path, classes: int) -> Pair:
    return pair_idx(read_bytes(images, _declared), read_bytes(labels, _declared), images, labels, classes)


def pair_idx(image_bytes: bytes, label_bytes: bytes, images: Path, labels: Path, classes: int) -> Pair:
    x, y = parse_idx(image_bytes, images, 3), parse_idx(label_bytes, labels, 1).astype(np.int64)
    _same_length(images, len(x), labels, len(y))
    _labels_below(labels, y, classes)
    return x[:, None], y


CIFAR_RECORD = 1 + 3 * 32 * 32


def read_cifar10(paths: tuple[Path, ...]) -> Pair:
    """CIFAR-10 binary batches: each record is a byte for the label, then 3072 bytes of pixels, channel by channel."""
    return _cifar(paths, 1, 10, "a CIFAR-10 binary batch (the original has 30,730,000 bytes)")


def read_cifar100(path: Path) -> Pair:
    """CIFAR-100's binary file: two bytes of label, of which the second is the fine one (of 100), and the pixels."""
    return _cifar((path,), 2, 100, "a CIFAR-100 binary file (the originals have 153,700,000 and 30,740,000 bytes)")


def _cifar(paths: tuple[Path, ...], labels: int, classes: int, what: str) -> Pair:
    """Records with `labels` bytes of label, of which the last counts, and 3072 bytes of pixels."""
    size, parts = CIFAR_RECORD - 1 + labels, []
    for path in paths:
        content = read_bytes(path)
        if len(content) % size:
            raise InputError(
                f"{path}: the size is not a multiple of {size} bytes (one record); the file is truncated or not {what}",
                private=f"{len(content):,} bytes",
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        _labels_below(path, records[:, labels - 1].astype(np.int64), classes)
        parts.append(records)
    records = np.concatenate(parts)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1].astype(np.int64)


def read_svhn(path: Path) -> Pair:
    """SVHN, cropped digits: X (32, 32, 3, n) bytes, y (n, 1) in 1..10, where 10 means the digit 0."""
    from scipy.io import loadmat

    try:
        content: dict[str, Any] = loadmat(str(path))
    except Exception as error:  # scipy raises many types of errors for a damaged file
        raise InputError(f"{path}: truncated or not a MATLAB 5 file; download it again", private=str(error)) from error
    if "X" not in content or "y" not in content:
        found = ", ".join(sorted(key for key in content if not key.startswith("__"))) or "nothing"
        raise InputError(f"{path}: expected the variables X and y, found {found}")
    x, y = np.asarray(content["X"]), _whole_labels(path, np.asarray(content["y"]).reshape(-1))
    if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.dtype != np.uint8:
        raise InputError(
            f"{path}: X is {x.dtype}, expected uint8 of shape (32, 32, 3, n)", private=f"its shape is {x.shape}"
        )
    _same_length(path, x.shape[3], path, len(y))
    if len(y) and not (y.min() >= 1 and y.max() <= 10):
        raise InputError(f"{path}: labels outside 1 to 10", private=f"labels from {y.min()} to {y.max()}")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def read_usps_npz(path: Path) -> tuple[Pair, Pair]:
    """x_train, y_train, x_test, y_test: bytes (n, 16, 16) and classes. Never unpickles."""
    read_bytes(path)  # raises for unreadable or empty files
    try:
        with zipfile.ZipFile(path) as packed:
            if sum(member.file_size for member in packed.infolist()) > MOST:
                raise InputError(f"{path}: unpacks to more than {MOST:,} bytes; download it again")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in ("x_train", "y_train", "x_test", "y_test")}
    except InputError:
        raise
    except KeyError as error:
        raise InputError(
            f"{path}: an array is missing; expected x_train, y_train, x_test, y_test", private=str(error)
        ) from error
    except Exception as error:  # zipfile, zlib and numpy raise many types of errors for a damaged file
        raise InputError(f"{path}: truncated or not an .npz of plain arrays", private=str(error)) from error
    pairs = []
    for side in ("train", "test"):
        x, y = arrays[f"x_{side}"], _whole_labels(path, arrays[f"y_{side}"])
        if x.ndim != 3 or x.shape[1:] != (16, 16) or x.dtype != np.uint8:
            raise InputError(
                f"{path}: x_{side} is {x.dtype}, expected uint8 of shape (n, 16, 16)", private=f"its shape is {x.shape}"
            )
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
        try:
            y[number], x[number] = _usps_row(line)
        except (ValueError, IndexError, OverflowError) as error:
            raise InputError(
                f"{path}: a line is not a label and 256 values", private=f"line {number + 1}: {error}"
            ) from error
    _labels_below(path, y, 10)
    if len(x) and not np.abs(x).max() <= 1.0001:  # also false for NaN
        raise InputError(f"{path}: a value outside −1 to 1", private=f"the largest magnitude is {np.abs(x).max():g}")
    return np.rint((x + 1) * 127.5).clip(0, 255).astype(np.uint8).reshape(-1, 1, 16, 16), y


def _usps_row(line: str) -> tuple[int, npt.NDArray[np.float64]]:
    """(class, 256 values) of a line of either form."""
    label, *values = line.split()
    if ":" not in line:
        return int(float(label)), np.array(values, np.float64).reshape(256)
    row = np.zeros(256)  # LIBSVM: sparse, 1-based; an absent index is zero
    for item in values:
        index, value = item.split(":")
        if not 1 <= int(index) <= 256:
            raise IndexError(f"index {int(index)}")
        row[int(index) - 1] = float(value)
    return int(float(label)) - 1, row


def _whole_labels(path: Path, labels: npt.NDArray[Any]) -> Labels:
    """The labels as int64, if they are a vector of whole numbers."""
    if labels.ndim != 1 or labels.dtype.kind not in "iuf" or not np.isfinite(labels).all():
        raise InputError(f"{path}: labels are {labels.dtype} of {labels.ndim} dimensions, expected whole numbers")
    whole = labels.astype(np.int64)
    if not (whole == labels).all():
        raise InputError(f"{path}: a label is not a whole number")
    return whole


def _same_length(images: Path, n_images: int, labels: Path, n_labels: int) -> None:
    if n_images != n_labels:
        raise InputError(
            f"{images} and {labels} have different numbers of images and labels",
            private=f"{n_images:,} images, {n_labels:,} labels",
        )


def _labels_below(path: Path, labels: Labels, classes: int) -> None:
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise InputError(
            f"{path}: labels outside 0 to {classes - 1}", private=f"labels from {labels.min()} to {labels.max()}"
        )
