"""Text and Adult: public vocabularies, public categories, public scales; wrong lines are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.data import HashingTokenizer, load, load_texts
from sordino.data.adult import CATEGORIES, WIDTH, read_adult
from sordino.data.text import read_text_csv
from sordino.errors import InputError

ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, "
    "2174, 0, 40, United-States, <=50K"
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=5), st.integers(2, 500), st.integers(1, 20))
def test_a_texts_ids_depend_on_that_text_alone(texts: list[str], vocabulary: int, length: int) -> None:
    tokenizer = HashingTokenizer(vocabulary, length)
    together = tokenizer(texts)
    assert together.shape == (len(texts), length)
    assert together.dtype == torch.int64
    assert 0 <= int(together.min()) <= int(together.max()) < vocabulary
    assert torch.equal(together, torch.cat([tokenizer([text]) for text in texts]))


def test_words_are_lower_cased_and_tags_and_punctuation_left_out() -> None:
    a, b, empty = HashingTokenizer(length=6)(["It's GREAT.<br /><br />Great!", "it's great great !", ""])
    assert torch.equal(a, b)
    assert a[1] == a[2] != a[0]
    assert a[4:].tolist() == [0, 0]
    assert not empty.any()


def test_the_ids_never_change_between_versions() -> None:
    # models are trained on these ids: CRC-32 of the word, modulo 19,999, plus 1
    assert HashingTokenizer(length=3)(["a good movie"]).tolist() == [
        [1 + crc % 19_999 for crc in (0xE8B7BE43, 0x6C844E92, 0x1D5EF26F)]
    ]


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, "utf-8")
    return path


def test_imdb_from_csv_with_quotes_and_newlines(tmp_path: Path) -> None:
    write(tmp_path / "IMDb/train.csv", 'text,label\n"Good, ""really""\nyes",1\nbad,0\n')
    write(tmp_path / "IMDb/test.csv", "review,sentiment\nfine,positive\nawful,negative\n")
    train, test = load_texts("imdb", tmp_path)
    assert train.texts == ('Good, "really"\nyes', "bad")
    assert train.targets.tolist() == test.targets.tolist() == [1, 0]
    found = load("imdb", tmp_path, tokenizer=HashingTokenizer(length=4))
    assert found.train.inputs.shape == (2, 4)
    assert found.classes == 2


def test_imdb_from_the_original_folders(tmp_path: Path) -> None:
    for side in ("train", "test"):
        write(tmp_path / f"aclImdb/{side}/neg/0_1.txt", "bad")
        write(tmp_path / f"aclImdb/{side}/pos/0_9.txt", "good")
    train, _ = load_texts("imdb", tmp_path)
    assert train.texts == ("bad", "good")
    assert train.targets.tolist() == [0, 1]
    (tmp_path / "aclImdb/test/pos/0_9.txt").unlink()
    with pytest.raises(InputError, match=r"no .txt files"):
        load_texts("imdb", tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a,b\n1,2\n", "does not name the columns text and label"),
        ("\n", "does not name the columns"),
        ("text,label\n", "no rows"),
        ("text,label\ngood,2\n", "a label is not one of 0 to 1"),
        ("text,label\ngood,²\n", "a label is not one of 0 to 1"),
        (f"text,label\ngood,{'1' * 5000}\n", "a label is not one of 0 to 1"),
        ("text,label\ngood,1\nbad\n", "a line without 2 fields"),
        ('text,label\n"cut in the mid', "truncated or not CSV"),
    ],
)
def test_a_wrong_csv_is_named_with_the_line(tmp_path: Path, content: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        read_text_csv(write(tmp_path / "train.csv", content))
    assert complaint == "no rows" or caught.value.private


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_bytes(b"text,label\n\xff\xfe,1\n")
    with pytest.raises(InputError, match="not UTF-8"):
        read_text_csv(path)


def test_a_tokenizer_for_images_is_an_error() -> None:
    with pytest.raises(InputError, match="only the dataset imdb takes a tokenizer"):
        load("fashion-mnist-mini", tokenizer=HashingTokenizer())
    with pytest.raises(InputError, match="has no text"):
        load_texts("mnist")
    with pytest.raises(InputError, match="vocabulary must be at least 2"):
        HashingTokenizer(vocabulary=1)


def test_adult_rows_are_public_categories_and_publicly_scaled_numbers(tmp_path: Path) -> None:
    write(tmp_path / "Adult/adult.data", f"{ROW}\n{ROW.replace('State-gov', '?').replace('<=50K', '>50K')}\n\n")
    write(tmp_path / "Adult/adult.test", f"|1x3 Cross validator\n{ROW}.\n")
    found = load("adult", tmp_path)
    row, unknown = found.train.inputs
    assert found.train.inputs.shape == (2, WIDTH)
    assert found.train.targets.tolist() == [0, 1]
    assert torch.equal(found.test.inputs[0], row)
    assert row[0] == pytest.approx(0.39)
    assert row.min() >= 0
    assert row.max() <= 1
    assert int((row == 1).sum()) == len(CATEGORIES)
    assert int((unknown == 1).sum()) == len(CATEGORIES) - 1  # `?` is a row of zeros


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("39, State-gov", "a line without 15 fields"),
        (ROW.replace("Bachelors", "Bachelor"), "a value of education is not in the public list"),
        (ROW.replace("39,", "old,"), "a value of age is not a number"),
        (ROW.replace("39,", "nan,"), "a value of age is not a number"),
        (ROW.replace("<=50K", "50K"), "an income that is neither"),
    ],
)
def test_a_wrong_line_of_adult_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "adult.data", f"{ROW}\n{line}\n")
    with pytest.raises(InputError, match=complaint) as caught:
        read_adult(path)
    assert str(path) in str(caught.value)
    assert caught.value.private.startswith("line 2")
    assert not {"Bachelor", "old", "50K,"} & set(str(caught.value).split())
