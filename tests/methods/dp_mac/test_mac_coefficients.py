"""Grey box: the concatenated coefficient vector of neighbouring batches differs by at most 1 before noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_nets import network, records

from sordino.audit import check_neighbouring
from sordino.clipping import FlatClip
from sordino.errors import ClaimBroken, InputError
from sordino.methods.dp_mac import plan
from sordino.methods.dp_mac.coefficients import (
    BOUNDINGS,
    Coefficients,
    Expansion,
    fixed_bounds,
    layer_terms,
    polynomials,
    scaled_sums,
)
from sordino.methods.dp_mac.network import chain
from sordino.methods.dp_mac.zsteps import ZSteps
from sordino.records.reading import row_reader
from sordino.sampling import LogicalBatch

EXPANSIONS = [
    Expansion(bounding=bounding, order=order, curvature=curvature, value=value)
    for bounding in BOUNDINGS
    for order, curvature in ((1, "full"), (2, "full"), (2, "diagonal"))
    for value in (False, True)
] + [Expansion(split="sqrt-dim", order=2, value=True)]
Z = ZSteps(steps=4, lr=0.05, radius=2.0)


def coefficients(expansion: Expansion, seed: int = 0, scale: float = 1.0, **changes: Any) -> Coefficients:
    activation, output = ("softplus", "relu", "linear")[seed % 3], ("sigmoid", "squared")[seed % 2]
    net = network(activation=activation, output=output, seed=seed)
    x, y = records(net, 20, seed)
    thresholds = None
    if expansion.bounding != "analytic":
        given = {part: [0.05, 0.3, 2.0] for part in expansion.parts}
        thresholds = fixed_bounds(3, expansion, given)
    return Coefficients(net, row_reader((x * scale, y * scale)), changes.get("z", Z), expansion, thresholds)


def mac_plan(expansion: Expansion, **changes: Any) -> Any:
    chosen = {"noise_multiplier": 1.0, "delta": 1e-5, "records": 20, "expected_batch": 10, "steps": 3, **changes}
    return plan(parts=3 * len(expansion.parts), **chosen)


@pytest.mark.parametrize("expansion", EXPANSIONS, ids=str)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), record=st.integers(0, 19), scale=st.sampled_from([1e-6, 0.1, 1.0, 1e4]))
def test_one_record_moves_the_concatenated_vector_by_at_most_one(
    expansion: Expansion, seed: int, record: int, scale: float
) -> None:
    found = check_neighbouring(
        mac_plan(expansion), coefficients(expansion, seed, scale), record, others=torch.arange(seed % 20)
    )
    assert found.sensitivity == 1.0
    assert found.difference <= 1.0 + 1e-9


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_normalised_record_moves_it_by_exactly_one(seed: int) -> None:
    expansion = Expansion(bounding="normalise", order=2, value=True, split=("equal", "sqrt-dim")[seed % 2])
    # softplus: no part of a record is zero (a ReLU layer that is off has no direction to normalise)
    found = check_neighbouring(mac_plan(expansion), coefficients(expansion, 3 * seed), 3, others=torch.arange(8))
    assert found.difference == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("start", ["forward", "backward"])
@pytest.mark.parametrize("order", ["joint", "sweep"])
def test_a_records_coefficients_depend_on_no_other_record(start: str, order: str) -> None:
    """Alone or among others, a record has the same terms: the Z-steps do not mix records."""
    net = network()
    x, y = records(net, 9)
    z = ZSteps(steps=6, lr=0.1, start=start, order=order)
    together = layer_terms(chain(net), x, y, z)
    for n in range(0, 9, 3):
        alone = layer_terms(chain(net), x[n : n + 1], y[n : n + 1], z)
        for one, all_ in zip(alone, together, strict=True):
            torch.testing.assert_close(one.slope[0], all_.slope[n], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(one.inputs[0], all_.inputs[n], rtol=1e-12, atol=1e-12)


def test_a_vector_that_is_not_bounded_is_caught() -> None:
    """The check has teeth: parts that were divided by less than √P break the claim."""
    expansion = Expansion(bounding="normalise")
    honest = coefficients(expansion)

    def faulty(batch: LogicalBatch) -> Any:
        total = honest(batch)
        return replace(total, sums={name: 3**0.5 * value for name, value in total.sums.items()})

    with pytest.raises(ClaimBroken):
        check_neighbouring(mac_plan(expansion), faulty, 0, others=torch.arange(5))


@pytest.mark.parametrize("seed", range(6))
def test_analytic_bounds_never_clip(seed: int) -> None:
    """The proof is not what the guarantee hangs on, but it should be right: no record is ever scaled down."""
    expansion = Expansion(bounding="analytic", order=2, curvature="full", value=True)
    made = coefficients(expansion, seed, scale=10.0)
    terms, bounds = made.terms(torch.arange(20)), made.bounds()
    free = dict.fromkeys(bounds, 1000000000.0)
    clipped = scaled_sums(terms, expansion, bounds).sums
    unclipped = scaled_sums(terms, expansion, free).sums
    for name, value in clipped.items():
        torch.testing.assert_close(value * bounds[name], unclipped[name] * 1e9, rtol=1e-9, atol=1e-12)


def test_records_that_are_not_finite_contribute_zero_and_are_counted() -> None:
    expansion = Expansion(order=2)
    made = coefficients(expansion)
    x, y = records(made.network, 20)
    x[4, 0] = torch.nan
    bad = replace(made, fetch=row_reader((x, y)))
    batch = LogicalBatch(0, torch.arange(3, 6), 2)
    total = bad(batch)
    assert total.dropped == 1
    without = bad(LogicalBatch(0, torch.tensor([3, 5]), 2))
    for name, value in total.sums.items():
        torch.testing.assert_close(value, without.sums[name])


@pytest.mark.parametrize("expansion", EXPANSIONS[:6], ids=str)
def test_an_empty_batch_has_the_shapes_of_a_full_one(expansion: Expansion) -> None:
    made = coefficients(expansion)
    none, some = made(LogicalBatch(0, torch.arange(0), 4)), made(LogicalBatch(0, torch.arange(9), 4))
    assert {n: v.shape for n, v in none.sums.items()} == {n: v.shape for n, v in some.sums.items()}
    assert all(float(v.abs().sum()) == 0 for v in none.sums.values())


def test_reading_back_gives_the_mean_coefficients_when_nothing_is_clipped() -> None:
    expansion = Expansion(order=2, curvature="full", value=True, split="sqrt-dim")
    made = coefficients(expansion)
    free = dict.fromkeys(made.bounds(), 1000000.0)
    made = replace(made, thresholds=free)
    terms, ones = made.terms(torch.arange(20)), torch.ones(20, dtype=torch.float64)
    total = made(LogicalBatch(0, torch.arange(20), 7)).sums
    for term, found in zip(terms, polynomials(total, expansion, free, 3, 0.0), strict=True):
        torch.testing.assert_close(found.gradient, term.gradient_sum(ones))
        assert found.curvature is not None
        assert found.value is not None
        torch.testing.assert_close(found.curvature, found.curvature.mT)
        torch.testing.assert_close(found.value[0], term.value.sum())


def test_bounds_for_another_number_of_layers_are_refused() -> None:
    with pytest.raises(InputError, match="2 bounds on the gradient of 3 layers"):
        fixed_bounds(3, Expansion(), {"gradient": [1.0, 2.0]})
    with pytest.raises(InputError, match="radius"):
        coefficients(Expansion(bounding="analytic"), z=ZSteps(2)).bounds()
    assert coefficients(Expansion()).clipping == FlatClip(1.0)


@pytest.mark.parametrize("bounding", ["clip", "normalise"])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-24, 1e-18, 1e-6, 1e12, 1e30])
def test_single_precision_does_not_let_a_record_through(bounding: str, size: float) -> None:
    """Norms that under- or overflow when squared in single precision are still bounded."""
    expansion = Expansion(bounding=bounding, order=2)
    net = network(activation="relu", output="squared").float()
    x, y = (t.float() * size for t in records(net, 6))
    made = Coefficients(net, row_reader((x, y)), ZSteps(2, 0.1), expansion, fixed_bounds(3, expansion, {}))
    for n in range(6):
        total = made(LogicalBatch(0, torch.tensor([n]), 4)).sums
        norm = torch.cat([value.double().flatten() for value in total.values()]).norm()
        assert float(norm) <= 1.0 + 1e-5
