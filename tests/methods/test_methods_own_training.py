"""A plan whose guarantee is that of one training function is carried out by no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sordino
from sordino.errors import Refused
from sordino.methods import dp_mac, hidden_state
from sordino.methods.hidden_state import Softmax
from sordino.plan import Plan

DATA = torch.randn(40, 5), torch.randint(0, 2, (40,))


def hidden() -> Plan:
    return hidden_state.plan(
        loss=Softmax(2, cap=0.1), features=5, records=40, batch=10, epochs=2, regularisation=1e-3, noise_multiplier=5.0,
        delta=1e-5,
    )  # fmt: skip


def mac() -> Plan:
    return dp_mac.plan(parts=2, delta=1e-5, records=40, expected_batch=10, steps=3, noise_multiplier=2.0)


@pytest.mark.parametrize("lr", [None, 0.1])
@pytest.mark.parametrize("make", [hidden, mac])
def test_train_refuses_it(make: object, lr: float | None) -> None:
    with pytest.raises(Refused, match="its own training"):
        sordino.train(nn.Linear(5, 2), cross_entropy, DATA, make(), lr=lr)  # type: ignore[operator]


def test_no_loop_gets_the_gradients_of_a_run_whose_iterates_are_hidden() -> None:
    plan = hidden()
    gradients = sordino.record_gradients(nn.Linear(5, 2), cross_entropy, DATA, plan.clipping)
    with sordino.Ledger.open(None, plan.to_dict()) as ledger:
        with pytest.raises(Refused, match="the last iterate only"):
            sordino.private_steps(plan, gradients, records=40, source=plan.source(), ledger=ledger)
        assert not ledger.entries
