"""The noise of the batches themselves: that a step sees some of the records adds to what its noise does to the model.

A batch of about B records has a sum of clipped gradients that varies around its mean over the draws, with a variance of
about B/d along a direction that matters, in squared clip norms: gradients lie in few directions, as the noise of the
mechanism does not, and d says how few they are. That variance is added up in the weights as the mechanism's is, and
how it adds up depends on who takes part:

- *Poisson*: the steps are independent.
- *Random allocation*: an epoch sees every record once, so the batches of an epoch make up for each other.
- *Cyclic*, groups in turn: as allocation, with the same groups in every round. Where a part of a group is drawn, at the
  rate r, the steps vary by (1 − r)·B/d independently, and by r·B/d with the groups.

d is unknown to a planner that looks at no data. `DIMENSION` was fitted on development tasks (linear classifiers on
every tenth row of MNIST and Fashion-MNIST, training rows alone): 300 to 1000 serve about as well. No guarantee depends
on any of this.
"""

from __future__ import annotations

import functools

import numpy as np

from sordino.methods.correlated.strategies import Array
from sordino.methods.correlated.workloads import Workload

DIMENSION = 500.0
_TIMES = 48  # steps at which the variance is looked at


def independent_noise(workload: Workload, steps: int) -> float:
    """Mean square, over steps, in the weights, of independent steps of variance 1."""
    squares = np.cumsum(workload.coefficients(steps) ** 2)
    return float(squares.mean())


@functools.lru_cache(128)
def evened_noise(workload: Workload, steps: int, batches: int, *, anew: bool) -> float:
    """The same where every record takes part once in each round of `batches` steps; `anew`: drawn for every round.

    The steps of a round have the variance 1 − 1/t and the covariance −1/t. The variance in the weights at a step is
    Σ over records' places of (what the place is worth)², less that of their mean.
    """
    worth = workload.coefficients(steps)
    times = np.unique(np.linspace(0, steps - 1, min(_TIMES, steps)).round().astype(int))
    return float(np.mean([_at(worth[: time + 1][::-1], batches, anew) for time in times.tolist()]))


def _at(worth: Array, batches: int, anew: bool) -> float:
    """`worth[s]` is what a step s is worth in the weights now."""
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
    """Root mean square of the batches' noise in the weights, in clip norms; `groups`: steps of a round or an epoch."""
    if sampler == "poisson":
        found = (1 - rate) * independent_noise(workload, steps)
    elif sampler == "allocation":
        found = evened_noise(workload, steps, groups, anew=True)
    else:
        found = (1 - rate) * independent_noise(workload, steps)
        found += rate * evened_noise(workload, steps, groups, anew=False)
    return float(np.sqrt(max(found, 0.0) * batch / dimension))
