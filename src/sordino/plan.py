"""The plan: everything that a guarantee depends on, in one frozen value that training reads too.

Conventions, the same in the ledger, the command line and docs/guarantees/dpsgd.md:
- `noise_multiplier` is the standard deviation of the noise (Laplace: its scale) divided by `clip_norm`, under either
  relation. `sensitivity` is `clip_norm` with a margin of a thousandth for rounding: the bound on what *one record
  contributes*, and the number that `release()` multiplies by. Under replace-one a sum moves by up to twice that; the
  accountant counts it twice.
- `records`, the expected batch and `divisor` are public constants that the user gives; nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sordino.accounting import checks
from sordino.accounting.events import DpEvent, Release, compose_events
from sordino.accounting.schemes import MECHANISMS, SAMPLERS, check_scheme, default_relation, releases_of
from sordino.clipping import Clipping, FlatClip, clipping_from_dict
from sordino.errors import InputError, Refused
from sordino.methods import DPSGD, Assumption, Method, method_from_dict
from sordino.momentum import InnerMomentum, RecordMomentum
from sordino.public import PublicSet
from sordino.randomness import RandomSource
from sordino.release import Gaussian, Laplace, Noise
from sordino.sampling import (
    Partition,
    Poisson,
    Sampling,
    TruncatedPoisson,
    WithoutReplacement,
    sampling_from_dict,
)
from sordino.views import Augmentation

ROUNDING_MARGIN = 2.0**-10  # of norms and sums as computed: theorem 2 of docs/guarantees/noise.md, section 6
_NO_PROTECTION = 50.0  # from here on the sentence says that ε promises nothing


@dataclass(frozen=True)
class Statistic:
    """`count` further releases in the same budget, each on a Poisson sample of the records (rate 1: on all of them).

    `noise_multiplier` is the noise over the largest norm that one record contributes to the statistic.
    """

    purpose: str
    noise_multiplier: float
    sampling_rate: float = 1.0
    count: int = 1
    mechanism: str = "gaussian"

    def __post_init__(self) -> None:
        if not isinstance(self.purpose, str) or not self.purpose or self.purpose == "gradient":
            raise InputError(f"a statistic needs a purpose other than 'gradient', got {self.purpose!r}")
        checks.noise_multiplier_value(self.noise_multiplier)
        checks.probability("sampling_rate", self.sampling_rate, allow_one=True)
        checks.count("count", self.count)
        checks.choice("mechanism", self.mechanism, MECHANISMS)

    def release(self) -> tuple[Release, int]:
        return Release(self.mechanism, self.noise_multiplier, self.sampling_rate), self.count


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of a plan: the numbers, the theorem, and what it assumes. str() is a sentence."""

    epsilon: float
    delta: float
    relation: str
    sampler: str
    mechanism: str
    noise_multiplier: float
    steps: int
    accountant: str
    theorem: str
    threat_model: str
    assumptions: tuple[Assumption, ...]
    epsilon_rdp: float | None
    epsilon_lower: float | None
    secure: bool
    method: str = "dpsgd"
    beside: Mapping[str, float] = field(default_factory=dict)  # further figures that belong beside this ε

    def __str__(self) -> str:
        change = "adding or removing" if self.relation == "add-remove" else "replacing"
        sentence = (
            f"This training is (ε = {_up(self.epsilon)}, δ = {self.delta:g})-differentially private under {change} one "
            f"record: {self.steps} steps with {self.sampler} sampling and {self.mechanism} noise (multiplier "
            f"{self.noise_multiplier:.6g}), {self.accountant} accountant. {self.theorem[0].upper()}{self.theorem[1:]}. "
            f"Threat model: {self.threat_model}. "
        )
        if self.beside:
            figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.beside.items())
            sentence += f"Beside it: {figures}. "
        if not self.secure:
            sentence += "It does NOT hold against whoever knows the insecure seed. "
        if self.epsilon > _NO_PROTECTION:
            sentence += "An ε of this size promises no protection. "
        return sentence + "It assumes: " + "; ".join(f"{a.text} ({a.check})" for a in self.assumptions) + "."

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: the fields, and the sentence."""
        plain = {**asdict(self), "beside": dict(self.beside)}
        return plain | {"assumptions": [asdict(a) for a in self.assumptions], "sentence": str(self)}


@dataclass(frozen=True)
class Plan:
    """A private training, frozen. Make it with Plan.dpsgd(), or with the `plan` function of another method's module;
    every combination that no theorem covers is refused."""

    method: Method
    records: int
    sampling: Sampling
    clipping: Clipping
    noise: Noise
    steps: int
    delta: float
    divisor: float
    relation: str
    accountant: str = "pld"
    insecure_seed: int | None = None
    statistics: tuple[Statistic, ...] = ()
    public: PublicSet | None = None  # rows that the guarantee does not protect, beside the private ones

    def __post_init__(self) -> None:
        checks.count("records", self.records)
        checks.count("steps", self.steps)
        checks.delta_value(self.delta)
        checks.positive("divisor", self.divisor)
        checks.choice("accountant", self.accountant, checks.ACCOUNTANTS)
        checks.noise_multiplier_value(self.noise.noise_multiplier)
        check_scheme(self.sampling.name, self.noise.name, self.relation)
        if self.noise.norm != self.clipping.norm:
            raise Refused(
                f"{self.noise.name} noise needs {self.noise.norm} clipping, but {self.clipping.name} bounds the "
                f"{self.clipping.norm} norm"
            )
        if self.insecure_seed is not None:
            checks.count("insecure_seed", self.insecure_seed, minimum=0)
        self.method.check(self)

    @classmethod
    def dpsgd(
        cls,
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
    ) -> Plan:
        """A DP-SGD plan for a target `epsilon` (the smallest noise that meets it) or a given `noise_multiplier`.

        Either `epochs` or `steps`; either `clip_norm` (flat l2 clipping, default 1.0) or a `clipping`, whose norm
        chooses the noise: l2 Gaussian, l1 Laplace. `divisor` defaults to the expected batch. `relation` defaults to
        add-remove for the Poisson samplers and to replace-one for the others. `inner`, `augmentation` and
        `record_momentum` say what a record's one vector is made of; ε is the same with and without.
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
        plan = cls(
            method=DPSGD(inner=inner, augmentation=augmentation, record_momentum=record_momentum),
            records=records,
            sampling=sampler,
            clipping=chosen,
            noise=noise_type(1.0 if noise_multiplier is None else checks.noise_multiplier_value(noise_multiplier)),
            steps=count,
            delta=checks.delta_value(delta),
            divisor=checks.positive("divisor", expected_batch if divisor is None else divisor),
            relation=default_relation(sampling) if relation is None else relation,
            accountant=accountant,
            insecure_seed=insecure_seed,
            statistics=tuple(statistics),
            public=public,
        )
        return plan if epsilon is None else plan.calibrated(epsilon)

    def calibrated(self, epsilon: float) -> Plan:
        """The same plan with the smallest noise multiplier whose ε at its δ does not exceed `epsilon`."""
        return self.method.calibrated(self, checks.positive("epsilon", epsilon))

    def with_noise(self, noise_multiplier: float) -> Plan:
        """The same plan with another noise multiplier."""
        return replace(self, noise=replace(self.noise, noise_multiplier=noise_multiplier))

    def noise_at(self, step: int) -> Noise:
        """The noise of one step: the plan's, times the method's factor for it."""
        factor = self.method.noise_factor(step, self.steps)
        return self.noise if factor == 1 else replace(self.noise, noise_multiplier=self.noise.noise_multiplier * factor)

    @property
    def sampling_rate(self) -> float:
        """The probability that a given record is in a given batch (before a cap cuts in)."""
        if isinstance(self.sampling, (Poisson, TruncatedPoisson)):
            return self.sampling.sampling_rate
        return self.sampling.batch / self.records

    @property
    def expected_batch(self) -> float:
        """The public expectation of the batch size (before a cap cuts in)."""
        return self.sampling_rate * self.records

    @property
    def sensitivity(self) -> float:
        """The bound on one record's contribution to a sum *as computed*: noise std = noise_multiplier × sensitivity.

        It is `clip_norm`, and a thousandth more for the rounding of norms and sums (docs/guarantees/noise.md).
        """
        return self.clipping.sensitivity("add-remove") * (1 + ROUNDING_MARGIN)

    def source(self) -> RandomSource:
        """Where noise and batches come from: the operating system's key, or the insecure seed's."""
        return RandomSource.from_os() if self.insecure_seed is None else RandomSource.seeded(self.insecure_seed)

    def releases(self, steps: int | None = None) -> list[tuple[Release, int]]:
        """What the statistics and the first `steps` steps (all, when None) release about one record."""
        done = self.steps if steps is None else checks.count("steps", steps, minimum=0)
        gradients = releases_of(
            self.sampling.to_dict(), self.noise.name, self.noise.noise_multiplier, self.records, done
        )
        return gradients + [statistic.release() for statistic in self.statistics]

    def event(self) -> DpEvent:
        """All releases of the plan as one dp_accounting event."""
        return compose_events(self.releases())

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """(ε, δ) of the whole plan, at its own δ or another."""
        found = self.method.account(self, checks.delta_value(self.delta if delta is None else delta))
        return Guarantee(
            epsilon=found.epsilon,
            delta=found.delta,
            relation=self.relation,
            sampler=self.sampling.name,
            mechanism=self.noise.name,
            noise_multiplier=self.noise.noise_multiplier,
            steps=self.steps,
            accountant=found.accountant,
            theorem=found.theorem,
            threat_model=self.method.threat_model,
            assumptions=_assumptions(self),
            epsilon_rdp=found.epsilon_rdp,
            epsilon_lower=found.epsilon_lower,
            secure=self.insecure_seed is None,
            method=self.method.name,
            beside=found.beside,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; Plan.from_dict gives back an equal plan. `public` is there where rows are declared public."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "public"}
        return (
            plain
            | ({} if self.public is None else {"public": self.public.to_dict()})
            | {
                "method": self.method.to_dict(),
                "sampling": self.sampling.to_dict(),
                "clipping": self.clipping.to_dict(),
                "noise": self.noise.to_dict(),
                "statistics": [asdict(statistic) for statistic in self.statistics],
            }
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The inverse of to_dict; missing and unknown keys are errors."""
        known = {field.name for field in fields(cls)}
        if set(values) | {"public"} != known:
            wrong = ", ".join(sorted((set(values) | {"public"}) ^ known))
            raise InputError(f"a plan has exactly the keys {', '.join(sorted(known))}; missing or unknown: {wrong}")
        try:
            statistics = tuple(Statistic(**statistic) for statistic in values["statistics"])
        except TypeError as error:
            raise InputError(f"a plan's statistics are wrong: {error}") from None
        return cls(
            **dict(values)
            | {
                "method": method_from_dict(values["method"]),
                "sampling": sampling_from_dict(values["sampling"]),
                "clipping": clipping_from_dict(values["clipping"]),
                "noise": _noise_from_dict(values["noise"]),
                "statistics": statistics,
                "public": None if values.get("public") is None else PublicSet.from_dict(values["public"]),
            }
        )


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
    rate = expected_batch / records
    if name == "poisson":
        return Poisson(rate)
    if cap is None:
        raise InputError("truncated-poisson sampling needs a cap on the physical batch")
    return TruncatedPoisson(rate, checks.count("cap", cap))


def _steps(sampling: Sampling, records: int, epochs: float | None) -> int:
    """Steps of that many epochs: the last, partial step counts."""
    number = checks.positive("epochs", epochs)
    if isinstance(sampling, Partition):
        return max(1, math.ceil(number * (records // sampling.batch)))
    if isinstance(sampling, WithoutReplacement):
        return math.ceil(number * records / sampling.batch)
    return math.ceil(number / sampling.sampling_rate - 1e-9)


def _noise_from_dict(values: Mapping[str, Any]) -> Noise:
    kinds: dict[str, type[Gaussian] | type[Laplace]] = {"gaussian": Gaussian, "laplace": Laplace}
    if set(values) != {"name", "noise_multiplier"} or values["name"] not in kinds:
        raise InputError(f"noise is {{name: gaussian|laplace, noise_multiplier}}, got {dict(values)!r}")
    return kinds[values["name"]](values["noise_multiplier"])


_SAMPLER_ASSUMPTIONS = {
    "poisson": "each record is in each batch independently with the plan's probability",
    "truncated-poisson": "Poisson sampling, and a uniform subset of the cap's size where more were drawn",
    "partition": "one secret uniform shuffle, the same disjoint batches every epoch",
    "without-replacement": "each batch is a fresh uniform subset of fixed size",
}


_CLIPPED = (
    "the engine clips every record; which record an activation belongs to follows from the program of each pass, or is "
    "measured; wherever the program is new the gradients are compared with plain autograd and the records are tested for "
    "interaction"
)


def _assumptions(plan: Plan) -> tuple[Assumption, ...]:
    known = "exact" if plan.relation == "replace-one" else "may be off by the one record that is protected"
    noise = (
        Assumption("noise and batches are secret", "drawn from a cryptographic generator with a key of the system's")
        if plan.insecure_seed is None
        else Assumption("nobody knows the insecure seed", f"NOT ensured: the plan names it, {plan.insecure_seed}")
    )
    return (
        Assumption(_SAMPLER_ASSUMPTIONS[plan.sampling.name], "the plan's own sampler draws every batch"),
        Assumption(
            f"one record moves a sum by at most {plan.clipping.clip_norm:g} in {plan.clipping.norm} norm",
            getattr(plan.method, "bounded_by", _CLIPPED),
        ),
        Assumption(
            f"records = {plan.records} and the divisor {plan.divisor:g} are public constants",
            f"given in the plan, never measured; records {known}",
        ),
        Assumption("nothing else about the records is released", "one door adds noise and writes the ledger first"),
        *plan.method.assumptions(plan),
        *(() if plan.public is None else (_public(plan.public),)),
        noise,
    )


def _public(declared: PublicSet) -> Assumption:
    return Assumption(
        f"{declared.records} rows are public and have no protection; their origin: {declared.origin}",
        f"declared in the plan (SHA-256 {declared.digest[:12]}…); a recipe's run refuses private rows among them",
    )


def _up(value: float) -> str:
    """Four digits, rounded up: the sentence must not promise more than the number."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 3 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits) / 10**digits:.6g}"
