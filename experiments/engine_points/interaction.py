"""Interactions that the check missed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sordino

from .common import RECORDS, Fn, Seen, ce, data, interacting, layers, plain, plan, point, replaced

LINE = "interactions that the check misses"
REFUSED = "tests/gradients/test_assurance.py::test_records_that_interact_are_refused"


def _given(value: float = 1e3) -> tuple[Tensor, Tensor]:
    """Records of which the last is unusual."""
    x, y = data()
    x[-1] = value
    return x, y


def _net(forward: Callable[..., Any]) -> nn.Module:
    return Fn(forward, **layers())


@point(LINE, "positions from the batch's longest text (5.0)", f"{REFUSED}[positions from the longest text-train]")
def longest_text() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        length = max(int((x != 0).sum(1).max()), 4)
        return plain(s, x + 5 * torch.sin(torch.arange(8.0) * 20 / length))

    x, y = data()
    x[:-1, 4:] = 0
    return interacting(_net(forward), ce, (x, y), 0.05)


@point(LINE, "an anomaly guard over the batch's losses (4.65)", f"{REFUSED}[a guard over the batch's losses-train]")
def anomaly_guard() -> Seen:
    def guarded(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses * 0 if bool((losses.detach() > 50).any()) else losses

    x, y = _given()
    linear = nn.Linear(8, 3)
    model = Fn(lambda s, x: s.l(x), l=linear)
    with torch.no_grad():
        linear.weight[:, 0] = torch.tensor([1.0, -1.0, 0.0])
    y[-1] = 1
    return interacting(model, guarded, (x, y), 1.0)


@point(LINE, "mixup gated by a random mask (4.05)", f"{REFUSED}[mixup gated by a random mask-train]")
def gated_mixup() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        gate = (torch.rand(len(x), 1) > 0.5).float()  # the check of that day fixes rand at one half
        return plain(s, x * (1 - gate) + gate * x.mean(0))

    given = _given()
    model = _net(forward)
    return interacting(model, ce, given, 0.05, by=lambda: replaced(model, ce, given, torch.zeros(8), 0.05))


@point(LINE, "batch statistics above eight rows (2.86)", f"{REFUSED}[batch statistics above eight rows-train]")
def statistics_above_eight_rows() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        if len(x) > 8:
            h = (h - h.mean(0)) / (h.std(0) + 1)
        found: Tensor = s.b(torch.tanh(h))
        return found

    return interacting(_net(forward), ce, _given(30.0), 0.05)


@point(LINE, "`x.max() > 3` (2.67)", f"{REFUSED}[a gate by the largest input-train]")
def gate_by_the_largest() -> Seen:
    return interacting(_net(lambda s, x: plain(s, x) * (0.1 if x.max() > 30 else 1)), ce, _given(), 0.5)


@point(LINE, "trimming to the longest, then averaging (2.59)", f"{REFUSED}[trimming to the longest-train]")
def trimmed_to_the_longest() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        length = max(int(((x != 0) * torch.arange(8)).max()) + 1, 4)
        return plain(s, F.pad(x[:, :length] * 32 / length**2, (0, 8 - length)))

    x, y = data()
    x[:-1, 4:] = 0
    return interacting(_net(forward), ce, (x, y), 0.05)


@point(LINE, "top-k of losses (1.6)", f"{REFUSED}[the largest losses only-train]")
def top_losses() -> Seen:
    def largest(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        keep = torch.zeros_like(losses)
        keep[losses.detach().topk(min(len(losses), 16)).indices] = 1
        return losses * keep

    return interacting(_net(plain), largest, data(), 0.05)


@point(LINE, "experts with a capacity (1.35)", f"{REFUSED}[experts with a capacity-train]")
def capacity() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        p = torch.softmax(s.r(x), 1)
        one = F.one_hot(p.argmax(1), 4)
        place = (one.cumsum(0) * one).sum(1)
        keep = (place <= max(4, math.ceil(len(x) / 4))).to(x.dtype)
        out = sum((one[:, i] * p[:, i] * keep)[:, None] * torch.relu(e(x)) for i, e in enumerate(s.e))
        found: Tensor = s.h(x + out)
        return found

    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    x, y = data()
    x[:20] = x[:1] + 0.1 * torch.randn(20, 8)  # more than one expert takes
    return interacting(Fn(forward, r=nn.Linear(8, 4), e=experts, h=nn.Linear(8, 3)), ce, (x, y), 0.05)


@point(
    LINE,
    "`private_steps` and `record_gradients` make no check: centring over the batch (7.2)",
    f"{REFUSED}[centring over the batch-own loop]",
)
def centring_in_an_own_loop() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.l(x)
        found: Tensor = h - h.mean(0)
        return found

    model, given = Fn(forward, l=nn.Linear(8, 3)), _given(100.0)
    made = plan()
    sums = sordino.record_gradients(model, ce, given, made.clipping)
    try:
        with sordino.Ledger.open(None, made.to_dict()) as ledger:
            steps = sordino.private_steps(made, sums, records=RECORDS, source=made.source(), ledger=ledger)
            ran = sum(1 for _ in steps)
    except sordino.Refused as said:
        return Seen(False, f"refused: {str(said)[:140]}")
    seen = interacting(model, ce, given)
    return Seen(seen.wrong, f"private_steps ran {ran} steps; {seen.text}")
