"""Programs that once had wrong labels: each must be right, measured, or refused; and right ones that crashed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn, agree, noise
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks import attribution
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.checks.neutral import Neutral
from sordino.gradients.passes import Pass, Setup
from sordino.gradients.survey import survey

N = 4  # rows, and every other length: labels must not come from lengths


def squared(out: Tensor, target: Tensor) -> Tensor:
    """Unlike that of the other tests it draws no numbers, which the test of interaction would make equal."""
    flat = out.flatten(1)
    return (flat @ torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype) - target).square()


def layer() -> nn.Linear:
    return nn.Linear(N, N)


def flags(model: nn.Module, x: Tensor, target: Tensor) -> tuple[bool, bool]:
    """What a pass says of the program: are rows proven, and are records independent by proof?"""
    found = survey(model)
    run = Pass(Setup(model, squared, found.parameters, found.state), (x, target), len(x), {})
    run.close()
    return run.proven, run.independent


def _sevenths() -> Tensor:
    return torch.arange(1, N + 1, dtype=torch.float64) / 7


def _recurrent(kind: Any, frozen: bool) -> Fn:
    def forward(m: Any, x: Tensor) -> Any:
        start = m.first(x).flip(0)[None]
        return m.net(x[:, None], (start, start) if kind is nn.LSTM else start)[0]

    model = Fn(forward, first=layer(), net=kind(N, N, batch_first=True))
    model.net.requires_grad_(not frozen)
    return model


def _seen_after_write(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    view = buffer.view(-1)
    buffer.copy_(x)
    return m.first(x) + view.mean()  # type: ignore[no-any-return]


def _replaced_data(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x.data = x.flip(0)
    return m.first(x)  # type: ignore[no-any-return]


def _hooked(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda g: g / g.norm())
    return torch.tanh(hidden)


class CentredView(torch.autograd.Function):
    """The same, of a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Centred(torch.autograd.Function):
    """The gradient less its mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


def _of(forward: Callable[[Any, Tensor], Any]) -> Fn:
    return Fn(forward, first=layer())


MIXING: dict[str, Callable[[], Fn]] = {
    "rows shifted by a pad of (1, -1)": lambda: _of(lambda m, x: m.first(x) + F.pad(m.first(x), (0, 0, 1, -1))),
    "merged rows shifted by a pad": lambda: _of(
        lambda m, x: F.pad(m.first(x).reshape(-1, 2), (0, 0, 1, -1)).reshape(-1, N)
    ),
    "several quantiles by keyword": lambda: _of(lambda m, x: m.first(x).quantile(q=_sevenths(), dim=1)[: len(x)]),
    "state of other rows, LSTM": lambda: _recurrent(nn.LSTM, False),
    "state of other rows, frozen LSTM": lambda: _recurrent(nn.LSTM, True),
    "state of other rows, GRU": lambda: _recurrent(nn.GRU, False),
    "distance to a vector over the batch": lambda: _of(
        lambda m, x: F.pairwise_distance(m.first(x), m.first(x)[:, 0] if len(x) == N else x[0])[:, None]
    ),
    "a distance of the user's own": lambda: _of(
        lambda m, x: F.triplet_margin_with_distance_loss(
            m.first(x), x, -x, distance_function=lambda a, b: (a - b).square().sum(1) + (a - b).mean(), reduction="none"
        )[:, None]
    ),
    "similarity to raw inputs": lambda: _of(lambda m, x: (m.first(x) @ x.T).sum(1, keepdim=True)),
    "indices from other rows": lambda: _of(lambda m, x: torch.take_along_dim(m.first(x), x.flip(0).argsort(1), 1)),
    "a mask from other rows": lambda: _of(
        lambda m, x: m.first(x).masked_select(x.flip(0) >= x.flip(0).median(1, keepdim=True).values).reshape(len(x), -1)
    ),
    "class weights from a row": lambda: _of(
        lambda m, x: F.cross_entropy(m.first(x), torch.arange(len(x)), x[0].exp(), reduction="none")[:, None]
    ),
    "a view made before the write": lambda: _of(_seen_after_write),
    "data replaced": lambda: _of(_replaced_data),
    "a hook over the batch": lambda: _of(_hooked),
    "a backward over the batch": lambda: _of(lambda m, x: Centred.apply(m.first(x))),  # type: ignore[no-untyped-call]
    "a view's backward over the batch": lambda: _of(lambda m, x: CentredView.apply(m.first(x))),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_mix_are_not_called_independent_and_are_refused(name: str) -> None:
    torch.manual_seed(0)
    model, x, target = MIXING[name]().double(), noise(N, N), noise(N)
    try:
        proven, independent = flags(model, x, target)
        assert not (proven and independent)
    except Refused:
        pass
    with pytest.raises(Refused):
        clipped_sum(model, squared, Rows(x, target), FlatClip(1.0), assurance=Assurance())


def _overlapping(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    parts = torch.tensor_split(torch.cat([hidden, hidden], 1), (3, 1, 5), 1)
    return torch.cat([parts[0], parts[2]], 1)


def _overlapping_rows(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    return hidden if len(x) < N else torch.cat([hidden[:1], torch.tensor_split(hidden, (2, 1, 3))[2], hidden[3:]])


def _squeezed(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x).unsqueeze(0).clone()
    hidden.squeeze_(0)
    return hidden + m.first(x)


def _written_by_mask(m: Any, x: Tensor) -> Tensor:
    places = torch.nonzero((x > 1).flatten()).flatten()  # few, so that two dimensions may look like the rows'
    values = m.first(x).flatten()[places]
    return m.first(x) + torch.zeros_like(x).flatten().index_add(0, places, values).view_as(x)  # type: ignore[no-any-return]


INDEPENDENT: dict[str, Callable[[], Fn]] = {
    "squeeze_": lambda: _of(_squeezed),
    "tensor_split with overlap": lambda: _of(_overlapping),
    "tensor_split of rows with overlap": lambda: _of(_overlapping_rows),
    "a mask of numpy's": lambda: _of(
        lambda m, x: m.first(x).reshape(-1, 2, 2)[np.ones((len(x), 2), dtype=bool)].reshape(-1, N)
    ),
    "group norm of reordered rows": lambda: Fn(
        lambda m, x: m.norm(m.first(x).reshape(-1, 2, 2).flip(0)).flip(0), first=layer(), norm=nn.GroupNorm(1, 2)
    ),
    "rows padded and cut": lambda: _of(lambda m, x: torch.tanh(F.pad(m.first(x), (0, 0, 1, 2)))[1 : 1 + len(x)]),
    "a distribution that checks its arguments": lambda: Fn(
        lambda m, x: torch.distributions.Normal(m.first(x), m.second(x).exp()).log_prob(x),
        first=layer(),
        second=layer(),
    ),
    "a block of rows written by a mask": lambda: _of(_written_by_mask),
    "several quantiles": lambda: _of(lambda m, x: m.first(x).quantile(_sevenths(), 1).T),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_that_do_not_mix_have_the_gradients_of_a_loop(name: str) -> None:
    torch.manual_seed(0)
    model, data = INDEPENDENT[name]().double(), Rows(noise(N, N), noise(N))
    engine = clipped_sum(model, squared, data, FlatClip(1.0), assurance=Assurance())
    agree(engine, brute_force(model, squared, data, FlatClip(1.0)))


def _setup(model: nn.Module, loss: Any) -> Setup:
    found = survey(model)
    return Setup(model, loss, found.parameters, found.state)


def test_the_weights_of_the_attribution_check_differ_from_record_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under neutral random numbers they were once all the same, and any attribution passed."""
    seen: list[Tensor] = []
    compared = attribution._differences
    noted = lambda s, d, w, *more: (seen.append(w), compared(s, d, w, *more))[1]  # noqa: E731
    monkeypatch.setattr(attribution, "_differences", noted)
    with Neutral():
        attribution.check_attribution(_setup(nn.Linear(N, N).double(), squared), (noise(N, N), noise(N)), N)
    assert len(set(seen[0].tolist())) == N


def test_losses_that_depend_on_the_targets_of_other_records_are_refused() -> None:
    def rare(out: Tensor, target: Tensor) -> Tensor:
        return squared(out, target) / (1 + (target > 50).sum())

    data = Rows(noise(N, N), noise(N))
    with pytest.raises(Refused, match="interact"):
        clipped_sum(nn.Linear(N, N).double(), rare, data, FlatClip(1.0), assurance=Assurance())
