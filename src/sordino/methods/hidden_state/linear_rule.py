"""Settings for training a linear classifier by composition: feature scale, clip norm, step size, batch and steps.

A rule for plain SGD from zero weights whose last half of iterates is averaged; a record is (x, 1) with ‖x‖ ≤ L:

- *scale*: multiply the features by 16/L. The bias is the coordinate 1 of every record; for short features most of a
  clipped gradient, and of the stable step size, would be the bias's.
- *clip norm*: a tenth of √(16² + 1), the norm of the longest record: nearly every gradient is shortened, so a record's
  share of the sum does not fall as its loss does. The noise is then as large as the gradients, not as their bound.
- *step size*: a clipped gradient moves the scores of a record by z = lr·clip·16 at most. z is 128, but not so large
  that the noise of all steps, z·σ·√T/b, moves the scores of the longest record by more than 4.
- *steps*: 400. The noise in the weights relative to their size hardly depends on the number of steps, because σ grows
  as its root; fewer steps leave the weights where they began.
- *batch*: the smallest whose noise of the run is within a fifth of that of full batches, or the largest that the epochs
  allow.
- *time*: if a pace is given, a batch has at most the steps that fit.

The numbers were chosen on held-out training rows of Fashion-MNIST's pixels, Adult and USPS at ε from 0.3 to 3
(experiments/designs/linear_rule.toml, with the tasks on which the rule was then tested). They are about optimisation
and are not part of a guarantee; no data are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from sordino.accounting.calibration import calibrate, noise_guess
from sordino.accounting.events import DpEvent, compose_events
from sordino.accounting.schemes import releases_of
from sordino.plan.pace import Pace

RELATION = "replace-one"
NORM, CLIPPED, MOVE, SCORE_NOISE, STEPS = 16.0, 0.1, 128.0, 4.0, 400
"""The norm of the longest scaled record, the clip norm over it, the largest z, the noise of scores, the steps."""
_ENOUGH = 1.2  # the noise of the run over that of full batches


class Linear(Protocol):
    """What the rule needs to know of a problem; `mu` is the μ of a Gaussian mechanism that meets the target."""

    @property
    def records(self) -> int: ...
    @property
    def feature_norm(self) -> float: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def max_epochs(self) -> int: ...
    @property
    def pace(self) -> Pace | None: ...

    def mu(self) -> float: ...


@dataclass(frozen=True)
class Proposal:
    """How to train: multiply features by `feature_scale`, start at zero, publish the mean of the last half of iterates.

    score_noise: the deviation that the noise of all steps causes in a score of the longest record.
    """

    feature_scale: float
    clip_norm: float
    lr: float
    average: str
    batch: int
    epochs: float
    steps: int
    noise_multiplier: float
    epsilon: float
    score_noise: float


def proposal(problem: Linear) -> Proposal:
    """The settings for a problem, under replace-one; batches are drawn by Poisson sampling.

    At a low sampling rate that needs less noise than batches drawn without replacement, up to half of it.

    Args:
        problem: Records, bound on the features' norm, ε, δ, and the largest number of epochs.

    Returns:
        The proposal, with its calibrated noise.
    """
    steps = max(count for _, count in _sizes(problem))
    least = 2 * math.sqrt(steps) / (problem.mu() * problem.records)  # σ over the batch, of full batches
    for batch in [size for size, count in _sizes(problem) if count == steps]:
        if _noise(problem, batch, steps, rough=True)[0] / batch <= _ENOUGH * least:
            break
    sigma, epsilon = _noise(problem, batch, steps)
    clip = CLIPPED * math.hypot(NORM, 1)
    per_move = sigma * math.sqrt(steps) / batch
    move = min(MOVE, SCORE_NOISE / per_move)
    return Proposal(
        feature_scale=NORM / problem.feature_norm, clip_norm=clip, lr=move / (NORM * clip), average="tail", batch=batch,
        epochs=steps * batch / problem.records, steps=steps, noise_multiplier=sigma, epsilon=epsilon,
        score_noise=move * per_move,
    )  # fmt: skip


def _sizes(problem: Linear) -> Iterator[tuple[int, int]]:
    """(batch, steps) from the smallest batch to the whole dataset, within the epochs and the time."""
    pace, smallest = problem.pace, max(1, problem.records // 256)
    for parts in (256, 128, 64, 32, 16, 8, 4, 2, 1):
        batch = max(1, problem.records // parts)
        steps = max(1, min(STEPS, problem.max_epochs * problem.records // batch))
        if pace is None:
            yield batch, steps
        elif batch == smallest or pace.fitting(batch):
            yield batch, min(steps, pace.steps(batch))


def _noise(problem: Linear, batch: int, steps: int, *, rough: bool = False) -> tuple[float, float]:
    """The smallest noise multiplier that meets the target, and the ε that it has."""
    sampling = {"name": "poisson", "sampling_rate": batch / problem.records}

    def event(sigma: float) -> DpEvent:
        return compose_events(releases_of(sampling, "gaussian", sigma, problem.records, steps))

    guess = noise_guess(sampling, steps, problem.records, problem.epsilon, problem.delta)
    return calibrate(event, problem.epsilon, problem.delta, RELATION, guess=guess, rough=rough)
