"""The plan: what it holds, what it promises, what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import account
from sordino.clipping import AutomaticClip, FlatClip, L1Clip, PerLayerClip
from sordino.errors import InputError, Refused
from sordino.plan import ROUNDING_MARGIN, Plan, Statistic
from sordino.sampling import Partition, Poisson, TruncatedPoisson, WithoutReplacement

BASE: dict[str, Any] = {
    "noise_multiplier": 1.1,
    "delta": 1e-5,
    "records": 10_000,
    "expected_batch": 100,
    "steps": 50,
}


def plan(**changes: Any) -> Plan:
    return Plan.dpsgd(**{key: value for key, value in (BASE | changes).items() if value is not ...})


def test_the_readmes_plan() -> None:
    found = Plan.dpsgd(epsilon=3.0, delta=1e-5, records=60_000, expected_batch=2048, epochs=30, clip_norm=1.0)
    assert found.steps == math.ceil(30 * 60_000 / 2048)
    assert found.sampling == Poisson(2048 / 60_000)
    assert found.divisor == 2048
    assert found.relation == "add-remove"
    guarantee = found.guarantee()
    assert 3.0 - 1e-3 <= guarantee.epsilon <= 3.0
    assert guarantee.accountant == "pld"
    assert guarantee.secure
    assert guarantee.epsilon_rdp is not None
    assert guarantee.epsilon_rdp > guarantee.epsilon


def test_noise_is_relative_to_the_clip_norm_under_either_relation() -> None:
    """The convention: std = noise_multiplier × sensitivity = noise_multiplier × clip_norm and a margin, always."""
    for relation in ("add-remove", "replace-one"):
        found = plan(clip_norm=0.3, relation=relation)
        assert found.sensitivity == 0.3 * (1 + ROUNDING_MARGIN)
        assert found.noise.noise_multiplier == 1.1
    assert plan(relation="replace-one").guarantee().epsilon > plan().guarantee().epsilon


def test_the_guarantee_is_the_events() -> None:
    found = plan()
    assert found.guarantee().epsilon == account(found.event(), 1e-5).epsilon
    assert found.guarantee(1e-7).epsilon > found.guarantee().epsilon
    assert found.guarantee(1e-7).delta == 1e-7


def test_the_sentence_says_everything() -> None:
    text = str(plan().guarantee())
    for words in (
        "adding or removing one record",
        "δ = 1e-05",
        "poisson",
        "gaussian",
        "pld",
        "Thm 11",
        "every iterate",
    ):
        assert words in text
    for words in (
        "the plan's own sampler",
        "compared with plain autograd",
        "public constants",
        "one function adds noise",
        "cryptographic",
    ):
        assert words in text
    assert "replacing one record" in str(plan(sampling="partition").guarantee())
    assert "means no protection" in str(plan(noise_multiplier=0.2).guarantee())


def test_the_sentence_never_rounds_epsilon_down() -> None:
    for sigma in (0.7, 1.0, 1.3, 2.1):
        guarantee = plan(noise_multiplier=sigma).guarantee()
        said = float(str(guarantee).split("ε = ")[1].split(",")[0])
        assert guarantee.epsilon <= said <= guarantee.epsilon * 1.001


def test_an_insecure_seed_is_said_to_void_the_guarantee() -> None:
    guarantee = plan(insecure_seed=7).guarantee()
    assert not guarantee.secure
    assert "does NOT hold against anyone who knows the insecure seed" in str(guarantee)
    assert not plan(insecure_seed=7).source().secure
    assert plan().source().secure


def test_guarantees_are_json_able() -> None:
    document = json.loads(json.dumps(plan().guarantee().to_dict()))
    assert document["epsilon"] == plan().guarantee().epsilon
    assert document["sentence"] == str(plan().guarantee())
    assert len(document["assumptions"]) == 5


@pytest.mark.parametrize(
    ("changes", "sampling", "relation"),
    [
        ({}, Poisson(0.01), "add-remove"),
        ({"sampling": "truncated-poisson", "cap": 150}, TruncatedPoisson(0.01, 150), "add-remove"),
        ({"sampling": "partition"}, Partition(100), "replace-one"),
        ({"sampling": "without-replacement"}, WithoutReplacement(100), "replace-one"),
    ],
)
def test_samplers_and_their_relations(changes: dict[str, Any], sampling: object, relation: str) -> None:
    found = plan(**changes)
    assert found.sampling == sampling
    assert found.relation == relation
    assert found.sampling_rate == 0.01
    assert found.expected_batch == pytest.approx(100)
    assert found.guarantee().sampler == found.sampling.name


CLIPPINGS = st.sampled_from([FlatClip(0.5), AutomaticClip(), L1Clip(2.0), PerLayerClip(1.0, split=(1.0, 0.5))])


@given(
    sigma=st.floats(0.5, 50),
    rate=st.floats(1e-4, 1),
    clipping=CLIPPINGS,
    seed=st.none() | st.integers(0, 2**40),
    divisor=st.floats(0.1, 1e6),
    statistic=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_plans_survive_json_exactly(
    sigma: float, rate: float, clipping: Any, seed: int | None, divisor: float, statistic: bool
) -> None:
    found = plan(
        noise_multiplier=sigma,
        expected_batch=rate * 10_000,
        clipping=clipping,
        insecure_seed=seed,
        divisor=divisor,
        statistics=(Statistic("mean", 3.0, count=2),) if statistic else (),
    )
    assert Plan.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_plans_are_frozen_and_strict() -> None:
    found = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.steps = 1  # type: ignore[misc]
    for broken in ({**found.to_dict(), "extra": 1}, {k: v for k, v in found.to_dict().items() if k != "delta"}):
        with pytest.raises(InputError, match="must have exactly the keys"):
            Plan.from_dict(broken)
    with pytest.raises(InputError, match="noise must be"):
        Plan.from_dict({**found.to_dict(), "noise": {"name": "uniform", "noise_multiplier": 1.0}})


def test_l1_clipping_takes_laplace_noise() -> None:
    found = plan(clipping=L1Clip(2.0))
    assert found.noise.name == "laplace"
    assert found.guarantee().mechanism == "laplace"
    with pytest.raises(Refused, match="clipping"):
        dataclasses.replace(found, clipping=FlatClip(1.0))


def test_statistics_cost_budget_and_calibration_pays_for_them() -> None:
    statistic = Statistic("feature means", 6.0)
    assert plan(statistics=(statistic,)).guarantee().epsilon > plan().guarantee().epsilon
    free = plan(noise_multiplier=..., epsilon=2.0)
    paid = plan(noise_multiplier=..., epsilon=2.0, statistics=(statistic,))
    assert paid.noise.noise_multiplier > free.noise.noise_multiplier
    assert 2.0 - 1e-3 <= paid.guarantee().epsilon <= 2.0
    with pytest.raises(InputError, match="can't be reached"):
        plan(noise_multiplier=..., epsilon=0.3, statistics=(statistic,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": 3.0}, "exactly one of epsilon and noise_multiplier"),
        ({"noise_multiplier": ...}, "exactly one of epsilon and noise_multiplier"),
        ({"epochs": 3}, "exactly one of epochs and steps"),
        ({"steps": ...}, "exactly one of epochs and steps"),
        ({"steps": ..., "epochs": 0}, "epochs"),
        ({"clip_norm": 1.0, "clipping": FlatClip(1.0)}, "either clip_norm"),
        ({"clipping": "l1"}, "one of sordino.clipping"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"records": 0}, "records"),
        ({"records": 10.5}, "records"),
        ({"expected_batch": 20_000}, "exceeds the number of records"),
        ({"expected_batch": 0}, "expected_batch"),
        ({"expected_batch": 10.5, "sampling": "partition"}, "whole number"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": ..., "epsilon": -1.0}, "epsilon"),
        ({"steps": 0}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"divisor": 0.0}, "divisor"),
        ({"divisor": 1e-13}, "divisor"),
        ({"divisor": 1e13}, "divisor"),
        ({"sampling": "shuffle"}, "sampling"),
        ({"sampling": "truncated-poisson"}, "needs a cap"),
        ({"cap": 10}, "cap is an option"),
        ({"relation": "zero-out"}, "relation"),
        ({"sampling": "partition", "relation": "add-remove"}, "replace-one"),
        ({"sampling": "without-replacement", "relation": "add-remove"}, "replace-one"),
        ({"clipping": L1Clip(1.0), "sampling": "without-replacement"}, "Laplace"),
        ({"clipping": L1Clip(1.0), "relation": "replace-one"}, "Laplace"),
        ({"accountant": "gdp"}, "accountant"),
        ({"expected_batch": 1e-300, "steps": None, "epochs": 1.0}, "steps"),
        ({"expected_batch": 1e-320, "sampling": "allocation"}, "batches of an epoch"),
        ({"clip_norm": 2.2e-45}, "clip_norm"),
        ({"clipping": PerLayerClip(1e-13)}, "clip_norm"),
        ({"clip_norm": 1e31}, "clip_norm"),
        ({"insecure_seed": -1}, "insecure_seed"),
        ({"insecure_seed": True}, "insecure_seed"),
    ],
)
def test_every_wrong_plan_is_refused_with_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan(**changes)


@pytest.mark.parametrize(
    "options",
    [
        {"purpose": "", "noise_multiplier": 1.0},
        {"purpose": "gradient", "noise_multiplier": 1.0},
        {"purpose": "mean", "noise_multiplier": 0.0},
        {"purpose": "mean", "noise_multiplier": 1.0, "sampling_rate": 1.1},
        {"purpose": "mean", "noise_multiplier": 1.0, "count": 0},
        {"purpose": "mean", "noise_multiplier": 1.0, "mechanism": "uniform"},
    ],
)
def test_wrong_statistics_are_input_errors(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Statistic(**options)


def test_rdp_is_refused_where_there_is_none() -> None:
    with pytest.raises(Refused, match="Rényi"):
        plan(relation="replace-one", accountant="rdp").guarantee()
    assert plan(accountant="rdp").guarantee().accountant == "rdp"


class Loose(FlatClip):
    """A clipping that does not clip, and says that it is flat."""


class Often(Poisson):
    """A sampler that could draw otherwise than its name says."""


@pytest.mark.parametrize("changes", [{"clipping": Loose(1.0)}, {"sampling": Often(0.01)}])
def test_what_is_derived_from_our_classes_is_not_proven(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="derived"):
        dataclasses.replace(plan(), **changes)
