"""The algebra of labels: every operation on a label does to row numbers what the operation does to positions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sordino.gradients.labels.lineage import (
    MANY,
    MIXED,
    Axis,
    Lineage,
    Many,
    Owners,
    aligned,
    along,
    covers,
    cut,
    merged,
    owners,
    permuted,
    reduced,
    reshaped,
    simplest,
    spread,
)

Case = tuple[Axis | Owners, tuple[int, ...], int]


def numbers(label: Lineage, shape: tuple[int, ...], rows: int) -> Tensor:
    """The row of every position."""
    assert not isinstance(label, Many)
    return spread(label, shape, rows)


@st.composite
def labelled(draw: st.DrawFn, unknown: bool = False) -> Case:
    """A label, the shape of its tensor and the number of rows. Sizes are few, so that they coincide."""
    rows = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        axis = Axis(dim, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        shape[dim] = axis.before * rows * axis.after
        return axis, tuple(shape), rows
    varies = [s if draw(st.booleans()) else 1 for s in shape]
    lowest = -1 if unknown else 0
    size = math.prod(varies)
    values = draw(st.lists(st.integers(lowest, rows - 1), min_size=size, max_size=size))
    return Owners(torch.tensor(values).reshape(varies)), tuple(shape), rows


@st.composite
def factorisation(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    shape = []
    while size > 1:
        shape.append(draw(st.sampled_from([f for f in range(2, size + 1) if size % f == 0])))
        size //= shape[-1]
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_along_an_axis_the_row_changes_after_after_indices_and_starts_again_before_times(
    r: int, b: int, a: int
) -> None:
    want = [i for _ in range(b) for i in range(r) for _ in range(a)]
    assert along(Axis(0, b, a), r).tolist() == want


@given(labelled(unknown=True))
def test_owners_have_length_one_where_rows_do_not_vary_and_spread_gives_the_full_shape(case: Case) -> None:
    label, shape, rows = case
    own, whole = owners(label, shape, rows), spread(label, shape, rows)
    assert own.ndim == len(shape)
    assert whole.shape == shape
    assert torch.equal(own.expand(shape), whole)
    if isinstance(label, Axis):
        assert [d for d in range(own.ndim) if own.shape[d] > 1] == ([label.dim] if shape[label.dim] > 1 else [])


@given(st.data(), labelled())
@settings(max_examples=300)
def test_a_reshaped_label_is_the_reshaped_row_numbers(data: st.DataObject, case: Case) -> None:
    label, shape, rows = case
    after = data.draw(factorisation(math.prod(shape)))
    found = reshaped(label, shape, after, rows)
    assert torch.equal(numbers(found, after, rows), spread(label, shape, rows).reshape(after))


@pytest.mark.parametrize(
    ("label", "before", "after", "want"),
    [
        (Axis(0), (4, 3, 2), (12, 2), Axis(0, after=3)),
        (Axis(1), (3, 4, 2), (12, 2), Axis(0, before=3)),
        (Axis(0, after=3), (12, 2), (4, 3, 2), Axis(0)),
        (Axis(0, before=3), (12, 2), (3, 4, 2), Axis(1)),
        (Axis(0), (4, 6), (24,), Axis(0, after=6)),
        (Axis(0, after=4), (16, 4), (4, 4, 4), Axis(0)),
        (Axis(0, after=4), (16, 4), (8, 8), Axis(0, after=2)),
        (Axis(0), (4,), (1, 4, 1), Axis(1)),
    ],
)
def test_rows_merged_with_another_dimension_and_split_again_stay_an_axis(
    label: Axis, before: tuple[int, ...], after: tuple[int, ...], want: Axis
) -> None:
    assert reshaped(label, before, after, 4) == want


def test_rows_cut_across_two_dimensions_are_known_position_by_position() -> None:
    found = reshaped(Axis(0), (4, 2), (2, 4), 4)
    assert isinstance(found, Owners)
    assert found.own.tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_a_reshape_to_nothing_is_not_known() -> None:
    assert reshaped(Axis(0), (4, 0), (0, 7), 4) == MANY


@given(st.data(), labelled(unknown=True))
def test_a_permuted_label_is_the_permuted_row_numbers(data: st.DataObject, case: Case) -> None:
    label, shape, rows = case
    order = data.draw(st.permutations(range(len(shape))))
    after = tuple(shape[d] for d in order)
    assert torch.equal(numbers(permuted(label, order), after, rows), spread(label, shape, rows).permute(order))


@given(st.data(), labelled(unknown=True))
def test_an_aligned_label_is_the_broadcast_row_numbers(data: st.DataObject, case: Case) -> None:
    label, shape, rows = case
    front = data.draw(st.lists(st.integers(1, 4), max_size=2))
    stretched = [data.draw(st.integers(1, 4)) if s == 1 and not _on(label, d) else s for d, s in enumerate(shape)]
    result = (*front, *stretched)
    found = aligned(label, shape, result, rows)
    assert torch.equal(numbers(found, result, rows), spread(label, shape, rows).expand(result))


def _on(label: Axis | Owners, dim: int) -> bool:
    return isinstance(label, Axis) and label.dim == dim


@given(st.data(), labelled(), st.booleans())
@settings(max_examples=200)
def test_a_reduced_label_keeps_the_row_or_says_that_rows_are_mixed(
    data: st.DataObject, case: Case, keepdim: bool
) -> None:
    label, shape, rows = case
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    whole = spread(label, shape, rows)
    low, high = whole.amin(tuple(dims), keepdim), whole.amax(tuple(dims), keepdim)
    found = reduced(label, tuple(dims), keepdim)
    if isinstance(found, Many):
        assert found == MIXED
    else:
        assert torch.equal(low, high)
        assert torch.equal(numbers(found, tuple(low.shape), rows), low)
    if not torch.equal(low, high):
        assert found == MIXED


@given(st.data(), st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3))
@settings(max_examples=300)
def test_merged_labels_agree_wherever_both_have_a_row_and_are_mixed_where_they_do_not(
    data: st.DataObject, rows: int, shape: list[int]
) -> None:
    parts = []
    for _ in range(data.draw(st.integers(2, 3))):
        varies = [s if data.draw(st.booleans()) else 1 for s in shape]
        size = math.prod(varies)
        values = data.draw(st.lists(st.integers(-1, rows - 1), min_size=size, max_size=size))
        parts.append(Owners(torch.tensor(values).reshape(varies)))
    whole = torch.stack([p.own.expand(shape) for p in parts])
    most = whole.amax(0)
    agree = bool(((whole == most) | (whole < 0)).all())
    found = merged(parts, shape, rows)
    assert (found == MIXED) == (not agree)
    if agree:
        got = numbers(found, tuple(shape), rows)
        assert torch.equal(got[most >= 0], most[most >= 0])  # of a position of no row, any label is right


def test_what_is_merged_with_something_unknown_is_unknown_and_with_something_mixed_is_mixed() -> None:
    assert merged([Axis(0), MANY], (3, 2), 3) == MANY
    assert merged([Axis(0), MIXED], (3, 2), 3) == MIXED
    assert merged([MIXED, MANY], (3, 2), 3) == MIXED
    assert merged([Axis(0), Axis(1)], (3, 3), 3) == MIXED
    assert merged([Axis(0), Axis(0)], (3, 3), 3) == Axis(0)


@given(labelled(unknown=True))
@settings(max_examples=300)
def test_the_simplest_form_gives_every_owned_position_its_row(case: Case) -> None:
    label, shape, rows = case
    whole = spread(label, shape, rows)
    found = simplest(whole.clone(), rows)
    got = numbers(found, shape, rows)
    assert torch.equal(got[whole >= 0], whole[whole >= 0])


@given(labelled())
def test_the_simplest_form_of_an_axis_is_an_axis(case: Case) -> None:
    label, shape, rows = case
    found = simplest(spread(label, shape, rows).clone(), rows)
    if isinstance(label, Axis) and rows > 1:
        assert found == label


def test_padding_belongs_to_the_row_that_is_padded_if_rows_lie_along_another_dimension() -> None:
    padded = torch.tensor([[0, 0, -1], [1, -1, -1], [2, 2, 2]])
    assert simplest(padded, 3) == Axis(0)


def test_padding_along_the_rows_themselves_stays_nobodys() -> None:
    found = simplest(torch.tensor([0, 1, 2, -1]), 3)
    assert isinstance(found, Owners)
    assert found.own.tolist() == [0, 1, 2, -1]


def test_positions_of_one_row_and_of_none_along_one_dimension_keep_their_difference() -> None:
    found = simplest(torch.tensor([[1, -1, 1]]), 3)
    assert isinstance(found, Owners)
    assert found.own.tolist() == [[1, -1, 1]]


def test_an_empty_tensor_is_nobodys() -> None:
    found = simplest(torch.empty(0, 3, dtype=torch.int64), 3)
    assert isinstance(found, Owners)
    assert found.own.tolist() == [[-1]]


@given(st.data(), labelled(unknown=True))
def test_a_cut_label_is_the_selected_row_numbers(data: st.DataObject, case: Case) -> None:
    label, shape, rows = case
    dim = data.draw(st.integers(0, len(shape) - 1))
    index = torch.tensor(data.draw(st.lists(st.integers(0, shape[dim] - 1), min_size=1, max_size=6)))
    whole = spread(label, shape, rows).index_select(dim, index)
    got = numbers(cut(label, shape, dim, index, rows), tuple(whole.shape), rows)
    assert torch.equal(got[whole >= 0], whole[whole >= 0])


@given(st.data(), labelled(unknown=True))
def test_a_label_covers_dimensions_if_it_varies_over_no_other_and_has_no_position_without_a_row(
    data: st.DataObject, case: Case
) -> None:
    label, shape, rows = case
    lead = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    whole = spread(label, shape, rows)
    rest = [d for d in range(len(shape)) if d not in lead]
    constant = all(bool((whole == whole.narrow(d, 0, 1)).all()) for d in rest)
    if covers(label, sorted(lead)):
        assert constant
        assert bool((whole >= 0).all())
    elif isinstance(label, Axis):
        assert label.dim in rest


def test_what_is_not_known_covers_nothing() -> None:
    assert not covers(MANY, (0, 1))
    assert not covers(MIXED, (0, 1))
