"""The mistakes that people make with `sordino.train`: each is one sentence with its remedy, or simply works.

Nothing is spent and nothing is written by any of them, and no message holds what only the data says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as binary
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import sordino
from sordino.errors import InputError, Refused

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3
QUIET = sordino.Settings(progress=False)


def plan_of(records: int = 60, **options: Any) -> sordino.Plan:
    settings = {"noise_multiplier": 1.0, "delta": 1e-4, "expected_batch": 8, "steps": 1, **options}
    return sordino.dpsgd(records=records, **settings)


def train(dataset: Any = (X, Y), plan: Any = None, model: Any = None, loss: Any = cross_entropy, **given: Any) -> Any:
    return sordino.train(
        nn.Linear(4, 3) if model is None else model, loss, dataset, plan_of() if plan is None else plan,
        **{"lr": 0.1, "settings": QUIET, **given},
    )  # fmt: skip


WORKS: dict[str, Callable[[], Any]] = {
    "numpy arrays": lambda: train((X.numpy(), Y.numpy())),
    "lists": lambda: train((X.tolist(), Y.tolist())),
    "an array of the other byte order": lambda: train((X.numpy().astype(">f4"), Y.numpy().astype(">i8"))),
    "float64 rows": lambda: train((X.double(), Y)),
    "bf16 rows": lambda: train((X.bfloat16(), Y)),
    "int32 labels": lambda: train((X, Y.int())),
    "a list of pairs": lambda: train([(X[i], int(Y[i])) for i in range(60)]),
    "rows with their record": lambda: train(
        sordino.Rows(X, Y, record=torch.arange(60) // 2, records=30), plan_of(30, expected_batch=4)
    ),
    "rows of different lengths": lambda: train(
        [(torch.ones(2 + i % 3), i % 3) for i in range(60)], collate=sordino.pad_to(4)
    ),
    "a loss that would average": lambda: train(loss=nn.CrossEntropyLoss()),
}
MODEL = nn.Linear(4, 3)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a plan for rows, records of two": (
        lambda: train(sordino.Rows(X, Y, record=torch.arange(60) // 2, records=30)), InputError, "another number"),
    "users without a plan for them": (
        lambda: train(users=torch.arange(60) // 2), Refused, "its ε would be about rows"),
    "a plan for users without them": (
        lambda: train(plan=plan_of(30, unit="user")), Refused, "the rows have no owners"),
    "too few users": (lambda: train(plan=plan_of(30, unit="user"), users=[1, 2]), InputError, "one id for each row"),
    "a DataLoader": (lambda: train(DataLoader(TensorDataset(X, Y))), Refused, "loader.dataset"),
    "a generator": (lambda: train((X[i], Y[i]) for i in range(60)), InputError, "has no length"),
    "a dict of columns": (lambda: train({"x": X, "y": Y}), InputError, "dict of columns"),
    "a path": (lambda: train(Path("visits.csv")), InputError, "is a path"),
    "a data frame alone": (
        lambda: train(type("Frame", (), {"columns": ("a",), "iloc": None})()), InputError, "is a data frame"),
    "masked values": (
        lambda: train((np.ma.masked_array(X.numpy(), mask=X.numpy() > 1), Y)), InputError, "hidden, not missing"),
    "inference mode": (lambda: torch.inference_mode()(train)(), InputError, "inference_mode is on"),
    "inputs alone": (lambda: train(X), InputError, "must be a pair"),
    "sparse rows": (lambda: train((X.to_sparse(), Y)), InputError, "to_dense"),
    "lengths that differ": (lambda: train((X, Y[:-3])), InputError, "their lengths differ"),
    "inputs and targets swapped": (lambda: train((Y, X)), InputError, "fails on a record"),
    "labels from one": (lambda: train((X, Y + 1)), InputError, "number the classes from 0"),
    "labels that are floats": (lambda: train((X, Y.float())), InputError, "not whole numbers"),
    "labels in a column": (lambda: train((X, Y[:, None])), InputError, "squeeze"),
    "a bf16 model": (lambda: train(model=nn.Linear(4, 3).bfloat16()), Refused, r"model\.float\(\)"),
    "a model of another shape": (lambda: train(model=nn.Linear(5, 3)), InputError, "fails on a record"),
    "a loss's class": (lambda: train(loss=nn.CrossEntropyLoss), InputError, r"give an instance, CrossEntropyLoss\(…\)"),
    "weights without values": (lambda: train(model=nn.Linear(2, 2).to("meta")), InputError, "'meta'"),
    "a model's class": (lambda: train(model=nn.Linear), InputError, r"give an instance, Linear\(…\)"),
    "a frozen model": (
        lambda: train(model=nn.Linear(4, 3).requires_grad_(False)), InputError, "no trainable parameter"),
    "BatchNorm": (
        lambda: train(model=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))), Refused, r"sordino\.fix"),
    "a loss that sums": (lambda: train(loss=lambda o, y: cross_entropy(o, y)), Refused, "reduction='none'"),
    "a loss by name": (lambda: train(loss="cross_entropy"), InputError, "is not a function"),
    "an optimizer instance": (
        lambda: train(model=MODEL, optimizer=torch.optim.SGD(MODEL.parameters(), lr=0.1)), InputError, "its class"),
    "an optimizer by name": (lambda: train(optimizer="sgd"), InputError, r"torch\.optim\.SGD"),
    "no step size": (lambda: train(lr=None), InputError, "give lr"),
    "a step size that is no number": (lambda: train(lr=float("nan")), InputError, "finite"),
    "a step size of zero": (lambda: train(lr=0.0), InputError, "leave the model as it is"),
    "a step size as text": (lambda: train(lr="0.1"), InputError, "must be a number"),
    "an ε in the place of the plan": (lambda: train(plan=3.0), InputError, r"sordino\.dpsgd"),
    "a plan for other numbers": (lambda: train(plan=plan_of(90)), InputError, "another number"),
    "Opacus's name of an option": (
        lambda: plan_of(max_grad_norm=1.0), TypeError, "did you mean 'clip_norm'"),
    "δ above 1/n": (lambda: train(plan=plan_of(delta=0.1)), Refused, "not below 1/60"),
    "settings as a dict": (lambda: train(settings={"chunk": 3}), InputError, r"sordino\.Settings"),
    "one callback": (lambda: train(callbacks=print), InputError, r"callbacks=\[…\]"),
    "whole numbers for a loss of floats": (
        lambda: train((X, Y % 2), model=nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), loss=binary), InputError,
        r"the loss fails on the outputs and targets of two records \(float32 \(2,\), int64 \(2,\)\)"),
    "outputs of another shape than the targets": (
        lambda: train((X, (Y % 2).float()), model=nn.Linear(4, 1), loss=binary), InputError, "the loss fails"),
    "numbers in the place of rows": (
        lambda: train((X[:, 0], Y), model=nn.Linear(1, 3)), InputError, "the model fails on two records"),
    "a length of none": (lambda: sordino.pad_to(0), InputError, "length = 0"),
    "workers below none": (lambda: train([(X[0], 0)] * 60, num_workers=-1), InputError, "num_workers"),
}  # fmt: skip


@pytest.mark.parametrize("what", WORKS)
def test_what_is_no_mistake_works(what: str) -> None:
    assert WORKS[what]().guarantee.steps == 1


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_sentence_with_its_remedy(what: str) -> None:
    attempt, kind, said = WRONG[what]
    with pytest.raises(kind, match=said) as error:
        attempt()
    assert "\n" not in str(error.value)


def test_a_mistake_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        train((X, Y + 1), out=tmp_path / "a" / "run")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InputError, match="there is a file of that name"):
        train(out=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"
