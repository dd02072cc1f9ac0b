"""AES-256 in counter mode, read from any place: the random bytes that every stream is made of.

Formal contract. Word w of a key stream is bytes 8w to 8w + 7 of AES-256-CTR (FIPS 197, SP 800-38A) under the key, with
a counter that begins at zero. It depends on the key and on w alone, so several threads may each read a part of one
stream and get what one thread would have read. The bytes come from the compiled loop where the processor has AES
instructions, and from OpenSSL otherwise: the same bytes (`kernels.agrees` compares them before the loop is used).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from sordino.native.kernels import compiled

_ZEROS = bytes(1 << 16)


class Further:
    """More digits of draws, found by the addresses of their first ones. Like a key stream, it belongs to one thread:
    OpenSSL's context can't be used by two at a time."""

    def __init__(self, refine_key: bytes) -> None:
        self._refine_key = refine_key
        self._cipher: CipherContext | None = None  # made when it is needed: a small sum may leave nothing open

    def digits(self, counters: bytes) -> bytes:
        """16 bytes for each address, which is given as 8 bytes followed by 8 zeros.

        AES of the address: a counter mode that is read at places of our choice, under a key of its own.
        """
        if self._cipher is None:
            key = hashlib.blake2b(b"further digits", digest_size=32, key=self._refine_key).digest()
            self._cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        return self._cipher.update(counters)


class Keystream:
    """The words under one key; not to be shared by threads, each makes its own."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher: CipherContext | None = None
        self._at = 0  # the word that OpenSSL's context comes to next

    def fill(self, words: npt.NDArray[np.uint64], at: int) -> None:
        """words ← the key stream from its word number `at` on."""
        kernels = compiled()
        if kernels is None or at % 2 or not kernels.key_stream(self._key, at // 2, words):
            self._by_openssl(words, at)

    def _by_openssl(self, words: npt.NDArray[np.uint64], at: int) -> None:
        if self._cipher is None or self._at != at:
            self._cipher = Cipher(algorithms.AES(self._key), modes.CTR((at // 2).to_bytes(16, "big"))).encryptor()
            self._cipher.update(bytes(8 * (at % 2)))
        buffer = words.view(np.uint8).data
        for start in range(0, len(buffer), len(_ZEROS)):
            part = buffer[start : start + len(_ZEROS)]
            self._cipher.update_into(_ZEROS[: len(part)] if len(part) < len(_ZEROS) else _ZEROS, part)
        self._at = at + len(words)
