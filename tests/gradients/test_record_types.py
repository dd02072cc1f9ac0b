"""Every kind of record that training makes (views, past iterates, both, users of several rows) equals a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradients.cases import Fn, agree
from sordino.clipping import AutomaticClip, Clipping, FlatClip, NormalisedClip, PerLayerClip
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.engine import per_record_gradients
from sordino.gradients.sums.standardisation import standardised_weight
from sordino.plan.contribution import Augmentation, InnerMomentum
from sordino.records.momentum import made_up_past
from sordino.records.views import with_views

RECORDS = 4


def cnn() -> nn.Module:
    """One channel in, then many: both ways of making a convolution's products; smooth, so that no kink decides."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ELU(),
        nn.Flatten(), nn.Linear(72, 3),
    )  # fmt: skip


def standardised(self: Any, x: Tensor) -> Tensor:
    return self.head(nn.functional.elu(nn.functional.conv2d(x, standardised_weight(self.kernel))).mean((2, 3)))


def derived(self: Any, x: Tensor) -> Tensor:
    """A kernel computed from its parameter by operations that the engine has no rule for."""
    return self.head(nn.functional.conv2d(x, torch.sin(self.kernel)).flatten(2).mean(2))


def texts(self: Any, ids: Tensor) -> Tensor:
    return self.head(self.gru(self.embedding(ids))[0].mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn,
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
    "standardised": lambda: Fn(standardised, kernel=torch.randn(5, 1, 3, 3), head=nn.Linear(5, 3)),
    "derived": lambda: Fn(derived, kernel=torch.randn(5, 1, 3, 3), head=nn.Linear(5, 3)),
    "texts": lambda: Fn(texts, embedding=nn.Embedding(9, 4), gru=nn.GRU(4, 3, batch_first=True), head=nn.Linear(3, 3)),
}
CLIPPINGS: list[Clipping] = [FlatClip(0.5), AutomaticClip(), NormalisedClip(1.0), PerLayerClip(1.0)]


def rows_of(net: str, users: bool, views: int, step: int, dtype: torch.dtype) -> Rows:
    n = 6 if users else RECORDS
    record = torch.tensor([0, 1, 1, 3, 0, 1]) if users else None  # record 2 has no rows
    weight = torch.tensor([1.0, -0.5, 2.0, 1.0, 0.3, 1.0], dtype=torch.float64) if users else None
    x = torch.randint(0, 9, (n, 5)) if net == "texts" else torch.randn(n, 1, 8, 8, dtype=dtype)
    rows = Rows(x, torch.randint(0, 3, (n,)), record, RECORDS, weight)
    if views == 1:
        return rows
    text = Augmentation(views=views, word_dropout=0.3)
    pictures = Augmentation(views=views, crop=2, flip=True, erase=0.3, mixup=0.4)
    return with_views(rows, text if net == "texts" else pictures, seed=0, step=step)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)], ids=["double", "single"]
)
@given(
    net=st.sampled_from(sorted(NETS)),
    users=st.booleans(),
    views=st.sampled_from([1, 2, 3]),
    length=st.integers(0, 3),
    decay=st.sampled_from([0.08, 0.5, 1.0]),
    clipping=st.sampled_from(CLIPPINGS),
    chunk=st.sampled_from([None, 1, 2]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
def test_norms_and_clipped_sums_equal_a_plain_loop(
    dtype: torch.dtype, tolerance: float, net: str, users: bool, views: int, length: int, decay: float,
    clipping: Clipping, chunk: int | None, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    model = NETS[net]().to(dtype)
    rows = rows_of(net, users, views, seed, dtype)
    inner = InnerMomentum(max(1, length), decay)
    iterates = made_up_past(model, inner).with_present(inner) if length else None
    engine = clipped_sum(model, nn.functional.cross_entropy, rows, clipping, iterates=iterates, chunk=chunk)
    oracle = brute_force(model, nn.functional.cross_entropy, rows, clipping, iterates=iterates)
    agree(engine, oracle, tolerance)


@pytest.mark.parametrize("net", sorted(NETS))
@pytest.mark.parametrize("users", [False, True])
def test_gradients_of_single_records_equal_a_plain_loop(net: str, users: bool) -> None:
    torch.manual_seed(0)
    model = NETS[net]().double()
    rows = rows_of(net, users, 2, 0, torch.float64)
    gradients, losses = per_record_gradients(model, nn.functional.cross_entropy, rows)
    assert len(losses) == len(rows.inputs)
    for i in range(RECORDS):
        mine = torch.nonzero(rows.record == i).flatten()  # type: ignore[arg-type]
        outputs = model(rows.inputs[mine])
        own = nn.functional.cross_entropy(outputs, rows.targets[mine], reduction="none")
        total = (own * rows.coefficient[mine]).sum()  # type: ignore[index]
        wanted = torch.autograd.grad(total, list(model.parameters()))
        for (name, found), want in zip(gradients.items(), wanted, strict=True):
            assert torch.allclose(found[i], want, rtol=1e-9, atol=1e-11), name
