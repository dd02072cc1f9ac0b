"""One table: every sampler and contribution, alone and with 1, 2, 3 and 4 ranks, with shared chunks and with shards.

Compared are the bits of every released gradient, all lines of the ledger and the bits of the final weights.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # once, before the ranks are forked
from processes import in_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from sordino.clipping import PerLayerClip
from sordino.data import Split
from sordino.methods import coupling
from sordino.methods.coupling import Constant, PublicUse, WarmUp
from sordino.plan import Plan
from sordino.plan.contribution import Augmentation, InnerMomentum
from sordino.plan.public import PublicSet
from sordino.ranks.layout import shard_blocks, whole_of
from sordino.training import Settings
from sordino.training.fit import train
from sordino.training.loop import Loop

RECORDS, STEPS = 60, 3
PER_RUN = ("run", "place", "hash", "time")
"""What a ledger says about this run alone: its name, its directory, the hashes of these, and the day."""


def _net(images: bool = False) -> nn.Module:
    torch.manual_seed(3)
    if images:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))


def _data(images: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (RECORDS, 1, 6, 6) if images else (RECORDS, 6)
    return torch.randn(shape, generator=generator), torch.randint(3, (RECORDS,), generator=generator)


def _bad() -> tuple[Tensor, Tensor]:
    """Some records are not finite: with several ranks, those of one rank only."""
    x, y = _data()
    x[[7, 8, 30]] = torch.tensor([float("nan"), float("inf"), 1e30])[:, None]
    return x, y


def _plan(make: Callable[..., Plan] = Plan.dpsgd, **changes: Any) -> Plan:
    given = {"noise_multiplier": 2.0, "delta": 1e-3, "records": RECORDS, "expected_batch": 20, "steps": STEPS}
    return make(**(given | {"insecure_seed": 4} | changes))


def _public() -> Split:
    x, y = _data()
    return Split(x[:20] + 1, y[:20])


def _coupled(**changes: Any) -> Plan:
    return _plan(coupling.plan, public=PublicSet.of(_public(), "made for this test"), **changes)


Case = Callable[[], dict[str, Any]]
"""Makes the arguments of `train` that differ from the first case's."""

CASES: dict[str, Case] = {
    "poisson": lambda: {"plan": _plan()},
    "truncated poisson": lambda: {"plan": _plan(sampling="truncated-poisson", cap=15)},
    "without replacement": lambda: {"plan": _plan(sampling="without-replacement")},
    "partition": lambda: {"plan": _plan(sampling="partition")},
    "allocation": lambda: {"plan": _plan(sampling="allocation")},
    "cyclic": lambda: {"plan": _plan(sampling="cyclic")},
    "users": lambda: {
        "plan": _plan(unit="user", records=20, expected_batch=8, rows_per_user=2, delta=1e-2),
        "users": np.arange(RECORDS) % 20,
    },
    "empty batches": lambda: {"plan": _plan(expected_batch=0.5)},
    "per layer": lambda: {"plan": _plan(clipping=PerLayerClip(1.0)), "optimizer": torch.optim.Adam},
    "views": lambda: {"plan": _plan(augmentation=Augmentation(views=2, flip=True, crop=1)), "images": True},
    "inner momentum": lambda: {"plan": _plan(inner=InnerMomentum(length=2, decay=0.5)), "options": {"momentum": 0.9}},
    "read by threads": lambda: {"plan": _plan(), "data": TensorDataset(*_data()), "num_workers": 1},
    "bad rows": lambda: {"plan": _plan(), "data": _bad()},
    "coupling": lambda: {"plan": _coupled(), "public": PublicUse(_public(), Constant(0.3), 7, WarmUp(2, 0.1))},
}


@contextmanager
def _noting(found: list[str]) -> Iterator[None]:
    """Notes the bits of every released gradient."""
    move = Loop._move

    def noted(loop: Loop, private: Any) -> None:
        values = {name: whole_of(value) for name, value in private.gradients.items()}
        found.append(_digest(values[name] for name in sorted(values)))
        move(loop, private)

    Loop._move = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Loop._move = move  # type: ignore[method-assign]


def _digest(tensors: Iterator[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def _ledger(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in PER_RUN} for line in lines]


def _made(case: str, out: Path, shard: bool) -> dict[str, Any]:
    """What a run of this case releases, writes and ends with."""
    given = CASES[case]()
    images, options = given.pop("images", False), given.pop("options", {})
    settings = Settings(chunk=4, checkpoint_every=0, progress=False, optimizer_options=options)
    net = shard_blocks(_net(images)) if shard else _net(images)
    released: list[str] = []
    with _noting(released):
        data = given.pop("data", None) or _data(images)
        model = train(net, cross_entropy, data, lr=0.3, settings=settings, out=out, **given).model
    return {"released": released, "weights": _digest(whole_of(p) for p in model.parameters())}


def _rank(number: int, folder: Path, cases: list[str], shard: bool) -> dict[str, Any]:
    return {case: _made(case, folder / case, shard) for case in cases}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(Plan, "guarantee", functools.cache(Plan.guarantee))  # computed once, before the ranks are forked
    folder = tmp_path_factory.mktemp("alone")
    yield {case: {**_made(case, folder / case, False), "ledger": _ledger(folder / case)} for case in CASES}
    monkey.undo()


@pytest.mark.parametrize("shard", [False, True], ids=["chunks", "shards"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_release_record_and_end_with_what_one_process_does(
    size: int, shard: bool, alone: dict[str, Any], tmp_path: Path
) -> None:
    found = in_ranks(size, tmp_path, _rank, tmp_path, list(CASES), shard)
    for number, one in enumerate(found):
        assert isinstance(one, dict), one
        for case in CASES:
            assert one[case]["weights"] == alone[case]["weights"], (case, number)
            if shard or number == 0:  # a rank that shares chunks gets the weights, and no gradient
                assert one[case]["released"] == alone[case]["released"], (case, number)
    for case in CASES:
        assert len(alone[case]["released"]) == STEPS
        assert _ledger(tmp_path / case) == alone[case]["ledger"], case
