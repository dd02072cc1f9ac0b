"""One cryptographic generator for everything random: noise, sampling, shuffles, initial weights, canaries.

Formal contract. `source.stream(purpose, index)` is AES-256 in counter mode under a key derived from the source's key by
keyed BLAKE2b over (purpose, index). Streams for different arguments are independent, and the same arguments give the
same stream, so a step can be drawn again or skipped without restoring any state. With `from_os` the key comes from the
operating system and exists only in this object; an adversary who can't break AES or BLAKE2b can't distinguish the
streams from true randomness. With `seeded` the generator is the same, but the key follows from a seed that others may
guess: `secure` is False, and no guarantee holds against an adversary who knows the seed.
"""

from __future__ import annotations

import hashlib
import os

from sordino.errors import InputError, Refused
from sordino.randomness.stream import Stream


class RandomSource:
    """A key from which streams are derived. `secure` says whether the key is unpredictable."""

    __slots__ = ("_key", "_process", "_run", "_secure")

    def __init__(self, key: bytes, *, secure: bool) -> None:
        if len(key) != 32:
            raise InputError(f"a random source needs a key of 32 bytes, got {len(key)}; use from_os() or seeded()")
        self._key = key
        self._secure = secure
        self._process = os.getpid()
        self._run: str | None = None  # the run whose batches it draws

    @classmethod
    def from_os(cls) -> RandomSource:
        """A fresh key from the operating system's generator; guarantees hold for this kind of source only."""
        return cls(os.urandom(32), secure=True)

    @classmethod
    def seeded(cls, insecure_seed: int) -> RandomSource:
        """The same generator with a key derived from the seed: reproducible, and not private."""
        if isinstance(insecure_seed, bool) or not isinstance(insecure_seed, int):
            raise InputError(f"insecure_seed must be an integer, got {insecure_seed!r}")
        key = hashlib.blake2b(str(insecure_seed).encode(), digest_size=32, person=b"sordino/seed")
        return cls(key.digest(), secure=False)

    @property
    def secure(self) -> bool:
        return self._secure

    @property
    def fingerprint(self) -> str:
        """A public digest of the key: equal for equal keys, and it reveals nothing about a secret key."""
        return hashlib.blake2b(digest_size=16, key=self._key, person=b"sordino/name").hexdigest()

    def claim(self, run: str) -> None:
        """Reserves the source for one run: two runs with one key draw the same batches, and their ε do not add up.

        Args:
            run: the run's own name; the same when the run is resumed.

        Raises:
            Refused: it belongs to another run, or this process is a fork of the one that made it. A seeded source
                repeats itself on purpose, and may be used by any run.
        """
        if not self._secure:
            return
        if self._process != os.getpid():
            raise Refused("this process is a fork of the one that made the random source: make one here, plan.source()")
        if self._run not in (None, run):
            raise Refused(
                "this random source has drawn the batches of another run, and would draw the same ones again: two "
                "such runs together cost more than the sum of their ε. Make one for each run: plan.source()"
            )
        self._run = run

    def stream(self, purpose: str, index: int) -> Stream:
        """The stream of (purpose, index), from its beginning."""
        if index < 0:
            raise InputError(f"the index of a stream must be at least 0, got {index} for {purpose!r}")
        name = f"{index}:{purpose}".encode()  # the index has no colon, so no two pairs collide
        keys = hashlib.blake2b(name, digest_size=64, key=self._key, person=b"sordino/stream").digest()
        return Stream(keys[:32], keys[32:])

    def __repr__(self) -> str:
        return f"RandomSource(secure={self._secure})"

    def __reduce__(self) -> str:
        raise TypeError("a random source holds a secret key and can't be pickled; derive streams in one process")
