"""Tests whether the sampler follows the distribution that the accountant assumes, on many batches drawn with secret
keys.

With X the (steps, records) table of which record is in which batch, each test detects another kind of fault:

| test       | statistic                                       | detects                                        |
|------------|-------------------------------------------------|------------------------------------------------|
| records    | each record's number of batches                 | a record that is always, or never, drawn       |
| sizes      | variance and mean of the batch sizes            | fixed-size batches called Poisson, other rates |
| together   | how often two records are drawn together        | records that are drawn as a group              |
| successive | how often a record is in two successive batches | batches that are drawn once and used twice     |

Partitions and fixed sizes are checked exactly (each record once per epoch; equal sizes). p-values are
corrected for the number of tests; the false alarm probability is at most `LEVEL`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from sordino.audit.noise_check import LEVEL
from sordino.plan.core import Plan
from sordino.randomness import RandomSource
from sordino.sampling import Allocation, Cyclic, Partition, Poisson, TruncatedPoisson, WithoutReplacement, batches

Table = npt.NDArray[np.bool_]
STEPS, RECORDS = 600, 1500


def sampling_findings(plan: Plan, steps: int = STEPS, seed: int | None = None) -> tuple[dict[str, float], list[str]]:
    """(p-values by test, what contradicts the plan's sampling). `seed` makes it repeatable."""
    sampling, records = plan.sampling, min(plan.records, RECORDS)
    if isinstance(sampling, Partition | WithoutReplacement):
        batch = max(1, min(sampling.batch, records // 3) if sampling.batch < plan.records else records)
        sampling = type(sampling)(batch)
    if isinstance(sampling, Partition):
        return {}, _partition(sampling, records, seed)
    source = RandomSource.from_os() if seed is None else RandomSource.seeded(seed)
    if isinstance(sampling, Cyclic):
        return _cyclic(sampling, records, source)
    if isinstance(sampling, Allocation):
        return _allocation(sampling, records, steps, source)
    table = np.zeros((steps, records), dtype=np.bool_)
    for batch_drawn in batches(sampling, records=records, steps=steps, source=source, chunk=records):
        table[batch_drawn.step, batch_drawn.indices.numpy()] = True
    if isinstance(sampling, WithoutReplacement):
        wrong = [] if (table.sum(1) == sampling.batch).all() else [f"batches are not all of {sampling.batch} records"]
        found = _tests(table, sampling.batch / records, None)
    elif isinstance(sampling, TruncatedPoisson):
        wrong = [] if table.sum(1).max() <= sampling.cap else [f"a batch exceeds the cap {sampling.cap}"]
        rate = sampling.sampling_rate
        found = _tests(table, float(table.mean()), None if rate * records > sampling.cap / 2 else rate)
    elif type(sampling).name == Poisson.name:
        wrong, found = [], _tests(table, plan.sampling_rate, plan.sampling_rate)
    else:  # a sampler without its own test: all records must be drawn equally often
        wrong, found = [], _tests(table, float(table.mean()), None)
    corrected = {name: min(1.0, p * len(found)) for name, p in found.items()}
    wrong += [f"the test of {name} fails (p = {p:.2g})" for name, p in corrected.items() if p < LEVEL]
    return corrected, wrong


def _allocation(
    sampling: Allocation, records: int, epochs: int, source: RandomSource
) -> tuple[dict[str, float], list[str]]:
    """Each record once in every epoch; the first batches of the epochs are Poisson samples at the rate 1/batches."""
    epochs = max(20, min(epochs, 4000 // sampling.batches))
    table = np.zeros((epochs, records), dtype=np.bool_)
    times = np.zeros((epochs, records), dtype=np.int64)
    drawn = batches(sampling, records=records, steps=epochs * sampling.batches, source=source, chunk=records)
    for batch in drawn:
        epoch, place = divmod(batch.step, sampling.batches)
        times[epoch, batch.indices.numpy()] += 1
        if place == 0:
            table[epoch, batch.indices.numpy()] = True
    found = _tests(table, 1.0 / sampling.batches, 1.0 / sampling.batches)
    corrected = {name: min(1.0, p * len(found)) for name, p in found.items()}
    wrong = [] if (times == 1).all() else ["a record is not in exactly one batch of an epoch"]
    return corrected, wrong + [f"the test of {name} fails (p = {p:.2g})" for name, p in corrected.items() if p < LEVEL]


def _cyclic(sampling: Cyclic, records: int, source: RandomSource) -> tuple[dict[str, float], list[str]]:
    """Each record participates in the steps of one group only; within it, Poisson samples; groups have binomial
    sizes."""
    rounds = max(2, min(STEPS, 4000 // sampling.batches))
    group = np.full(records, -1)
    table = np.zeros((rounds, records), dtype=np.bool_)
    steps = rounds * sampling.batches
    for batch in batches(sampling, records=records, steps=steps, source=source, chunk=records):
        turn, place = divmod(batch.step, sampling.batches)
        drawn = batch.indices.numpy()
        if ((group[drawn] >= 0) & (group[drawn] != place)).any():
            return {}, ["a record participates in the steps of two groups"]
        group[drawn] = place
        table[turn, drawn] = True
    if sampling.sampling_rate == 1 and not table.all():
        return {}, ["a record is missing in a step of its group"]
    found = {} if sampling.sampling_rate == 1 else _tests(table, sampling.sampling_rate, sampling.sampling_rate)
    sizes = np.bincount(group[group >= 0], minlength=sampling.batches)
    expected = int(sizes.sum()) / sampling.batches
    if sampling.batches > 1 and expected >= 5:  # Pearson's χ², two-sided: neither too equal nor too different
        law, square = stats.chi2(sampling.batches - 1), float(((sizes - expected) ** 2).sum() / expected)
        found["groups"] = 2 * min(float(law.cdf(square)), float(law.sf(square)))
    corrected = {name: min(1.0, p * len(found)) for name, p in found.items()}
    return corrected, [f"the test of {name} fails (p = {p:.2g})" for name, p in corrected.items() if p < LEVEL]


def _tests(table: Table, rate: float, independent: float | None) -> dict[str, float]:
    """`rate`: that of each record; `independent`: the rate of a Poisson sampler, whose sizes are binomial."""
    steps, records = table.shape
    if rate >= 1.0:
        return {"records": 1.0 if table.all() else 0.0}
    counts = table.sum(0)
    low, high = stats.binom.cdf(counts, steps, rate), stats.binom.sf(counts - 1, steps, rate)
    found = {"records": min(1.0, 2 * records * float(np.minimum(low, high).min()))}
    if independent is not None:
        sizes, spread = table.sum(1), records * rate * (1 - rate)
        square = float(np.sum((sizes - records * rate) ** 2) / spread)
        total = 2 * min(
            stats.binom.cdf(sizes.sum(), steps * records, rate), stats.binom.sf(sizes.sum() - 1, steps * records, rate)
        )
        # for small means the squares of the sizes are wider than for a normal: their variance is 2 + (1 −
        # 6q(1−q))/(nq(1−q))
        excess = 2.0 + (1.0 - 6.0 * rate * (1.0 - rate)) / spread
        z = (square - steps) / math.sqrt(steps * excess)
        # the upper tail is that of a gamma variable; a fixed size gives square ≈ 0, many deviations below
        found["sizes"] = min(
            1.0, 2 * min(float(total), 2 * float(special.ndtr(-abs(z) / (1 + max(0.0, z) / math.sqrt(steps)))))
        )
    some = table[:, :: max(1, records // 300)].astype(np.float64)
    centred = some - rate
    products = centred.T @ centred
    np.fill_diagonal(products, 0.0)
    found["together"] = _extreme(products[np.triu_indices_from(products, 1)], steps, rate)
    shifted = np.sum((table[1:] - rate) * (table[:-1] - rate), axis=0)
    found["successive"] = min(
        _extreme(shifted, steps - 1, rate), _extreme(np.array([shifted.sum()]), (steps - 1) * records, rate)
    )
    return found


def _extreme(sums: npt.NDArray[np.float64], terms: int, rate: float) -> float:
    """Two-sided p-value of the most extreme of sums of products of centred draws (Bernstein), by the union bound."""
    variance = terms * (rate * (1 - rate)) ** 2
    largest = float(np.abs(sums).max())
    bernstein = math.exp(-(largest**2) / 2 / (variance + max(rate, 1 - rate) ** 2 * largest / 3))
    return min(1.0, 2 * len(sums) * bernstein)


def _partition(sampling: Partition, records: int, seed: int | None) -> list[str]:
    """Two epochs under each of many keys: disjoint batches, the same in both epochs; each record in a uniform
    position."""
    keys, count = 200, records // sampling.batch
    firsts = np.zeros(records)
    for key in range(keys):
        source = RandomSource.from_os() if seed is None else RandomSource.seeded(seed + key)
        drawn = [
            b.indices.numpy() for b in batches(sampling, records=records, steps=2 * count, source=source, chunk=records)
        ]
        epoch = np.concatenate(drawn[:count])
        if len(np.unique(epoch)) != len(epoch) or any(len(batch) != sampling.batch for batch in drawn):
            return ["a record is in two batches of an epoch, or a batch does not have the claimed size"]
        if any((a != b).any() for a, b in zip(drawn[:count], drawn[count:], strict=True)):
            return ["the second epoch's batches are not those of the first"]
        firsts[drawn[0]] += 1
    tail = stats.binom.sf(firsts - 1, keys, sampling.batch / records)
    low = stats.binom.cdf(firsts, keys, sampling.batch / records)
    p = 2 * records * float(np.minimum(tail, low).min()) if count > 1 else 1.0
    return [f"a record's position in the shuffle is not uniform (p = {p:.2g})"] if p < LEVEL else []
