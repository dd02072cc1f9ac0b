"""DP-SGD: noisy sums of clipped gradients, all of them visible. What becomes of them is post-processing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sordino.accounting.account import TOLERANCE, account, checked_releases, composed_epsilon
from sordino.accounting.calibration import calibrate
from sordino.accounting.dpsgd import noise_guess
from sordino.accounting.events import DpEvent
from sordino.accounting.schemes import theorem
from sordino.accounting.spent import from_ledger, growing_curve
from sordino.errors import InputError
from sordino.methods.base import Accounted, Assumption, register

if TYPE_CHECKING:
    from sordino.plan import Plan


@dataclass(frozen=True)
class DPSGD:
    """Abadi et al. 2016, with the sampling that is really used and the accountant that fits it."""

    name: ClassVar[str] = "dpsgd"
    threat_model: ClassVar[str] = (
        "the adversary sees every noisy sum that was released, hence every iterate and the final model"
    )

    def check(self, plan: Plan) -> None:
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
        found = from_ledger(plan.to_dict(), entries, delta)
        return Accounted(found["epsilon"], delta, found["accountant"], "composition", found["epsilon_rdp"])

    def calibrated(self, plan: Plan, epsilon: float) -> Plan:
        guess = noise_guess(plan.sampling.to_dict(), plan.steps, plan.records, epsilon, plan.delta)

        def event(noise_multiplier: float) -> DpEvent:
            return plan.with_noise(noise_multiplier).event()

        sigma, _ = calibrate(event, epsilon, plan.delta, plan.relation, plan.accountant, guess=guess)
        return plan.with_noise(sigma)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        return ()

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}


def _read(values: Mapping[str, Any]) -> DPSGD:
    if values:
        raise InputError(f"the method dpsgd has no options, got {', '.join(values)}")
    return DPSGD()


register(DPSGD.name, _read)
