"""Momentum of single records: Algorithms 1 and 2 of Xiao et al. 2023 against loops written as the paper has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino.audit import check_neighbouring
from sordino.audit.faults import iterates_clipped_apart
from sordino.clipping import FlatClip, NormalisedClip
from sordino.errors import ClaimBroken, InputError, Refused
from sordino.plan import Plan
from sordino.plan.contribution import Augmentation, InnerMomentum, RecordMomentum
from sordino.plan.spent import from_ledger
from sordino.records.gradients import plan_gradients, record_gradients
from sordino.records.momentum import PastIterates, made_up_past, refuse_momenta
from sordino.release.ledger import Ledger, read_ledger
from sordino.sampling import LogicalBatch
from sordino.training import Settings, loop, train, train_without_noise
from sordino.training.steps import private_steps

Records = tuple[Tensor, Tensor]
RECORDS = 12
LR, KEPT = 0.3, 0.6


def plan_for(**changes: Any) -> Plan:
    options: dict[str, Any] = {
        "noise_multiplier": 1.0, "delta": 1e-5, "records": RECORDS, "expected_batch": RECORDS, "steps": 6,
        "insecure_seed": 0,
    }  # fmt: skip
    return Plan.dpsgd(**options | changes)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def few() -> Records:
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(RECORDS, 6, generator=generator).double(), torch.arange(RECORDS) % 3


def gradient(net: nn.Module, weights: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """∇f(w, x_i, y_i), one record, plain autograd."""
    named = dict(zip(dict(net.named_parameters()), weights, strict=True))
    leaves = {name: w.clone().requires_grad_() for name, w in named.items()}
    loss = cross_entropy(torch.func.functional_call(net, leaves, (x[None],)), y[None])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(leaves.values()))])


def stepped(net: nn.Module, weights: list[Tensor], change: Tensor) -> list[Tensor]:
    sizes = [w.numel() for w in weights]
    return [w - part.view_as(w) for w, part in zip(weights, torch.split(change, sizes), strict=True)]


def algorithm_2(records: Records, steps: int, length: int, decay: float, kept: float, lr: float) -> list[Tensor]:
    """As printed, without noise: (13), normalised, summed; (14) with 1 − γ₁ = kept; the iterates before w_0 absent."""
    net, (x, y) = model(), records
    weights = [p.detach() for p in net.parameters()]
    iterates, outer = [weights], torch.zeros(sum(w.numel() for w in weights)).double()
    for _ in range(steps):
        total = torch.zeros_like(outer)
        for i in range(RECORDS):
            past = iterates[-1 - length :]
            m = sum(decay**age * gradient(net, w, x[i], y[i]) for age, w in enumerate(reversed(past)))
            assert isinstance(m, Tensor)
            total += m / m.norm()
        outer = kept * outer + total
        iterates.append(stepped(net, iterates[-1], lr * outer / RECORDS))
    return iterates[-1]


def algorithm_1(records: Records, steps: int, gamma: float, lr: float) -> list[Tensor]:
    """As printed, without noise: m_0 = ∇f(w_0), m_k = γ∇f(w_k) + (1 − γ)m_{k−1}."""
    net, (x, y) = model(), records
    weights = [p.detach() for p in net.parameters()]
    momenta = [gradient(net, weights, x[i], y[i]) for i in range(RECORDS)]
    for _ in range(steps):
        total = torch.stack([m / m.norm() for m in momenta]).sum(0)
        weights = stepped(net, weights, lr * total / RECORDS)
        momenta = [gamma * gradient(net, weights, x[i], y[i]) + (1 - gamma) * m for i, m in enumerate(momenta)]
    return weights


def assert_same(net: nn.Module, weights: list[Tensor]) -> None:
    for p, w in zip(net.parameters(), weights, strict=True):
        assert torch.allclose(p, w, rtol=1e-7, atol=1e-9)


class TestAlgorithm2:
    @pytest.mark.parametrize(("length", "decay"), [(1, 0.3), (2, 0.08), (3, 1.0), (9, 0.5)])
    def test_it_is_the_paper_s_with_fewer_iterates_at_the_beginning(self, length: int, decay: float) -> None:
        plan = plan_for(clipping=NormalisedClip(1.0), inner=InnerMomentum(length, decay))
        settings = Settings(optimizer_options={"momentum": KEPT})
        found = train_without_noise(model(), cross_entropy, few(), plan, lr=LR, settings=settings)
        assert_same(found.model, algorithm_2(few(), plan.steps, length, decay, KEPT, LR))

    def test_factors_are_the_decay_to_the_power_of_the_age(self) -> None:
        inner, net = InnerMomentum(2, 0.5), model()
        past = PastIterates()
        assert [f for _, f in past.with_present(inner)] == [1.0]
        for _ in range(3):
            past = past.followed_by(net, inner.length)
        assert [f for _, f in past.with_present(inner)] == [0.25, 0.5, 1.0]
        assert past.with_present(inner)[-1][0] == {}

    def test_what_is_kept_are_copies(self) -> None:
        net = model()
        past = PastIterates().followed_by(net, 1)
        before = past.weights[0]["0.weight"].clone()
        with torch.no_grad():
            next(iter(net.parameters())).add_(1.0)
        assert torch.equal(past.weights[0]["0.weight"], before)

    def test_past_iterates_are_those_of_the_run_not_of_the_record(self) -> None:
        """Memory is length × weights, whatever the number of records."""
        past = made_up_past(model(), InnerMomentum(3, 0.5))
        assert len(past.weights) == 3
        assert {k: v.shape for k, v in past.weights[0].items()} == {k: v.shape for k, v in model().named_parameters()}

    @pytest.mark.parametrize("record", range(3))
    def test_a_record_moves_the_sum_by_at_most_the_clip_norm(self, record: int) -> None:
        inner = InnerMomentum(2, 0.5)
        plan, past = plan_for(clip_norm=0.1, inner=inner), made_up_past(model(), inner)
        sums = plan_gradients(plan, model(), cross_entropy, few(), past=lambda: past)
        found = check_neighbouring(plan, sums, record, others=torch.arange(RECORDS))
        assert found.difference == pytest.approx(0.1, rel=1e-6)

    def test_iterates_that_are_clipped_apart_are_caught(self) -> None:
        inner = InnerMomentum(2, 0.5)
        plan, past = plan_for(clip_norm=0.1, inner=inner), made_up_past(model(), inner)
        broken = iterates_clipped_apart(plan, model(), cross_entropy, few(), past=lambda: past)
        with pytest.raises(ClaimBroken, match="more than the sensitivity"):
            check_neighbouring(plan, broken, 0, others=torch.arange(RECORDS))

    @pytest.mark.parametrize("planned", [None, InnerMomentum(2, 0.5)])
    def test_past_iterates_that_the_plan_does_not_state_or_that_are_missing_are_refused(self, planned: Any) -> None:
        plan, past = plan_for(inner=planned), made_up_past(model(), InnerMomentum(2, 0.5))
        given = None if planned else InnerMomentum(2, 0.5)
        sums = record_gradients(model(), cross_entropy, few(), plan.clipping, inner=given, past=lambda: past)
        with Ledger.open(None, plan.to_dict()) as ledger, pytest.raises(Refused, match="InnerMomentum"):
            private_steps(plan, sums, records=RECORDS, source=plan.source(), ledger=ledger)

    @pytest.mark.parametrize(
        ("length", "decay"), [(0, 0.5), (True, 0.5), (2.0, 0.5), (2, 0.0), (2, 1.1), (2, float("nan"))]
    )
    def test_settings_without_meaning_are_errors(self, length: Any, decay: float) -> None:
        with pytest.raises(InputError, match="inner_"):
            InnerMomentum(length, decay)


class Interrupted(Exception):
    """Stops a run between two checkpoints."""


class TestResume:
    def run(self, records: Records, out: Path | None, stop: int | None = None, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        plan = plan_for(records=200, expected_batch=40, steps=12, inner=InnerMomentum(3, 0.5))
        left = iter(range(stop or 1000))

        def evaluate(_: nn.Module) -> dict[str, float]:
            if next(left, None) is None:
                raise Interrupted
            return {}

        settings = Settings(eval_every=1, checkpoint_every=5)
        return train(
            nn.Linear(6, 3), cross_entropy, records, plan, lr=1.0, settings=settings, evaluate=evaluate, out=out,
            **options,
        ).model  # fmt: skip

    def test_a_seeded_run_goes_on_bit_for_bit_its_past_iterates_included(
        self, records: Records, tmp_path: Path
    ) -> None:
        with pytest.raises(Interrupted):
            self.run(records, tmp_path, stop=7)
        resumed, whole = self.run(records, tmp_path, resume=True), self.run(records, None)
        assert torch.equal(resumed.weight, whole.weight)  # type: ignore[arg-type]

    def test_without_them_it_would_not(self, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(Interrupted):
            self.run(records, tmp_path, stop=7)
        monkeypatch.setattr(loop, "PastIterates", lambda *_: PastIterates())
        forgetful, whole = self.run(records, tmp_path, resume=True), self.run(records, None)
        assert not torch.equal(forgetful.weight, whole.weight)  # type: ignore[arg-type]

    def test_a_secure_run_goes_on_too(self, records: Records, tmp_path: Path) -> None:
        plan = plan_for(records=200, expected_batch=40, steps=10, inner=InnerMomentum(2, 0.5), insecure_seed=None)
        settings = Settings(checkpoint_every=5)
        train(nn.Linear(6, 3), cross_entropy, records, plan, lr=1.0, settings=settings, out=tmp_path)
        again = train(
            nn.Linear(6, 3), cross_entropy, records, plan, lr=1.0, settings=settings, out=tmp_path, resume=True
        )
        assert again.skipped_steps == 0


class TestAlgorithm1:
    @pytest.mark.parametrize("gamma", [0.1, 0.7])
    def test_it_is_the_paper_s(self, gamma: float) -> None:
        plan = plan_for(clipping=NormalisedClip(1.0), record_momentum=RecordMomentum(1 - gamma))
        found = train_without_noise(model(), cross_entropy, few(), plan, lr=LR, settings=Settings(chunk=5))
        assert_same(found.model, algorithm_1(few(), plan.steps, gamma, LR))

    def test_a_record_moves_the_sum_by_at_most_the_clip_norm(self) -> None:
        """Both datasets have their momenta; after some steps the sums differ by the record's clipped momentum alone."""
        x, y = few()
        totals = []
        for kept in (torch.arange(RECORDS), torch.arange(1, RECORDS)):
            plan = plan_for(
                clip_norm=0.1, record_momentum=RecordMomentum(0.9), records=len(kept), expected_batch=len(kept)
            )
            net, sums = model(), []
            gradients = plan_gradients(plan, net, cross_entropy, (x[kept], y[kept]))
            for step in range(3):
                found = gradients(LogicalBatch(step, torch.arange(len(kept)), 5)).sums
                sums.append(torch.cat([v.flatten() for v in found.values()]))
                with torch.no_grad():  # the same public move for both
                    for p in net.parameters():
                        p.mul_(0.9)
            totals.append(sums)
        for with_it, without in zip(*totals, strict=True):
            assert float((with_it - without).norm()) <= 0.1 * (1 + 1e-9)

    def test_sampled_batches_and_two_momenta_at_once_are_refused(self) -> None:
        with pytest.raises(Refused, match="full batches"):
            plan_for(expected_batch=4, record_momentum=RecordMomentum(0.9))
        with pytest.raises(Refused, match="not both"):
            plan_for(record_momentum=RecordMomentum(0.9), inner=InnerMomentum(2, 0.5))
        with pytest.raises(InputError, match="record_momentum_kept"):
            RecordMomentum(1.0)

    def test_too_much_memory_is_refused_with_the_amount(self) -> None:
        with pytest.raises(Refused, match=r"more than the 2\.15 GB") as caught:
            refuse_momenta(50_000, 270_000, 4)
        assert "54 GB" in caught.value.private
        refuse_momenta(1_000, 7_850, 4)

    def test_momenta_are_never_written_and_the_run_is_not_resumed(self, tmp_path: Path) -> None:
        plan = plan_for(record_momentum=RecordMomentum(0.9))
        settings = Settings(checkpoint_every=1)
        train(model(), cross_entropy, few(), plan, lr=LR, settings=settings, out=tmp_path)
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["ledger.jsonl", "metrics.jsonl"]
        with pytest.raises(Refused, match="momenta are private"):
            train(model(), cross_entropy, few(), plan, lr=LR, settings=settings, out=tmp_path, resume=True)

    def test_a_record_that_was_once_not_finite_contributes_nothing_from_then_on(self) -> None:
        x, y = few()
        bad = x.clone()
        bad[3] = torch.inf
        plan = plan_for(record_momentum=RecordMomentum(0.5), steps=3)
        found = train(model(), cross_entropy, (bad, y), plan, lr=LR)
        assert found.not_private["dropped_records"] == 3
        assert all(bool(p.isfinite().all()) for p in found.model.parameters())


def test_outer_momentum_is_equation_14_with_what_it_keeps_named() -> None:
    """M_k = (1 − γ₁)M_{k−1} + G_k with the paper's γ₁ = 0.6 keeps 0.4; the authors' code would keep 0.6."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=1 - 0.6)
    outer, by_hand = torch.zeros(3), torch.zeros(3)
    for step in range(4):
        released = torch.randn(3, generator=torch.Generator().manual_seed(step))
        outer = (1 - 0.6) * outer + released
        by_hand = by_hand - outer
        weight.grad = released.clone()
        optimizer.step()
    assert torch.allclose(weight.detach(), by_hand)


class TestPlan:
    VARIANTS = (
        {"inner": InnerMomentum(2, 0.08)},
        {"augmentation": Augmentation(views=4, crop=4, flip=True)},
        {"inner": InnerMomentum(1, 0.5), "augmentation": Augmentation(views=2, word_dropout=0.1)},
        {"record_momentum": RecordMomentum(0.9)},
    )

    @pytest.mark.parametrize("parts", VARIANTS)
    def test_it_is_written_down_stated_and_costs_nothing(self, parts: dict[str, Any]) -> None:
        plan, plain = plan_for(**parts), plan_for()
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert plan.guarantee().epsilon == plain.guarantee().epsilon
        assert plan.to_dict()["method"] != plain.to_dict()["method"] == {"name": "dpsgd"}
        assert len(plan.guarantee().assumptions) == len(plain.guarantee().assumptions) + len(parts)
        assert "clipped once" in str(plan.guarantee())

    def test_unknown_parts_are_errors(self) -> None:
        document = plan_for().to_dict()
        for method in ({"name": "dpsgd", "iner": {}}, {"name": "dpsgd", "inner": {"size": 2}}):
            with pytest.raises(InputError, match="method"):
                Plan.from_dict(document | {"method": method})

    def test_the_ledger_of_such_a_run_gives_the_plan_s_epsilon(self, records: Records, tmp_path: Path) -> None:
        plan = plan_for(records=200, expected_batch=40, steps=5, inner=InnerMomentum(2, 0.5))
        train(nn.Linear(6, 3), cross_entropy, records, plan, lr=1.0, out=tmp_path)
        header, entries = read_ledger(tmp_path / "ledger.jsonl")
        assert header["method"] == {"name": "dpsgd", "inner": {"length": 2, "decay": 0.5}}
        assert from_ledger(header, entries, 1e-5)["epsilon"] == pytest.approx(plan.guarantee().epsilon, rel=1e-3)

    def test_the_first_batch_is_checked_with_all_views_and_with_past_iterates(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, Any] = {}

        def spy(net: nn.Module, loss: Any, rows: Any, clipping: Any, **options: Any) -> None:
            seen.update(rows=rows, clipping=clipping, **options)

        monkeypatch.setattr("sordino.training.first_batch.verify", spy)
        pictures = torch.randn(RECORDS, 1, 4, 4), torch.arange(RECORDS) % 3
        plan = plan_for(inner=InnerMomentum(2, 0.5), augmentation=Augmentation(views=3, flip=True), steps=1)
        train(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), cross_entropy, pictures, plan, lr=0.1)
        assert len(seen["rows"].inputs) == 3 * RECORDS
        assert [factor for _, factor in seen["iterates"]] == [0.25, 0.5, 1.0]
        assert seen["clipping"] == FlatClip(1.0)
