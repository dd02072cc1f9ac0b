"""The tests of samplers: honest ones pass, and each way to draw otherwise is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sordino.sampling as sampling
from small_audits import small_plan
from sordino.audit.sampling_check import sampling_findings
from sordino.plan import Plan

PLANS = {
    "poisson": {"expected_batch": 12},
    "truncated-poisson": {"expected_batch": 12, "cap": 40},
    "partition": {"expected_batch": 16},
    "without-replacement": {"expected_batch": 16},
    "allocation": {"expected_batch": 16},
}


def plan(name: str) -> Plan:
    return small_plan(noise_multiplier=1.0, sampling=name, **PLANS[name])


@pytest.mark.parametrize("name", PLANS)
def test_the_samplers_follow_their_laws(name: str) -> None:
    for seed in range(5):
        assert sampling_findings(plan(name), steps=200, seed=seed)[1] == []


def drawn_always(rate: float, cap: int, records: int, source: Any, step: int) -> Any:
    return np.union1d(HONEST(rate, cap, records, source, step), [3])


def fixed(rate: float, cap: int, records: int, source: Any, step: int) -> Any:
    return source.stream("sampling", step).subset(records, round(rate * records))


def twice(rate: float, cap: int, records: int, source: Any, step: int) -> Any:
    return HONEST(rate, cap, records, source, step // 2)


def paired(rate: float, cap: int, records: int, source: Any, step: int) -> Any:
    chosen = HONEST(rate, cap, records, source, step)
    return np.union1d(chosen[chosen % 2 == 0], chosen[chosen % 2 == 0] + 1)


HONEST = sampling._poisson


@pytest.mark.parametrize("fault", [drawn_always, fixed, twice, paired])
def test_a_sampler_that_draws_otherwise_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_poisson", fault)
    assert sampling_findings(plan("poisson"), steps=300)[1]
