"""Names that the command line offers and the accounting checks: apart from both, since the accounting loads slowly."""

from __future__ import annotations

import math

HIDDEN_SAMPLINGS = ("partition", "without-replacement", "full", "shuffle")
HIDDEN_BOUNDS = ("hull", "ye-shokri")
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}  # laws of the number of runs of a paid sweep
