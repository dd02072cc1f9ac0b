"""Memory is overwritten only where nobody can look at it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.native import ownership
from sordino.native.ownership import alone


def made() -> Tensor:
    return torch.ones(3, 4) * 2


def test_a_tensor_that_only_the_mapping_holds_is_alone() -> None:
    assert alone({"it": made()})
    assert alone({"it": made(), "another": made()})
    box = {"it": made()}
    box["it"] += 1
    assert alone(box)


def constant() -> Tensor:
    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return kept[0]

    found: list[Tensor] = []
    x = torch.zeros(3, 4, requires_grad=True)
    y = x + 0
    y.register_hook(found.append)  # type: ignore[no-untyped-call]
    Constant.apply(y).sum().backward()  # type: ignore[no-untyped-call]
    return found[0]


kept = [made()]  # what a function of the user's gives as its gradient, each time


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t.view(-1),
        lambda t: t[0],
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: lambda: t,
        lambda t: t.requires_grad_() * 1,
    ],
    ids=["itself", "view", "row", "detached", "array", "storage", "closure", "graph"],
)
def test_whoever_else_has_its_memory_keeps_it(hold: Callable[[Tensor], object]) -> None:
    box = {"it": made()}
    holder = hold(box["it"])
    assert not alone(box)
    del holder


def test_memory_of_others_is_theirs() -> None:
    array = np.ones((3, 4), np.float32)
    assert not alone({"it": torch.from_numpy(array)})
    assert not alone({"it": constant()})
    one = made()
    box = {"it": one, "again": one}
    del one
    assert not alone(box), "two names of a mapping for one tensor"
    gradients: list[Tensor] = []
    x = torch.zeros(3, 4, requires_grad=True)
    left, right = x + 0, x + 0
    left.register_hook(gradients.append)  # type: ignore[no-untyped-call]
    right.register_hook(gradients.append)  # type: ignore[no-untyped-call]
    ((left + right) ** 2).sum().backward()  # type: ignore[no-untyped-call]
    assert not alone({"it": gradients[0]}), "a sum gives both of its terms the same gradient"


def test_where_it_can_not_be_told_nothing_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    ownership._of_one_alone.cache_clear()
    try:
        assert not alone({"it": made()})
    finally:
        monkeypatch.undo()
        ownership._of_one_alone.cache_clear()
    assert alone({"it": made()})
