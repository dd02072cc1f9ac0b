"""The plan: one frozen value with everything that a guarantee depends on. Training reads the same value.

Conventions, the same in the ledger and on the command line (docs/guarantees/dpsgd.md):
- `noise_multiplier` is the standard deviation of the noise (Laplace: its scale) divided by `clip_norm`, under either
  relation. `sensitivity` is `clip_norm` plus a margin of a thousandth for rounding: it bounds what *one record
  contributes*, and `release()` multiplies by it. Under replace-one a sum moves by up to twice that; the accountant
  takes the factor two into account.
- `records`, the expected batch and `divisor` are public constants that the user gives; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args

from sordino import checks
from sordino.accounting.events import DpEvent, Release, compose_events
from sordino.accounting.schemes import MECHANISMS, check_scheme
from sordino.clipping import Clipping, clipping_from_dict
from sordino.errors import InputError, Refused
from sordino.plan.contribution import KINDS, Contribution
from sordino.plan.guarantee import Guarantee, plan_assumptions
from sordino.plan.method import Method
from sordino.plan.public import PublicSet
from sordino.randomness import RandomSource
from sordino.registry import method_class, method_from_dict, names_with
from sordino.release import Gaussian, Laplace, Noise
from sordino.sampling import Allocation, Cyclic, Poisson, Sampling, TruncatedPoisson, sampling_from_dict

UNITS = ("record", "user")
ROUNDING_MARGIN = 2.0**-10  # for rounding of norms and sums: theorem 2 of docs/guarantees/noise.md, section 6
DIVISORS = 1e-12, 1e12  # `release` multiplies by the inverse
CLIP_NORMS = 1e-12, 1e30
"""Below this range scaled rows underflow in single precision, and a record could move a sum by 1.6 clip norms; above it
sums are not finite. The theorem assumes this range."""


@dataclass(frozen=True)
class Statistic:
    """Releases besides the steps, which share the budget; each is of a Poisson sample of the records.

    Args:
        purpose: The name of the statistic in the ledger; not "gradient".
        noise_multiplier: The noise over the largest norm that one record contributes to the statistic.
        sampling_rate: The sampling rate; 1: all records.
        count: The number of releases.
        mechanism: gaussian or laplace.

    Raises:
        InputError: a value is wrong.
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


class _Makers(type):
    """`Plan.NAME(…)` makes a plan of the method NAME, as `sordino.NAME(…)` does (hyphens become underscores)."""

    def __getattr__(cls, name: str) -> Callable[..., Plan]:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return method_class(name.replace("_", "-")).plan
        except InputError as error:
            raise AttributeError(f"a Plan has no attribute {name!r}: {error}") from None


@dataclass(frozen=True)
class Plan(metaclass=_Makers):
    """The description of a private training run. Each method has a function that makes plans (`sordino.dpsgd`, …).

    A combination that no theorem covers is refused when the plan is made.

    Args:
        method: What the guarantee depends on besides sampling, clipping and noise.
        records: The public number of records.
        sampling: How batches are drawn.
        clipping: How one record's vector is bounded.
        noise: The noise on each sum.
        steps: The number of steps.
        delta: δ in (0, 1).
        divisor: The public number that sums are divided by.
        relation: The neighbouring relation: add-remove or replace-one.
        accountant: pld or rdp.
        insecure_seed: Makes the run reproducible; there is no guarantee against anyone who knows the seed.
        statistics: Further releases that share the budget.
        public: Rows that the guarantee does not protect.
        contribution: What one record's vector consists of.
        unit: The unit of privacy: a record, or a user with all their rows.
        rows_per_user: The largest number of a user's rows in a step; None: all of them.
        examples_per_user: Sample rows instead of users, where a user has at most this many rows; `records` and the
            expected batch then count rows.

    Raises:
        InputError: a value is wrong.
        Refused: no theorem covers the combination.
    """

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
    public: PublicSet | None = None  # rows that the guarantee does not protect
    contribution: Contribution = field(default_factory=Contribution)  # what one record's vector consists of
    unit: str = "record"  # the unit of privacy: a record (a row, or what the dataset defines), or a user with all rows
    rows_per_user: int | None = None  # largest number of a user's rows in a step; None: all of them
    examples_per_user: int | None = None  # rows are sampled, a user has at most so many; `records` then counts rows

    def __post_init__(self) -> None:
        self._check_kinds()
        checks.count("records", self.records)
        checks.count("steps", self.steps)
        checks.delta_value(self.delta)
        checks.within("divisor", self.divisor, *DIVISORS, open_low=True, open_high=True)
        checks.choice("accountant", self.accountant, checks.ACCOUNTANTS)
        checks.noise_multiplier_value(self.noise.noise_multiplier)
        checks.within("clip_norm", self.clipping.clip_norm, *CLIP_NORMS)
        check_scheme(self.sampling.name, self.noise.name, self.relation)
        if self.noise.norm != self.clipping.norm:
            raise Refused(
                f"{self.noise.name} noise needs {self.noise.norm} clipping, but {self.clipping.name} bounds the "
                f"{self.clipping.norm} norm"
            )
        if self.insecure_seed is not None:
            checks.count("insecure_seed", self.insecure_seed, minimum=0)
        checks.choice("unit", self.unit, UNITS)
        if self.rows_per_user is not None:
            if self.unit != "user":
                raise InputError("rows_per_user needs unit='user': with unit='record' a row is a record")
            checks.whole("rows_per_user", self.rows_per_user, minimum=1)
        if self.examples_per_user is not None:
            self._check_examples(self.examples_per_user)
        if self.unit == "user" and not self.method.protects_users:
            raise Refused(
                f"the method {self.method.name} treats a row as a record, so its guarantee is about rows: use one of "
                f"{', '.join(names_with(lambda method: method.protects_users))} for unit='user'"
            )
        self.contribution.check(self)
        self.method.check(self)

    def _check_kinds(self) -> None:
        """Only the package's own samplers, clippings and noises: a derived class may behave differently."""
        for name, kinds in (("sampling", Sampling), ("clipping", Clipping), ("noise", Noise)):
            found = type(getattr(self, name))
            if found not in get_args(kinds):
                known = ", ".join(kind.__name__ for kind in get_args(kinds))
                raise Refused(
                    f"{name} is a {found.__name__}, but the proofs cover {known} only: other classes, derived "
                    "ones included, are not accounted for"
                )

    def _check_examples(self, most: int) -> None:
        checks.whole("examples_per_user", most, minimum=1)
        if self.unit != "user" or self.rows_per_user is not None:
            raise InputError(
                "examples_per_user needs unit='user' and excludes rows_per_user: either users are sampled, each with "
                "some of their rows, or rows are sampled, of which a user has at most that many"
            )
        named = self.sampling.name, self.relation, self.noise.name
        if named != ("poisson", "add-remove", "gaussian") or type(self.method).releases is not Method.releases:
            raise Refused(
                "rows of users (examples_per_user) are accounted for Poisson sampling and independent Gaussian noise "
                "under add-remove only; sample users instead (leave out examples_per_user)"
            )

    @property
    def counted(self) -> str:
        """What `records` and the expected batch count: records, users or rows."""
        return "row" if self.examples_per_user is not None else self.unit

    def sampled(self, step: int) -> dict[str, Any]:
        """How the batch of a step is drawn, for the ledger.

        Args:
            step: The step, from 0.

        Returns:
            JSON-serialisable values: the sampler, and the largest number of rows of a user if rows are sampled.
        """
        rows = {} if self.examples_per_user is None else {"examples_per_user": self.examples_per_user}
        return self.sampling.at(step) | rows

    def calibrated(self, epsilon: float) -> Plan:
        """The same plan with the smallest noise multiplier that meets a budget.

        Args:
            epsilon: The largest ε at the plan's δ.

        Returns:
            A plan whose guarantee does not exceed `epsilon`.

        Raises:
            InputError: no noise meets it.
        """
        return self.method.calibrated(self, checks.positive("epsilon", epsilon))

    def with_noise(self, noise_multiplier: float) -> Plan:
        """The same plan with another noise multiplier.

        Args:
            noise_multiplier: The standard deviation of the noise (Laplace: its scale) over the clip norm.

        Returns:
            The changed plan.
        """
        return replace(self, noise=replace(self.noise, noise_multiplier=noise_multiplier))

    def noise_at(self, step: int) -> Noise:
        """The noise of one step: the plan's, times the method's factor for it.

        Args:
            step: The step, from 0.

        Returns:
            The noise that this step's release adds.
        """
        factor = self.method.noise_factor(step, self.steps)
        return self.noise if factor == 1 else replace(self.noise, noise_multiplier=self.noise.noise_multiplier * factor)

    @property
    def sampling_rate(self) -> float:
        """The probability that a given record is in a given batch (before truncation by a cap)."""
        if isinstance(self.sampling, (Poisson, TruncatedPoisson)):
            return self.sampling.sampling_rate
        if isinstance(self.sampling, Allocation):
            return 1.0 / self.sampling.batches
        if isinstance(self.sampling, Cyclic):
            return self.sampling.sampling_rate / self.sampling.batches
        return self.sampling.batch / self.records

    @property
    def expected_batch(self) -> float:
        """The public expectation of the batch size (before truncation by a cap)."""
        return self.sampling_rate * self.records

    @property
    def sensitivity(self) -> float:
        """The bound on one record's contribution to a *computed* sum: noise std = noise_multiplier × sensitivity.

        It is `clip_norm` plus a thousandth for the rounding of norms and sums (docs/guarantees/noise.md).
        """
        return self.clipping.sensitivity("add-remove") * (1 + ROUNDING_MARGIN)

    def source(self) -> RandomSource:
        """The source of noise and batches: a key of the operating system, or one derived from the insecure seed."""
        return RandomSource.from_os() if self.insecure_seed is None else RandomSource.seeded(self.insecure_seed)

    def releases(self, steps: int | None = None) -> list[tuple[Release, int]]:
        """What the plan releases about one record.

        Args:
            steps: The number of steps to count, from the first; None: all.

        Returns:
            Each kind of release with its number, statistics included.
        """
        done = self.steps if steps is None else checks.count("steps", steps, minimum=0)
        return self.method.releases(self, done) + [statistic.release() for statistic in self.statistics]

    def event(self) -> DpEvent:
        """All releases of the plan as one dp_accounting event."""
        return compose_events(self.releases())

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """(ε, δ) of the whole plan.

        Args:
            delta: A δ other than the plan's own.

        Returns:
            The guarantee: an upper bound, its theorem and its assumptions.
        """
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
            assumptions=plan_assumptions(self),
            epsilon_rdp=found.epsilon_rdp,
            epsilon_lower=found.epsilon_lower,
            secure=self.insecure_seed is None,
            method=self.method.name,
            beside=found.beside,
            unit=self.unit,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-serialisable values; Plan.from_dict is the inverse. `public` only if rows are declared."""
        apart = ("public", "contribution", "unit", "rows_per_user", "examples_per_user")
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}
        return (
            plain
            | ({} if self.public is None else {"public": self.public.to_dict()})
            | ({} if self.unit == "record" else {"unit": self.unit, "rows_per_user": self.rows_per_user})
            | ({} if self.examples_per_user is None else {"examples_per_user": self.examples_per_user})
            | {
                "method": {**self.method.to_dict(), **self.contribution.to_dict()},
                "sampling": self.sampling.to_dict(),
                "clipping": self.clipping.to_dict(),
                "noise": self.noise.to_dict(),
                "statistics": [asdict(statistic) for statistic in self.statistics],
            }
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The inverse of to_dict; missing and unknown keys are errors.

        Args:
            values: What to_dict returned, possibly after a round trip through JSON.

        Returns:
            An equal plan.

        Raises:
            InputError: a key is missing or unknown, or a value is wrong.
        """
        known = {field.name for field in fields(cls)} - {"contribution"}
        optional = {"public", "unit", "rows_per_user", "examples_per_user"}
        if set(values) | optional != known:
            wrong = ", ".join(sorted((set(values) | optional) ^ known))
            raise InputError(f"a plan must have exactly the keys {', '.join(sorted(known))}; wrong: {wrong}")
        try:
            return cls._from_values(values)
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            OverflowError,
        ) as error:  # the file was not written by to_dict
            raise InputError(f"a plan has a value that no plan can have: {error}") from error

    @classmethod
    def _from_values(cls, values: Mapping[str, Any]) -> Plan:
        try:
            statistics = tuple(Statistic(**statistic) for statistic in values["statistics"])
        except TypeError as error:
            raise InputError(f"a plan's statistics are wrong: {error}") from None
        stated = values["method"] if isinstance(values["method"], Mapping) else {}
        parts = {key: value for key, value in stated.items() if key in KINDS}
        return cls(
            **dict(values)
            | {
                "method": method_from_dict(
                    {key: value for key, value in stated.items() if key not in KINDS} if stated else values["method"]
                ),
                "contribution": Contribution.from_dict(parts),
                "sampling": sampling_from_dict(values["sampling"]),
                "clipping": clipping_from_dict(values["clipping"]),
                "noise": _noise_from_dict(values["noise"]),
                "statistics": statistics,
                "public": None if values.get("public") is None else PublicSet.from_dict(values["public"]),
            }
        )


def _noise_from_dict(values: Mapping[str, Any]) -> Noise:
    kinds: dict[str, type[Gaussian] | type[Laplace]] = {"gaussian": Gaussian, "laplace": Laplace}
    if set(values) != {"name", "noise_multiplier"} or values["name"] not in kinds:
        raise InputError(f"noise must be {{name: gaussian|laplace, noise_multiplier}}, got {dict(values)!r}")
    return kinds[values["name"]](values["noise_multiplier"])
