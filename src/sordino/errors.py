"""The errors that sordino raises, and the exit code of each on the command line.

**What a message may contain.** A message is printed, logged, stored in sweep.json and pasted into bug reports, so it
contains nothing that was read from private records: no value, label, minimum, maximum, line number or count of records.
Such details go into `private`, which is for the data's owner only: the command line shows it on a terminal and never
writes it to a file. Whether an error occurs at all depends on the records; no guarantee covers that
(docs/threat-model.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class SordinoError(Exception):
    """Something failed at run time. The message says what failed, where, and what to do.

    Args:
        message: Public: it contains nothing that was read from private records.
        private: What was found in private records, for their owner.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, private: str = "") -> None:
        super().__init__(message)
        self.private = private
        if private:
            self.add_note("What was found in the records is private: see the attribute `private` of this error.")

    def within(self, place: str) -> Self:
        """The same error with a place in front of its message.

        Args:
            place: Where it occurred, for example the section of a recipe.

        Returns:
            A new error of the same class.
        """
        return type(self)(f"{place}: {self}", private=self.private)


class InputError(SordinoError):
    """The input (recipe, budget, file, argument) is wrong. Raised before anything is written."""

    exit_code = 2


class Refused(InputError):
    """No guarantee covers the request. The message says why, and what to do instead."""


class ClaimBroken(SordinoError):
    """An audit's lower bound lies above the claimed ε."""

    exit_code = 3


_ELSEWHERE = {
    "learning_rate": ("lr",),
    "batch_size": ("expected_batch", "batch"),
    "max_grad_norm": ("clip_norm",),
    "sigma": ("noise_multiplier",),
    "target_epsilon": ("epsilon",),
    "target_delta": ("delta",),
    "sample_rate": ("sampling_rate", "expected_batch"),
    "sample_size": ("records",),
    "n": ("records",),
    "label": ("target",),
}
"""Names that other libraries use, and what they are called here."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known name, and the list of all."""
    names = sorted(known)
    if not names:
        return "there are none"
    for here in _ELSEWHERE.get(str(word).lower().replace("-", "_"), ()):
        if here in names:
            return f"did you mean {here!r}? known names are {', '.join(names)}"
    near = difflib.get_close_matches(str(word).lower().replace("_", "-"), names, 1, 0.5) or difflib.get_close_matches(
        str(word), names, 1, 0.5
    )
    return (f"did you mean {near[0]!r}? " if near else "") + f"known names are {', '.join(names)}"
