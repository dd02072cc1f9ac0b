"""Private steps: the plan's own sampler, clipping, noise and divisor, and nothing measured from the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from sordino.clipping import FlatClip
from sordino.errors import InputError, Refused, SordinoError
from sordino.gradients import ClippedSum
from sordino.plan import Plan
from sordino.plan.contribution import InnerMomentum
from sordino.randomness import RandomSource
from sordino.records.gradients import Counted, GradientSum, Stated, record_gradients
from sordino.release.ledger import Ledger
from sordino.sampling import LogicalBatch
from sordino.training.steps import PrivateStep, private_steps

Records = tuple[Tensor, Tensor]


def plan_for(records: int, **changes: object) -> Plan:
    options: dict[str, object] = {
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "records": records,
        "expected_batch": 20,
        "steps": 4,
        "insecure_seed": 1,
    }
    return Plan.dpsgd(**options | changes)  # type: ignore[arg-type]


def steps_of(
    model: nn.Module, data: object, plan: Plan, *, records: int, chunk: int = 512, ledger: Ledger | None = None
) -> Iterator[PrivateStep]:
    gradient_sum = record_gradients(model, nn.functional.cross_entropy, data, plan.clipping)
    book = ledger or Ledger.open(None, plan.to_dict())
    return private_steps(plan, gradient_sum, records=records, source=plan.source(), ledger=book, chunk=chunk)


def test_a_step_is_the_clipped_sum_plus_noise_over_the_public_divisor(records: Records, linear: nn.Module) -> None:
    seen: list[LogicalBatch] = []
    plan = plan_for(200, noise_multiplier=1e-3, steps=1, clip_norm=0.5)
    inner = record_gradients(linear, nn.functional.cross_entropy, records, plan.clipping)

    def gradient_sum(batch: LogicalBatch):  # type: ignore[no-untyped-def]
        seen.append(batch)
        return inner(batch)

    (step,) = private_steps(
        plan,
        Stated(gradient_sum, plan.clipping),
        records=200,
        source=plan.source(),
        ledger=Ledger.open(None, plan.to_dict()),
    )
    total = [torch.zeros(3, 6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    for i in seen[0].indices.tolist():
        loss = nn.functional.cross_entropy(linear(records[0][i : i + 1]), records[1][i : i + 1])
        gradient = torch.autograd.grad(loss, list(linear.parameters()))
        factor = min(1.0, 0.5 / float(torch.cat([g.flatten() for g in gradient]).norm()))
        total = [t + factor * g for t, g in zip(total, gradient, strict=True)]
    assert 0 < len(seen[0].indices) != 20, "the divisor must be the expected batch, not this batch's size"
    assert torch.allclose(step.gradients["weight"].double(), total[0] / 20, atol=5e-4)
    assert torch.allclose(step.gradients["bias"].double(), total[1] / 20, atol=5e-4)


def test_sums_that_their_maker_keeps_are_not_written_to(linear: nn.Module) -> None:
    plan = plan_for(200)
    always = ClippedSum(
        {name: torch.ones_like(p) for name, p in linear.named_parameters()}, torch.ones(1), 0, torch.ones(1)
    )
    book = Ledger.open(None, plan.to_dict())
    gradient_sum = Stated(lambda batch: always, plan.clipping)
    steps = list(private_steps(plan, gradient_sum, records=200, source=plan.source(), ledger=book))
    assert len(steps) == 4
    assert all(bool((value == 1).all()) for value in always.sums.values())


@pytest.mark.parametrize("wrap", [lambda sums: sums, Counted], ids=["itself", "counted"])
def test_a_gradient_sum_that_clips_otherwise_is_refused_at_the_call_also_behind_a_wrapper(
    wrap: Callable[[GradientSum], GradientSum], records: Records, linear: nn.Module
) -> None:
    plan, ledger = plan_for(200, clip_norm=1.0), Ledger.open(None, plan_for(200, clip_norm=1.0).to_dict())
    loose = wrap(record_gradients(linear, nn.functional.cross_entropy, records, FlatClip(5.0)))
    with pytest.raises(Refused, match=r"clipped by FlatClip\(clip_norm=5.0\)"):
        private_steps(plan, loose, records=200, source=plan.source(), ledger=ledger)
    assert not ledger.entries


@pytest.mark.parametrize("wrap", [lambda sums: sums, Counted], ids=["itself", "counted"])
def test_a_contribution_that_the_plan_does_not_state_is_refused_also_behind_a_wrapper(
    wrap: Callable[[GradientSum], GradientSum], records: Records, linear: nn.Module
) -> None:
    plan, ledger = plan_for(200), Ledger.open(None, plan_for(200).to_dict())
    inner = InnerMomentum(2, 0.5)
    other = wrap(record_gradients(linear, nn.functional.cross_entropy, records, plan.clipping, inner=inner))
    with pytest.raises(Refused, match=r"InnerMomentum\(length=2.*the plan states the record's gradient itself"):
        private_steps(plan, other, records=200, source=plan.source(), ledger=ledger)


def test_a_function_that_states_nothing_is_refused(linear: nn.Module) -> None:
    plan = plan_for(200)
    with pytest.raises(Refused, match="does not state how it bounds a record"):
        private_steps(
            plan, lambda batch: None, records=200, source=plan.source(), ledger=Ledger.open(None, plan.to_dict())
        )  # type: ignore[arg-type, return-value]  # fmt: skip


def test_the_result_does_not_depend_on_the_chunk(records: Records, linear: nn.Module) -> None:
    runs = [list(steps_of(linear, records, plan_for(200), records=200, chunk=chunk)) for chunk in (1, 7, 512)]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert all(
                torch.allclose(one.gradients[n].double(), two.gradients[n].double(), atol=1e-6) for n in one.gradients
            )


def test_long_sums_are_added_in_double_precision() -> None:
    """One record more must move the sum by one clip norm, not by the rounding of sixty thousand others."""
    model = nn.Linear(100, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20_000, 100, generator=generator) + 0.5
    targets = torch.zeros(20_000)
    gradient_sum = record_gradients(model, lambda out, y: out[:, 0] - y, (inputs, targets), FlatClip(1.0))
    without = gradient_sum(LogicalBatch(0, torch.arange(19_999), 512)).sums["weight"]
    one_more = gradient_sum(LogicalBatch(0, torch.arange(20_000), 512)).sums["weight"]
    assert without.dtype == torch.float64
    in_one_chunk = gradient_sum(LogicalBatch(0, torch.arange(20_000), 20_000)).sums["weight"]
    assert in_one_chunk.dtype == torch.float64, "a large chunk is no way around it"
    assert float((one_more - without).norm()) <= plan_for(20_000, clip_norm=1.0).sensitivity


def test_opacus_571_and_819_rate_and_divisor_come_from_the_plan_and_not_from_the_data(
    records: Records, linear: nn.Module
) -> None:
    """A dataset with one record less gives the same rate, divisor and ledger: its size does not leak."""
    ledgers = []
    for n in (200, 199):
        plan = plan_for(200)
        ledger = Ledger.open(None, plan.to_dict())
        list(steps_of(linear, (records[0][:n], records[1][:n]), plan, records=n, ledger=ledger))
        ledgers.append([{k: v for k, v in entry.items() if k != "time"} for entry in ledger.entries])
    assert ledgers[0] == ledgers[1]


def test_gradients_or_a_ledger_of_another_plan_are_refused(records: Records, linear: nn.Module) -> None:
    plan, other = plan_for(200, clip_norm=1.0), plan_for(200, clip_norm=2.0)
    wide = record_gradients(linear, nn.functional.cross_entropy, records, other.clipping)
    right = record_gradients(linear, nn.functional.cross_entropy, records, plan.clipping)
    with pytest.raises(Refused, match="the plan accounts for"):
        next(private_steps(plan, wide, records=200, source=plan.source(), ledger=Ledger.open(None, plan.to_dict())))
    with pytest.raises(InputError, match="another plan"):
        next(private_steps(plan, right, records=200, source=plan.source(), ledger=Ledger.open(None, other.to_dict())))
    secure = plan_for(200, insecure_seed=None)
    seeded = plan.source()
    with pytest.raises(Refused, match="secure"):
        next(private_steps(secure, right, records=200, source=seeded, ledger=Ledger.open(None, secure.to_dict())))


def test_an_empty_batch_still_makes_a_noisy_step(records: Records, linear: nn.Module) -> None:
    plan = plan_for(200, expected_batch=1e-9, divisor=1.0)
    steps = list(steps_of(linear, records, plan, records=200))
    assert len(steps) == 4
    assert all(step.gradients["weight"].abs().sum() > 0 for step in steps)


def test_leaving_the_loop_early_mixes_nothing(records: Records, linear: nn.Module) -> None:
    plan = plan_for(200)
    whole = list(steps_of(linear, records, plan, records=200))
    for step in steps_of(linear, records, plan, records=200):
        assert torch.equal(step.gradients["weight"], whole[0].gradients["weight"])
        break
    again = list(steps_of(linear, records, plan, records=200))
    assert all(torch.equal(a.gradients["bias"], b.gradients["bias"]) for a, b in zip(whole, again, strict=True))


def test_the_ledger_knows_of_a_step_before_its_value_is_seen(records: Records, linear: nn.Module) -> None:
    plan = plan_for(200)
    ledger = Ledger.open(None, plan.to_dict())
    for step in steps_of(linear, records, plan, records=200, ledger=ledger):
        assert ledger.last_step("gradient") == step.step


def test_a_second_pass_over_released_steps_is_refused_when_the_noise_is_secure(
    records: Records, linear: nn.Module
) -> None:
    plan = plan_for(200, insecure_seed=None)
    ledger = Ledger.open(None, plan.to_dict())
    list(steps_of(linear, records, plan, records=200, ledger=ledger))
    with pytest.raises(SordinoError):
        list(steps_of(linear, records, plan, records=200, ledger=ledger))


class Items(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset that is not made of tensors."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._records[0][index], self._records[1][index]


def test_every_form_of_dataset_gives_the_same_steps(records: Records, linear: nn.Module) -> None:
    plan = plan_for(200)
    expected = list(steps_of(linear, records, plan, records=200))
    for data in (Items(records), TensorDataset(*records)):
        found = list(steps_of(linear, data, plan, records=200))
        assert all(
            torch.allclose(a.gradients["weight"], b.gradients["weight"]) for a, b in zip(expected, found, strict=True)
        )


def test_what_cannot_be_sampled_is_refused_with_what_to_give_instead(linear: nn.Module) -> None:
    with pytest.raises(InputError, match="map-style"):
        record_gradients(linear, nn.functional.cross_entropy, iter([]), plan_for(200).clipping)


def test_a_plan_for_another_number_of_records_is_refused(records: Records, linear: nn.Module) -> None:
    with pytest.raises(InputError, match="the dataset has another number"):
        next(steps_of(linear, records, plan_for(1000), records=200))
    capped = plan_for(199, sampling="truncated-poisson", cap=30)
    with pytest.raises(InputError, match="more records than the plan's 199"):
        next(steps_of(linear, records, capped, records=200))
    exact = plan_for(199, sampling="partition")
    with pytest.raises(InputError, match="must be exact"):
        next(steps_of(linear, records, exact, records=200))


def test_a_nan_record_contributes_nothing_and_the_rest_is_unharmed(records: Records, linear: nn.Module) -> None:
    """Seen with Opacus 1.6.0: one NaN record turns the model into NaN."""
    inputs = records[0].clone()
    inputs[::10] = torch.nan
    plan = plan_for(200, expected_batch=200, steps=1, noise_multiplier=1e-3)
    (step,) = steps_of(linear, (inputs, records[1]), plan, records=200)
    keep = [i for i in range(200) if i % 10]
    kept = plan_for(180, expected_batch=180, steps=1, noise_multiplier=1e-3, divisor=200.0)
    (clean,) = steps_of(linear, (inputs[keep], records[1][keep]), kept, records=180)
    assert torch.allclose(step.gradients["weight"], clean.gradients["weight"], atol=5e-4)


def test_noise_is_fresh_each_time_unless_it_is_seeded(records: Records, linear: nn.Module) -> None:
    for seed, same in ((None, False), (1, True)):
        plan = plan_for(200, insecure_seed=seed, steps=1)
        (one,), (two,) = (list(steps_of(linear, records, plan, records=200)) for _ in range(2))
        assert torch.equal(one.gradients["weight"], two.gradients["weight"]) == same


def test_dropout_masks_come_from_the_source_and_not_from_a_seed_that_others_may_know(records: Records) -> None:
    """A mask belongs to a place in the batch: with a public seed, a record less would give later ones other masks."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))

    def released(insecure_seed: int, torch_seed: int) -> Tensor:
        torch.manual_seed(torch_seed)
        plan = plan_for(200, noise_multiplier=1e-3, steps=1, insecure_seed=insecure_seed)
        (step,) = steps_of(model, records, plan, records=200)
        return step.gradients["1.weight"]

    assert torch.equal(released(1, 0), released(1, 5))
    torch.manual_seed(5)
    untouched = torch.rand(1)
    released(1, 5)
    assert torch.equal(torch.rand(1), untouched)  # and the caller's own random numbers are left alone


def test_a_source_draws_the_batches_of_one_run_alone(records: Records, linear: nn.Module) -> None:
    """Two runs with one key had the same batches: together they cost more than their ε say."""
    plan = plan_for(len(records[1]), insecure_seed=None)
    source = plan.source()

    def begin(source: RandomSource) -> None:
        gradients = record_gradients(linear, nn.functional.cross_entropy, records, plan.clipping)
        with Ledger.open(None, plan.to_dict()) as ledger:
            next(private_steps(plan, gradients, records=len(records[1]), source=source, ledger=ledger))

    begin(source)
    with pytest.raises(Refused, match="another run"):
        begin(source)
    begin(plan.source())
    fresh, (ours, theirs) = plan.source(), os.pipe()
    child = os.fork()
    if child == 0:
        said = b"accepted"
        try:
            begin(fresh)
        except Refused:
            said = b"refused"
        finally:
            os.write(theirs, said)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(ours, 100) == b"refused"
