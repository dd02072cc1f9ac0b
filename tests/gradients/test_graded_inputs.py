"""Data that is made to require a gradient in the forward pass: parameters behind it have the loop's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def by_method(self: Any, x: Tensor) -> Any:
    return self.body(x.clone().requires_grad_())


def by_attribute(self: Any, x: Tensor) -> Any:
    """As the feature encoders of Wav2Vec2 and HuBERT do."""
    h = x[:, None]
    h.requires_grad = True
    return self.body(h)


def with_a_leaf(self: Any, x: Tensor) -> Any:
    return self.body(x + torch.zeros(4, dtype=x.dtype, requires_grad=True))


def after_a_frozen_table(self: Any, x: Tensor) -> Any:
    """peft's enable_input_require_grads."""
    return self.body(self.table(x[..., 0].long().clamp(0, 2)).requires_grad_())


@pytest.mark.parametrize("forward", [by_method, by_attribute, with_a_leaf, after_a_frozen_table])
def test_parameters_behind_data_with_a_gradient(forward: Callable[[Any, Tensor], Any]) -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        parts = {"table": nn.Embedding(3, 4).requires_grad_(False)} if forward is after_a_frozen_table else {}
        matches(Fn(forward, body=body(), **parts), noise(rows, 3, 4), rows=rows)
