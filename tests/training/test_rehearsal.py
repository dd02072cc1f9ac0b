"""Settings that an optimizer fails on are found before anything is released."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import sordino
from sordino.errors import InputError, Refused, SordinoError
from sordino.plan import Plan
from sordino.training import Settings, train

Records = tuple[Tensor, Tensor]
PLAN = Plan.dpsgd(noise_multiplier=3.0, delta=1e-5, records=200, expected_batch=40, steps=3, insecure_seed=1)


class Explodes(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if self.state:
            raise RuntimeError("no second time")
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = True


class Unsaveable(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = {1, 2}


def attempt(records: Records, out: Path, optimizer: Any, lr: float = 0.1, scheduler: Any = None, **options: Any) -> Any:
    settings = Settings(optimizer_options=options, scheduler=scheduler, progress=False)
    loss, model = nn.functional.cross_entropy, nn.Linear(6, 3)
    return train(model, loss, records, PLAN, optimizer=optimizer, lr=lr, settings=settings, out=out)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": math.nan}),
        (torch.optim.SGD, {"lr": math.inf}),
        (torch.optim.SGD, {"momentum": math.nan}),
        (torch.optim.SGD, {"weight_decay": math.inf}),
        (torch.optim.SGD, {"lr": 1e38, "momentum": 0.9, "weight_decay": 1e38}),
        (torch.optim.Adam, {"betas": (0.9, 0.99, 0.999)}),
        (torch.optim.Adam, {"betas": (0.9, math.nan)}),
        (torch.optim.AdamW, {"capturable": True}),
        (torch.optim.LBFGS, {}),
        (Explodes, {}),
        (Unsaveable, {}),
    ],
)
def test_it_is_refused_and_nothing_is_written(
    records: Records, tmp_path: Path, optimizer: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(SordinoError, match=r"finite|in a test before|refused its settings|can't be saved"):
        attempt(records, tmp_path / "run", optimizer, **options)
    assert not (tmp_path / "run").exists()


def test_a_scheduler_that_fails_is_found(records: Records, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in a test before anything was released"):
        attempt(records, tmp_path / "run", torch.optim.SGD, scheduler=lambda optimizer: StepLR(optimizer, step_size=0))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_rehearsal_leaves_the_run_as_it_is(records: Records, tmp_path: Path, eps: float) -> None:
    """Also with an ε of Adam's of zero, which would divide zero by zero on gradients of zeros."""
    torch.manual_seed(0)
    first = attempt(records, tmp_path / "one", torch.optim.Adam, eps=eps)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    mine: list[torch.optim.Optimizer] = []

    def own(_: Any, lr: float, eps: float) -> torch.optim.Optimizer:
        mine.append(torch.optim.Adam(model.parameters(), lr=lr, eps=eps))
        return mine[-1]

    settings = Settings(optimizer_options={"eps": eps}, progress=False)
    train(model, nn.functional.cross_entropy, records, PLAN, optimizer=own, lr=0.1, settings=settings)
    assert len(mine) > 1
    assert torch.equal(model.weight, first.model.weight)


def test_noise_that_has_no_grid_is_found_before_a_ledger_is_made(records: Records, tmp_path: Path) -> None:
    plan = sordino.dpsgd(
        noise_multiplier=1e12, delta=1e-5, records=len(records[1]), expected_batch=10, steps=2,
        clipping=sordino.L1Clip(1.0),
    )  # fmt: skip
    with pytest.raises(Refused, match="coordinates"):
        sordino.train(nn.Linear(6, 3), nn.functional.cross_entropy, records, plan, lr=0.1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_scheduler_that_is_no_function_of_the_optimizer_is_explained(records: tuple[Tensor, Tensor]) -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    made = StepLR(torch.optim.SGD(weights, lr=0.1), 2)
    with pytest.raises(InputError, match="scheduler is a StepLR: give a function of the optimizer"):
        Settings(scheduler=made)  # type: ignore[arg-type]
    plan = sordino.dpsgd(noise_multiplier=1.0, delta=1e-5, records=200, expected_batch=40, steps=2)
    settings = Settings(scheduler=StepLR, progress=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="step_size"):
        sordino.train(nn.Linear(records[0].shape[1], 3), nn.functional.cross_entropy, records, plan, lr=0.1,
                      settings=settings)  # fmt: skip


@pytest.mark.parametrize(
    ("evaluate", "error"),
    [
        ([1, 2], "evaluate is a list: give a function of the model"),
        (lambda model: "good", "evaluate returned a str: it must return a dict of numbers"),
        (lambda model: {"epsilon": 0.1}, "evaluate returns epsilon, which the run itself logs"),
        (lambda model: 1 / 0, "division by zero"),
    ],
)
def test_an_evaluation_that_fails_does_so_before_anything_is_spent(
    records: Records, tmp_path: Path, evaluate: Any, error: str
) -> None:
    """They ended the run at its first evaluation, after the steps before it were paid."""
    with pytest.raises((SordinoError, ZeroDivisionError), match=error):
        train(
            nn.Linear(6, 3), nn.functional.cross_entropy, records, PLAN, lr=0.1, evaluate=evaluate, out=tmp_path / "run"
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_the_evaluation_before_the_first_step_leaves_torchs_generator_alone(records: Records) -> None:
    drawn: list[float] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        drawn.append(float(torch.rand(())))
        return {"drawn": drawn[-1]}

    torch.manual_seed(0)
    expected = float(torch.rand(()))
    model = nn.Linear(6, 3)
    torch.manual_seed(0)
    train(model, nn.functional.cross_entropy, records, PLAN, lr=0.1, evaluate=evaluate)
    assert drawn == [expected] * 2
