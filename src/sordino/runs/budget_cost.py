"""The joint cost of several runs: the releases of each, and how a budget's limit composes them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sordino import checks
from sordino.accounting.account import checked_releases, composed_epsilon
from sordino.accounting.adaptive import divergence, filter_order, filtered_epsilon, pure_divergence
from sordino.accounting.events import Release
from sordino.accounting.spent import entry_releases
from sordino.errors import InputError
from sordino.plan.core import Plan
from sordino.plan.method import Method
from sordino.plan.spent import from_ledger
from sordino.registry import method_class
from sordino.release.ledger import read_ledger


@dataclass(frozen=True)
class Cost:
    """What a run releases: mechanisms that compose, or one (ε, δ) if its method does not compose."""

    releases: tuple[tuple[Release, int], ...] = ()
    epsilon: float = 0.0
    delta: float = 0.0

    @classmethod
    def of_plan(cls, plan: Plan) -> Cost:
        """The cost of everything that the plan allows."""
        if plan.method.composes:
            return cls(tuple(checked_releases(plan.releases())))
        found = plan.guarantee()
        return cls((), found.epsilon, found.delta)

    @classmethod
    def of_ledger(cls, path: Path) -> Cost:
        """The cost of a ledger's releases."""
        header, entries = read_ledger(path)
        stated = header.get("plan", header)
        lines = [entry for entry in entries if entry.get("kind", "release") == "release"]
        if not lines:
            return cls()
        method = method_class(stated["method"]["name"])
        if method.composes and method.spent is Method.spent:
            return cls(tuple(entry_releases(stated, lines)[0]))
        delta = checks.delta_value(stated.get("delta"))
        return cls((), float(from_ledger(header, entries, delta)["epsilon"]), delta)

    def to_json(self) -> str:
        releases = [[asdict(release), count] for release, count in self.releases]
        return json.dumps({"releases": releases, "epsilon": self.epsilon, "delta": self.delta})

    @classmethod
    def from_json(cls, text: str) -> Cost:
        try:
            known = json.loads(text)
            releases = checked_releases([(Release(**values), int(count)) for values, count in known["releases"]])
            epsilon, delta = (checks.real(name, known[name]) for name in ("epsilon", "delta"))
            if epsilon < 0.0 or delta < 0.0:
                raise ValueError("a negative cost")
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise InputError(f"a run's cost in the budget file is damaged: {error}") from error
        return cls(tuple(releases), epsilon, delta)


@dataclass(frozen=True)
class Limit:
    """The joint limit of all runs on a dataset, and the order of the filter that adds them up."""

    epsilon: float
    delta: float
    relation: str
    order: float

    @classmethod
    def of(cls, epsilon: float, delta: float, relation: str) -> Limit:
        return cls(epsilon, delta, relation, filter_order(epsilon, delta))

    def filtered(self, costs: Sequence[Cost]) -> float:
        """ε at δ of adaptively chosen runs."""
        found, failures = [], []
        for cost in costs:
            here = divergence(cost.releases, self.order, self.relation)
            if math.isinf(here):  # no Rényi bound is known: use the run's own ε, at a quarter of δ
                own = self.delta / 4
                here = pure_divergence(self._alone(cost.releases, own), self.order)
                failures.append(own)
            found += [here, pure_divergence(cost.epsilon, self.order)]
            failures.append(cost.delta)
        return filtered_epsilon(found, failures, self.order, self.delta)

    def together(self, costs: Sequence[Cost]) -> float:
        """An upper bound on ε at δ of all of these runs; infinite if their own δ use up all of it."""
        if len(costs) > 1:
            return self.filtered(costs)
        if not costs:
            return 0.0
        left = self.delta - costs[0].delta * (1 + 1e-12)
        if costs[0].releases:
            return min(self.filtered(costs), self._alone(costs[0].releases, left)) if left > 0 else math.inf
        return costs[0].epsilon if left >= 0 or costs[0].delta <= self.delta else math.inf

    def _alone(self, releases: Sequence[tuple[Release, int]], delta: float) -> float:
        return composed_epsilon(checked_releases(releases), delta, self.relation, "pld")[0]


@dataclass(frozen=True)
class Account:
    """One dataset of a budget file: its limit and what its runs cost."""

    digest: str
    name: str
    limit: Limit
    runs: tuple[tuple[str, str, Cost], ...]  # folder, state, cost

    @property
    def spent(self) -> float:
        """ε at the account's δ of all runs, reserved ones in full."""
        return self.limit.together([cost for _, _, cost in self.runs])

    def to_dict(self) -> dict[str, Any]:
        spent = self.spent
        return {
            "dataset": self.digest,
            "name": self.name,
            **asdict(self.limit),
            "spent": spent,
            "runs": [
                {"folder": folder, "state": state, "epsilon": self.limit.together([cost])}
                for folder, state, cost in self.runs
            ],
        }
