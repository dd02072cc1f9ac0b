"""The use of public rows in a run of private steps, and the update for it.

Formal guarantee. Everything below is a function of public rows and of values that were released before; the private
sums pass through `private_steps` and its `release()` unchanged. If public values enter *before* the noise (centring,
thresholds), a record's contribution is still clipped by the plan's clipping afterwards (docs/guarantees/coupling.md).

A killed run is resumed as any other: the public batch of a step is a function of (seed, step), and what a rule computed
at an earlier step is stored in the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sordino import checks
from sordino.clipping import Clipping
from sordino.errors import InputError, Refused
from sordino.gradients import ClippedSum, Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.rows import placed
from sordino.gradients.shards import Shards
from sordino.gradients.spectral import advance
from sordino.methods.coupling.estimates import Gradient, gradient_and_norms, mean_gradient, quantile_of_norms
from sordino.methods.coupling.weights import BY_NUMBERS, LeastError, Rule, Situation, Weight
from sordino.plan.contribution import Contribution
from sordino.plan.core import Plan
from sordino.plan.public import refuse_shared_rows, split_public
from sordino.records.chunks import LONGEST_SUM, rising, stable_chunks
from sordino.records.gradients import in_parts, total_of
from sordino.records.momentum import PastIterates
from sordino.records.reading import row_reader, splits, tensors_of
from sordino.sampling import LogicalBatch
from sordino.split import Split
from sordino.training.steps import PrivateStep
from sordino.training.updates import DividedModel, Running, Update

if TYPE_CHECKING:
    from sordino.methods.coupling.method import Coupling


@dataclass(frozen=True)
class WarmUp:
    """SGD on public rows before the first private step.

    Args:
        steps: The number of steps.
        lr: The step size.
        momentum: The momentum, in [0, 1).
    """

    steps: int
    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.count("warm_up", self.steps)
        checks.positive("warm_up_lr", self.lr)
        checks.within("warm_up_momentum", self.momentum, 0, 1, open_high=True)


@dataclass(frozen=True)
class PublicUse:
    """The use of the public rows in a plan of `methods.coupling`. None of it changes ε.

    Args:
        rows: The public rows.
        rule: How the weight of the public gradient is chosen.
        expected_batch: The number of public rows in a step; None: as many as private ones.
        warm_up: Training on the public rows before the first private step; None: none.
        projection: The released gradient of the last linear layer is projected onto that many directions of the
            public one; None: it is not.
        seed: The public seed of public batches.

    Raises:
        InputError: a value is wrong.
    """

    rows: Split
    rule: Rule = field(default_factory=LeastError)
    expected_batch: int | None = None
    warm_up: WarmUp | None = None
    projection: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("expected_batch", "projection"):
            if getattr(self, name) is not None:
                checks.count(name, getattr(self, name))
        checks.count("seed", self.seed, minimum=0)

    def to_dict(self) -> dict[str, Any]:
        """Everything except the rows, for the checkpoint's fingerprint."""
        options = {"rule": self.rule.name, "options": repr(self.rule), "warm_up": repr(self.warm_up)}
        return options | {key: getattr(self, key) for key in ("expected_batch", "projection", "seed")}


class CoupledUpdate(Update):
    """The use of public rows in one run: what is summed, and what is done with every released step."""

    def __init__(self, use: PublicUse, plan: Plan, model: nn.Module, loss: Any) -> None:
        super().__init__(plan, model, loss)
        self.use = use
        if not plan.method.combines_public or plan.public is None:
            raise Refused(
                f"public rows are used by plans of the method coupling, and this plan's method is {plan.method.name}: "
                "make it with sordino.coupling, which declares them"
            )
        plan.public.check(use.rows)
        self.method: Coupling = plan.method  # type: ignore[assignment]
        if self.method.centring and isinstance(use.rule, LeastError):
            raise Refused(
                "the mse rule is derived for gradients that are not centred: with centring give alpha or another rule"
            )
        self.rows, self.held_back = _apart(use)
        self.batch = min(use.expected_batch or max(1, round(plan.expected_batch)), len(self.rows))
        self.projected = _last_linear(model) if use.projection is not None else None
        self._kept: Weight | None = None
        self._public: tuple[int, _Public] | None = None
        self._shards: DividedModel | None = None

    def divide(self, shards: DividedModel) -> None:
        """Refuses uses of public rows that need whole gradients."""
        whole = {
            "centring": self.method.centring,
            "quantile": self.method.quantile is not None,
            "projection": self.use.projection is not None,
            f"the rule {self.use.rule.name}": not isinstance(self.use.rule, BY_NUMBERS),
        }
        if any(whole.values()):
            raise Refused(
                f"coupling of a sharded model: {', '.join(name for name, given in whole.items() if given)} would need "
                f"whole gradients on every rank. Use one of the rules {', '.join(kind.name for kind in BY_NUMBERS)}, "
                "or train a model that is not sharded"
            )
        self._shards = shards

    def check(self, dataset: Any) -> None:
        """InputError if a private row is among the public ones."""
        pair = tensors_of(dataset)
        whole = pair is not None and isinstance(pair[0], Tensor)
        for rows in [Split(*pair)] if pair is not None and whole else splits(dataset):
            if isinstance(rows.inputs, Tensor):  # rows of another structure can't be rows of the public tensor
                refuse_shared_rows(self.use.rows, rows)

    def begin(self, scalars: Mapping[str, Any], running: Running | None) -> None:
        """Makes the warm-up at the start, or restores the values of a checkpoint."""
        if "alpha" in scalars:
            self._kept = Weight(float(scalars["alpha"]), float(scalars["private_scale"]))
        elif self.use.warm_up is not None:
            self._warm_up(self.use.warm_up)

    def logged(self) -> dict[str, float]:
        """The weight of the public gradient."""
        kept = self._kept
        return {} if kept is None else {"alpha": kept.alpha, "private_scale": kept.scale}

    def gradient_sum(
        self, dataset: Any, *, past: Callable[[], PastIterates] = PastIterates, seed: int = 0
    ) -> CoupledGradients:
        """The clipped sum of private batches, centred or scaled by the current public gradient."""
        return CoupledGradients(self, row_reader(dataset))

    def combined(self, private: PrivateStep) -> PrivateStep:
        """α · public + (1 − α) · private at the same weights: post-processing of a released gradient."""
        known = self._public
        public = known[1] if known is not None and known[0] == private.step else self.public(private.step)
        self._public = None
        weight = self._weight(private.step, public.scale)
        factor = weight.scale / public.scale
        gradients = {}
        for name, released in private.gradients.items():
            ours = public.gradient[name].to(released.dtype)
            theirs = self._projected(name, released, ours) * factor
            if self.method.centring:
                theirs = theirs + ours * (self.plan.expected_batch / self.plan.divisor)
            gradients[name] = theirs.mul_(1 - weight.alpha).add_(ours, alpha=weight.alpha)
        return PrivateStep(private.step, gradients)

    def public(self, step: int) -> _Public:
        """The public gradient at the current weights, and the factor on records before clipping."""
        rows = self._rows(step, "batch", self.batch)
        with _seeded(self.use.seed, step):
            if self.method.quantile is None:
                return _Public(mean_gradient(self.model, self.loss, rows, self._shards)[0], 1.0)
            gradient, norms = gradient_and_norms(self.model, self.loss, rows)
        clip_norm = self.plan.clipping.clip_norm
        return _Public(gradient, clip_norm / quantile_of_norms(norms, self.method.quantile, clip_norm))

    def for_sum(self, step: int) -> _Public:
        """`public`, stored for the released sum of this step."""
        found = self.public(step)
        self._public = (step, found)
        return found

    def _weight(self, step: int, scale: float) -> Weight:
        every = self.use.rule.every
        if self._kept is None or (every and step % every == 0):
            at = Situation(
                plan=self.plan, step=step, public_records=len(self.rows), public_batch=self.batch,
                model=self.model, loss=self.loss, scale=scale,
                draw=lambda count: self._rows(step, "estimate", count),
                held_back=None if self.held_back is None else partial(self._rows, step, "held back"),
            )  # fmt: skip
            with _seeded(self.use.seed, step):
                self._kept = self.use.rule.weight(at)
        return self._kept

    def _projected(self, name: str, released: Tensor, public: Tensor) -> Tensor:
        """The released gradient of the last layer, projected onto the public one's leading input directions."""
        if name != self.projected:
            return released
        rank = min(self.use.projection or 0, *public.shape)
        basis = torch.linalg.svd(public.double(), full_matrices=False).Vh[:rank].to(released.dtype)
        kept: Tensor = (released @ basis.mT) @ basis
        return kept

    def _warm_up(self, warm_up: WarmUp) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=warm_up.lr, momentum=warm_up.momentum)
        for step in range(warm_up.steps):
            with _seeded(self.use.seed, -1 - step):
                rows = self._rows(step, "warm-up", self.batch)
                PrivateStep(step, mean_gradient(self.model, self.loss, rows, self._shards)[0]).assign(self.model)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _rows(self, step: int, purpose: str, count: int) -> Rows:
        """`count` public rows without replacement: a function of (seed, purpose, step)."""
        rows = self.held_back if purpose == "held back" and self.held_back is not None else self.rows
        if count >= len(rows):
            return placed(Rows(rows.inputs, rows.targets), self.model)
        generator = torch.Generator().manual_seed(_address(self.use.seed, purpose, step))
        at = torch.randperm(len(rows), generator=generator)[:count]
        return placed(Rows(rows.inputs[at], rows.targets[at]), self.model)


@dataclass(frozen=True)
class _Public:
    gradient: Gradient
    scale: float


@dataclass(frozen=True, eq=False)
class CoupledGradients:
    """Σ clip(scale · (g_i − centre)), by the plan's clipping, chunk by chunk; scale and centre are public."""

    update: CoupledUpdate
    fetch: Any
    assurance: Assurance = field(default_factory=Assurance, repr=False)
    shards: Shards | None = field(default=None, repr=False)
    most: int = LONGEST_SUM

    @property
    def clipping(self) -> Clipping:
        return self.update.plan.clipping

    @property
    def contribution(self) -> Contribution:
        return Contribution()

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        self.prepare()
        return total_of(self.update.model, self.parts(batch, torch.initial_seed()))

    def prepare(self) -> None:
        """Prepares the model once before the chunks of a batch."""
        advance(self.update.model)

    def pieces(self, batch: LogicalBatch) -> Sequence[Tensor]:
        """The records of each chunk."""
        return stable_chunks(batch, self.most)

    def rows(self, indices: Tensor, step: int) -> Rows:
        """The rows of these records."""
        return placed(self.fetch(indices, step), self.update.model)

    def over(self, shards: Shards, most: int) -> CoupledGradients:
        """The same sum for a model whose parameters are divided over processes."""
        return replace(self, shards=shards, most=min(most, self.most))

    def parts(self, batch: LogicalBatch, seed: int) -> list[Callable[[], ClippedSum]]:
        """One function for each chunk; every process that calls some of them has the same public rows and weights."""
        update, centre, scale = self.update, None, 1.0
        if update.method.centring or update.method.quantile is not None:
            public = update.for_sum(batch.step)
            scale = public.scale
            centre = {k: scale * v for k, v in public.gradient.items()} if update.method.centring else None

        def sum_of(indices: Tensor) -> ClippedSum:
            rows, keys = self.fetch(indices), indices if rising(indices) else None
            if scale != 1.0:
                rows = replace(rows, coefficient=torch.full((len(indices),), scale))
            rows = placed(rows, update.model)
            return clipped_sum(
                update.model, update.loss, rows, self.clipping, centre=centre, assurance=self.assurance, keys=keys,
                shards=self.shards,
            )  # fmt: skip

        return in_parts(self.pieces(batch), sum_of, self.clipping, len(batch), seed)


def _apart(use: PublicUse) -> tuple[Split, Split | None]:
    """(rows for public gradients, rows that the rule holds back for its estimates)."""
    share = getattr(use.rule, "held_back", 0.0)
    if not share:
        return use.rows, None
    count = round(share * len(use.rows))
    if not 2 <= count < len(use.rows):
        raise InputError(
            f"{count} of {len(use.rows)} public rows would be held back for estimates: it must be at least two, and "
            "not all; change held_back, or use a rule that estimates nothing"
        )
    held, stepped = split_public(use.rows, records=count, seed=use.seed)
    return stepped, held


def _last_linear(model: nn.Module) -> str:
    """The weight of the last trainable linear layer."""
    found = [
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    ]
    if not found:
        raise InputError("projection needs a trainable linear layer, and the model has none: leave it out")
    return found[-1]


def _address(seed: int, purpose: str, step: int) -> int:
    digest = hashlib.sha256(f"sordino/coupling/{seed}/{purpose}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def _seeded(seed: int, step: int) -> Iterator[None]:
    """Makes the dropout of a public pass a function of (seed, step), without affecting private passes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_address(seed, "dropout", step))
        yield
