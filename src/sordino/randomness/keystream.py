"""AES-256 in counter mode with random access: the random bytes of every stream.

Formal contract. Word w of a key stream is bytes 8w to 8w + 7 of AES-256-CTR (FIPS 197, SP 800-38A) under the key, with
a counter that begins at zero. It depends on the key and on w only, so threads may each read a part of one stream and
get what a single thread would have read. The bytes come from the C kernel if the processor has AES instructions, and
from OpenSSL otherwise; they are the same (`kernels.agrees` compares them before the kernel is used).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from sordino.native.kernels import compiled
from sordino.randomness.exact import EXTRA_BITS

_ZEROS = bytes(1 << 16)


def extra_digits(refine_key: bytes, address: int, words: int) -> bytes:
    """The digits with which `exact` decides a draw: EXTRA_BITS for each of its words, found by the draw's address."""
    place = address.to_bytes(16, "little")
    first = hashlib.blake2b(place, digest_size=16 * words, key=refine_key).digest()
    size = EXTRA_BITS // 8 - 16
    rest = hashlib.blake2b(place + b"rest", digest_size=size * words, key=refine_key).digest()
    # little-endian: the first 128 digits of a word are the last bytes of its number
    return b"".join(rest[size * i : size * (i + 1)] + first[16 * i : 16 * (i + 1)] for i in range(words))


class Further:
    """Further digits of draws, found by the address of the draw. For one thread only, as OpenSSL's context is."""

    def __init__(self, refine_key: bytes) -> None:
        self._refine_key = refine_key
        self._cipher: CipherContext | None = None  # created on first use: a small sum may not need it

    def digits(self, counters: bytes) -> bytes:
        """16 bytes for each address; an address is given as 8 bytes followed by 8 zeros.

        The bytes are the AES encryption of the address under a separate key: counter mode with random access.
        """
        if self._cipher is None:
            key = hashlib.blake2b(b"further digits", digest_size=32, key=self._refine_key).digest()
            self._cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        return self._cipher.update(counters)


class Keystream:
    """The words of one key. For one thread only; each thread creates its own."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher: CipherContext | None = None
        self._at = 0  # the next word of OpenSSL's context

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
