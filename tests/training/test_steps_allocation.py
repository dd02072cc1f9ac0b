"""Random allocation in training: the batches, the ledger, resuming, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import sordino
from sordino.errors import InputError, Refused
from sordino.plan import Plan, from_ledger
from sordino.randomness import RandomSource
from sordino.records.gradients import record_gradients
from sordino.release.ledger import Ledger, read_ledger
from sordino.sampling import Allocation, batches, sampling_from_dict
from sordino.training.steps import private_steps


def drawn(records: int, count: int, steps: int, seed: int = 3, start: int = 0) -> list[list[int]]:
    source = RandomSource.seeded(seed)
    found = batches(Allocation(count), records=records, steps=steps, source=source, chunk=8, start=start)
    return [batch.indices.tolist() for batch in found]


def test_each_record_is_in_exactly_one_batch_of_every_epoch() -> None:
    found = drawn(101, 7, 21)
    for epoch in range(3):
        members = [i for batch in found[7 * epoch : 7 * epoch + 7] for i in batch]
        assert sorted(members) == list(range(101))
        assert all(batch == sorted(batch) for batch in found)
    assert found[:7] != found[7:14]


def test_a_batch_can_be_drawn_again_from_anywhere() -> None:
    assert drawn(50, 6, 20, start=9) == drawn(50, 6, 20)[9:]


def test_batches_may_be_empty_and_are_there_like_any_other() -> None:
    found = drawn(2, 10, 10)
    assert len(found) == 10
    assert sum(map(len, found)) == 2


def test_the_batch_of_a_record_is_uniform_and_independent_of_the_others() -> None:
    found = drawn(2, 3, 3 * 3000)
    pairs = Counter()
    for epoch in range(3000):
        place = {i: b for b in range(3) for i in found[3 * epoch + b]}
        pairs[place[0], place[1]] += 1
    assert all(abs(pairs[a, b] - 3000 / 9) < 5 * (3000 / 9) ** 0.5 for a in range(3) for b in range(3))


def test_its_description_is_read_back() -> None:
    assert sampling_from_dict(Allocation(7).to_dict()) == Allocation(7)
    with pytest.raises(InputError):
        Allocation(0)


def plan(**options) -> Plan:
    values = {
        "delta": 1e-3,
        "records": 40,
        "expected_batch": 10,
        "epochs": 3,
        "noise_multiplier": 1.0,
        "insecure_seed": 1,
    }
    return sordino.dpsgd(sampling="allocation", **{**values, **options})


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), (torch.randn(40, 3), torch.randint(2, (40,)))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_a_plan_states_its_batches_and_its_guarantee_says_allocation() -> None:
    made = plan(expected_batch=9, epochs=2.5)
    assert made.sampling == Allocation(5)
    assert (made.steps, made.divisor, made.sampling_rate) == (13, 8.0, 0.2)
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    guarantee = made.guarantee()
    assert guarantee.sampler == "allocation"
    assert "exactly one batch of every epoch" in str(guarantee)
    poisson = sordino.dpsgd(delta=1e-3, records=40, expected_batch=8, steps=13, noise_multiplier=1.0, insecure_seed=1)
    assert guarantee.epsilon < poisson.guarantee().epsilon


def test_a_run_writes_epoch_and_batch_and_its_ledger_costs_what_the_plan_says(tmp_path: Path) -> None:
    model, data = problem()
    made = plan()
    sordino.train(model, loss, data, made, lr=0.1, out=tmp_path)
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert entries[6]["sampling"] == {"name": "allocation", "batches": 4, "epoch": 1, "batch": 2}
    assert from_ledger(header, entries, 1e-3)["epsilon"] == pytest.approx(made.guarantee().epsilon)


def steps_of(made: Plan, ledger: Ledger, source: RandomSource, start: int = 0):
    model, data = problem()
    gradients = record_gradients(model, loss, data, made.clipping)
    return private_steps(made, gradients, records=40, source=source, ledger=ledger, start=start)


def test_a_start_amid_an_epoch_is_refused_unless_the_key_drew_what_was_before() -> None:
    made = plan()
    with Ledger.open(None, made.to_dict()) as ledger:
        with pytest.raises(Refused, match="start with step 4"):
            steps_of(made, ledger, made.source(), start=2)
        walk = steps_of(made, ledger, made.source())
        for _ in range(3):
            next(walk)
        assert next(steps_of(made, ledger, made.source(), start=3)).step == 3
        with pytest.raises(Refused, match="batch 2 of epoch 1"):
            steps_of(made, ledger, made.source(), start=6)
        assert next(steps_of(made, ledger, made.source(), start=8)).step == 8


def test_another_key_may_not_go_on_with_an_epoch() -> None:
    made = plan(insecure_seed=None)
    with Ledger.open(None, made.to_dict()) as ledger:
        next(steps_of(made, ledger, made.source()))
        with pytest.raises(Refused, match="same key"):
            steps_of(made, ledger, made.source(), start=1)
        assert next(steps_of(made, ledger, made.source(), start=4)).step == 4


class Stop(Exception):
    pass


def interrupted(out: Path, made: Plan, after: int) -> None:
    model, data = problem()
    seen = []

    def evaluate(_: nn.Module) -> dict[str, float]:
        seen.append(0)
        if len(seen) > after:
            raise Stop
        return {"seen": 0.0}

    with pytest.raises(Stop):
        sordino.train(
            model, loss, data, made, lr=0.1, out=out, evaluate=evaluate,
            settings=sordino.training.Settings(eval_every=1, checkpoint_every=1),
        )  # fmt: skip


def test_a_run_with_a_seed_is_resumed_amid_an_epoch_bit_for_bit(tmp_path: Path) -> None:
    interrupted(tmp_path / "a", plan(), 5)
    model, data = problem()
    settings = sordino.training.Settings(eval_every=1, checkpoint_every=1)
    quiet = {"lr": 0.1, "settings": settings, "evaluate": lambda _: {"seen": 0.0}}
    sordino.train(model, loss, data, plan(), out=tmp_path / "a", resume=True, **quiet)
    whole, data = problem()
    sordino.train(whole, loss, data, plan(), out=tmp_path / "b", **quiet)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), whole.parameters(), strict=True))


def test_a_secure_run_goes_on_with_the_next_epoch_and_costs_no_more(tmp_path: Path) -> None:
    made = plan(insecure_seed=None)
    interrupted(tmp_path, made, 5)
    model, data = problem()
    settings = sordino.training.Settings(eval_every=1, checkpoint_every=1)
    result = sordino.train(
        model, loss, data, made, lr=0.1, out=tmp_path, resume=True, settings=settings, evaluate=lambda _: {"seen": 0.0}
    )
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    steps = [entry["step"] for entry in entries]
    assert result.skipped_steps > 0
    assert steps[-4:] == [8, 9, 10, 11]
    assert 7 not in steps
    assert from_ledger(header, entries, 1e-3)["epsilon"] <= made.guarantee().epsilon


@pytest.mark.parametrize("after", [8, 9])
def test_a_secure_run_that_was_killed_in_its_last_epoch_a_part_of_one_comes_to_its_end(
    tmp_path: Path, after: int
) -> None:
    """What is left of that epoch can't be released any more: its key is lost."""
    made = plan(insecure_seed=None, epochs=None, steps=10)
    interrupted(tmp_path, made, after)
    model, data = problem()
    settings = sordino.training.Settings(eval_every=1, checkpoint_every=1)
    result = sordino.train(
        model, loss, data, made, lr=0.1, out=tmp_path, resume=True, settings=settings, evaluate=lambda _: {"seen": 0.0}
    )
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert [entry["step"] for entry in entries] == list(range(after + 1))
    assert result.skipped_steps == 9 - after
    assert from_ledger(header, entries, 1e-3)["epsilon"] <= made.guarantee().epsilon


def test_advice_to_start_later_stays_within_the_plan() -> None:
    made = plan(insecure_seed=None, epochs=None, steps=6)
    with Ledger.open(None, made.to_dict()) as ledger:
        with pytest.raises(Refused, match="start with step 6, the end of the plan"):
            steps_of(made, ledger, made.source(), start=5)
        assert not list(steps_of(made, ledger, made.source(), start=6))


def test_methods_whose_accountant_does_not_know_it_refuse_it_by_name() -> None:
    with pytest.raises(Refused, match="ModelMix"):
        sordino.modelmix(
            delta=1e-3,
            records=40,
            expected_batch=10,
            steps=4,
            noise_multiplier=1.0,
            sampling="allocation",
            lr=0.1,
            tau_over_lr=0.1,
        )
