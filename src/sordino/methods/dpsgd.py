"""DP-SGD: noisy sums of clipped gradients, all of them visible. What becomes of them is post-processing.

What is clipped is one vector per record: its gradient, or the mean over views of the record (`augmentation`), or the
sum over past iterates (`inner`), or its momentum over all steps (`record_momentum`). None of this changes what is
accounted (docs/guarantees/clipping_bias.md), but it is part of the plan, so that what is run is what is written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sordino.accounting.account import TOLERANCE, account, checked_releases, composed_epsilon
from sordino.accounting.calibration import calibrate
from sordino.accounting.dpsgd import noise_guess
from sordino.accounting.events import DpEvent
from sordino.accounting.schemes import theorem
from sordino.accounting.spent import from_ledger, growing_curve
from sordino.errors import InputError, Refused, did_you_mean
from sordino.methods.base import Accounted, Assumption, register
from sordino.momentum import InnerMomentum, RecordMomentum
from sordino.sampling import Poisson
from sordino.views import Augmentation

if TYPE_CHECKING:
    from sordino.plan import Plan


@dataclass(frozen=True)
class DPSGD:
    """Abadi et al. 2016, with the sampling that is really used and the accountant that fits it."""

    inner: InnerMomentum | None = field(default=None, kw_only=True)
    augmentation: Augmentation | None = field(default=None, kw_only=True)
    record_momentum: RecordMomentum | None = field(default=None, kw_only=True)
    name: ClassVar[str] = "dpsgd"
    threat_model: ClassVar[str] = (
        "the adversary sees every noisy sum that was released, hence every iterate and the final model"
    )

    def check(self, plan: Plan) -> None:
        if self.record_momentum is not None and not (
            isinstance(plan.sampling, Poisson) and plan.sampling.sampling_rate == 1.0
        ):
            raise Refused(
                "the momentum of single records over all steps (Algorithm 1) is proven for full batches alone: poisson "
                "sampling with expected_batch = records; for sampled batches use inner_length and inner_decay"
            )
        if self.record_momentum is not None and self.inner is not None:
            raise Refused(
                "momentum of single records is taken once: give inner_length or record_momentum_kept, not both"
            )
        plan.releases()  # a batch larger than the data is found here

    def noise_factor(self, step: int, steps: int) -> float:
        return 1.0

    def account(self, plan: Plan, delta: float) -> Accounted:
        found = account(plan.event(), delta, plan.relation, plan.accountant)
        # told the partition the adversary attains the bound; not told it, nobody knows
        below = None if plan.sampling.name == "partition" else found.epsilon_lower
        said = theorem(plan.sampling.name, plan.noise.name, plan.relation, found.accountant)
        return Accounted(found.epsilon, found.delta, found.accountant, said, found.epsilon_rdp, below)

    def epsilons(self, plan: Plan, steps: Sequence[int]) -> list[float]:
        """The last is as tight as `account`, the others within ten times the tolerance of it."""

        def after(count: int, last: bool) -> float:
            releases = checked_releases(plan.releases(count))
            tolerance = TOLERANCE if last else 10 * TOLERANCE
            return composed_epsilon(releases, plan.delta, plan.relation, plan.accountant, tolerance=tolerance)[0]

        return growing_curve(after, steps)

    def spent(self, plan: Plan, entries: Sequence[Mapping[str, Any]], delta: float) -> Accounted:
        found = from_ledger({**plan.to_dict(), "method": {"name": DPSGD.name}}, entries, delta)
        return Accounted(found["epsilon"], delta, found["accountant"], "composition", found["epsilon_rdp"])

    def calibrated(self, plan: Plan, epsilon: float) -> Plan:
        guess = noise_guess(plan.sampling.to_dict(), plan.steps, plan.records, epsilon, plan.delta)

        def event(noise_multiplier: float) -> DpEvent:
            return plan.with_noise(noise_multiplier).event()

        sigma, _ = calibrate(event, epsilon, plan.delta, plan.relation, plan.accountant, guess=guess)
        return plan.with_noise(sigma)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        found = []
        if self.inner is not None:
            found.append(
                Assumption(
                    f"a record's vector is its gradient at the present and at the last {self.inner.length} iterates, "
                    f"with factor {self.inner.decay:g} per iterate of age, summed and then clipped once",
                    "past iterates are weights that were made of released values",
                )
            )
        if self.record_momentum is not None:
            found.append(
                Assumption(
                    f"a record's vector is the momentum of its own gradients, of which a step keeps "
                    f"{self.record_momentum.kept:g}, clipped once",
                    "every step takes all records; the momenta stay in memory and are never written",
                )
            )
        if self.augmentation is not None:
            found.append(
                Assumption(
                    f"a record's vector is the mean over {self.augmentation} of it, clipped once",
                    "the views depend on the record's own content and on public values alone",
                )
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        parts = {"inner": self.inner, "augmentation": self.augmentation, "record_momentum": self.record_momentum}
        return {"name": self.name} | {key: part.to_dict() for key, part in parts.items() if part is not None}


_PARTS: Mapping[str, Any] = {"inner": InnerMomentum, "augmentation": Augmentation, "record_momentum": RecordMomentum}


def _read(values: Mapping[str, Any]) -> DPSGD:
    for key in values:
        if key not in _PARTS:
            raise InputError(f"the method dpsgd has no option {key!r}: {did_you_mean(key, _PARTS)}")
    try:
        return DPSGD(**{key: _PARTS[key](**value) for key, value in values.items()})
    except TypeError as error:
        raise InputError(f"the method dpsgd: {error}") from None


register(DPSGD.name, _read)
