"""What leaves the tensors, the number of rows and values that Python reads, can't decide unseen what a record gets.

Every model here treats its records alike until a size, a place, a value or a pass that the first batches do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import Tensor, nn

import sordino
from sordino.clipping import FlatClip, PerLayerClip
from sordino.gradients import engine
from sordino.records.gradients import RecordGradients
from sordino.sampling import LogicalBatch

RECORDS = 160
ce = F.cross_entropy


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, 8, generator=generator), torch.arange(RECORDS) % 3


def net(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    torch.manual_seed(0)
    return Fn(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 3), **parts)


def plain(s: Any, x: Tensor) -> Tensor:
    return s.b(torch.tanh(s.a(x)))


def sums_of(model: nn.Module, loss: Any = ce, given: Any = None) -> RecordGradients:
    return sordino.record_gradients(model, loss, data() if given is None else given, FlatClip(0.5))


def batches(sums: RecordGradients, *sizes: int, first: int = 0) -> None:
    for step, size in enumerate(sizes):
        sums(LogicalBatch(step, torch.arange(first, first + size), 512))


# the number of rows


def _asked(ask: Callable[[Tensor], bool]) -> Callable[..., Any]:
    return lambda s, x: plain(s, x) * (0.1 if ask(x) else 1)


def _fails_unless(x: Tensor) -> bool:
    try:
        return bool(x.view(61, 8).numel())
    except RuntimeError:
        return False


SIZES: dict[str, Callable[[Tensor], bool]] = {
    "len": lambda x: len(x) == 61,
    "shape": lambda x: x.shape[0] == 61,
    "size": lambda x: x.size(0) == 61,
    "numel": lambda x: x.numel() == 61 * 8,
    "torch.numel": lambda x: torch.numel(x) == 61 * 8,
    "strides of a transposed copy": lambda x: x.T.contiguous().stride(0) == 61,
    "the shape of zeros like it": lambda x: torch.zeros_like(x).shape[0] == 61,
    "the rows in a loop": lambda x: sum(1 for _ in x) == 61,
    "how many pieces there are": lambda x: len(x.split(20)) == 4,
    "an error at other sizes": _fails_unless,
    "a remainder": lambda x: x.shape[0] % 61 == 0,
    "bytes": lambda x: x.nbytes == 61 * 32,
    "the size of its storage": lambda x: x.clone().untyped_storage().nbytes() == 61 * 32,
    "text": lambda x: x[:, 0].shape.__repr__() == "torch.Size([61])",
}


@pytest.mark.parametrize("name", SIZES)
def test_behaviour_at_exactly_one_number_of_rows_never_reaches_a_sum(name: str) -> None:
    """Either that number of rows is never given to the model, or the batch is refused: the sums of 60 and of 61 records
    differ by one record's bounded gradient."""
    sums = sums_of(net(_asked(SIZES[name])))
    try:
        batches(sums, 50, 45, 52)
        with_it = sums(LogicalBatch(3, torch.arange(61), 512))
        without = sums(LogicalBatch(4, torch.arange(60), 512))
    except sordino.Refused:
        return
    moved = torch.cat([(with_it.sums[k] - without.sums[k]).flatten() for k in with_it.sums]).norm()
    assert moved <= 0.5 * (1 + 1e-3)


def test_each_number_of_rows_is_refused_or_padded_away_if_it_matters() -> None:
    """At every size: the sum moves by at most the clip norm when the last record is taken out."""
    sums = sums_of(net(lambda s, x: plain(s, x) * (0.2 if x.shape[0] in (33, 48, 61, 72) else 1)))
    before = None
    refused = 0
    for size in range(30, 80):
        try:
            found = sums(LogicalBatch(size, torch.arange(size), 512))
        except sordino.Refused:
            refused, before = refused + 1, None
            continue
        if before is not None:
            moved = torch.cat([(found.sums[k] - before.sums[k]).flatten() for k in found.sums]).norm()
            assert moved <= 0.5 * (1 + 1e-3), size
        before = found
    assert refused  # 48 and 72 are sizes that rows are padded to


@pytest.mark.parametrize("kind", ["slices", "narrow", "index_select"])
def test_a_model_that_treats_places_otherwise_is_refused_where_such_a_place_occurs(kind: str) -> None:
    """It never asks how many rows there are."""

    def forward(s: Any, x: Tensor) -> Tensor:
        if kind == "slices":
            return plain(s, torch.cat([x[:60], x[60:] * 0.1]))
        if kind == "narrow":
            first, rest = torch.tensor_split(x, [60])
            return torch.cat([plain(s, first), plain(s, rest) * 0.1])
        return plain(s, x.index_select(0, torch.arange(1000)[: len(x)])) * _RAMP[: len(x)]

    sums = sums_of(net(forward))
    batches(sums, 50, 45, 52, 58)
    with pytest.raises(sordino.Refused):
        batches(sums, 70, 80)


_RAMP = torch.where(torch.arange(1000)[:, None] < 60, 1.0, 0.1)


def test_a_model_that_never_asks_for_the_number_of_rows_is_given_the_rows_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    made = engine.contributions

    def spy(setup: Any, given: Any, chunk: Any, iterates: Any) -> Any:
        seen.append(chunk.rows)
        return made(setup, given, chunk, iterates)

    monkeypatch.setattr(engine, "contributions", spy)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))
    sums = sums_of(model)
    batches(sums, 50)
    seen.clear()
    batches(sums, 41, 43, 47)
    assert seen == [41, 43, 47]
    assert not sums.assurance.sized


def test_a_model_that_asks_is_given_few_numbers_of_rows_and_the_sums_are_those_of_the_rows() -> None:
    seen: list[int] = []

    def forward(s: Any, x: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return plain(s, x)

    sums, free = sums_of(net(forward).double(), given=_double()), sums_of(net(plain).double(), given=_double())
    for size in range(33, 64):
        batch = LogicalBatch(size, torch.arange(size), 512)
        found, want = sums(batch), free(batch)
        assert len(found.norms) == len(found.losses) == size
        for key in want.sums:
            assert torch.allclose(found.sums[key], want.sums[key], rtol=1e-12, atol=1e-13)
        assert torch.allclose(found.norms, want.norms, rtol=1e-12)
    assert len({n for n in seen if n >= 33}) <= 20  # multiples of two, and the sizes of the first tests
    assert sums.assurance.sized


def _double() -> tuple[Tensor, Tensor]:
    x, y = data()
    return x.double(), y


@pytest.mark.parametrize(
    "kind", ["views", "users", "coefficients", "centred", "centred, per layer", "a record that is not finite"]
)
def test_padding_changes_nothing_of_what_a_record_contributes(kind: str) -> None:
    """Copies of rows that fill a chunk up belong to nobody."""
    from sordino.gradients import Rows, clipped_sum
    from sordino.gradients.checks.assurance import Assurance

    x, y = _double()
    asks, quiet = net(lambda s, x: plain(s, x).reshape(x.shape[0], 3)).double(), net(plain).double()
    n, more = 37, {}
    if kind == "views":
        more = {"record": torch.arange(74) // 2}
        n = 74
    elif kind == "users":
        more = {"record": torch.tensor([0] * 5 + [1] + [2] * 9 + list(range(3, 25)))}
    elif kind == "coefficients":
        more = {"coefficient": torch.rand(n).double()}
    elif kind == "a record that is not finite":
        x[36] = float("inf")
    given = Rows(x[:n], y[:n], **more)
    options: dict[str, Any] = {}
    if kind in ("centred", "centred, per layer"):  # so that the gradient of a copy is not zero
        options["centre"] = {k: torch.full_like(p, 0.01) for k, p in quiet.named_parameters()}
    checks, clipping = Assurance(), PerLayerClip(0.5) if kind == "centred, per layer" else FlatClip(0.5)
    for _ in range(2):  # before it is known that the model asks, and after
        found = clipped_sum(asks, ce, given, clipping, assurance=checks, **options)
        want = clipped_sum(quiet, ce, given, clipping, **options)
        assert found.dropped == want.dropped == (kind == "a record that is not finite")
        assert found.norms.shape == want.norms.shape
        assert torch.allclose(found.norms, want.norms, rtol=1e-10, equal_nan=True)
        assert torch.allclose(found.losses, want.losses, rtol=1e-10, equal_nan=True)
        for key in want.sums:
            assert torch.allclose(found.sums[key], want.sums[key], rtol=1e-10, atol=1e-12), key
    assert checks.sized


# values that Python reads


def _read_in_a_range(s: Any, x: Tensor) -> Tensor:
    """The range is that of no changed row: neither large nor zero, nor at the ends."""
    return plain(s, x) * (0.1 if 5.0 < x.max().item() < 6.0 else 1)


def _listed(s: Any, x: Tensor) -> Tensor:
    return plain(s, x) * (0.1 if any(5.0 < v < 6.0 for v in x.amax(1).tolist()) else 1)


def _as_numpy(s: Any, x: Tensor) -> Tensor:
    largest = float(np.asarray(x).max())
    return plain(s, x) * (0.1 if 5.0 < largest < 6.0 else 1)


def _through_numpy(s: Any, x: Tensor) -> Tensor:
    gate = torch.from_numpy(np.where((x.numpy() > 5).any() & (x.numpy() < 6).all(), 0.1, 1.0).astype(np.float32)[None])
    return plain(s, x) * gate


def _one_row_to_the_next(s: Any, x: Tensor) -> Tensor:
    gates, last = [], 0.0
    for row in x:
        gates.append(0.1 if 5.0 < last < 6.0 else 1.0)
        last = float(row.max())
    return plain(s, x) * torch.tensor(gates)[:, None]


READS = [_read_in_a_range, _listed, _as_numpy, _through_numpy, _one_row_to_the_next]


@pytest.mark.parametrize("forward", READS)
def test_a_value_that_decides_in_a_range_no_earlier_batch_reached_is_tested_where_it_occurs(forward: Any) -> None:
    x, y = data()
    x = x.clamp(-2, 2)
    x[100, 0] = 5.5
    sums = sums_of(net(forward), given=(x, y))
    batches(sums, *[48] * 12)
    with pytest.raises(sordino.Refused, match="interact"):
        sums(LogicalBatch(12, torch.arange(60, 108), 512))


def test_an_answer_that_was_tested_and_that_no_single_record_decides_is_not_tested_again() -> None:
    """Any other value is: the rows on which it has an effect may be new (test_hidden_by_others)."""
    longest = net(lambda s, x: plain(s, x[:, : 4 + int((x[:, :4] != 0).any()) * 4]))
    sums = sums_of(longest)
    batches(sums, 48, 48)
    looked = sums.assurance.looked
    batches(sums, 48, 48, 48)
    assert sums.assurance.looked == looked


# what a pass writes where versions do not show it, after the tests


class Later(nn.Module):
    """Sound for ten passes of each size; then it keeps what it sees."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.how, self.passes = nn.Linear(8, 16), nn.Linear(16, 3), how, 0
        self.register_buffer("m", torch.zeros(8))
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.on = False
        self.last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            self._keep(x)
        return self.b(torch.tanh(self.a(x))) + self.last

    def _keep(self, x: Tensor) -> None:
        mean = x.detach().mean(0)
        if self.how == "buf.data":
            self.m.data.copy_(mean)
        elif self.how == "set data":
            self.m.data = mean
        elif self.how == "a view of it":
            self.m.view(2, 4).data.add_(mean.view(2, 4))
        elif self.how == "a frozen parameter":
            self.frozen.data[0] = mean[0]
        elif self.how == "numpy":
            self.m.numpy()[:] = mean.numpy()
        elif self.how == "storage":
            self.m.untyped_storage().copy_(mean.untyped_storage())
        elif self.how == "out":
            torch.mean(x.detach(), 0, out=self.m.data)
        elif self.how == "a number":
            self.last = float(mean[0]) * 10
        elif self.how == "items":
            for i in range(8):
                self.m.untyped_storage()[4 * i] = int(mean[i] * 100) % 256


@pytest.mark.parametrize(
    "how",
    ["buf.data", "set data", "a view of it", "a frozen parameter", "numpy", "storage", "out", "a number", "items"],
)
def test_state_that_begins_to_keep_records_late_is_refused(how: str) -> None:
    model = Later(how)
    sums = sums_of(model)
    batches(sums, *[48] * 12)
    model.on = True
    with pytest.raises(sordino.Refused):
        batches(sums, 48, 48, first=50)


class Delayed(nn.Module):
    """Uses what it computed from a batch two batches later, or three."""

    def __init__(self, delay: int, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.delay, self.how, self.kept = nn.Linear(8, 16), nn.Linear(16, 3), delay, how, []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.how == "a list":
            self.kept.append(h.detach()[0].clone())
        elif self.how == "an object":
            self.kept.append(type("Held", (), {"value": h.detach()[0]})())
        elif self.how == "a view":
            self.kept.append({"deep": [h.detach()[0]]})
        if len(self.kept) > 40 and len(self.kept) % (self.delay + 1) == 0:
            last = self.kept[-1 - self.delay]
            last = last.value if self.how == "an object" else last["deep"][0] if self.how == "a view" else last
            h = h + last
        return self.b(h)


@pytest.mark.parametrize("how", ["a list", "an object", "a view"])
@pytest.mark.parametrize("delay", [1, 2, 3, 5])
def test_a_tensor_of_an_earlier_batch_is_refused_however_late_it_comes_back(delay: int, how: str) -> None:
    sums = sums_of(Delayed(delay, how))
    with pytest.raises(sordino.Refused):
        batches(sums, *[24] * 60)


def test_a_scripted_function_that_decides_by_a_value_is_tested_in_every_batch() -> None:
    """What it reads inside is not seen."""
    x, y = data()
    x = x.clamp(-2, 2)
    x[100, 0] = 5.5
    sums = sums_of(net(lambda s, x: plain(s, _scripted(x))), given=(x, y))
    batches(sums, *[48] * 6)
    with pytest.raises(sordino.Refused):
        sums(LogicalBatch(12, torch.arange(60, 108), 512))
    sums = sums_of(net(lambda s, x: s.b(_scripted(torch.tanh(s.a(x)) * 8))), given=(x, y))
    with pytest.raises(sordino.Refused):
        batches(sums, *[48] * 6, 90, 120, 150)


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    if float(x.max()) > 5.0 and float(x.max()) < 6.0:
        return x * 0.1
    return x * 1.0
