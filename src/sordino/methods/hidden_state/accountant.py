"""Hidden state: ε of a run on strongly convex losses if only the last iterate is published. Relation: replace-one.

    x_{k+1} = φ_k(x_k) + N(0, s_k²·I)     φ_k = one step of gradient descent on the batch, s_k = η_k·(noise std)

Each φ_k is c_k-Lipschitz with c_k = max(|1−η_k·m|, |1−η_k·M|), and replacing one record moves φ_k by at most
d_k = η_k·S_g/b if the batch contains the record, else not at all. The **hull** bound (shifted interpolation: Bok, Su &
Altschuler 2024) gives the best μ-GDP guarantee of that argument for any schedule, averaged over the record's hidden
place in the batches. The theorems of Ye & Shokri are in `ye_shokri`. Proofs: docs/guarantees/hidden_state.md.

The guarantee covers the last iterate only. To publish another iterate, or a metric of one on the private records, use
composition. The caller must certify m, M and S_g; they can't be checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.accounting.account import composed_epsilon
from sordino.accounting.calibration import calibrate
from sordino.accounting.events import Release, compose_events
from sordino.errors import InputError, Refused
from sordino.methods.hidden_state import ye_shokri
from sordino.methods.hidden_state.choices import HIDDEN_BOUNDS
from sordino.methods.hidden_state.gaussian_mixture import GaussianMixture, gaussian_epsilon
from sordino.methods.hidden_state.hull import position_energies
from sordino.methods.hidden_state.participation import fresh_shuffle_law, without_replacement_law
from sordino.methods.hidden_state.run import HiddenRun
from sordino.shown import up

Array = npt.NDArray[np.float64]
Further = Sequence[tuple[Release, int]]

RELATION = "replace-one"
_LEVELS = 24  # largest number of different noise multipliers that are composed


@dataclass(frozen=True)
class HiddenAccount:
    """ε at δ of the last iterate.

    `mu_worst` and `epsilon_worst_position` are for the worst place of the record (infinite if the theorem has no bound
    for it); `epsilon_composition` is the cost if every iterate is seen.
    """

    epsilon: float
    delta: float
    mu_worst: float
    epsilon_worst_position: float
    bound: str
    theorem: str
    relation: str
    accountant: str
    epsilon_composition: float | None


def account_hidden_state(
    run: HiddenRun, delta: float, *, bound: str | None = None, further: Further = (), credit_remainder: bool = False
) -> HiddenAccount:
    """ε of publishing the last iterate of a run, and the Gaussian statistics `further`.

    The ε of composition holds for the last iterate too. It is used if it is smaller, except with "ye-shokri".

    Args:
        run: Everything that the bound depends on.
        delta: δ in (0, 1).
        bound: "hull": the bound of this module; "ye-shokri": the printed theorem for the sampling; None: the tightest
            that applies.
        further: Gaussian releases on all records, before the run.
        credit_remainder: Also count the probability that a partition leaves the record out.

    Returns:
        The account.

    Raises:
        InputError: a value is wrong.
        Refused: no theorem covers the run or the further releases.
    """
    delta = checks.delta_value(delta)
    statistics = _statistics(further)
    composition = _composition(run, delta, statistics)
    found = []
    if bound is None or checks.choice("bound", bound, HIDDEN_BOUNDS) == "hull":
        found.append(_hull(run, delta, statistics, credit_remainder))
    if bound == "ye-shokri" or (bound is None and run.sampling == "without-replacement" and _ye_shokri_applies(run)):
        found.append(_ye_shokri(run, delta, statistics))
    best = replace(min(found, key=lambda account: account.epsilon), epsilon_composition=composition)
    if composition is not None and composition < best.epsilon and bound != "ye-shokri":
        theorem = "every iterate may be seen: composition of the steps (docs/guarantees/dpsgd.md)"
        return replace(best, epsilon=composition, accountant="composition", bound="composition", theorem=theorem)
    return best


def hidden_epsilon_curve(run: HiddenRun, delta: float, at_steps: Sequence[int], further: Further = ()) -> list[float]:
    """ε of publishing only x_t, for each t of `at_steps`. It does not hold if several of them are published."""
    values = []
    for t in at_steps:
        if not 1 <= t <= run.steps:
            raise InputError(f"at_steps must lie between 1 and {run.steps}, got {t}")
        values.append(account_hidden_state(run.until(t), delta, bound="hull", further=further).epsilon)
    return values


def calibrate_hidden_state(
    epsilon: float, run_at_noise_1: HiddenRun, delta: float, further: Further = ()
) -> tuple[float, HiddenAccount]:
    """The smallest factor on the noise of a run with which ε of its last iterate meets a target.

    Every energy is a sum of squares over s_k², so the mixture of the given run can be used for all factors.

    Args:
        epsilon: The target.
        run_at_noise_1: The run whose `noise_stds` are multiplied by the factor.
        delta: δ in (0, 1).
        further: Gaussian releases on all records, before the run.

    Returns:
        (factor, account); ε of the account is at most the target, and within 1e-3 of it.

    Raises:
        InputError: a value is wrong, the further releases alone exceed the target, or it is met without noise.
    """
    target, delta = checks.positive("epsilon", epsilon), checks.delta_value(delta)
    statistics = _statistics(further)
    cost = gaussian_epsilon(math.sqrt(statistics), delta)
    if cost >= target:
        raise InputError(
            f"the statistics alone cost ε = {up(cost, 6)}: give them more noise, or raise ε = {up(target)}"
        )
    laws, _ = _laws(run_at_noise_1, credit_remainder=False)
    factor = _smallest_factor(lambda f: any(law.scaled(f**-2, statistics).delta(target) <= delta for law in laws))
    account = account_hidden_state(run_at_noise_1.noisier(factor), delta, further=further)
    if account.bound == "composition":
        factor = min(factor, _composition_factor(run_at_noise_1, target, delta, further, factor))
        account = account_hidden_state(run_at_noise_1.noisier(factor), delta, further=further)
    if account.bound == "ye-shokri" and target - account.epsilon > 1e-3 * min(1, target):  # less noise suffices
        factor = _smallest_factor(
            lambda f: _from_rdp(ye_shokri_rdp(run_at_noise_1.noisier(f)), delta, statistics) <= target, precision=1e-5
        )
        account = account_hidden_state(run_at_noise_1.noisier(factor), delta, further=further)
    while account.epsilon > target:  # because of rounding of the factor
        factor *= 1 + 1e-9
        account = account_hidden_state(run_at_noise_1.noisier(factor), delta, further=further)
    return factor, account


def _hull(run: HiddenRun, delta: float, statistics: float, credit_remainder: bool) -> HiddenAccount:
    laws, worst = _laws(run, credit_remainder)
    worst = math.sqrt(worst**2 + statistics)
    worst_epsilon = gaussian_epsilon(worst, delta)
    epsilon = min([worst_epsilon, *(law.scaled(1.0, statistics).epsilon(delta) for law in laws)])
    return HiddenAccount(
        epsilon, delta, worst, worst_epsilon, "hull", _HULL_THEOREMS[run.sampling], RELATION, "hidden-state", None
    )


def _laws(run: HiddenRun, credit_remainder: bool) -> tuple[list[GaussianMixture], float]:
    """Distributions of μ² over the record's hidden participation, each of which bounds δ; and the worst μ."""
    steps = _unit_noise(run)
    slack = _slack(run)
    if run.sampling in ("partition", "full"):
        squares = (np.sqrt(_energies(run.batches, *steps)) + slack) ** 2
        weight = run.batch / run.records if credit_remainder else 1 / run.batches
        law = GaussianMixture(np.full(len(squares), weight), squares).with_rest(slack**2)
        return [law], math.sqrt(float(squares.max()))
    largest, shape = _shape(*steps)
    plain, energy = _chain_laws(run.sampling, run.batches, run.batch / run.records, *shape)
    laws = [law.scaled(largest**2 * (1 + 1e-15)) for law in plain]
    return [_slackened(law, slack) for law in laws], math.sqrt(energy) * largest * (1 + 1e-15) + slack


def _energies(period: int, shrink: Array, disparities: Array, variances: Array) -> Array:
    """`position_energies`, which calibration computes once: other noise only multiplies them."""
    largest, shape = _shape(shrink, disparities, variances)
    found: Array = _energies_of_shape(period, *shape) * (largest**2 * (1 + 1e-15))
    return found


def _shape(shrink: Array, disparities: Array, variances: Array) -> tuple[float, tuple[bytes, ...]]:
    """The largest disparity, and the arrays in units of it, equal for runs that differ in their noise alone."""
    largest = float(disparities.max())
    arrays = (shrink, _digits(disparities / largest, np.ceil), _digits(variances, np.floor))
    return largest, tuple(array.tobytes() for array in arrays)


@lru_cache(maxsize=4)  # positions and rounding of a run, for two runs
def _energies_of_shape(period: int, *arrays: bytes) -> Array:
    shrink, disparities, variances = (np.frombuffer(array) for array in arrays)
    return position_energies(shrink, disparities, variances, period)


@lru_cache(maxsize=8)  # calibration uses the same run with other noise, which only scales the distributions
def _chain_laws(sampling: str, batches: int, rate: float, *arrays: bytes) -> tuple[tuple[GaussianMixture, ...], float]:
    """Distributions of μ² if the largest disparity and the largest noise are 1, and the energy of the worst pattern."""
    shrink, disparities, variances = (np.frombuffer(a) for a in arrays)
    if sampling == "shuffle":
        law, energy = fresh_shuffle_law(shrink, disparities, variances, batches)
        return (law,), energy
    laws = without_replacement_law(shrink, disparities, variances, rate)
    # the worst pattern: the record is used in every step
    return tuple(laws), float(position_energies(shrink, disparities, variances, 1)[0])


def _digits(values: Array, towards: Callable[[Array], Array]) -> Array:
    """The values to 40 binary digits, rounded to the safe side, so that runs that differ in rounding share an array."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(towards(mantissa * 2.0**40) * 2.0**-40, exponent)


def _unit_noise(run: HiddenRun) -> tuple[Array, Array, Array]:
    """(c_k, d_k, s_k²) in units of the largest noise, so that squares do not over- or underflow."""
    noise = run.step_sizes * run.noise_stds
    scale = float(noise.max())
    disparities = run.step_sizes * (run.sensitivity / run.batch) / scale * (1 + 2.0**-50)
    return run.shrink, disparities, (noise / scale) ** 2 * (1 - 2.0**-50)


def _slack(run: HiddenRun) -> float:
    """μ of a disparity of `disparity_slack` in every step; μ is subadditive in the disparities, so it adds."""
    if run.disparity_slack == 0:
        return 0.0
    shrink, _, variances = _unit_noise(run)
    unit = run.disparity_slack / float((run.step_sizes * run.noise_stds).max())
    return math.sqrt(float(_energies(1, shrink, np.full(run.steps, unit), variances)[0]))


def _slackened(law: GaussianMixture, slack: float) -> GaussianMixture:
    """(√V + slack)² ≤ (1+t)·V + (1+1/t)·slack², which is affine in V, as a spread distribution needs."""
    if slack == 0:
        return law
    typical = max(float(law.weights @ law.squares), 1e-300)
    t = slack / math.sqrt(typical)
    return law.scaled(1 + t, (1 + 1 / t) * slack**2)


def _composition(run: HiddenRun, delta: float, statistics: float) -> float | None:
    """ε if every iterate is seen; rounding does not change a released gradient, so the slack has no cost here."""
    if run.sampling == "without-replacement" and run.batch < run.records:
        releases = _step_releases(run)
        if statistics > 0:
            releases.append((Release("gaussian", 2 / math.sqrt(statistics)), 1))
        try:
            return composed_epsilon(releases, delta, RELATION, "pld")[0]
        except InputError:  # beyond the accountant's grid: no bound
            return None
    costs = np.append((2 / run.noise_multipliers) ** 2, np.zeros(-run.steps % run.batches)).reshape(-1, run.batches)
    # a fresh shuffle may place the record in the most expensive step of every epoch
    total = float(costs.max(axis=1).sum() if run.sampling == "shuffle" else costs.sum(axis=0).max())
    return gaussian_epsilon(math.sqrt(total * (1 + 1e-12) + statistics), delta)


def _step_releases(run: HiddenRun) -> list[tuple[Release, int]]:
    """The steps as releases; if there are many noise multipliers, they are rounded down to few."""
    sigma = run.noise_multipliers
    levels = np.unique(sigma)
    if len(levels) > _LEVELS:
        levels = np.unique(np.quantile(levels, np.linspace(0, 1, _LEVELS), method="lower"))
    counts = np.bincount(np.searchsorted(levels, sigma, side="right") - 1, minlength=len(levels))
    rate = run.batch / run.records
    return [
        (Release("gaussian", float(level), rate, records=run.records, batch=run.batch), int(count))
        for level, count in zip(levels, counts, strict=True)
    ]


def _composition_factor(run: HiddenRun, target: float, delta: float, further: Further, guess: float) -> float:
    """The smallest factor on the noise with which composition meets the target."""

    def event(factor: float) -> object:
        return compose_events([*_step_releases(run.noisier(factor)), *further])

    return calibrate(event, target, delta, RELATION, guess=guess)[0]


def _smallest_factor(enough: Callable[[float], bool], precision: float = 1e-10) -> float:
    """The smallest factor, up to `precision`, that suffices; `enough` is monotone."""
    low = high = 1.0
    while not enough(high):
        low, high = high, 4 * high
        if high > 1e12:
            raise InputError("no amount of noise meets this ε and δ")
    while enough(low):
        low, high = low / 4, low
        if low < 1e-12:
            raise InputError("this ε is met without noise: this target asks for no privacy")
    while high > low * (1 + precision):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def ye_shokri_rdp(run: HiddenRun, further: Further = ()) -> ye_shokri.Rdp:
    """ρ(α) of the printed theorem for the run's sampling, with the statistics added; Refused if there is none."""
    if not run.constant:
        raise Refused("the theorems of Ye & Shokri need a constant step size and noise; use bound='hull'")
    if run.disparity_slack > 0:
        raise Refused("the theorems of Ye & Shokri do not cover rounding (disparity_slack); use bound='hull'")
    if run.steps % run.batches:
        raise Refused(f"the theorems of Ye & Shokri need whole epochs of {run.batches} steps, got {run.steps} steps")
    if run.sampling == "shuffle":
        raise Refused("Ye & Shokri have no theorem for a fresh shuffle in each epoch; use bound='hull'")
    setting = _setting(run)
    theorem = {
        "partition": ye_shokri.shuffle_and_partition,
        "without-replacement": ye_shokri.without_replacement,
        "full": ye_shokri.naive_dynamics,
    }[run.sampling]
    statistics = _statistics(further)
    return lambda orders: theorem(setting, orders) + orders * statistics / 2


def _setting(run: HiddenRun) -> ye_shokri.Setting:
    return ye_shokri.Setting.from_noise(
        float(run.noise_stds[0]),
        float(run.step_sizes[0]),
        records=run.records,
        batch=run.batch,
        epochs=run.steps // run.batches,
        strong_convexity=run.strong_convexity,
        smoothness=run.smoothness,
        sensitivity=run.sensitivity,
    )


def _ye_shokri(run: HiddenRun, delta: float, statistics: float) -> HiddenAccount:
    rdp = ye_shokri_rdp(run)
    epsilon = _from_rdp(rdp, delta, statistics)
    if run.sampling == "without-replacement":  # there is no printed bound for the worst pattern
        worst, worst_epsilon = math.inf, math.inf
    else:  # for one position ρ(α) = α·μ²/2
        last = (
            rdp
            if run.sampling == "full"
            else partial(ye_shokri.strongly_convex, _setting(run), position=run.batches - 1)
        )
        worst = math.sqrt(2 * float(last(np.ones(1))[0]) + statistics)
        worst_epsilon = _from_rdp(last, delta, statistics)
    return HiddenAccount(
        epsilon,
        delta,
        worst,
        worst_epsilon,
        "ye-shokri",
        _PRINTED_THEOREMS[run.sampling],
        RELATION,
        "hidden-state-rdp",
        None,
    )


def _from_rdp(rdp: ye_shokri.Rdp, delta: float, statistics: float) -> float:
    return ye_shokri.tight_epsilon(lambda orders: rdp(orders) + orders * statistics / 2, delta) * (1 + 1e-9)


def _ye_shokri_applies(run: HiddenRun) -> bool:
    try:
        ye_shokri_rdp(run)(np.array([2.0]))
    except Refused:
        return False
    return True


def _statistics(further: Further) -> float:
    """μ² of releases before the run. Given their results the run is unchanged, so the squares of Gaussians add."""
    total = 0.0
    for release, count in further:
        if release.mechanism != "gaussian" or release.sampling_rate != 1 or release.cap is not None:
            raise Refused("with hidden state, further releases must be Gaussian and on all records")
        sigma = checks.noise_multiplier_value(release.noise_multiplier)
        total += checks.count("count", count, minimum=0) * (2 / sigma) ** 2  # replace-one moves a sum by two clip norms
    return total * (1 + 1e-12)


_SHIFTS = "shifted interpolation (Bok, Su & Altschuler 2024) with the least energy (docs/guarantees/hidden_state.md)"
_HULL_THEOREMS = {
    "partition": f"{_SHIFTS}, averaged over the record's hidden batch",
    "without-replacement": f"{_SHIFTS}, feasible shifts averaged over the record's hidden steps",
    "shuffle": f"{_SHIFTS}, feasible shifts averaged over the record's hidden steps",
    "full": _SHIFTS,
}
_PRINTED_THEOREMS = {
    "partition": "Ye & Shokri 2022, Thm 5.2 (Cor. 6.3), tight conversion",
    "without-replacement": "Ye & Shokri 2022, Thm 5.3, tight conversion",
    "full": "Ye & Shokri 2022, Thm 4.5 (Chourasia, Ye & Shokri 2021), tight conversion",
}
