"""Callbacks: called with every row of the metrics; some may stop a run early.

    sordino.train(…, settings=Settings(eval_every=20), callbacks=[EarlyStopping("test_loss", patience=3)])

A row contains only released or public numbers (step, ε, metrics of the evaluation, step size), so whatever a callback
does with it is post-processing, and so is the decision to stop.

What an early stop costs. The plan's ε holds for the whole run, wherever it stops. The ε of the steps that were actually
made is smaller, but *when* the run stopped was decided by looking at released values, so "ε of t steps" is not a
guarantee of the mechanism. The following statement about a privacy odometer holds (Rogers, Roth, Ullman & Vadhan 2016;
ex-post privacy: Ligett, Neel, Roth, Waggoner & Wu 2017). Let the run be able to stop at K fixed steps t_1 < … < t_K,
and let ε_k be the ε of t_k steps at δ/K. For every event S,

    P[S] = Σ_k P[S, stopped at t_k] ≤ Σ_k ( exp(ε_k) P'[S, stopped at t_k] + δ/K ),

since {S, stopped at t_k} is an event of the first t_k steps. So with total failure probability δ the privacy loss of
the published values is at most ε_k, where k is the stop that occurred. That is `epsilon_spent`; `epsilon` remains the
plan's. Steps that were not made are not spent: `resume` continues with them, within the plan's ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.plan.core import Plan
from sordino.plan.guarantee import Guarantee

Row = Mapping[str, float]


class Callback:
    """The base class of callbacks; override the methods you need."""

    may_stop = False
    """Whether `told` may end the run. Only then is an early stop accounted for."""

    def check(self, names: Collection[str]) -> None:
        """Called before anything is spent; raises InputError if a metric is missing.

        Args:
            names: The names of the metrics that `evaluate` returns.
        """

    def begin(self, plan: Plan, guarantee: Guarantee) -> None:
        """Called before the first step.

        Args:
            plan: The plan of the run.
            guarantee: Its guarantee.
        """

    def told(self, row: Row) -> bool | None:
        """Called with each row of the metrics; returning True ends the run if `may_stop` is set.

        Args:
            row: The metrics of one evaluation.
        """
        return None

    def seen(self, row: Row) -> None:
        """Called with the rows of the earlier part of a resumed run, at which it can't stop any more.

        Args:
            row: The metrics of one evaluation.
        """
        self.told(row)

    def end(self, rows: Sequence[Row]) -> None:
        """Called after the last step, also of a stopped run.

        Args:
            rows: All rows of the run.
        """

    def failed(self) -> None:
        """Called instead of `end` if the run ends by an error or a signal."""


@dataclass
class EarlyStopping(Callback):
    """Ends a run when a metric of public or held-out data has not improved for `patience` evaluations.

    Args:
        metric: The name of a metric that `evaluate` returns.
        patience: The number of evaluations without improvement.
        larger: Whether larger values are better; None: yes for names that end in "accuracy".
        least: The smallest change that counts as an improvement.
    """

    metric: str = "test_loss"
    patience: int = 3
    larger: bool | None = None
    least: float = 0.0

    may_stop = True

    def __post_init__(self) -> None:
        checks.whole("patience", self.patience, minimum=1)
        self._best, self._waited = -math.inf, 0

    def check(self, names: Collection[str]) -> None:
        if self.metric not in names:
            given = ", ".join(names) or "nothing"
            raise InputError(f"early stopping needs the metric {self.metric!r}, but evaluate returns {given}")

    def told(self, row: Row) -> bool:
        if self.metric not in row:
            return False  # a row of an instrument, not of an evaluation
        larger = self.metric.endswith("accuracy") if self.larger is None else self.larger
        value = float(row[self.metric]) if larger else -float(row[self.metric])
        if value > self._best + self.least:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._waited >= self.patience


@contextmanager
def told_of_failure(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Calls `failed` of every callback if the block raises."""
    try:
        yield
    except BaseException:  # also a signal
        for callback in callbacks:
            callback.failed()
        raise


class AtStart(Callback):
    """Calls a function with the plan before the first step, after all checks.

    Args:
        function: A function of the plan.
    """

    def __init__(self, function: Callable[[Plan], None]) -> None:
        self._function = function

    def begin(self, plan: Plan, guarantee: Guarantee) -> None:
        self._function(plan)


class _Function(Callback):
    """A function of the row; if it returns True the run ends."""

    may_stop = True

    def __init__(self, function: Callable[[Row], bool | None]) -> None:
        self._function = function

    def told(self, row: Row) -> bool | None:
        return self._function(row)

    def seen(self, row: Row) -> None:
        """A function has no state to restore from earlier rows."""


def check_evaluation(job: Any) -> None:
    """Evaluates once, before anything is spent, so that an evaluation that fails does so now; callbacks see its names.

    Not if it follows the first step anyway, or may need statistics that are released later, unless a callback asks.
    """
    asked = any(type(callback).check is not Callback.check for callback in job.callbacks)
    if asked or (job.evaluate is not None and job.settings.eval_every != 1 and not job.plan.statistics):
        names = job.loop().evaluated()
        for callback in job.callbacks:
            callback.check(names)


def checked(callbacks: Iterable[Any], plan: Plan, eval_every: int) -> tuple[Callback, ...]:
    """The callbacks, with functions wrapped.

    Raises:
        InputError: one is neither a Callback nor a function, or may stop a run that is not evaluated.
        Refused: a stop could not be accounted for.
    """
    given = tuple(callbacks)
    made = tuple(one if isinstance(one, Callback) else _Function(one) for one in given)
    if any(isinstance(one, type) or not (isinstance(one, Callback) or callable(one)) for one in given):
        raise InputError("callbacks must be instances of sordino.training.Callback, or functions of a metrics row")
    if not any(one.may_stop for one in made):
        return made
    if plan.method.publishes is not None:
        raise Refused(
            f"the guarantee of {plan.method.name} covers {plan.method.publishes} only: nothing may be observed before "
            "the end of the run, so no callback can stop it"
        )
    if not eval_every:
        raise InputError(
            "a callback that may stop the run is called after each evaluation: give Settings(eval_every=…), the steps "
            "between two evaluations"
        )
    return made


def epsilon_spent(plan: Plan, done: int, eval_every: int) -> float:
    """ε of a run that was stopped after `done` steps by looking at released values (an upper bound, ex post).

    `eval_every`: the run could stop at each multiple of it and at the end.
    """
    points = math.ceil(plan.steps / eval_every)
    return plan.method.epsilons(replace(plan, delta=plan.delta / points), [done])[0]


def stopped(guarantee: Guarantee, plan: Plan, done: int, eval_every: int) -> Guarantee:
    """The plan's guarantee with the ε that was actually spent."""
    spent = epsilon_spent(plan, done, eval_every)
    return replace(guarantee, beside={**guarantee.beside, "epsilon_spent": spent, "steps_made": done})
