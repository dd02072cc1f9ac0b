"""Users as the unit: all rows of one user form one record, in sampling, clipping, guarantee and ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sordino
from sordino.clipping import FlatClip
from sordino.errors import InputError, Refused
from sordino.gradients import Rows
from sordino.plan import ROUNDING_MARGIN, Plan
from sordino.records.gradients import record_gradients
from sordino.records.reading import as_records, count_records, users_of
from sordino.records.users import owners
from sordino.release.ledger import read_ledger
from sordino.sampling import LogicalBatch

OWNER = torch.tensor([2, 0, 0, 1, 2, 2, 2, 0, 3, 2])


def problem(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return nn.Linear(3, 2), torch.randn(10, 3) * 3, torch.randint(2, (10,))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def total(model: nn.Module, dataset: object, users: list[int], step: int = 0, clip: float = 0.5) -> torch.Tensor:
    sums = record_gradients(model, loss, dataset, FlatClip(clip))(LogicalBatch(step, torch.tensor(users), 64)).sums
    return torch.cat([value.flatten() for value in sums.values()]).double()


def by_hand(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, clip: float = 0.5
) -> torch.Tensor:
    result = torch.zeros(8, dtype=torch.float64)
    for user in range(4):
        mine = user == OWNER
        model.zero_grad()
        (loss(model(x[mine]), y[mine]) * weight[mine]).sum().backward()
        vector = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        result += vector * min(1.0, clip / float(vector.norm()))
    model.zero_grad(set_to_none=True)
    return result


def test_rows_of_one_owner_are_clipped_as_one_record() -> None:
    model, x, y = problem()
    weight = torch.linspace(0.5, 2, 10)
    for coefficient in (None, weight):
        rows = Rows(x, y, record=OWNER, coefficient=coefficient)
        assert count_records(rows) == 4
        truth = by_hand(model, x, y, torch.ones(10) if coefficient is None else weight)
        assert torch.allclose(total(model, rows, [0, 1, 2, 3]), truth, atol=1e-5)


def test_train_takes_the_owner_of_a_row_as_its_record() -> None:
    model, x, y = problem()
    plan = sordino.dpsgd(
        delta=0.01, records=4, expected_batch=4, steps=1, noise_multiplier=1e-3, insecure_seed=1, clip_norm=0.5
    )
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()]).double()
    truth = by_hand(model, x, y, torch.ones(10))
    sordino.train(model, loss, Rows(x, y, record=OWNER), plan, lr=1.0)
    after = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    assert torch.allclose((before - after) * 4, truth, atol=0.01)


def test_a_plan_for_the_number_of_rows_is_not_one_for_owners() -> None:
    model, x, y = problem()
    plan = sordino.dpsgd(delta=0.01, records=10, expected_batch=4, steps=1, noise_multiplier=1.0)
    with pytest.raises(InputError, match="10 records, but the dataset has another number"):
        sordino.train(model, loss, Rows(x, y, record=OWNER), plan, lr=1.0)


def user_plan(**options: object) -> Plan:
    values = {"delta": 0.01, "records": 4, "expected_batch": 2, "steps": 3, "noise_multiplier": 1.0, "unit": "user"}
    return sordino.dpsgd(**{**values, "insecure_seed": 1, **options})


def test_guarantee_and_ledger_say_user(tmp_path: Path) -> None:
    model, x, y = problem()
    plan = user_plan(rows_per_user=2)
    result = sordino.train(model, loss, (x, y), plan, lr=0.1, users=[f"u{i}" for i in OWNER.tolist()], out=tmp_path)
    assert result.guarantee.unit == "user"
    assert "one user with all their rows" in str(result.guarantee)
    page = (tmp_path / "report.html").read_text("utf8")
    assert "one user of the dataset with all their rows" in page
    assert "one user is added to the data or removed from it" in page
    assert "For someone who has k ids" in page
    header, _ = read_ledger(tmp_path / "ledger.jsonl")
    assert (header["unit"], header["rows_per_user"], header["records"]) == ("user", 2, 4)
    assert Plan.from_dict({k: v for k, v in header.items() if k != "kind"}) == plan
    row_plan = sordino.dpsgd(delta=0.01, records=4, expected_batch=2, steps=3, noise_multiplier=1.0, insecure_seed=1)
    assert "unit" not in row_plan.to_dict()
    assert result.guarantee.epsilon == row_plan.guarantee().epsilon


@pytest.mark.parametrize("most", [None, 3])
def test_a_dataset_that_takes_more_rows_of_a_user_than_the_plan_says_is_refused(most: int | None) -> None:
    """The guarantee's text would not be true, although the clipped sum is as private."""
    model, x, y = problem()
    with pytest.raises(Refused, match="at most 2 rows of a user"):
        sordino.train(model, loss, users_of((x, y), OWNER, most), user_plan(rows_per_user=2), lr=0.1)
    sordino.train(model, loss, users_of((x, y), OWNER, 2), user_plan(rows_per_user=2), lr=0.1)


def test_allocation_draws_users(tmp_path: Path) -> None:
    model, x, y = problem()
    result = sordino.train(model, loss, (x, y), user_plan(sampling="allocation"), lr=0.1, users=OWNER)
    assert (result.guarantee.unit, result.guarantee.sampler) == ("user", "allocation")


@pytest.mark.parametrize("rows_per_user", [None, 1, 2])
@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_removing_all_rows_of_a_user_moves_the_sum_by_the_clip_norm_at_most(
    kind: str, rows_per_user: int | None
) -> None:
    torch.manual_seed(0)
    if kind == "table":
        model, x = nn.Linear(3, 2), torch.randn(10, 3) * 9
    elif kind == "image":
        model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), torch.randn(10, 1, 4, 4) * 9
    else:
        model, x = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, 2)), torch.randint(7, (10, 4))
    y = torch.randint(2, (10,))
    for gone in range(4):
        keep = gone != OWNER
        every = total(model, users_of((x, y), OWNER, rows_per_user), [0, 1, 2, 3], step=5, clip=0.01)
        fewer = total(model, users_of((x[keep], y[keep]), OWNER[keep], rows_per_user), [0, 1, 2], step=5, clip=0.01)
        assert float((every - fewer).norm()) <= 0.01 * (1 + ROUNDING_MARGIN)


def test_the_choice_of_rows_sees_only_the_users_own() -> None:
    x = torch.arange(10.0)[:, None]
    keep = OWNER != 0
    users = users_of((x, torch.zeros(10)), OWNER, 2)
    others = users_of((x[keep], torch.zeros(int(keep.sum()))), OWNER[keep], 2)
    for step in range(6):
        mine = users.rows(torch.tensor([2]), step)
        assert torch.equal(mine.inputs, others.rows(torch.tensor([1]), step).inputs)
        assert len(mine.targets) == 2
        assert mine.coefficient.tolist() == [0.5, 0.5]
    seen = {tuple(users.rows(torch.tensor([2]), step).inputs.flatten().tolist()) for step in range(40)}
    assert set().union(*seen) == {0.0, 4.0, 5.0, 6.0, 9.0}  # over the steps all of them take part


def test_users_and_unit_go_together() -> None:
    model, x, y = problem()
    record_plan = sordino.dpsgd(delta=0.01, records=10, expected_batch=2, steps=1, noise_multiplier=1.0)
    with pytest.raises(Refused, match="unit='user'"):
        sordino.train(model, loss, (x, y), record_plan, lr=0.1, users=OWNER)
    with pytest.raises(Refused, match="users="):
        sordino.train(model, loss, (x, y), user_plan(), lr=0.1)
    with pytest.raises(InputError, match="rows_per_user"):
        sordino.dpsgd(delta=0.01, records=4, expected_batch=2, steps=3, noise_multiplier=1.0, rows_per_user=2)
    with pytest.raises(Refused, match="treats a row as a record"):
        sordino.Plan.from_dict({**sordino.modelmix(
            delta=0.01, records=4, expected_batch=2, steps=3, noise_multiplier=1.0, lr=0.1, tau_over_lr=0.1
        ).to_dict(), "unit": "user", "rows_per_user": None})  # fmt: skip


@pytest.mark.parametrize(
    "users", [OWNER[:9], [0.5] * 10, [None] * 10, ["a"] * 9 + [3], np.full(10, np.nan), torch.zeros(10, 2)]
)
def test_wrong_ids_are_errors(users: object) -> None:
    _, x, y = problem()
    with pytest.raises(InputError):
        users_of((x, y), users, None)


@pytest.mark.parametrize(
    "users",
    [
        [2**63, 2**63 + 1, -1],
        [2**64, 2**64 + 1, 0],
        np.array([2.0**53, 2.0**53 + 1, 0.0]),
        np.array([2**24, 2**24 + 1, 0], dtype=np.float32),
        np.array([1.0, np.inf, np.inf]),
        np.array([2**24, 2**24 + 1, 0], dtype=np.float32).astype(np.float64),
        torch.tensor([256.0, 257.0, 0.0], dtype=torch.bfloat16),
        ["a", "a\0", "b"],
        [True, 1, 2],
    ],
)
def test_ids_of_different_users_that_numpy_would_make_equal_are_errors(users: object) -> None:
    """Two users who are clipped as one record move the sum by up to two clip norms."""
    with pytest.raises(InputError, match="users must be ids"):
        owners(users, 3)


@pytest.mark.parametrize("missing", ["", " ", "nan", "NaN", "None", "null", "<NA>", "NaT"])
def test_a_text_that_stands_for_a_missing_id_is_no_user(missing: str) -> None:
    with pytest.raises(InputError, match="without missing values"):
        owners(["a", missing, missing], 3)


@pytest.mark.parametrize(
    "users",
    [
        ["a", "a ", "b"],
        ["caf\u00e9", "cafe\u0301", "b"],
        np.array([b"a", b" a", b"b"]),
        ["al\u200bice", "alice", "b"],
        ["\ufeffalice", "alice", "b"],
        ["\uff21", "A", "b"],
        ["Ann\u00a0Lee", "Ann Lee", "b"],
    ],
)
def test_one_user_under_two_spellings_is_an_error(users: object) -> None:
    with pytest.raises(InputError, match="one user would count as two"):
        owners(users, 3)


@pytest.mark.parametrize("users", [{"a", "b", "c"}, {"a": 0, "b": 1, "c": 2}, "abc", b"abc", 3, None])
def test_ids_without_an_order_of_rows_are_errors(users: object) -> None:
    with pytest.raises(InputError, match="a list or an array"):
        owners(users, 3)


@pytest.mark.parametrize(
    "users",
    [
        [3, -1, 3],
        [2**63, 2**63 + 1, 2**63],
        ["x", "y", "x"],
        np.array([3.0, -1.0, 3.0]),
        range(0, 3),
        [True, False, True],
        np.array(["x", "y", "x"], dtype=object),  # a column of texts of a data frame
        np.array([2.0**24, 2.0**24 + 1, 2.0**24]),
    ],
)
def test_ids_that_tell_users_apart_are_taken(users: object) -> None:
    numbers, count = owners(users, 3)
    assert count == len(set(users)) == len(set(numbers.tolist()))  # type: ignore[call-overload]
    assert (numbers[0] == numbers[2]) == (users[0] == users[2])  # type: ignore[index]


def test_owners_outside_of_the_declared_number_and_unequal_lengths_are_errors() -> None:
    _, x, y = problem()
    for rows in (Rows(x, y, record=OWNER, records=3), Rows(x, y, record=OWNER - 1), Rows(x, y[:9], record=OWNER)):
        with pytest.raises(InputError):
            as_records(rows)
    assert len(as_records(Rows(x, y, record=OWNER, records=6))) == 6  # two of them have no rows


def test_a_run_is_not_resumed_with_other_owners_of_the_same_rows(tmp_path: Path) -> None:
    """With other owners one person could take part as several records: the run is refused before a step is drawn."""
    inputs, targets, owners_of = torch.randn(60, 4), torch.randint(2, (60,)), torch.arange(60) // 3
    plan = sordino.dpsgd(
        records=20, expected_batch=5, steps=30, epsilon=3.0, delta=1e-5, clip_norm=1.0, unit="user", rows_per_user=2
    )

    class Interrupted(sordino.Callback):
        def told(self, row: object) -> bool | None:
            raise KeyboardInterrupt

    def run(users: torch.Tensor, *callbacks: sordino.Callback, resume: bool) -> sordino.Result:
        return sordino.train(
            nn.Linear(4, 2), loss, (inputs, targets), plan, lr=0.1, users=users, out=tmp_path, resume=resume,
            callbacks=callbacks, settings=sordino.Settings(progress=False, eval_every=5, checkpoint_every=5),
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        run(owners_of, Interrupted(), resume=False)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match="not the records"):
        run(torch.arange(60) % 20, resume=True)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    assert run(owners_of, resume=True).guarantee.unit == "user"
