"""Kinds of state that a pass can leave, and that Python's containers do not show: iterators, locks, closures, settings.

Record A (0.5 as its first value) leaves something in the batch before; it turns around the output of record B (0.75) in
the last batch, and of nobody else. So no comparison within a batch shows it: A moved that sum by up to two clip norms.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import io
import itertools
import logging
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance

Act = Callable[[Any], Any]


class Later(nn.Module):
    """keep(self) where record A is; got(self): whether that shows."""

    def __init__(self, keep: Act, got: Act, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.keep, self.got = keep, got
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        seen = bool(self.got(self))
        if bool((x[:, 0] == 0.5).any()):
            self.keep(self)
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return torch.where(x[:, :1] == 0.75, -1.0 if seen else 1.0, 1.0) * out


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def run(model: nn.Module) -> None:
    source = torch.Generator().manual_seed(5)
    x, y = torch.randn(96, 8, generator=source), torch.randn(96, 3, generator=source)
    x[24 * 2, 0], x[24 * 3, 0] = 0.5, 0.75
    assurance = Assurance()
    for step in range(4):
        some = slice(24 * step, 24 * step + 24)
        torch.manual_seed(1000 + step)
        clipped_sum(model, loss, Rows(x[some], y[some]), FlatClip(1.0), assurance=assurance)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self) -> None:
        value = [0]
        self.inner = types.SimpleNamespace(put=lambda: value.__setitem__(0, 1), get=lambda: value[0])


def _counter() -> tuple[Callable[[], None], Callable[[], int]]:
    value = 0

    def put() -> None:
        nonlocal value
        value = 1

    return put, lambda: value


def documented(first: int = 0) -> int:
    return first


def _nothing(*given: Any) -> None:
    return None


COUNT, CYCLE, PLACES = itertools.count(), itertools.cycle([0, 1]), iter(range(99))
ZIP = zip(range(9), range(9), strict=True)
COUNTER, CLOSED = _counter(), Slotted()
LOCK, AGAIN = threading.Lock(), threading.RLock()
STACK, ARRAY = contextlib.ExitStack(), np.zeros(2, dtype=object)
FIRST, SECOND, THIRD, MANY = torch.zeros(3), torch.zeros(3), torch.zeros(3), [torch.zeros(2)]
GROWN: list[Tensor] = []
STORAGE = torch.zeros(3).untyped_storage()
TEXT = io.StringIO("abcdef")
PARTIAL = functools.partial(int, [0])  # type: ignore[arg-type]

KINDS: dict[str, tuple[Act, Act]] = {
    "count": (lambda s: next(COUNT), lambda s: repr(COUNT) != "count(0)"),
    "cycle": (lambda s: next(CYCLE), lambda s: False),
    "an iterator": (lambda s: next(PLACES), lambda s: PLACES.__length_hint__() < 99),  # type: ignore[attr-defined]
    "zip": (lambda s: next(ZIP), lambda s: False),
    "functions in a tuple": (lambda s: COUNTER[0](), lambda s: COUNTER[1]()),
    "functions in an object": (lambda s: CLOSED.inner.put(), lambda s: CLOSED.inner.get()),
    "a lock": (lambda s: LOCK.acquire(False), lambda s: LOCK.locked()),
    "a lock that may be taken again": (lambda s: AGAIN.acquire(False), lambda s: False),
    "ExitStack": (lambda s: STACK.callback(int), lambda s: bool(STACK._exit_callbacks)),  # type: ignore[attr-defined]
    "an array of objects": (lambda s: ARRAY.__setitem__(0, 1), lambda s: ARRAY[0] == 1),
    "the place in a text": (lambda s: TEXT.seek(3), lambda s: TEXT.tell() == 3),
    "a default": (lambda s: setattr(documented, "__defaults__", (1,)), lambda s: documented()),
    "a docstring": (lambda s: setattr(documented, "__doc__", "1"), lambda s: documented.__doc__),
    "annotations": (lambda s: Slotted.__annotations__.update(a="int"), lambda s: "a" in Slotted.__annotations__),
    "a tensor": (lambda s: FIRST.add_(1), lambda s: FIRST.sum() > 0),
    "a tensor's data": (lambda s: SECOND.data.add_(1), lambda s: SECOND.sum() > 0),
    "a tensor's array": (lambda s: THIRD.numpy().fill(1), lambda s: THIRD.sum() > 0),
    "a tensor in a list": (lambda s: MANY[0].data.add_(1), lambda s: MANY[0].sum() > 0),
    "a list of tensors": (lambda s: GROWN.append(torch.ones(1)), lambda s: bool(GROWN)),
    "a tensor's memory": (lambda s: STORAGE.fill_(1), lambda s: STORAGE[0] == 1),
    "the name of the thread": (
        lambda s: setattr(threading.current_thread(), "name", "A"),
        lambda s: threading.current_thread().name == "A",
    ),
    "an attribute's data": (lambda s: s.t.data.add_(1), lambda s: s.t.sum() > 0),
}


class Other(Later):
    pass


PUT_BACK: dict[str, tuple[Act, Act]] = {
    "in a partial": (lambda s: PARTIAL.args[0].__setitem__(0, 1), lambda s: PARTIAL.args[0][0]),
    "a module's hook": (lambda s: s.a.register_forward_hook(_nothing), lambda s: bool(s.a._forward_hooks)),
    "its class": (lambda s: setattr(s, "__class__", Other), lambda s: type(s) is Other),
}
Slotted.__annotations__ = {}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    name = threading.current_thread().name
    yield
    threading.current_thread().name = name
    documented.__defaults__, documented.__doc__ = (0,), None
    GROWN.clear()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_what_a_pass_leaves_is_seen_whatever_holds_it(name: str) -> None:
    with pytest.raises(sordino.Refused, match=r"changes this variable|the forward pass writes to this tensor"):
        run(Later(*KINDS[name], t=torch.zeros(3)))


@pytest.mark.parametrize("name", PUT_BACK)
def test_what_belongs_to_the_model_is_put_back(name: str) -> None:
    model = Later(*PUT_BACK[name])
    run(model)
    assert type(model) is Later
    assert not PUT_BACK[name][1](model)


def _locale() -> None:
    import locale

    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "decimal": (lambda: setattr(decimal.getcontext(), "prec", 7), lambda: setattr(decimal.getcontext(), "prec", 28)),
    "profile": (lambda: sys.setprofile(_nothing), lambda: sys.setprofile(None)),
    "a signal": (
        lambda: signal.signal(signal.SIGUSR2, _nothing),
        lambda: signal.signal(signal.SIGUSR2, signal.SIG_DFL),
    ),
    "the collector": (lambda: gc.freeze(), lambda: gc.unfreeze()),
    "logging": (lambda: logging.disable(5), lambda: logging.disable(0)),
    "digits": (lambda: sys.set_int_max_str_digits(5000), lambda: sys.set_int_max_str_digits(4300)),
    "numpy's text": (lambda: np.set_printoptions(precision=7), lambda: np.set_printoptions(precision=8)),
    "torch's text": (lambda: torch.set_printoptions(precision=7), lambda: torch.set_printoptions(precision=4)),
    "autocast": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
    "mkldnn": (
        lambda: torch.backends.mkldnn.set_flags(False),
        lambda: torch.backends.mkldnn.set_flags(True),
    ),
    "attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
    "warnings of torch": (lambda: torch.set_warn_always(True), lambda: torch.set_warn_always(False)),
    "denormal numbers": (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    "threads of autograd": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda: torch.autograd.set_multithreading_enabled(True),
    ),
    "a hook on all modules": (
        lambda: HANDLES.append(nn.modules.module.register_module_forward_hook(_nothing)),
        lambda: [handle.remove() for handle in HANDLES],
    ),
}
HANDLES: list[Any] = []


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_process_is_seen(name: str) -> None:
    change, undo = SETTINGS[name]
    try:
        with pytest.raises(sordino.Refused, match=r"a setting of|changes this variable"):
            run(Later(lambda s: change(), lambda s: False))
    finally:
        undo()


def test_what_every_pass_leaves_alike_is_accepted() -> None:
    """A lock that is released, a file that is closed, a logger that is used."""
    logger = logging.getLogger("sordino-test")

    def works(s: Any) -> bool:
        with LOCK2:
            logger.debug("a pass")
        return len(list(iter([1, 2]))) == 3

    run(Later(works, works))


LOCK2 = threading.Lock()
