"""One way to make a plan: what all methods' plan makers share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

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

P = ParamSpec("P")


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
    """A plan for a target `epsilon` (the smallest noise that meets it) or a given `noise_multiplier`.

    Args:
        method: what the guarantee depends on beyond sampling, clipping and noise.
        delta: δ in (0, 1).
        records: the public number of records.
        expected_batch: the (expected) number of records in a step.
        epsilon: the target; or give `noise_multiplier`.
        noise_multiplier: standard deviation of the noise (Laplace: its scale) over the clip norm.
        epochs: passes over the data; or give `steps`.
        steps: the number of steps.
        clip_norm: the bound of flat l2 clipping (default 1.0); or give `clipping`.
        clipping: how a record is bounded. Its norm chooses the noise: l2 Gaussian, l1 Laplace.
        sampling: poisson, truncated-poisson, partition, without-replacement, allocation or cyclic (the last two with
            records / expected_batch batches per epoch, rounded up).
        cap: the largest batch of truncated-poisson sampling.
        relation: add-remove (the default of Poisson samplers and of allocation) or replace-one (that of the others).
        accountant: pld or rdp.
        divisor: the public number that sums are divided by (default: the expected batch).
        insecure_seed: makes the run repeatable, and the guarantee void for whoever knows it.
        statistics: further releases in the same budget.
        public: rows that the guarantee does not protect.
        inner: a record's vector is the sum of its gradients at past iterates; ε is the same with and without.
        augmentation: a record's vector is the mean over views of it; likewise.
        record_momentum: a record's vector is its momentum over all steps; likewise.
        unit: record, or user: then `records` is the public number of users and `expected_batch` counts users.
        rows_per_user: of a user's rows at most so many take part in a step (default: all of them).
        examples_per_user: rows are sampled in the place of users, of which a user has at most so many; `records` and
            `expected_batch` then count rows.

    Returns:
        The plan; `plan.guarantee()` says what it promises.

    Raises:
        InputError: a value is wrong, or one of a pair is missing.
        Refused: no theorem covers the combination.

    Example:
        >>> import sordino
        >>> plan = sordino.dpsgd(delta=1e-5, records=1000, expected_batch=100, steps=10, noise_multiplier=2.0)
        >>> round(plan.guarantee().epsilon, 1)
        0.8
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise InputError("give either epsilon (the target) or noise_multiplier, not both and not neither")
    if (epochs is None) == (steps is None):
        raise InputError("give either epochs or steps, not both and not neither")
    if clip_norm is not None and clipping is not None:
        raise InputError("give either clip_norm (flat clipping) or clipping, not both")
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


def maker(function: Callable[Concatenate[Method, P], Plan], method: Method) -> Callable[P, Plan]:
    """The plan maker of a method without options of its own: `function` with its first argument filled in.

    Args:
        function: `make_plan`, whose signature and documentation the maker takes over.
        method: the method of every plan that it makes.

    Returns:
        A function of the remaining keywords.
    """

    def plan(*args: P.args, **options: P.kwargs) -> Plan:
        return function(method, *args, **options)

    plan.__module__, plan.__qualname__ = type(method).__module__, "plan"  # where it stands: it can be pickled
    signature = inspect.signature(function)
    first, *rest = signature.parameters.values()
    plan.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    lines = (function.__doc__ or "").splitlines(keepends=True)
    plan.__doc__ = "".join(line for line in lines if not line.lstrip().startswith(f"{first.name}:"))
    return plan


def make_sampling(name: str, expected_batch: float, records: int, cap: int | None = None) -> Sampling:
    """The sampler of that name for a public number of records."""
    checks.choice("sampling", name, SAMPLERS)
    if cap is not None and name != "truncated-poisson":
        raise InputError(f"cap belongs to truncated-poisson sampling, not to {name}")
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
    """The expected batch: that of allocation follows from its whole number of batches."""
    return records / sampling.batches if isinstance(sampling, Allocation | Cyclic) else expected_batch


def _steps(sampling: Sampling, records: int, epochs: float | None) -> int:
    """Steps of that many epochs: the last, partial step counts."""
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
