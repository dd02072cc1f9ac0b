"""Readers of image files: what is right is read exactly; what is wrong is named."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from sordino.data import load
from sordino.data.images import parse_idx, read_cifar10, read_idx, read_svhn, read_usps_lines, read_usps_npz
from sordino.errors import InputError


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def pixels(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) * 37 % 256).astype(np.uint8).reshape(shape)


# IDX: MNIST and Fashion-MNIST


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_idx_round_trip(shape: list[int]) -> None:
    array = pixels(*shape)
    assert np.array_equal(parse_idx(idx(array), Path("x"), len(shape)), array)


def idx_folder(folder: Path, packed: bool) -> np.ndarray:
    folder.mkdir(parents=True)
    images, labels = pixels(6, 28, 28), np.arange(6, dtype=np.uint8)
    for side in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx(array)
            name = f"{side}-{kind}-ubyte"
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return images


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw"), ("mnist", "mnist")]
)
def test_idx_folders_plain_and_packed(tmp_path: Path, packed: bool, name: str, folder: str) -> None:
    images = idx_folder(tmp_path / folder, packed)
    found = load(name, tmp_path, normalise=False)
    assert np.array_equal(np.rint(found.train.inputs.numpy() * 255), images[:, None])
    assert found.test.targets.tolist() == list(range(6))


def test_public_constants_scale_the_images(tmp_path: Path) -> None:
    images = idx_folder(tmp_path / "MNIST/raw", packed=False)
    expected = (images[:, None].astype(np.float32) / 255 - 0.1307) / 0.3081
    assert np.allclose(load("mnist", tmp_path).train.inputs.numpy(), expected, atol=1e-6)


def test_scaling_never_depends_on_other_records(tmp_path: Path) -> None:
    idx_folder(tmp_path / "MNIST/raw", packed=False)
    before = load("mnist", tmp_path).train.inputs[0].clone()
    other = pixels(6, 28, 28)
    other[1:] = 255
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(idx(other))
    assert np.array_equal(load("mnist", tmp_path).train.inputs[0].numpy(), before.numpy())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"\0\0\x08", "too few bytes for an IDX header"),
        (idx(pixels(3, 2, 2))[:-1], "truncated"),
        (idx(pixels(3, 2, 2)) + b"x", "too long"),
        (idx(pixels(3)), "magic number is not 0x00000803"),
        (b"<html>not here any more</html>", "magic number"),
    ],
)
def test_a_wrong_idx_file_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz"])
def test_a_truncated_packed_file_is_named(tmp_path: Path, packing: str) -> None:
    import lzma

    whole = {"gz": gzip, "bz2": bz2, "xz": lzma}[packing].compress(idx(pixels(3, 2, 2)))  # type: ignore[attr-defined]
    path = tmp_path / f"x.{packing}"
    path.write_bytes(whole[:-6])
    with pytest.raises(InputError, match=f"truncated or not a .{packing} file"):
        read_idx(path, 3)


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz"])
def test_no_more_is_unpacked_than_a_header_declares(tmp_path: Path, packing: str) -> None:
    """Thirty MB of zeros in a few KB: a declared size of twelve bytes is read, and one more."""
    import lzma
    import tracemalloc

    whole = {"gz": gzip, "bz2": bz2, "xz": lzma}[packing].compress(  # type: ignore[attr-defined]
        idx(pixels(3, 2, 2)) + bytes(30_000_000)
    )
    path = tmp_path / f"x.{packing}"
    path.write_bytes(whole)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="too long"):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.data.files.MOST", 1000)
    path = tmp_path / "usps.bz2"
    path.write_bytes(bz2.compress(b"3 1:0.5\n" * 200))
    with pytest.raises(InputError, match="unpacks to more than 1,000 bytes"):
        read_usps_lines(path)


def test_a_packed_file_that_is_not_packed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(InputError, match=r"truncated or not a .gz file"):
        read_idx(path, 3)


def test_images_and_labels_must_be_of_one_length_and_labels_in_range(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST/raw"
    idx_folder(folder, packed=False)
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(5, np.uint8)))
    with pytest.raises(InputError, match="have different numbers of images and labels") as caught:
        load("mnist", tmp_path)
    assert caught.value.private == "6 images, 5 labels"
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(np.full(6, 11, np.uint8)))
    with pytest.raises(InputError, match="labels outside 0 to 9") as caught:
        load("mnist", tmp_path)
    assert caught.value.private == "labels from 11 to 11"


# CIFAR-10


def cifar(n: int) -> np.ndarray:
    return np.concatenate([np.arange(n, dtype=np.uint8)[:, None] % 10, pixels(n, 3072)], axis=1)


def test_cifar_binary_batches_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for i, name in enumerate(
        ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
    ):
        (folder / f"{name}.bin").write_bytes(cifar(i + 1).tobytes())
    found = load("cifar10", tmp_path, normalise=False)
    assert found.train.inputs.shape == (15, 3, 32, 32)
    assert found.train.targets.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert np.array_equal(np.rint(found.test.inputs.numpy() * 255).reshape(6, -1), cifar(6)[:, 1:])


def test_cifar_100_has_two_labels_of_which_the_fine_one_counts(tmp_path: Path) -> None:
    """The layout of the original: coarse label, fine label, 1024 red, green and blue pixels each; no header."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    coarse, fine = np.array([[4], [19], [0]], np.uint8), np.array([[99], [7], [50]], np.uint8)
    (folder / "train.bin").write_bytes(np.concatenate([coarse, fine, pixels(3, 3072)], axis=1).tobytes())
    (folder / "test.bin").write_bytes(np.concatenate([coarse, fine, pixels(3, 3072)], axis=1)[:2].tobytes())
    found = load("cifar100", tmp_path, normalise=False)
    assert found.train.targets.tolist() == [99, 7, 50]
    assert found.classes == 100
    assert np.array_equal(np.rint(found.test.inputs.numpy() * 255).reshape(2, -1), pixels(3, 3072)[:2])
    (folder / "train.bin").write_bytes(b"\x00" * 3073)
    with pytest.raises(InputError, match="not a multiple of 3074 bytes"):
        load("cifar100", tmp_path)
    (folder / "train.bin").write_bytes(b"\xff" * 3074)
    with pytest.raises(InputError, match="labels outside 0 to 99"):
        load("cifar100", tmp_path)


def test_a_truncated_or_foreign_cifar_batch_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(cifar(2).tobytes()[:-100])
    with pytest.raises(InputError, match="not a multiple of 3073 bytes"):
        read_cifar10((path,))
    path.write_bytes(b"\xff" * 3073)
    with pytest.raises(InputError, match="labels outside 0 to 9"):
        read_cifar10((path,))


def test_the_pickled_cifar_is_never_unpickled_but_explained(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(InputError, match="never unpickles; get the binary version"):
        load("cifar10", tmp_path)


# SVHN


def svhn(path: Path, n: int = 10) -> np.ndarray:
    images = pixels(n, 3, 32, 32)
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": np.arange(1, n + 1, dtype=np.uint8)[:, None]})
    return images


def test_svhn_where_ten_stands_for_zero(tmp_path: Path) -> None:
    images = svhn(tmp_path / "SVHN/train_32x32.mat")
    svhn(tmp_path / "SVHN/test_32x32.mat", 2)
    found = load("svhn", tmp_path, normalise=False)
    assert np.array_equal(np.rint(found.train.inputs.numpy() * 255), images)
    assert found.train.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert len(found.test) == 2


def test_a_wrong_svhn_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    svhn(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated or not a MATLAB 5 file"):
        read_svhn(path)
    savemat(path, {"Z": np.zeros(3)})
    with pytest.raises(InputError, match="expected the variables X and y, found Z"):
        read_svhn(path)
    savemat(path, {"X": np.zeros((28, 28, 3, 2), np.uint8), "y": np.ones(2)})
    with pytest.raises(InputError, match="expected uint8 of shape"):
        read_svhn(path)
    savemat(path, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([0, 1])})
    with pytest.raises(InputError, match="labels outside 1 to 10"):
        read_svhn(path)


# USPS, in three forms


def test_the_three_forms_of_usps_agree(tmp_path: Path) -> None:
    images, labels = pixels(10, 16, 16), np.arange(10)
    values = images.reshape(10, 256) / 127.5 - 1
    np.savez(tmp_path / "usps.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    sparse = "\n".join(
        f"{label + 1} " + " ".join(f"{i + 1}:{v:.6g}" for i, v in enumerate(row) if v)
        for label, row in zip(labels, values, strict=True)
    )
    dense = "\n".join(
        f"{label}.0000 " + " ".join(f"{v:.4f}" for v in row) for label, row in zip(labels, values, strict=True)
    )
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(sparse.encode()))
    (tmp_path / "zip.train.gz").write_bytes(gzip.compress(dense.encode()))
    for x, y in (
        read_usps_npz(tmp_path / "usps.npz")[0],
        read_usps_lines(tmp_path / "usps.bz2"),
        read_usps_lines(tmp_path / "zip.train.gz"),
    ):
        assert np.array_equal(x, images[:, None])
        assert np.array_equal(y, labels)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("3 0.1 0.2", "a line is not a label and 256 values"),
        ("3 257:0.5", "a line is not"),
        ("3 0:0.5", "a line is not"),
        ("3 1:x", "a line is not"),
        ("inf 1:0.5", "a line is not"),
        ("3 1:0.5\n\n4 1:0.5", "a line is not"),
        ("11 1:0.5", "labels outside 0 to 9"),
        ("3 1:7", "a value outside −1 to 1"),
        ("3 1:nan", "a value outside −1 to 1"),
    ],
)
def test_a_wrong_line_of_usps_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "usps.bz2"
    path.write_bytes(bz2.compress(text.encode()))
    with pytest.raises(InputError, match=complaint):
        read_usps_lines(path)


def test_a_wrong_usps_archive_is_named_and_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "usps.npz"
    np.savez(path, x_train=pixels(2, 16, 16))
    with pytest.raises(InputError, match="y_train"):
        read_usps_npz(path)
    objects = np.array([{}], object)
    np.savez(path, x_train=objects, y_train=objects, x_test=objects, y_test=objects)
    with pytest.raises(InputError, match="plain arrays"):
        read_usps_npz(path)
    path.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(InputError, match="truncated"):
        read_usps_npz(path)
