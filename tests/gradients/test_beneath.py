"""Code beneath torch's operations: modes of the dispatcher, tensor classes that define operations themselves.

The labels of a pass follow the names of operations. A dispatch mode that centres the results of ``relu`` over batches
of more than 30 rows was accepted: the sum was 4.4 clip norms from that of a loop over the records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.tape.beneath import own_code


class Centring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Beneath relu, from so many rows on."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        many = func is torch.ops.aten.relu.default and len(out) >= self.rows
        return out - out.mean(0) if many else out


class Own(torch.Tensor):
    """relu centres over the rows, from so many on."""

    rows = 30

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out - out.mean(0) if func is torch.relu and len(out) >= cls.rows else out


class Named(torch.Tensor):
    """Without code of its own."""


def _centred(s: Any, x: Tensor, rows: int) -> Tensor:
    with Centring(rows):
        return s.b(torch.relu(s.a(x)))  # type: ignore[no-any-return]


def _as(kind: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda s, x: s.b(torch.relu(s.a(x).as_subclass(kind)).as_subclass(torch.Tensor))


def net(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Fn(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 3))


def rows(count: int, kind: Any = torch.Tensor) -> Rows:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return Rows(x.as_subclass(kind), torch.arange(count) % 3)


def batches(model: nn.Module, kind: Any = torch.Tensor) -> None:
    """Small batches, then one of 40 rows."""
    assurance = Assurance()
    for count in (12, 9, 24, 20, 40):
        torch.manual_seed(count)
        clipped_sum(model, F.cross_entropy, rows(count, kind), FlatClip(0.5), assurance=assurance)


@pytest.mark.parametrize("many", [1, 30])
def test_a_dispatch_mode_of_the_model_is_refused(many: int) -> None:
    with pytest.raises(sordino.Refused, match=r"Centring: .*TorchDispatchMode"):
        batches(net(lambda s, x: _centred(s, x, many)))


def test_a_dispatch_mode_that_the_caller_has_entered_is_not_the_models() -> None:
    with Centring(1 << 20):
        batches(net(lambda s, x: s.b(torch.relu(s.a(x)))))


def test_a_tensor_class_that_defines_an_operation_is_tested_where_it_mixes_rows() -> None:
    with pytest.raises(sordino.Refused):
        batches(net(_as(Own)))


def test_records_of_such_a_class_are_tested_where_it_mixes_rows() -> None:
    with pytest.raises(sordino.Refused):
        batches(net(lambda s, x: s.b(torch.relu(s.a(torch.relu(x).as_subclass(torch.Tensor))))), Own)


@pytest.mark.parametrize("kind", [Own, Named])
def test_a_class_that_works_row_by_row_is_right(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "rows", 1 << 20)
    model, given = net(_as(kind)), rows(12)
    found = clipped_sum(model, F.cross_entropy, given, FlatClip(0.5), assurance=Assurance())
    for name, value in brute_force(model, F.cross_entropy, given, FlatClip(0.5)).sums.items():
        assert torch.allclose(found.sums[name].double(), value.double(), atol=1e-5)


def test_which_classes_have_code_of_their_own() -> None:
    class Tagged(nn.Parameter):
        pass

    assert not any(map(own_code, (torch.Tensor, nn.Parameter, Named, Tagged)))
    assert own_code(Own)
    assert own_code(torch._subclasses.FakeTensor)
