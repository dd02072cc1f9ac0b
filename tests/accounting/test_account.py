"""ε of compositions: known values, agreement with dp_accounting and Opacus, and the laws that ε obeys."""

from __future__ import annotations

import math
import sys
import time

import dp_accounting
import mpmath
import pytest
from dp_accounting import dp_event, get_epsilon_gaussian, pld
from exact_divergence import divergence
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import account, epsilon
from sordino.accounting.account import composed_epsilon
from sordino.accounting.events import Release
from sordino.errors import InputError, Refused

GRID = [
    (0.01, 1.1, 1000, 1e-5),
    (0.001, 0.7, 2000, 1e-6),
    (0.02, 0.8, 50, 1e-5),
    (0.1, 4.0, 500, 1e-7),
    (0.5, 8.0, 100, 1e-5),
    (0.9, 2.0, 3, 1e-3),
]


def dpsgd(rate: float, sigma: float, steps: int) -> dp_event.DpEvent:
    return dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma)), steps)


def google(event: dp_event.DpEvent, delta: float, relation: str = "add-remove", interval: float = 1e-3) -> float:
    neighbours = dp_accounting.NeighboringRelation
    accountant = pld.PLDAccountant(
        neighbours.ADD_OR_REMOVE_ONE if relation == "add-remove" else neighbours.REPLACE_ONE, interval
    )
    return float(accountant.compose(event).get_epsilon(delta))


def test_a_fine_grid_of_dp_accounting_agrees_to_four_digits() -> None:
    event = dpsgd(0.05, 2.0, 200)
    assert epsilon(event, 1e-5) == pytest.approx(google(event, 1e-5, interval=1e-4), rel=1e-4)


def test_the_reference_values_of_the_theory_brief() -> None:
    found = account(dpsgd(0.01, 1.1, 10_000), 1e-5)
    assert found.accountant == "pld"
    assert found.epsilon == pytest.approx(5.1926, abs=2e-4)
    assert found.epsilon_rdp == pytest.approx(5.632, abs=1e-3)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), GRID)
@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_agrees_with_dp_accounting_pld(rate: float, sigma: float, steps: int, delta: float, relation: str) -> None:
    """dp_accounting on its coarse grid is up to 1 % above the truth; we are never above it, nor far below."""
    event = dpsgd(rate, sigma, steps)
    theirs = google(event, delta, relation)
    assert theirs / 1.01 <= epsilon(event, delta, relation) <= theirs * (1 + 1e-4)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), GRID)
def test_agrees_with_dp_accounting_rdp(rate: float, sigma: float, steps: int, delta: float) -> None:
    event = dpsgd(rate, sigma, steps)
    theirs = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(delta)
    ours = epsilon(event, delta, accountant="rdp")
    assert theirs * (1 - 1e-3) <= ours <= theirs * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), GRID[:4])
def test_agrees_with_opacus_prv_and_rdp(rate: float, sigma: float, steps: int, delta: float) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    prv, rdp = PRVAccountant(), RDPAccountant()
    prv.history = rdp.history = [(sigma, rate, steps)]
    ours = account(dpsgd(rate, sigma, steps), delta)
    # PRV's own answer is an upper bound within 0.01 of the truth
    assert -1e-3 <= prv.get_epsilon(delta) - ours.epsilon <= 0.03
    assert ours.epsilon_rdp == pytest.approx(rdp.get_epsilon(delta), rel=0.02)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), GRID[2:])
def test_never_below_the_optimistic_pld(rate: float, sigma: float, steps: int, delta: float) -> None:
    lower = pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=rate,
        pessimistic_estimate=False,
        value_discretization_interval=1e-3,
        use_connect_dots=False,
    ).self_compose(steps)
    assert epsilon(dpsgd(rate, sigma, steps), delta) >= lower.get_epsilon_for_delta(delta)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_laplace_agrees_with_dp_accounting(rate: float) -> None:
    inner = dp_event.LaplaceDpEvent(4.0)
    event = dp_event.SelfComposedDpEvent(inner if rate == 1 else dp_event.PoissonSampledDpEvent(rate, inner), 50)
    theirs = google(event, 1e-5)
    assert theirs / 1.02 <= epsilon(event, 1e-5) <= theirs * (1 + 1e-4)


def test_one_laplace_release_is_purely_private() -> None:
    assert epsilon(dp_event.LaplaceDpEvent(2.0), 1e-12) == pytest.approx(0.5, rel=1e-4)


@given(sigma=st.floats(0.2, 200), log_delta=st.floats(-30, -2))
@settings(deadline=None, max_examples=40)
def test_one_full_batch_step_is_the_analytic_gaussian(sigma: float, log_delta: float) -> None:
    delta = math.exp(log_delta)
    exact = get_epsilon_gaussian(sigma, delta)
    found = account(dpsgd(1.0, sigma, 1), delta)
    assert exact <= found.epsilon <= exact * (1 + 1e-9) + 1e-9
    assert found.accountant == "gaussian"


@given(sigma=st.floats(0.4, 20), log_delta=st.floats(-34, -3), steps=st.integers(1, 50))
@settings(deadline=None, max_examples=12)
def test_sampling_almost_everything_is_bounded_by_sampling_everything(
    sigma: float, log_delta: float, steps: int
) -> None:
    """The grid against the closed form: q → 1 must come out at the Gaussian's ε, from either side of the code."""
    delta = math.exp(log_delta)
    exact = get_epsilon_gaussian(sigma / math.sqrt(steps), delta)
    found = epsilon(dpsgd(1 - 1e-12, sigma, steps), delta)
    assert exact - 1e-9 <= found <= exact * (1 + 1e-4) + 1e-6


def test_the_lower_bound_shows_that_the_upper_one_is_tight() -> None:
    for relation in ("add-remove", "replace-one"):
        found = account(dpsgd(0.01, 1.1, 10_000), 1e-5, relation)
        assert found.epsilon_lower is not None
        assert 0.997 * found.epsilon <= found.epsilon_lower <= found.epsilon


@given(sigma=st.floats(0.5, 20), log_delta=st.floats(-34, -3), steps=st.integers(1, 50))
@settings(deadline=None, max_examples=12)
def test_the_lower_bound_is_below_the_closed_form(sigma: float, log_delta: float, steps: int) -> None:
    delta = math.exp(log_delta)
    exact = get_epsilon_gaussian(sigma / math.sqrt(steps), delta)
    found = account(dpsgd(1 - 1e-12, sigma, steps), delta)
    assert found.epsilon_lower is not None
    assert found.epsilon_lower <= exact + 1e-9
    assert found.epsilon_lower >= 0.98 * exact - 0.01


@pytest.mark.parametrize(("rate", "sigma", "target"), [(0.1, 1.0, 0.3), (0.5, 2.0, 0.2), (0.02, 0.7, 1.0)])
def test_both_bounds_enclose_one_exact_step(rate: float, sigma: float, target: float) -> None:
    """δ of one step by quadrature at a chosen ε: the account of that δ must enclose the ε."""
    delta = divergence([(1 - rate, 0.0), (rate, 1.0)], [(1.0, 0.0)], sigma, target)
    found = account(dpsgd(rate, sigma, 1), delta)
    assert found.epsilon_lower is not None
    assert found.epsilon_lower - 1e-5 <= target <= found.epsilon + 1e-5
    assert found.epsilon == pytest.approx(target, rel=1e-3)


RATES = st.floats(-5, 0).map(lambda x: 10**x)
SIGMAS = st.floats(-0.3, 1.5).map(lambda x: 10**x)
STEPS = st.floats(0, 4).map(lambda x: round(10**x))
DELTAS = st.floats(-12, -1.5).map(lambda x: 10**x)


@given(rate=RATES, sigma=SIGMAS, steps=STEPS, delta=DELTAS, factor=st.floats(1.05, 3))
@settings(deadline=None, max_examples=12)
def test_epsilon_is_monotone(rate: float, sigma: float, steps: int, delta: float, factor: float) -> None:
    base = epsilon(dpsgd(rate, sigma, steps), delta)
    slack = 1 + 1e-4
    assert epsilon(dpsgd(min(1.0, rate * factor), sigma, steps), delta) * slack >= base
    assert epsilon(dpsgd(rate, sigma, math.ceil(steps * factor)), delta) * slack >= base
    assert epsilon(dpsgd(rate, sigma * factor, steps), delta) <= base * slack
    assert epsilon(dpsgd(rate, sigma, steps), min(delta * factor, 0.5)) <= base * slack


@given(rate=RATES, sigma=SIGMAS, steps=STEPS, delta=DELTAS)
@settings(deadline=None, max_examples=12)
def test_pld_is_never_above_rdp(rate: float, sigma: float, steps: int, delta: float) -> None:
    event = dpsgd(rate, sigma, steps)
    assert epsilon(event, delta) <= epsilon(event, delta, accountant="rdp") * (1 + 1e-4) + 1e-9


@given(rate=RATES, sigma=SIGMAS, steps=st.integers(2, 400), delta=DELTAS)
@settings(deadline=None, max_examples=8)
def test_composition_does_not_depend_on_how_it_is_written(rate: float, sigma: float, steps: int, delta: float) -> None:
    part = steps // 2
    split = dp_event.ComposedDpEvent([dpsgd(rate, sigma, part), dpsgd(rate, sigma, steps - part)])
    assert epsilon(split, delta) == pytest.approx(epsilon(dpsgd(rate, sigma, steps), delta), rel=1e-12)


def test_heterogeneous_releases_compose() -> None:
    event = dp_event.ComposedDpEvent(
        [
            dpsgd(0.01, 1.0, 500),
            dp_event.GaussianDpEvent(10.0),
            dpsgd(0.05, 3.0, 20),
            dp_event.PoissonSampledDpEvent(0.1, dp_event.LaplaceDpEvent(5.0)),
        ]
    )
    together = epsilon(event, 1e-5)
    assert google(event, 1e-5) / 1.01 <= together <= google(event, 1e-5) * (1 + 1e-4)
    assert max(epsilon(part, 1e-5) for part in event.events) < together
    assert together < sum(epsilon(part, 1e-5 / 4) for part in event.events)


EXTREMES = [
    (1e-7, 1e4, 10**7, 1e-15),
    (1e-7, 0.1, 10**7, 1e-5),
    (0.9, 0.1, 10**7, 1e-5),
    (1e-3, 1.0, 10**7, 0.1),
    (1.0, 1e4, 10**7, 1e-15),
    (1.0, 0.1, 1, 0.1),
    (1e-7, 0.1, 1, 1e-15),
    (0.5, 1e4, 1, 1e-15),
    (0.3, 30.0, 10**6, 0.1),
    (1e-4, 0.02, 1000, 1e-5),
]


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), EXTREMES)
def test_extremes_give_an_answer_in_seconds(rate: float, sigma: float, steps: int, delta: float) -> None:
    begin = time.process_time()
    value = epsilon(dpsgd(rate, sigma, steps), delta)
    assert time.process_time() - begin < 10
    assert math.isfinite(value)
    assert value >= 0


def test_tiny_rates_are_not_rounded_to_zero() -> None:
    """dp_accounting's RDP reads rounding noise below zero as ε = 0; the truth here is about 1.6e-7."""
    event = dpsgd(1e-7, 1e4, 10**7)
    assert epsilon(event, 1e-15) == pytest.approx(1.612e-7, rel=1e-3)
    assert epsilon(event, 1e-15, accountant="rdp") > 1.612e-7


def test_a_loss_beyond_the_grid_falls_back_to_rdp_by_name() -> None:
    found = account(dpsgd(0.5, 0.02, 10), 1e-5)
    assert found.accountant == "rdp"
    assert found.epsilon == found.epsilon_rdp


def test_nothing_released_costs_nothing() -> None:
    assert epsilon(dp_event.NoOpDpEvent(), 1e-5) == 0
    assert epsilon(dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(1.0), 0), 1e-5) == 0


def test_a_delta_above_the_total_variation_needs_no_epsilon() -> None:
    assert epsilon(dpsgd(1e-4, 1.0, 1), 1e-3) == 0


@pytest.mark.parametrize("delta", [0.0, -1e-5, 1.0, 2.0, math.nan, math.inf, "1e-5", None, True])
def test_delta_is_checked(delta: object) -> None:
    with pytest.raises(InputError, match="delta"):
        epsilon(dpsgd(0.01, 1.0, 10), delta)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (dpsgd(0.01, 0.0, 10), "noise_multiplier"),
        (dpsgd(0.01, -1.0, 10), "noise_multiplier"),
        (dpsgd(0.01, math.nan, 10), "noise_multiplier"),
        (dpsgd(0.0, 1.0, 10), "sampling_rate"),
        (dpsgd(1.5, 1.0, 10), "sampling_rate"),
        (dpsgd(math.nan, 1.0, 10), "sampling_rate"),
        (dpsgd(0.01, 1.0, 10**13), "number of releases"),
        (dp_event.NonPrivateDpEvent(), "no accountant"),
        (dp_event.ZCDpEvent(1.0), "no accountant"),
    ],
)
def test_events_are_checked(event: dp_event.DpEvent, words: str) -> None:
    with pytest.raises(InputError, match=words):
        epsilon(event, 1e-5)


def test_relation_and_accountant_are_checked() -> None:
    with pytest.raises(InputError, match="relation"):
        epsilon(dpsgd(0.01, 1.0, 10), 1e-5, "swap")
    with pytest.raises(InputError, match="accountant"):
        epsilon(dpsgd(0.01, 1.0, 10), 1e-5, accountant="gdp")
    with pytest.raises(Refused, match="Rényi"):
        epsilon(dpsgd(0.01, 1.0, 10), 1e-5, "replace-one", "rdp")


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_a_tiny_delta_and_rate_never_have_an_epsilon_of_zero(mechanism: str) -> None:
    """Weights that were too large for a double were once cut, and three steps had ε = 0 where two had more."""
    one = Release(mechanism, 10.13, 1.237e-05)
    for delta in (3e-113, 1e-113):
        found = [composed_epsilon([(one, count)], delta, "add-remove", "pld")[0] for count in (2, 3, 4, 5, 6)]
        assert min(found) > 1e-6
        if mechanism == "laplace":  # the largest loss of a step is reached: Σ of them is ε at such a δ
            largest = math.log1p(1.237e-05 * math.expm1(1 / 10.13))
            assert found == pytest.approx([count * largest for count in (2, 3, 4, 5, 6)], rel=1e-6)


@pytest.mark.parametrize(
    ("sigma", "rate", "delta"),
    [
        (5.1e11, 2.7e-5, 2.3e-73),
        (2184.0, 5.8e-23, 2.2e-286),
        (1e12, 1e-3, 1e-30),
        (1e5, 1e-10, 1e-30),
        (1e3, 1e-10, 1e-80),
    ],
)
def test_an_epsilon_that_is_tiny_beside_one_is_not_lost(sigma: float, rate: float, delta: float) -> None:
    """δ(ε) of one step in 120 digits; doubles gave ε = 0, or half of the truth."""
    found = composed_epsilon([(Release("gaussian", sigma, rate), 1)], delta, "add-remove", "pld")[0]
    with mpmath.workdps(120):
        s, q, e = mpmath.mpf(sigma), mpmath.mpf(rate), mpmath.mpf(found)
        place = mpmath.log((mpmath.exp(e) - 1 + q) / q) * s**2 + 0.5  # where the loss is ε
        below, above = mpmath.ncdf(-place / s), mpmath.ncdf((1 - place) / s)
        exact = (1 - q) * below + q * above - mpmath.exp(e) * below
        assert exact <= delta
    assert 0 < found < 1e-8


def test_many_tiny_losses_are_not_lost() -> None:
    """10¹² steps of 10⁻¹³ each: by the central limit theorem a Gaussian with μ = 10⁻⁷, whose ε is 9.7e-7."""
    found = composed_epsilon([(Release("gaussian", 1e12, 0.1), 10**12)], 1e-30, "add-remove", "pld")[0]
    assert 9.7e-7 < found < 1e-4


@pytest.mark.parametrize(
    ("release", "relation", "mu"),
    [
        (Release("gaussian", 1e9, 1e-9, group=2), "add-remove", 2e-12),
        (Release("gaussian", 1e9, 1e-9, records=10**10, cap=30), "add-remove", 1e-12),
        (Release("gaussian", 1e9, 1e-9, records=10**10, cap=30), "replace-one", 2e-12),
        (Release("gaussian", 1e9, 1e-9, records=10**10, batch=10), "replace-one", 2e-12),
        (Release("gaussian", 1e11, 1.0, batches=10, seen=10), "add-remove", 10**-5.5),
        (Release("gaussian", 1e3, 1e-12, batches=10**12, seen=1), "add-remove", 1e-9),
    ],
    ids=["users", "truncated", "truncated, replace", "without replacement", "allocation", "begun allocation"],
)
def test_tiny_losses_are_lost_in_no_way_of_sampling(release: Release, relation: str, mu: float) -> None:
    """10¹² of them: a Gaussian with this μ, whose ε at δ = μ/10⁶ doubles made 10⁻¹³ (or ∞ for users)."""
    found = composed_epsilon([(release, 10**12)], mu * 1e-6, relation, "pld")[0]
    exact = float(get_epsilon_gaussian(1 / mu, mu * 1e-6))
    assert exact * (1 - 1e-6) <= found < 2


@pytest.mark.parametrize(
    ("release", "relation"),
    [
        (Release("gaussian", 40.0, 0.5, group=4), "add-remove"),
        (Release("gaussian", 40.0, 0.5, records=1000, cap=600), "add-remove"),
        (Release("gaussian", 40.0, 0.5, records=1000, cap=600), "replace-one"),
        (Release("gaussian", 40.0, 0.5, records=1000, batch=500), "replace-one"),
        (Release("gaussian", 40.0, 0.5, batches=8, seen=4), "add-remove"),
    ],
    ids=["users", "truncated", "truncated, replace", "without replacement", "allocation"],
)
def test_a_release_that_stands_for_another_costs_more(
    release: Release, relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule for tiny losses, applied to losses that are not tiny."""
    before = composed_epsilon([(release, 20)], 1e-6, relation, "pld")[0]
    monkeypatch.setattr(sys.modules[composed_epsilon.__module__], "_LEAST_LOSS", 0.02)
    assert composed_epsilon([(release, 20)], 1e-6, relation, "pld")[0] > before
