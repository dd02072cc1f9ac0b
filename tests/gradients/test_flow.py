"""The label of every result against the truth: rows are moved one at a time, and gradients are sent back from one."""

# ruff: noqa: SIM905 (tables of names and calls)

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_cases import NOT_HERE, Case
from flow_cases_moves import CASES
from torch import Tensor, nn

from sordino.gradients.labels.flow import flat
from sordino.gradients.labels.lineage import MIXED, Axis, Lineage, Many, Owners, spread
from sordino.gradients.labels.vocabulary import RULES, name_of
from sordino.gradients.layers.rules import RULEBOOK
from sordino.gradients.tape.tape import Tape

ROWS = 3
BUDGET = 8  # labellings of the arguments tried for each operation, and at least two for each call
SELECTS = frozenset(
    """any all where mode isclose argmax argsort argmin sort cummax cummin kthvalue max min median nanmedian aminmax
    topk""".split()
)
"""Answers that may not move with any one row though they look at several."""


def labels_for(t: Tensor, draw: random.Random) -> list[Lineage | None]:
    """Rows on every dimension that they fit, merged before and after; positions of arbitrary rows; no data."""
    found: list[Lineage | None] = []
    for d, size in enumerate(t.shape):
        if size % ROWS == 0:
            inner = size // ROWS
            found += [Axis(d, inner // a, a) for a in range(1, inner + 1) if inner % a == 0]
        if size > 1:
            values = [0, *(draw.randrange(ROWS) for _ in range(size - 2)), 1]
            found.append(Owners(torch.tensor(values).reshape([-1 if k == d else 1 for k in range(t.ndim)])))
    if t.ndim:
        anywhere = torch.tensor([draw.randrange(-1, ROWS) for _ in range(t.numel())])
        found.append(Owners(anywhere.reshape(t.shape)))
    return found


def combinations(case: Case, most: int, draw: random.Random) -> list[tuple[Lineage | None, ...]]:
    """Labels for the tensors of a call: mostly rows on one and the same dimension of all, and any others."""
    own = [labels_for(t, draw) for t in case[1]]
    alike = [tuple(label if label in rest else None for rest in own) for label in own[0]]
    if len(own) == 1:
        draw.shuffle(alike)
        return [(Axis(0),) if Axis(0) in own[0] else alike[0], *alike[: most - 1]]
    other = [tuple(draw.choice([*one, None]) for one in own) for _ in range(most)]
    axes = [tuple(draw.choice([one for one in some if isinstance(one, Axis)] or [None]) for some in own)]
    draw.shuffle(alike)
    chosen = [*alike[: max(1, most // 3)], *axes, *other][: max(3, most)]
    return [c for c in chosen if any(label is not None for label in c)]


class Constants:
    """Whatever was there before is a constant."""

    def constant(self, t: Tensor) -> bool:
        return True

    def registered(self, t: Tensor) -> bool:
        return False

    def open(self, t: Tensor) -> None:
        pass

    def wrote(self, t: Tensor) -> None:
        pass


class Run:
    """One call under the tape: its results, their labels, and what was noted."""

    def __init__(self, call: Callable[..., Any], tensors: tuple[Tensor, ...], labels: Any, graded: Any) -> None:
        self.leaves = [t.clone().requires_grad_() if g else t.clone() for t, g in zip(tensors, graded, strict=True)]
        self.tape = Tape(nn.Identity(), {}, {}, ROWS, RULEBOOK, Constants())
        given = [t.clone() for t in self.leaves]
        for t, label in zip(given, labels, strict=True):
            if label is not None:
                self.tape.book.put(t, label)
        torch.default_generator.manual_seed(0)
        with self.tape:
            self.results = flat(call(*given))
        book = self.tape.book
        for result in self.results:
            book.orders.end(result)
        self.labels = [book.lineage(r) for r in self.results]
        self.noted = book.mixed or book.read or book.crossed is not None
        self.crossed = book.crossed
        self.names = {name_of(func) for func in self.tape.program}


def plain(call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor] | None:
    torch.default_generator.manual_seed(0)
    try:
        return [r.detach() for r in flat(call(*(t.clone() for t in tensors)))]
    except (RuntimeError, IndexError, ValueError):
        return None


def moved_inputs(tensors: tuple[Tensor, ...], labels: Any, row: int) -> list[list[Tensor]]:
    """The inputs with the row's positions changed a little, made large, missing."""
    out = []
    for change in (lambda t: t * 0.9 + 0.01, lambda t: t * 50 + 7, lambda t: t * float("nan")):
        given = []
        for t, label in zip(tensors, labels, strict=True):
            t = t.clone()
            if label is not None:
                here = spread(label, t.shape, ROWS) == row
                if t.dtype == torch.bool:
                    other = ~t
                elif not (t.is_floating_point() or t.is_complex()):
                    other = t.max() - t if len(out) % 2 == 0 else t.roll(1)
                else:
                    other = change(t)
                t = torch.where(here, other, t)
            given.append(t)
        out.append(given)
    return out


def changed(before: list[Tensor], after: list[Tensor] | None) -> list[Tensor]:
    if after is None:
        return [torch.zeros(b.shape, dtype=torch.bool) for b in before]
    found = []
    for b, a in zip(before, after, strict=True):
        if a.shape != b.shape:
            found.append(torch.ones(b.shape, dtype=torch.bool))
        else:
            found.append(~((a == b) | (a.isnan() & b.isnan())))
    return found


def problems(case: Case, labels: Any, graded: Any, seen: set[str]) -> list[str]:
    """Where the labels of the results contradict what the rows do to them."""
    call, tensors = case
    run = Run(call, tensors, labels, graded)
    seen |= run.names
    alone = sum(label is not None for label in labels) == 1
    before = plain(call, list(tensors))
    assert before is not None
    by = [torch.zeros(ROWS, *r.shape, dtype=torch.bool) for r in before]
    for row in range(ROWS):
        for given in moved_inputs(tensors, labels, row):
            for k, where in enumerate(changed(before, plain(call, given))):
                by[k][row] |= where
    found = []
    for k, (result, label) in enumerate(zip(run.results, run.labels, strict=True)):
        several = bool((by[k].sum(0) > 1).any())
        if label == MIXED and alone and not several and not run.names & SELECTS:
            found.append(f"result {k}: MIXED, but no position depends on several rows")
        if isinstance(label, Many):
            continue
        if label is None:
            if bool(by[k].any()) and not run.noted:
                found.append(f"result {k}: no data, but rows move it")
            continue
        own = spread(label, result.shape, ROWS)
        for row in range(ROWS):
            if bool((by[k][row] & (own != row)).any()) and not run.noted:
                found.append(f"result {k}: row {row} moves positions labelled otherwise: {label}")
        found += wrong_gradients(run, k, own, tensors, labels)
    if (
        run.crossed is not None
        and alone
        and not run.names & SELECTS
        and not any(bool((b.sum(0) > 1).any()) for b in by)
    ):
        found.append(f"crossed at {run.crossed}, but no position depends on several rows")
    return found


def wrong_gradients(run: Run, k: int, own: Tensor, tensors: Any, labels: Any) -> list[str]:
    """Gradients from the positions of one row must arrive at positions of that row alone."""
    result = run.results[k]
    if not result.requires_grad or not any(t.requires_grad for t in run.leaves):
        return []
    found = []
    leaves = [(n, t) for n, t in enumerate(run.leaves) if t.requires_grad]
    weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    for row in range(-1, ROWS):
        arriving = weight * (own == row)
        grads = torch.autograd.grad(result, [t for _, t in leaves], arriving, retain_graph=True, allow_unused=True)
        for (n, t), g in zip(leaves, grads, strict=True):
            if g is not None and labels[n] is not None:
                theirs = spread(labels[n], t.shape, ROWS)
                if bool(((g != 0) & (theirs >= 0) & (theirs != row)).any()):
                    found.append(f"result {k}: the gradient of row {row} reaches others in argument {n}: {labels[n]}")
    return found


def graded_ways(tensors: tuple[Tensor, ...], labels: Any, draw: random.Random) -> tuple[bool, ...]:
    able = [t.is_floating_point() and label is not None for t, label in zip(tensors, labels, strict=True)]
    able = [a and not (t.ndim == 1 and len(tensors) == 3) for a, t in zip(able, tensors, strict=True)]  # class weights
    return tuple(able) if draw.random() < 0.6 else tuple(a and draw.random() < 0.5 for a in able)


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    assert set(CASES) | NOT_HERE == set(RULES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_labels_tell_which_rows_each_position_depends_on(name: str) -> None:
    draw, found, seen = random.Random(1), [], set()
    each = max(2, BUDGET // len(CASES[name]))
    for number, case in enumerate(CASES[name]):
        for labels in combinations(case, each, draw):
            graded = graded_ways(case[1], labels, draw)
            try:
                wrong = problems(case, labels, graded, seen)
            except Exception as error:
                wrong = [f"{type(error).__name__}: {str(error)[:200]}"]
            shapes = [tuple(t.shape) for t in case[1]]
            found += [f"call {number} on {shapes} as {labels}, graded {graded}: {w}" for w in wrong]
    assert name in seen, "the operation was not called"
    assert not found, "\n".join(found[:6])


def label_after(call: Callable[..., Any], *given: tuple[Tensor, Lineage | None], graded: bool = True) -> Run:
    tensors = tuple(t for t, _ in given)
    return Run(call, tensors, [label for _, label in given], [graded and t.is_floating_point() for t in tensors])


X, CUBE, TALL = torch.rand(3, 3), torch.rand(3, 3, 3), torch.rand(6, 3)
ZEROS = torch.zeros(3, 3)
KNOWN: list[tuple[Callable[..., Any], Tensor, Axis, Lineage | list[int]]] = [
    (lambda x: torch.relu(x) * 2 + 1, X, Axis(0), Axis(0)),
    (lambda x: x + ZEROS, X, Axis(1), Axis(1)),
    (lambda x: x.mean(1), X, Axis(0), Axis(0)),
    (lambda x: x.mean((1, 2)), CUBE, Axis(0), Axis(0)),
    (lambda x: x.sum(0), CUBE, Axis(1), Axis(0)),
    (lambda x: x.max(-1).values, CUBE, Axis(1), Axis(1)),
    (lambda x: x.softmax(-1), X, Axis(0), Axis(0)),
    (lambda x: x.reshape(9, 3), CUBE, Axis(0), Axis(0, after=3)),
    (lambda x: x.reshape(9, 3), CUBE, Axis(1), Axis(0, before=3)),
    (lambda x: x.view(3, 2, 3), TALL, Axis(0, after=2), Axis(0)),
    (lambda x: x.transpose(0, 1), CUBE, Axis(0), Axis(1)),
    (lambda x: x.permute(2, 0, 1), CUBE, Axis(0), Axis(1)),
    (lambda x: x[:, 1], CUBE, Axis(0), Axis(0)),
    (lambda x: x[..., None], X, Axis(1), Axis(1)),
    (lambda x: x[1], X, Axis(0), [1]),
    (lambda x: x.flip(0), X, Axis(0), [2, 1, 0]),
    (lambda x: x[torch.tensor([1, 2, 0])], X, Axis(0), [1, 2, 0]),
    (lambda x: x.roll(1, 0), X, Axis(0), [2, 0, 1]),
    (lambda x: torch.cat([x, x], 0), X, Axis(0), Axis(0, before=2)),
    (lambda x: torch.cat([ZEROS, x], 1), X, Axis(0), Axis(0)),
    (lambda x: torch.stack([r * 2 for r in x]), X, Axis(0), Axis(0)),
    (lambda x: torch.stack([r.sum() for r in x]), X, Axis(0), Axis(0)),
    (lambda x: torch.stack([x, x], 1), X, Axis(0), Axis(0)),
    (lambda x: x.repeat_interleave(2, 0), X, Axis(0), Axis(0, after=2)),
    (lambda x: x.repeat(2, 1), X, Axis(0), Axis(0, before=2)),
    (lambda x: x.expand(3, 3, 3), X, Axis(0), Axis(1)),
    (lambda x: x @ torch.rand(3, 3), CUBE, Axis(0), Axis(0)),
    (lambda x: torch.rand(3, 3) @ x, CUBE, Axis(0), Axis(0)),
    (lambda x: x @ x.mT, CUBE, Axis(0), Axis(0)),
    (lambda x: torch.einsum("bij,bkj->bik", x, x), CUBE, Axis(0), Axis(0)),
    (lambda x: nn.functional.linear(x, torch.rand(3, 3)), CUBE, Axis(1), Axis(1)),
    (lambda x: nn.functional.conv1d(x, torch.rand(3, 3, 1)), CUBE, Axis(0), Axis(0)),
    (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), CUBE, Axis(0), Axis(0)),
    (lambda x: nn.functional.layer_norm(x, (3,)), CUBE, Axis(1), Axis(1)),
    (lambda x: nn.functional.group_norm(x, 3), CUBE, Axis(0), Axis(0)),
    (lambda x: nn.functional.max_pool1d(x, 2), CUBE, Axis(0), Axis(0)),
    (lambda x: nn.functional.unfold(x[:, None], 2), CUBE, Axis(0), Axis(0)),
    (lambda x: nn.functional.logsigmoid(x), X, Axis(0), Axis(0)),
    (lambda x: nn.functional.threshold(x, 0.5, 0.0), X, Axis(0), Axis(0)),
    (lambda x: nn.functional.pad(x, (1, 1)), X, Axis(0), Axis(0)),
    (lambda x: nn.functional.cross_entropy(x, torch.tensor([0, 1, 2]), reduction="none"), X, Axis(0), Axis(0)),
    (lambda x: x.scatter(1, torch.tensor([[0], [2], [1]]), 0.0), X, Axis(0), Axis(0)),
    (lambda x: x.masked_fill(torch.tensor([True, False, True]), 0.0), X, Axis(0), Axis(0)),
    (lambda x: x.gather(1, torch.tensor([[0], [1], [2]])), X, Axis(0), Axis(0)),
    (lambda x: torch.quantile(x, 0.5, 1), X, Axis(0), Axis(0)),
    (lambda x: x.detach().requires_grad_(), X, Axis(0), Axis(0)),
]


@pytest.mark.parametrize("number", range(len(KNOWN)))
def test_the_usual_forms_have_a_label_and_are_not_measured(number: int) -> None:
    call, x, given, want = KNOWN[number]
    found = label_after(call, (x, given)).labels[0]
    if isinstance(want, list):
        assert isinstance(found, Owners)
        assert found.own.flatten().tolist() == want
    else:
        assert found == want


def test_writing_rows_step_by_step_into_zeros_keeps_them() -> None:
    def steps(x: Tensor) -> Tensor:
        out = torch.zeros(3, 3, 3, dtype=x.dtype)
        for t in range(3):
            out[:, t] = x[:, t] * 2
        return out

    assert label_after(steps, (CUBE, Axis(0))).labels == [Axis(0)]


def test_a_mask_of_rows_written_beside_a_slice_is_not_taken_for_leading_dimensions() -> None:
    def blank(m: Tensor) -> Tensor:
        out = torch.zeros(3, 3)
        out[:, m] = 1.0
        return out

    run = label_after(blank, (torch.tensor([True, False, True]), Axis(0)))
    assert isinstance(run.labels[0], Many)


def test_the_number_of_classes_that_all_rows_decide_is_noted() -> None:
    assert label_after(nn.functional.one_hot, (torch.tensor([0, 1, 2]), Axis(0))).noted
    assert not label_after(lambda i: nn.functional.one_hot(i, 3), (torch.tensor([0, 1, 2]), Axis(0))).noted


def test_copying_one_row_over_another_is_no_combination() -> None:
    def overwrite(x: Tensor) -> Tensor:
        buffer = torch.zeros(3)
        for row in x.detach():
            buffer.copy_(row)
        return buffer

    run = label_after(overwrite, (X, Axis(0)))
    assert run.crossed is None
    assert isinstance(run.labels[0], Owners)


def test_a_mean_over_rows_is_certainly_mixed_and_a_sum_is_not_certain() -> None:
    assert label_after(lambda x: x.mean(0), (X, Axis(0))).labels == [MIXED]
    assert label_after(lambda x: x.sum(0), (X, Axis(0))).labels == [Many()]
    assert label_after(lambda x: x - x.mean(0), (X, Axis(0))).crossed is not None


def test_one_row_after_a_selection_is_not_mixed_by_a_reduction() -> None:
    two = Owners(torch.tensor([[0, 1, 2], [0, 0, 1], [2, 2, 2]]))
    run = label_after(lambda x: x[2].mean(), (X, two))
    assert isinstance(run.labels[0], Owners)
    assert int(run.labels[0].own) == 2
