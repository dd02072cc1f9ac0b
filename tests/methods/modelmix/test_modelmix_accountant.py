"""ModelMix: the figures of the paper, brute force in the plane, the criterion behind the worst case, and ε's laws."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from sordino.accounting.events import Release
from sordino.cli import main
from sordino.errors import InputError, Refused
from sordino.methods.dpsgd.accountant import account_dpsgd
from sordino.methods.modelmix.accountant import MixStep, account_modelmix, modelmix_epsilon
from sordino.methods.modelmix.calibration import calibrate_modelmix
from sordino.methods.modelmix.mixture import Coordinate, excess, margin, nodes
from sordino.methods.modelmix.sampled import SampledStep, classic, tight

FIG3 = {"sampling_rate": 0.02, "clip_norm": 20.0, "expected_batch": 1000.0, "delta": 1e-5}
STEPS = 5000
SIGMA = 0.364  # plain DP-SGD at ε = 200, fractional orders: the paper does not print it
PRINTED = {  # τ/η: ε for p = 1, 25, 100
    0.075: (57.2, 17.9, 15.3),
    0.15: (40.4, 9.0, 7.9),
    0.3: (31.7, 5.4, 4.8),
}


def fig3(sigma: float, tau: float, p: float, steps: int = STEPS) -> dict:
    return {"steps": [(MixStep(sigma, tau), steps)], "linf_p": p, **FIG3}


def density(o: np.ndarray, sigma: float, width: float) -> np.ndarray:
    """N(0, σ²) * U[−w/2, w/2], written down anew."""
    far = np.abs(o)
    return (ndtr(-(far - width / 2) / sigma) - ndtr(-(far + width / 2) / sigma)) / width


def planar(sigma: float, width: float, shifts: tuple[float, float], rate: float, alpha: float) -> float:
    """E_{P₀}[(1−q+qR)^α] in the plane, on a plain grid."""
    axis = np.linspace(-width / 2 - 9 * sigma, width / 2 + 9 * sigma + 2 * alpha, 1501)
    step = axis[1] - axis[0]
    base = density(axis, sigma, width)
    one, two = (density(axis - v, sigma, width) for v in shifts)
    p0 = np.maximum(np.outer(base, base), 1e-300)
    ratio = np.outer(one, two) / p0
    return float((p0 * (1 - rate + rate * ratio) ** alpha).sum() * step**2)


# ---- the paper


@pytest.mark.parametrize("tau", PRINTED)
@pytest.mark.parametrize("column", [0, 1, 2])
def test_figure_3_within_three_percent(tau: float, column: int) -> None:
    """Thm 4.1 (p = 1) as printed at fractional orders, Cor. 4.1 (p > 1) at whole ones, as its binomial sum has it."""
    p = (1, 25, 100)[column]
    if p == 1:
        found = account_modelmix(**fig3(SIGMA, tau, p)).epsilon_classic
    else:
        totals = STEPS * SampledStep("gaussian", SIGMA, tau * 50, p, 0.02).whole_orders()
        found = min(classic(a, float(total), 1e-5) for a, total in enumerate(totals, start=2))
    assert found == pytest.approx(PRINTED[tau][column], rel=0.03)


def test_fractional_orders_improve_figure_3() -> None:
    """τ = 0.075η, p = 25: 17.9 in print, at order 2; 16.6 at order 2.4."""
    found = account_modelmix(**fig3(SIGMA, 0.075, 25))
    assert found.epsilon_classic == pytest.approx(16.65, abs=0.05)
    assert 2.2 < found.order < 2.6


def test_the_values_of_the_theory_brief() -> None:
    assert account_modelmix(**fig3(0.37, 0.3, 25)).epsilon_classic == pytest.approx(5.4, rel=0.03)
    assert account_modelmix(**fig3(0.37, 0.3, 100)).epsilon_classic == pytest.approx(4.8, rel=0.01)


def test_the_control_is_better_than_modelmix() -> None:
    """Gaussian noise of equal variance: 1.38 by Rényi, 1.26 by the accountant that DP-SGD gets here."""
    found = account_modelmix(**fig3(0.37, 0.3, 100))
    sigma = math.sqrt(0.37**2 + (0.3 * 1000 / 20) ** 2 / 12)
    plain = account_dpsgd(sigma, STEPS, 1e-5, sampling_rate=0.02)
    assert found.equal_variance_epsilon == plain["epsilon"] == pytest.approx(1.264, abs=1e-3)
    assert plain["epsilon_rdp"] == pytest.approx(1.38, abs=1e-3)
    assert found.equal_variance_epsilon < found.epsilon < found.epsilon_classic


def test_figure_3_takes_seconds() -> None:
    nodes.cache_clear()
    margin.cache_clear()
    start = time.process_time()
    account_modelmix(**fig3(0.37, 0.3, 100))
    assert time.process_time() - start < 8  # under one on a quiet core


# ---- brute force


@pytest.mark.parametrize("alpha", [1.3, 1.9, 2.0, 2.5, 3.0])
@pytest.mark.parametrize(("sigma", "width"), [(0.7, 1.5), (1.0, 6.0)])
def test_agrees_with_the_plane_for_two_coordinates(sigma: float, width: float, alpha: float) -> None:
    shift = math.sqrt(0.5)
    step = SampledStep("gaussian", sigma, width, 2.0, 0.1)
    ours = float(step.whole_orders()[int(alpha) - 2]) if alpha.is_integer() else step.fractional(alpha)
    exact = math.log(planar(sigma, width, (shift, shift), 0.1, alpha))
    assert ours == pytest.approx(exact, rel=2e-7)
    assert ours >= exact * (1 - 1e-9)


@pytest.mark.parametrize("alpha", [1.2, 1.6, 2.0, 2.7])
def test_no_vector_that_clipping_lets_through_is_worse(alpha: float) -> None:
    """p = 1.5: coordinates up to 1/√1.5, length up to 1. The worst fills one coordinate, the rest goes into another."""
    sigma, width, rate = 0.6, 3.0, 0.2
    step = SampledStep("gaussian", sigma, width, 1.5, rate)
    bound = float(step.whole_orders()[0]) if alpha == 2 else step.fractional(alpha)
    largest = 1 / math.sqrt(1.5)
    for angle in np.linspace(math.pi / 4, math.asin(largest), 6):
        shifts = math.sin(angle), math.cos(angle)
        assert math.log(planar(sigma, width, shifts, rate, alpha)) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_one_step_keeps_its_promise_in_the_plane(p: float) -> None:
    """The hockey-stick divergence at the ε of one step is at most δ: any vector, both directions."""
    sigma, width, rate, delta = 0.5, 2.0, 0.3, 1e-3
    promised = modelmix_epsilon(
        [(MixStep(sigma, width), 1)], sampling_rate=rate, clip_norm=1, expected_batch=1, linf_p=p, delta=delta
    )
    axis = np.linspace(-5, 6, 1101)
    base = density(axis, sigma, width)
    p0 = np.outer(base, base)
    for angle in np.linspace(math.pi / 4, math.pi / 2 if p == 1 else math.pi / 4, 4):
        one, two = (density(axis - v, sigma, width) for v in (math.sin(angle), math.cos(angle)))
        mixed = (1 - rate) * p0 + rate * np.outer(one, two)
        for upper, lower in ((mixed, p0), (p0, mixed)):
            lost = np.maximum(upper - math.exp(promised) * lower, 0).sum() * (axis[1] - axis[0]) ** 2
            assert lost <= delta


def test_other_direction_is_not_larger() -> None:
    """Mironov, Talwar & Zhang 2019, Thm 5: P₀ against the mixture is below the mixture against P₀."""
    sigma, width, rate, alpha = 0.5, 2.0, 0.1, 2.5
    o = np.linspace(-15, 15, 200_001)
    p0, p1 = density(o, sigma, width), density(o - 1, sigma, width)
    mixed = (1 - rate) * p0 + rate * p1
    inside = p0 > 1e-290
    backward = math.log(float((p0[inside] ** alpha / mixed[inside] ** (alpha - 1)).sum() * (o[1] - o[0])))
    assert backward <= SampledStep("gaussian", sigma, width, 1.0, rate).fractional(alpha)


def test_hockey_sticks_have_another_worst_case() -> None:
    """Why there is no PLD of ModelMix here: at ε = 0 two half shifts are easier to tell apart than one whole one."""
    sigma, width = 0.01, 1.0
    axis = np.linspace(-0.6, 0.8, 2801)
    step = axis[1] - axis[0]
    base, half, whole = (density(axis - v, sigma, width) for v in (0.0, 0.1, 0.1 * math.sqrt(2)))
    spread = 0.5 * np.abs(np.outer(half, half) - np.outer(base, base)).sum() * step**2
    single = 0.5 * np.abs(whole - base).sum() * step
    assert spread > single + 0.03


@pytest.mark.parametrize("order", [1.05, 1.5, 2.0, 3.3, 5.0])
def test_becomes_dpsgd_as_the_gap_vanishes(order: float) -> None:
    """τ → 0: the Rényi divergence of the sampled Gaussian, by plain quadrature, to 1e-6."""
    sigma, rate = 1.1, 0.05
    o = np.linspace(-12, 24, 400_001)
    ratio = (o - 0.5) / sigma**2
    gauss = np.exp(-((o / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))
    inner = np.expm1(order * np.log1p(rate * np.expm1(ratio))) - order * rate * np.expm1(ratio)
    exact = math.log1p(float((gauss * inner).sum() * (o[1] - o[0])))
    for width in (0.0, 1e-6, 1.2e-3):
        step = SampledStep("gaussian", sigma, width, 1.0, rate)
        ours = float(step.whole_orders()[int(order) - 2]) if order.is_integer() else step.fractional(order)
        assert ours == pytest.approx(exact, rel=1e-6)


def test_epsilon_becomes_that_of_dpsgd() -> None:
    found = account_modelmix([(MixStep(1.1, 1e-9), 1000)], **FIG3)
    plain = account_dpsgd(1.1, 1000, 1e-5, sampling_rate=0.02)["epsilon"]
    assert found.accountant == "pld"
    assert found.epsilon == pytest.approx(plain, rel=1e-6)
    assert found.equal_variance_epsilon == pytest.approx(plain, rel=1e-6)


# ---- what the worst case rests on


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@given(log_width=st.floats(-2.5, 5), shift=st.floats(0.01, 2.0), level=st.integers(0, 2))
@settings(max_examples=12, deadline=None)
def test_the_criterion_holds_wherever_it_was_looked_at(noise: str, log_width: float, shift: float, level: int) -> None:
    assert margin(Coordinate(noise, math.exp(log_width)), shift, level) > 0


def test_the_criterion_can_fail() -> None:
    """With the sizes of l2 in the place of l1, Laplace noise has no such worst case: one shift is not the worst."""
    coordinate = Coordinate("laplace", 3.0)
    logs = [float(np.log1p(excess(nodes(coordinate, v, 2.0), np.array([2.0])))[0]) for v in (1.0, math.sqrt(2))]
    assert 2 * logs[0] > logs[1]


def test_an_unverified_criterion_costs_fractional_orders_only(monkeypatch: pytest.MonkeyPatch) -> None:
    certain = account_modelmix(**fig3(0.5, 0.3, 25))
    monkeypatch.setattr("sordino.methods.modelmix.sampled.margin", lambda *_: -1.0)
    doubtful = account_modelmix(**fig3(0.5, 0.3, 25))
    assert doubtful.order == int(doubtful.order)
    assert doubtful.epsilon >= certain.epsilon
    assert "whole orders only" in doubtful.checked[0]


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_a_wider_uniform_is_never_worse(noise: str) -> None:
    """Dispersive order (Lewis & Thompson 1981): every quantile gap of N + U grows with the width of U."""
    o = np.linspace(-60, 60, 240_001)
    levels = np.linspace(0.001, 0.999, 400)
    gaps = []
    for width in (1.0, 1.3, 2.2, 5.0):
        mass = np.cumsum(np.exp(Coordinate(noise, width).log_density(o)))
        gaps.append(np.diff(np.interp(levels, mass / mass[-1], o)))
    for narrow, wide in pairwise(gaps):
        assert (wide >= narrow * (1 - 1e-5)).all()


def test_the_density_is_the_convolution() -> None:
    rng = np.random.default_rng(0)
    for noise, draw in (("gaussian", rng.standard_normal), ("laplace", lambda n: rng.laplace(size=n))):
        sample = draw(400_000) + rng.uniform(-1.5, 1.5, 400_000)
        edges = np.linspace(-5, 5, 41)
        seen = np.histogram(sample, edges)[0] / len(sample)
        fine = np.linspace(-5, 5, 40_001)
        mass = np.exp(Coordinate(noise, 3.0).log_density((fine[1:] + fine[:-1]) / 2)) * (fine[1] - fine[0])
        assert np.abs(seen - mass.reshape(40, -1).sum(axis=1)).max() < 3e-3


# ---- laws

RUNS = {
    "sigma": st.floats(0.3, 8.0),
    "tau": st.floats(1e-4, 5.0),
    "rate": st.sampled_from([1e-4, 0.01, 0.1, 0.7, 1.0]),
    "p": st.sampled_from([1.0, 1.7, 25.0, 1e4]),
    "steps": st.integers(1, 3000),
}


@given(**RUNS)
@settings(max_examples=6, deadline=None)
def test_epsilon_falls_with_noise_and_gap_and_grows_with_steps_and_rate(
    sigma: float, tau: float, rate: float, p: float, steps: int
) -> None:
    def found(sigma: float = sigma, tau: float = tau, rate: float = rate, steps: int = steps) -> float:
        return modelmix_epsilon([(MixStep(sigma, tau), steps)], linf_p=p, **FIG3 | {"sampling_rate": rate})

    base, slack = found(), 1.002  # the search over orders stops where ε is flat
    assert found(sigma=1.3 * sigma) <= base * slack
    assert found(tau=1.5 * tau) <= base * slack
    assert found(steps=2 * steps) * slack >= base
    assert found(rate=min(1.0, 2 * rate)) * slack >= base


@given(**RUNS)
@settings(max_examples=10, deadline=None)
def test_orders_lie_below_their_chords(sigma: float, tau: float, rate: float, p: float, steps: int) -> None:
    """(α−1)·ρ(α) is convex in α, and 0 at α = 1."""
    step = SampledStep("gaussian", sigma, tau * 50, p, rate)
    whole = step.whole_orders()
    for n, share in ((1, 0.37), (2, 0.5)):
        if n + 1 <= step.top:
            low, high = float(whole[n - 2]) if n > 1 else 0.0, float(whole[n - 1])
            middle = step.fractional(n + share)
            assert middle <= ((1 - share) * low + share * high) * (1 + 1e-6) + 1e-15
    assert (np.diff(whole / np.arange(1, len(whole) + 1)) >= -1e-12).all()  # ρ grows with α


@given(sigma=st.floats(0.4, 3.0), width=st.floats(0.1, 20.0), rate=st.floats(0.01, 0.9), alpha=st.floats(1.05, 4.0))
@settings(max_examples=25, deadline=None)
def test_never_below_quadrature(sigma: float, width: float, rate: float, alpha: float) -> None:
    o = np.linspace(-width / 2 - 10 * sigma, width / 2 + 10 * sigma + alpha, 40_001)
    p0, p1 = density(o, sigma, width), density(o - 1, sigma, width)
    kept = p0 > 1e-250
    lower = float((p0[kept] * (1 - rate + rate * p1[kept] / p0[kept]) ** alpha).sum() * (o[1] - o[0]))
    step = SampledStep("gaussian", sigma, width, 1.0, rate)
    if alpha < step.top and abs(alpha - round(alpha)) > 1e-6:
        assert step.fractional(alpha) >= math.log(lower) - 1e-9
        assert step.fractional(alpha) <= math.log(lower) * (1 + 1e-5) + 1e-9


@given(
    sigma=st.floats(1e-3, 1e12),
    tau=st.floats(0, 1e300),
    rate=st.floats(1e-12, 1.0),
    p=st.floats(1, 1e300),
    steps=st.integers(0, 10**6),
    delta=st.floats(1e-200, 0.999),
    mechanism=st.sampled_from(["gaussian", "laplace"]),
)
@settings(max_examples=16, deadline=None)
def test_any_positive_input_gets_a_number_or_a_sentence(
    sigma: float, tau: float, rate: float, p: float, steps: int, delta: float, mechanism: str
) -> None:
    try:
        found = modelmix_epsilon(
            [(MixStep(sigma, tau), steps)],
            sampling_rate=rate,
            clip_norm=1.0,
            expected_batch=10.0,
            linf_p=p if mechanism == "gaussian" else 1.0,
            delta=delta,
            mechanism=mechanism,
        )
    except InputError:
        return
    assert found >= 0


def test_laplace_with_mixing_lies_between_nothing_and_laplace_alone() -> None:
    alone = account_modelmix([(MixStep(1.0, 0.0), STEPS)], mechanism="laplace", **FIG3)
    mixed = account_modelmix([(MixStep(1.0, 0.3), STEPS)], mechanism="laplace", **FIG3)
    assert alone.epsilon == pytest.approx(
        account_dpsgd(1.0, STEPS, 1e-5, sampling_rate=0.02, mechanism="laplace")["epsilon"]
    )
    assert mixed.equal_variance_epsilon < mixed.epsilon < alone.epsilon
    assert "Remark C.1" in mixed.theorem


def test_a_run_of_laplace_steps_is_not_below_quadrature() -> None:
    o = np.linspace(-60, 60, 1_200_001)
    for width in (0.0, 2.0):
        base = np.exp(Coordinate("laplace", width).log_density(o)) if width else 0.5 * np.exp(-np.abs(o))
        moved = np.exp(Coordinate("laplace", width).log_density(o - 1)) if width else 0.5 * np.exp(-np.abs(o - 1))
        exact = math.log(float((base * (0.9 + 0.1 * moved / base) ** 1.7).sum() * (o[1] - o[0])))
        assert SampledStep("laplace", 1.0, width, 1.0, 0.1).fractional(1.7) == pytest.approx(exact, rel=1e-5)


# ---- schedules, further releases, calibration


def test_a_schedule_lies_between_its_extremes() -> None:
    def run(*taus: float) -> float:
        return modelmix_epsilon([(MixStep(0.5, tau), 1000 // len(taus)) for tau in taus], linf_p=25, **FIG3)

    assert run(0.3) < run(0.3, 0.15) < run(0.15)
    assert run(0.3, 0.15) == pytest.approx(run(0.15, 0.3), rel=1e-9)


def test_a_schedule_of_many_steps_is_rounded_to_the_safe_side() -> None:
    taus = np.linspace(0.3, 0.15, 500)
    found = modelmix_epsilon([(MixStep(0.5, float(tau)), 1) for tau in taus], linf_p=25, **FIG3)
    below = modelmix_epsilon(
        [(MixStep(0.5, float(t)), 50) for t in taus.reshape(10, 50).max(axis=1)], linf_p=25, **FIG3
    )
    assert below < found < 1.1 * below


def test_further_releases_compose() -> None:
    alone = account_modelmix(**fig3(0.5, 0.3, 25))
    both = account_modelmix(**fig3(0.5, 0.3, 25), further=[(Release("gaussian", 4.0), 2), (Release("laplace", 9.0), 1)])
    assert both.epsilon > alone.epsilon
    statistics = modelmix_epsilon([], further=[(Release("gaussian", 4.0), 2)], **FIG3)
    assert statistics == pytest.approx(account_dpsgd(4.0, 2, 1e-5, sampling_rate=1.0)["epsilon"], rel=1e-6)
    with pytest.raises(Refused, match="Rényi"):
        modelmix_epsilon([], further=[(Release("gaussian", 4.0, 0.1, records=100, cap=20), 2)], **FIG3)


@pytest.mark.parametrize(
    ("target", "given"),
    [
        (3.0, {"solve": "noise_multiplier", "tau_over_lr": 0.3}),
        (0.7, {"solve": "noise_multiplier", "tau_over_lr": 0.1}),
        (3.0, {"solve": "tau_over_lr", "noise_multiplier": 0.37}),
    ],
)
def test_calibration_never_exceeds_the_target(target: float, given: dict) -> None:
    value, found = calibrate_modelmix(target, steps=STEPS, linf_p=100, **given, **FIG3)
    assert target - 1e-3 * min(1, target) <= found.epsilon <= target
    assert value > 0


def test_a_schedule_is_calibrated_by_scaling_it() -> None:
    """The paper's schedule: τ = 0.05η for the first half, 0.025η for the second; one σ for both."""
    shape = [(MixStep(1.0, 0.05), 400), (MixStep(1.0, 0.025), 400)]
    run = {"sampling_rate": 8192 / 60000, "clip_norm": 1.0, "expected_batch": 8192.0, "delta": 1e-5}
    value, found = calibrate_modelmix(1.0, solve="noise_multiplier", steps=shape, **run)
    scaled = [(MixStep(value, step.tau_over_lr), count) for step, count in shape]
    assert 0.999 <= found.epsilon <= 1.0
    assert modelmix_epsilon(scaled, **run) == pytest.approx(found.epsilon)


def test_calibration_says_what_cannot_be() -> None:
    with pytest.raises(InputError, match="no mixing at all"):
        calibrate_modelmix(50, solve="tau_over_lr", noise_multiplier=2.0, steps=100, **FIG3)
    with pytest.raises(InputError, match="can't be reached"):
        calibrate_modelmix(1e-3, solve="tau_over_lr", noise_multiplier=0.5, steps=5000, **FIG3)
    with pytest.raises(InputError, match="give one"):
        calibrate_modelmix(1, solve="tau_over_lr", steps=5000, **FIG3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linf_p": 0.5}, "linf_p"),
        ({"linf_p": 4.0, "mechanism": "laplace"}, "l1 clipping"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"expected_batch": 0.0}, "expected_batch"),
        ({"delta": 1.0}, "delta"),
        ({"mechanism": "uniform"}, "mechanism"),
        ({"steps": [(MixStep(1.0, -0.1), 5)]}, "tau_over_lr"),
        ({"steps": [(MixStep(0.0, 0.1), 5)]}, "noise_multiplier"),
    ],
)
def test_wrong_input_is_a_sentence(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        account_modelmix(**{**fig3(1.0, 0.1, 1.0), **change})


def test_conversions() -> None:
    assert classic(2.0, 1.0, 1e-5) == pytest.approx(1 + math.log(1e5))
    assert tight(2.0, 1.0, 1e-5) == pytest.approx(1 + math.log(0.5) - (math.log(1e-5) + math.log(2)))


# ---- the command line

FLAGS = [
    *("--sampling-rate", "0.02", "--clip-norm", "20", "--expected-batch", "1000"),
    *("--linf-p", "100", "--steps", "5000", "--delta", "1e-5"),
]


def test_account_modelmix_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "modelmix", "--noise-multiplier", "0.37", "--tau-over-lr", "0.3", *FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(4.257, abs=2e-3)
    assert found["epsilon_classic"] == pytest.approx(4.8, abs=0.01)
    assert found["equal_variance_epsilon"] == pytest.approx(1.264, abs=1e-3)
    assert {"order", "theorem", "delta", "relation", "checked"} <= set(found)


def test_the_control_stands_on_the_line_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "modelmix", "--noise-multiplier", "0.37", "--tau-over-lr", "0.3", *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4.257" in lines[0]
    assert "equal variance" in lines[1]
    assert "1.26" in lines[1]


def test_calibrate_modelmix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "modelmix", "--epsilon", "3", "--noise-multiplier", "0.5", *FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["solved"] == "tau_over_lr"
    assert 2.999 <= found["epsilon"] <= 3
    assert main(["calibrate", "modelmix", "--epsilon", "3", "--tau-over-lr", "-1", *FLAGS]) == 2
    assert "tau_over_lr" in capsys.readouterr().err
