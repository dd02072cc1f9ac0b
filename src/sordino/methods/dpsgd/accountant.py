"""ε and calibration of DP-SGD from plain numbers, for `sordino account dpsgd` and `sordino calibrate dpsgd`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from sordino import checks
from sordino.accounting.account import account
from sordino.accounting.calibration import calibrate, noise_guess
from sordino.accounting.events import DpEvent, compose_events, grouped
from sordino.accounting.schemes import check_scheme, default_relation, releases_of, theorem
from sordino.errors import InputError, Refused

_BY_BATCHES = ("allocation", "cyclic")


@dataclass(frozen=True)
class _Run:
    """A checked DP-SGD run, with everything except its noise multiplier."""

    sampling: str
    sampling_rate: float
    steps: int
    relation: str
    mechanism: str
    records: int | None
    cap: int | None
    batches: int | None = None
    examples_per_user: int | None = None

    def description(self) -> dict[str, Any]:
        """The sampler as its to_dict() describes it."""
        if self.sampling == "poisson":
            return {"name": "poisson", "sampling_rate": self.sampling_rate}
        if self.sampling == "truncated-poisson":
            return {"name": "truncated-poisson", "sampling_rate": self.sampling_rate, "cap": self.cap}
        if self.sampling == "allocation":
            return {"name": "allocation", "batches": self.batches}
        if self.sampling == "cyclic":
            return {"name": "cyclic", "batches": self.batches, "sampling_rate": 1.0}
        assert self.records is not None
        return {"name": self.sampling, "batch": round(self.sampling_rate * self.records)}

    def event(self, noise_multiplier: float) -> DpEvent:
        if self.examples_per_user is not None:
            return compose_events([(grouped(noise_multiplier, self.sampling_rate, self.examples_per_user), self.steps)])
        releases = releases_of(self.description(), self.mechanism, noise_multiplier, self.records or 1, self.steps)
        return compose_events(releases)


def account_dpsgd(
    noise_multiplier: float,
    steps: int | None = None,
    delta: float = 1e-5,
    *,
    accountant: str = "pld",
    **options: Any,
) -> dict[str, Any]:
    """ε of DP-SGD at δ.

    Args:
        noise_multiplier: The standard deviation of the noise (Laplace: its scale) divided by the clip norm.
        steps: The number of steps; or give `epochs`.
        delta: δ in (0, 1).
        accountant: "pld" or "rdp".
        **options: epochs; sampling (default: poisson); sampling_rate, or records and batch (of Poisson sampling: the
            expected batch), or for random allocation and cyclic sampling batches (per epoch); cap of truncated Poisson
            sampling; relation; mechanism; examples_per_user (rows are sampled, and the unit of privacy is a user with
            at most that many rows).

    Returns:
        JSON-serialisable values: epsilon, delta, unit, relation, accountant, theorem, epsilon_rdp, epsilon_lower,
        sampler, mechanism, noise_multiplier, sampling_rate, steps, records, batches, cap, examples_per_user.

    Raises:
        InputError: a value is missing or wrong.
        Refused: no theorem covers the combination.
    """
    run = _run(steps=steps, **options)
    sigma = checks.noise_multiplier_value(noise_multiplier)
    return _result(run, sigma, delta, accountant)


def calibrate_dpsgd(
    epsilon: float,
    steps: int | None = None,
    delta: float = 1e-5,
    *,
    accountant: str = "pld",
    **options: Any,
) -> dict[str, Any]:
    """The smallest noise multiplier with which DP-SGD spends at most ε at δ.

    Args:
        epsilon: The target.
        steps: The number of steps; or give `epochs`.
        delta: δ in (0, 1).
        accountant: "pld" or "rdp".
        **options: As in `account_dpsgd`.

    Returns:
        The values of `account_dpsgd`, and target_epsilon.

    Raises:
        InputError: a value is missing or wrong, or no noise multiplier meets the target.
        Refused: no theorem covers the combination.
    """
    run = _run(steps=steps, **options)
    target, delta = checks.positive("epsilon", epsilon), checks.delta_value(delta)
    checks.choice("accountant", accountant, checks.ACCOUNTANTS)
    guess = noise_guess(run.description(), run.steps, run.records or 1, target, delta)
    sigma, _ = calibrate(run.event, target, delta, run.relation, accountant, guess=guess)
    return {"target_epsilon": target} | _result(run, sigma, delta, accountant)


def _result(run: _Run, sigma: float, delta: float, accountant: str) -> dict[str, Any]:
    found = account(run.event(sigma), delta, run.relation, accountant)
    described = asdict(replace(run))
    sampler = described.pop("sampling")
    return {
        **asdict(found),
        "epsilon_lower": None if sampler == "partition" else found.epsilon_lower,
        "theorem": theorem(run.sampling, run.mechanism, run.relation, found.accountant, run.examples_per_user),
        "unit": "record" if run.examples_per_user is None else "user",
        "sampler": sampler,
        "noise_multiplier": sigma,
        **{
            key: described[key]
            for key in ("mechanism", "sampling_rate", "steps", "records", "batches", "cap", "examples_per_user")
        },
    }


def _run(
    *,
    steps: int | None,
    sampling: str = "poisson",
    sampling_rate: float | None = None,
    records: int | None = None,
    batch: int | None = None,
    batches: int | None = None,
    epochs: float | None = None,
    cap: int | None = None,
    relation: str | None = None,
    mechanism: str = "gaussian",
    examples_per_user: int | None = None,
) -> _Run:
    relation = default_relation(sampling) if relation is None else relation
    check_scheme(sampling, mechanism, relation)
    size = None if records is None else checks.count("records", records)
    if batches is not None and sampling not in _BY_BATCHES:
        raise InputError(
            f"batches (per epoch) are for {' and '.join(_BY_BATCHES)}, not for {sampling}: give sampling_rate or batch"
        )
    if sampling in _BY_BATCHES:
        batches = _batches(sampling, batches, sampling_rate, size, batch)
        rate = 1 / batches
    else:
        rate = _rate(sampling, sampling_rate, size, batch)
    if sampling == "truncated-poisson":
        if cap is None or size is None:
            raise InputError("truncated-poisson needs cap and records: the probability of truncation depends on both")
        cap = checks.count("cap", cap)
    elif cap is not None:
        raise InputError(f"cap is an option of truncated-poisson sampling, not of {sampling}")
    if examples_per_user is not None:
        checks.count("examples_per_user", examples_per_user)
        if (sampling, relation, mechanism) != ("poisson", "add-remove", "gaussian"):
            raise Refused("examples_per_user is accounted for Poisson sampling and Gaussian noise under add-remove")
    count = _steps(steps, epochs, sampling, rate)
    return _Run(sampling, rate, count, relation, mechanism, size, cap, batches, examples_per_user)


def _steps(steps: int | None, epochs: float | None, sampling: str, rate: float) -> int:
    if (steps is None) == (epochs is None):
        raise InputError("give either steps or epochs")
    if steps is not None:
        return checks.count("steps", steps)
    per_epoch = math.floor(1 / rate + 1e-9) if sampling == "partition" else 1 / rate
    return max(1, math.ceil(checks.positive("epochs", epochs) * per_epoch - 1e-9))


def _batches(
    sampling: str, batches: int | None, sampling_rate: float | None, records: int | None, batch: int | None
) -> int:
    """Batches per epoch: given, or from records and the expected batch."""
    if sampling_rate is not None or (batches is None) == (batch is None):
        raise InputError(f"{sampling} needs batches (per epoch), or records and the expected batch")
    if batches is not None:
        return checks.count("batches", batches)
    if records is None:
        raise InputError("batch needs records: an epoch has records / batch batches")
    if checks.count("batch", batch) > records:
        raise InputError(f"batch ({batch}) exceeds records ({records})")
    return math.ceil(records / checks.count("batch", batch))


def _rate(sampling: str, sampling_rate: float | None, records: int | None, batch: int | None) -> float:
    """The sampling rate: given, or from records and batch; a fixed batch must be a whole number."""
    if sampling in ("partition", "without-replacement") and (records is None or batch is None):
        raise InputError(f"{sampling} draws a fixed number out of a public number of records: give records and batch")
    if (sampling_rate is None) == (batch is None):
        raise InputError("give either sampling_rate, or records and batch")
    if sampling_rate is not None:
        return checks.probability("sampling_rate", sampling_rate, allow_one=True)
    if records is None:
        raise InputError("batch needs records: the sampling rate is batch / records")
    size = checks.positive("batch", batch) if sampling.endswith("poisson") else checks.count("batch", batch)
    if size > records:
        raise InputError(f"batch ({size}) exceeds records ({records})")
    return size / records
