"""Releases: the privacy cost of one access to the records, as dp_accounting events and as dominating pairs.

A noise multiplier is, everywhere in sordino, the noise's standard deviation (Laplace: its scale) divided by the clip
norm, that is, by the largest norm that one record can contribute to the sum. Under add/remove one record moves the sum
by at most one clip norm, under replace-one by at most two: the accountant doubles the shift, the noise is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dp_accounting import dp_event
from scipy.stats import binom

from sordino import checks
from sordino.accounting.allocation import Epoch, epoch_from_below, epoch_pmfs
from sordino.accounting.group import MOST_ROWS, GroupPair
from sordino.accounting.lower import coarsen
from sordino.accounting.pairs import Pair, Pmf, discretise, mixture, upper_envelope
from sordino.errors import InputError, Refused

# dp_accounting is untyped; its events are frozen attrs classes
DpEvent = Any
Discretise = Callable[[float, float], tuple[Pmf, Pmf]]
_BINOMIAL = 1e-9  # bound on the relative error of binomial tails; added where it increases ε


@dataclass(frozen=True)
class AllocatedDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """An epoch in which each record is in one uniformly drawn batch of `batches`; the first `seen` are released.

    `event` is the release of one batch. dp_accounting has no such event.
    """

    batches: int
    seen: int
    event: DpEvent


@dataclass(frozen=True)
class GroupedDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """Rows are drawn by Poisson sampling and a user has at most `rows` of them; `event` releases their sum."""

    rows: int
    sampling_probability: float
    event: DpEvent


@dataclass(frozen=True)
class Release:
    """One noisy release in which each record takes part with probability `sampling_rate` (1: all records).

    `records` and `cap` describe truncated Poisson sampling, `records` and `batch` sampling without replacement. With
    `batches` it is an epoch of random allocation to that many batches, of which the first `seen` were released; then
    `sampling_rate` is seen / batches, the probability that a record takes part. With `group` a user has at most that
    many of the rows that Poisson sampling draws, and the unit of privacy is the user.
    """

    mechanism: str
    noise_multiplier: float
    sampling_rate: float = 1.0
    records: int | None = None
    cap: int | None = None
    batch: int | None = None
    batches: int | None = None
    seen: int | None = None
    group: int | None = None

    @property
    def whole(self) -> bool:
        """Whether every record takes part, in one release."""
        return self.sampling_rate == 1 and self.cap is None and self.batches is None and self.group is None

    def event(self) -> DpEvent:
        """The release as a dp_accounting event; noise is relative to the clip norm, as dp_accounting defines it."""
        base = _base_event(self.mechanism, self.noise_multiplier)
        if self.group is not None:
            return GroupedDpEvent(self.group, self.sampling_rate, base)
        if self.batches is not None:
            return AllocatedDpEvent(self.batches, _whole(self.seen), base)
        if self.cap is not None:
            return dp_event.TruncatedSubsampledGaussianDpEvent(
                self.records, self.sampling_rate, self.cap, self.noise_multiplier
            )
        if self.batch is not None:
            return dp_event.SampledWithoutReplacementDpEvent(self.records, self.batch, base)
        return base if self.sampling_rate == 1 else dp_event.PoissonSampledDpEvent(self.sampling_rate, base)

    def rdp_event(self, relation: str) -> DpEvent | None:
        """The event whose RDP in dp_accounting bounds this release under `relation`, or None."""
        if self.cap is not None or self.batches is not None or self.group is not None:
            return None
        sigma = self.noise_multiplier / (1 if relation == "add-remove" else 2)
        base = _base_event(self.mechanism, sigma)
        if self.batch is not None:
            if relation != "replace-one" or self.mechanism != "gaussian":
                return None
            return dp_event.SampledWithoutReplacementDpEvent(self.records, self.batch, base)
        if self.sampling_rate == 1:
            return base
        if relation != "add-remove" or self.mechanism != "gaussian":
            return None
        return dp_event.PoissonSampledDpEvent(self.sampling_rate, base)

    def pair(self, relation: str) -> Pair:
        """The dominating pair of this release under Poisson sampling (or none)."""
        return _pair(self.mechanism, self.noise_multiplier, self.sampling_rate, relation)

    def discretiser(self, relation: str, *, lattice: bool = True) -> Discretise:
        """A function (interval, tail) → PLDs in both directions; `lattice`: see `epoch_pmfs`."""
        if self.batch is not None:
            return self._without_replacement(relation)
        if self.batches is not None:
            epoch = self._epoch(relation)
            return lambda interval, tail: epoch_pmfs(epoch, interval, tail, lattice)
        if self.group is not None:
            users = self._group(relation)
            return users.from_above
        pair = self.pair(relation)
        if self.cap is None:
            return lambda interval, tail: discretise(pair, interval, tail)
        return self._truncated(pair, relation)

    def from_below(self, relation: str, *, lattice: bool = True) -> Callable[[float, float], Pmf] | None:
        """A function (interval, tail) → a PLD that the release attains or exceeds (P against Q), or None.

        `lattice`: see `epoch_pmfs`.
        """
        if self.cap is not None or self.batch is not None:
            return None
        if self.batches is not None:
            epoch = self._epoch(relation)
            return lambda interval, tail: epoch_from_below(epoch, interval, tail, lattice)
        if self.group is not None:
            users = self._group(relation)
            return lambda interval, tail: coarsen(users.attained(tail), interval, tail)
        pair = self.pair(relation)
        return lambda interval, tail: coarsen(pair, interval, tail)

    def _group(self, relation: str) -> GroupPair:
        if relation != "add-remove" or self.mechanism != "gaussian":
            raise Refused("rows of users are accounted for Gaussian noise under add-remove only")
        return GroupPair(self.noise_multiplier, self.sampling_rate, _whole(self.group))

    def _epoch(self, relation: str) -> Epoch:
        if relation != "add-remove" or self.mechanism != "gaussian":
            raise Refused("random allocation is accounted for Gaussian noise under add-remove only")
        return Epoch(self.noise_multiplier, _whole(self.batches), _whole(self.seen))

    def _without_replacement(self, relation: str) -> Discretise:
        """Zhu, Dong, Wang 2022, Thm 11 (subset sampling, replace-one; proof in docs/guarantees/samplers.md).

        Every two vectors of norm at most 1 differ by at most 2, so the hockey-stick curve is at most that of the
        "remove" pair with shift 2 where e^ε ≥ 1, and at most that of its mirror image where e^ε < 1. The two join
        convexly, so one PLD has the losses above 0 of the first and those below 0 of the second.
        """
        if relation != "replace-one" or self.mechanism != "gaussian":
            raise Refused("sampling without replacement is accounted for Gaussian noise under replace-one only")
        pair = Pair("gaussian", self.noise_multiplier / 2, self.sampling_rate)

        def build(interval: float, tail: float) -> tuple[Pmf, Pmf]:
            joined = upper_envelope(*discretise(pair, interval, tail))
            return joined, joined

        return build

    def _truncated(self, pair: Pair, relation: str) -> Discretise:
        """Truncated Poisson sampling: a mixture of "within the cap" and "over the cap" (docs/guarantees/samplers.md).

        Let n be the size of the larger dataset and N ~ Bin(n−1, q) the number of *other* records drawn. If N < cap the
        release is plain Poisson. If N ≥ cap, the record is in the batch with probability p, and then it replaces
        another, so it moves the sum by at most 2. Given N ≥ cap the others in the batch are a uniform subset of size
        cap for every N, so p may be averaged over N; and N ≥ cap may be revealed to the adversary.

        n is known only within bounds. P[N ≥ cap] grows with n while p falls, and no n is worst for every ε. So p is
        taken for the fewest records, and the uncertainty of P[N ≥ cap] is counted as both cases at once: rate q,
        shift 2.
        """
        few, many = self._sizes(relation)
        if many - 1 < _whole(self.cap):
            return lambda interval, tail: discretise(pair, interval, tail)
        rarely, rate = self._over(few)
        often = max(self._over(many)[0] * (1 + _BINOMIAL), 1e-300)
        rarely, often = rarely * (1 - _BINOMIAL), min(often, 1.0)
        shifted = [_pair(self.mechanism, self.noise_multiplier / 2, r, relation) for r in (rate, self.sampling_rate)]
        weights = (1 - often, rarely, often - rarely)

        def build(interval: float, tail: float) -> tuple[Pmf, Pmf]:
            parts = [(weight, one) for weight, one in zip(weights, (pair, *shifted), strict=True) if weight > 0]
            found = [(weight, discretise(one, interval, tail)) for weight, one in parts]
            return mixture([(w, f) for w, (f, _) in found]), mixture([(w, b) for w, (_, b) in found])

        return build

    def _sizes(self, relation: str) -> tuple[int, int]:
        """The smallest and the largest possible size of the larger of two neighbouring datasets."""
        records = _whole(self.records)
        if relation == "replace-one":  # the number is public and exact
            return records, records
        return checks.fewest_records(records), records + 1

    def _over(self, size: int) -> tuple[float, float]:
        """(P[N ≥ cap], an upper bound on the probability p that the record is in the batch given N ≥ cap).

        p = q·E[cap/(N+1) | N ≥ cap] ≤ q·cap/(cap+1); the latter is used if the probabilities are too small to divide.
        """
        cap, q = _whole(self.cap), self.sampling_rate
        most = q * cap / (cap + 1)
        over = float(binom.sf(cap - 1, size - 1, q))
        if over < 1e-200:
            return 0.0, most
        joint = float(binom.sf(cap, size, q)) * cap / size
        return over, min(joint / over * (1 + _BINOMIAL), most)


def allocated(noise_multiplier: float, batches: int, seen: int) -> Release:
    """An epoch of random allocation with Gaussian noise; with one batch there is no sampling."""
    checks.count("batches", batches)
    if not 1 <= checks.count("seen", seen) <= batches:
        raise InputError(f"seen must lie between 1 and the number of batches ({batches}), got {seen}")
    if batches == 1:
        return Release("gaussian", noise_multiplier)
    return Release("gaussian", noise_multiplier, seen / batches, batches=batches, seen=seen)


def grouped(noise_multiplier: float, sampling_rate: float, rows: int) -> Release:
    """A step that draws rows by Poisson sampling, where a user has at most `rows` rows."""
    if checks.count("examples_per_user", rows) > MOST_ROWS:
        raise InputError(f"examples_per_user = {rows}: at most {MOST_ROWS} are supported; sample users instead")
    checks.probability("sampling_rate", sampling_rate, allow_one=True)
    if rows == 1:
        return Release("gaussian", noise_multiplier, sampling_rate)
    if sampling_rate == 1:
        return Release("gaussian", noise_multiplier / rows)
    return Release("gaussian", noise_multiplier, sampling_rate, group=rows)


def compose_events(releases: Sequence[tuple[Release, int]]) -> DpEvent:
    """All releases as one dp_accounting event."""
    events = [
        release.event() if count == 1 else dp_event.SelfComposedDpEvent(release.event(), count)
        for release, count in releases
    ]
    return events[0] if len(events) == 1 else dp_event.ComposedDpEvent(events)


def flatten(event: DpEvent, count: int = 1) -> list[tuple[Release, int]]:
    """The releases of a dp_accounting event.

    Raises:
        InputError: sordino has no accountant for the event.
    """
    if isinstance(event, dp_event.NoOpDpEvent):
        return []
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return flatten(event.event, count * event.count)
    if isinstance(event, dp_event.ComposedDpEvent):
        return [pair for inner in event.events for pair in flatten(inner, count)]
    return [(_leaf(event), count)]


def _leaf(event: DpEvent) -> Release:
    if isinstance(event, dp_event.GaussianDpEvent):
        return Release("gaussian", event.noise_multiplier)
    if isinstance(event, dp_event.LaplaceDpEvent):
        return Release("laplace", event.noise_multiplier)
    if isinstance(event, GroupedDpEvent):
        inner = _leaf(event.event)
        if inner.whole and inner.mechanism == "gaussian":
            return grouped(inner.noise_multiplier, event.sampling_probability, event.rows)
    if isinstance(event, AllocatedDpEvent):
        inner = _leaf(event.event)
        if inner.whole and inner.mechanism == "gaussian":
            return allocated(inner.noise_multiplier, event.batches, event.seen)
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        return Release(
            "gaussian",
            event.noise_multiplier,
            event.sampling_probability,
            records=event.dataset_size,
            cap=event.truncated_batch_size,
        )
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        inner = _leaf(event.event)
        if inner.sampling_rate == 1 and inner.batch is None:
            return Release(inner.mechanism, inner.noise_multiplier, event.sampling_probability)
    if isinstance(event, dp_event.SampledWithoutReplacementDpEvent):
        inner = _leaf(event.event)
        if inner.sampling_rate == 1 and inner.batch is None and inner.mechanism == "gaussian":
            rate = event.sample_size / event.source_dataset_size
            return Release(
                "gaussian",
                inner.noise_multiplier,
                rate,
                records=event.source_dataset_size,
                batch=event.sample_size,
            )
    raise InputError(f"sordino has no accountant for the event {event!r}")


def _whole(value: int | None) -> int:
    if value is None:
        raise InputError("a release lacks a number that its accounting needs (records and cap, or seen)")
    return value


def _base_event(mechanism: str, noise_multiplier: float) -> DpEvent:
    if mechanism == "gaussian":
        return dp_event.GaussianDpEvent(noise_multiplier)
    return dp_event.LaplaceDpEvent(noise_multiplier)


def _pair(mechanism: str, noise_multiplier: float, rate: float, relation: str) -> Pair:
    """The dominating pair of Poisson sampling at `rate`, in units of the clip norm."""
    noise: Any = mechanism
    if relation == "add-remove":
        return Pair(noise, noise_multiplier, rate)
    if rate == 1:  # replacing a record moves the sum by two clip norms
        return Pair(noise, noise_multiplier / 2, 1.0)
    if mechanism == "laplace":
        raise Refused("Poisson-sampled Laplace noise has no accountant under replace-one; use relation='add-remove'")
    return Pair("gaussian", noise_multiplier, rate, "replace")
