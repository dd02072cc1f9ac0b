"""Per-record gradient norms and clipped sums of rows that are assigned to records."""

from __future__ import annotations

from sordino.gradients.checks.brute_force import brute_force, verify
from sordino.gradients.engine import clipped_sum
from sordino.gradients.replacement import fix
from sordino.gradients.rows import ClippedSum, Rows

__all__ = ["ClippedSum", "Rows", "brute_force", "clipped_sum", "fix", "verify"]
