"""Several processes, one run: one process leads, the others sum chunks of its batches (torch.distributed)."""

from sordino.ranks.group import Lost, Rank, current, from_environment
from sordino.ranks.sums import Divided, follow

__all__ = ["Divided", "Lost", "Rank", "current", "follow", "from_environment"]
