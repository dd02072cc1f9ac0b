"""ε during a run: of the entries of a ledger, and of a growing number of steps."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sordino import checks
from sordino.accounting.account import Account, account
from sordino.accounting.events import Release, allocated, compose_events
from sordino.accounting.schemes import check_scheme, step_release
from sordino.errors import InputError

_POINTS = 48  # points of a curve that are computed; the others use the next one's ε, which is an upper bound


def composed_entries(plan: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], delta: float) -> dict[str, Any]:
    """ε at δ of the releases that a ledger records, composed from its entries.

    The plan (as its to_dict()) provides only what an entry does not contain: the public number of records. The entries'
    mechanism, noise multiplier (noise over sensitivity), sampling and relation are taken as they are. An empty ledger
    has ε = 0. Keys: epsilon, delta, relation, accountant, epsilon_rdp, releases.
    """
    delta = checks.delta_value(delta)
    accountant = plan.get("accountant", "pld")
    lines = [entry for entry in entries if entry.get("kind", "release") == "release"]
    releases, relation = entry_releases(plan, lines)
    if not releases:
        return {"epsilon": 0.0, "delta": delta, "relation": relation, "accountant": accountant, "epsilon_rdp": 0.0} | {
            "releases": 0
        }
    found = _accounted(tuple(releases), delta, relation, accountant)
    return {
        "epsilon": found.epsilon,
        "delta": delta,
        "relation": relation,
        "accountant": found.accountant,
        "epsilon_rdp": found.epsilon_rdp,
        "releases": len(lines),
    }


@functools.lru_cache(maxsize=32)  # the same ledger is accounted for the result, for the report and by `sordino verify`
def _accounted(releases: tuple[tuple[Release, int], ...], delta: float, relation: str, accountant: str) -> Account:
    return account(compose_events(list(releases)), delta, relation, accountant)


def entry_releases(
    plan: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[Release, int]], str]:
    """(releases with their counts, relation) of the entries of a ledger, for a method whose releases compose.

    Raises:
        InputError: an entry is wrong, or the entries mix relations.
    """
    records = checks.count("records", plan.get("records"))
    relations = {checks.choice("relation", entry.get("relation"), checks.RELATIONS) for entry in lines}
    if len(relations) > 1:
        raise InputError("the ledger mixes the relations add-remove and replace-one; they have no common ε")
    relation = relations.pop() if relations else plan.get("relation", "add-remove")
    return _group(lines, records, relation), relation


def _group(lines: Sequence[Mapping[str, Any]], records: int, relation: str) -> list[tuple[Release, int]]:
    """Equal releases counted together; the batches of a partition, or of an epoch of random allocation, count once
    per epoch."""
    total: Counter[Release] = Counter()
    epochs = AllocatedEpochs()
    rounds: Counter[tuple[Release, str, int, str, int]] = Counter()  # steps per round, key, place in the round
    for entry in lines:
        sampling = entry.get("sampling")
        if not isinstance(sampling, Mapping):
            raise InputError(f"a ledger entry has no sampling: {dict(entry)!r}")
        if entry.get("earlier") is not None:
            raise InputError("a step that adds earlier noise has no separate cost: its method accounts for all steps")
        name = "poisson" if sampling.get("name") == "all" else str(sampling.get("name"))
        mechanism = str(entry.get("mechanism"))
        check_scheme(name, mechanism, relation)
        if name == "allocation":
            epochs.add(entry, _multiplier(entry))
            continue
        release = step_release(dict(sampling) | {"name": name}, mechanism, _multiplier(entry), records)
        if name in ("partition", "cyclic"):
            per_epoch = int(sampling["batches"]) if name == "cyclic" else records // int(sampling["batch"])
            step = checks.count("step", entry.get("step"), minimum=0)
            # under another key groups are drawn again; a partition is refused there
            key = str(entry.get("source")) if name == "cyclic" else ""
            rounds[release, str(entry.get("purpose")), per_epoch, key, step % per_epoch] += 1
        else:
            total[release] += 1
    worst: dict[tuple[Release, str, int, str], int] = {}
    for (*kind, _), times in rounds.items():
        worst[tuple(kind)] = max(worst.get(tuple(kind), 0), times)  # type: ignore[index,arg-type]
    for (release, _, _, _), times in worst.items():
        total[release] += times
    total.update(epochs.releases())
    return list(total.items())


class AllocatedEpochs:
    """The entries of random allocation by epoch. An epoch under two keys was drawn twice: two independent releases."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int, str], tuple[set[int], float]] = {}

    def add(self, entry: Mapping[str, Any], noise_multiplier: float) -> None:
        """Counts an entry.

        Raises:
            InputError: its batch does not belong to its epoch, or was recorded before.
        """
        sampling = entry["sampling"]
        batches = checks.count("batches", sampling.get("batches"))
        epoch = checks.count("epoch", sampling.get("epoch"), minimum=0)
        batch = checks.count("batch", sampling.get("batch"), minimum=0)
        step = checks.count("step", entry.get("step"), minimum=0)
        if divmod(step, batches) != (epoch, batch):
            raise InputError(f"step {step} of {batches} batches per epoch is not batch {batch} of epoch {epoch}")
        key = str(entry.get("purpose")), batches, epoch, str(entry.get("source"))
        seen, least = self._seen.setdefault(key, (set(), noise_multiplier))
        if batch in seen:
            raise InputError(f"batch {batch} of epoch {epoch} was released twice; its ε can't be computed")
        seen.add(batch)
        self._seen[key] = seen, min(least, noise_multiplier)

    def releases(self) -> Counter[Release]:
        """The releases of the epochs, each with the smallest noise among its entries."""
        return Counter(allocated(least, batches, len(seen)) for (_, batches, _, _), (seen, least) in self._seen.items())


def _multiplier(entry: Mapping[str, Any]) -> float:
    return checks.noise_multiplier_value(entry.get("noise_multiplier"))


def growing_curve(epsilon: Callable[[int, bool], float], steps: Sequence[int]) -> list[float]:
    """ε after each of these numbers of steps, for a mechanism whose ε does not decrease with them.

    `epsilon(t, last)` is called for up to 48 of them; the others use the ε of the next one, which is an upper bound.
    """
    wanted = sorted(set(steps))
    stride = -(-len(wanted) // _POINTS)
    knots = sorted({*wanted[::-1][::stride]})
    values = {t: epsilon(t, t == knots[-1]) for t in knots}
    for smaller, larger in zip(knots[-2::-1], knots[:0:-1], strict=True):
        values[smaller] = min(values[smaller], values[larger])
    bound = {t: values[next(k for k in knots if k >= t)] for t in wanted}
    return [bound[t] for t in steps]
