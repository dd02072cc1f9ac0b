"""How a run of several ranks begins and ends: messages of the leader that are no work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sordino.errors import SordinoError
from sordino.ranks.group import Lost, Rank

TOLD = "the other ranks of the run were told to stop"


@dataclass(frozen=True)
class Begin:
    """The leader has made sure that there is a run to make."""


@dataclass(frozen=True)
class Ended:
    """The leader has no more work: the run is complete, or `failed` with an exit code."""

    failed: int | None = None
    metrics: tuple[Mapping[str, float], ...] = ()
    seconds: float = 0.0
    skipped_steps: int = 0


class Stopped(SordinoError):
    """The leader ended the run with an error, which it has said itself."""

    quiet = True

    def __init__(self, code: int) -> None:
        super().__init__("the leader of the run has ended it, and says why")
        self.exit_code = code


def heard(rank: Rank, message: object = None) -> Any:
    """The leader's message at every rank, where it is not the end of the run; Stopped where the run failed."""
    found = rank.tell(message)
    if isinstance(found, Ended) and not rank.leads:
        end(found)
        raise SordinoError("the ranks of the run are out of step: its end came where work was due")
    return found


@contextmanager
def leading(rank: Rank | None) -> Iterator[None]:
    """The followers hear of whatever ends the block with an error; without ranks, nothing is done."""
    try:
        yield
    except BaseException as error:
        if (
            rank is not None
            and rank.leads
            and not isinstance(error, Lost)
            and TOLD not in getattr(error, "__notes__", ())
        ):
            error.add_note(TOLD)  # once, however many blocks the error leaves
            with suppress(Lost):
                rank.tell(Ended(failed=getattr(error, "exit_code", 1)))
        raise


def end(message: object) -> Ended:
    """The leader's last message; Stopped where the run failed."""
    if not isinstance(message, Ended):
        raise SordinoError(f"the ranks of the run are out of step: {type(message).__name__} where the end was due")
    if message.failed is not None:
        raise Stopped(message.failed)
    return message
