"""The loop around private steps: each step updates the weights; they are regularly evaluated, logged and saved.

Formal guarantee: that of the given steps. What the loop computes from released gradients and public data is
post-processing. Readings of an instrument on private records are not, and are stored separately (`Ran.readings`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino import checks
from sordino.errors import InputError, SordinoError
from sordino.plan.core import Plan
from sordino.plan.spent import epsilon_curve
from sordino.ranks.layout import is_sharded
from sordino.records.momentum import PastIterates
from sordino.release.ledger import Ledger
from sordino.release.ledger_lines import Head
from sordino.training.callbacks import Callback
from sordino.training.metrics import MetricsLog
from sordino.training.progress import ProgressBar
from sordino.training.rehearsal import refuse_infinite, rehearse
from sordino.training.state import TrainState, load_model, model_tensors
from sordino.training.steps import DEFAULT_CHUNK, PrivateStep
from sordino.training.stopping import Stopping
from sordino.training.updates import Average, Averaging, Update

Evaluate = Callable[[nn.Module], Mapping[str, float]]


class Reader(Protocol):
    """Reads the weights during training and changes nothing (`diagnostics.instruments.Watch`)."""

    @property
    def not_private(self) -> bool:
        """Whether the readings are of private records, so that they are kept apart from the metrics."""

    def __call__(self, model: nn.Module, done: int, steps: int) -> Mapping[str, float] | None: ...


@dataclass(frozen=True)
class Settings:
    """Settings of training that the guarantee does not depend on: their effects are post-processing.

    Args:
        optimizer_options: Further arguments of the optimizer.
        scheduler: Makes a torch scheduler from the optimizer; None: a constant step size.
        averaging: The average of the iterates that is published.
        chunk: The number of records whose activations are in memory at once.
        eval_every: Steps between evaluations; 0: at the end only.
        checkpoint_every: Steps between checkpoints; 0: never.
        checkpoint_minutes: Minutes between checkpoints, if that comes first.
        seed: The seed of views and other public randomness; not of noise, sampling or dropout.
        progress: Show a progress bar; None: if standard error is a terminal.

    Raises:
        InputError: a value is out of its range.
    """

    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    averaging: Averaging = field(default_factory=Averaging)
    chunk: int = DEFAULT_CHUNK  # records in memory at once
    eval_every: int = 0  # steps between evaluations; 0: at the end only
    checkpoint_every: int = 100  # steps between checkpoints; 0: never
    checkpoint_minutes: float = 5.0  # minutes between checkpoints, if that comes first
    seed: int = 0  # of views and other public randomness; not of noise, sampling or dropout
    progress: bool | None = None  # None: if standard error is a terminal

    def __post_init__(self) -> None:
        for name in ("chunk", "eval_every", "checkpoint_every"):
            checks.whole(name, getattr(self, name), minimum=1 if name == "chunk" else 0)
        if self.scheduler is not None and not callable(self.scheduler):
            raise InputError(
                f"scheduler is a {type(self.scheduler).__name__}: give a function of the optimizer, which the run "
                "creates, such as lambda optimizer: StepLR(optimizer, step_size=100)"
            )
        if not self.checkpoint_minutes > 0:
            raise InputError(f"checkpoint_minutes = {self.checkpoint_minutes!r} must be positive")

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written; infinite minutes mean that the run can't be resumed."""
        return math.isfinite(self.checkpoint_minutes)


@dataclass(frozen=True)
class Ran:
    """What a loop returns besides the weights. `readings` are of private records: no guarantee covers them."""

    metrics: tuple[Mapping[str, float], ...]
    seconds: float
    skipped_steps: int
    readings: tuple[Mapping[str, float], ...]
    stopped_at: int | None = None


class Loop:
    """Optimizer, scheduler, average, evaluation and checkpoints around an iterator of steps."""

    def __init__(
        self,
        model: nn.Module,
        update: Update,
        settings: Settings,
        plan: Plan,
        evaluate: Evaluate | None,
        folder: Path | None,
        fingerprint: str,
        label: str = "training",
        watch: Reader | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.model, self.settings, self.steps, self.evaluate = model, settings, plan.steps, evaluate
        self.update, self.inner, self.past = update, plan.contribution.inner, PastIterates()
        self.checkpoints = folder / "checkpoint" if folder else None
        self.metrics = MetricsLog(folder / "metrics.jsonl" if folder else None)
        apart = self.checkpoints if watch is not None and watch.not_private else None  # later in not_private.json
        self.watch, self.readings = watch, MetricsLog(apart / "not_private.jsonl" if apart else None, private=True)
        self.fingerprint, self.label, self.callbacks = fingerprint, label, tuple(callbacks)
        self.sharded = is_sharded(model)
        self.ledger: Ledger | None = None  # its head is stored with each checkpoint
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise InputError("the model has no trainable parameter (requires_grad is False for all)")
        try:
            self.optimizer = update.make_optimizer(trained, settings.optimizer_options)
        except (TypeError, ValueError) as error:
            raise InputError(f"the optimizer refused its settings: {error}") from error
        try:
            self.scheduler = settings.scheduler(self.optimizer) if settings.scheduler else None
        except (TypeError, ValueError) as error:
            raise InputError(
                f"settings.scheduler failed: {error}. Give a function of the optimizer, such as "
                "lambda optimizer: StepLR(optimizer, step_size=100)"
            ) from error

    def rehearse(self) -> None:
        """Makes two updates on copies of the weights with the caller's optimizer; InputError if they fail."""
        refuse_infinite({"lr": self.update.lr, **self.settings.optimizer_options})
        if type(self.update).make_optimizer is not Update.make_optimizer:
            return  # the method's own update, whose settings it has checked
        trained = [p for p in self.model.parameters() if p.requires_grad]
        options, scheduler = self.settings.optimizer_options, self.settings.scheduler
        rehearse(
            lambda copies: self.update.make_optimizer(copies, options), trained, scheduler,
            saved=self.checkpoints is not None,
        )  # fmt: skip

    def evaluated(self) -> dict[str, float]:
        """What `evaluate` returns for the current weights: of public data, so it has no privacy cost.

        torch's generator is left as it was: a seeded run is the same with and without this evaluation.
        """
        with torch.random.fork_rng(devices=[]):
            return self._measured(None, ())  # what an update logs may not exist before the first step

    def restore(self) -> TrainState:
        """Loads the last checkpoint into model and optimizer, or returns the state before the first step.

        Metrics after that checkpoint belong to lost weights and are dropped. A ledger that lacks entries from before
        the checkpoint is refused first.
        """
        saved = self._saved()
        for log in (self.metrics, self.readings):
            log.cut(0 if saved is None else saved.step)
        if saved is None:
            return TrainState(0, {}, {}, average=self._no_average())
        load_model(self.model, saved.model)
        self.optimizer.load_state_dict(dict(saved.optimizer))
        if self.scheduler is not None and saved.scheduler is not None:
            self.scheduler.load_state_dict(dict(saved.scheduler))
        self.past = PastIterates(saved.past)
        return saved

    def _saved(self) -> TrainState | None:
        """The last checkpoint, compared with the ledger."""
        saved = TrainState.load(self.checkpoints, self.fingerprint) if self.checkpoints else None
        if saved is not None and self.ledger is not None:
            require_ledger(self.ledger, saved.step, saved.ledger)
        return saved

    def run(self, steps: Iterator[PrivateStep], state: TrainState, plan: Plan | None) -> Ran:
        """Makes the steps; the model has the published weights afterwards."""
        started = last_saved = time.monotonic()
        earlier = float(state.scalars.get("seconds", 0.0))
        spent = self._epsilon_at(plan, state.step)
        average, done, stopped_at = state.average, state.step, None
        for row, callback in product(self.metrics.rows, self.callbacks):
            callback.seen(row)
        if not done and not self.metrics.rows and not self.readings.rows:  # a resumed run has these readings already
            self._read(done)

        def save() -> None:
            if self.settings.saves and not self.sharded and done > state.step:
                self._save(state, done, average, earlier + time.monotonic() - started)

        with ProgressBar(self.steps, done, self.settings.progress, self.label) as bar, Stopping() as stopping:
            for private in _saved_on_failure(steps, save):
                self._move(private)
                done = private.step + 1
                if average is not None:
                    average = average.include(self.model, self.settings.averaging, private.step, self.steps)
                self._read(done)
                if plan is not None:
                    self._refuse_infinite(plan, done)
                if self._due(done, self.settings.eval_every):
                    seconds = earlier + time.monotonic() - started
                    try:
                        ended = self._log(done, average, spent, seconds)
                    except Exception:  # the caller's evaluation or callback failed: what was released is not lost
                        save()
                        raise
                    stopped_at = done if ended and done < self.steps else None
                minutes = (time.monotonic() - last_saved) / 60
                if self._save_now(done, minutes, stopping, stopped_at is not None):
                    self._save(state, done, average, earlier + time.monotonic() - started)
                    last_saved = time.monotonic()
                bar.advance(done, self.metrics.latest, last=stopped_at is not None)
                if (signal := self._signal(stopping)) is not None:
                    stopping.end(signal)
                if stopped_at is not None:
                    break
        seconds = earlier + time.monotonic() - started
        if not self.metrics.latest or self.metrics.latest["step"] != done or "seconds" not in self.metrics.latest:
            self._log(done, average, spent, seconds)
        self._publish(average)
        for callback in self.callbacks:
            callback.end(self.metrics.rows)
        skipped = int(state.scalars.get("skipped_steps", 0))
        return Ran(self.metrics.rows, seconds, skipped, self.readings.rows, stopped_at)

    def _move(self, private: PrivateStep) -> None:
        """Updates the weights by a step; the previous weights are kept if records need past iterates."""
        if self.inner is not None:
            self.past = self.past.followed_by(self.model, self.inner.length)
        self.update.move(private, self.optimizer)
        if self.scheduler is not None:
            self.scheduler.step()

    def _refuse_infinite(self, plan: Plan, done: int) -> None:
        """Ends a run that has diverged, so that its remaining steps are not spent.

        The weights are released values, so the decision is post-processing; where only the last iterate is published
        it would not be, and nothing is checked.
        """
        if plan.method.publishes is not None or self.sharded:
            return
        trained = [p.detach() for p in self.model.parameters() if p.requires_grad]
        if all(p.sum().isfinite() for p in trained) or all(bool(p.isfinite().all()) for p in trained):
            return
        raise SordinoError(
            f"after step {done} of {self.steps} some weights are not finite: the run has diverged, and it was ended so "
            "that the remaining steps are not spent. Try a smaller lr or momentum, in another directory"
        )

    def _read(self, done: int) -> None:
        """Adds the instruments' readings to the metrics, or stores them separately if they are of private records."""
        row = self.watch(self.model, done, self.steps) if self.watch is not None else None
        if row is not None and self.watch is not None:
            (self.readings if self.watch.not_private else self.metrics).append(row)
            if not self.watch.not_private:
                self._tell(row)

    def _due(self, done: int, every: int) -> bool:
        return every > 0 and (done % every == 0 or done == self.steps)

    def _signal(self, stopping: Stopping) -> int | None:
        """The signal that ends the run after this step."""
        return stopping.signal

    def _save_now(self, done: int, minutes: float, stopping: Stopping, ended: bool) -> bool:
        if self._signal(stopping) is not None or ended:
            return self.settings.saves
        return self._due(done, self.settings.checkpoint_every) or minutes >= self.settings.checkpoint_minutes

    def _epsilon_at(self, plan: Plan | None, start: int) -> dict[int, float]:
        """ε after each of the steps that will be evaluated."""
        every = self.settings.eval_every
        points = {done for done in range(start + 1, self.steps + 1) if every and done % every == 0} | {self.steps}
        return dict(zip(sorted(points), epsilon_curve(plan, sorted(points)), strict=True)) if plan else {}

    def _tell(self, row: Mapping[str, float]) -> bool:
        """Passes a row to every callback; returns whether one that may stop the run wants to."""
        wanted = [one for one in self.callbacks if one.told(row) and one.may_stop]
        return bool(wanted)

    def _log(self, done: int, average: Average | None, spent: Mapping[int, float], seconds: float) -> bool:
        """Evaluates and logs; returns whether a callback ends the run here."""
        row: dict[str, float] = {"step": done}
        if done in spent:
            row["epsilon"] = spent[done]
        logged = self.update.logged()
        row |= self._measured(average.values() if average is not None else None, logged) | logged
        row |= {"lr": float(self.optimizer.param_groups[0]["lr"]), "seconds": round(seconds, 3)}
        self.metrics.append(row)
        return self._tell(row)

    def _measured(self, values: Mapping[str, Tensor] | None, logged: Collection[str]) -> dict[str, float]:
        """What `evaluate` returns for these weights; None: for the model's. logged: names that the update uses."""
        if self.evaluate is None:
            return {}
        with _evaluating(self.model, values):
            found = self.evaluate(self.model)
        try:
            measured = {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise SordinoError(
                f"evaluate returned a {type(found).__name__}: it must return a dict of numbers, such as "
                '{"test_accuracy": 0.9}'
            ) from error
        if taken := sorted({"step", "epsilon", "lr", "seconds", *logged} & measured.keys()):
            raise InputError(f"evaluate returns {', '.join(taken)}, which the run itself logs: choose another name")
        return measured

    def _save(self, state: TrainState, done: int, average: Average | None, seconds: float) -> None:
        if self.checkpoints is not None:
            self._state(state, done, average, seconds).save(self.checkpoints, self.fingerprint)

    def _state(self, state: TrainState, done: int, average: Average | None, seconds: float) -> TrainState:
        """The content of a checkpoint."""
        return TrainState(
            step=done,
            model=model_tensors(self.model),
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict() if self.scheduler else None,
            average=average,
            scalars={**state.scalars, **self.update.kept(), "seconds": seconds},
            past=self.past.weights,
            ledger=None if self.ledger is None else self.ledger.head,
        )

    def _no_average(self) -> Average | None:
        return Average.empty(self.model) if self.settings.averaging.kind != "none" else None

    def _publish(self, average: Average | None) -> None:
        values = average.values() if average is not None else None
        if values is not None:
            load_model(self.model, model_tensors(self.model) | values)


def _saved_on_failure(steps: Iterator[PrivateStep], save: Callable[[], None]) -> Iterator[PrivateStep]:
    """The steps; if the caller's dataset, model or loss fails in one of them, the state before it is saved."""
    while True:
        try:
            private = next(steps, None)
        except SordinoError:
            raise
        except Exception:
            save()
            raise
        if private is None:
            return
        yield private


def require_ledger(ledger: Ledger, step: int, head: Head | None) -> None:
    """Refuses a ledger that lacks releases of the checkpoint; a killed process may leave one that has more."""
    stated_by = f"the checkpoint of step {step}"
    if head is not None:
        ledger.require_reached(head, stated_by)
    elif step > ledger.last_step("gradient") + 1:  # a version that stored no head of the ledger
        ledger.require_reached(Head(step, ""), stated_by)


@contextmanager
def _evaluating(model: nn.Module, values: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Evaluation mode, without gradients, at `values` if given; everything is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    kept = {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}
    try:
        model.eval()
        if values is not None:
            load_model(model, kept | dict(values))
        with torch.no_grad():
            yield
    finally:
        load_model(model, kept)
        for module, mode in modes:  # a layer may be in evaluation mode while the model is in training mode
            module.training = mode
