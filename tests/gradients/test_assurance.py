"""What training checks of a model: records that interact and state that is kept are refused, sound models are accepted.

Each case is run by ``sordino.train`` and by an own loop over ``record_gradients`` and ``private_steps``.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Fn, agree, squared
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import brute_force
from sordino.gradients.checks.assurance import Assurance
from sordino.records.gradients import RecordGradients
from sordino.records.reading import row_reader
from sordino.sampling import LogicalBatch

RECORDS = 40
WAYS = ["train", "own loop"]
ce = F.cross_entropy


@functools.cache
def plan(steps: int = 2) -> sordino.Plan:
    return sordino.Plan.dpsgd(
        epsilon=8.0, delta=1e-3, records=RECORDS, expected_batch=24, steps=steps, clip_norm=0.5, insecure_seed=1
    )


def data(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = shape or (8,)
    return torch.randn(RECORDS, *shape, generator=generator), torch.arange(RECORDS) % 3


def run(way: str, model: nn.Module, loss: Any, given: Any = None, steps: int = 2) -> RecordGradients | None:
    given = data() if given is None else given
    if way == "train":
        sordino.train(model, loss, given, plan(steps), lr=0.1)
        return None
    sums = sordino.record_gradients(model, loss, given, plan(steps).clipping)
    with sordino.Ledger.open(None, plan(steps).to_dict()) as ledger:
        for _ in sordino.private_steps(plan(steps), sums, records=RECORDS, source=plan(steps).source(), ledger=ledger):
            pass
    return sums


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


def net(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    return Fn(forward, **(parts or {"a": nn.Linear(8, 16), "b": nn.Linear(16, 3)}))


def plain(s: Any, x: Tensor) -> Tensor:
    return s.b(torch.tanh(s.a(x)))


# records that interact


def _centred(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.b(torch.tanh(h - h.mean(0)))


def _scaled_by_the_largest(s: Any, x: Tensor) -> Tensor:
    h = torch.relu(s.a(x))
    return s.b(h / h.detach().abs().max().clamp(min=10.0) * 10)


def _capacity(s: Any, x: Tensor) -> Tensor:
    p = torch.softmax(s.r(x), 1)
    one = F.one_hot(p.argmax(1), 4)
    place = (one.cumsum(0) * one).sum(1)
    keep = (place <= max(2, math.ceil(len(x) / 4))).to(x.dtype)
    return s.h(x + sum((one[:, i] * p[:, i] * keep)[:, None] * torch.relu(e(x)) for i, e in enumerate(s.e)))


def _statistics_above_eight_rows(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    if len(x) > 8:
        h = (h - h.mean(0)) / (h.std(0) + 1)
    return s.b(torch.tanh(h))


def _mixup(s: Any, x: Tensor) -> Tensor:
    gate = (torch.rand(len(x), 1) < 0.3).float()
    return plain(s, x * (1 - gate) + gate * x[torch.randperm(len(x))])


def _gated_by_the_largest(s: Any, x: Tensor) -> Tensor:
    return plain(s, x) * (0.1 if x.max() > 30 else 1)


def _longest_text(s: Any, x: Tensor) -> Tensor:
    length = int((x > 0).sum(1).max())
    return plain(s, x + torch.arange(8.0) / length)


def _trimmed_to_the_longest(s: Any, x: Tensor) -> Tensor:
    length = int(((x > 1.0) * torch.arange(8)).max()) + 1
    return s.b(torch.tanh(s.a(F.pad(x[:, :length], (0, 8 - length)))) / length)


def _loss_guard(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = ce(outputs, targets, reduction="none")
    return torch.where(losses.detach() > 3 * losses.detach().median(), losses * 0, losses)


def _top_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = ce(outputs, targets, reduction="none")
    keep = torch.zeros_like(losses)
    keep[losses.detach().topk(max(1, len(losses) // 2)).indices] = 1
    return losses * keep


class MixingBackward(torch.autograd.Function):
    """The identity, whose backward pass hands each row the gradient of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].flip(0)


def _experts() -> dict[str, nn.Module]:
    return {"r": nn.Linear(8, 4), "e": nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), "h": nn.Linear(8, 3)}


INTERACTING: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "centring over the batch": lambda: (net(_centred), ce),
    "scaling by the largest activation": lambda: (net(_scaled_by_the_largest), ce),
    "experts with a capacity": lambda: (net(_capacity, **_experts()), ce),
    "batch statistics above eight rows": lambda: (net(_statistics_above_eight_rows), ce),
    "mixup gated by a random mask": lambda: (net(_mixup), ce),
    "a gate by the largest input": lambda: (net(_gated_by_the_largest), ce),
    "positions from the longest text": lambda: (net(_longest_text), ce),
    "trimming to the longest": lambda: (net(_trimmed_to_the_longest), ce),
    "a guard over the batch's losses": lambda: (net(plain), _loss_guard),
    "the largest losses only": lambda: (net(plain), _top_losses),
    "a backward pass that moves rows": lambda: (net(lambda s, x: s.b(MixingBackward.apply(s.a(x)))), ce),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", INTERACTING)
def test_records_that_interact_are_refused(name: str, way: str) -> None:
    model, loss = INTERACTING[name]()
    with pytest.raises(sordino.Refused):
        run(way, model, loss)


def _size_above(most: int) -> Callable[..., Any]:
    return lambda s, x: plain(s, x) * (0.1 if len(x) > most else 1)


def _place_above(most: int) -> Callable[..., Any]:
    return lambda s, x: plain(s, x) * torch.where(torch.arange(len(x))[:, None] > most, 0.1, 1.0)


def _many_of_a_class(outputs: Tensor, targets: Tensor) -> Tensor:
    return ce(outputs, targets, reduction="none") * (0.1 if int((targets == 2).sum()) >= 18 else 1.0)


LARGER: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "a number of rows that no batch had yet": lambda: (net(_size_above(38)), ce),
    "at least so many rows": lambda: (net(lambda s, x: plain(s, x) / max(len(x), 36) * 36), ce),
    "a place that no batch had yet": lambda: (net(_place_above(38)), ce),
    "a class that is there more often": lambda: (net(plain), _many_of_a_class),
}


@pytest.mark.parametrize("name", LARGER)
def test_interaction_that_begins_in_larger_batches_than_the_first_is_refused_where_it_begins(name: str) -> None:
    """One record more or less moved the sum by up to nine clip norms."""
    model, loss = LARGER[name]()
    x, y = torch.randn(80, 8, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 3
    sums = sordino.record_gradients(model, loss, (x, y), plan().clipping)
    for size in (24, 20, 28, 31):
        sums(LogicalBatch(0, torch.arange(size), 512))
    with pytest.raises(sordino.Refused):
        sums(LogicalBatch(1, torch.arange(60), 512))


def test_a_batch_that_is_much_larger_than_all_that_were_tested_is_tested_again() -> None:
    checks, (x, y) = Assurance(), data()
    sums = RecordGradients(net(plain), ce, row_reader((x, y)), FlatClip(1.0), assurance=checks)
    for rows, tested in ((2, 1), (3, 1), (4, 1), (20, 2), (40, 2), (30, 2)):
        sums(LogicalBatch(0, torch.arange(rows), 512))
        assert checks.grouped == tested


def test_another_answer_to_a_question_about_several_rows_is_tested_where_it_occurs() -> None:
    """The rows that decide it are like no changed row of the tests, and the operations are the same."""
    x, y = data()
    x[30] = 0.123456
    gated = net(lambda s, x: plain(s, x) * (0.1 if bool(((x - 0.123456).abs().amax(1) < 1e-4).any()) else 1))
    sums = sordino.record_gradients(gated, ce, (x, y), plan().clipping)
    sums(LogicalBatch(0, torch.arange(24), 512))
    with pytest.raises(sordino.Refused, match="interact"):
        sums(LogicalBatch(1, torch.arange(10, 34), 512))


# state that holds records


class Keeping(nn.Module):
    """Keeps the largest input of the batch in one of several places."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.how = nn.Linear(8, 16), nn.Linear(16, 3), how
        self.register_buffer("m", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.queue: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        h, largest = torch.tanh(self.a(x)), x.detach().abs().max()
        if self.how == "buf.data":
            self.m.data.copy_(largest)
        if self.how == "a reassigned buffer":
            self.m = largest.clone()
        if self.how == "a frozen parameter":
            self.frozen.data.mul_(0.9).add_(largest)
        if self.how == "numpy":
            self.m.numpy()[...] = float(largest)
        if self.how == "a queue":
            h = h + self.queue[-1] if self.queue else h
            self.queue.append(h.detach()[0])
        return self.b(h)


class KeepingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.m.data.copy_(outputs.detach().max())
        return ce(outputs, targets, reduction="none")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "how", ["buf.data", "a reassigned buffer", "a frozen parameter", "numpy", "a queue", "the loss"]
)
def test_state_that_keeps_records_is_refused(how: str, way: str) -> None:
    loss = KeepingLoss() if how == "the loss" else ce
    with pytest.raises(sordino.Refused):
        run(way, Keeping(how), loss)


# attribution at coinciding sizes

N = 8


def _axial(s: Any, x: Tensor) -> Tensor:
    h = s.stem(x)
    b, c, high, wide = h.shape
    rows = s.row(h.permute(0, 2, 3, 1).reshape(b * high, wide, c)).reshape(b, high * wide, c)
    return s.head(rows.mean(1))


def _windows(s: Any, x: Tensor) -> Tensor:
    b, length, d = x.shape
    return s.b(torch.relu(s.a(x.reshape(b * length // N, N, d))).reshape(b, length, -1).mean(1))


def _sorted(s: Any, x: Tensor) -> Tensor:
    order = (x[..., 0] > 0).sum(1).argsort(descending=True)
    h, _ = s.g(x[order])
    return s.b(h[:, -1][order.argsort()])


def _dispatched(s: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    weight, which = s.r(flat).softmax(-1).topk(1, -1)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(s.e):
        rows, _ = torch.where(which == e)
        out.index_add_(0, rows, expert(flat[rows]) * weight[rows])
    return s.h(out.reshape(x.shape).mean(1))


def _hierarchical(s: Any, x: Tensor) -> Tensor:
    words = s.g(s.a(x).flatten(0, 1))[1][0]
    return s.b(words.reshape(len(x), x.shape[1], -1)).mean(1)


def _pair() -> dict[str, nn.Module]:
    return {"a": nn.Linear(4, 6), "b": nn.Linear(6, 3)}


ATTRIBUTED: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "axial attention": lambda: (
        net(
            _axial,
            stem=nn.Conv2d(2, 4, 1),
            row=nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
            head=nn.Linear(4, 3),
        ),
        (2, N, N),
    ),
    "windows as long as the batch": lambda: (net(_windows, **_pair()), (2 * N, 4)),
    "torch.stack of a network on each row": lambda: (
        net(lambda s, x: torch.stack([s.b(torch.tanh(s.a(r))) for r in x]), **_pair()),
        (N, 4),
    ),
    "a hierarchical text model": lambda: (
        net(_hierarchical, a=nn.Linear(4, 4), g=nn.GRU(4, 5, batch_first=True), b=nn.Linear(5, 3)),
        (N, N, 4),
    ),
    "unbatched index_select": lambda: (
        net(lambda s, x: torch.cat([plain(s, x.index_select(0, torch.tensor([i]))) for i in range(len(x))]), **_pair()),
        (4,),
    ),
    "a parameter expanded to the batch and reduced": lambda: (
        net(lambda s, x: plain(s, x) + s.p.expand(N, 3).mean(0), p=torch.randn(1, 3), **_pair()),
        (4,),
    ),
    "rows flipped and flipped back": lambda: (net(lambda s, x: plain(s, x.flip(0)).flip(0), **_pair()), (4,)),
    "rows sorted by length for a GRU": lambda: (
        net(_sorted, g=nn.GRU(4, 5, batch_first=True), b=nn.Linear(5, 3)),
        (N, 4),
    ),
    "dispatch to experts": lambda: (
        net(_dispatched, r=nn.Linear(4, 3), e=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), h=nn.Linear(4, 3)),
        (N, 4),
    ),
    "an in-place operation after a linear map on three dimensions": lambda: (
        net(lambda s, x: s.b(F.relu(s.a(x), inplace=True)).mean(1), **_pair()),
        (N, 4),
    ),
    "a learned token before the text": lambda: (
        net(
            lambda s, x: plain(s, torch.cat([s.c.expand(len(x), -1, -1), x], 1)).mean(1),
            c=torch.randn(1, 1, 4),
            **_pair(),
        ),
        (N, 4),
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTED)
def test_sums_at_coinciding_sizes_equal_brute_force_and_both_ways_accept_the_model(name: str) -> None:
    model, shape = ATTRIBUTED[name]()
    model = model.double()
    inputs, targets = data(*shape)
    given = inputs.double(), targets.double()
    sums = sordino.record_gradients(model, squared, given, plan().clipping)
    for indices in (torch.arange(N), torch.arange(N, 2 * N)):
        found = sums(LogicalBatch(0, indices, N))
        agree(found, brute_force(model, squared, sums.rows(indices, 0), plan().clipping))
    assert sums.assurance.attributed >= 1
    if "expanded to the batch" in name:  # of one size only
        return
    run("train", copy.deepcopy(model), squared, given)


# accepted models


def _diffusion(s: Any, x: Tensor) -> Tensor:
    t = torch.randint(0, 10, (len(x), 1)) / 10
    return s.b(torch.relu(s.a(x * (1 - t) + t * torch.randn_like(x))))


def _softly_routed(s: Any, x: Tensor) -> Tensor:
    p = torch.softmax(s.r(x), 1)
    one = F.one_hot(p.argmax(1), 4)
    return s.h(x + sum((one[:, i] * p[:, i])[:, None] * torch.relu(e(x)) for i, e in enumerate(s.e)))


def _encoded(s: Any, x: Tensor) -> Tensor:
    return s.b(s.e(s.a(x)[:, None].expand(-1, 4, -1)).mean(1))


def _layers() -> dict[str, nn.Module]:
    return {"a": nn.Linear(8, 16), "b": nn.Linear(16, 3)}


ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "a stock encoder layer with dropout": lambda: net(
        _encoded, e=nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), **_layers()
    ),
    "dropout": lambda: net(lambda s, x: s.b(F.dropout(torch.relu(s.a(x)), 0.5))),
    "a diffusion loss": lambda: net(_diffusion),
    "experts without a capacity": lambda: net(_softly_routed, **_experts()),
    "spectral_norm": lambda: net(plain, a=parametrizations.spectral_norm(nn.Linear(8, 16)), b=nn.Linear(16, 3)),
    "checkpointing": lambda: net(lambda s, x: s.b(checkpoint(lambda t: torch.tanh(s.a(t)), x, use_reentrant=False))),
    "reentrant checkpointing": lambda: net(
        lambda s, x: s.b(checkpoint(lambda t: torch.tanh(s.c(t)), s.a(x), use_reentrant=True)),
        c=nn.Linear(16, 16),
        **_layers(),
    ),
    "Gumbel numbers": lambda: net(lambda s, x: s.b(F.gumbel_softmax(s.a(x)))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ACCEPTED)
def test_sound_models_are_accepted(name: str, way: str) -> None:
    run(way, ACCEPTED[name](), ce)


# what is remembered, and what is left undisturbed


def test_a_program_is_checked_once_and_a_new_one_again() -> None:
    def switched(s: Any, x: Tensor) -> Tensor:
        return plain(s, x) if s.plain else s.b(torch.relu(s.a(x)))

    model = net(switched)
    model.plain = True  # type: ignore[assignment]
    sums = sordino.record_gradients(model, ce, data(), plan().clipping)
    for size in (12, 12, 20, 7):
        sums(LogicalBatch(0, torch.arange(size), 64))
    known = sums.assurance
    assert (known.attributed, known.grouped, known.batches, known.proven) == (1, 1, 4, True)
    model.plain = False  # type: ignore[assignment]
    sums(LogicalBatch(0, torch.arange(12), 64))
    assert known.attributed == 2
    assert len(known.programs) == 2


def test_a_program_that_is_not_proven_is_tested_for_interaction_when_it_is_new() -> None:
    hidden = torch.jit.trace(lambda t: torch.tanh(t), torch.zeros(2, 16))
    model = net(lambda s, x: s.b(hidden(s.a(x))))
    sums = sordino.record_gradients(model, ce, data(), plan().clipping)
    sums(LogicalBatch(0, torch.arange(12), 64))
    assert not sums.assurance.proven
    assert (sums.assurance.attributed, sums.assurance.grouped) == (1, 1)


def test_a_batch_of_one_record_leaves_the_check_to_the_next() -> None:
    sums = sordino.record_gradients(net(plain), ce, data(), plan().clipping)
    sums(LogicalBatch(0, torch.arange(1), 64))
    assert sums.assurance.attributed == 0
    sums(LogicalBatch(1, torch.arange(5), 64))
    assert sums.assurance.attributed == 1


def test_a_batch_in_which_no_record_uses_a_parameter_has_zero_sums() -> None:
    """Records whose positions are all masked; alone they would be taken for a model without gradients."""

    def masked(s: Any, x: Tensor) -> Tensor:
        kept = x[:, 0] > 0
        return (
            torch.zeros(len(x), 3).index_put((kept.nonzero().flatten(),), plain(s, x[kept])) if kept.any() else x[:, :3]
        )

    x, y = data()
    x[:, 0] = 1.0
    x[30:, 0] = -1.0
    sums = sordino.record_gradients(net(masked), ce, (x, y), plan().clipping)
    with pytest.raises(sordino.Refused, match="does not depend on any trainable parameter"):
        sums(LogicalBatch(0, torch.arange(32, 40), 64))
    sums(LogicalBatch(0, torch.arange(24), 64))
    found = sums(LogicalBatch(1, torch.arange(32, 40), 64))
    assert all(not value.any() for value in found.sums.values())
    assert len(found.norms) == 8


def released(model: nn.Module, steps: int = 3) -> list[dict[str, Tensor]]:
    sums = sordino.record_gradients(model, ce, data(), plan(steps).clipping)
    with sordino.Ledger.open(None, plan(steps).to_dict()) as ledger:
        run_of = sordino.private_steps(plan(steps), sums, records=RECORDS, source=plan(steps).source(), ledger=ledger)
        return [step.gradients for step in run_of]


@pytest.mark.parametrize("name", ["a stock encoder layer with dropout", "a diffusion loss"])
def test_checks_leave_the_random_numbers_of_the_run_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ACCEPTED[name]()
    with_checks = released(copy.deepcopy(model))
    monkeypatch.setattr(Assurance, "examine", lambda *args, **kwargs: None)
    without = released(model)
    for mine, theirs in zip(with_checks, without, strict=True):
        for key in mine:
            assert torch.equal(mine[key], theirs[key]), key


def test_checks_leave_the_model_and_its_gradients_as_they_were() -> None:
    model = ACCEPTED["dropout"]()
    before = copy.deepcopy(model.state_dict())
    sums = sordino.record_gradients(model, ce, data(), plan().clipping)
    state = torch.get_rng_state()
    sums(LogicalBatch(0, torch.arange(12), 64))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    model(data()[0][:12])
    assert torch.equal(after, torch.get_rng_state())  # one pass was drawn, and nothing else
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_model_that_fails_on_fewer_rows_is_refused_and_does_not_crash() -> None:
    """A new program is also run on a few of its rows, and in smaller groups."""
    model = net(lambda s, x: plain(s, x.view(12, 8)))
    sums = sordino.record_gradients(model, ce, data(), plan().clipping)
    with pytest.raises(sordino.Refused, match="fails on the same records in other groups"):
        sums(LogicalBatch(0, torch.arange(12), 64))
