"""DP-MAC as a plan sees it: noisy sums of scaled Taylor coefficients, all of them visible.

A record's coefficients of all layers are one vector of norm at most 1 (mac.coefficients, by construction), summed over
a Poisson batch and released once per step. That is the subsampled Gaussian mechanism with clip norm 1, accounted for
as DP-SGD is (Abadi et al. 2016; docs/guarantees/dp_mac.md, Theorem 1). DP-PCA and private thresholds are
`Statistic`s of the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sordino.accounting import checks
from sordino.accounting.spent import from_ledger
from sordino.clipping import FlatClip
from sordino.errors import InputError, Refused
from sordino.methods.base import Accounted, Assumption, register
from sordino.methods.dpsgd import DPSGD

if TYPE_CHECKING:
    from sordino.plan import Plan, Statistic


@dataclass(frozen=True)
class DPMAC(DPSGD):
    """Paper 003. `parts`: how many bounded parts (layers × coefficients) make up a record's vector."""

    parts: int = 1
    name: ClassVar[str] = "dp-mac"
    trained_by: ClassVar[str] = "sordino.mac.training.train_mac"
    threat_model: ClassVar[str] = (
        "the adversary sees every noisy vector of Taylor coefficients that was released, hence every iterate and the "
        "final model; the auxiliary coordinates are never released"
    )

    def check(self, plan: Plan) -> None:
        checks.count("parts", self.parts)
        if plan.clipping != FlatClip(1.0):
            raise Refused(f"DP-MAC scales a record's coefficients to norm 1: clip_norm is 1, not {plan.clipping}")
        if plan.relation != "add-remove" or plan.sampling.name != "poisson":
            raise Refused("DP-MAC is proven for Poisson sampling under add-remove: choose these")
        if self.inner or self.augmentation or self.record_momentum:
            raise Refused("DP-MAC's vector of a record is not a gradient: it takes no views and no momentum of records")
        super().check(plan)

    def spent(self, plan: Plan, entries: Sequence[Mapping[str, Any]], delta: float) -> Accounted:
        """The ledger's entries composed as DP-SGD's: they are releases of the same mechanism."""
        found = from_ledger({**plan.to_dict(), "method": DPSGD().to_dict()}, entries, delta)
        return Accounted(found["epsilon"], delta, found["accountant"], "composition", found["epsilon_rdp"])

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        return (
            Assumption(
                f"a record's {self.parts} coefficient blocks, each divided by its bound and √{self.parts}, have joint "
                "norm at most 1",
                "every block of every record is clipped to its bound, also where the bound is an analytic one",
            ),
            Assumption(
                "a record's auxiliary coordinates depend on no other record",
                "they are started from the record and the released weights, and moved coordinate by coordinate",
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "parts": self.parts}


def _read(values: Mapping[str, Any]) -> DPMAC:
    if set(values) != {"parts"}:
        raise InputError(f"the method dp-mac has the option parts, got {', '.join(values) or 'none'}")
    return DPMAC(**values)


register(DPMAC.name, _read)


def plan(
    *,
    parts: int,
    delta: float,
    records: int,
    expected_batch: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "pld",
    insecure_seed: int | None = None,
    statistics: Sequence[Statistic] = (),
) -> Plan:
    """A DP-MAC plan for a target `epsilon` of everything, statistics included, or a given `noise_multiplier`."""
    from dataclasses import replace

    from sordino.plan import Plan

    base = Plan.dpsgd(
        delta=delta,
        records=records,
        expected_batch=expected_batch,
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
        epochs=epochs,
        steps=steps,
        accountant=accountant,
        insecure_seed=insecure_seed,
        statistics=statistics,
    )
    if (epsilon is None) == (noise_multiplier is None):
        raise InputError("give either epsilon (the target) or noise_multiplier, not both and not neither")
    made = replace(base, method=DPMAC(parts))
    return made if epsilon is None else made.calibrated(epsilon)
