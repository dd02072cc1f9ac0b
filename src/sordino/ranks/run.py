"""How a run of several ranks begins and ends: messages of the leader that start or end the work."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sordino.errors import InputError, Refused, SordinoError
from sordino.ranks.group import Lost, Rank

TOLD = "the other ranks of the run were told to stop"


@dataclass(frozen=True)
class Begin:
    """The leader has checked that there is a run to make."""


_KINDS: dict[str, type[SordinoError]] = {kind.__name__: kind for kind in (SordinoError, InputError, Refused)}


@dataclass(frozen=True)
class Failure:
    """An error as text, to be sent to the leader: exceptions themselves may hold what can't be sent, or should not."""

    kind: str
    message: str
    private: str

    @classmethod
    def of(cls, error: Exception, rank: Rank, what: str = "could not sum its records") -> Failure:
        """An error of ours by its message; of another one the text may quote records, and is private."""
        if isinstance(error, SordinoError):
            kind = next(kind for kind in reversed(_KINDS.values()) if isinstance(error, kind))
            return cls(kind.__name__, str(error), error.private)
        message = f"rank {rank.number} of {rank.size} {what}: {type(error).__name__}"
        return cls("SordinoError", message, "".join(traceback.format_exception(error)))

    @property
    def error(self) -> SordinoError:
        return _KINDS[self.kind](self.message, private=self.private)


@dataclass(frozen=True)
class Ended:
    """The leader has no more work: the run is complete, or `failed` with an exit code."""

    failed: int | None = None
    metrics: tuple[Mapping[str, float], ...] = ()
    seconds: float = 0.0
    skipped_steps: int = 0


class Stopped(SordinoError):
    """The leader ended the run with an error, which it reports itself."""

    quiet = True

    def __init__(self, code: int) -> None:
        super().__init__("the leader of the run has ended it and reports why")
        self.exit_code = code


def heard(rank: Rank, message: object = None) -> Any:
    """The leader's message, at every rank; Stopped if the leader has ended the run with an error."""
    found = rank.tell(message)
    if isinstance(found, Ended) and not rank.leads:
        end(found)
        raise SordinoError("the ranks of the run are out of step: one received the end of the run in place of work")
    return found


@contextmanager
def leading(rank: Rank | None) -> Iterator[None]:
    """Tells the followers if the block ends with an error; does nothing without ranks."""
    try:
        yield
    except BaseException as error:
        if (
            rank is not None
            and rank.leads
            and not isinstance(error, Lost)
            and TOLD not in getattr(error, "__notes__", ())
        ):
            error.add_note(TOLD)  # once, however many nested blocks the error leaves
            with suppress(Lost):
                rank.tell(Ended(failed=getattr(error, "exit_code", 1)))
        raise


def end(message: object) -> Ended:
    """The leader's last message; Stopped if the run failed."""
    if not isinstance(message, Ended):
        raise SordinoError(f"the ranks of the run are out of step: got {type(message).__name__} in place of the end")
    if message.failed is not None:
        raise Stopped(message.failed)
    return message
