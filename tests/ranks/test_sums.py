"""Chunks are summed by any number of ranks, in any order, with the bits of one process."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import ranks
from sordino.clipping import FlatClip, PerLayerClip
from sordino.data import Split
from sordino.errors import Refused, SordinoError
from sordino.methods import coupling
from sordino.methods.coupling import Constant, CoupledUpdate, PublicUse
from sordino.plan.contribution import Augmentation, InnerMomentum
from sordino.plan.public import PublicSet
from sordino.ranks.sums import Work
from sordino.records.gradients import (
    Divisible,
    RecordGradients,
    add_sums,
    empty_sum,
    grid_spacing,
    on_grid,
    record_gradients,
)
from sordino.records.momentum import PastIterates
from sordino.sampling import LogicalBatch

ROWS = 120


def _net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(144, 5))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 1, 8, 8, generator=generator) * torch.logspace(-3, 3, ROWS)[:, None, None, None]
    return x, torch.randint(5, (ROWS,), generator=generator)


def _past(net: nn.Module) -> PastIterates:
    return PastIterates().followed_by(net, 2).followed_by(net, 2)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.5},
    "views": {"views": Augmentation(views=2, flip=True, crop=1)},
    "inner momentum": {"inner": InnerMomentum(length=2, decay=0.5)},
    "per layer": {"clipping": PerLayerClip(0.7)},
    "coupling": {"dropout": 0.5, "coupled": {"centring": True, "quantile": 0.5}},
}


def _coupled(net: nn.Module, options: dict[str, Any]) -> Divisible:
    """The sum of a coupling with public rows, which centre and scale the private ones."""
    x, y = _data()
    public = Split(x[:20] + 1, y[:20])
    plan = coupling.plan(
        public=PublicSet.of(public, "made for this test"), noise_multiplier=1.0, delta=1e-3, records=ROWS,
        expected_batch=ROWS, steps=4, clip_norm=0.7, **options,
    )  # fmt: skip
    return CoupledUpdate(PublicUse(public, rule=Constant(0.3)), plan, net, cross_entropy).gradient_sum(_data())


def _gradients(case: str) -> tuple[Any, nn.Module, PastIterates]:
    options = dict(CASES[case])
    net = _net(options.pop("dropout", 0.0))
    if "coupled" in options:
        return _coupled(net, options["coupled"]), net, PastIterates()
    past = _past(net) if "inner" in options else PastIterates()
    clipping = options.pop("clipping", FlatClip(0.7))
    return record_gradients(net, cross_entropy, _data(), clipping, past=lambda: past, **options), net, past


def _batches() -> list[LogicalBatch]:
    some = torch.arange(0, ROWS, 2)
    return [
        LogicalBatch(0, torch.arange(ROWS), 16),
        LogicalBatch(1, some, 7),
        LogicalBatch(2, torch.tensor([5]), 16),  # one chunk: all ranks but one have nothing to do
        LogicalBatch(3, torch.arange(0), 16),
    ]


def _sums_of(case: str, rank: ranks.Rank | None) -> list[Any]:
    gradients, net, past = _gradients(case)
    found = []
    for batch in _batches():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(77 + batch.step)
            whole = gradients if rank is None else ranks.Divided(gradients, net, rank, lambda: past)
            made = whole(batch)
        found.append(({n: v.numpy().tobytes() for n, v in made.sums.items()}, made.norms.tolist(), made.dropped))
    return found


def _ask(number: int, cases: list[str]) -> Any:
    rank = ranks.current()
    assert rank is not None
    assert rank.number == number
    found = {}
    for case in cases:
        if rank.leads:
            found[case] = _sums_of(case, rank)
            rank.tell(ranks.Ended())
        else:
            gradients, net, _ = _gradients(case)
            sent = ranks.SentPast()
            with torch.no_grad():
                for p in net.parameters():
                    p.zero_()  # a follower's own weights do not matter
            changed = replace(gradients, past=sent) if isinstance(gradients, RecordGradients) else gradients
            ranks.end(ranks.follow(changed, net, rank, sent))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_sum_a_batch_to_the_bits_of_one_process(size: int, tmp_path: Path) -> None:
    alone = {case: _sums_of(case, None) for case in CASES}
    found = in_ranks(size, tmp_path, _ask, list(CASES))[0]
    assert not isinstance(found, Exception), found
    for case in CASES:
        assert found[case] == alone[case], case


def test_chunk_sums_have_no_order() -> None:
    gradients, net, _ = _gradients("plain")
    parts = gradients.parts(LogicalBatch(0, torch.arange(ROWS), 4), 1)
    assert len(parts) > 20
    made, sums = [part() for part in parts], set()
    for seed in range(20):
        random.Random(seed).shuffle(made)
        total = empty_sum(net)
        for part in made:
            total = add_sums(total, part)
        sums.add(b"".join(value.numpy().tobytes() for value in total.sums.values()))
    assert len(sums) == 1


@pytest.mark.parametrize("clip_norm", [1e-3, 0.7, 1.0, 3.0, 1e4])
def test_the_grid_moves_a_sum_by_no_more_than_the_theorem_says(clip_norm: float) -> None:
    spacing = grid_spacing(clip_norm, 1 << 16)
    assert spacing == grid_spacing(clip_norm, 3)  # one record less leaves the others' rounding as it was
    gradients, _, _ = _gradients("plain")
    part = RecordGradients(gradients.model, cross_entropy, gradients.fetch, FlatClip(clip_norm))(
        LogicalBatch(0, torch.arange(64), 64)
    )
    for name, value in on_grid(part, spacing).sums.items():
        assert float((value - part.sums[name].double()).abs().max()) <= spacing / 2
        assert torch.equal(value / spacing, (value / spacing).round())
    assert spacing <= clip_norm * 2.0**-34
    assert 1.001 * 2**16 * clip_norm < spacing * 2.0**52


def test_the_largest_sum_of_the_theorem_is_rounded_right() -> None:
    gradients, _, _ = _gradients("plain")
    part, spacing = gradients(LogicalBatch(0, torch.arange(4), 8)), grid_spacing(0.7, 1)
    far = 4096 * 0.7  # the largest coordinate of one chunk
    values = {name: torch.full(v.shape, far - spacing / 3, dtype=torch.float64) for name, v in part.sums.items()}
    for value in on_grid(type(part)(values, part.norms, 0, part.losses), spacing).sums.values():
        assert float((value - (far - spacing / 3)).abs().max()) <= spacing / 2


def _break(number: int) -> Any:
    rank = ranks.current()
    assert rank is not None

    def refuse(*_: Any) -> Any:
        raise Refused("rank 1 can't read its rows")

    gradients, net, past = _gradients("plain")
    if rank.leads:
        return ranks.Divided(gradients, net, rank, lambda: past)(_batches()[0])
    broken = RecordGradients(net, cross_entropy, refuse, gradients.clipping)
    return ranks.follow(broken, net, rank, ranks.SentPast())


def test_what_goes_wrong_at_a_follower_is_raised_at_the_leader(tmp_path: Path) -> None:
    led, followed = in_ranks(2, tmp_path, _break)
    assert isinstance(led, Refused)
    assert "rank 1 can't read" in str(led)
    assert isinstance(followed, Refused)


class Unsendable(Exception):
    """It can't be pickled, and its text quotes a record."""

    def __init__(self) -> None:
        super().__init__("the name of record 17 is Jones")
        self.held = lambda: None


def _break_strangely(number: int) -> Any:
    rank = ranks.current()
    assert rank is not None

    def fails(*_: Any) -> Any:
        raise Unsendable

    gradients, net, past = _gradients("plain")
    if rank.leads:
        return ranks.Divided(gradients, net, rank, lambda: past)(_batches()[0])
    return ranks.follow(RecordGradients(net, cross_entropy, fails, gradients.clipping), net, rank, ranks.SentPast())


def test_an_error_of_the_users_code_is_named_and_its_text_is_private(tmp_path: Path) -> None:
    led, followed = in_ranks(2, tmp_path, _break_strangely)
    assert isinstance(led, SordinoError)
    assert "rank 1 of 2 could not sum its records: Unsendable" in str(led)
    assert "Jones" not in str(led)
    assert "Jones" in led.private
    assert isinstance(followed, SordinoError)


def test_a_message_of_work_can_be_sent() -> None:
    import pickle

    work = Work(_batches()[0], 3, _past(_net()), True)
    again = pickle.loads(pickle.dumps(work))
    assert torch.equal(again.batch.indices, work.batch.indices)
    assert len(again.past.weights) == 2
