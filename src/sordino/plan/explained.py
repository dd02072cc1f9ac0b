"""Compares every release with the plan: a release that the plan does not declare is refused.

ε is computed from the plan. It is at least the ε of the ledger if every entry of the ledger is one of the plan's
releases: a step of the plan, with its sampling and at least its noise (all steps of a partition under one key, hence
one shuffle); or one of the `count` releases of a declared statistic, with at most its sampling rate and at least its
noise. `Explained` checks each entry before the value is returned (`Ledger.guard`), so no result can state an ε below
that of its ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sordino.errors import Refused
from sordino.plan.core import Plan, Statistic
from sordino.randomness import RandomSource
from sordino.release import described_earlier
from sordino.sampling import Partition, cycle

_SLACK = 1e-12  # relative tolerance for noise multipliers after JSON or a multiplication


class Explained:
    """Called with each release in turn; Refused if the plan does not declare it."""

    def __init__(self, plan: Plan, entries: Iterable[Mapping[str, Any]]) -> None:
        self._plan = plan
        # the noisiest first, so that each release is counted against the declaration with the most noise that covers it
        self._declared = sorted(plan.statistics, key=lambda s: -s.noise_multiplier)
        self._left = [statistic.count for statistic in self._declared]
        self._steps: set[int] = set()
        self._shuffle: str | None = None  # the fingerprint of the source that shuffled the partition
        self._epochs: dict[int, str] = {}  # the same for each epoch of random allocation, or round through the groups
        self._since: dict[int, tuple[int, str]] = {}  # step → (first step of the uninterrupted run of its key, the key)
        for entry in entries:
            self(entry)

    def __call__(self, entry: Mapping[str, Any]) -> None:
        purpose = entry.get("purpose")
        why = self._step(entry) if purpose == self._plan.method.purpose else self._statistic(entry)
        if why is not None:
            raise Refused(
                f"the plan does not declare the release {purpose!r}, step {entry.get('step')} ({entry.get('mechanism')}"
                f" noise, multiplier {entry.get('noise_multiplier')}, sampling {entry.get('sampling')}): {why}. The "
                "plan's ε would be below the ledger's; declare all releases when the plan is made (statistics=[…])"
            )

    def require_source(self, source: RandomSource) -> None:
        """Refuses another key than that of a partition's earlier steps: a record could take part twice per epoch."""
        if self._shuffle not in (None, source.fingerprint):
            raise Refused(
                f"the ledger holds steps of a partition that was shuffled under another key (source {self._shuffle}): "
                "that key and its shuffle are lost, and under a new key a record could take part twice in an epoch, "
                "which ε does not count. Start again, give the same source, or use poisson sampling"
            )

    def require_start(self, start: int, source: RandomSource) -> None:
        """Refuses to start within an epoch (or round) whose earlier batches were drawn under another key.

        A record could then take part twice in the epoch, or not at all, while ε counts it once.
        """
        batches = cycle(self._plan.sampling)
        if batches == 1 or start >= self._plan.steps:  # nothing more is drawn
            return
        epoch, batch = divmod(start, batches)
        known = self._epochs.get(epoch)
        before = range(epoch * batches, start)
        if known not in (None, source.fingerprint) or not self._steps.issuperset(before):
            following = min((epoch + bool(batch)) * batches, self._plan.steps)
            raise Refused(
                f"step {start} is batch {batch} of epoch {epoch} of {self._plan.sampling.name} sampling, and the "
                "batches before it were not all released under the same key: a record could take part twice in this "
                f"epoch, or not at all; start with step {following}, "
                + ("the first of an epoch" if following < self._plan.steps else "the end of the plan")
            )

    def noise_since(self, start: int, source: RandomSource) -> int:
        """The first step whose noise a run from `start` on may add again: all steps from there on have this key."""
        since, key = self._since.get(start - 1, (start, ""))
        return since if key == source.fingerprint else start

    def _step(self, entry: Mapping[str, Any]) -> str | None:
        plan, step = self._plan, entry.get("step")
        if not isinstance(step, int) or not 0 <= step < plan.steps or step in self._steps:
            return f"the plan has {plan.steps} steps, each of which is released once"
        self._steps.add(step)
        stated = json.loads(json.dumps(plan.sampled(step)))
        if entry.get("sampling") != stated or entry.get("relation") != plan.relation:
            return f"its steps use {stated} under {plan.relation}"
        if isinstance(plan.sampling, Partition):
            self._shuffle = self._shuffle or str(entry.get("source"))
            if self._shuffle != str(entry.get("source")):
                return f"the earlier steps of this partition were shuffled under another key, {self._shuffle}"
        key = str(entry.get("source"))
        if (batches := cycle(plan.sampling)) > 1:
            drawn = self._epochs.setdefault(step // batches, key)
            if drawn != key:
                return f"the earlier batches of this epoch were drawn under another key, {drawn}"
        noise = plan.noise_at(step)
        since, before = self._since.get(step - 1, (step, ""))
        since = since if before == key else step
        self._since[step] = since, key
        earlier = plan.method.earlier_noise(plan, step, since)
        if entry.get("earlier") != (None if earlier is None else described_earlier(earlier, step)):
            return "its noise is a different mixture of the noise of earlier steps"
        if earlier is not None and entry.get("noise_multiplier") != noise.noise_multiplier:
            return f"noise that is added again must have the plan's multiplier {noise.noise_multiplier:g} in every step"
        if not _as_noisy(entry, noise.name, noise.noise_multiplier):
            return f"this step has {noise.name} noise with multiplier {noise.noise_multiplier:g}"
        return None

    def _statistic(self, entry: Mapping[str, Any]) -> str | None:
        known = [s for s in self._declared if s.purpose == entry.get("purpose")]
        for index, statistic in enumerate(self._declared):
            if self._left[index] and statistic in known and self._pays(statistic, entry):
                self._left[index] -= 1
                return None
        return f"it declares {', '.join(map(str, known))}" if known else "it declares no such statistic"

    def _pays(self, statistic: Statistic, entry: Mapping[str, Any]) -> bool:
        sampling = entry.get("sampling")
        if not isinstance(sampling, Mapping) or entry.get("relation") != self._plan.relation:
            return False
        rate = {"all": 1.0, "poisson": sampling.get("sampling_rate")}.get(str(sampling.get("name")))
        drawn = isinstance(rate, int | float) and rate <= statistic.sampling_rate
        return drawn and _as_noisy(entry, statistic.mechanism, statistic.noise_multiplier)


def missing_step(plan: Plan, steps: Sequence[int], made: int | None = None) -> int | None:
    """The first step that is missing or out of order, or None.

    With random allocation, and with groups that take turns, a resumed run leaves out the rest of the epoch whose key
    was lost. `made`: the expected number of steps; None: as many as there are.
    """

    def next_epoch(step: int) -> int:
        batches = cycle(plan.sampling)
        return -(-step // batches) * batches

    expected = 0
    for step in steps:
        if step not in (expected, next_epoch(expected)):
            return expected
        expected = step + 1
    return None if made is None or made in (expected, min(next_epoch(expected), plan.steps)) else expected


def _as_noisy(entry: Mapping[str, Any], mechanism: str, noise_multiplier: float) -> bool:
    found = entry.get("noise_multiplier")
    enough = isinstance(found, int | float) and found >= noise_multiplier * (1 - _SLACK)
    return enough and entry.get("mechanism") == mechanism
