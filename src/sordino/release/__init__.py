"""The release of noisy sums, and the ledger that has each entry on disk before its value is handed out."""

from __future__ import annotations

from sordino.release.door import Entry, Gaussian, Laplace, Noise, fine_rounding, release
from sordino.release.ledger import Ledger, read_ledger

__all__ = ["Entry", "Gaussian", "Laplace", "Ledger", "Noise", "fine_rounding", "read_ledger", "release"]
