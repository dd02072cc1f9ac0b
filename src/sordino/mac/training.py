"""The DP-MAC loop: Z-steps, one release of all coefficients, W-steps; evaluation, checkpoints, resume.

Formal guarantee: everything this module writes or returns, but for the `not_private` field of the result, is a
function of values released through `sordino.release` under the plan (and of public data), so `plan.guarantee()` holds
for all of it together. Killed and resumed it behaves as `sordino.train` does: with an insecure seed steps are made
again bit for bit, with secure noise the steps that the ledger holds but whose update was lost are skipped, and lost
thresholds are done without.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sordino.accounting import epsilon_curve
from sordino.errors import InputError
from sordino.ledger import Ledger
from sordino.mac.coefficients import Bounds, Coefficients, Expansion, fixed_bounds, polynomials
from sordino.mac.network import Network
from sordino.mac.optimise import WSteps, w_step
from sordino.mac.thresholds import PURPOSE, PrivateThresholds, declared, measure
from sordino.mac.zsteps import ZSteps
from sordino.metrics import MetricsLog
from sordino.plan import Plan
from sordino.progress import ProgressBar
from sordino.randomness import RandomSource
from sordino.state import TrainState, load_model, model_tensors
from sordino.steps import PrivateStep, check_records, count_records, plan_batches, private_steps, row_reader
from sordino.train import Evaluate, Result, Settings
from sordino.updates import Average

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Mac:
    """How DP-MAC trains. `bounds[part]`: a public threshold for all layers, or one for each (not with "analytic")."""

    z: ZSteps = field(default_factory=ZSteps)
    expansion: Expansion = field(default_factory=Expansion)
    w: WSteps = field(default_factory=WSteps)
    bounds: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    private: PrivateThresholds | None = None

    def __post_init__(self) -> None:
        if self.expansion.bounding != "clip" and (self.bounds or self.private):
            raise InputError(f"bounds and private thresholds belong to clipping, not to {self.expansion.bounding!r}")
        if self.w.optimizer == "cg" and self.expansion.order != 2:
            raise InputError("conjugate gradients need order = 2: a linear polynomial has no minimum")

    def parts(self, layers: int) -> int:
        return layers * len(self.expansion.parts)

    def start(self, layers: int) -> Bounds | None:
        """The bounds of the first step; None where they follow from the weights."""
        if self.expansion.bounding == "analytic":
            return None
        return fixed_bounds(layers, self.expansion, self.bounds)


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
) -> Result:
    """Trains `network` in place under a DP-MAC plan. `dataset`: records (n, in) and targets (n, out).

    `source`: where it was needed before (DP-PCA in the same run), else the plan's own.
    """
    settings = settings or Settings()
    check_mac_plan(plan, mac, len(network.layers))
    check_records(plan, count_records(dataset))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run = _Run(network, plan, mac, settings, evaluate, out)
    with Ledger.open(out / "ledger.jsonl" if out else None, plan.to_dict()) as ledger:
        return run.go(dataset, source or plan.source(), ledger, resume)


def check_mac_plan(plan: Plan, mac: Mac, layers: int) -> None:
    """The plan must be of this very mechanism, and pay for its thresholds."""
    parts = getattr(plan.method, "parts", None)
    if plan.method.name != "dp-mac" or parts != mac.parts(layers):
        raise InputError(f"the plan is for {plan.method.to_dict()}; this is DP-MAC with {mac.parts(layers)} parts")
    if mac.private is not None:
        declared(plan, mac.private)


@dataclass(frozen=True)
class _Run:
    network: Network
    plan: Plan
    mac: Mac
    settings: Settings
    evaluate: Evaluate | None
    out: Path | None

    def go(self, dataset: Data, source: RandomSource, ledger: Ledger, resume: bool) -> Result:
        done = ledger.last_step("gradient") + 1
        if done and not resume:
            raise InputError(f"{self.out} holds a run already: resume it, or give another directory")
        optimizer = self.mac.w.make(self.network)
        scheduler = self.settings.scheduler(optimizer) if self.settings.scheduler else None
        state = self._restore(optimizer, scheduler)
        start = max(state.step, done) if source.secure else state.step
        skipped = int(state.scalars.get("skipped_steps", 0)) + start - state.step
        bounds: Bounds | None = state.scalars.get("bounds", self.mac.start(len(self.network.layers)))
        log = MetricsLog(self.out / "metrics.jsonl" if self.out else None)
        log.cut(start)
        spent = self._epsilons(start)
        average, began, saved = state.average, time.monotonic(), time.monotonic()
        earlier, dropped = float(state.scalars.get("seconds", 0.0)), 0
        with ProgressBar(self.plan.steps, start, self.settings.progress, "DP-MAC") as bar:
            for first, last in self._segments(start):
                coefficients = self._coefficients(dataset, bounds)
                bounds = self._thresholds(coefficients, first, len(dataset[1]), source, ledger)
                counted = _Counter(replace(coefficients, thresholds=bounds))
                for private in islice(self._steps(counted, len(dataset[1]), source, ledger, first), last - first):
                    self._update(private, counted.coefficients, optimizer)
                    if scheduler is not None:
                        scheduler.step()
                    made = private.step + 1
                    if average is not None:
                        average = average.include(self.network, self.settings.averaging, private.step, self.plan.steps)
                    seconds = earlier + time.monotonic() - began
                    if self._due(made, self.settings.eval_every) or made == self.plan.steps:
                        self._log(log, made, average, spent, optimizer, seconds)
                    overdue = time.monotonic() - saved >= 60 * self.settings.checkpoint_minutes
                    if self._due(made, self.settings.checkpoint_every) or overdue:
                        scalars = {"seconds": seconds, "skipped_steps": skipped, "bounds": bounds}
                        self._save(made, optimizer, scheduler, average, scalars)
                        saved = time.monotonic()
                    bar.advance(made, log.latest)
                dropped += counted.dropped
        if not log.latest or log.latest["step"] != self.plan.steps:
            self._log(log, self.plan.steps, average, spent, optimizer, earlier + time.monotonic() - began)
        values = average.values() if average is not None else None
        if values is not None:
            load_model(self.network, model_tensors(self.network) | values)
        return Result(
            self.network, self.plan.guarantee(), log.rows, earlier + time.monotonic() - began, skipped,
            {"dropped_records": dropped},
        )  # fmt: skip

    def _segments(self, start: int) -> Iterator[tuple[int, int]]:
        """(first, last) of the steps between two measurements of thresholds."""
        every = self.plan.steps if self.mac.private is None else self.mac.private.every
        while start < self.plan.steps:
            end = min(self.plan.steps, (start // every + 1) * every)
            yield start, end
            start = end

    def _thresholds(
        self, coefficients: Coefficients, step: int, records: int, source: RandomSource, ledger: Ledger
    ) -> Bounds | None:
        """The bounds from `step` on: measured anew where the schedule says so, and kept where that was lost."""
        private = self.mac.private
        if private is None or step % private.every:
            return coefficients.thresholds
        number = step // private.every
        if source.secure and ledger.last_step(PURPOSE) >= number:
            return coefficients.thresholds
        return measure(
            self.plan, coefficients, private, number, records=records, source=source, ledger=ledger,
            chunk=self.settings.chunk,
        )  # fmt: skip

    def _coefficients(self, dataset: Data, bounds: Bounds | None) -> Coefficients:
        return Coefficients(self.network, row_reader(dataset), self.mac.z, self.mac.expansion, bounds)

    def _steps(
        self, counted: _Counter, records: int, source: RandomSource, ledger: Ledger, start: int
    ) -> Iterator[PrivateStep]:
        return private_steps(
            self.plan, counted, records=records, source=source, ledger=ledger, chunk=self.settings.chunk, start=start
        )

    def _update(self, private: PrivateStep, coefficients: Coefficients, optimizer: Optimizer) -> None:
        noise = self.plan.noise.noise_multiplier * self.plan.sensitivity / self.plan.divisor
        layers = len(self.network.layers)
        noisy = polynomials(private.gradients, self.mac.expansion, coefficients.bounds(), layers, noise)
        w_step(self.network, noisy, self.mac.w, optimizer)

    def _due(self, made: int, every: int) -> bool:
        return every > 0 and made % every == 0

    def _epsilons(self, start: int) -> dict[int, float]:
        every, steps = self.settings.eval_every, self.plan.steps
        points = sorted({t for t in range(start + 1, steps + 1) if every and t % every == 0} | {steps})
        return dict(zip(points, epsilon_curve(self.plan, points), strict=True))

    def _log(
        self, log: MetricsLog, made: int, average: Average | None, spent: Mapping[int, float], optimizer: Optimizer,
        seconds: float,
    ) -> None:  # fmt: skip
        row: dict[str, float] = {"step": made}
        if made in spent:
            row["epsilon"] = spent[made]
        if self.evaluate is not None:
            with averaged(self.network, average):
                row |= {name: float(value) for name, value in self.evaluate(self.network).items()}
        log.append(row | {"lr": float(optimizer.param_groups[0]["lr"]), "seconds": round(seconds, 3)})

    def _restore(self, optimizer: Optimizer, scheduler: Any) -> TrainState:
        saved = TrainState.load(self.out / "checkpoint", self._fingerprint()) if self.out else None
        if saved is None:
            averaging = self.settings.averaging.kind != "none"
            return TrainState(0, {}, {}, average=Average.empty(self.network) if averaging else None)
        load_model(self.network, saved.model)
        optimizer.load_state_dict(dict(saved.optimizer))
        if scheduler is not None and saved.scheduler is not None:
            scheduler.load_state_dict(dict(saved.scheduler))
        return saved

    def _save(
        self, made: int, optimizer: Optimizer, scheduler: Any, average: Average | None, scalars: Mapping[str, Any]
    ) -> None:
        if self.out is not None:
            TrainState(
                step=made,
                model=model_tensors(self.network),
                optimizer=optimizer.state_dict(),
                scheduler=scheduler.state_dict() if scheduler else None,
                average=average,
                scalars=scalars,
            ).save(self.out / "checkpoint", self._fingerprint())

    def _fingerprint(self) -> str:
        document = {
            "plan": self.plan.to_dict(), "mac": asdict(self.mac), "averaging": repr(self.settings.averaging),
            "seed": self.settings.seed, "widths": self.network.widths, "activations": self.network.activations,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class _Counter:
    """Coefficients that count the records dropped on the way. It keeps the declared clipping, which the door checks."""

    def __init__(self, coefficients: Coefficients) -> None:
        self.coefficients, self.clipping, self.dropped = coefficients, coefficients.clipping, 0

    def __call__(self, batch: Any) -> Any:
        total = self.coefficients(batch)
        self.dropped += int(total.dropped)
        return total


@contextmanager
def averaged(network: Network, average: Average | None) -> Iterator[None]:
    """The network at the average of its iterates, without gradients; put back afterwards."""
    values = average.values() if average is not None else None
    kept = {name: tensor.detach().clone() for name, tensor in model_tensors(network).items()}
    try:
        if values is not None:
            load_model(network, kept | values)
        with torch.no_grad():
            yield
    finally:
        load_model(network, kept)


def train_mac_without_privacy(
    network: Network,
    dataset: Data,
    plan: Plan,
    mac: Mac,
    *,
    settings: Settings | None = None,
    evaluate: Callable[[Network], Mapping[str, float]] | None = None,
) -> list[dict[str, float]]:
    """MAC with the same sampling and Z-steps, its coefficients neither bounded nor noisy: NO guarantee.

    For public data only: a yardstick.
    """
    settings = settings or Settings()
    optimizer = mac.w.make(network)
    scheduler = settings.scheduler(optimizer) if settings.scheduler else None
    # no bound: far beyond any coefficient, so that nothing is clipped
    free = {f"layers.{k}.{part}": 2.0**40 for k in range(len(network.layers)) for part in mac.expansion.parts}
    expansion = replace(mac.expansion, bounding="clip")
    coefficients = Coefficients(network, row_reader(dataset), mac.z, expansion, free)
    rows: list[dict[str, float]] = []
    source = RandomSource.seeded(settings.seed)
    for batch in plan_batches(plan, records=len(dataset[1]), source=source, chunk=settings.chunk):
        sums = {name: value / plan.divisor for name, value in coefficients(batch).sums.items()}
        w_step(network, polynomials(sums, expansion, free, len(network.layers), 0.0), mac.w, optimizer)
        if scheduler is not None:
            scheduler.step()
        made = batch.step + 1
        if evaluate is not None and (made == plan.steps or (settings.eval_every and made % settings.eval_every == 0)):
            with torch.no_grad():
                rows.append({"step": made, **{name: float(v) for name, v in evaluate(network).items()}})
    return rows
