"""Rows in memory are checked before anything is spent, and what is wrong with them is told to their owner only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sordino
from sordino.errors import InputError, Refused
from sordino.gradients import Rows
from sordino.methods.hidden_state import Softmax
from sordino.methods.hidden_state.training import train_hidden
from sordino.records.fitting import check_fits, rows_not_finite

INPUTS = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(200) % 2


def plan_for(**changes: Any) -> sordino.Plan:
    options = {"noise_multiplier": 1.0, "delta": 1e-4, "records": 200, "expected_batch": 50, "steps": 3}
    return sordino.dpsgd(**options | changes)


def broken(*rows: int, value: float = float("nan")) -> Tensor:
    inputs = INPUTS.clone()
    inputs[list(rows), 1] = value
    return inputs


@pytest.mark.parametrize(
    ("dataset", "count"),
    [
        ((INPUTS, TARGETS), 0),
        ((broken(1, 7), TARGETS), 2),
        ((broken(1, value=-float("inf")).numpy(), TARGETS.numpy()), 1),
        (({"a": broken(1, 2), "b": broken(2, 3)}, TARGETS), 3),
        ((INPUTS, torch.where(TARGETS == 1, torch.nan, 0.5)), 100),
        ((INPUTS.clamp(0, 3) * 1e38, TARGETS), 0),  # the sum may overflow
        (Rows(broken(5), TARGETS, record=torch.arange(200) // 2), 1),
        ([(INPUTS[0], 0), (broken(1)[1], 1)], 0),  # read one by one: not looked at beforehand
    ],
)
def test_rows_that_are_not_finite_are_counted(dataset: Any, count: int) -> None:
    assert rows_not_finite(dataset) == count


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_owner_is_told_before_anything_is_spent(
    kind: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file that is published says it, and without a terminal the number is not printed."""
    spent: list[str] = []
    result = sordino.train(
        nn.Linear(3, 2), F.cross_entropy, (broken(1, 2, 3).to(kind), TARGETS), plan_for(), lr=0.1, out=tmp_path,
        callbacks=[sordino.training.callbacks.AtStart(lambda plan: spent.append(capsys.readouterr().err))],
    )  # fmt: skip
    assert "NaN or infinite" in spent[0]
    assert "Nothing has been spent yet" in spent[0]
    assert "owner only" not in spent[0]
    assert result.not_private["rows_not_finite"] == 3
    assert "rows_not_finite" in (tmp_path / "not_private.json").read_text()
    for name in ("result.json", "ledger.jsonl", "metrics.jsonl", "recipe.toml", "report.html"):
        text = (tmp_path / name).read_text()
        assert "not_finite" not in text
        assert "NaN" not in text


def test_on_a_terminal_the_owner_sees_how_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    settings = sordino.Settings(progress=False)
    sordino.train(
        nn.Linear(3, 2), F.cross_entropy, (broken(1, 2), TARGETS), plan_for(), lr=0.1, settings=settings
    )  # fmt: skip
    assert "owner only: 2 rows" in capsys.readouterr().err


def test_values_that_overflow_in_the_models_precision_are_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    result = sordino.train(
        nn.Linear(3, 2), F.cross_entropy, (INPUTS.double() * 1e300, TARGETS), plan_for(), lr=0.1
    )  # fmt: skip
    assert result.not_private["rows_not_finite"] == 200
    assert "NaN or infinite" in capsys.readouterr().err


def test_a_method_with_its_own_training_tells_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    plan = sordino.hidden_state(
        loss=Softmax(2, cap=0.5), features=3, records=200, batch=50, epochs=1, regularisation=0.01, delta=1e-4,
        noise_multiplier=0.5,
    )  # fmt: skip
    train_hidden(plan, (broken(4), TARGETS))
    assert "NaN or infinite" in capsys.readouterr().err


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), smoothed, nn.MultiMarginLoss()])
@pytest.mark.parametrize("users", [None, np.arange(200) // 4])
def test_a_label_that_is_no_class_is_found_whatever_the_loss(loss: Any, users: Any, tmp_path: Path) -> None:
    labels = TARGETS.clone()
    labels[-1] = 2
    plan = plan_for() if users is None else plan_for(unit="user", records=50, expected_batch=10, delta=1e-3)
    with pytest.raises(InputError, match="nothing was spent") as caught:
        sordino.train(nn.Linear(3, 2), loss, (INPUTS, labels), plan, lr=0.1, users=users, out=tmp_path / "run")
    assert "Target 2" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_target_out_of_the_range_of_the_loss_is_found() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy(outputs[:, 0].sigmoid(), targets, reduction="none")

    shares = torch.rand(200)
    shares[150] = 1.5
    with pytest.raises(InputError, match="the loss fails on some targets"):
        sordino.train(nn.Linear(3, 1), loss, (INPUTS, shares), plan_for(), lr=0.1)


@pytest.mark.parametrize("inputs", [INPUTS.double(), INPUTS.double().numpy()])
@pytest.mark.parametrize("record", [False, True])
def test_rows_of_users_are_converted_like_other_rows(inputs: Any, record: bool) -> None:
    plan, owner = plan_for(unit="user", records=50, expected_batch=10, delta=1e-3), torch.arange(200) // 4
    labels = TARGETS.int()
    dataset = Rows(torch.as_tensor(inputs), labels, record=owner) if record else (inputs, labels)
    users = None if record else owner
    result = sordino.train(nn.Linear(3, 2), F.cross_entropy, dataset, plan, lr=0.1, users=users)
    assert result.guarantee is not None


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs["a"])
        return out


def test_a_model_that_expects_the_dict_itself_is_told_how_dicts_are_given() -> None:
    items = [({"a": torch.ones(2)}, torch.tensor(0))] * 20
    with pytest.raises(InputError, match="a dict's entries are the model's keyword arguments"):
        check_fits(Named(), nn.functional.cross_entropy, items)


def test_a_compiled_model_is_refused_by_name_before_its_code_runs() -> None:
    """Tracing it took a minute and ended in a message about attributes of tensors."""
    ran: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(1)
            return super().forward(x)

    compiled = torch.compile(Counting(4, 2), backend="eager")
    with pytest.raises(Refused, match=r"torch\.compile.*_orig_mod"):
        check_fits(compiled, F.cross_entropy, (torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)))  # type: ignore[arg-type]
    assert not ran
