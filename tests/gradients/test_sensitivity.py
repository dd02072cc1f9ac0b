"""What one record moves a sum by, as computed: at most C·(1 + the plan's margin), for every form, whatever the records.

The bounds are theorems (docs/guarantees/noise.md, section 6). Here are records that an adversary would choose:
positions that nearly cancel, rows of all sizes that a number can have, sums whose rounding depends on who is in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn
from sordino.clipping import AutomaticClip, Clipping, FlatClip, L1Clip, L2LinfClip, NormalisedClip, PerLayerClip
from sordino.gradients import ClippedSum, Rows, clipped_sum
from sordino.gradients.engine import add_clipped
from sordino.gradients.layers.convolution import Convolved, Geometry, weight_gradient
from sordino.gradients.sums import contributions as forms
from sordino.gradients.sums.contributions import Contribution
from sordino.gradients.sums.memory import blocked
from sordino.gradients.sums.runs import RUN, stable
from sordino.gradients.sums.single import Scaled, Shift, Single
from sordino.gradients.sums.standardisation import Mapped, standardised_weight
from sordino.gradients.sums.totals import Total
from sordino.plan import ROUNDING_MARGIN
from sordino.records.gradients import record_gradients
from sordino.sampling import LogicalBatch

MOST = 1 + ROUNDING_MARGIN
CLIPPINGS: list[Clipping] = [
    FlatClip(1.0), AutomaticClip(1.0), NormalisedClip(1.0), PerLayerClip(1.0), L1Clip(1.0), L2LinfClip(1.0, p=4.0)
]  # fmt: skip


def signed(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.flatten(1)
    return (flat @ torch.linspace(0.1, 1.0, flat.shape[1], dtype=flat.dtype)) * targets


def length(sums: Mapping[str, Tensor], clipping: Clipping) -> float:
    return float(torch.cat([v.flatten().double() for v in sums.values()]).norm(1 if clipping.norm == "l1" else 2))


def apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor], clipping: Clipping) -> float:
    return length({name: value.double() - second[name].double() for name, value in first.items()}, clipping)


class Tied(nn.Module):
    """An embedding that is the output layer as well: a row-sparse part and one of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 6))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return F.linear(x[:, None] * F.embedding(ids, self.table), self.table)


def _weight(positions: int, d_in: int, d_out: int, bias: bool = True) -> nn.Module:
    return Fn(lambda s, x: s.l(x).sum(1) if positions > 1 else s.l(x), l=nn.Linear(d_in, d_out, bias=bias))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "single": (lambda: _weight(1, 20, 12), (20,)),
    "few positions": (lambda: _weight(2, 200, 30), (2, 200)),
    "many positions": (lambda: _weight(40, 300, 300), (40, 300)),
    "held products": (lambda: _weight(40, 8, 6), (40, 8)),
    "convolution": (lambda: nn.Conv2d(3, 5, 3, padding=1), (3, 6, 6)),
    "1×1 convolution": (lambda: nn.Conv2d(200, 30, 1), (200, 1, 2)),
    "convolution of many weights": (lambda: nn.Conv2d(32, 64, 3, padding=1), (32, 2, 2)),
    "layer norm": (lambda: nn.LayerNorm(20), (20,)),
    "scaled weight": (lambda: Fn(lambda s, x: F.linear(x, s.l.weight * s.g), l=nn.Linear(20, 12, bias=False),
                                 g=nn.Parameter(torch.rand(12, 1))), (20,)),
    "standardised": (lambda: Fn(lambda s, x: F.linear(x, standardised_weight(s.l.weight), s.l.bias),
                                l=nn.Linear(20, 12)), (20,)),
    "part of a weight": (lambda: Fn(lambda s, x: F.linear(x[..., :8], s.l.weight[:, :8]) + s.l(x),
                                    l=nn.Linear(20, 12)), (20,)),
    "used twice": (lambda: Fn(lambda s, x: s.l(x[:, 0]) - s.l(x[:, 1]), l=nn.Linear(20, 12)), (2, 20)),
}  # fmt: skip

SIZES = [1e-38, 1e-22, 1e-12, 1e-3, 1.0, 1e3, 1e12, 3e18, 1e25, 1e34]


def records(shape: tuple[int, ...], n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of all sizes; in every other one, what is in the second half nearly cancels the first half."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=generator)
    if len(shape) > 1:
        half = shape[0] // 2
        gap = 1 + 10.0 ** torch.randint(-8, -1, (n,), generator=generator).double()
        nearly = -(x[:, :half].double() * gap.reshape(-1, *[1] * len(shape))).float()
        x[::2, half : 2 * half] = nearly[::2]
    sizes = torch.tensor(SIZES)[torch.randint(len(SIZES), (n,), generator=generator)]
    return x * sizes.reshape(-1, *[1] * len(shape)), torch.ones(n)


@pytest.mark.parametrize("blocks", [False, True], ids=["one by one", "in blocks"])
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: c.name)
@pytest.mark.parametrize("name", MODELS)
def test_taking_a_record_out_moves_the_sum_by_the_clip_norm_at_most(
    name: str, clipping: Clipping, blocks: bool
) -> None:
    """In blocks: with the records' numbers, by which they are added up in single precision, and rounded to it."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x, y = records(shape, 12, seed=1)

    def summed(chosen: Tensor) -> ClippedSum:
        keys = chosen.nonzero().flatten() if blocks else None
        return clipped_sum(model, signed, Rows(x[chosen], y[chosen]), clipping, keys=keys, narrow=blocks)

    everybody = torch.ones(len(x), dtype=torch.bool)
    whole = summed(everybody)
    assert whole.dropped == 0, "all of them are finite"
    if blocks and clipping.name not in ("l1", "l2-linf"):
        assert all(value.dtype == torch.float32 for value in whole.sums.values())
    for i in range(len(x)):
        gone = torch.arange(len(x)) == i
        assert apart(whole.sums, summed(~gone).sums, clipping) <= MOST
        assert length(summed(gone).sums, clipping) <= MOST


@pytest.mark.parametrize("name", MODELS)
def test_a_record_that_is_clipped_is_as_long_as_the_clip_norm(name: str) -> None:
    """The bounds do not shorten anybody by much: where nothing cancels, a clipped record has the clip norm, up to the
    2⁻⁸ that inner products in single precision may add to a norm (`contributions.RAISED`)."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), 1e4 * torch.randn(1, *shape)
    found = clipped_sum(model, signed, Rows(x, torch.ones(1)), FlatClip(1e-3))
    assert length(found.sums, FlatClip(1.0)) == pytest.approx(1e-3, rel=2**-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", MODELS)
def test_a_record_that_is_not_finite_leaves_the_others_as_they_are(name: str, bad: float) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(6, *shape)
    x[2].flatten()[3] = bad
    x[4] = bad
    keep = torch.tensor([0, 1, 3, 5])
    for clipping in CLIPPINGS:
        found = clipped_sum(model, signed, Rows(x, torch.ones(6)), clipping)
        expected = clipped_sum(model, signed, Rows(x[keep], torch.ones(4)), clipping)
        assert found.dropped == 2
        assert apart(found.sums, expected.sums, clipping) < 1e-5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-4, 1e-2])
def test_a_table_that_is_the_output_layer_too(size: float, gap: float) -> None:
    """The row-sparse part and the positions are made to cancel, but for `gap`."""
    torch.manual_seed(0)
    model = Tied()
    ids = torch.randint(40, (5, 3))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().sum((1, 2)) * targets - (1 + gap) * outputs.sum((1, 2)) * targets

    x = torch.full((5, 1), size).clamp(1e-12, 1e12)
    rows = Rows((ids, x), torch.ones(5))
    whole = clipped_sum(model, loss, rows, FlatClip(1.0))
    for i in range(5):
        rest = torch.arange(5) != i
        there = clipped_sum(model, loss, Rows((ids[rest], x[rest]), torch.ones(4)), FlatClip(1.0))
        assert apart(whole.sums, there.sums, FlatClip(1.0)) <= MOST


@pytest.mark.parametrize(
    ("positions", "features", "value", "gap"),
    [
        (2, 4096, 1.0042842626571655, 0.004786120727658272),
        (4, 1024, 1.438990592956543, 0.003552422160282731),
        (2, 1024, 1.7915019989013672, 0.0024559886660426855),
    ],
)
@pytest.mark.parametrize("kernel", [False, True], ids=["linear", "1×1 convolution"])
def test_positions_of_equal_features_that_nearly_cancel(
    positions: int, features: int, value: float, gap: float, kernel: bool
) -> None:
    """Norms from inner products in single precision were too small here, by up to 3.46."""
    torch.manual_seed(0)
    x = torch.full((1, positions, features), value)
    x[:, positions // 2 :] = -torch.tensor(value) * (1 + torch.tensor(gap))
    model: nn.Module = _weight(positions, features, 64, bias=False)
    if kernel:
        model, x = nn.Conv1d(features, 64, 1, bias=False), x.mT.contiguous()
    loss = signed if not kernel else lambda out, y: signed(out.sum(2), y)
    found = clipped_sum(model, loss, Rows(x, torch.ones(1)), FlatClip(1e-3))
    assert 0.99e-3 <= length(found.sums, FlatClip(1.0)) <= MOST * 1e-3


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("shape", [(8, 1), (8, 10), (100, 40)])
@pytest.mark.parametrize("power", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("n", [512, 2048])
def test_the_rounding_of_a_long_sum_does_not_depend_on_one_record(
    shape: tuple[int, int], power: int, n: int, positions: int
) -> None:
    """A sum grows to a power of two, where half a unit more or less decides how all that follow are rounded."""
    count, linear = 2**power, nn.Linear(*shape, bias=False)
    model = linear if positions == 1 else Fn(lambda s, x: _apart(s.l, x, positions), l=linear)
    x, y = torch.zeros(n, shape[0]), torch.zeros(n, shape[1])
    y[:, 0] = 1
    x[: count - 1, 0], x[count - 1, 0], x[count, 0] = 1, 0.5, 1
    x[count + 1 :, 0] = -(2.0 ** (power - 24))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).sum(1)

    sums = record_gradients(model, loss, (x, y), FlatClip(1.0))
    whole = sums(LogicalBatch(0, torch.arange(n), n)).sums
    there = sums(LogicalBatch(0, torch.tensor([i for i in range(n) if i != count]), n)).sums
    assert apart(whole, there, FlatClip(1.0)) <= MOST


def _apart(linear: nn.Module, x: Tensor, positions: int) -> Tensor:
    """The rows as the first of several positions, the others zero."""
    return linear(F.pad(x[:, None], (0, 0, 0, positions - 1))).sum(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Fn(lambda s, x: s.b(torch.relu(s.a(x)).sum(1)), a=nn.Linear(30, 20), b=nn.Linear(20, 4)).to(dtype)
    x = (torch.randn(9, 3, 30) * 10.0 ** torch.arange(-4, 5).reshape(-1, 1, 1)).clamp(-1e3, 1e3).to(dtype)
    loss = lambda out, y: signed(out.float(), y)  # noqa: E731
    whole = clipped_sum(model, loss, Rows(x, torch.ones(9)), FlatClip(0.1))
    assert whole.dropped == 0
    for i in range(9):
        rest = torch.arange(9) != i
        there = clipped_sum(model, loss, Rows(x[rest], torch.ones(8)), FlatClip(0.1))
        assert apart(whole.sums, there.sums, FlatClip(0.1)) <= 0.1 * MOST


def _forms() -> dict[str, Callable[[Tensor, Tensor], Contribution]]:
    """Every form, from left (m, S, p) and right (m, S, q)."""

    def lookup(left: Tensor, right: Tensor) -> Contribution:
        return forms.Lookup(torch.arange(left.shape[1]).repeat(len(left), 1), left, left.shape[1])

    def shift(left: Tensor, right: Tensor) -> Contribution:
        return Shift(Scaled(left[:, 0]), len(left), forms.squares(left[:, 0]))

    def single(left: Tensor, right: Tensor) -> Contribution:
        a, b = left[:, 0], right[:, 0]
        return Single(Scaled(a), b, forms.squares(b, forms.squares(a)))

    def total(left: Tensor, right: Tensor) -> Contribution:
        return Total([forms.Outer(left, right), forms.Dense(torch.bmm(left.mT, right))])

    return {
        "dense": lambda a, b: forms.Dense(torch.bmm(a.mT, b)), "outer": forms.Outer, "lookup": lookup,
        "shift": shift, "single": single, "total": total,
        "mapped": lambda a, b: Mapped(forms.Outer(a, b), lambda g: None),
    }  # fmt: skip


@pytest.mark.parametrize("name", _forms())
@pytest.mark.parametrize("positions", [1, 3, 40])
def test_zero_times_a_number_that_is_not_finite_is_zero(name: str, positions: int) -> None:
    """A form that was told to drop a record adds what it adds without it, to the last digit."""
    torch.manual_seed(0)
    left, right = torch.randn(5, positions, 6), torch.randn(5, positions, 7)
    good = torch.tensor([True, False, True, False, True])
    shape = _forms()[name](left, right).dense(0, 1).shape[1:]
    totals = []
    for rows in (good, slice(None)):
        a, b = left.clone(), right.clone()
        if rows is good:
            a[~good], b[~good] = 0, 0
        else:
            a[1], b[1], a[3], b[3] = torch.nan, torch.inf, 0, -torch.inf
        form = _forms()[name](a, b)
        if rows is not good:
            form.drop(~good)
        total = torch.zeros(shape, dtype=torch.float64)
        form.add_to(total, torch.where(good, torch.linspace(0.1, 1.0, 5, dtype=torch.float64), 0))
        totals.append(total)
    assert torch.isfinite(totals[1]).all()
    assert torch.equal(totals[0], totals[1])


def test_the_many_weights_of_a_convolution_are_held_as_activations() -> None:
    """So that the models above are what they are called."""
    geometry = Geometry((64, 32, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    found = weight_gradient(torch.randn(2, 1, 64, 2, 2), torch.randn(2, 1, 32, 2, 2), geometry)
    assert isinstance(found, Convolved)


class TestBlocks:
    @pytest.mark.parametrize("seed", range(20))
    def test_one_record_less_changes_one_block_or_joins_two(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randperm(3000, generator=generator)[: 50 + 40 * seed].sort()[0].tolist()

        def blocks(chosen: list[int]) -> set[tuple[int, ...]]:
            bounds = stable(chosen)
            assert bounds[0] == 0
            assert bounds[-1] == len(chosen)
            return {tuple(chosen[lo:hi]) for lo, hi in itertools.pairwise(bounds.tolist())}

        whole = blocks(keys)
        assert max(map(len, whole)) <= RUN
        for gone in keys[:: max(1, len(keys) // 30)]:
            rest = blocks([key for key in keys if key != gone])
            assert len(whole - rest) <= 2
            assert len(rest - whole) <= 1
            assert sum(map(len, whole - rest)) <= RUN + 1

    @pytest.mark.parametrize("outputs", [1, 2, 7, 24, 25])
    @pytest.mark.parametrize("columns", [1, 511, 512, 1030, 4097])
    def test_what_a_block_adds_does_not_depend_on_the_others(self, outputs: int, columns: int) -> None:
        """Bit by bit: the blocks that a missing record leaves alone are taken to be the same ones."""
        left, right = torch.randn(150, outputs), torch.randn(150, columns)
        bounds, ones = np.array([0, 61, 61, 125, 150], np.int64), torch.ones(4, dtype=torch.float64)
        whole, parts = (torch.zeros(outputs, columns, dtype=torch.float64) for _ in range(2))
        blocked(whole, left, right, bounds, ones)
        for lo, hi in itertools.pairwise(bounds.tolist()):
            alone = torch.zeros(outputs, columns, dtype=torch.float64)
            shape = torch.full((hi - lo + 3, columns), torch.nan), torch.full((hi - lo + 3, outputs + 5), torch.nan)
            shape[0][:-3], shape[1][:-3, :outputs] = right[lo:hi], left[lo:hi]  # elsewhere in memory
            blocked(alone, shape[1][:, :outputs], shape[0], np.array([0, hi - lo], np.int64), ones[:1])
            parts += alone
        assert torch.equal(whole, parts)
        assert torch.allclose(whole, left.double().mT @ right.double(), rtol=0, atol=1e-4)

    @pytest.mark.parametrize("each", [1, 3, 16, 64, 200])
    @pytest.mark.parametrize("columns", [5, 129])
    def test_the_rows_of_a_record_are_added_up_first(self, each: int, columns: int) -> None:
        """Also where a block is not a whole number of tiles; rounded to single precision it is the same sum."""
        records, outputs = 12, 30
        left, right = torch.randn(records * each, outputs), torch.randn(records * each, columns)
        bounds, ones = each * np.array([0, 5, 5, 12], np.int64), torch.ones(3, dtype=torch.float64)
        whole = torch.zeros(outputs, columns, dtype=torch.float64)
        blocked(whole, left, right, bounds, ones, each)
        assert torch.allclose(whole, left.double().mT @ right.double(), rtol=0, atol=1e-5 * (records * each) ** 0.5)

    @pytest.mark.parametrize("keys", [[3, 2], [1, 1], [-1, 2]])
    def test_keys_that_are_not_sorted_are_a_mistake(self, keys: list[int]) -> None:
        with pytest.raises(ValueError, match="sorted"):
            stable(keys)

    def test_no_records_have_no_blocks(self) -> None:
        assert stable([]).tolist() == [0]


def test_norms_above_the_range_of_squares_are_clipped_and_told() -> None:
    """A gradient of 1e25 has a square that single precision does not hold; it was dropped once."""
    model = nn.Linear(5, 3)
    found = clipped_sum(model, signed, Rows(torch.full((2, 5), 1e25), torch.ones(2)), FlatClip(1.0))
    assert found.dropped == 0
    assert bool((found.norms > 1e24).all())
    assert length(found.sums, FlatClip(1.0)) == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize("size", [1e20, 1e30, 3e38])
def test_coordinates_that_overflow_are_not_truncated_to_the_bound(size: float) -> None:
    """The norm of a product is computed from its factors; infinite coordinates of the product moved the sum by 9 C."""
    torch.manual_seed(0)
    model, clipping = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), L2LinfClip(1.0)
    x, y = torch.cat([torch.randn(7, 8), torch.full((1, 8), size)]), torch.ones(8)
    loss = lambda outputs, targets: (outputs - targets[:, None]).square().sum(1)  # noqa: E731
    both, without = (clipped_sum(model, loss, Rows(x[:n], y[:n]), clipping).sums for n in (8, 7))
    assert length({name: both[name] - without[name] for name in both}, clipping) <= MOST


def test_a_product_that_overflows_is_dropped() -> None:
    gradients = {"weight": forms.Outer(torch.full((2, 40, 3), 1e20), torch.full((2, 40, 50), 1e20))}
    parameters, sums = {"weight": torch.zeros(3, 50)}, {}
    _, dropped = add_clipped(gradients, FlatClip(1.0), parameters, sums, 2, torch.float32)
    assert dropped == 2
    assert torch.equal(sums["weight"], torch.zeros(3, 50, dtype=torch.float64))
