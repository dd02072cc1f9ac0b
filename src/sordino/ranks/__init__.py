"""One run in several processes (torch.distributed): one process leads, the others sum chunks of its batches."""

from sordino.ranks.group import Lost, Rank, current, grouped, noticing_closed, of_group
from sordino.ranks.pulse import from_environment, watched
from sordino.ranks.run import Begin, Ended, end, leading
from sordino.ranks.sums import Divided, SentPast, follow

__all__ = [
    "Begin",
    "Divided",
    "Ended",
    "Lost",
    "Rank",
    "SentPast",
    "current",
    "end",
    "follow",
    "from_environment",
    "grouped",
    "leading",
    "noticing_closed",
    "of_group",
    "watched",
]
