"""Models divided over ranks by torch's fully_shard: the weights, the ledger and the checkpoints of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once, before the ranks are forked
from processes import in_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sordino
from sordino import ranks, train
from sordino.errors import Refused
from sordino.plan import Plan
from sordino.plan.contribution import InnerMomentum, RecordMomentum
from sordino.ranks.layout import shard_blocks, whole_of
from sordino.training import Settings

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(torch.relu(self.first(self.norm(x))))
        return out


class Words(nn.Module):
    """A table, three blocks, one of them frozen, and a head: 5 classes, so that some ranks have no row of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.blocks[1].requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.drop(x.mean(1)))
        return out


def _words() -> Words:
    torch.manual_seed(3)
    return Words()


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(11, (60, 7), generator=generator), torch.randint(5, (60,), generator=generator)


def _train(
    model: nn.Module,
    out: Path | None,
    resume: bool = False,
    optimizer: Any = torch.optim.Adam,
    momentum: float | None = None,
    **changes: Any,
) -> Any:
    given: dict[str, Any] = {"noise_multiplier": 1.0, "expected_batch": 30, "insecure_seed": 4, "records": 60}
    plan = Plan.dpsgd(delta=1e-5, steps=STEPS, clip_norm=1.0, **(given | changes))
    options = {} if momentum is None else {"momentum": momentum}
    settings = Settings(chunk=8, checkpoint_every=1, progress=False, optimizer_options=options)
    return train(
        model, cross_entropy, _data(), plan, optimizer=optimizer, lr=0.1, settings=settings, out=out, resume=resume,
        evaluate=lambda net: {"outputs": float(net(_data()[0]).sum())},
    )  # fmt: skip


def _bytes(model: nn.Module) -> bytes:
    return b"".join(whole_of(p).detach().numpy().tobytes() for p in model.parameters())


CASES: dict[str, dict[str, Any]] = {
    "adam": {},
    "inner momentum": {"inner": InnerMomentum(length=2, decay=0.5), "optimizer": torch.optim.SGD, "momentum": 0.9},
}


def _run(number: int, cases: Sequence[str], out: Path | None, shard: bool = True) -> dict[str, bytes]:
    made = {}
    for case in cases:
        model = shard_blocks(_words()) if shard else _words()
        made[case] = _bytes(_train(model, out, **CASES[case]).model)
    return made


@pytest.fixture(scope="module")
def alone() -> dict[str, bytes]:
    torch.set_num_threads(1)
    return _run(0, list(CASES), None, shard=False)


@pytest.mark.parametrize(("size", "cases"), [(2, ["inner momentum"]), (4, ["adam"])])
def test_shards_end_with_the_weights_of_a_run_alone(size: int, cases: list[str], alone: Any, tmp_path: Path) -> None:
    out = tmp_path / "run" if "adam" in cases else None
    assert in_ranks(size, tmp_path, _run, cases, out) == [{case: alone[case] for case in cases}] * size
    if out is not None:
        weights = load_file(out / "model.safetensors")
        assert b"".join(weights[name].numpy().tobytes() for name, _ in _words().named_parameters()) == alone["adam"]


class Stop(Exception):
    pass


class Stopped(Words):
    """Its run ends in the third step, with an error or by the death of a rank."""

    def __init__(self, ledger: Path, dies: int | None = None) -> None:
        super().__init__()
        self.ledger, self.dies = ledger, dies

    def forward(self, x: Tensor) -> Tensor:
        if self.ledger.exists() and len(self.ledger.read_text().splitlines()) >= 3:
            if self.dies is None:
                raise Stop
            if dist.get_rank() == self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def _stopped(number: int, out: Path, dies: int | None) -> Any:
    torch.manual_seed(3)
    model = Stopped(out / "ledger.jsonl", dies)
    return _train(model if dies is None else shard_blocks(model), out)


def test_a_rank_that_dies_ends_the_others_and_one_process_goes_on(alone: Any, tmp_path: Path) -> None:
    found = in_ranks(2, tmp_path, _stopped, tmp_path / "run", 1)
    assert found[1] is None
    assert isinstance(found[0], ranks.Lost)
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) == 3  # nothing of the third step
    assert _bytes(_train(_words(), tmp_path / "run", resume=True).model) == alone["adam"]


def _rank_resumes(number: int, out: Path) -> bytes:
    return _bytes(_train(shard_blocks(_words()), out, resume=True).model)


def test_three_ranks_go_on_with_a_run_of_one_process(alone: Any, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        _stopped(0, tmp_path / "run", None)
    assert in_ranks(3, tmp_path, _rank_resumes, tmp_path / "run") == [alone["adam"]] * 3


def _refusals(number: int, alone: bytes) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half, part, written = _words(), _words(), _words()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(part.head, mesh=mesh)

    def writes(x: Tensor) -> Tensor:
        with torch.no_grad():
            written.head.bias.add_(x.float().mean())
        return Words.forward(written, x)

    written.forward = writes  # type: ignore[method-assign]
    same = _run(0, ["adam"], None)["adam"] == alone
    correlated = sordino.correlated(noise_multiplier=2.0, delta=1e-4, records=60, expected_batch=12, steps=10)
    attempts: list[Callable[[], Any]] = [
        lambda: _train(half, None),
        lambda: _train(part, None),
        lambda: _train(shard_blocks(_words()), None, optimizer=torch.optim.LBFGS),
        lambda: _train(shard_blocks(written), None),
        lambda: _train(shard_blocks(_words()), None, expected_batch=60, record_momentum=RecordMomentum(kept=0.5)),
        lambda: train(shard_blocks(_words()), cross_entropy, _data(), correlated, lr=0.1),
    ]
    said = [f"one rank, the same bits: {same}"]
    for attempt in attempts:
        try:
            said.append(str(attempt()))
        except Refused as error:
            said.append(str(error))
    return said


def test_what_shards_can_not_do_is_refused_by_name(alone: Any, tmp_path: Path) -> None:
    (said,) = in_ranks(1, tmp_path, _refusals, alone["adam"])
    wanted = [
        "same bits: True", "mixed precision", "parts of the model", "LBFGS", "writes to this parameter", "one process",
        "noise of earlier steps",
    ]  # fmt: skip
    assert [want in sentence for want, sentence in zip(wanted, said, strict=True)] == [True] * len(wanted), said
