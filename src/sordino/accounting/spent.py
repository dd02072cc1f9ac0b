"""ε along a run: of what the entries of a ledger record, and of a growing number of steps."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sordino import checks
from sordino.accounting.account import Account, account
from sordino.accounting.events import Release, compose_events
from sordino.accounting.schemes import check_scheme, step_release
from sordino.errors import InputError

_POINTS = 48  # points of a curve that are computed; those between take the next one's ε, which bounds theirs


def composed_entries(plan: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], delta: float) -> dict[str, Any]:
    """ε at δ of the releases that a ledger records, composed from its entries alone.

    The plan (as its to_dict()) only gives what an entry cannot know: the public number of records. The entries
    are believed: their mechanism, noise multiplier (noise over sensitivity), sampling and relation. An empty ledger
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


@functools.lru_cache(maxsize=32)  # the same ledger is read for the result, for the report and by `sordino verify`
def _accounted(releases: tuple[tuple[Release, int], ...], delta: float, relation: str, accountant: str) -> Account:
    return account(compose_events(list(releases)), delta, relation, accountant)


def entry_releases(
    plan: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[Release, int]], str]:
    """(releases and their counts, relation) of the entries of a ledger, for a method whose releases compose.

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
    """Equal releases counted together; batches of one partition count once per epoch."""
    total: Counter[Release] = Counter()
    partitioned: Counter[tuple[Release, str, int, int]] = Counter()
    for entry in lines:
        sampling = entry.get("sampling")
        if not isinstance(sampling, Mapping):
            raise InputError(f"a ledger entry has no sampling: {dict(entry)!r}")
        name = "poisson" if sampling.get("name") == "all" else str(sampling.get("name"))
        mechanism = str(entry.get("mechanism"))
        check_scheme(name, mechanism, relation)
        release = step_release(dict(sampling) | {"name": name}, mechanism, _multiplier(entry), records)
        if name == "partition":
            batch = int(sampling["batch"])
            per_epoch = records // batch
            step = checks.count("step", entry.get("step"), minimum=0)
            partitioned[release, str(entry.get("purpose")), batch, step % per_epoch] += 1
        else:
            total[release] += 1
    worst: dict[tuple[Release, str, int], int] = {}
    for (release, purpose, batch, _), times in partitioned.items():
        worst[release, purpose, batch] = max(worst.get((release, purpose, batch), 0), times)
    for (release, _, _), times in worst.items():
        total[release] += times
    return list(total.items())


def _multiplier(entry: Mapping[str, Any]) -> float:
    return checks.noise_multiplier_value(entry.get("noise_multiplier"))


def growing_curve(epsilon: Callable[[int, bool], float], steps: Sequence[int]) -> list[float]:
    """ε after each of these numbers of steps, for a mechanism whose ε can only grow with them.

    `epsilon(t, last)` is called for up to 48 of them; the others take the ε of the next one, which bounds theirs.
    """
    wanted = sorted(set(steps))
    stride = -(-len(wanted) // _POINTS)
    knots = sorted({*wanted[::-1][::stride]})
    values = {t: epsilon(t, t == knots[-1]) for t in knots}
    for smaller, larger in zip(knots[-2::-1], knots[:0:-1], strict=True):
        values[smaller] = min(values[smaller], values[larger])
    bound = {t: values[next(k for k in knots if k >= t)] for t in wanted}
    return [bound[t] for t in steps]
