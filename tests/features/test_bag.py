"""A text as the set of its words: hashed, public, each text by itself."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from sordino import features
from sordino.data.text import text_bytes
from sordino.errors import InputError
from sordino.features.bag import WordBag, by_rank

TEXTS = ("A good film, good!", "bad bad bad film", "", "Ünïcode film")


def place(word: str, dimensions: int) -> tuple[int, float]:
    hashed = zlib.crc32(word.encode())
    return (hashed % 2**31) % dimensions, 1.0 if hashed >= 2**31 else -1.0


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_word_counts_at_its_place_with_its_sign_and_vectors_have_length_one(power: float) -> None:
    out = WordBag(64, power)(text_bytes(TEXTS))
    expected = torch.zeros(64)
    for word, count in (("a", 1), ("good", 2), ("film", 1), ("!", 1)):
        at, sign = place(word, 64)
        expected[at] += sign * count**power
    assert torch.allclose(out[0], expected / expected.norm(), atol=1e-6)
    assert torch.equal(out[2], torch.zeros(64))
    assert torch.allclose(out[[0, 1, 3]].norm(dim=1), torch.ones(3))


def test_a_record_is_seen_alike_whatever_stands_beside_it() -> None:
    rows = text_bytes(TEXTS)
    assert torch.equal(WordBag(64)(rows)[1:2], WordBag(64)(rows[1:2]))


def test_frequent_words_count_less_by_their_public_rank(tmp_path: Path) -> None:
    (tmp_path / "glove.6B.50d.txt").write_text("the 0.1 0.2\nfilm 0.3 0.4\n")
    extract = features.build({"name": "word-bag", "dimensions": 512, "ranks": 0.01}, tmp_path)
    assert "words" in extract.spec
    out = extract(text_bytes(("the film unheard",)))[0]
    found = {word: abs(float(out[place(word, 512)[0]])) for word in ("the", "film", "unheard")}
    assert found["the"] / found["unheard"] == pytest.approx(0.01 / 0.11)
    assert found["film"] / found["unheard"] == pytest.approx(0.01 / 0.06)
    assert by_rank({"the": 1}, 0.1) == {"the": 0.5}


def test_cached_bags_are_the_computed_ones_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = text_bytes((*TEXTS, "one two three four five"))
    extract = features.build({"name": "word-bag", "dimensions": 512, "power": 0.5})
    assert torch.equal(extract.cached(rows, tmp_path), extract(rows))
    assert extract.cached(rows[:0], tmp_path).shape == (0, 512)
    expected = extract(rows)
    monkeypatch.setattr(WordBag, "__call__", lambda *_: pytest.fail("computed again"))
    assert torch.equal(extract.cached(rows, tmp_path), expected)


@pytest.mark.parametrize("option", [{"dimensions": 1}, {"dimensions": 2.0}, {"power": True}, {"power": -1}])
def test_settings_that_mean_nothing_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        features.build({"name": "word-bag", **option})


def test_ranks_need_a_list_of_words_and_a_level(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no GloVe vectors"):
        features.build({"name": "word-bag", "ranks": 0.001}, tmp_path)
    with pytest.raises(InputError, match="ranks must be"):
        features.build({"name": "word-bag", "ranks": 0})


def test_numbers_are_no_texts() -> None:
    with pytest.raises(InputError, match="texts must be UTF-8"):
        WordBag(64)(torch.zeros(2, 3))
