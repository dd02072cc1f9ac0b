"""Compiled products of matrices, in vectors of 512 and of 256 bits: for each record, linear maps, an LSTM's steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks import attribution
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.layers import lstm, mapped
from sordino.gradients.layers.lstm import LSTM, before
from sordino.gradients.state.watch import watching
from sordino.gradients.sums import record_products as of_records
from sordino.native import threads
from sordino.native.kernels import compiled

KERNELS: Any = compiled()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="installed without a C compiler")
widths = pytest.mark.parametrize("narrow", [False, True], ids=["512 bits, if there are", "256 bits"])
LAYOUTS = ("rows", "columns", "steps first")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def laid_out(layout: str, m: int, s: int, d: int) -> Tensor:
    if layout == "columns":
        return numbers(m, d, s).mT
    return numbers(s, m, d).transpose(0, 1) if layout == "steps first" else numbers(m, s, d)


def products(left: Tensor, right: Tensor, narrow: bool, norms_only: bool = False) -> tuple[Tensor, Tensor]:
    (m, s, p), q = left.shape, right.shape[2]
    out, norm2 = torch.full((m, p, q), torch.nan), torch.full((m,), torch.nan, dtype=torch.float64)
    strides, place = (*left.stride(), *right.stride()[:2]), 0 if norms_only else out.data_ptr()
    KERNELS.products(left.data_ptr(), right.data_ptr(), (m, s, p, q), strides, place, norm2.data_ptr(), narrow)
    return out, norm2


@widths
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("s", "p", "q"), [(1, 1, 1), (3, 8, 32), (7, 9, 33), (64, 17, 5), (511, 8, 31), (513, 9, 40), (1030, 3, 65)]
)
def test_the_product_of_each_record_and_its_norm(s: int, p: int, q: int, layout: str, narrow: bool) -> None:
    left, right = laid_out(layout, 3, s, p), laid_out("steps first" if layout == "columns" else layout, 3, s, q)
    out, norm2 = products(left, right, narrow)
    exact = left.double().mT @ right.double()
    lengths = left.double().abs().mT @ right.double().abs()
    assert bool(((out - exact).abs() <= (s + 1) * 2**-24 * lengths).all())
    assert torch.allclose(norm2, out.double().square().sum((1, 2)), rtol=1e-14)
    assert torch.equal(products(left, right, narrow, norms_only=True)[1], norm2)
    assert torch.equal(products(left[1:2], right[1:2], narrow)[0], out[1:2]), "a record's product is its own"


@widths
def test_a_record_that_is_not_finite_spoils_its_own_norm_and_no_other(narrow: bool) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        for side in range(2):
            pair = [numbers(4, 5, 9), numbers(4, 5, 11)]
            pair[side][2, 4, -1] = value
            norm2 = products(*pair, narrow)[1]
            assert torch.isfinite(norm2).tolist() == [True, True, False, True]


def test_numbers_that_overflow_as_squares_have_norms() -> None:
    left, right = torch.full((1, 1, 2), 2.0**60), torch.full((1, 1, 2), 2.0**60)
    assert float(products(left, right, False)[1]) == 4 * 2.0**240


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_products_in_threads_have_the_same_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = numbers(7, 4, 6), numbers(7, 4, 5)
    alone = of_records.record_products(left, right)
    monkeypatch.setattr(of_records, "SHARED", 0)
    monkeypatch.setattr(of_records, "workers", lambda pieces: min(threads, pieces))
    monkeypatch.setattr("sordino.native.threads.workers", lambda pieces: min(threads, pieces))
    assert all(map(torch.equal, of_records.record_products(left, right), alone))
    found = of_records.product_norms(left, right)
    assert found is not None
    assert torch.equal(found, alone[1])


def test_other_numbers_and_columns_that_are_not_contiguous() -> None:
    left, right = numbers(2, 3, 4), numbers(2, 5, 3).mT
    wanted = left.mT @ right
    for kind in (torch.float32, torch.float64):
        out, norm2 = of_records.record_products(left.to(kind), right.to(kind))
        assert torch.allclose(out, wanted.to(kind), atol=1e-5)
        assert torch.allclose(norm2, out.double().square().sum((1, 2)), rtol=2**-16)
    assert of_records.product_norms(left.double(), right.double()) is None
    empty = of_records.record_products(left[:, :0], right[:, :0])
    assert not bool(empty[0].any())
    assert not bool(empty[1].any())


def linear_map(x: Tensor, matrix: Tensor, bias: Tensor | None, stored: bool, narrow: bool) -> Tensor:
    q = matrix.shape[0 if stored else 1]
    out, least = torch.full((len(x), q), torch.nan), 0 if bias is None else bias.data_ptr()
    sizes = (len(x), x.shape[1], q, x.stride(0), matrix.stride(0), int(stored))
    KERNELS.maps(x.data_ptr(), matrix.data_ptr(), least, sizes, out.data_ptr(), narrow)
    return out


@widths
@pytest.mark.parametrize("stored", [True, False], ids=["(q, p)", "(p, q)"])
@pytest.mark.parametrize(
    ("n", "p", "q"), [(1, 1, 1), (8, 4, 32), (9, 513, 33), (23, 1030, 290), (7, 512, 256), (16, 3, 7)]
)
def test_a_linear_map_row_by_row(n: int, p: int, q: int, stored: bool, narrow: bool) -> None:
    x, bias = numbers(n, p + 3)[:, :p], numbers(q)
    matrix = numbers(q, p) if stored else numbers(p, q)
    by = matrix.double().T if stored else matrix.double()
    out = linear_map(x, matrix, bias, stored, narrow)
    error = (p + 3) * 2**-24 * (x.double().abs() @ by.abs() + bias.abs())
    assert bool(((out - (x.double() @ by + bias)).abs() <= error).all())
    assert torch.equal(linear_map(x[n // 2 :], matrix, bias, stored, narrow), out[n // 2 :]), "rows of their own"
    plain = linear_map(x, matrix, None, stored, narrow)
    assert bool(((plain - x.double() @ by).abs() <= error).all())


@widths
def test_a_row_that_is_not_finite_spoils_no_other(narrow: bool) -> None:
    x, matrix = numbers(11, 40), numbers(9, 40)
    clean = linear_map(x, matrix, None, True, narrow)
    x[10, 3], x[2, 39] = torch.nan, torch.inf
    out = linear_map(x, matrix, None, True, narrow)
    kept = [k for k in range(11) if k not in (2, 10)]
    assert torch.equal(out[kept], clean[kept])
    assert not bool(torch.isfinite(out[10]).any())


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: torch.nn.functional.linear(x, w, b),
    "operator": lambda x, w, b: x @ w,
    "mm": lambda x, w, b: torch.mm(x, mat2=w),
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "method": lambda x, w, b: b.addmm(x, w),
    "keywords": lambda x, w, b: torch.addmm(mat1=x, mat2=w, input=b),
}


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where the loop is faster, for maps of any size."""
    monkeypatch.setattr(mapped, "LEAST", 0)
    monkeypatch.setattr(mapped, "_loop", lambda: KERNELS)


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("stored", [True, False])
def test_the_gradient_of_a_linear_map_is_torchs(stored: bool) -> None:
    x, matrix, bias = numbers(3, 5, 7).requires_grad_(), numbers(6, 7), numbers(6)
    matrix = matrix if stored else matrix.T.contiguous()
    out = mapped.mapped(x, matrix, bias, stored)
    assert out is not None
    up = numbers(6, 5, 3).permute(2, 1, 0)
    (found,) = torch.autograd.grad(out, x, up)
    wanted = x @ (matrix.T if stored else matrix) + bias
    assert torch.allclose(out, wanted, atol=1e-5)
    assert torch.allclose(found, torch.autograd.grad(wanted, x, up)[0], atol=1e-5)
    (one,) = torch.autograd.grad(mapped.mapped(x, matrix, None, stored).sum(), x)  # type: ignore[union-attr]
    assert torch.allclose(one, (matrix.sum(0) if stored else matrix.sum(1)).expand(3, 5, 7), atol=1e-5)


@pytest.mark.usefixtures("pays")
def test_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, matrix = numbers(300, 8), numbers(5, 8)
    alone = mapped.mapped(x, matrix, None)
    monkeypatch.setattr(mapped, "SHARED", 0)
    monkeypatch.setattr(mapped, "workers", lambda pieces: min(3, pieces))
    monkeypatch.setattr("sordino.native.threads.workers", lambda pieces: min(3, pieces))
    found = mapped.mapped(x, matrix, None)
    assert alone is not None
    assert found is not None
    assert torch.equal(found, alone)


@pytest.mark.usefixtures("pays")
def test_what_the_loop_does_not_support_is_left_to_torch() -> None:
    x, matrix = numbers(4, 6), numbers(3, 6)
    assert mapped.mapped(x.double(), matrix.double(), None) is None
    assert mapped.mapped(x, matrix.T, None) is None, "sizes that do not fit are torch's error"
    assert mapped.mapped(x, matrix.T.contiguous().T, None) is None, "columns that are not contiguous"
    assert mapped.mapped(torch.nn.Parameter(x), matrix, None) is None, "another class of tensors"
    assert mapped.mapped(x, matrix, torch.ones(1)) is None, "a bias that is broadcast"
    assert mapped.mapped(x, matrix, torch.ones(6)[::2]) is None, "a bias that is not contiguous"
    with torch.autocast("cpu"):
        assert mapped.mapped(x, matrix, None) is None
    with torch.autograd.forward_ad.dual_level():
        assert mapped.mapped(x, matrix, None) is None
    assert torch.equal(
        torch.func.vmap(lambda row: torch.tensor(mapped.mapped(row, matrix, None) is None))(x[:, None]),
        torch.ones(4, dtype=torch.bool),
    )


def through(
    xp: Tensor, h0: Tensor, c0: Tensor, w: Tensor, reverse: bool, by_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (xp, h0, c0)]
    with monkeypatch.context() as patch:
        if not by_loop:
            patch.setattr(lstm, "compiled", lambda: None)
        out, h, c = LSTM.apply(*leaves, w, reverse)  # type: ignore[no-untyped-call]
        ups = [numbers(*t.shape, seed=k) for k, t in enumerate((out, h, c))]
        found = torch.autograd.grad((out, h, c), leaves, ups)
    return [out.detach(), h.detach(), c.detach(), *found]


@widths
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("steps", "batch", "hidden"), [(1, 1, 1), (4, 8, 5), (3, 11, 33), (6, 19, 16)])
def test_an_lstm_by_the_loop_is_that_in_double_precision(
    steps: int, batch: int, hidden: int, reverse: bool, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    xp = numbers(batch, steps, 4 * hidden).transpose(0, 1) * 2
    h0, c0, w = numbers(batch, hidden), numbers(batch, hidden, seed=1), numbers(4 * hidden, hidden) / 4
    loop = KERNELS.lstm
    monkeypatch.setattr(type(KERNELS), "lstm", lambda _, *given: loop(*given, narrow))
    wanted = through(*(t.double() for t in (xp, h0, c0, w)), reverse, True, monkeypatch)
    for by_loop in (True, False):
        found = through(xp, h0, c0, w, reverse, by_loop, monkeypatch)
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5)
    some = through(xp[:, 1:], h0[1:], c0[1:], w, reverse, True, monkeypatch)
    assert torch.equal(some[0], found_by_loop(xp, h0, c0, w, reverse)[:, 1:]), "the states of the others are the same"


def found_by_loop(xp: Tensor, h0: Tensor, c0: Tensor, w: Tensor, reverse: bool) -> Tensor:
    out: Tensor = LSTM.apply(xp, h0, c0, w, reverse)[0]  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize("reverse", [False, True])
def test_an_lstm_is_torchs_and_every_step_knows_the_state_before_it(reverse: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.LSTM(3, 6, bidirectional=True)
    x, start = numbers(5, 4, 3), numbers(2, 4, 6)
    out, (_, c) = layer(x, (start, start * 2))
    suffix, own = ("_reverse", 1) if reverse else ("", 0)
    w_ih, w_hh, b_ih, b_hh = (
        getattr(layer, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    with torch.no_grad():
        found, h, last = LSTM.apply(x @ w_ih.T + b_ih + b_hh, start[own], 2 * start[own], w_hh, reverse)  # type: ignore[no-untyped-call]
    assert torch.allclose(found, out[..., 6 * own : 6 * own + 6], atol=1e-6)
    assert torch.allclose(last, c[own], atol=1e-6)
    assert torch.equal(h, found[0 if reverse else -1])
    earlier = before(found, start[own], reverse)
    assert torch.equal(earlier[-1 if reverse else 0], start[own])
    assert torch.equal(earlier[:-1] if reverse else earlier[1:], found[1:] if reverse else found[:-1])


@widths
def test_the_gates_of_an_lstm_are_accurate_and_a_record_that_is_not_finite_stays_so(narrow: bool) -> None:
    hidden = 5
    given = numbers(1, 7, 4, hidden) * torch.tensor([0.01, 1, 3, 20])[:, None]
    given[0, 2, 0, 0], given[0, 3, 2, 0] = torch.nan, torch.inf
    c0, zero, room = numbers(7, hidden), torch.zeros(7, hidden), [torch.empty(7, 4 * hidden)]
    room += [torch.empty(2, 7, hidden), torch.empty(7, hidden), torch.empty(7, hidden)]
    tensors, weight = (given, zero, c0), torch.zeros(hidden, 4 * hidden)
    places, to = [t.data_ptr() for t in (*tensors, weight)], [t.data_ptr() for t in room]
    KERNELS.lstm(False, places, (1, 7, hidden, 0, 28 * hidden, 4 * hidden, 0, 7), to, narrow)
    exact = given[0].double()
    i, f, g, o = exact[:, 0].sigmoid(), exact[:, 1].sigmoid(), exact[:, 2].tanh(), exact[:, 3].sigmoid()
    cell = f * c0 + i * g
    found = (*room[0].view(7, 4, hidden).unbind(1), room[1][1], room[3])
    for one, wanted in zip(found, (i, f, g, o, cell, o * cell.tanh()), strict=True):
        assert torch.allclose(one.double(), wanted, rtol=2**-21, atol=2**-21, equal_nan=True)


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("call", CALLS)
def test_in_a_plain_pass_the_forward_pass_has_the_engines_bits_and_torch_gives_the_gradients(call: str) -> None:
    """Else an activation near a kink would differ, and gradients of a sound model with it."""
    leaves = [numbers(40, 6), numbers(5, 6) if call == "linear" else numbers(6, 5), numbers(5)]
    leaves = [t.requires_grad_() for t in leaves]
    used = leaves if call in ("linear", "addmm", "method", "keywords") else leaves[:2]
    wanted = CALLS[call](*leaves)
    with mapped.SameProducts():
        out = CALLS[call](*leaves)
    plain = [t.detach() for t in leaves]
    same = mapped.mapped(plain[0], plain[1], plain[2] if len(used) == 3 else None, call == "linear")
    assert torch.equal(out, same)  # type: ignore[arg-type]
    assert "_Same" in type(out.grad_fn).__name__
    up = numbers(5, 40).T
    for one, other in zip(*(torch.autograd.grad(t, used, up) for t in (out, wanted)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.usefixtures("pays")
def test_other_products_of_a_plain_pass_are_torchs() -> None:
    x, w, b = (numbers(4, 4, seed=k).requires_grad_() for k in range(3))
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.addmm(b, x, w),
        lambda: torch.addmm(b[0], x, w, beta=2),
        lambda: torch.nn.functional.linear(x, w, b[0, :1]),
        lambda: torch.nn.functional.linear(x[0], w),
        lambda: torch.matmul(x, w[0]),
        lambda: torch.nn.functional.linear(x, w.detach()),
        lambda: x.double() @ w.double(),
    ]
    for call in calls:
        with mapped.SameProducts():
            found = call()
        assert "_Same" not in type(found.grad_fn).__name__
        assert torch.equal(found, call())


@pytest.mark.usefixtures("pays")
def test_a_network_with_kinks_is_compared_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of the activations are 0 but for roundings, which depend on the order of a product's additions."""
    torch.manual_seed(0)
    half = numbers(100, 700)
    model = torch.nn.Sequential(torch.nn.Linear(1400, 100, bias=False), torch.nn.ReLU(), torch.nn.Linear(100, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.cat((half, -half), 1)[:, torch.randperm(1400)])
    rows = Rows(numbers(100, 1).expand(100, 1400).contiguous(), torch.zeros(100, dtype=torch.long))
    monkeypatch.setattr(attribution, "in_double_of", lambda *given: pytest.fail("it was computed again in double"))
    assurance = Assurance()
    clipped_sum(model, torch.nn.functional.cross_entropy, rows, FlatClip(1.0), assurance=assurance)
    assert assurance.attributed == 1


@pytest.mark.usefixtures("pays")
def test_threads_of_the_loops_are_not_threads_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass in which the model starts a thread may have read any value there, and each of its batches is tested."""
    for module in (mapped, of_records, lstm):
        monkeypatch.setattr(module, "SHARED", 0)
        monkeypatch.setattr(module, "workers", lambda pieces: min(2, pieces))
    monkeypatch.setattr("sordino.native.threads.workers", lambda pieces: min(2, pieces))
    started: list[threading.Thread] = []
    join = threads._join
    monkeypatch.setattr(threads, "_join", lambda of, *rest: (started.extend(of), join(of, *rest))[1])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LSTM(8, 8, batch_first=True), Last())
    rows = Rows(numbers(128, 3, 8), torch.zeros(128, dtype=torch.long))
    with watching() as seen:
        threading.Thread(target=len, args=((),)).start()
        assert seen.threads, "a thread of the user's own is seen"
    with watching() as seen:
        clipped_sum(model, torch.nn.functional.cross_entropy, rows, FlatClip(1.0))
    assert len(started) > 2, "the loops were divided"
    assert not seen.threads


class Last(torch.nn.Module):
    """The last state of a recurrent layer."""

    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0][:, -1]
