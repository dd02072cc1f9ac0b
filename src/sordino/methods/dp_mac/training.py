"""DP-MAC's training: Z-steps, one release of all coefficients, W-steps, in the training loop of `sordino.training`.

Formal guarantee: everything that this module writes or returns, except the `not_private` field of the result, is a
function of values released through `sordino.release` under the plan (and of public data), so `plan.guarantee()` holds
for all of it jointly. After a kill it is resumed as `sordino.train` is: with an insecure seed steps are repeated bit
for bit; with secure noise the steps in the ledger whose update was lost are skipped, and lost thresholds are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.clipping import Clipping
from sordino.errors import InputError
from sordino.gradients import ClippedSum
from sordino.methods.dp_mac.coefficients import (
    CONCATENATED,
    Bounds,
    Coefficients,
    Expansion,
    fixed_bounds,
    polynomials,
)
from sordino.methods.dp_mac.network import Network
from sordino.methods.dp_mac.optimise import WSteps, w_step
from sordino.methods.dp_mac.thresholds import PURPOSE, PrivateThresholds, declared, measure
from sordino.methods.dp_mac.zsteps import ZSteps
from sordino.plan.contribution import Contribution
from sordino.plan.core import Plan
from sordino.randomness import RandomSource
from sordino.records.fitting import rows_not_finite
from sordino.records.momentum import PastIterates
from sordino.records.reading import count_records, refuse_owners, row_reader
from sordino.sampling import LogicalBatch
from sordino.training.announced import evaluates, header, seconds_per_step
from sordino.training.callbacks import Callback, checked
from sordino.training.fit import fit, fit_without_noise
from sordino.training.job import Job, Result, digest
from sordino.training.loop import Evaluate, Settings
from sordino.training.progress import tell_not_finite
from sordino.training.steps import PrivateStep, check_records
from sordino.training.updates import Running, Update

Data = tuple[Tensor, Tensor]
_UNBOUNDED = 2.0**40  # far beyond any coefficient, so that nothing is clipped


@dataclass(frozen=True)
class Mac:
    """The settings of DP-MAC.

    Args:
        z: How the auxiliary coordinates are computed.
        expansion: Which coefficients are released, and how those of a record are bounded.
        w: How the noisy polynomial is minimised.
        bounds: Public thresholds by part, one number for all layers or one for each; only if parts are clipped.
        private: Thresholds that are measured with noise during training; only if parts are clipped.

    Raises:
        InputError: the settings contradict each other.
    """

    z: ZSteps = field(default_factory=ZSteps)
    expansion: Expansion = field(default_factory=Expansion)
    w: WSteps = field(default_factory=WSteps)
    bounds: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    private: PrivateThresholds | None = None

    def __post_init__(self) -> None:
        if self.expansion.bounding != "clip" and (self.bounds or self.private):
            raise InputError(f"bounds and private thresholds are for clipping, not for {self.expansion.bounding!r}")
        if self.w.optimizer == "cg" and self.expansion.order != 2:
            raise InputError("conjugate gradients need order = 2: a linear polynomial has no minimum")

    def parts(self, layers: int) -> int:
        return layers * len(self.expansion.parts)

    def start(self, layers: int) -> Bounds | None:
        """The bounds of the first step; None if they follow from the weights."""
        if self.expansion.bounding == "analytic":
            return None
        return fixed_bounds(layers, self.expansion, self.bounds)


class MacUpdate(Update):
    """W-steps on the released polynomials. `thresholds` are the current bounds; None: analytic ones."""

    def __init__(self, plan: Plan, network: Network, mac: Mac, noise: float) -> None:
        """`noise`: the standard deviation of the noise on a released coefficient."""
        super().__init__(plan, network, _no_loss, lr=mac.w.lr)
        self.network, self.mac, self.noise = network, mac, noise
        self.layers = len(network.layers)
        self.thresholds: Bounds | None = mac.start(self.layers)
        self.coefficients: Coefficients | None = None
        self.running: Running | None = None

    def make_optimizer(self, trained: Sequence[nn.Parameter], options: Mapping[str, Any]) -> Optimizer:
        return self.mac.w.make(self.network)

    def gradient_sum(self, dataset: Any, *, past: Callable[[], PastIterates], seed: int) -> MeasuredCoefficients:
        return MeasuredCoefficients(self, row_reader(dataset))

    def begin(self, scalars: Mapping[str, Any], running: Running | None) -> None:
        self.thresholds = scalars.get("bounds", self.thresholds)
        self.running = running

    def move(self, private: PrivateStep, optimizer: Optimizer) -> None:
        assert self.coefficients is not None, "a step is released after its coefficients were summed"
        bounds = self.coefficients.bounds()
        noisy = polynomials(private.gradients, self.mac.expansion, bounds, self.layers, self.noise)
        w_step(self.network, noisy, self.mac.w, optimizer)

    def kept(self) -> dict[str, Any]:
        return {"bounds": self.thresholds}

    def measured(self, coefficients: Coefficients, step: int) -> Bounds | None:
        """The bounds from `step` on: measured again if they are due, and kept if that measurement was lost."""
        private, running = self.mac.private, self.running
        if private is None or running is None or step % private.every:
            return coefficients.thresholds
        number = step // private.every
        if running.source.secure and running.ledger.last_step(PURPOSE) >= number:
            return coefficients.thresholds
        return measure(
            self.plan, coefficients, private, number, records=running.records, source=running.source,
            ledger=running.ledger, chunk=running.chunk,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class MeasuredCoefficients:
    """The coefficients of a batch under the update's bounds, which are measured before the sum if they are due."""

    update: MacUpdate
    fetch: Any
    clipping: Clipping = CONCATENATED
    contribution: Contribution = field(default_factory=Contribution)

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        update, mac = self.update, self.update.mac
        coefficients = Coefficients(update.network, self.fetch, mac.z, mac.expansion, update.thresholds)
        update.thresholds = update.measured(coefficients, batch.step)
        update.coefficients = replace(coefficients, thresholds=update.thresholds)
        return update.coefficients(batch)


def train_mac(
    network: Network,
    dataset: Data,
    plan: Plan,
    mac: Mac,
    *,
    settings: Settings | None = None,
    evaluate: Evaluate | None = None,
    out: Path | None = None,
    resume: bool = False,
    source: RandomSource | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Trains `network` in place under a DP-MAC plan.

    Args:
        network: The network to train.
        dataset: Records (n, in) and targets (n, out).
        plan: A plan of the method dp-mac with as many parts as network and expansion have.
        mac: How the coefficients are computed, bounded and used.
        settings: Settings that the guarantee does not depend on.
        evaluate: Evaluates the model, on public data only.
        out: A directory for ledger.jsonl, metrics.jsonl and checkpoints.
        resume: Continue the run in `out`.
        source: The source that was used before in the same run (DP-PCA); default: the plan's.
        callbacks: Called with each row of the metrics.

    Returns:
        The trained network, the guarantee and the metrics.

    Raises:
        InputError: plan, settings, network and records do not fit together, or a test of the W-step fails.
        Refused: rows have owners, or the run can't be resumed.
        SordinoError: the ledger can't be written, or is not this run's complete ledger.
    """
    settings = settings or Settings()
    check_mac_plan(plan, mac, len(network.layers))
    refuse_owners(dataset, plan.method.name)
    check_records(plan, count_records(dataset))
    update = mac_update(plan, network, mac)
    fingerprint = digest(
        {
            "plan": plan.to_dict(), "mac": asdict(mac), "averaging": repr(settings.averaging),
            "seed": settings.seed, "widths": network.widths, "activations": network.activations,
        }
    )  # fmt: skip
    watching = checked(callbacks, plan, settings.eval_every)
    job = Job(network, dataset, plan, update, settings, evaluate, out, fingerprint, "DP-MAC", callbacks=watching)
    rehearse_w_step(update, settings)
    tell_not_finite(rows_not_finite(dataset))
    guarantee = plan.guarantee()
    if settings.progress is not False:
        said = header(plan, guarantee, _seconds(plan, network, dataset, mac, settings), evaluates=evaluates(job))
        job = replace(job, said=said)
    return fit(job, source or plan.source(), guarantee, resume=resume)


def _seconds(plan: Plan, network: Network, dataset: Data, mac: Mac, settings: Settings) -> float | None:
    """The expected seconds of a step, from steps with a copy of the network. Measuring the thresholds takes about as
    long as a step."""
    copied = deepcopy(network)
    found = seconds_per_step(Job(copied, dataset, plan, mac_update(plan, copied, mac), settings))
    if found is None or mac.private is None:
        return found
    return found * (1 + 1 / mac.private.every)


def train_mac_without_privacy(
    network: Network,
    dataset: Data,
    plan: Plan,
    mac: Mac,
    *,
    settings: Settings | None = None,
    evaluate: Evaluate | None = None,
) -> Result:
    """MAC with the same sampling and Z-steps, with neither bounds nor noise on its coefficients: NO guarantee.

    For public data only, for comparison.
    """
    free = replace(mac, expansion=replace(mac.expansion, bounding="clip"), private=None)
    update = MacUpdate(plan, network, free, 0.0)
    update.thresholds = {
        f"layers.{k}.{part}": _UNBOUNDED for k in range(len(network.layers)) for part in mac.expansion.parts
    }
    job = Job(network, dataset, plan, update, settings or Settings(), evaluate, label="without noise")
    return fit_without_noise(job)


def mac_update(plan: Plan, network: Network, mac: Mac) -> MacUpdate:
    """The update of a private run."""
    return MacUpdate(plan, network, mac, plan.noise.noise_multiplier * plan.sensitivity / plan.divisor)


def rehearse_w_step(update: MacUpdate, settings: Settings) -> None:
    """Two W-steps with artificial coefficients on copies of the weights: finds failing settings before a release.

    Raises:
        InputError: a step fails, or gives weights that are not finite.
    """
    mac, network = update.mac, deepcopy(update.network)
    coefficients = Coefficients(network, row_reader(()), mac.z, mac.expansion, update.thresholds)
    nobody = LogicalBatch(0, torch.zeros(0, dtype=torch.int64), 1)
    ones = {name: torch.ones_like(value) for name, value in coefficients(nobody).sums.items()}
    try:
        optimizer = mac.w.make(network)
        schedule = settings.scheduler(optimizer) if settings.scheduler else None
        for _ in range(2):
            made = polynomials(ones, mac.expansion, coefficients.bounds(), update.layers, update.noise)
            w_step(network, made, mac.w, optimizer)
            if schedule is not None:
                schedule.step()
    except InputError:
        raise
    except Exception as error:  # torch may raise anything
        raise InputError(f"the W-step failed in a test before anything was released: {error}") from error
    if not all(bool(p.isfinite().all()) for p in network.parameters()):
        raise InputError(
            "a test of the W-step, before anything was released, gave weights that are not finite: check lr, "
            "momentum, floor and the bounds"
        )


def check_mac_plan(plan: Plan, mac: Mac, layers: int) -> None:
    """Checks that the plan is for this mechanism, and declares its thresholds."""
    parts = getattr(plan.method, "parts", None)
    if plan.method.name != "dp-mac" or parts != mac.parts(layers):
        raise InputError(f"the plan is for {plan.method.to_dict()}; this is DP-MAC with {mac.parts(layers)} parts")
    if mac.private is not None:
        declared(plan, mac.private)


def _no_loss(*_: Any) -> Tensor:
    raise InputError("DP-MAC takes no loss: its layers have their own objectives")
