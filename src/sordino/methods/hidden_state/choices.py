"""Names that the command line offers and the accountant checks: apart from both, since the accountant loads slowly."""

from __future__ import annotations

HIDDEN_SAMPLINGS = ("partition", "without-replacement", "full", "shuffle")
HIDDEN_BOUNDS = ("hull", "ye-shokri")
