"""Composition or hidden state? Recommends the accounting, and how to train, for a linear classifier.

The privacy side is exact: every ε is that of the accountants. Which is *better* is an estimate, without data: each is
taken as the planner would propose to train it (`training` by the rule of `linear_rule`, `hidden_training` by that of
`hidden_rule`), and the points of accuracy that either may lose to noise and to limited training are compared, for the
easiest and for the hardest of the tasks on which the rules were made. Hidden state, which needs a certificate and
secrecy, is recommended if it is expected to be better by more than a point on both; otherwise composition is.

`hidden_state` and `composition` are the best settings of runs that clip nothing, for the theory: they show how the
accountants compare (`crossing_epochs`, `curves`) and have no part in the recommendation. Their model of the excess loss
of a linear classifier trained from 0:

    noise  ½·tr(H)·ν², ν: deviation of the last iterate per weight; tr(H) ≤ (1 − 1/classes)·R² for softmax.
           At most (weights)·s²/(4η), the stationary value along directions of high curvature
    bias   max over h of ½·h·W²·(1 − h/(h+λ)·(1 − e^{−(h+λ)·ηT}))²: the loss from λ and from stopping early, for weights
           of norm W along the worst curvature h. You choose W: weights of that norm solve the problem well

R² = L² + 1 is the squared norm of a record with its bias; M = curvature·R² + λ and S_g = 2·slope·R (softmax: 1/2, √2).
Hidden state minimises over λ, batch, epochs and step size with a certified loss; composition over the latter three
with λ = 0. A certificate bounds the step size of the hidden state by 2/M. Composition needs none: its step size is
bounded by stability where training begins, at equal predictions, where the curvature of softmax is 1/classes.
With a pace, settings have whole epochs that fit the time; one epoch if none does.
Epochs cost time: a setting has the fewest epochs whose excess loss is within a fifth of the least. Relation:
replace-one, for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from sordino import checks
from sordino.accounting.account import account, composed_epsilon
from sordino.accounting.calibration import calibrate, gaussian_guess, noise_guess
from sordino.accounting.events import DpEvent, Release, compose_events
from sordino.accounting.schemes import releases_of
from sordino.errors import InputError
from sordino.methods.hidden_state.accountant import calibrate_hidden_state, hidden_epsilon_curve
from sordino.methods.hidden_state.gaussian_mixture import gaussian_epsilon
from sordino.methods.hidden_state.hidden_rule import ALIKE, HiddenProposal, hidden_proposal, losses_of
from sordino.methods.hidden_state.linear_rule import RELATION, Proposal, proposal
from sordino.methods.hidden_state.run import HiddenRun
from sordino.plan.pace import Pace
from sordino.shown import up

_SHARES = (1.0, 0.5, 0.25, 1 / 16, 1 / 64)  # fractions of the largest step size
_FRACTIONS = (1, 2, 4, 8, 16, 32, 64)  # n/b
_CURVATURES = np.geomspace(1e-9, 1.0, 64)
_WORTH = 1.2
"""The factor on the excess loss that more epochs must gain."""


@dataclass(frozen=True)
class Problem:
    """The problem. `weight_norm` is W; `max_epochs` bounds the work, and `pace` the time."""

    records: int
    features: int
    classes: int
    epsilon: float
    delta: float
    feature_norm: float = 1.0
    curvature: float = 0.5
    slope: float = math.sqrt(2)
    weight_norm: float = 30.0
    max_epochs: int = 1000
    pace: Pace | None = None

    def __post_init__(self) -> None:
        for name in ("records", "features", "max_epochs"):
            checks.count(name, getattr(self, name))
        checks.count("classes", self.classes, minimum=2)
        for name in ("epsilon", "feature_norm", "curvature", "slope", "weight_norm"):
            checks.positive(name, getattr(self, name))
        checks.delta_value(self.delta)

    @property
    def squared_norm(self) -> float:
        return self.feature_norm**2 + 1

    @property
    def sensitivity(self) -> float:
        return 2 * self.slope * math.sqrt(self.squared_norm)

    @property
    def curvature_at_start(self) -> float:
        """The curvature at equal predictions: 1/classes for softmax, whose largest curvature is 1/2."""
        return 2 * self.curvature / self.classes

    @property
    def weights(self) -> int:
        return (self.features + 1) * self.classes

    def mu(self) -> float:
        """The μ whose ε at δ is the target."""
        low, high = 0.0, 1.0
        while gaussian_epsilon(high, self.delta) < self.epsilon:
            high *= 2
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if gaussian_epsilon(middle, self.delta) <= self.epsilon else (low, middle)
        return low


@dataclass(frozen=True)
class Setting:
    """One setting, with the model's excess loss. `noise_multiplier` is that of the summed gradient, in S_g/2."""

    accounting: str
    batch: int
    regularisation: float
    epochs: int
    steps: int
    lr: float
    noise_multiplier: float
    epsilon: float
    weight_noise: float  # deviation of the last iterate, per coordinate
    weight_noise_relative: float  # its norm over all weights, divided by W
    excess_loss: float
    excess_noise: float
    excess_bias: float


def compare(problem: Problem) -> dict[str, Any]:
    """A JSON-serialisable answer: the recommendation, how to train either way, and where the accountants cross."""
    mu = problem.mu()
    hidden = _best(_calibrated_hidden(problem, s) for s in _best_of_each_length(_hidden_settings(problem, mu)))
    composed = _best(_calibrated_composition(problem, s) for s in _best_of_each_length(_composed_settings(problem, mu)))
    crossing = crossing_epochs(problem, hidden)
    printed = 4 / (hidden.regularisation * hidden.lr) + 4 * problem.records / hidden.batch
    training, last = proposal(problem), hidden_proposal(problem, problem.features, problem.classes)
    losses = {"composition": losses_of(training), "hidden-state": losses_of(last)}
    better = recommended(losses)
    words = {"composition": _composed_words(training), "hidden-state": _hidden_words(last)}
    how, otherwise = words.pop(better), *words.values()
    reason, accounting = _reason(losses), _crossed(crossing, printed)
    return {
        "recommendation": better,
        "why": f"{how} {reason} {accounting}",
        "how": how,
        "reason": reason,
        "otherwise": otherwise,
        "accounting": accounting,
        "expected_losses": {name: list(values) for name, values in losses.items()},
        "training": asdict(training),
        "hidden_training": asdict(last),
        "hidden_state": asdict(hidden),
        "composition": asdict(composed),
        "crossing_epochs": crossing,
        "crossing_epochs_ye_shokri": printed,
        "relation": RELATION,
        "problem": {name: value for name, value in asdict(problem).items() if name != "pace"},
        **({} if problem.pace is None else {"time": _times(problem.pace, training, last)}),
    }


def _times(pace: Pace, training: Proposal, last: HiddenProposal) -> dict[str, Any]:
    """The pace, and the seconds that either takes."""
    both: dict[str, Proposal | HiddenProposal] = {"composition": training, "hidden-state": last}
    return pace.to_dict() | {"seconds": {name: one.steps * pace.step(one.batch) for name, one in both.items()}}


def recommended(losses: Mapping[str, tuple[float, float]]) -> str:
    """Hidden state if it is expected to lose less by more than `ALIKE` points on both tasks; composition otherwise.

    Args:
        losses: The expected losses of "composition" and "hidden-state", on the easiest and on the hardest task.

    Returns:
        One of the two names.
    """
    gains = [composed - hidden for composed, hidden in zip(losses["composition"], losses["hidden-state"], strict=True)]
    return "hidden-state" if min(gains) > ALIKE else "composition"


def curves(problem: Problem, setting: Setting, epochs: Sequence[int]) -> dict[str, list[float]]:
    """ε over the epochs for the setting's batch, step size and noise: last iterate only, and every iterate seen."""
    run = _hidden_run(problem, setting, max(epochs))
    steps = [k * run.batches for k in epochs]
    return {
        "hidden state": hidden_epsilon_curve(run, problem.delta, steps),
        "composition": [_composed(problem, setting, t) for t in steps],
    }


def crossing_epochs(problem: Problem, setting: Setting) -> int | None:
    """The first epoch from which the hidden state of a fixed partition costs less than composition of fresh subsets.

    Both with the setting's batch, step size and noise. None if they do not cross within 10 million steps.
    """
    batches = problem.records // setting.batch
    highest = max(1, min(100_000, 10_000_000 // batches // 50))

    def cheaper(epochs: int) -> bool:
        run = _hidden_run(problem, setting, epochs)
        hidden = hidden_epsilon_curve(run, problem.delta, [run.steps])[0]
        return hidden <= _composed(problem, setting, run.steps) * (1 + 1e-6)  # both are rounded up

    low, high = 0, 1
    while not cheaper(high):
        if high >= highest:
            return None
        low, high = high, min(2 * high, highest)
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if cheaper(middle) else (middle, high)
    return high


def _best(settings: Iterable[Setting]) -> Setting:
    """The setting with the fewest epochs whose excess loss is close to the least."""
    found = sorted(settings, key=lambda setting: (setting.epochs, setting.excess_loss))
    return next(setting for setting in found if setting.excess_loss <= _WORTH * _least(found))


def _least(settings: Iterable[Setting]) -> float:
    return min(setting.excess_loss for setting in settings)


def _best_of_each_length(settings: Iterable[Setting]) -> list[Setting]:
    """The best settings of different numbers of epochs, six at most.

    The search approximates the noise (too high for subsets of the records); these settings are then calibrated.
    """
    ordered = sorted(settings, key=lambda setting: (setting.epochs, setting.excess_loss))
    best = [next(group) for _, group in groupby(ordered, key=lambda setting: setting.epochs)]
    return sorted(best, key=lambda setting: setting.excess_loss)[:6]


def _hidden_settings(problem: Problem, mu: float) -> Iterator[Setting]:
    """All settings of the search, with the noise for the worst position (closed form for constant steps)."""
    for batch, epochs in _sizes(problem):
        batches = problem.records // batch
        for regularisation in np.geomspace(1e-6, 1e-1, 31).tolist():
            for share in _SHARES:
                lr = share * 2 / (2 * regularisation + problem.curvature * problem.squared_norm)
                c = 1 - lr * regularisation
                energy = _worst_energy(c, batches, epochs)
                sigma = 2 * math.sqrt(energy) / mu
                yield _setting(problem, "hidden-state", batch, regularisation, epochs, lr, sigma)


def _composed_settings(problem: Problem, mu: float) -> Iterator[Setting]:
    for batch, epochs in _sizes(problem):
        steps = epochs * (problem.records // batch)
        if batch == problem.records:
            sigma = 2 * math.sqrt(steps) / mu
        else:  # central limit; the chosen setting is calibrated exactly
            sigma = 2 * gaussian_guess(batch / problem.records, steps, problem.epsilon, problem.delta)
        for share in _SHARES:
            lr = share * 2 / (problem.curvature_at_start * problem.squared_norm)
            yield _setting(problem, "composition", batch, 0.0, epochs, lr, sigma)


def _sizes(problem: Problem) -> Iterator[tuple[int, int]]:
    epochs = sorted({max(1, round(problem.max_epochs * 10 ** (-k / 4))) for k in range(13)})
    sizes = [(max(1, problem.records // f), count) for f in _FRACTIONS for count in epochs]
    pace = problem.pace
    if pace is not None:
        fitting = [(size, n) for size, n in sizes if n * (problem.records // size) <= pace.fitting(size)]
        sizes = fitting or [(size, min(epochs)) for size, _ in sizes]
    yield from sorted(set(sizes))


def _worst_energy(c: float, batches: int, epochs: int) -> float:
    """μ²·(bσ/S_g)² of the last position (docs/guarantees/hidden_state.md, section 3)."""
    if not 0 < c < 1:
        raise InputError("the contraction of a step is lost to rounding: give smaller constants of the loss")
    log_c = math.log(c)
    if batches == 1:
        return (1 + c) / -math.expm1(log_c) * math.tanh(-log_c * epochs / 2)
    rest = math.tanh(-log_c * batches * (epochs - 1) / 2)
    return 1 + c ** (2 * batches - 2) * (1 - c**2) / math.expm1(log_c * batches) ** 2 * rest


def _setting(
    problem: Problem, accounting: str, batch: int, regularisation: float, epochs: int, lr: float, sigma: float
) -> Setting:
    """The setting with its excess loss by the model of the module's docstring."""
    steps = epochs * (problem.records // batch)
    step_noise = lr * sigma * problem.sensitivity / (2 * batch)
    pull = -math.log1p(-lr * regularisation) if regularisation > 0 else 0.0
    growth = math.expm1(-2 * pull * steps) / math.expm1(-2 * pull) if pull > 0 else float(steps)
    deviation = step_noise * math.sqrt(growth)
    trace = (1 - 1 / problem.classes) * problem.squared_norm
    noise = min(trace * deviation**2 / 2, problem.weights * step_noise**2 / (4 * lr))
    bias = problem.weight_norm**2 * _bias(regularisation, lr * steps)
    relative = deviation * math.sqrt(problem.weights) / problem.weight_norm
    return Setting(
        accounting, batch, regularisation, epochs, steps, lr, sigma, problem.epsilon, deviation, relative,
        noise + bias, noise, bias,
    )  # fmt: skip


def _bias(regularisation: float, time: float) -> float:
    pulled = _CURVATURES + regularisation
    missing = 1 + _CURVATURES / pulled * np.expm1(-pulled * time)
    return float(np.max(_CURVATURES * missing**2) / 2)


def _hidden_run(problem: Problem, setting: Setting, epochs: int) -> HiddenRun:
    steps = epochs * (problem.records // setting.batch)
    return HiddenRun(
        records=problem.records,
        batch=setting.batch,
        sampling="partition",
        step_sizes=np.full(steps, setting.lr),
        noise_stds=np.full(steps, setting.noise_multiplier * problem.sensitivity / (2 * setting.batch)),
        strong_convexity=setting.regularisation,
        smoothness=problem.curvature * problem.squared_norm + setting.regularisation,
        sensitivity=problem.sensitivity,
    )


def _calibrated_hidden(problem: Problem, found: Setting) -> Setting:
    factor, account = calibrate_hidden_state(problem.epsilon, _hidden_run(problem, found, found.epochs), problem.delta)
    return _with_noise(problem, found, factor * found.noise_multiplier, account.epsilon)


def _calibrated_composition(problem: Problem, found: Setting) -> Setting:
    sampling = {"name": "without-replacement", "batch": found.batch}

    def event(sigma: float) -> DpEvent:
        return compose_events(releases_of(sampling, "gaussian", sigma, problem.records, found.steps))

    guess = noise_guess(sampling, found.steps, problem.records, problem.epsilon, problem.delta)
    sigma, _ = calibrate(event, problem.epsilon, problem.delta, RELATION, guess=guess)
    return _with_noise(problem, found, sigma, account(event(sigma), problem.delta, RELATION).epsilon)


def _with_noise(problem: Problem, found: Setting, sigma: float, epsilon: float) -> Setting:
    exact = _setting(problem, found.accounting, found.batch, found.regularisation, found.epochs, found.lr, sigma)
    return Setting(**{**asdict(exact), "epsilon": epsilon})


def _composed(problem: Problem, setting: Setting, steps: int) -> float:
    """ε if every iterate is seen and each step draws a fresh batch; to three digits."""
    if setting.batch == problem.records:
        return gaussian_epsilon(2 * math.sqrt(steps) / setting.noise_multiplier, problem.delta)
    rate = setting.batch / problem.records
    release = Release("gaussian", setting.noise_multiplier, rate, records=problem.records, batch=setting.batch)
    return composed_epsilon([(release, steps)], problem.delta, RELATION, "pld", tolerance=1e-3)[0]


def _hidden_words(best: HiddenProposal) -> str:
    return (
        "Publish the last iterate only (hidden state); earlier ones must stay secret. Scale every record to norm "
        f"{best.feature_norm:g}, loss softmax with cap {best.cap:g}, λ = {best.regularisation:g}, batch {best.batch}, "
        f"{best.steps} steps ({best.epochs:.3g} epochs), step size {best.lr:.3g}, closing noise with rise "
        f"{best.rise:g}; noise multiplier {best.noise_multiplier:.4g}: ε = {up(best.epsilon)}."
    )


def _composed_words(best: Proposal) -> str:
    return (
        "Use composition: every iterate may be seen, and neither a certificate nor a regulariser is needed. Multiply "
        f"the features by {best.feature_scale:.3g}, start at zero weights, clip norm {best.clip_norm:.3g}, batch "
        f"{best.batch}, {best.steps} steps ({best.epochs:.3g} epochs), SGD with step size {best.lr:.3g}, and publish "
        f'the mean of the last half of the iterates (average = "{best.average}"); noise multiplier '
        f"{best.noise_multiplier:.4g}: ε = {up(best.epsilon)}."
    )


def _reason(losses: Mapping[str, tuple[float, float]]) -> str:
    composed, hidden = losses["composition"], losses["hidden-state"]
    if max(abs(a - b) for a, b in zip(composed, hidden, strict=True)) <= ALIKE:
        gap = f"no difference beyond {ALIKE:g} point of accuracy is expected, and composition needs no secrecy"
    else:
        gap = "the answer is for this task's data to decide where the ranges overlap, and composition needs no secrecy"
        if max(a - b for a, b in zip(composed, hidden, strict=True)) <= 0:
            gap = "composition is expected to be better"
        elif min(a - b for a, b in zip(composed, hidden, strict=True)) > ALIKE:
            gap = "hidden state is expected to be better"
    return (
        "Each trained as it would be proposed, noise and limited training are expected to cost "
        f"{composed[0]:.1f} to {composed[1]:.1f} points of accuracy by composition and {hidden[0]:.1f} to "
        f"{hidden[1]:.1f} by hidden state (easy and hard data): {gap}."
    )


def _crossed(crossing: int | None, printed: float) -> str:
    crossed = "never becomes cheaper than composition" if crossing is None else f"is cheaper from epoch {crossing} on"
    return (
        f"If nothing is clipped, the accounting of hidden state {crossed} (the rule of Ye & Shokri 2022, "
        f"4/(λη) + 4n/b: {printed:.0f})."
    )
