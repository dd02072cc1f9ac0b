"""State that the buffer check did not see."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sordino

from .common import Seen, data, plan, point

LINE = "state past the buffer check"
REFUSED = "tests/gradients/test_assurance.py::test_state_that_keeps_records_is_refused"
LARGEST = 987.25
"""An entry of one record that is nowhere else."""


class Keeping(nn.Module):
    """Keeps the largest input in one of several places."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(8, 16), nn.Linear(16, 3), how
        self.register_buffer("m", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.queue: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        largest, kept = x.detach().abs().max(), self.get_buffer("m")
        h = torch.tanh(self.a(x))
        if self.how == "buf.data":
            kept.data.copy_(torch.maximum(kept.data, largest))
        if self.how == "a reassigned buffer":
            self.m = torch.maximum(kept, largest)
        if self.how == "an EMA in a frozen parameter":
            self.frozen.data.mul_(0.5).add_(largest, alpha=0.5)
        if self.how == "numpy":
            kept.numpy()[...] = max(float(kept), float(largest))
        if self.how == "a deque":
            self.queue.append(x.detach().abs().amax())
        found: Tensor = self.b(h)
        return found


class KeepingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(()))
        self.keeps = True

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        kept = self.get_buffer("m")
        kept.data.copy_(torch.maximum(kept.data, outputs.detach().abs().max()))
        return F.cross_entropy(outputs, targets, reduction="none")


def _kept(how: str, loss: Any = F.cross_entropy) -> Seen:
    """A training; then whether a number of the records is where it was kept."""
    x, y = data()
    x[5, 3] = LARGEST
    model = Keeping(how)
    try:
        sordino.train(model, loss, (x, y), plan(), lr=0.1)
    except sordino.Refused as said:
        return Seen(False, f"refused: {str(said)[:140]}")
    places = {**model.state_dict(), **{f"queue {i}": t for i, t in enumerate(model.queue)}}
    if isinstance(loss, nn.Module):
        places |= {f"loss.{name}": t for name, t in loss.state_dict().items()}
    found = {name: float(places[name]) for name in places if name in ("m", "frozen", "loss.m") or "queue" in name}
    raw = {name: value for name, value in found.items() if value != 0}
    text = "train takes it" + "".join(f"; {name} holds {value:g}" for name, value in raw.items())
    return Seen(bool(raw), text + f" (the largest input is {LARGEST:g})" if raw else text)


@point(LINE, "`buf.data`", f"{REFUSED}[buf.data-train]")
def buffer_data() -> Seen:
    return _kept("buf.data")


@point(LINE, "a reassigned buffer", f"{REFUSED}[a reassigned buffer-train]")
def reassigned_buffer() -> Seen:
    return _kept("a reassigned buffer")


@point(LINE, "an EMA in a frozen parameter", f"{REFUSED}[a frozen parameter-train]")
def frozen_parameter() -> Seen:
    return _kept("an EMA in a frozen parameter")


@point(LINE, "`.numpy()[:]`", f"{REFUSED}[numpy-train]")
def numpy_view() -> Seen:
    return _kept("numpy")


@point(LINE, "buffers of the loss module", f"{REFUSED}[the loss-train]")
def buffer_of_the_loss() -> Seen:
    return _kept("nothing", KeepingLoss())


@point(LINE, "deques", f"{REFUSED}[a queue-train]")
def a_deque() -> Seen:
    return _kept("a deque")


@point(
    LINE,
    "raw maxima stay in the state_dict",
    "tests/gradients/test_kept.py::test_the_published_model_has_no_rows_of_the_last_batch",
)
def raw_maxima() -> Seen:
    seen = _kept("buf.data")
    return Seen(seen.wrong and f"m holds {LARGEST:g}" in seen.text, seen.text)
