"""Names that the command line offers and the accountant checks; a separate module, as the accountant loads slowly."""

from __future__ import annotations

HIDDEN_SAMPLINGS = ("partition", "without-replacement", "full", "shuffle")
HIDDEN_BOUNDS = ("hull", "ye-shokri")
