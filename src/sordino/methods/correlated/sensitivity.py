"""The sensitivity of CX to one record, for a strategy and a participation pattern.

A record takes part in the steps t ≡ g (mod b), at most k of them, with vectors of norm at most 1 that may depend on
everything released before. It moves CX by Σ_m C[:, t_m] ⊗ u_m, whose square is Σ ⟨C[:, t_m], C[:, t_n]⟩·⟨u_m, u_n⟩.

*Theorem.* If c is non-negative and non-increasing, then over all patterns of at most k steps that are at least b apart,
the square is at most s² = ‖c + shift_b c + … + shift_{(k−1)b} c‖², which is attained (Kalinin & Lampert 2024, arXiv
2405.13763, Thm 2). *Proof for the patterns used here*, t_m = g + m·b: inner products of non-negative columns are
non-negative, so equal u_m are the worst case; and the sum of the columns from g on is that from 0 on, shifted by g and
truncated, so g = 0 is the worst case. ∎ The proof needs only c ≥ 0. Both hypotheses are verified nevertheless, with the
bound on the rounding of c, and a strategy that does not satisfy them is refused.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np

from sordino.errors import InputError, Refused
from sordino.methods.correlated.strategies import Array, Strategy, relative_error

_ROUNDED_UP = 1e-9
"""Relative margin for the rounding of squares, roots and the margin itself, in addition to the bound on sums."""


def sensitivity(strategy: Strategy, *, steps: int, separation: int) -> float:
    """An upper bound on s for a record that takes part every `separation` steps, at most ⌈steps/separation⌉ times.

    Raises:
        Refused: the coefficients of C are not verified to be non-negative and non-increasing.
    """
    column = checked_matrix(strategy, steps)
    rounding = _ROUNDED_UP + 4 * steps * 2.0**-53  # of at most `steps` additions of positive numbers, twice
    return repeated_norm(column, separation) * (1 + rounding + relative_error(strategy, steps))


def column_norm(strategy: Strategy, *, steps: int) -> float:
    """An upper bound on the largest norm of a column of C: the sensitivity of one participation."""
    return sensitivity(strategy, steps=steps, separation=steps)


def checked_matrix(strategy: Strategy, steps: int) -> Array:
    """The coefficients of C; Refused unless they are verified to be non-negative and non-increasing."""
    column, error = strategy.matrix(steps), relative_error(strategy, steps)
    if error > 1e-6:
        raise Refused(f"{strategy} can't be verified for {steps} steps in double precision; use fewer steps")
    falls = column[1:] * (1 + error) <= column[:-1] * (1 - error)
    if not (np.isfinite(column).all() and (column >= 0).all() and (falls | (column[1:] == 0)).all()):
        raise Refused(
            f"the coefficients of {strategy} are not non-negative and non-increasing over {steps} steps, which the "
            "formula for the sensitivity needs: use another strategy"
        )
    return column


def repeated_norm(column: Array, separation: int) -> float:
    """‖Σ_m shift_{m·separation} c‖, computed."""
    rounds = -(-len(column) // separation)
    padded = np.zeros(rounds * separation)
    padded[: len(column)] = column
    total = np.cumsum(padded.reshape(rounds, separation), axis=0).ravel()[: len(column)]
    return float(np.linalg.norm(total))


def brute_force(column: Array, separation: int, participations: int) -> float:
    """The largest ‖Σ C[:, t]‖ over *all* patterns with at least this separation; for tests with small sizes.

    Raises:
        InputError: there are too many patterns.
    """
    steps = len(column)
    if math.comb(steps, min(participations, steps)) > 2_000_000:
        raise InputError(f"{steps} steps have too many patterns of {participations} participations")
    matrix = np.array([[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    worst = 0.0
    for count in range(1, participations + 1):
        for chosen in combinations(range(steps), count):
            if all(b - a >= separation for a, b in pairwise(chosen)):
                worst = max(worst, float(np.linalg.norm(matrix[:, list(chosen)].sum(axis=1))))
    return worst
