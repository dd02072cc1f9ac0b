"""Releases noisy sums. The ledger entry of a release is on disk before its value is returned."""

from __future__ import annotations

from sordino.release.ledger import Ledger, adopt, read_chain, read_ledger
from sordino.release.ledger_lines import Chain, Head
from sordino.release.mechanisms import Entry, Gaussian, Laplace, Noise, described_earlier, fine_rounding
from sordino.release.noise import release
from sordino.release.shards import Shard, release_shard

__all__ = [
    "Chain",
    "Entry",
    "Gaussian",
    "Head",
    "Laplace",
    "Ledger",
    "Noise",
    "Shard",
    "adopt",
    "described_earlier",
    "fine_rounding",
    "read_chain",
    "read_ledger",
    "release",
    "release_shard",
]
