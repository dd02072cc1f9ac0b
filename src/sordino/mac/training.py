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

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino.accounting import epsilon_curve
from sordino.errors import InputError
from sordino.gradients import ClippedSum
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
from sordino.sampling import LogicalBatch
from sordino.state import TrainState, load_model, model_tensors
from sordino.steps import PrivateStep, check_records, count_records, plan_batches, private_steps, row_reader
from sordino.training import Evaluate, Result, Settings
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


@dataclass
class _Walk:
    """Where a run is: what changes from step to step."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    log: MetricsLog
    spent: Mapping[int, float]  # ε after each step that is evaluated
    average: Average | None
    bounds: Bounds | None
    skipped: int
    earlier: float  # seconds before the last resume
    dropped: int = 0
    began: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return self.earlier + time.monotonic() - self.began


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
        walk, start = self._begin(done if source.secure else 0)
        records = count_records(dataset)
        with ProgressBar(self.plan.steps, start, self.settings.progress, "DP-MAC") as bar:
            for first, last in self._segments(start):
                coefficients = Coefficients(
                    self.network, row_reader(dataset), self.mac.z, self.mac.expansion, walk.bounds
                )
                walk.bounds = self._thresholds(coefficients, first, records, source, ledger)
                counted = _Counter(replace(coefficients, thresholds=walk.bounds))
                for private in islice(self._steps(counted, records, source, ledger, first), last - first):
                    self._update(private, counted.coefficients, walk.optimizer)
                    self._after(private.step, walk)
                    bar.advance(private.step + 1, walk.log.latest)
                walk.dropped += counted.dropped
        return self._end(walk)

    def _begin(self, released: int) -> tuple[_Walk, int]:
        """The state to go on from, and the first step to make: never one that secure noise has released already."""
        optimizer = self.mac.w.make(self.network)
        scheduler = self.settings.scheduler(optimizer) if self.settings.scheduler else None
        state = self._restore(optimizer, scheduler)
        start = max(state.step, released)
        log = MetricsLog(self.out / "metrics.jsonl" if self.out else None)
        log.cut(start)
        walk = _Walk(
            optimizer=optimizer,
            scheduler=scheduler,
            log=log,
            spent=self._epsilons(start),
            average=state.average,
            bounds=state.scalars.get("bounds", self.mac.start(len(self.network.layers))),
            skipped=int(state.scalars.get("skipped_steps", 0)) + start - state.step,
            earlier=float(state.scalars.get("seconds", 0.0)),
        )
        return walk, start

    def _after(self, step: int, walk: _Walk) -> None:
        """Schedule, average, evaluation and checkpoint after the update of a step."""
        if walk.scheduler is not None:
            walk.scheduler.step()
        made = step + 1
        if walk.average is not None:
            walk.average = walk.average.include(self.network, self.settings.averaging, step, self.plan.steps)
        if self._due(made, self.settings.eval_every) or made == self.plan.steps:
            self._log(walk, made)
        overdue = time.monotonic() - walk.saved >= 60 * self.settings.checkpoint_minutes
        if self._due(made, self.settings.checkpoint_every) or overdue:
            self._save(walk, made)
            walk.saved = time.monotonic()

    def _end(self, walk: _Walk) -> Result:
        """The published weights, in the network; a run whose last steps were skipped is still evaluated."""
        if not walk.log.latest or walk.log.latest["step"] != self.plan.steps:
            self._log(walk, self.plan.steps)
        values = walk.average.values() if walk.average is not None else None
        if values is not None:
            load_model(self.network, model_tensors(self.network) | values)
        guarantee, dropped = self.plan.guarantee(), {"dropped_records": walk.dropped}
        return Result(self.network, guarantee, walk.log.rows, walk.seconds, walk.skipped, dropped)

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

    def _log(self, walk: _Walk, made: int) -> None:
        row: dict[str, float] = {"step": made}
        if made in walk.spent:
            row["epsilon"] = walk.spent[made]
        if self.evaluate is not None:
            with averaged(self.network, walk.average):
                row |= {name: float(value) for name, value in self.evaluate(self.network).items()}
        lr = float(walk.optimizer.param_groups[0]["lr"])
        walk.log.append(row | {"lr": lr, "seconds": round(walk.seconds, 3)})

    def _restore(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> TrainState:
        saved = TrainState.load(self.out / "checkpoint", self._fingerprint()) if self.out else None
        if saved is None:
            averaging = self.settings.averaging.kind != "none"
            return TrainState(0, {}, {}, average=Average.empty(self.network) if averaging else None)
        load_model(self.network, saved.model)
        optimizer.load_state_dict(dict(saved.optimizer))
        if scheduler is not None and saved.scheduler is not None:
            scheduler.load_state_dict(dict(saved.scheduler))
        return saved

    def _save(self, walk: _Walk, made: int) -> None:
        if self.out is not None:
            TrainState(
                step=made,
                model=model_tensors(self.network),
                optimizer=walk.optimizer.state_dict(),
                scheduler=walk.scheduler.state_dict() if walk.scheduler else None,
                average=walk.average,
                scalars={"seconds": walk.seconds, "skipped_steps": walk.skipped, "bounds": walk.bounds},
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

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        total = self.coefficients(batch)
        self.dropped += total.dropped
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
