"""Attention with learned biases, queries, keys and values, of every shape that torch stretches over the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.layers import fallback

attend = F.scaled_dot_product_attention


def windows(self: Any, x: Tensor) -> Tensor:
    """(rows · windows, 1, L, E) with one bias for all windows, as Swin and MaxViT have it."""
    h = self.q(x).flatten(0, 1)[:, None]
    return attend(h, h, h, attn_mask=self.b[None]).unflatten(0, (len(x), 4))


INDEX = torch.arange(3)[:, None] - torch.arange(3) + 2  # relative positions

MODELS: dict[str, Callable[[], nn.Module]] = {
    "a bias for each head": lambda: Fn(lambda s, x: attend(x, x, x, attn_mask=s.b), b=noise(1, 4, 3, 3)),
    "a bias for each head, without the rows": lambda: Fn(lambda s, x: attend(x, x, x, s.b), b=noise(4, 3, 3)),
    "one bias": lambda: Fn(lambda s, x: attend(query=x, key=x, value=x, attn_mask=s.b), b=noise(3, 3)),
    "a bias of the keys": lambda: Fn(lambda s, x: attend(x, x, x, s.b, 0.0), b=noise(1, 3)),
    "a bias that was computed": lambda: Fn(lambda s, x: attend(x, x, x, 2 * s.b[INDEX]), b=noise(5)),
    "windows": lambda: Fn(windows, q=nn.Linear(5, 5), b=noise(3, 3)),
    "queries": lambda: Fn(lambda s, x: attend(s.b, x, x), b=noise(1, 4, 2, 5)),
    "keys and values": lambda: Fn(lambda s, x: attend(x, s.b, s.c), b=noise(1, 4, 2, 5), c=noise(1, 4, 2, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_learned_parts_of_attention_match_the_loop(name: str) -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(MODELS[name](), noise(rows, 4, 3, 5), rows=rows)


@pytest.mark.parametrize("name", MODELS)
def test_they_do_not_take_the_slow_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> None:
        raise AssertionError("the fallback was asked")

    monkeypatch.setattr(fallback, "general", slow)
    clipped_sum(MODELS[name]().double(), squared, Rows(noise(7, 4, 3, 5), noise(7)), FlatClip(1.0))
