"""Checkpoints: whole or not at all, never pickled, bound to the run they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sordino.errors import InputError, SordinoError
from sordino.files import write_atomically
from sordino.training.state import TrainState, load_model, model_tensors
from sordino.training.updates import Average


def trained(optimizer_class: type[torch.optim.Optimizer], **options: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (torch.optim.Adagrad, {})],
)
def test_a_saved_state_comes_back_bit_for_bit(
    tmp_path: Path, optimizer_class: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    model, optimizer = trained(optimizer_class, **options)
    average = Average(dict(model.named_parameters()), total=2.5)
    TrainState(7, model_tensors(model), optimizer.state_dict(), {"last_epoch": 3}, average, {"seconds": 1.5}).save(
        tmp_path, "run"
    )
    state = TrainState.load(tmp_path, "run")
    assert state is not None
    assert state.average is not None
    assert (state.step, state.scheduler, state.average.total) == (7, {"last_epoch": 3}, 2.5)
    fresh, fresh_optimizer = trained(optimizer_class, **options)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    load_model(fresh, state.model)
    fresh_optimizer.load_state_dict(dict(state.optimizer))
    for twin, twin_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        torch.manual_seed(1)
        twin_optimizer.zero_grad()
        twin(torch.randn(5, 3)).square().sum().backward()
        twin_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_a_truncated_newest_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        TrainState(step, {"w": torch.full((100,), float(step))}, {}).save(tmp_path, "run")
    newest = tmp_path / "step-000000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-50])
    state = TrainState.load(tmp_path, "run")
    assert state is not None
    assert state.step == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_when_no_checkpoint_can_be_read_the_error_names_them(tmp_path: Path) -> None:
    (tmp_path / "step-000000001.safetensors").write_bytes(b"junk")
    with pytest.raises(SordinoError, match=r"step-000000001\.safetensors"):
        TrainState.load(tmp_path, "run")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    TrainState(1, {"w": torch.zeros(1)}, {}).save(tmp_path, "one plan")
    with pytest.raises(InputError, match="another plan"):
        TrainState.load(tmp_path, "another plan")
    assert TrainState.load(tmp_path / "empty", "one plan") is None


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(InputError, match="another model"):
        load_model(nn.Linear(2, 2), {"weight": torch.zeros(2, 2)})
    with pytest.raises(InputError, match="shape"):
        load_model(nn.Linear(2, 2), {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})


def test_a_failed_write_leaves_the_old_file_and_no_partial_one(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    (tmp_path / "file.partial").symlink_to("/dev/full")
    with pytest.raises(SordinoError, match="can't be written"):
        write_atomically(target, b"new" * 10_000)
    assert target.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
