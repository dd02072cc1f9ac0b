"""Which way for a budget: the planner's comparison, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sordino
from sordino.cli import main
from sordino.errors import InputError
from sordino.methods.correlated.batches import batch_noise
from sordino.methods.correlated.workloads import Workload
from sordino.methods.planner import (
    ALIKE,
    LARGEST_STEP,
    LOSS,
    TIME,
    Budget,
    compare_batches,
    compare_ways,
    expected_loss,
    step_size,
)
from sordino.plan.pace import Pace


def test_many_epochs_at_a_small_epsilon_want_allocation_with_the_noise_that_its_plan_has() -> None:
    found = compare_ways(Budget(400, 8, 20, 0.5, 1e-5))
    poisson, allocated, _ = found["rows"]
    assert found["recommended"] == "allocation"
    assert "allocation" in found["alike"]
    assert allocated["noise_multiplier"] < poisson["noise_multiplier"]
    plan = sordino.dpsgd(delta=1e-5, records=400, expected_batch=50, epochs=20, epsilon=0.5, sampling="allocation")
    assert allocated["noise_multiplier"] == pytest.approx(plan.noise.noise_multiplier, rel=1e-3)
    assert allocated["noise_per_step"] == allocated["noise_multiplier"] / 50


def test_one_epoch_at_a_large_epsilon_wants_correlated_noise_with_the_noise_that_its_plan_has() -> None:
    found = compare_ways(Budget(4000, 40, 1, 8.0, 1e-5))
    assert found["recommended"] == "correlated"
    plan = sordino.correlated(delta=1e-5, records=4000, expected_batch=100, epochs=1, epsilon=8.0)
    row = found["rows"][2]
    assert found["alike"] == ["correlated"]
    assert row["noise_multiplier"] == pytest.approx(plan.noise.noise_multiplier, rel=1e-3)
    assert row["groups"] == plan.sampling.batches  # type: ignore[union-attr]


def test_full_batches_need_the_same_noise_with_both_samplers() -> None:
    poisson, allocated, _ = compare_ways(Budget(400, 1, 3, 3.0, 1e-5))["rows"]
    assert poisson["noise_multiplier"] == pytest.approx(allocated["noise_multiplier"])


def test_the_command_compares_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --records 400 --epochs 2 --batches 4 --epsilon 3 --delta 1e-5 --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"] == found["ways"]["recommended"]
    assert [row["way"] for row in found["ways"]["rows"]] == ["poisson", "allocation", "correlated"]
    steps = "plan --records 400 --steps 8 --batches 4 --epsilon 3 --delta 1e-5 --json"
    assert main(steps.split()) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["plan", "--records", "400", "--epsilon", "3", "--delta", "1e-5"]) == 2
    assert main(["plan", "--records", "400", "--epsilon", "3", "--delta", "1e-5", "--steps", "3"]) == 2


def test_the_batch_that_is_taken_is_the_largest_within_half_a_point_of_the_best() -> None:
    """In one epoch the largest batch leaves too few steps: it is not recommended for having the least noise."""
    found = compare_batches(records=60000, epochs=1, epsilon=3.0, delta=1e-5, batches=[15, 59, 235])
    losses = {one["batch"]: one["expected_loss"] for one in found["by_batch"]}
    assert losses[4000] > min(losses.values()) + 3
    assert found["batch"] == 60000 / 59
    assert losses[60000 / 59] <= min(losses.values()) + ALIKE
    taken = next(one for one in found["by_batch"] if one["batch"] == found["batch"])
    assert (found["recommended"], found["why"]) == (taken["recommended"], taken["why"])


def test_both_questions_at_once_keep_their_answers_apart(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --records 400 --features 5 --classes 2 --epochs 2 --batches 4 --epsilon 3 --delta 1e-5"
    assert main(line.split()) == 0
    said = " ".join(capsys.readouterr().out.split())
    answers = "recommended composition", "relation replace-one", "take allocation, batch 100 (relation: add-remove)"
    for part in answers:
        assert part in said


def test_more_batches_than_records_are_an_error() -> None:
    with pytest.raises(InputError, match="more than the 4 records"):
        compare_batches(records=4, epochs=1, epsilon=1.0, delta=1e-5, batches=[5])


@pytest.mark.parametrize(
    ("epsilon", "delta", "wrong"), [(0.0, 1e-5, "epsilon"), (3.0, 0.0, "delta"), (3.0, 2.0, "delta")]
)
def test_a_target_that_is_none_is_named(epsilon: float, delta: float, wrong: str) -> None:
    """δ = 0 ended in a sentence about numbers that are too large."""
    with pytest.raises(InputError, match=wrong):
        compare_batches(records=600, epochs=1, epsilon=epsilon, delta=delta)


def test_where_noise_hardly_matters_no_difference_is_claimed_and_the_simplest_is_taken() -> None:
    found = compare_ways(Budget(60000, 50, 1, 8.0, 1e-5))
    assert found["recommended"] == "allocation"
    assert set(found["alike"]) == {"poisson", "allocation", "correlated"}
    assert "accuracy will not show a difference" in found["why"]
    losses = [row["expected_loss"] for row in found["rows"]]
    assert max(losses) - min(losses) <= ALIKE


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_the_noise_of_batches_is_that_of_drawn_batches(momentum: float) -> None:
    """Against draws: records with one coordinate of variance 1, so that a direction has the whole of it (d = 1)."""
    records, batches, epochs, runs = 60, 6, 3, 4000
    generator = np.random.default_rng(0)
    workload, steps = Workload(momentum), batches * epochs
    worth = workload.coefficients(steps)
    values = generator.choice([-1.0, 1.0], size=(runs, records))
    values -= values.mean(axis=1, keepdims=True)

    def measured(taking: Callable[[int, int], Any]) -> float:
        """Root mean square over steps and runs of the weights; `taking` gives (runs, records) masks."""
        weights = np.zeros((runs, steps))
        for step in range(steps):
            total = (values * taking(step // batches, step % batches)).sum(axis=1)
            weights[:, step:] += total[:, None] * worth[: steps - step]
        return float(np.sqrt((weights**2).mean()))

    places = [generator.integers(batches, size=(runs, records)) for _ in range(epochs)]
    drawn = [generator.random((runs, records)) < 0.4 for _ in range(steps)]
    ways: dict[str, tuple[Callable[[int, int], Any], dict[str, Any]]] = {
        "poisson": (lambda e, b: generator.random((runs, records)) < 1 / batches, {"groups": batches, "rate": 1 / 6}),
        "allocation": (lambda e, b: places[e] == b, {"groups": batches, "rate": 1 / 6}),
        "cyclic": (lambda e, b: places[0] == b, {"groups": batches, "rate": 1.0}),
    }
    for sampler, (taking, options) in ways.items():
        expected = batch_noise(sampler, workload, steps=steps, batch=records / batches, dimension=1.0, **options)
        assert expected == pytest.approx(measured(taking), rel=0.06), sampler
    parts = batch_noise("cyclic", workload, steps=steps, batch=4.0, groups=batches, rate=0.4, dimension=1.0)
    taken = measured(lambda e, b: (places[0] == b) & drawn[e * batches + b])
    assert parts == pytest.approx(taken, rel=0.06)


def test_the_step_size_is_the_best_of_the_model() -> None:
    """Not where it is bounded: there a larger one would be better."""
    for noise, steps in ((1e-3, 200), (3e-4, 1000)):
        best = step_size(noise, steps)
        missing = LOSS * TIME / 1.5

        def loss(lr: float, noise: float = noise, steps: int = steps, missing: float = missing) -> float:
            return missing / (lr * steps) + missing / (2 * TIME**3) * (noise * lr * steps) ** 2

        assert best < LARGEST_STEP
        assert expected_loss(noise, steps) == pytest.approx(loss(best)) == pytest.approx(LOSS * noise ** (2 / 3))
        assert loss(best) < min(loss(best * 1.1), loss(best / 1.1))
    assert step_size(1e-6, 10) == LARGEST_STEP


SECOND = Pace(1.0, per_step=0.01, per_record=1e-4)


def test_at_equal_time_each_batch_makes_the_steps_that_fit() -> None:
    found = compare_batches(records=400, pace=SECOND, epsilon=3.0, delta=1e-5, batches=[1, 4, 40])
    for row in found["rows"]:
        assert row["seconds"] == pytest.approx(row["steps"] * SECOND.step(row["batch"]))
        assert row["seconds"] <= 1.0 < row["seconds"] + SECOND.step(row["batch"])
    assert [row["steps"] for row in found["rows"]] == [20] * 3 + [50] * 3 + [90] * 3
    assert found["time"] == SECOND.to_dict()


def test_the_steps_that_fit_are_compared_as_if_they_had_been_given() -> None:
    timed = compare_batches(records=400, pace=SECOND, epsilon=3.0, delta=1e-5, batches=[4])
    given = compare_batches(records=400, epochs=50 / 4, epsilon=3.0, delta=1e-5, batches=[4])
    assert [row | {"seconds": None} for row in timed["rows"]] == given["rows"]
    assert {key: timed[key] for key in given if key != "rows"} == {key: given[key] for key in given if key != "rows"}


def test_correlated_noise_makes_fewer_steps_if_its_gaussians_take_time() -> None:
    budget, slow = Budget(4000, 40, 1, 8.0, 1e-5), Pace(0.4, per_step=0.01, per_noise=2e-4)
    free = compare_ways(budget)
    _, allocated, correlated = compare_ways(budget, pace=slow)["rows"]
    assert free["recommended"] == "correlated"
    assert allocated["steps"] == 40
    assert correlated["steps"] < 40
    assert correlated["noises_per_step"] < free["rows"][2]["noises_per_step"]
    assert correlated["seconds"] <= 0.4
    assert correlated["expected_loss"] > free["rows"][2]["expected_loss"]


def test_correlated_noise_that_is_never_worth_its_time_is_independent_noise() -> None:
    budget, slow = Budget(4000, 40, 1, 8.0, 1e-5), Pace(0.4, per_step=0.01, per_noise=1e9)
    found = compare_ways(budget, pace=slow)
    assert found["rows"][2]["noises_per_step"] == 1
    assert found["rows"][2]["strategy"] == {"name": "identity"}
    assert found["recommended"] == "allocation"


def test_either_epochs_or_a_pace() -> None:
    for given in ({}, {"epochs": 1.0, "pace": SECOND}):
        with pytest.raises(InputError, match="exactly one of epochs and pace"):
            compare_batches(records=400, epsilon=3.0, delta=1e-5, **given)  # type: ignore[arg-type]


def test_without_chosen_batches_those_that_fit_are_compared() -> None:
    shared: dict[str, Any] = {"records": 60000, "epsilon": 3.0, "delta": 1e-5}
    found = compare_batches(**shared, pace=Pace(1.0, per_record=1 / 3000))
    assert [round(one["batch"]) for one in found["by_batch"]] == [1017, 255]
    with pytest.raises(InputError, match=r"too short: a step of 255.319 records takes 255 seconds"):
        compare_batches(**shared, pace=Pace(1.0, per_record=1.0))
    with pytest.raises(InputError, match="or less time"):
        compare_batches(**shared, pace=Pace(1e12, per_record=1e-9))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--minutes 1 --seconds-per-step 1 --epochs 2", "excludes --epochs and --steps"),
        ("--minutes 1 --seconds-per-step 1 --steps 2 --batches 2", "excludes --epochs and --steps"),
        ("--minutes 1", "needs the time of a step"),
        ("--epochs 2 --seconds-per-step 1", "--seconds-per-step needs --minutes"),
        ("--minutes nan --seconds-per-step 1", "--minutes must be a finite number"),
        ("--minutes 0 --seconds-per-step 1", "minutes must be greater than 0"),
        ("--minutes 1 --seconds-per-step 90", "the time is too short"),
        ("--minutes 1e300 --seconds-per-step 1", "or less time"),
    ],
)
def test_a_wrong_time_is_an_error_of_one_sentence(capsys: pytest.CaptureFixture[str], options: str, said: str) -> None:
    assert main(f"plan --records 400 --epsilon 3 --delta 1e-5 {options}".split()) == 2
    assert said in capsys.readouterr().err


def test_the_command_says_what_is_compared_at_equal_time(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --records 400 --epsilon 3 --delta 1e-5 --batches 4 --minutes 0.1 --seconds-per-step 0.5"
    assert main(line.split()) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        "equal time 0.1 minutes; a step takes 0.5 s, each further Gaussian of correlated noise no time",
        "12 steps (3 epochs)",
        "take allocation, batch 100",
    ):
        assert part in said
    assert main([*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ways"]
    assert found["time"]["seconds_per_step"] == 0.5
    assert {row["seconds"] for row in found["rows"]} == {6.0}
