"""`make_plan` makes the plans of all methods whose steps are clipped, noisy sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sordino import checks
from sordino.accounting.schemes import SAMPLERS, default_relation
from sordino.clipping import Clipping, FlatClip
from sordino.errors import InputError
from sordino.plan.contribution import Augmentation, Contribution, InnerMomentum, RecordMomentum
from sordino.plan.core import Plan, Statistic
from sordino.plan.method import Method
from sordino.plan.public import PublicSet
from sordino.release import Gaussian, Laplace
from sordino.sampling import Allocation, Cyclic, Partition, Poisson, Sampling, TruncatedPoisson, WithoutReplacement


def make_plan(
    method: Method,
    *,
    delta: float,
    records: int,
    expected_batch: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    clip_norm: float | None = None,
    clipping: Clipping | None = None,
    sampling: str = "poisson",
    cap: int | None = None,
    relation: str | None = None,
    accountant: str = "pld",
    divisor: float | None = None,
    insecure_seed: int | None = None,
    statistics: Sequence[Statistic] = (),
    public: PublicSet | None = None,
    inner: InnerMomentum | None = None,
    augmentation: Augmentation | None = None,
    record_momentum: RecordMomentum | None = None,
    unit: str = "record",
    rows_per_user: int | None = None,
    examples_per_user: int | None = None,
) -> Plan:
    """A plan for a target `epsilon` (with the smallest noise that meets it) or for a given `noise_multiplier`.

    Args:
        method: What the guarantee depends on besides sampling, clipping and noise.
        delta: δ in (0, 1), below 1/records.
        records: The public number of records.
        expected_batch: The (expected) number of records in a step.
        epsilon: The target ε; or give `noise_multiplier`.
        noise_multiplier: Standard deviation of the noise (Laplace: its scale) divided by the clip norm.
        epochs: Passes over the data; or give `steps`.
        steps: The number of steps.
        clip_norm: The bound of flat l2 clipping (default 1.0); or give `clipping`.
        clipping: How a record's gradient is bounded. Its norm determines the noise: l2 Gaussian, l1 Laplace.
        sampling: poisson, truncated-poisson, partition, without-replacement, allocation or cyclic (the last two with
            records / expected_batch batches per epoch, rounded up).
        cap: The largest batch of truncated-poisson sampling.
        relation: add-remove or replace-one. The default is add-remove for samplers that support it, else replace-one.
        accountant: pld or rdp.
        divisor: The public number that sums are divided by (default: the expected batch).
        insecure_seed: Makes the run reproducible; there is no guarantee against anyone who knows the seed.
        statistics: Further releases that share the budget.
        public: Rows that the guarantee does not protect.
        inner: A record's vector is the sum of its gradients at past iterates. ε does not depend on it.
        augmentation: A record's vector is the mean over several views of it. ε does not depend on it.
        record_momentum: A record's vector is its momentum over all steps. ε does not depend on it.
        unit: record, or user: then `records` is the public number of users and `expected_batch` counts users.
        rows_per_user: The largest number of a user's rows that take part in a step (default: all of them).
        examples_per_user: Sample rows instead of users, where a user has at most this many rows; `records` and
            `expected_batch` then count rows.

    Returns:
        The plan; `plan.guarantee()` states what it guarantees.

    Raises:
        InputError: a value is wrong, or not exactly one of two alternatives is given.
        Refused: no theorem covers the combination.
    """
    checks.exactly_one(epsilon=epsilon, noise_multiplier=noise_multiplier)
    checks.exactly_one(epochs=epochs, steps=steps)
    if clip_norm is not None and clipping is not None:
        raise InputError("give either clip_norm (flat clipping) or clipping, not both")
    if clipping is not None and not isinstance(clipping, Clipping):
        raise InputError(f"clipping must be one of sordino.clipping, such as FlatClip(1.0), got {clipping!r}")
    records = checks.count("records", records)
    sampler = make_sampling(sampling, expected_batch, records, cap)
    count = _steps(sampler, records, epochs) if steps is None else checks.count("steps", steps)
    chosen = clipping or FlatClip(checks.positive("clip_norm", 1.0 if clip_norm is None else clip_norm))
    noise_type = Gaussian if chosen.norm == "l2" else Laplace
    plan = Plan(
        method=method,
        records=records,
        sampling=sampler,
        clipping=chosen,
        noise=noise_type(1.0 if noise_multiplier is None else checks.noise_multiplier_value(noise_multiplier)),
        steps=count,
        delta=checks.delta_value(delta),
        divisor=checks.positive("divisor", _expected(sampler, expected_batch, records) if divisor is None else divisor),
        relation=default_relation(sampling) if relation is None else relation,
        accountant=accountant,
        insecure_seed=insecure_seed,
        statistics=tuple(statistics),
        public=public,
        contribution=Contribution(inner=inner, augmentation=augmentation, record_momentum=record_momentum),
        unit=unit,
        rows_per_user=rows_per_user,
        examples_per_user=examples_per_user,
    )
    return plan if epsilon is None else plan.calibrated(epsilon)


def make_sampling(name: str, expected_batch: float, records: int, cap: int | None = None) -> Sampling:
    """The sampler of a plan.

    Args:
        name: poisson, truncated-poisson, partition, without-replacement, allocation or cyclic.
        expected_batch: The (expected) number of records in a step.
        records: The public number of records.
        cap: The largest batch of truncated-poisson sampling.

    Returns:
        The sampler.

    Raises:
        InputError: the name is unknown, or the numbers do not fit it.
    """
    checks.choice("sampling", name, SAMPLERS)
    if cap is not None and name != "truncated-poisson":
        raise InputError(f"cap is an option of truncated-poisson sampling, not of {name}")
    if checks.positive("expected_batch", expected_batch) > records:
        raise InputError(f"expected_batch ({expected_batch:g}) exceeds the number of records ({records})")
    if name in ("partition", "without-replacement"):
        batch = checks.count("expected_batch", expected_batch)
        return Partition(batch) if name == "partition" else WithoutReplacement(batch)
    if name in ("allocation", "cyclic"):
        count = _whole("batches of an epoch", records / expected_batch - 1e-9)
        return Allocation(count) if name == "allocation" else Cyclic(count)
    rate = expected_batch / records
    if name == "poisson":
        return Poisson(rate)
    if cap is None:
        raise InputError("truncated-poisson sampling needs a cap on the physical batch")
    return TruncatedPoisson(rate, checks.count("cap", cap))


def _expected(sampling: Sampling, expected_batch: float, records: int) -> float:
    """The expected batch size; for allocation it follows from the whole number of batches."""
    return records / sampling.batches if isinstance(sampling, Allocation | Cyclic) else expected_batch


def _steps(sampling: Sampling, records: int, epochs: float | None) -> int:
    """The number of steps in that many epochs, rounded up."""
    number = checks.positive("epochs", epochs)
    if isinstance(sampling, Partition):
        return max(1, _whole("steps", number * (records // sampling.batch)))
    if isinstance(sampling, Allocation | Cyclic):
        return max(1, _whole("steps", number * sampling.batches - 1e-9))
    if isinstance(sampling, WithoutReplacement):
        return _whole("steps", number * records / sampling.batch)
    return _whole("steps", number / sampling.sampling_rate - 1e-9)


def _whole(what: str, number: float) -> int:
    """The next whole number."""
    if not number <= 1e15:
        raise InputError(f"these would be {number:g} {what}: give a larger expected_batch, or fewer epochs")
    return math.ceil(number)
