"""Each sampler's bound against the exact output distributions of small datasets, and against the others."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, get_epsilon_gaussian, pld
from exact_divergence import divergence, planar_divergence, truncated_poisson
from scipy.stats import binom

from sordino.accounting import account, epsilon
from sordino.accounting.events import Release
from sordino.checks import fewest_records
from sordino.errors import InputError, Refused
from sordino.methods.dpsgd.accountant import account_dpsgd


def bound(event: dp_event.DpEvent, delta: float, relation: str) -> float:
    return epsilon(event, delta, relation)


@pytest.mark.parametrize("other", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize(("records", "rate", "cap", "sigma"), [(8, 0.4, 3, 1.0), (30, 0.1, 3, 1.5), (30, 0.1, 8, 0.7)])
def test_truncated_poisson_bounds_the_exact_divergence(
    records: int, rate: float, cap: int, sigma: float, other: float
) -> None:
    """Both directions, with neighbours one record smaller and one larger than the plan's public number."""
    event = dp_event.TruncatedSubsampledGaussianDpEvent(records, rate, cap, sigma)
    for others in (records - 1, records):
        without = truncated_poisson(others, rate, cap, None, other)
        with_record = truncated_poisson(others, rate, cap, 1.0, other)
        for target in (0.1, 0.5, 1.0):
            for p, q in ((with_record, without), (without, with_record)):
                delta = divergence(p, q, sigma, target)
                if delta > 1e-9:
                    assert bound(event, delta * (1 - 1e-5), "add-remove") >= target


def test_truncation_costs_and_poisson_accounting_would_be_false() -> None:
    """A record that pushes out another moves the sum by 2: Poisson's ε lies below the exact loss of one step."""
    records, rate, cap, sigma, target = 30, 0.1, 1, 1.0, 0.5
    exact = divergence(
        truncated_poisson(records - 1, rate, cap, 1.0, -1.0),
        truncated_poisson(records - 1, rate, cap, None, -1.0),
        sigma,
        target,
    )
    poisson = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    truncated = dp_event.TruncatedSubsampledGaussianDpEvent(records, rate, cap, sigma)
    assert bound(poisson, exact, "add-remove") < target <= bound(truncated, exact, "add-remove")


def test_truncated_poisson_is_not_above_dp_accounting_and_tends_to_poisson() -> None:
    inner = dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.05, 60, 1.0)
    theirs = (
        pld.PLDAccountant(value_discretization_interval=5e-3)
        .compose(dp_event.SelfComposedDpEvent(inner, 100))
        .get_epsilon(1e-5)
    )
    ours = account_dpsgd(1.0, 100, 1e-5, sampling="truncated-poisson", sampling_rate=0.05, records=1000, cap=60)
    assert ours["epsilon"] <= theirs
    poisson = account_dpsgd(1.0, 100, 1e-5, sampling_rate=0.05)["epsilon"]
    roomy = account_dpsgd(1.0, 100, 1e-5, sampling="truncated-poisson", sampling_rate=0.05, records=1000, cap=200)
    assert roomy["epsilon"] == pytest.approx(poisson, rel=1e-4)
    assert ours["epsilon"] > poisson * 1.5


@pytest.mark.parametrize(
    ("records", "rate", "cap", "sigma", "steps"),
    [
        (1000, 0.5, 100, 1.0, 10),
        (100, 0.9, 10, 1.0, 10),
        (20, 0.9, 4, 1.0, 5),
        (50, 1.0, 10, 2.0, 20),
        (10, 1.0, 3, 2.0, 20),
        (1000, 1.0, 100, 2.0, 100),
    ],
)
def test_truncated_poisson_is_not_below_a_certified_bound_for_any_number_of_records_that_is_accepted(
    records: int, rate: float, cap: int, sigma: float, steps: int
) -> None:
    """Where the cap is (nearly) always met, all others −1 and the record 1 attain a Poisson pair with shift 2."""
    arguments = {"sampling": "truncated-poisson", "sampling_rate": rate, "records": records, "cap": cap}
    printed = account_dpsgd(sigma, steps, 1e-5, **arguments)["epsilon"]
    for size in (fewest_records(records), records, records + 1):
        over = binom.sf(cap - 1, size - 1, rate)
        present = binom.sf(cap, size, rate) * cap / size / over
        if over < 1 - 1e-9:
            continue
        event = dp_event.PoissonSampledDpEvent(float(present), dp_event.GaussianDpEvent(sigma / 2))
        attained = account(dp_event.SelfComposedDpEvent(event, steps), 1e-5).epsilon_lower
        assert attained is not None
        assert printed >= attained


@pytest.mark.parametrize(("records", "rate", "cap"), [(20, 0.5, 9), (20, 0.9, 17), (30, 0.2, 5), (20, 1.0, 18)])
def test_truncated_poisson_bounds_every_number_of_records_that_is_accepted(records: int, rate: float, cap: int) -> None:
    """Caps about the expected batch, where fewer records make the cap rarer and what it costs dearer."""
    event = dp_event.TruncatedSubsampledGaussianDpEvent(records, rate, cap, 1.5)
    for size in range(fewest_records(records), records + 2):
        without = truncated_poisson(size - 1, rate, cap, None, -1.0)
        with_record = truncated_poisson(size - 1, rate, cap, 1.0, -1.0)
        for target in (0.2, 1.0):
            for p, q in ((with_record, without), (without, with_record)):
                delta = divergence(p, q, 1.5, target)
                if delta > 1e-9:
                    assert bound(event, delta * (1 - 1e-5), "add-remove") >= target


def test_fewer_records_meet_the_cap_less_often_and_pay_more_when_they_do() -> None:
    """What the bound over all numbers of records rests on."""
    release = Release("gaussian", 1.0, 0.3, records=100, cap=30)
    found = [release._over(size) for size in range(31, 140)]
    assert all(a[0] <= b[0] * (1 + 1e-9) for a, b in itertools.pairwise(found))
    assert all(a[1] >= b[1] * (1 - 1e-9) for a, b in itertools.pairwise(found))
    assert release._over(30) == (0.0, 0.3 * 30 / 31)


@pytest.mark.parametrize(("records", "batch", "sigma"), [(10, 3, 2.0), (40, 2, 3.0)])
def test_without_replacement_bounds_the_exact_divergence(records: int, batch: int, sigma: float) -> None:
    """One step, every way for the record, its replacement and the other records to be ±1 or 0; attained by one."""
    rate = batch / records
    event = dp_event.SampledWithoutReplacementDpEvent(records, batch, dp_event.GaussianDpEvent(sigma))
    worst: dict[float, float] = {}
    for record in (-1.0, 0.0, 1.0):
        for replacement in (-1.0, 0.0, 1.0):
            for other in (-1.0, 0.0, 1.0):
                p = [(1 - rate, batch * other), (rate, (batch - 1) * other + record)]
                q = [(1 - rate, batch * other), (rate, (batch - 1) * other + replacement)]
                for target in (0.02, 0.3, 1.0):
                    delta = divergence(p, q, sigma, target)
                    worst[target] = max(worst.get(target, 0.0), delta)
    for target, delta in worst.items():
        assert target <= bound(event, delta * (1 - 1e-5), "replace-one") <= target * (1 + 1e-3) + 1e-4


def test_without_replacement_counts_a_replacement_twice() -> None:
    """A batch of everything is the Gaussian mechanism with sensitivity 2, in both accountants."""
    whole = account_dpsgd(4.0, 3, 1e-5, sampling="without-replacement", records=50, batch=50)
    assert whole["epsilon"] == pytest.approx(get_epsilon_gaussian(2.0 / math.sqrt(3), 1e-5), rel=1e-6)
    rdp = account_dpsgd(4.0, 3, 1e-5, sampling="without-replacement", records=50, batch=50, accountant="rdp")
    assert rdp["epsilon"] >= whole["epsilon"]


def test_dp_accounting_rdp_and_pld_differ_in_their_replace_one_convention() -> None:
    """Why rdp.py halves the multiplier: the same event, a factor of two apart in dp_accounting itself."""
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    event = dp_event.GaussianDpEvent(4.0)
    by_pld = pld.PLDAccountant(relation).compose(event).get_epsilon(1e-5)
    by_rdp = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation).compose(event).get_epsilon(1e-5)
    assert by_pld == pytest.approx(get_epsilon_gaussian(2.0, 1e-5), rel=1e-3)
    assert by_rdp < by_pld
    assert epsilon(event, 1e-5, "replace-one", "rdp") > epsilon(event, 1e-5, "replace-one")


def test_without_replacement_pld_is_below_wang_balle_kasiviswanathan() -> None:
    run = account_dpsgd(3.0, 200, 1e-5, sampling="without-replacement", records=60_000, batch=600)
    assert run["accountant"] == "pld"
    assert run["epsilon"] < run["epsilon_rdp"]
    assert (
        "Wang"
        in account_dpsgd(3.0, 200, 1e-5, sampling="without-replacement", records=60_000, batch=600, accountant="rdp")[
            "theorem"
        ]
    )


def test_poisson_replace_one_is_worst_for_opposite_records() -> None:
    """In the plane, two records of norm at most 1 at any angle are no easier to tell apart than opposite ones."""
    rng = np.random.default_rng(0)
    rate, sigma, target = 0.3, 0.8, 0.4
    p = [(1 - rate, (0.0, 0.0)), (rate, (1.0, 0.0))]
    opposite = planar_divergence(p, [(1 - rate, (0.0, 0.0)), (rate, (-1.0, 0.0))], sigma, target)
    for angle, radius in zip(rng.uniform(0, math.pi, 12), rng.uniform(0, 1, 12), strict=True):
        q = [(1 - rate, (0.0, 0.0)), (rate, (radius * math.cos(angle), radius * math.sin(angle)))]
        assert planar_divergence(p, q, sigma, target) <= opposite * (1 + 1e-6)
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    assert bound(event, opposite, "replace-one") == pytest.approx(target, rel=2e-3)


def test_one_coordinate_is_the_worst_l1_shift_for_laplace_noise() -> None:
    """Splitting an l1 shift over two coordinates never helps the adversary."""
    whole = dp_event.LaplaceDpEvent(1.0)
    for share in (0.1, 0.3, 0.5):
        split = dp_event.ComposedDpEvent([dp_event.LaplaceDpEvent(1 / share), dp_event.LaplaceDpEvent(1 / (1 - share))])
        for delta in (1e-3, 1e-2, 0.1, 0.3):
            assert epsilon(split, delta) <= epsilon(whole, delta) * (1 + 1e-4) + 1e-9


def test_partition_is_one_gaussian_per_epoch() -> None:
    """100 records in batches of 8: 12 batches an epoch; 30 steps touch a record in at most 3 of them."""
    run = account_dpsgd(5.0, 30, 1e-5, sampling="partition", records=100, batch=8)
    assert run["relation"] == "replace-one"
    assert run["epsilon"] == pytest.approx(get_epsilon_gaussian(2.5 / math.sqrt(3), 1e-5), rel=1e-9)
    assert run["accountant"] == "gaussian"
    assert run["epsilon_lower"] is None  # the shuffle is secret: the bound need not be attained


@pytest.mark.parametrize("sampling", ["partition", "without-replacement"])
def test_fixed_batches_refuse_add_remove(sampling: str) -> None:
    with pytest.raises(Refused, match="replace-one"):
        account_dpsgd(1.0, 10, 1e-5, sampling=sampling, records=100, batch=10, relation="add-remove")


@pytest.mark.parametrize(
    ("sampling", "relation"),
    [("truncated-poisson", "add-remove"), ("without-replacement", "replace-one"), ("poisson", "replace-one")],
)
def test_laplace_is_refused_where_nothing_is_proven(sampling: str, relation: str) -> None:
    with pytest.raises(Refused, match="Laplace"):
        account_dpsgd(1.0, 10, 1e-5, sampling=sampling, records=100, batch=10, relation=relation, mechanism="laplace")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either sampling_rate"),
        ({"sampling_rate": 0.1, "batch": 3, "records": 10}, "either sampling_rate"),
        ({"batch": 3}, "needs records"),
        ({"batch": 30, "records": 10}, "exceeds"),
        ({"sampling_rate": 0.1, "cap": 5}, "cap is an option"),
        ({"sampling_rate": 0.1, "sampling": "truncated-poisson", "records": 100}, "needs cap"),
        ({"sampling_rate": 0.1, "sampling": "partition", "records": 100}, "records and batch"),
        ({"sampling_rate": 0.1, "sampling": "shuffle"}, "one of poisson"),
        ({"sampling_rate": 0.1, "mechanism": "uniform"}, "one of gaussian"),
    ],
)
def test_incomplete_descriptions_are_input_errors(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        account_dpsgd(1.0, 10, 1e-5, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, -1, 1.5, math.nan, math.inf, "10", None])
def test_steps_are_whole_and_positive(steps: object) -> None:
    with pytest.raises(InputError, match="steps"):
        account_dpsgd(1.0, steps, 1e-5, sampling_rate=0.1)  # type: ignore[arg-type]
