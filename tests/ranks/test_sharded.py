"""Models divided over ranks by torch's fully_shard: the weights, the ledger and the checkpoints of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import in_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino.plan import Plan
from sordino.training import Settings, train

STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

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


def _shard(model: Words) -> Words:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(11, (60, 7), generator=generator), torch.randint(5, (60,), generator=generator)


def _train(model: nn.Module, out: Path | None, resume: bool = False, optimizer: Any = torch.optim.Adam, **changes: Any) -> Any:
    given: dict[str, Any] = {"noise_multiplier": 1.0, "expected_batch": 30, "insecure_seed": 4, "records": 60}
    plan = Plan.dpsgd(delta=1e-5, steps=STEPS, clip_norm=1.0, **(given | changes))
    settings = Settings(chunk=8, checkpoint_every=1, progress=False)
    return train(
        model, cross_entropy, _data(), plan, optimizer=optimizer, lr=0.1, settings=settings, out=out, resume=resume,
        evaluate=lambda net: {"outputs": float(net(_data()[0]).sum())},
    )  # fmt: skip


def _bytes(model: nn.Module) -> bytes:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return b"".join(p.detach().numpy().tobytes() for p in whole)


def _rank_train(number: int, out: Path, resume: bool = False, **changes: Any) -> Any:
    result = _train(_shard(_words()), out, resume, **changes)
    return _bytes(result.model), [row["outputs"] for row in result.metrics]


def _alone(out: Path, **changes: Any) -> bytes:
    torch.set_num_threads(1)
    return _bytes(_train(_words(), out, **changes).model)


def test_shards_end_with_the_weights_of_a_run_alone(tmp_path: Path) -> None:
    alone = _alone(tmp_path / "alone")
    for size in (2, 4):
        found = in_ranks(size, tmp_path, _rank_train, tmp_path / f"run{size}")
        print(found)
        assert [one[0] for one in found] == [alone] * size
