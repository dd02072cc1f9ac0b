"""Short convolutions that are added to one vector: by the library and by numpy, against loops of Python."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.native import convolutions
from sordino.native.convolutions import add_convolutions
from sordino.native.kernels import compiled

both = pytest.mark.parametrize(
    "way",
    [pytest.param("library", marks=pytest.mark.skipif(compiled() is None, reason="no C compiler")), "numpy"],
)


def ways(test: Callable[..., None]) -> Any:
    """By the library, and by numpy."""
    return pytest.mark.usefixtures("chosen")(both(test))


@pytest.fixture
def chosen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "numpy":
        monkeypatch.setattr(convolutions, "compiled", lambda: None)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[np.ndarray], np.ndarray, int, int, int]:
    """Vectors of any positive sizes, and groups that end at their last elements; lengths around those of the loops."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    points, width = draw(st.sampled_from([1, 31, 32, 33, 100, 511, 513, 1100])), draw(st.integers(1, 40))
    ratio, groups = draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(1, 4))):
        start, first = int(rng.integers(points)), int(rng.integers(width))
        stop, end = int(rng.integers(start, points + 1)), int(rng.integers(first, width + 1))
        groups.append((start, stop, first, end, int(rng.integers(0, 7))))
    groups.append((0, points, 0, width, 6))
    vectors = [np.exp(10 * rng.normal(size=n)) for n in (points + width - 1, width, points)]
    return vectors, np.array(groups), ratio, width - 1, 6 + ratio * (points - 1) + 1


@ways
@given(problem=problems())
def test_every_sum_has_a_small_relative_error(
    way: str, problem: tuple[list[np.ndarray], np.ndarray, int, int, int]
) -> None:
    (values, weights, factors), groups, ratio, shift, size = problem
    out = np.zeros(size)
    add_convolutions(values, weights, factors, groups, ratio, shift, out)
    wanted = np.zeros(size)
    for start, stop, first, end, place in groups.tolist():
        for p in range(start, stop):
            terms = (weights[k] * values[p + shift - k] for k in range(first, end))
            wanted[place + ratio * p] += factors[p] * float(sum(map(Fraction, map(float, terms))))
    np.testing.assert_allclose(out, wanted, rtol=1e-14, atol=0)


@ways
@pytest.mark.parametrize(
    ("group", "shift"),
    [
        ((-1, 5, 0, 3, 0), 2),
        ((0, 6, 0, 3, 0), 2),
        ((0, 5, -1, 3, 0), 2),
        ((0, 5, 0, 4, 0), 2),
        ((0, 5, 0, 3, -1), 2),
        ((0, 5, 0, 3, 1), 2),
        ((0, 5, 0, 3, 0), 1),
        ((0, 5, 0, 3, 0), 3),
    ],
)
def test_a_group_that_reaches_beyond_a_vector_is_refused_and_adds_nothing(
    way: str, group: tuple[int, ...], shift: int
) -> None:
    out = np.zeros(9)
    whole = np.array([[0, 5, 0, 3, 0]])
    add_convolutions(np.ones(7), np.ones(3), np.ones(5), whole, 2, 2, out)
    assert out.tolist() == [3, 0, 3, 0, 3, 0, 3, 0, 3]
    with pytest.raises(ValueError, match="beyond"):
        add_convolutions(np.ones(7), np.ones(3), np.ones(5), np.array([[0, 5, 0, 3, 0], group]), 2, shift, out)
    assert out.sum() == 15


@ways
def test_empty_groups_and_vectors_that_are_not_contiguous(way: str) -> None:
    out = np.zeros(18)[::2]
    nothing = np.array([[3, 3, 0, 3, 99], [0, 5, 2, 2, -4]])
    add_convolutions(np.ones(7), np.ones(3), np.ones(5), nothing, 2, 2, out)
    assert not out.any()
    apart = np.ones(14)[::2], np.ones(6)[::2], np.ones(10)[::2]
    add_convolutions(*apart, np.array([[0, 5, 0, 3, 0]]), 2, 2, out)
    assert out.tolist() == [3, 0, 3, 0, 3, 0, 3, 0, 3]


def test_a_library_that_adds_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        """Does nothing, as a loop that ends too early."""

        def grouped(self, *_: int) -> None:
            pass

    monkeypatch.setattr(convolutions, "compiled", Wrong)
    out = np.zeros(9)
    add_convolutions(np.ones(7), np.ones(3), np.ones(5), np.array([[0, 5, 0, 3, 0]]), 2, 2, out)
    assert out.sum() == 15
