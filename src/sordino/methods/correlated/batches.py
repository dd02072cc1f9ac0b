"""Sampling noise: the effect on the weights of drawing only some of the records in each step.

The sum of clipped gradients of a batch of about B records varies around its mean over the draws, with a variance of
about B/d along a direction that matters, in squared clip norms. Gradients lie in few directions, unlike the noise of
the mechanism, and d is the number of these directions. The variance accumulates in the weights as the mechanism's does,
in a way that depends on the sampling:

- *Poisson*: the steps are independent.
- *Random allocation*: an epoch uses every record once, so the deviations of an epoch's batches sum to zero.
- *Cyclic*, groups in turn: as allocation, with the same groups in every round. If a part of a group is drawn, at the
  rate r, the steps vary by (1 − r)·B/d independently, and by r·B/d with the groups.

d is unknown to a planner that uses no data. `DIMENSION` was fitted on development tasks (linear classifiers on
every tenth row of MNIST and Fashion-MNIST, training rows only); 300 to 1000 fit about as well. No guarantee depends
on any of this.
"""

from __future__ import annotations

import functools

import numpy as np

from sordino.methods.correlated.strategies import Array
from sordino.methods.correlated.workloads import Workload

DIMENSION = 500.0
_TIMES = 48  # number of steps at which the variance is evaluated


def independent_noise(workload: Workload, steps: int) -> float:
    """Mean square over the steps, in the weights, of independent steps of variance 1."""
    squares = np.cumsum(workload.coefficients(steps) ** 2)
    return float(squares.mean())


@functools.lru_cache(128)
def evened_noise(workload: Workload, steps: int, batches: int, *, anew: bool) -> float:
    """The same if every record participates once in each round of `batches` steps; `anew`: drawn again for every round.

    The steps of a round have variance 1 − 1/t and covariance −1/t. The variance in the weights at a step is the sum of
    squares of the coefficients of the positions in a round, minus that of their mean.
    """
    worth = workload.coefficients(steps)
    times = np.unique(np.linspace(0, steps - 1, min(_TIMES, steps)).round().astype(int))
    return float(np.mean([_at(worth[: time + 1][::-1], batches, anew) for time in times.tolist()]))


def _at(worth: Array, batches: int, anew: bool) -> float:
    """`worth[s]` is the coefficient of step s in the current weights."""
    rounds = -(-len(worth) // batches)
    padded = np.zeros(rounds * batches)
    padded[: len(worth)] = worth
    table = padded.reshape(rounds, batches)
    if anew:
        return float((table**2).sum() - (table.sum(axis=1) ** 2).sum() / batches)
    places = table.sum(axis=0)
    return float((places**2).sum() - places.sum() ** 2 / batches)


def batch_noise(
    sampler: str, workload: Workload, *, steps: int, batch: float, groups: int, rate: float, dimension: float
) -> float:
    """Root mean square of the sampling noise in the weights, in clip norms; `groups`: steps of a round or an epoch."""
    if sampler == "poisson":
        found = (1 - rate) * independent_noise(workload, steps)
    elif sampler == "allocation":
        found = evened_noise(workload, steps, groups, anew=True)
    else:
        found = (1 - rate) * independent_noise(workload, steps)
        found += rate * evened_noise(workload, steps, groups, anew=False)
    return float(np.sqrt(max(found, 0.0) * batch / dimension))
