"""Every error that sordino raises on purpose, and the exit code that the command line gives for it."""

from __future__ import annotations


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
