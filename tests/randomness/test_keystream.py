"""The key stream is AES-256-CTR, at every place and by whichever code reads it."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.native import kernels
from sordino.randomness import keystream
from sordino.randomness.keystream import Keystream

KEY = bytes(range(32))


def openssl(key: bytes, words: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * words)), "<u8")


@pytest.fixture(params=["compiled", "openssl"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "openssl":
        monkeypatch.setattr(keystream, "compiled", lambda: None)
    elif kernels.compiled() is None:
        pytest.skip("no compiled loops here")
    return str(request.param)


@pytest.mark.parametrize("words", [0, 1, 2, 3, 31, 32, 33, 34, 8192, 8195])
@pytest.mark.parametrize("at", [0, 1, 2, 7, 64, 1000])
def test_a_part_of_the_stream_is_what_a_reader_of_the_whole_finds_there(reader: str, at: int, words: int) -> None:
    whole, found = openssl(KEY, at + words), np.full(words + 1, 7, np.uint64)
    Keystream(KEY).fill(found[:words], at)
    assert np.array_equal(found[:words], whole[at:])
    assert found[words] == 7, "nothing is written behind the end"


def test_reads_follow_one_another_or_jump(reader: str) -> None:
    whole, stream = openssl(KEY, 100), Keystream(KEY)
    for at, words in ((0, 10), (10, 5), (15, 20), (80, 20), (3, 4)):
        found = np.zeros(words, np.uint64)
        stream.fill(found, at)
        assert np.array_equal(found, whole[at : at + words])


@pytest.mark.parametrize("block", [2**32 - 2, 2**40, 2**64 - 4])
def test_a_counter_beyond_32_bits_is_carried(reader: str, block: int) -> None:
    wanted = Cipher(algorithms.AES(KEY), modes.CTR(block.to_bytes(16, "big"))).encryptor().update(bytes(48))
    found = np.zeros(6, np.uint64)
    Keystream(KEY).fill(found, 2 * block)
    assert found.tobytes() == wanted


@settings(max_examples=50, deadline=None)
@given(key=st.binary(min_size=32, max_size=32), words=st.integers(1, 200))
def test_any_key(key: bytes, words: int) -> None:
    found = np.zeros(words, np.uint64)
    Keystream(key).fill(found, 0)
    assert np.array_equal(found, openssl(key, words))


def test_the_digest_that_a_library_is_tried_against_is_openssls() -> None:
    assert hashlib.blake2b(openssl(KEY, 74).tobytes(), digest_size=16).hexdigest() == kernels._ENCRYPTED


def test_a_library_that_encrypts_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.compiled()
    if found is None:
        pytest.skip("no compiled loops here")
    monkeypatch.setattr(kernels, "_ENCRYPTED", "0" * 32)
    assert not kernels.agrees(found)


def test_a_key_of_another_length_is_refused() -> None:
    found = kernels.compiled()
    if found is None:
        pytest.skip("no compiled loops here")
    with pytest.raises(ValueError, match="32 bytes"):
        found.key_stream(bytes(16), 0, np.zeros(2, np.uint64))
