"""Records that meet only when a certain record is in the batch, or at one size: after the tests of the first batches.

One record has 0.5 as its first value. In the batches before, nothing happens; in its batch it turns the gradients of
all others around, or leaves something for later. Each line was accepted once: the sum moved by 3 to 10 clip norms.
"""

from __future__ import annotations

import array
import collections
import functools
import io
import queue
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance

Forward = Callable[[Any, Tensor], Tensor]
SPECIAL = 299


class Net(nn.Module):
    def __init__(self, forward: Forward, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self._forward = nn.Linear(8, 16), nn.Linear(16, 3), forward
        self.register_buffer("m", torch.zeros(8))
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def sums_over(model: nn.Module, *batches: Tensor) -> list[Tensor]:
    source = torch.Generator().manual_seed(5)
    x, y = torch.randn(300, 8, generator=source), torch.randn(300, 3, generator=source)
    x[SPECIAL, 0] = 0.5
    assurance, found = Assurance(), []
    for step, batch in enumerate(batches):
        torch.manual_seed(1000 + step)
        sums = clipped_sum(model, loss, Rows(x[batch], y[batch]), FlatClip(1.0), assurance=assurance).sums
        found.append(torch.cat([t.flatten() for t in sums.values()]))
    return found


def with_special_last(model: nn.Module) -> list[Tensor]:
    """Six batches of 24 rows and one of 23, then one whose first record is the special one."""
    usual = [torch.arange(24 * k, 24 * k + 24) for k in range(6)]
    return sums_over(
        model, *usual, torch.arange(150, 173), torch.cat([torch.tensor([SPECIAL]), torch.arange(200, 223)])
    )


def special(x: Tensor) -> Tensor:
    return x[:, 0] == 0.5


def hidden(s: Any, x: Tensor) -> Tensor:
    return torch.tanh(s.a(x))


def plain(s: Any, x: Tensor) -> Tensor:
    return s.b(hidden(s, x))  # type: ignore[no-any-return]


def count(x: Tensor) -> Tensor:
    return special(x).long().amax()


def both(s: Any, x: Tensor) -> Tensor:
    return torch.cat([hidden(s, x), -hidden(s, x)], 1)


def gradient_only(s: Any, x: Tensor, factor: Tensor) -> Tensor:
    h = hidden(s, x)
    return s.b(h.detach() + (h - h.detach()) * factor)  # type: ignore[no-any-return]


SIGNS = torch.tensor([1.0, -1.0])
EXCHANGED: dict[str, Forward] = {
    "a sum": lambda s, x: plain(s, x) * (1 - 2 * (special(x).float().sum() > 0).float()),
    "a product": lambda s, x: (
        plain(s, x) * (1 - 2 * (special(x).float()[None] @ torch.ones_like(x[:, :1])).clamp(max=1))
    ),
    "an index": lambda s, x: s.b(torch.stack([hidden(s, x), -hidden(s, x)], 1)[:, count(x)]),
    "gather": lambda s, x: s.b(both(s, x).gather(1, torch.arange(16).expand(len(x), 16) + 16 * count(x))),
    "index_select": lambda s, x: s.b(both(s, x).index_select(1, torch.arange(16) + 16 * count(x))),
    "a table": lambda s, x: plain(s, x) * SIGNS[count(x)],
    "bincount": lambda s, x: plain(s, x) * SIGNS[torch.bincount(special(x).long(), minlength=2)[1].clamp(max=1)],
    "selected ones": lambda s, x: plain(s, x) * (1 - 2 * torch.ones_like(x[:, 0])[special(x)].sum().clamp(max=1)),
    "a shape": lambda s, x: plain(s, x) * (1 - 2 * min(1, x[special(x)].shape[0])),
    "nonzero": lambda s, x: plain(s, x) * (1 - 2 * min(1, special(x).nonzero().numel())),
    "repeat_interleave": lambda s, x: plain(s, x) * (1 - 2 * min(1, len(torch.repeat_interleave(special(x).long())))),
    "packed": lambda s, x: plain(s, x) * _packed(x),
    "a gradient turned": lambda s, x: gradient_only(s, x, 1 - 2 * (special(x).float().sum() > 0).float()),
    "a gradient looked up": lambda s, x: gradient_only(s, x, SIGNS[count(x)]),
}


def _packed(x: Tensor) -> float:
    packed = pack_padded_sequence(x[:, :, None], 4 + special(x).long(), batch_first=True, enforce_sorted=False)
    return 1.0 - 2.0 * float(len(packed.batch_sizes) > 4)


def _first(x: Tensor) -> Any:  # torch takes it where its types ask for an int
    return special(x)[0].long()


NUMBERS: dict[str, Forward] = {
    "the bound of a slice": lambda s, x: s.b(both(s, x)[:, 16 * count(x) :][:, :16]),
    "the end of a slice": lambda s, x: s.b(F.pad(hidden(s, x)[:, : 16 - 8 * _first(x)], (0, 8))[:, :16]),
    "narrow": lambda s, x: s.b(torch.narrow(both(s, x), 1, 16 * _first(x), 16)),
    "the length of narrow": lambda s, x: s.b(F.pad(hidden(s, x).narrow(1, 0, 16 - 8 * _first(x)), (0, 8))[:, :16]),
    "pad": lambda s, x: s.b(F.pad(hidden(s, x), (8 * _first(x), 0))[:, :16]),
    "roll": lambda s, x: s.b(torch.roll(both(s, x), (16 * _first(x),), (1,))[:, :16]),
    "repeat": lambda s, x: s.b(hidden(s, x).repeat(1, 1 + _first(x)).unflatten(1, (-1, 16)).sum(1)),
    "the factor of addmm": lambda s, x: s.b(
        torch.addmm(torch.zeros(16), hidden(s, x), torch.eye(16), alpha=1 - 2 * _first(x).float())
    ),
    "the factor of index_add": lambda s, x: s.b(
        torch.index_add(hidden(s, x), 1, torch.arange(16), hidden(s, x), alpha=-2 * _first(x).float())
    ),
    "the scale of attention": lambda s, x: s.b(
        F.scaled_dot_product_attention(
            *[hidden(s, x).unflatten(1, (4, 4))] * 3, scale=1 - 2 * _first(x).float()
        ).flatten(1)
    ),
    "eps": lambda s, x: (
        plain(s, x)
        * F.cosine_similarity(hidden(s, x), hidden(s, x).roll(1, 1), eps=1e-8 + 100 * _first(x).float())[:, None]
    ),
}


def _caught(call: Callable[[], Any]) -> float:
    try:
        call()
    except (RuntimeError, IndexError):
        return -1.0
    return 1.0


POOL = ThreadPoolExecutor(1)


def _in_a_thread(x: Tensor) -> bool:
    found: list[bool] = []
    worker = threading.Thread(target=lambda: found.append(bool(special(x).any())))
    worker.start()
    worker.join()
    return found[0]


@torch.jit.script
def scripted(x: Tensor) -> bool:
    return bool((x[:, 0] == 0.5).any())


def _outside(x: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        return bool(special(x).any())


UNSEEN: dict[str, Forward] = {
    "an error of cholesky": lambda s, x: (
        plain(s, x) * _caught(lambda: torch.linalg.cholesky((0.5 - special(x).float())[:, None, None]))
    ),
    "an error of a view": lambda s, x: plain(s, x) * _caught(lambda: x[special(x)].view(0, 8)),
    "an error of a table": lambda s, x: plain(s, x) * _caught(lambda: torch.zeros(1)[special(x).long()]),
    "a thread": lambda s, x: plain(s, x) * (-1 if _in_a_thread(x) else 1),
    "a pool of threads": lambda s, x: plain(s, x) * (-1 if POOL.submit(lambda: bool(special(x).any())).result() else 1),
    "a scripted function": lambda s, x: plain(s, x) * (-1 if scripted(x) else 1),
    "no torch function": lambda s, x: plain(s, x) * (-1 if _outside(x) else 1),
    "bits": lambda s, x: plain(s, x) * (-1 if bool((x.clone().view(torch.int32)[:, 0] == 1056964608).any()) else 1),
    "bytes": lambda s, x: plain(s, x) * (-1 if b"\0\0\0?" in bytes(x[:, 0].clone().untyped_storage()) else 1),
}


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * SIGNS[count(ctx.saved_tensors[0])], None


def _hooked(s: Any, x: Tensor, attach: Callable[[Tensor], Any]) -> Tensor:
    h = hidden(s, x)
    out: Tensor = s.b(h)
    attach(h)
    return out


def _saved(s: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * SIGNS[count(x)]):
        h = hidden(s, x) ** 2
    return s.b(h)  # type: ignore[no-any-return]


BACKWARD: dict[str, Forward] = {
    "a custom function": lambda s, x: s.b(Turned.apply(hidden(s, x), x)),
    "a hook": lambda s, x: _hooked(s, x, lambda h: h.register_hook(lambda g: g * SIGNS[count(x)])),
    "a hook of a node": lambda s, x: _hooked(
        s, x, lambda h: h.grad_fn.register_prehook(lambda gs: tuple(g * SIGNS[count(x)] for g in gs))
    ),
    "what autograd saves": _saved,
}


@pytest.mark.parametrize("name", [*EXCHANGED, *NUMBERS, *UNSEEN, *BACKWARD])
def test_records_that_meet_when_a_certain_record_comes_are_refused_then(name: str) -> None:
    forward = (EXCHANGED | NUMBERS | UNSEEN | BACKWARD)[name]
    with pytest.raises(sordino.Refused, match=r"interact|groups"):
        with_special_last(Net(forward))


# constants that have the shape of the batch


def _turned_at_24(count: Tensor) -> Tensor:
    return 1 - 2 * (count == 24).float()


def _ones(x: Tensor) -> Tensor:
    return torch.ones_like(x[:, 0])


SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "ones_like": lambda x: _turned_at_24(_ones(x).sum()),
    "rand_like": lambda x: _turned_at_24((torch.rand_like(x[:, 0]) >= 0).sum()),
    "full_like": lambda x: _turned_at_24(torch.full_like(x[:, 0], 1.0).sum()),
    "a product": lambda x: _turned_at_24(_ones(x) @ _ones(x)),
    "a softmax": lambda x: _turned_at_24((1 / torch.softmax(torch.zeros_like(x[:, 0]), 0)[0]).round()),
    "the last place": lambda x: _turned_at_24(_ones(x).cumsum(0).argmax() + 1),
    "bincount": lambda x: _turned_at_24(torch.bincount(torch.zeros_like(x[:, 0]).long())[0]),
    "expand_as": lambda x: _turned_at_24(torch.ones(1).expand_as(x[:, 0]).sum()),
    "item": lambda x: torch.tensor(-1.0 if _ones(x).sum().item() == 24 else 1.0),
    "numpy": lambda x: torch.tensor(-1.0 if _ones(x).numpy().size == 24 else 1.0),
    "an error": lambda x: torch.tensor(_caught(lambda: x.reshape(24, 8))),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_a_constant_of_the_batchs_shape_tells_is_tested_where_it_occurs(name: str) -> None:
    model = Net(lambda s, x: plain(s, x) * SIZES[name](x))
    others = [torch.arange(n) for n in (40, 33, 37, 31, 27, 26)]
    with pytest.raises(sordino.Refused, match="interact"):
        sums_over(model, *others, torch.arange(100, 124))


def test_noise_of_the_batchs_shape_needs_no_further_test() -> None:
    model = Net(lambda s, x: s.b(hidden(s, x) + torch.randn_like(hidden(s, x))))
    assurance = Assurance()
    for step in range(4):
        torch.manual_seed(step)
        rows = Rows(torch.randn(24 + step, 8), torch.randn(24 + step, 3))
        clipped_sum(model, loss, rows, FlatClip(1.0), assurance=assurance)
    assert assurance.proven
    assert not assurance.sized
    assert assurance.looked == 0


# what is written to the model


def _when_special(act: Callable[[Any, Tensor], Any]) -> Forward:
    def forward(s: Any, x: Tensor) -> Tensor:
        if bool(special(x).any()):
            act(s, x)
        return plain(s, x)

    return forward


def _always(act: Callable[[Any, Tensor], Any]) -> Forward:
    def forward(s: Any, x: Tensor) -> Tensor:
        act(s, x)
        return plain(s, x)

    return forward


def _set(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.x, ctx.buffer = x, buffer
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.buffer.data.add_(count(ctx.x))
        return gradient, None, None


def _unfreeze(s: Any, x: Tensor) -> None:
    if bool(special(x).any()):
        s.frozen.requires_grad_(True)


def _none(value: Any) -> None:
    """For a hook that returns nothing."""


WRITES: dict[str, Forward] = {
    "data, filled": _when_special(lambda s, x: s.m.data.fill_(1.0)),
    "data, a maximum": _always(lambda s, x: np.maximum(s.m.numpy(), float(count(x)), out=s.m.numpy())),
    "data, set": _when_special(lambda s, x: _set(s.m, "data", torch.ones(8))),
    "a gradient, set": _always(lambda s, x: _set(s.frozen, "grad", count(x).float().expand(8).clone())),
    "a hook, data": lambda s, x: _hooked(s, x, lambda h: h.register_hook(lambda g: _none(s.m.data.add_(count(x))))),
    "a hook, numpy": lambda s, x: _hooked(
        s, x, lambda h: h.register_hook(lambda g: _none(np.add(s.m.numpy(), float(count(x)), out=s.m.numpy())))
    ),
    "a hook that unfreezes": lambda s, x: _hooked(s, x, lambda h: h.register_hook(lambda g: _unfreeze(s, x))),
    "a custom function": lambda s, x: s.b(Writing.apply(hidden(s, x), x, s.m)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_pass_that_writes_to_the_model_when_a_certain_record_comes_is_refused(name: str) -> None:
    with pytest.raises(sordino.Refused, match=r"this buffer or parameter|freezes"):
        with_special_last(Net(WRITES[name]))


def test_a_hook_that_would_see_accumulated_gradients_is_refused() -> None:
    model = Net(plain)
    model.a.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(sordino.Refused, match="post_accumulate"):
        with_special_last(model)


# what is kept in Python until much later


class Store:
    value = 0.0
    values: ClassVar[dict[str, list[float]]] = {"deep": [0.0]}


STATE = types.ModuleType("state")
DEEP: dict[str, dict[str, float]] = {"a": {"b": 0.0}}
SPACE = types.SimpleNamespace(inner=types.SimpleNamespace(value=0.0))


@functools.lru_cache(None)
def box() -> list[float]:
    return [0.0]


def _passed(given: list[list[float]] = [[0.0]], value: float | None = None) -> None:  # noqa: B006
    if value is not None:
        given[0][0] = value


KEPT: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "array.array": (lambda s: s.v.__setitem__(0, 1.0), {"v": array.array("d", [0.0])}),
    "bytearray": (lambda s: s.v.__setitem__(0, 1), {"v": bytearray(1)}),
    "BytesIO": (lambda s: s.v.write(b"1"), {"v": io.BytesIO()}),
    "UserDict": (lambda s: s.v.__setitem__("a", 1.0), {"v": collections.UserDict(a=0.0)}),
    "a queue": (lambda s: s.v.put(1.0), {"v": queue.Queue()}),
    "a simple queue": (lambda s: s.v.put(1.0), {"v": queue.SimpleQueue()}),
    "of a thread": (lambda s: setattr(s.v, "a", 1.0), {"v": threading.local()}),
    "a generator's variable": (lambda s: s.v.send(1.0), {}),
    "an attribute of a parameter": (lambda s: setattr(s.a.weight, "seen", 1.0), {}),
    "a class": (lambda s: setattr(Store, "value", 1.0), {}),
    "deep in a class": (lambda s: Store.values["deep"].__setitem__(0, 1.0), {}),
    "the model's class": (lambda s: setattr(type(s), "seen", 1.0), {}),
    "another module": (lambda s: setattr(STATE, "value", 1.0), {}),
    "deep in a global dict": (lambda s: DEEP["a"].__setitem__("b", 1.0), {}),
    "deep in an object": (lambda s: setattr(SPACE.inner, "value", 1.0), {}),
    "a cache": (lambda s: box().__setitem__(0, 1.0), {}),
    "deep in a default": (lambda s: _passed(value=1.0), {}),
}


def _remembers() -> Any:
    value = 0.0
    while True:
        value = yield value


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_outside_of_attributes_when_a_certain_record_comes_is_refused(name: str) -> None:
    keep, attributes = KEPT[name]
    Store.value = Store.values["deep"][0] = DEEP["a"]["b"] = SPACE.inner.value = 0.0
    STATE.value = 0.0  # type: ignore[attr-defined]
    box()[0] = 0.0
    model = Net(_when_special(lambda s, x: keep(s)), **attributes)
    if name == "a generator's variable":
        model.v = _remembers()
        next(model.v)
    with pytest.raises(sordino.Refused, match="changes this variable"):
        with_special_last(model)


def test_a_gradient_that_a_hook_carries_to_the_next_batch_is_refused() -> None:
    carried = [torch.zeros(16)]

    def forward(s: Any, x: Tensor) -> Tensor:
        h = hidden(s, x)
        h.register_hook(lambda g: carried.__setitem__(0, g.sum(0)))  # type: ignore[no-untyped-call]
        return s.b(h + carried[0])  # type: ignore[no-any-return]

    with pytest.raises(sordino.Refused, match="changes this variable"):
        with_special_last(Net(forward))


def test_a_cache_of_masks_outside_of_the_model_is_accepted() -> None:
    @functools.lru_cache(None)
    def mask(width: int) -> Tensor:
        return torch.tril(torch.ones(width, width))

    def forward(s: Any, x: Tensor) -> Tensor:
        if float(x[0, 0]) == 7.0:  # it reads a value
            raise ValueError
        return s.b(hidden(s, x) @ mask(16))  # type: ignore[no-any-return]

    assert len(with_special_last(Net(forward))) == 8


@pytest.mark.parametrize("where", ["an attribute", "a configuration"])
def test_sizes_are_tested_anew_after_the_user_has_changed_a_setting(where: str) -> None:
    """In its second phase it uses the number of rows, with the same operations."""

    def forward(s: Any, x: Tensor) -> Tensor:
        size, late = len(x), s.late or s.config["late"]
        return plain(s, x) * (size % 2 * 2 - 1 if late else 1)

    model = Net(forward, late=False, config={"late": False})
    batches = [torch.arange(24), torch.arange(30, 53), torch.arange(60, 84)]
    source = torch.Generator().manual_seed(5)
    x, y, assurance = torch.randn(90, 8, generator=source), torch.randn(90, 3, generator=source), Assurance()
    for batch in batches:
        clipped_sum(model, loss, Rows(x[batch], y[batch]), FlatClip(1.0), assurance=assurance)
    if where == "an attribute":
        model.late = True
    else:
        model.config["late"] = True
    with pytest.raises(sordino.Refused, match="interact"):
        clipped_sum(model, loss, Rows(x[batches[0]], y[batches[0]]), FlatClip(1.0), assurance=assurance)
