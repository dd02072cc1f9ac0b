"""Every error that sordino raises on purpose, and the exit code that the command line gives for it.

**What a message may hold.** A message is printed, logged, kept in sweep.json and pasted into bug reports, so it holds
nothing that was read from private records: no value, label, extreme, line number or count of records. That goes into
`private`, which only the data's owner is to see: the command line shows it on a terminal and never into a file.
That an error occurred at all does depend on the records; no guarantee covers it (docs/threat-model.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class SordinoError(Exception):
    """Something failed while running. The message says what, where, and what to do.

    Args:
        message: public; see above for what it may hold.
        private: what was found in private records, for their owner.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, private: str = "") -> None:
        super().__init__(message)
        self.private = private
        if private:
            self.add_note("What was found in the records is private, so it is kept apart: see `private` of this error.")

    def within(self, place: str) -> Self:
        """The same error with a place in front of its message.

        Args:
            place: Where it occurred, for example the section of a recipe.

        Returns:
            A new error of the same class.
        """
        return type(self)(f"{place}: {self}", private=self.private)


class InputError(SordinoError):
    """The input is wrong (recipe, budget, file, argument). Raised before anything is written."""

    exit_code = 2


class Refused(InputError):
    """The request can't be certified. The message says why, and what to do instead."""


class ClaimBroken(SordinoError):
    """An audit's lower bound lies above the claimed ε."""

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, and all of them."""
    names = sorted(known)
    if not names:
        return "there are none"
    near = difflib.get_close_matches(str(word).lower().replace("_", "-"), names, 1, 0.5) or difflib.get_close_matches(
        str(word), names, 1, 0.5
    )
    return (f"did you mean {near[0]!r}? " if near else "") + f"known are {', '.join(names)}"
