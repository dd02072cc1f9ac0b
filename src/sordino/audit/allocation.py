"""Tests random allocation: does the sampler draw from the distribution that the accountant assumes?

Under the claim the batches of different records and epochs are independent and uniform. Three faults violate it
although each batch looks correct: the same order in every epoch, batches of fixed sizes (shuffle and cut), and a record
that is left out or drawn twice. The last one is found with certainty; for the others the test gives a p-value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.stats import binomtest, chi2

from sordino.checks import count
from sordino.errors import InputError
from sordino.sampling import LogicalBatch


@dataclass(frozen=True)
class AllocationCheck:
    """What the batches of some epochs showed."""

    once: bool  # whether every record was in exactly one batch of every epoch
    repeated_p_value: float  # of the hypothesis that records return to the same batch no more often than by chance
    sizes_p_value: float  # of the hypothesis that batch sizes vary as binomial ones do

    def holds(self, level: float = 1e-6) -> bool:
        """False if random allocation is rejected at this level."""
        return self.once and min(self.repeated_p_value, self.sizes_p_value) >= level / 2


def check_allocation(drawn: Iterable[LogicalBatch], *, batches: int, records: int) -> AllocationCheck:
    """Tests the logical batches of two or more whole epochs of random allocation.

    Args:
        drawn: the batches of steps 0, 1, …; an incomplete last epoch is ignored.
        batches: the number per epoch, as in the plan.
        records: the number of records.

    Returns:
        The check; `holds()` is False for a fixed order, for shuffle and cut, and for records that are left out.
    """
    count("batches", batches, minimum=2)
    places, once = [], True
    epoch: list[LogicalBatch] = []
    for batch in drawn:
        epoch.append(batch)
        if len(epoch) == batches:
            place = np.full(records, -1)
            for number, one in enumerate(epoch):
                once = once and not bool((place[one.indices.numpy()] >= 0).any())
                place[one.indices.numpy()] = number
            once = once and bool((place >= 0).all())
            places.append(place)
            epoch = []
    if len(places) < 2:
        raise InputError("at least two complete epochs are needed to test whether they are drawn independently")
    same = sum(int((a == b).sum()) for a, b in pairwise(places))
    pairs = (len(places) - 1) * records
    repeated = float(binomtest(same, pairs, 1 / batches).pvalue)
    # Σ (size − n/t)²/(n/t) over the batches of an epoch is nearly χ² with t − 1 degrees of freedom (Pearson)
    expected = records / batches
    statistic = (
        sum(float(((np.bincount(p[p >= 0], minlength=batches) - expected) ** 2).sum()) for p in places) / expected
    )
    law = chi2(len(places) * (batches - 1))
    sizes = 2 * min(float(law.cdf(statistic)), float(law.sf(statistic)))
    return AllocationCheck(once, repeated, min(1.0, sizes) if math.isfinite(sizes) else 0.0)
