"""GloVe's vectors in both layouts, and the public vocabulary that they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sordino.data import entry, load
from sordino.data.catalogue import Content
from sordino.data.checking import verify_entry
from sordino.data.glove import INDEX, TABLE, TEXTS, VectorTokenizer, WordVectors, read_glove, standardised
from sordino.errors import InputError

LINES = "the 0.5 1\nfilm -1 2\nn't 3 3\ndid 4 4\n! 0.25 0\n"
REVIEWS = 'text,label\n"The film, the FILM!<br />",1\nDidn\'t xyzzy,0\n'


def write_text(root: Path, content: str = LINES) -> None:
    path = root / TEXTS[0]
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf8")


def write_table(root: Path, rows: int = 5) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (root / TABLE).parent.mkdir(parents=True)
    np.save(root / TABLE, np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2))
    parquet.write_table(arrow.table({"index": ["the", "film", "n't", "did", "!"]}), root / INDEX)


@pytest.mark.parametrize("write", [write_text, write_table])
def test_the_most_frequent_words_with_a_zero_for_padding(write: object, tmp_path: Path) -> None:
    write(tmp_path)  # type: ignore[operator]
    found = read_glove(tmp_path, words=3)
    assert dict(found.ids) == {"the": 1, "film": 2, "n't": 3}
    assert found.table.shape == (4, 2)
    assert found.table.dtype == torch.float32
    assert not found.table[0].any()
    assert found.table[2].tolist() == ([-1.0, 2.0] if write is write_text else [2.0, 3.0])


def test_reviews_as_ids_that_end_with_their_last_word(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "IMDb").mkdir()
    for side in ("train", "test"):
        (tmp_path / "IMDb" / f"{side}.csv").write_text(REVIEWS)
    found = load("imdb-glove", tmp_path)
    assert found.vectors is not None
    assert found.train.inputs[0, -4:].tolist() == [0, 0, 0, 5]  # "the" and "film" are among the most frequent
    assert found.train.inputs[1, -3:].tolist() == [0, 0, 3]  # "xyzzy" has no vector
    assert found.input_shape == (64,)
    assert int(found.train.inputs.max()) < len(found.vectors)


WORDS = WordVectors({word: number for number, word in enumerate("abcdefgh", 1)}, torch.zeros(9, 2))


@given(text=st.text("abcdefghxyz ", max_size=30), length=st.integers(1, 8))
def test_either_end_of_a_text_is_kept_and_padding_comes_first(text: str, length: int) -> None:
    known = [WORDS.ids[word] for word in text.split() if word in WORDS.ids]
    for keep, wanted in (("end", known[-length:]), ("start", known[:length])):
        (row,) = VectorTokenizer(WORDS, length, keep, frequent=0)([text]).tolist()  # type: ignore[arg-type]
        assert row == [0] * (length - len(wanted)) + wanted


def test_frequent_words_are_left_out_but_for_the_telling_ones() -> None:
    words = WordVectors({"the": 1, "not": 2, "of": 3, "film": 4}, torch.zeros(5, 2))
    assert VectorTokenizer(words, 5, frequent=3)(["The film, NOT of the film"]).tolist() == [[0, 0, 4, 2, 4]]
    assert VectorTokenizer(words, 3, frequent=0)(["not of the film"]).tolist() == [[3, 1, 4]]


def test_standardised_vectors_have_no_mean_and_unit_variance_under_zipfs_law() -> None:
    torch.manual_seed(0)
    table = torch.cat((torch.zeros(1, 3), 5 + 2 * torch.randn(40, 3)))
    found = standardised(WordVectors({}, table)).table
    weight = 1 / (torch.arange(1, 41) + 2.7)
    weight = (weight / weight.sum())[:, None]
    assert not found[0].any()
    assert torch.allclose((weight * found[1:]).sum(0), torch.zeros(3), atol=1e-5)
    assert torch.allclose((weight * found[1:] ** 2).sum(0), torch.ones(3), atol=1e-5)
    difference = (table[7] - table[3]) / (table[9] - table[3])
    assert torch.allclose((found[7] - found[3]) / (found[9] - found[3]), difference, rtol=1e-3)  # an affine map


def test_absent_or_broken_vectors_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no GloVe vectors in .*glove\.6B\.50d\.txt.*SORDINO_DATA"):
        read_glove(tmp_path)
    write_text(tmp_path / "a", "the 1 2\nfilm 1\n")
    with pytest.raises(InputError, match="line 2: 1 numbers, expected 2"):
        read_glove(tmp_path / "a")
    write_text(tmp_path / "b", "the 1 x\n")
    with pytest.raises(InputError, match="line 1: not a word and its vector"):
        read_glove(tmp_path / "b")
    write_text(tmp_path / "c", "")
    with pytest.raises(InputError, match="empty"):
        read_glove(tmp_path / "c")
    write_table(tmp_path / "d", rows=4)
    with pytest.raises(InputError, match="does not fit the 5 words"):
        read_glove(tmp_path / "d")
    (tmp_path / "d" / INDEX).write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not Parquet"):
        read_glove(tmp_path / "d")
    with pytest.raises(InputError, match="keep 'end' or 'start'"):
        VectorTokenizer(WORDS, 4, "middle")  # type: ignore[arg-type]


def test_verifying_the_reviews_as_glove_words_takes_the_vectors_too(tmp_path: Path) -> None:
    whole = replace(entry("imdb-glove"), layouts=((Content("reviews"),),), remotes=())
    (tmp_path / "reviews").mkdir()
    *_, vectors = verify_entry(whole, tmp_path)
    assert vectors.status == "missing"
    assert "no GloVe vectors" in vectors.detail
    (tmp_path / "glove.6B.50d.txt").write_text("the 0.5 1\nfilm 1 nonsense\n")
    *_, vectors = verify_entry(whole, tmp_path)
    assert (vectors.status, vectors.path) == ("wrong", tmp_path / "glove.6B.50d.txt")
    (tmp_path / "glove.6B.50d.txt").write_text("the 0.5 1\nfilm 1 2\n")
    *_, vectors = verify_entry(whole, tmp_path)
    assert (vectors.status, vectors.detail) == ("ok", "contains vectors of 2 words")
