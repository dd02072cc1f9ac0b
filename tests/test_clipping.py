"""Every clipping keeps its bound, for every gradient, and survives a round trip through JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.clipping import (
    AutomaticClip,
    Clipping,
    FlatClip,
    L1Clip,
    L2LinfClip,
    NormalisedClip,
    PerLayerClip,
    clipping_from_dict,
)
from sordino.errors import InputError

ALL: list[Clipping] = [
    FlatClip(0.5),
    AutomaticClip(0.5, 0.02),
    NormalisedClip(2.0),
    PerLayerClip(1.0, "sqrt-dim"),
    PerLayerClip(1.0, (1.0, 3.0)),
    L1Clip(3.0),
    L2LinfClip(1.0, 100.0),
]


@pytest.mark.parametrize("clipping", ALL, ids=lambda c: c.name)
def test_round_trip_through_json(clipping: Clipping) -> None:
    assert clipping_from_dict(json.loads(json.dumps(clipping.to_dict()))) == clipping


@pytest.mark.parametrize("clipping", ALL, ids=lambda c: c.name)
def test_replacing_a_record_moves_the_sum_twice_as_far(clipping: Clipping) -> None:
    assert clipping.sensitivity("add-remove") == clipping.clip_norm
    assert clipping.sensitivity("replace-one") == 2 * clipping.clip_norm
    with pytest.raises(InputError, match="relation"):
        clipping.sensitivity("substitute")


@given(st.floats(0, 1e30), st.sampled_from([FlatClip(0.5), AutomaticClip(0.5), NormalisedClip(0.5)]))
@settings(deadline=None, max_examples=200)
def test_factors_keep_the_bound(norm: float, clipping: Clipping) -> None:
    norms = torch.tensor([norm], dtype=torch.float64)
    factor = float(clipping.factors(norms)[0])
    assert factor >= 0
    assert math.isfinite(factor)
    assert factor * norm <= clipping.clip_norm * (1 + 1e-12)


@pytest.mark.parametrize("clipping", [FlatClip(1.0), AutomaticClip(), NormalisedClip(1.0), L1Clip(1.0)])
def test_records_that_are_not_finite_get_factor_zero(clipping: Clipping) -> None:
    factors = clipping.factors(torch.tensor([float("nan"), float("inf"), 0.0, 0.5]))
    assert factors[:2].tolist() == [0.0, 0.0]
    assert bool(torch.isfinite(factors).all())


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_factors_of_extreme_norms_are_the_formula_rounded_once(kind: type[np.floating]) -> None:
    extremes = [0.0, 1e-45, 1e-38, 1e38, math.inf, -math.inf, math.nan]
    norms = np.array([*np.random.default_rng(0).random(100), *np.logspace(-30, 30, 61), *extremes]).astype(kind)
    found = FlatClip(0.3).factors(torch.from_numpy(norms))
    least, bound = np.finfo(kind).tiny, kind(0.3)
    expected = [min(bound / max(n, least), kind(1)) if np.isfinite(n) else kind(0) for n in norms]
    assert found.numpy().dtype == kind
    assert found.tolist() == [float(x) for x in expected]
    assert torch.equal(FlatClip(0.3).factors(torch.from_numpy(norms)[::2]), found[::2])


def test_a_zero_gradient_is_not_normalised() -> None:
    assert NormalisedClip(1.0).factors(torch.zeros(1)).item() == 0.0


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=2))
@settings(deadline=None, max_examples=50)
def test_layer_bounds_compose_to_the_clip_norm(sizes: list[int]) -> None:
    for split in ("equal", "sqrt-dim", (0.2, 7.0), (1e-300, 1e-305), (1e300, 1e305)):
        bounds = PerLayerClip(1.5, split).bounds(sizes)  # type: ignore[arg-type]
        assert math.isclose(math.sqrt(sum(b * b for b in bounds)), 1.5)


def test_a_split_of_the_wrong_length_is_named() -> None:
    with pytest.raises(InputError, match=r"2 proportions.*3 trainable layers"):
        PerLayerClip(1.0, (1.0, 1.0)).bounds([1, 2, 3])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bounds_must_be_positive_and_finite(bad: float) -> None:
    for make in (FlatClip, AutomaticClip, NormalisedClip, PerLayerClip, L1Clip, L2LinfClip):
        with pytest.raises(InputError, match="clip_norm"):
            make(bad)
    with pytest.raises(InputError, match="gamma"):
        AutomaticClip(1.0, bad)


def test_unknown_clippings_and_fields_are_errors() -> None:
    with pytest.raises(InputError, match="unknown clipping 'ghost'"):
        clipping_from_dict({"name": "ghost"})
    with pytest.raises(InputError, match="flat"):
        clipping_from_dict({"name": "flat", "clip_norm": 1.0, "gamma": 2.0})


def test_coordinates_are_truncated_at_c_over_root_p() -> None:
    assert L2LinfClip(20.0, 100.0).coordinate_bound == 2.0
