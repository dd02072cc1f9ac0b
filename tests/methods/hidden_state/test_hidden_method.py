"""The hidden-state plan: what it accepts, what it refuses, and what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from sordino.clipping import FlatClip
from sordino.errors import InputError, Refused
from sordino.methods.hidden_state import Geometry, HiddenState, Huber, OneVsRest, Softmax, certify, plan
from sordino.methods.hidden_state.accountant import account_hidden_state
from sordino.methods.hidden_state.run import HiddenRun
from sordino.plan import Plan, Statistic
from sordino.sampling import Poisson
from sordino.schedule import Schedule, pieces


def make(**changes: object) -> Plan:
    options: dict[str, object] = {
        "loss": Softmax(10),
        "features": 50,
        "records": 6000,
        "batch": 200,
        "epochs": 40,
        "regularisation": 0.02,
        "delta": 1e-5,
        "noise_multiplier": 3.0,
    }
    return plan(**options | changes)  # type: ignore[arg-type]


def test_the_certificate_of_the_paper_s_setting() -> None:
    """Softmax regression with features of norm 1 and a bias: S = 2·√2·√2, M = λ + 2/2."""
    shown = certify(Softmax(10), Geometry(1.0, 1.0), 0.02)
    assert math.isclose(shown.sensitivity, 4.0)
    assert math.isclose(shown.smoothness, 1.02)
    assert shown.strong_convexity == 0.02
    assert math.isclose(shown.best_lr, 2 / 1.04)
    assert math.isclose(shown.contraction(shown.best_lr), 1 - 0.02 * 2 / 1.04)
    with pytest.raises(Refused, match="regularisation"):
        certify(Softmax(10), Geometry(), 0.0)


def test_the_published_setting_gets_the_brief_s_epsilon() -> None:
    """Table 1, FMNIST: η = 1.92, λ = 0.02, b = 2048, σ_mul = 3.01, 1200 epochs: 2.1805; in the paper 2.9966."""
    made = make(features=3969, records=60000, batch=2048, epochs=1200, lr=1.92, noise_multiplier=3.01)
    assert math.isclose(made.clipping.clip_norm, 2.0)
    assert abs(made.guarantee().epsilon - 2.1805) < 2e-3


def test_a_target_is_met_from_below() -> None:
    for target in (0.5, 3.0):
        made = make(noise_multiplier=None, epsilon=target, noise_factors=pieces((0, 1.0), (0.9, 2.0)))
        assert target * 0.999 < made.guarantee().epsilon <= target


def test_never_worse_than_composition() -> None:
    few = make(epochs=1, regularisation=1e-6)
    composed = few.guarantee().beside["epsilon_if_every_iterate_were_seen"]
    assert few.guarantee().epsilon <= composed
    many = make(epochs=400)
    assert many.guarantee().epsilon < 0.5 * many.guarantee().beside["epsilon_if_every_iterate_were_seen"]


def test_statistics_add_in_squares() -> None:
    alone, method = make(), make().method
    assert isinstance(method, HiddenState)
    mean = Statistic("statistics", 20.0)
    both = make(statistics=[mean])
    expected = account_hidden_state(method.run(alone), 1e-5, further=[mean.release()]).epsilon
    assert math.isclose(both.guarantee().epsilon, expected)
    assert both.guarantee().epsilon > alone.guarantee().epsilon
    with pytest.raises(Refused, match="on all records"):
        make(statistics=[Statistic("statistics", 20.0, sampling_rate=0.5)])


def test_rounding_is_accounted_and_hardly_costs() -> None:
    made = make(features=4000, records=60000, batch=60000, sampling="full", epochs=300)
    method = made.method
    assert isinstance(method, HiddenState)
    run = method.run(made)
    assert isinstance(run, HiddenRun)
    assert 0 < run.disparity_slack < 1e-3 * float((run.step_sizes * run.noise_stds).min())
    exact = account_hidden_state(replace(run, disparity_slack=0.0), 1e-5).epsilon
    assert exact <= made.guarantee().epsilon <= exact * 1.01


def test_what_is_refused() -> None:
    with pytest.raises(Refused, match=r"2/M"):
        make(lr=2.0)
    with pytest.raises(Refused, match=r"2/M"):
        make(lr=Schedule("linear", (0.1, 2.0)))
    made = make()
    for change, match in (
        ({"relation": "add-remove", "sampling": Poisson(0.1)}, "replace-one"),
        ({"sampling": Poisson(0.1)}, "no theorem"),
        ({"clipping": FlatClip(1.0)}, "certificate"),
        ({"divisor": 100.0}, "mean over its batch"),
    ):
        with pytest.raises(Refused, match=match):
            replace(made, **change)  # type: ignore[arg-type]
    for changes in ({"epsilon": 1.0}, {"steps": 10}, {"sampling": "full"}, {"batch": 7000}, {"bias": -1.0}):
        with pytest.raises(InputError):
            make(**changes)


def test_a_plan_is_a_plain_value_and_its_certificate_can_t_be_edited() -> None:
    for made in (
        make(),
        make(loss=OneVsRest(4, cap=0.2), lr=Schedule("cosine", (0.5, 0.1)), bias=0.0),
        make(loss=Huber(3, bound=0.5), radius=10.0),
        make(sampling="full", batch=6000, epochs=30),
    ):
        written = json.loads(json.dumps(made.to_dict()))
        assert Plan.from_dict(written) == made
        written["method"]["certificate"]["smoothness"]["value"] /= 2
        with pytest.raises(InputError, match="edited"):
            Plan.from_dict(written)
    with pytest.raises(InputError, match="a missing or unknown key"):
        Plan.from_dict({**made.to_dict(), "method": {"name": "hidden-state", "loss": {"name": "softmax"}}})


def test_the_sentence_says_who_sees_what_and_how_the_constants_are_known() -> None:
    said = str(make().guarantee())
    for part in (
        "last iterate only",
        "replacing one record",
        "strongly convex",
        "Popoviciu",
        "hidden batch",
        "in a step",
    ):
        assert part in said, part
    assert "engine clips" not in said


def test_epsilon_after_some_steps_is_that_of_stopping_there() -> None:
    made = make(epochs=10)
    curve = made.method.epsilons(made, [0, 30, 300])
    assert curve[0] == 0
    assert math.isclose(curve[2], made.guarantee().epsilon)
    assert math.isclose(curve[1], make(epochs=1).guarantee().epsilon, rel_tol=1e-6)
