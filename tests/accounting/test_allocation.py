"""Random allocation: check values, Monte Carlo, the certified lower bound, partial epochs, ledgers."""

from __future__ import annotations

import json
import math
import time
import tracemalloc

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.special import ndtri

from sordino.accounting.account import LossTooLarge, account, composed_epsilon, epsilon
from sordino.accounting.allocation import Epoch, epoch_from_below, epoch_pmfs
from sordino.accounting.calibration import calibrate
from sordino.accounting.events import AllocatedDpEvent, Release, allocated, compose_events, flatten, grouped
from sordino.accounting.geometric import Contracted, Spread, _Pairs
from sordino.accounting.pld import Composition
from sordino.accounting.schemes import check_scheme, releases_of
from sordino.accounting.spent import composed_entries
from sordino.cli import main
from sordino.errors import InputError, Refused


def both_directions(batches: int, sigma: float, epochs: int, delta: float, interval: float = 3e-3) -> list[float]:
    found = []
    for pmf in epoch_pmfs(Epoch(sigma, batches, batches), interval, delta * 1e-6 / epochs):
        composition = Composition([(pmf, epochs)], interval)
        found.append(composition.epsilon(delta, composition.renyi(delta)[1]))
    return found


def event(batches: int, sigma: float, epochs: int) -> object:
    return compose_events([(allocated(sigma, batches, batches), epochs)])


def losses(epoch: Epoch, epochs: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Samples of the composed privacy loss log dP/dQ under P, by removing the record."""
    total = np.zeros(count)
    sigma, t, seen = epoch.noise_multiplier, epoch.batches, epoch.seen
    for _ in range(epochs):
        z = generator.standard_normal((count, seen)) / sigma - 0.5 / sigma**2  # log L under Q
        place = generator.integers(t, size=count)
        there = np.flatnonzero(place < seen)
        z[there, place[there]] += 1 / sigma**2
        total += np.log((np.exp(z).sum(axis=1) + t - seen) / t)
    return total


def monte_carlo(epoch: Epoch, epochs: int, eps: float, count: int, seed: int) -> tuple[float, float]:
    """δ(ε) by removing, and four standard errors of it."""
    sample = losses(epoch, epochs, count, np.random.default_rng(seed))
    values = np.maximum(-np.expm1(eps - sample), 0.0)
    return float(values.mean()), 4 * float(values.std()) / math.sqrt(count) + 30 / count**1.5


@pytest.mark.parametrize(
    ("plan", "removing", "adding", "poisson"),
    [
        ((100, 1.0, 1, 1e-5), 0.6209, 0.4219, 0.7180),
        ((100, 1.0, 10, 1e-5), 1.7015, 1.5477, 1.8282),
        ((100, 0.8, 10, 1e-5), 2.9076, 2.2559, 3.1410),
        ((30, 2.0, 30, 1e-5), 2.1412, 2.1265, 2.2127),
    ],
)
def test_check_values_of_both_directions_are_met_from_above(plan, removing, adding, poisson) -> None:
    found = both_directions(*plan)
    for value, check in zip(found, (removing, adding), strict=True):
        assert check - 1e-4 <= value <= check + 1e-3
    batches, sigma, epochs, delta = plan
    steps = [(Release("gaussian", sigma, 1 / batches), batches * epochs)]
    assert epsilon(compose_events(steps), delta) == pytest.approx(poisson, abs=1e-4)


@pytest.mark.parametrize(
    ("t", "sigma", "eps", "removing", "adding"),
    [(10, 1.0, 0.5, 0.02685, 0.01906), (100, 0.5, 1.0, 0.028442, 0.000615), (100, 1.0, 0.5, 4.41e-5, None)],
)
def test_delta_of_one_epoch_is_that_of_the_check_values(t, sigma, eps, removing, adding) -> None:
    interval = 5e-3
    for pmf, check in zip(epoch_pmfs(Epoch(sigma, t, t), interval, 1e-14), (removing, adding), strict=True):
        grid = (pmf.lower + np.arange(len(pmf.probs))) * interval
        delta = pmf.infinity + float((pmf.probs * np.maximum(-np.expm1(eps - grid), 0)).sum())
        if check is not None:
            assert check * (1 - 1e-3) <= delta <= check * (1 + 1e-2)


def test_the_command_of_the_issue_prints_its_epsilon(capsys) -> None:
    line = "account dpsgd --sampler allocation --batches 100 --noise-multiplier 1 --epochs 10 --delta 1e-5 --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(1.7015, abs=2e-4)
    assert 1.70 < found["epsilon_lower"] <= found["epsilon"]
    assert (found["sampler"], found["batches"], found["steps"]) == ("allocation", 100, 1000)


def test_shuffle_and_cut_keeps_its_number_and_points_to_allocation(capsys) -> None:
    line = "account dpsgd --sampler partition --records 1000 --batch 100 --noise-multiplier 2 --epochs 5 --delta 1e-5"
    assert main(line.split()) == 0
    said = capsys.readouterr().out
    assert "no amplification" in " ".join(said.split())
    assert "--sampler allocation" in said


@pytest.mark.parametrize(("t", "sigma", "epochs", "delta"), [(7, 0.6, 2, 1e-4), (300, 0.5, 1, 1e-5)])
def test_the_lower_bound_is_below_and_near(t, sigma, epochs, delta) -> None:
    found = account(event(t, sigma, epochs), delta)
    assert found.epsilon_lower is not None
    assert 0.995 * found.epsilon <= found.epsilon_lower <= found.epsilon


@pytest.mark.parametrize(("t", "seen", "sigma", "epochs"), [(5, 5, 0.8, 3), (12, 12, 0.5, 1), (9, 4, 0.7, 2)])
def test_monte_carlo_lies_between_the_bounds(t, seen, sigma, epochs) -> None:
    eps = 1.0
    estimate, error = monte_carlo(Epoch(sigma, t, seen), epochs, eps, 60_000, seed=t)
    release = [(allocated(sigma, t, seen), epochs)]
    assert account(compose_events(release), estimate + error).epsilon <= eps + 1e-9  # δ(ε) from above
    upper = account(compose_events(release), max(estimate - error, 1e-12)).epsilon
    assert upper >= eps - 1e-9


def test_one_batch_per_epoch_is_the_gaussian_mechanism() -> None:
    assert allocated(2.0, 1, 1) == Release("gaussian", 2.0)


def test_two_batches_agree_with_numerical_integration() -> None:
    sigma, eps = 0.9, 0.7
    x = np.linspace(-9, 10, 951) * sigma
    density = np.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi)) * (x[1] - x[0])
    ratio = np.exp((x - 0.5) / sigma**2)
    mixed = (ratio[:, None] + ratio) / 2
    weights = density[:, None] * density
    truth = [float((weights * np.maximum(mixed - math.exp(eps), 0)).sum()),
             float((weights * np.maximum(1 - math.exp(eps) * mixed, 0)).sum())]  # fmt: skip
    for pmf, delta in zip(epoch_pmfs(Epoch(sigma, 2, 2), 1e-2, 1e-14), truth, strict=True):
        grid = (pmf.lower + np.arange(len(pmf.probs))) * 1e-2
        found = pmf.infinity + float((pmf.probs * np.maximum(-np.expm1(eps - grid), 0)).sum())
        assert delta * (1 - 1e-6) <= found <= delta * (1 + 1e-3)


def test_a_part_of_an_epoch_costs_less_than_the_whole_and_more_than_less_of_it() -> None:
    values = [epsilon(compose_events([(allocated(1.0, 30, seen), 1)]), 1e-6) for seen in (5, 29, 30)]
    assert values == sorted(values)
    assert values[0] > 0


def test_steps_that_end_amid_an_epoch_are_whole_epochs_and_a_part() -> None:
    found = releases_of({"name": "allocation", "batches": 10}, "gaussian", 1.0, 1000, 34)
    assert found == [(allocated(1.0, 10, 10), 3), (allocated(1.0, 10, 4), 1)]


def test_it_costs_less_than_poisson_sampling_at_the_same_rate() -> None:
    poisson = epsilon(compose_events([(Release("gaussian", 1.0, 0.1), 30)]), 1e-5)
    assert epsilon(event(10, 1.0, 3), 1e-5) < poisson - 0.3


def test_little_noise_is_taken_as_unsampled_and_stays_an_upper_bound() -> None:
    little = account(event(100, 0.09, 1), 1e-5)
    assert little.epsilon == pytest.approx(account(compose_events([(Release("gaussian", 0.09), 1)]), 1e-5).epsilon)
    assert little.epsilon_lower is None
    assert epsilon(event(100, 0.11, 1), 1e-5) < little.epsilon


def test_grids_with_very_different_steps_are_added_alike_in_either_way() -> None:
    generator = np.random.default_rng(0)
    for coarse, points, interval in ((8, 400, 0.02), (32, 60, 0.01), (64, 200, 0.004)):
        a, b, c, d = (generator.random(count) for count in (points, 3000, points, 3000))
        for left, right in (
            (Spread(coarse, -points // 2, a, 0.1, 0.2), Spread(1, -1700, b, 0.3, 0.1)),
            (Contracted(coarse, -points // 2, a, c), Contracted(1, -1700, b, d)),
        ):
            one = left._plus_unlike(right, 1, interval)  # type: ignore[arg-type]
            other = left.plus(right, 1, interval)  # type: ignore[arg-type]
            first = min(one.lower, other.lower)
            for key in ("masses", "means") if isinstance(left, Contracted) else ("masses",):
                both = np.zeros((2, 2 * max(len(one.masses), len(other.masses))))
                for row, found in zip(both, (one, other), strict=True):
                    row[found.lower - first :][: len(found.masses)] = getattr(found, key)
                assert np.abs(both[0] - both[1]).max() <= 1e-12 * both.max()


@pytest.mark.parametrize(("sigma", "batches", "seen"), [(0.106, 4095, 1555), (0.149, 1023, 899), (0.1445, 2047, 259)])
def test_a_part_of_an_epoch_is_not_added_pair_by_pair_where_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, sigma: float, batches: int, seen: int
) -> None:
    """126 million pairs of points took two seconds, where a finer grid for one of both takes twenty milliseconds."""
    most = [0]
    blocks = _Pairs.blocks

    def counted(self: _Pairs):  # type: ignore[no-untyped-def]
        most.append(len(self.here) * len(self.there))
        return blocks(self)

    monkeypatch.setattr(_Pairs, "blocks", counted)
    for interval in (0.022, 0.0055):
        epoch_pmfs(Epoch(sigma, batches, seen), interval, 1e-19)
        epoch_from_below(Epoch(sigma, batches, seen), interval, 1e-19)
    assert max(most) <= 1 << 18


def test_it_composes_with_other_releases() -> None:
    alone = epsilon(event(20, 1.5, 4), 1e-5)
    others = [(Release("gaussian", 20.0), 1), (Release("gaussian", 3.0, 0.1), 2)]
    with_statistic = epsilon(compose_events([(allocated(1.5, 20, 20), 4), *others]), 1e-5)
    assert alone < with_statistic < alone + 1.5


def test_an_event_is_read_back_as_the_release_that_it_was_made_of() -> None:
    made = event(20, 1.5, 4)
    assert flatten(made) == [(allocated(1.5, 20, 20), 4)]
    assert isinstance(allocated(1.5, 20, 3).event(), AllocatedDpEvent)


def test_calibration_meets_its_target_from_below() -> None:
    sigma, found = calibrate(lambda s: event(5, s, 3), 3.0, 1e-5)
    assert 2.998 <= found <= 3.0
    assert epsilon(event(5, sigma, 3), 1e-5) == pytest.approx(found)


def test_many_batches_are_calibrated_where_a_coarse_grid_shows_no_noise_that_suffices() -> None:
    begin = time.process_time()
    sigma, found = calibrate(lambda s: event(3000, s, 100), 3.0, 1e-6)
    assert 2.998 <= found <= 3.0
    assert sigma == pytest.approx(0.635, abs=0.001)
    assert time.process_time() - begin < 8


@pytest.mark.parametrize("options", [("gaussian", "replace-one"), ("laplace", "add-remove")])
def test_what_has_no_proof_is_refused(options) -> None:
    with pytest.raises(Refused, match="random allocation"):
        check_scheme("allocation", *options)


def test_a_sum_keeps_mass_and_mean_and_grows_in_the_convex_order() -> None:
    generator = np.random.default_rng(0)
    for stride_a, stride_b in ((1, 1), (2, 1), (8, 1), (4, 2)):
        a = Spread(stride_a, -30, generator.dirichlet(np.ones(60)) * 0.9, 0.1)
        b = a if stride_a == stride_b else Spread(stride_b, -11, generator.dirichlet(np.ones(70)))
        h = 0.03
        total = a.plus(b, 1, h)
        assert total.masses.sum() + total.zero == pytest.approx(1, abs=1e-12)
        values = [np.append(np.exp(v.logs(h)), 0.0) for v in (a, b, total)]
        masses = [np.append(v.masses, v.zero) for v in (a, b, total)]
        means = [float(v @ m) for v, m in zip(values, masses, strict=True)]
        assert means[2] == pytest.approx(means[0] + means[1], rel=1e-12)
        for cut in (0.5, 1.0, 2.0, 5.0):
            pairs = np.maximum(values[0][:, None] + values[1] - cut, 0)
            truth = float(masses[0] @ pairs @ masses[1])
            found = float(np.maximum(values[2] - cut, 0) @ masses[2])
            assert truth * (1 - 1e-12) <= found <= truth * 1.01 + 1e-4


def test_a_sum_of_variables_that_are_far_apart_is_a_number() -> None:
    """e^{distance} was no double, and infinity times nothing is no number."""
    small, large = Spread(1, -900, np.full(5, 0.2)), Spread(1, 900, np.full(5, 0.2))
    for total in (small.plus(large, 1, 1.0), large.plus(small, 1, 1.0)):
        assert np.isfinite(total.masses).all()
        assert total.masses.sum() == pytest.approx(1, abs=1e-12)


def entries(steps: list[int], batches: int = 4, source: str = "a", sigma: float = 1.0) -> list[dict]:
    return [
        {"kind": "release", "purpose": "gradient", "step": step, "mechanism": "gaussian", "noise_multiplier": sigma,
         "relation": "add-remove", "source": source,
         "sampling": {"name": "allocation", "batches": batches, "epoch": step // batches, "batch": step % batches}}
        for step in steps
    ]  # fmt: skip


def spent(lines: list[dict]) -> float:
    return composed_entries({"records": 100}, lines, 1e-5)["epsilon"]


def test_a_ledger_costs_the_epochs_that_it_holds() -> None:
    assert spent(entries(list(range(8)))) == pytest.approx(epsilon(event(4, 1.0, 2), 1e-5))
    part = compose_events([(allocated(1.0, 4, 4), 1), (allocated(1.0, 4, 2), 1)])
    assert spent(entries(list(range(6)))) == pytest.approx(epsilon(part, 1e-5))


def test_an_epoch_that_was_drawn_under_two_keys_costs_both_draws() -> None:
    twice = compose_events([(allocated(1.0, 4, 2), 2)])
    assert spent(entries([0, 1]) + entries([2, 3], source="b")) == pytest.approx(epsilon(twice, 1e-5))


def test_a_ledger_whose_batches_do_not_fit_its_steps_is_an_error() -> None:
    lines = entries([0, 1])
    lines[1]["sampling"]["batch"] = 2
    with pytest.raises(InputError, match="not batch"):
        spent(lines)
    with pytest.raises(InputError, match="twice"):
        spent(entries([0, 0]))


@pytest.mark.parametrize(
    ("releases", "delta", "shift"),
    [
        ([(allocated(1.0, 100, 100), 10)], 1e-300, 10**0.5),
        ([(allocated(2.0, 100, 100), 3), (allocated(2.0, 100, 1), 1)], 1e-290, 1.0),
    ],
)
def test_where_no_grid_holds_the_losses_epsilon_is_that_of_known_draws(releases, delta, shift) -> None:
    """It was infinite."""
    found = account(compose_events(releases), delta)
    assert found.epsilon == pytest.approx(get_epsilon_gaussian(1 / shift, delta), rel=1e-9)
    # δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ), so ε is nearly where the first term is δ
    assert found.epsilon == pytest.approx(shift**2 / 2 - shift * float(ndtri(delta)), rel=3e-3)
    assert found.epsilon_lower is None or found.epsilon_lower <= found.epsilon


def test_losses_beyond_every_double_are_refused_by_a_sentence() -> None:
    with pytest.raises(LossTooLarge, match="use more noise or fewer steps"):
        account(compose_events([(grouped(0.01, 0.5, 1000), 4)]), 1e-5)


@pytest.mark.parametrize("epochs", [1, 100])
@pytest.mark.parametrize("batches", [10**5, 10**7, 10**9])
@pytest.mark.parametrize("sigma", [0.35, 1.0, 20.0])
def test_an_epoch_of_which_one_batch_was_seen_costs_what_a_poisson_sample_does(
    sigma: float, batches: int, epochs: int
) -> None:
    one = Release("gaussian", sigma, 1 / batches, batches=batches, seen=1)
    sample = Release("gaussian", sigma, 1 / batches)
    assert composed_epsilon([(one, epochs)], 1e-12, "add-remove", "pld") == composed_epsilon(
        [(sample, epochs)], 1e-12, "add-remove", "pld"
    )


@pytest.mark.parametrize("batches", [10**5, 10**7, 10**9])
@pytest.mark.parametrize("sigma", [0.35, 1.0, 20.0])
def test_an_epoch_that_was_hardly_begun_takes_little_memory_and_costs_more_than_its_half(
    sigma: float, batches: int
) -> None:
    """Cells of many intervals overflowed, and grids before their tails were cut took 16 GB."""
    tracemalloc.start()
    found, half = (
        composed_epsilon(
            [(Release("gaussian", sigma, seen / batches, batches=batches, seen=seen), 1)], 1e-12, "add-remove", "pld"
        )[0]
        for seen in (2, 1)
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert half <= found < 1.6 * half + 0.5
    assert peak < 1 << 29
