"""Addressed streams of a cryptographic generator, and noise rounded exactly as a real number would be."""

from __future__ import annotations

from sordino.randomness.source import RandomSource
from sordino.randomness.stream import Stream

__all__ = ["RandomSource", "Stream"]
