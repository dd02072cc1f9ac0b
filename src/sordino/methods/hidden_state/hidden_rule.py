"""Settings for training a linear classifier of which only the last iterate is published, and what either way may lose.

The counterpart of `linear_rule` for the hidden state, so that the planner compares two runs that it would propose:

- *features*: every record is scaled to norm 16 (`unit`), with a constant feature of 1. A capped loss does not lengthen
  the gradients of short records, as a small clip norm does; scaling does (on the pixels of Fashion-MNIST, held-out
  training rows, 83.3 % where rows as they are had 81.1 %).
- *loss*: softmax with its derivative capped at a tenth; λ = 1e-6, which hardly pulls.
- *step size*: the largest certified one. A gradient then moves a score by about 1.6 at most, so steps are many and
  batches small: 32,000 steps, but not so many that noise moves scores by more than 2 (an average, for which the rule of
  composition has 4, is not covered by the theorem), and batches that take at most 50 epochs, of 8 records at least. If
  a pace is given and that takes too long: as many epochs as fit, or a half or an eighth of them, whichever is best by
  the estimate below, with the steps that fit.
- *noise*: rises in the last steps (`closing`), by the factor of four that gives the least noise.

*What either may lose* against training without noise and without end, in points of accuracy: r/A + (k·ν)²/33, with A
how far all gradients may move a score, ν the deviation of scores by noise, and k = 1 for an average of iterates or 2
for the last one. r depends on the data, from 5,000 (two classes of Adult) to 46,000 (pixels of Fashion-MNIST); both
ends are evaluated, and an answer must hold at both. The constants were read off held-out training rows (closed-form
simulation, one seed). They are about optimisation and not part of a guarantee; no data are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sordino.errors import InputError
from sordino.methods.hidden_state.linear_rule import NORM, SCORE_NOISE, Linear, Proposal
from sordino.methods.hidden_state.losses import Softmax
from sordino.methods.hidden_state.method import plan
from sordino.methods.hidden_state.schedules import closing
from sordino.plan.core import Plan
from sordino.plan.pace import Pace

CAP, REGULARISATION, STEPS, EPOCHS, LEAST_BATCH = 0.1, 1e-6, 32_000, 50, 8
RISES = (3.0, 6.0, 12.0, 24.0)
REMAINING = (5_000.0, 46_000.0)
"""r of the module: the easiest and the hardest of the development tasks."""
PER_NOISE, LAST = 1 / 33, 2.0
ALIKE = 1.0
"""Points of accuracy that the estimate can't tell apart."""


@dataclass(frozen=True)
class HiddenProposal:
    """How to train: scale every record to norm `feature_norm`, append 1, start at zero, publish the last iterate.

    movement: how far all gradients together may move a score of the longest record.
    score_noise: the deviation that the noise of all steps causes in such a score, in flat directions.
    """

    feature_norm: float
    cap: float
    regularisation: float
    lr: float
    batch: int
    epochs: float
    steps: int
    rise: float
    noise_multiplier: float
    epsilon: float
    movement: float
    score_noise: float


def hidden_proposal(problem: Linear, features: int, classes: int) -> HiddenProposal:
    """The settings for a problem, under replace-one; batches are those of one secret partition.

    Args:
        problem: Records, ε, δ, and the largest number of epochs.
        features: The number of features.
        classes: The number of classes.

    Returns:
        The proposal, with its calibrated noise.
    """
    epochs, pace = min(EPOCHS, problem.max_epochs), problem.pace
    found = _proposed(problem, features, classes, epochs, None)
    if pace is None or found.steps <= pace.fitting(found.batch):
        return found
    once = problem.records * pace.per_record
    most = max(1, epochs if once * epochs <= pace.seconds else int(pace.seconds / once))
    fitting = sorted({max(1, most >> shift) for shift in (0, 1, 3)})
    return min(
        (_proposed(problem, features, classes, one, pace) for one in fitting), key=lambda one: sum(losses_of(one))
    )


def _proposed(problem: Linear, features: int, classes: int, epochs: int, pace: Pace | None) -> HiddenProposal:
    """The proposal with at most this number of epochs, and within the time if there is a pace."""
    per_score = 2 / (problem.mu() * problem.records)  # score noise over movement, of full batches in flat directions
    most = max(1, min(STEPS, epochs * problem.records // LEAST_BATCH))
    left = 0.0 if pace is None else pace.seconds - epochs * problem.records * pace.per_record
    if pace is not None and left >= pace.seconds / 2 and pace.per_step:
        most = max(1, math.floor(min(most, left / pace.per_step)))
    wanted = max(1, min(most, math.ceil(SCORE_NOISE / LAST / per_score / _move())))
    batch = min(problem.records, max(1, round(epochs * problem.records / wanted)))
    steps = max(1, min(wanted, epochs * (problem.records // batch)))
    steps = steps if pace is None else min(steps, pace.steps(batch))
    found = _least_noise(problem, features, classes, batch, steps)
    if found.score_noise > SCORE_NOISE / LAST and steps > 1:  # fewer epochs have more noise than full batches
        fewer = max(1, int(steps * SCORE_NOISE / LAST / found.score_noise))
        found = _least_noise(problem, features, classes, batch, fewer)
    return found


def expected_losses(movement: float, score_noise: float, last: bool) -> tuple[float, float]:
    """Points of accuracy lost to the limited movement and to noise, for the easiest and for the hardest task.

    Args:
        movement: How far all gradients may move a score.
        score_noise: The deviation of scores by noise.
        last: Whether the last iterate is published, not an average.

    Returns:
        Both estimates.
    """
    noise = PER_NOISE * ((LAST if last else 1.0) * score_noise) ** 2
    easy, hard = (remaining / movement + noise for remaining in REMAINING)
    return easy, hard


def losses_of(proposal: Proposal | HiddenProposal) -> tuple[float, float]:
    """`expected_losses` of a proposal of either rule."""
    if isinstance(proposal, HiddenProposal):
        return expected_losses(proposal.movement, proposal.score_noise, last=True)
    movement = proposal.lr * proposal.clip_norm * NORM * proposal.steps
    return expected_losses(movement, proposal.score_noise, last=False)


def hidden_plan(problem: Linear, features: int, classes: int, found: HiddenProposal) -> Plan:
    """The plan of a proposal, as `train_hidden` takes it."""
    return _plan(problem, features, classes, found.batch, found.steps, found.rise)


def _plan(problem: Linear, features: int, classes: int, batch: int, steps: int, rise: float) -> Plan:
    return plan(
        loss=Softmax(classes, cap=CAP), features=features, records=problem.records, batch=batch, steps=steps,
        delta=problem.delta, epsilon=problem.epsilon, regularisation=REGULARISATION, feature_norm=NORM, unit=True,
        noise_factors=closing(steps, 1.0, rise),
    )  # fmt: skip


def _move() -> float:
    """How far one gradient moves a score at most: lr·√2·cap·R·16 with the largest certified step size."""
    squared = NORM**2 + 1
    lr = 2 / (Softmax(2, cap=CAP).curvature * squared + 2 * REGULARISATION)
    return lr * math.sqrt(2) * CAP * math.sqrt(squared) * NORM


def _least_noise(problem: Linear, features: int, classes: int, batch: int, steps: int) -> HiddenProposal:
    """The rise of the closing noise that has the least noise in the weights, calibrated."""
    found: list[HiddenProposal] = []
    for rise in RISES:
        try:
            planned = _plan(problem, features, classes, batch, steps, rise)
        except InputError:  # the rise of so few steps is beyond the noise that is calibrated
            if found:
                break
            raise
        run = planned.method.run(planned)  # type: ignore[attr-defined]
        deviation = math.sqrt(float(((run.step_sizes * run.noise_stds) ** 2).sum()))
        one = HiddenProposal(
            feature_norm=NORM, cap=CAP, regularisation=REGULARISATION, lr=float(run.step_sizes[0]), batch=batch,
            epochs=steps * batch / problem.records, steps=steps, rise=rise,
            noise_multiplier=planned.noise.noise_multiplier, epsilon=planned.guarantee().epsilon,
            movement=_move() * steps, score_noise=NORM * deviation,
        )  # fmt: skip
        found.append(one)
    return min(found, key=lambda one: one.score_noise)
