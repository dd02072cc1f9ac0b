"""Products of data with parameters of any number of dimensions, in every order of the factors and of the dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradients.cases import Fn, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.layers import fallback

Forward = Callable[[Any, Tensor], Tensor]

# data (rows, 3, 4); a parameter of this shape; the operation
CALLS: dict[str, tuple[tuple[int, ...], Forward]] = {
    "bmm over blocks": ((3, 4, 2), lambda s, x: torch.bmm(x.transpose(0, 1), s.w).transpose(0, 1)),
    "bmm from the left": ((3, 2, 4), lambda s, x: torch.bmm(s.w, x.permute(1, 2, 0)).permute(2, 0, 1)),
    "bmm, of the tensor": ((3, 4, 2), lambda s, x: x.transpose(0, 1).bmm(mat2=s.w).transpose(0, 1)),
    "baddbmm": (
        (3, 4, 2),
        lambda s, x: torch.baddbmm(s.w[:, :1], x.transpose(0, 1), s.w, beta=0.5, alpha=2).transpose(0, 1),
    ),
    "matmul with blocks": ((3, 4, 2), lambda s, x: x[:, :, None] @ s.w),
    "matmul from the left": ((2, 3), lambda s, x: s.w @ x),
    "matmul from the left, with blocks": ((3, 2, 4), lambda s, x: s.w @ x[..., None]),
    "matmul, a dimension repeated": ((2, 4, 3), lambda s, x: x[:, None] @ s.w),
    "matmul with a vector": ((4,), lambda s, x: x @ s.w),
    "a vector's matmul": ((3,), lambda s, x: s.w @ x),
    "mv": ((4,), lambda s, x: torch.mv(x[:, 0], s.w)[:, None]),
    "einsum, a linear map": ((4, 2), lambda s, x: torch.einsum("bsi,io->bso", x, s.w)),
    "einsum, heads": ((2, 4, 5), lambda s, x: torch.einsum("bsi,hio->bhso", x, s.w)),
    "einsum, blocks": ((3, 4, 2), lambda s, x: torch.einsum("bsi,sio->obs", x, s.w).permute(1, 0, 2)),
    "einsum, slot first": ((2, 4), lambda s, x: torch.einsum("oi,bsi->bso", s.w, x)),
    "einsum, dots": ((4, 2), lambda s, x: torch.einsum("...i,io->...o", x, s.w)),
    "einsum, no arrow": ((4, 2), lambda s, x: torch.einsum("abc,cd", x, s.w)),
    "einsum, every dimension": ((3, 4), lambda s, x: torch.einsum("bsi,si->b", x, s.w)[:, None]),
    "einsum, elementwise": ((3, 4), lambda s, x: torch.einsum("bsi,si->bsi", x, s.w)),
    "einsum, nothing shared": ((2,), lambda s, x: torch.einsum("bsi,o->bsio", x, s.w)),
    "einsum, two inner": ((4, 2, 3), lambda s, x: torch.einsum("bsi,ios->bo", x, s.w)),
    "einsum, positions summed": ((4, 2), lambda s, x: torch.einsum("bsi,io->bo", x, s.w)),
    "einsum, a diagonal": ((4, 4), lambda s, x: torch.einsum("bsi,ii->bs", x, s.w)),
    "einsum, three": ((4, 2), lambda s, x: torch.einsum("bsi,io,bs->bo", x, s.w, x[..., 0])),
}


@pytest.mark.parametrize("name", CALLS)
def test_products_match_the_loop(name: str) -> None:
    shape, forward = CALLS[name]
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(Fn(forward, w=noise(*shape)), noise(rows, 3, 4), rows=rows)
        behind = Fn(lambda s, x: forward(s, torch.tanh(x * s.p)), w=noise(*shape), p=noise(4))
        matches(behind, noise(rows, 3, 4), rows=rows)


@pytest.mark.parametrize("positions", [40, 2], ids=["held as products", "held as positions"])
def test_blocks_of_many_and_of_few_positions(positions: int) -> None:
    for rows in (1, 3, 7):
        torch.manual_seed(rows)
        model = Fn(lambda s, x: torch.einsum("bshi,hio->bsho", x, s.w), w=noise(4, 6, 5))
        matches(model, noise(rows, positions, 4, 6), rows=rows)


SLOW = ("einsum, a diagonal", "einsum, three", "einsum, positions summed")


@pytest.mark.parametrize("name", [n for n in CALLS if n not in SLOW])
def test_they_do_not_take_the_slow_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> None:
        raise AssertionError("the fallback was asked")

    monkeypatch.setattr(fallback, "general", slow)
    shape, forward = CALLS[name]
    clipped_sum(Fn(forward, w=noise(*shape)), squared, Rows(noise(7, 3, 4), noise(7)), FlatClip(1.0))
