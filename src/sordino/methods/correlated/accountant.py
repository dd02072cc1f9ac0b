"""ε and calibration of correlated noise from plain numbers, for `sordino account correlated` and `calibrate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sordino import checks
from sordino.accounting.account import account
from sordino.accounting.events import compose_events
from sordino.errors import InputError
from sordino.methods.correlated.choose import best_setting, best_strategy
from sordino.methods.correlated.mechanism import (
    Pattern,
    calibrated,
    check_relation,
    moves,
    pattern_of,
    releases,
    steps_of,
    theorem,
)
from sordino.methods.correlated.strategies import Strategy
from sordino.methods.correlated.workloads import Workload, noise_in_weights


def account_correlated(noise_multiplier: float, delta: float = 1e-5, **options: Any) -> dict[str, Any]:
    """ε of correlated noise at δ, JSON-serialisable.

    Args:
        noise_multiplier: Standard deviation of each step's own noise z divided by the clip norm.
        delta: δ in (0, 1).
        **options: records, batch, epochs or steps, groups, strategy, lambda (as `value`), bands, momentum, decay,
            relation, accountant.

    Returns:
        epsilon, delta, relation, accountant, theorem, noise_multiplier, sensitivity, mechanism_noise_multiplier (their
        quotient), noise_in_weights (root mean square per clip norm), and the setting.

    Raises:
        InputError: a value is missing or wrong.
        Refused: no theorem covers the combination.
    """
    run = _Run.of(**options)
    return run.result(checks.noise_multiplier_value(noise_multiplier), checks.delta_value(delta))


def calibrate_correlated(epsilon: float, delta: float = 1e-5, **options: Any) -> dict[str, Any]:
    """The smallest noise with which correlated noise spends at most ε; the strategy is chosen if none is given.

    Args:
        epsilon: The target.
        delta: δ in (0, 1).
        **options: As in `account_correlated`.

    Returns:
        The values of `account_correlated`, and target_epsilon.

    Raises:
        InputError: a value is missing or wrong, or no noise multiplier meets the target.
        Refused: no theorem covers the combination.
    """
    target, delta = checks.positive("epsilon", epsilon), checks.delta_value(delta)
    run = _Run.of(**options)
    if options.get("groups") is None:
        found = best_setting(
            records=run.records, batch=run.batch, steps=run.steps, epsilon=target, delta=delta, workload=run.workload,
            strategy=None if options.get("strategy") is None else run.strategy, relation=run.relation,
        )  # fmt: skip
        run = replace(run, pattern=found.pattern, strategy=found.strategy)
    sigma = calibrated(run.strategy, run.pattern, run.steps, target, delta, run.relation, run.accountant)
    return {"target_epsilon": target} | run.result(sigma, delta)


@dataclass(frozen=True)
class _Run:
    records: int
    batch: float
    steps: int
    pattern: Pattern
    strategy: Strategy
    workload: Workload
    relation: str
    accountant: str

    @classmethod
    def of(
        cls,
        *,
        records: int,
        batch: float,
        epochs: float | None = None,
        steps: int | None = None,
        groups: int | None = None,
        strategy: str | None = None,
        value: float | None = None,
        bands: int | None = None,
        momentum: float = 0.0,
        decay: float = 0.0,
        relation: str = "add-remove",
        accountant: str = "pld",
    ) -> _Run:
        pattern = pattern_of(records, batch, groups)
        count = steps_of(records, batch, epochs, steps)
        check_relation(pattern, checks.choice("relation", relation, checks.RELATIONS))
        workload = Workload(momentum, decay)
        if strategy is None and (value is not None or bands is not None):
            raise InputError("lambda and bands are options of a strategy: give its name")
        chosen = best_strategy(pattern, workload, count) if strategy is None else Strategy(strategy, value, bands)
        accountant = checks.choice("accountant", accountant, checks.ACCOUNTANTS)
        return cls(records, batch, count, pattern, chosen, workload, relation, accountant)

    def result(self, sigma: float, delta: float) -> dict[str, Any]:
        event = compose_events(releases(self.strategy, self.pattern, sigma, self.steps))
        found = account(event, delta, self.relation, self.accountant)
        moved = moves(self.strategy, self.pattern, self.steps)
        return {
            "epsilon": found.epsilon,
            "delta": delta,
            "relation": self.relation,
            "accountant": found.accountant,
            "theorem": theorem(self.pattern, found.accountant),
            "noise_multiplier": sigma,
            "sensitivity": moved,
            "mechanism_noise_multiplier": sigma / moved,
            "noise_in_weights": sigma * noise_in_weights(self.strategy, self.workload, self.steps),
            "strategy": self.strategy.to_dict(),
            "noises_per_step": len(self.strategy.noise(self.steps)),
            "workload": self.workload.to_dict(),
            "sampler": "cyclic",
            "groups": self.pattern.groups,
            "sampling_rate": self.pattern.rate,
            "participations": self.pattern.participations(self.steps),
            "records": self.records,
            "batch": self.records * self.pattern.rate / self.pattern.groups,
            "steps": self.steps,
        }
