"""Every error that sordino raises on purpose, and the exit code that the command line gives for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SordinoError(Exception):
    """Something failed while running. The message says what, where, and what to do."""

    exit_code = 1


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
