"""The embedded subset, the catalogue, finding the data folder, and verify."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sordino.data import catalogue, data_directory, entry, load, loading, verify
from sordino.data.catalogue import Content
from sordino.data.checking import verify_entry
from sordino.data.files import sha256_of_bytes
from sordino.errors import InputError, SordinoError


def test_the_embedded_subset_is_there_balanced_and_scaled() -> None:
    found = load("fashion-mnist-mini")
    assert found.train.inputs.shape == (12_000, 1, 28, 28)
    assert found.test.inputs.shape == (4_000, 1, 28, 28)
    assert found.train.targets.bincount().tolist() == [1_200] * 10
    assert found.test.targets.bincount().tolist() == [400] * 10
    assert found.input_shape == (1, 28, 28)
    assert abs(float(found.train.inputs.mean())) < 0.01
    image, target = found.train[3]
    assert image.shape == (1, 28, 28)
    assert target == found.train.targets[3]


def test_the_embedded_subset_is_small_and_its_licence_lies_beside_it() -> None:
    files = [path for path in loading.EMBEDDED.iterdir() if path.suffix == ".xz"]
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) < 6.5e6
    licence = (loading.EMBEDDED / "LICENSE.fashion-mnist").read_text("utf-8")
    assert "MIT License" in licence
    assert "2017 Zalando SE" in licence


def test_a_changed_embedded_file_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import lzma

    for path in loading.EMBEDDED.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    victim = tmp_path / "fashion-mnist-mini-t10k-labels-idx1-ubyte.xz"
    content = bytearray(lzma.decompress(victim.read_bytes()))
    content[-1] ^= 1  # still a valid label
    victim.write_bytes(lzma.compress(bytes(content)))
    monkeypatch.setattr(loading, "EMBEDDED", tmp_path)
    with pytest.raises(InputError, match=r"t10k-labels.*SHA-256"):
        load("fashion-mnist-mini")
    assert [f.status for f in verify("fashion-mnist-mini")] == ["ok", "ok", "ok", "wrong"]
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(SordinoError, match="SHA256SUMS"):
        load("fashion-mnist-mini")


def test_verify_of_the_embedded_subset_names_each_file() -> None:
    assert [finding.status for finding in verify("fashion-mnist-mini")] == ["ok"] * 4


def test_the_catalogue_is_complete() -> None:
    names = [one.name for one in catalogue()]
    assert names[0] == "fashion-mnist-mini"
    texts, pictures = (
        {"imdb", "imdb-glove", "imdb-texts"},
        {"fashion-mnist", "mnist", "cifar10", "cifar100", "svhn", "usps"},
    )
    assert set(names) == {"fashion-mnist-mini", "adult"} | texts | pictures
    for one in catalogue():
        assert one.licence
        assert one.embedded or (one.layouts and one.remotes)
        for remote in one.remotes:
            assert len(remote.sha256) == 64
            assert all(address.startswith(("http://", "https://")) for address in remote.addresses)
        for content in (content for layout in one.layouts for content in layout):
            assert content.sha256 is None or len(content.sha256) == 64


def test_an_entry_without_a_reader_is_told_to_whoever_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(loading.READERS, "usps")
    with pytest.raises(SordinoError, match="'usps' is in the catalogue but has no reader: add one to READERS"):
        load("usps")


def test_fetch_makes_the_first_layout_of_every_dataset() -> None:
    for one in catalogue():
        for content in one.layouts[0] if one.layouts else ():
            assert any(
                remote.path.removesuffix(".gz") == content.path
                or remote.path == content.path
                or content.path.startswith(f"{remote.members}/")
                for remote in one.remotes
            ), content


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'fashion-mnist'"):
        load("fashion_mnist")
    with pytest.raises(InputError, match="known names are"):
        entry("imagenet-21k")


def test_the_folder_is_the_argument_then_the_variable_then_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_DATA", "/from/variable")
    assert data_directory("/from/argument") == Path("/from/argument")
    assert data_directory() == Path("/from/variable")
    monkeypatch.delenv("SORDINO_DATA")
    assert data_directory() == Path("data")


@pytest.mark.parametrize("name", [one.name for one in catalogue() if not one.embedded])
def test_a_missing_dataset_says_where_it_looked_and_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert f"sordino data fetch {name}" in message
    assert "SORDINO_DATA" in message
    assert {finding.status for finding in verify(name, tmp_path)} == {"missing"}


def test_of_a_dataset_that_is_there_in_part_the_missing_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        (folder / name).write_bytes(b"x")
    with pytest.raises(InputError, match="no file MNIST/raw/t10k-labels-idx1-ubyte"):
        load("mnist", tmp_path)
    assert [f.status for f in verify("mnist", tmp_path)] == ["wrong", "wrong", "wrong", "missing"]


def test_verify_accepts_any_packing_of_the_right_bytes_and_says_why_a_file_is_wrong(tmp_path: Path) -> None:
    right = b"the right bytes"
    names = ("plain", "packed", "changed", "torn", "gone")
    known = replace(
        entry("mnist"), layouts=(tuple(Content(name, sha256_of_bytes(right)) for name in names),), remotes=()
    )
    (tmp_path / "plain").write_bytes(right)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(right))
    (tmp_path / "changed").write_bytes(b"other bytes")
    (tmp_path / "torn.gz").write_bytes(gzip.compress(right)[:-4])
    findings = verify_entry(known, tmp_path)
    assert [f.status for f in findings] == ["ok", "ok", "wrong", "wrong", "missing"]
    assert "SHA-256" in findings[2].detail
    assert "truncated" in findings[3].detail
    assert str(tmp_path / "gone") in str(findings[4])


def test_a_file_without_a_canonical_checksum_is_at_least_read(tmp_path: Path) -> None:
    (tmp_path / "USPS").mkdir()
    x, y = np.zeros((3, 16, 16), np.uint8), np.zeros(3, np.uint8)
    np.savez(tmp_path / "USPS" / "usps.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (finding,) = verify("usps", tmp_path)
    assert finding.status == "ok"
    assert "3 training and 3 test records (the original split has 7,291 and 2,007)" in finding.detail
    np.savez(tmp_path / "USPS" / "usps.npz", x_train=x, y_train=y[:2], x_test=x, y_test=y)
    (finding,) = verify("usps", tmp_path)
    assert finding.status == "wrong"
    assert "3 images" in finding.detail


def test_verify_counts_the_reviews_of_the_original_folders(tmp_path: Path) -> None:
    for side in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / "aclImdb" / side / label).mkdir(parents=True)
    findings = verify("imdb", tmp_path)
    assert [f.status for f in findings] == ["wrong", "wrong"]
    assert "0 labelled .txt files, expected 25,000" in findings[0].detail
