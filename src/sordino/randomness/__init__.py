"""Randomness: addressed streams of a cryptographic generator, and noise that is rounded as the real number would be."""

from __future__ import annotations

from sordino.randomness.source import RandomSource
from sordino.randomness.stream import Stream

__all__ = ["RandomSource", "Stream"]
