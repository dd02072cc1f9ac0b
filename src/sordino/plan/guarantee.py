"""The guarantee of a plan: ε and δ, the theorem behind them, and all assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sordino.plan.method import Assumption
from sordino.plan.public import PublicSet
from sordino.shown import up

if TYPE_CHECKING:
    from sordino.plan.core import Plan

_UNITS = {"record": "record", "user": "user with all their rows"}
_NO_PROTECTION = 50.0  # from this ε on, the sentence says that there is no protection


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of a plan: the numbers, the theorem, and its assumptions. str() is a sentence.

    Args:
        epsilon: An upper bound on ε at `delta`.
        delta: δ.
        relation: The neighbouring relation: add-remove or replace-one.
        sampler: How batches are drawn.
        mechanism: The noise: gaussian or laplace.
        noise_multiplier: Its standard deviation (Laplace: its scale) over the clip norm.
        steps: The number of steps accounted for.
        accountant: How ε was computed: pld, rdp or the method's own.
        theorem: The theorem behind the bound.
        threat_model: What the adversary sees.
        assumptions: The assumptions, each with how it is ensured.
        epsilon_rdp: ε by Rényi accounting, if it applies.
        epsilon_lower: A lower bound on the ε of this mechanism, if one is known.
        secure: False if the noise comes from a known seed.
        method: The method's name.
        unit: The unit of privacy: a record, or a user with all their rows.
        beside: Further numbers that are shown with this ε, by name.
    """

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
    method: str = field(kw_only=True)
    unit: str = "record"  # the unit of privacy
    beside: Mapping[str, float] = field(default_factory=dict)  # further numbers that are shown with this ε

    def __str__(self) -> str:
        change = "adding or removing" if self.relation == "add-remove" else "replacing"
        sentence = (
            f"This training is (ε = {up(self.epsilon)}, δ = {up(self.delta)})-differentially private under {change} "
            f"one {_UNITS[self.unit]}: {self.steps} steps with {self.sampler} sampling and {self.mechanism} noise "
            f"(multiplier {self.noise_multiplier:.6g}), {self.accountant} accountant. "
            f"{self.theorem[0].upper()}{self.theorem[1:]}. "
            f"Threat model: {self.threat_model}. "
        )
        if self.beside:
            figures = ", ".join(f"{name.replace('_', ' ')} {up(value)}" for name, value in self.beside.items())
            sentence += f"For comparison: {figures}. "
        if not self.secure:
            sentence += "It does NOT hold against anyone who knows the insecure seed. "
        if self.epsilon > _NO_PROTECTION:
            sentence += "An ε of this size means no protection. "
        return sentence + "It assumes: " + "; ".join(f"{a.text} ({a.check})" for a in self.assumptions) + "."

    def to_dict(self) -> dict[str, Any]:
        """The fields and the sentence as JSON-serialisable values."""
        plain = {**asdict(self), "beside": dict(self.beside)}
        return plain | {"assumptions": [asdict(a) for a in self.assumptions], "sentence": str(self)}


_SAMPLER_ASSUMPTIONS = {
    "poisson": "each record is in each batch independently with the plan's probability",
    "truncated-poisson": "Poisson sampling, truncated to a uniform subset of the cap's size if more were drawn",
    "partition": "one secret uniform shuffle, the same disjoint batches every epoch",
    "allocation": "each record is in exactly one batch of every epoch, drawn uniformly and independently of the others",
    "cyclic": "each record is in one group for the whole run, drawn uniformly and independently of the others, and a "
    "step draws from one group only; the groups take turns",
    "without-replacement": "each batch is a fresh uniform subset of fixed size",
}


def plan_assumptions(plan: Plan) -> tuple[Assumption, ...]:
    unit = plan.counted
    known = "exact" if plan.relation == "replace-one" else f"may differ by the one {plan.unit} that is protected"
    noise = (
        Assumption("noise and batches are secret", "drawn from a cryptographic generator with the system's key")
        if plan.insecure_seed is None
        else Assumption("nobody knows the insecure seed", f"NOT ensured: the plan contains it, {plan.insecure_seed}")
    )
    return (
        Assumption(_SAMPLER_ASSUMPTIONS[plan.sampling.name], "the plan's own sampler draws every batch"),
        Assumption(
            f"one {unit} moves a sum by at most {plan.clipping.clip_norm:g} in {plan.clipping.norm} norm",
            plan.method.bounded_by,
        ),
        Assumption(
            f"records = {plan.records} and the divisor {plan.divisor:g} are public constants",
            f"given in the plan, never measured; records {known}",
        ),
        Assumption(
            "nothing else about the records is released",
            "one function adds noise, and it writes the ledger first; the duration of a run, which its files state, "
            "reveals sums of batch sizes and is not covered",
        ),
        *_user_assumptions(plan),
        *(Assumption(text, check) for text, check in plan.contribution.texts()),
        *plan.method.assumptions(plan),
        *(() if plan.public is None else (_public(plan.public),)),
        noise,
    )


def _user_assumptions(plan: Plan) -> tuple[Assumption, ...]:
    if plan.unit != "user":
        return ()
    if plan.examples_per_user is not None:
        return (
            Assumption(
                "all rows of a user have the same id; where the samplers say record, read row",
                "ids are given with the data; the program can't see that two ids belong to one person",
            ),
            Assumption(
                f"a user has at most {plan.examples_per_user} rows in the data",
                "further rows are left out before training; which ones depends only on their number and order among "
                "the user's own rows",
            ),
        )
    rows = "all rows" if plan.rows_per_user is None else f"at most {plan.rows_per_user} rows"
    return (
        Assumption(
            "all rows of a user have the same id, and records counts users; where the samplers say record, read user",
            "ids are given with the data; the program can't see that two ids belong to one person",
        ),
        Assumption(
            f"a user's vector is the mean gradient over {rows} of their own (with given weights: the weighted sum), "
            "clipped once",
            "which rows depends only on their number and order among the user's own rows and on the step",
        ),
    )


def _public(declared: PublicSet) -> Assumption:
    return Assumption(
        f"{declared.records} rows are public and not protected; their origin: {declared.origin}",
        f"declared in the plan (SHA-256 {declared.digest[:12]}…); a run of a recipe refuses private rows among them",
    )
