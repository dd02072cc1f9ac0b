"""BatchClipping: a record's vector is what torch's own BatchNorm makes of the record and its companions alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import nets
from sordino.clipping import Clipping, FlatClip, NormalisedClip
from sordino.data import Split
from sordino.diagnostics.instruments.reading import measure
from sordino.diagnostics.instruments.trial import trial
from sordino.diagnostics.instruments.window import noise_vectors
from sordino.diagnostics.threshold import advise_clipping
from sordino.errors import InputError, Refused
from sordino.gradients import Rows, clipped_sum, verify
from sordino.methods import modelmix
from sordino.plan import Plan
from sordino.plan.contribution import Augmentation, InnerMomentum
from sordino.plan.public import PublicSet
from sordino.records.companions import CompanionNet, companion_model, draw_companions, draws_of, majority, predict
from sordino.records.gradients import record_gradients
from sordino.release.ledger import Ledger
from sordino.sampling import LogicalBatch
from sordino.schedule import Schedule
from sordino.training import Settings, train
from sordino.training.steps import private_steps


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6, affine=False), nn.ELU(),
        nn.Flatten(), nn.Linear(6 * 9, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3),
    )  # fmt: skip


def resnet() -> nn.Module:
    return nets.build("resnet", (2, 8, 8), 3, depth=8, form="batch")


def dense_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 7), nn.BatchNorm1d(7), nn.Softplus(), nn.Linear(7, 3))


def sequences() -> nn.Module:
    """(rows, 8, 16) → (rows, 8, 5): the linear layers see rows × positions, BatchNorm has a channel per position."""
    return nn.Sequential(
        nn.Flatten(), nn.Unflatten(1, (8, 16)), nn.Linear(16, 5), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(5, 3),
        nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def made(net: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = net()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                nn.init.normal_(module.weight, 1.0, 0.3)
                nn.init.normal_(module.bias, 0.0, 0.3)
        return model


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Split:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 8, 8, generator=generator, dtype=dtype)
    return Split(inputs, torch.randint(0, 3, (count,), generator=generator))


PUBLIC, PRIVATE = rows(12, 1), rows(40, 2)


def keys(count: int) -> Any:
    return np.arange(count, dtype=np.uint64)


def loop_over_records(
    model: nn.Module, public: Tensor, records: Split, companions: Tensor, clipping: Clipping
) -> tuple[Tensor, list[Tensor]]:
    """The definition: one batch of p rows for each record through torch's BatchNorm, the loss of its first row."""
    model = copy.deepcopy(model).train()
    norms, total = [], [torch.zeros_like(p) for p in model.parameters()]
    for x, y, others in zip(records.inputs, records.targets, companions, strict=True):
        outputs = model(torch.cat([x[None], public[others]]))
        gradient = torch.autograd.grad(cross_entropy(outputs[:1], y[None]), list(model.parameters()))
        norm = torch.sqrt(sum((g**2).sum() for g in gradient))  # type: ignore[arg-type]
        factor = clipping.factors(norm[None])[0]
        total = [t + factor * g for t, g in zip(total, gradient, strict=True)]
        norms.append(norm)
    return torch.stack(norms), total


class TestGradients:
    @pytest.mark.parametrize("net", [conv_net, resnet, dense_net])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
    @given(
        records=st.integers(1, 6),
        companions=st.integers(2, 5),
        seed=st.integers(0, 1000),
        chunk=st.sampled_from([None, 1, 2]),
    )
    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    def test_norms_and_sums_are_those_of_a_loop_with_torchs_own_batchnorm(
        self, net: Any, dtype: torch.dtype, tolerance: float, records: int, companions: int, seed: int, chunk: Any
    ) -> None:
        model = made(net, seed).to(dtype)
        public, some = rows(8, seed + 1, dtype), rows(records, seed + 2, dtype)
        paired = companion_model(model, public, companions)
        drawn = draw_companions(keys(records), 8, companions, seed=seed, step=0)
        clipping = NormalisedClip(0.5) if seed % 2 else FlatClip(0.5)
        found = clipped_sum(paired, cross_entropy, Rows((some.inputs, drawn), some.targets), clipping, chunk=chunk)
        norms, sums = loop_over_records(model, public.inputs, some, drawn, clipping)
        assert torch.allclose(found.norms, norms, rtol=tolerance, atol=tolerance * float(norms.max()))
        for (name, got), want in zip(found.sums.items(), sums, strict=True):
            assert float((got - want).abs().max()) <= tolerance * (1 + float(want.abs().max())), name

    def test_as_many_records_as_a_layer_has_channels_or_pixels(self) -> None:
        """Shapes that could be taken for rows: 8 records or 2 · 4 rows in sequences of 8; as many rows as channels."""
        for records, companions, net in ((8, 3, conv_net), (4, 3, conv_net), (8, 2, sequences), (2, 3, sequences)):
            model = made(net).double()
            public, some = rows(8, 1, torch.float64), rows(records, 2, torch.float64)
            drawn = draw_companions(keys(records), 8, companions, seed=0, step=0)
            found = clipped_sum(
                companion_model(model, public, companions), cross_entropy,
                Rows((some.inputs, drawn), some.targets), FlatClip(0.5),
            )  # fmt: skip
            norms, sums = loop_over_records(model, public.inputs, some, drawn, FlatClip(0.5))
            assert torch.allclose(found.norms, norms, rtol=1e-8)
            assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found.sums.values(), sums, strict=True))

    def test_the_self_check_of_training_passes(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 4)
        rows_of_step = record_gradients(net, cross_entropy, PRIVATE, FlatClip(1.0)).rows(torch.arange(9), 3)
        verify(net, cross_entropy, rows_of_step, FlatClip(1.0))

    def test_a_network_that_mixes_records_elsewhere_is_still_refused(self) -> None:
        class Centred(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x - x.mean(0)

        net = companion_model(nn.Sequential(Centred(), made(conv_net)), PUBLIC, 4)
        gradients = record_gradients(net, cross_entropy, PRIVATE, FlatClip(1.0))
        with pytest.raises(Refused, match="records interact"):
            verify(net, cross_entropy, gradients.rows(torch.arange(9), 0), FlatClip(1.0))

    def test_a_record_that_is_not_finite_is_dropped_alone(self) -> None:
        inputs = PRIVATE.inputs.clone()
        inputs[3] = float("nan")
        net = companion_model(made(conv_net), PUBLIC, 4)
        whole = record_gradients(net, cross_entropy, (inputs, PRIVATE.targets), FlatClip(1.0))(batch(range(8)))
        rest = record_gradients(net, cross_entropy, PRIVATE, FlatClip(1.0))(batch([0, 1, 2, 4, 5, 6, 7]))
        assert whole.dropped == 1
        assert all(torch.allclose(whole.sums[k], rest.sums[k], atol=1e-6) for k in whole.sums)

    def test_ordinary_batchnorm_is_refused_as_ever(self) -> None:
        with pytest.raises(Refused, match="BatchNorm in training mode"):
            record_gradients(made(conv_net).train(), cross_entropy, PRIVATE, FlatClip(1.0))(batch(range(4)))

    def test_views_and_past_iterates_come_on_top(self) -> None:
        """Each view has companions of its own, every iterate the same ones; the record's sum is clipped once."""
        net = companion_model(made(conv_net), PUBLIC, 3)
        views = Augmentation(views=3, crop=1)
        gradients = record_gradients(net, cross_entropy, PRIVATE, FlatClip(1.0), views=views)
        some = gradients.rows(torch.tensor([5, 9]), 1)
        assert some.inputs[1].shape == (6, 3)
        verify(net, cross_entropy, some, FlatClip(1.0), iterates=[({}, 1.0), (dict(net.named_parameters()), 0.5)])


def batch(indices: Any, step: int = 0) -> LogicalBatch:
    return LogicalBatch(step, torch.tensor(list(indices), dtype=torch.int64), 512)


class TestCompanions:
    @given(st.integers(2, 30), st.data(), st.integers(0, 2**31), st.integers(0, 10**6))
    @settings(max_examples=30, deadline=None)
    def test_each_row_has_different_public_rows(self, public: int, data: Any, seed: int, step: int) -> None:
        count = data.draw(st.integers(1, public))
        drawn = draw_companions(keys(20), public, count, seed=seed, step=step)
        assert drawn.shape == (20, count)
        assert int(drawn.min()) >= 0
        assert int(drawn.max()) < public
        assert all(len(one.unique()) == count for one in drawn)

    def test_they_depend_on_seed_step_and_content_and_on_nobody_else(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 4)

        def of(indices: list[int], seed: int = 1, step: int = 2, data: Split = PRIVATE) -> Tensor:
            gradients = record_gradients(net, cross_entropy, data, FlatClip(1.0), seed=seed)
            drawn: Tensor = gradients.rows(torch.tensor(indices), step).inputs[1]
            return drawn

        alone, among = of([7]), of([3, 7, 30])
        assert torch.equal(alone[0], among[1])
        assert not torch.equal(among[0], among[1])
        assert not torch.equal(alone, of([7], seed=2))
        assert not torch.equal(alone, of([7], step=3))
        without_the_first = Split(PRIVATE.inputs[1:], PRIVATE.targets[1:])
        assert torch.equal(alone, of([6], data=without_the_first))

    def test_every_public_row_is_drawn_equally_often(self) -> None:
        drawn = draw_companions(keys(20_000), 20, 5, seed=0, step=0)
        share = torch.bincount(drawn.flatten(), minlength=20) / 20_000
        assert torch.allclose(share, torch.full((20,), 0.25), atol=0.02)  # six standard deviations

    def test_all_public_rows_serve_where_no_number_is_given(self) -> None:
        net = companion_model(made(conv_net), PUBLIC)
        assert net.rows_per_record == 13
        drawn = record_gradients(net, cross_entropy, PRIVATE, FlatClip(1.0)).rows(torch.arange(3), 0).inputs[1]
        assert torch.equal(drawn, torch.arange(12).expand(3, 12))

    def test_another_records_presence_changes_nothing_of_this_one(self) -> None:
        """Also its neighbours in the chunk, and its place in the batch."""
        net = companion_model(made(conv_net).double(), rows(12, 1, torch.float64), 4)
        gradients = record_gradients(net, cross_entropy, rows(40, 2, torch.float64), FlatClip(0.3))
        one, others = gradients(batch([7])), gradients(batch([1, 2, 30]))
        together = gradients(batch([1, 2, 7, 30]))
        for name, value in together.sums.items():
            assert torch.allclose(value, one.sums[name] + others.sums[name], atol=1e-12)


class TestModel:
    def test_nothing_is_written_by_a_pass_and_no_running_statistics_exist(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 4)
        before = {k: v.clone() for k, v in net.state_dict().items()}
        record_gradients(net, cross_entropy, PRIVATE, FlatClip(1.0))(batch(range(9)))
        after = net.state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before)
        assert not any("running" in name or "tracked" in name for name in before)
        assert torch.equal(after["public"], PUBLIC.inputs)

    def test_the_given_network_is_left_as_it_is(self) -> None:
        model = made(conv_net)
        before = copy.deepcopy(model.state_dict())
        companion_model(model, PUBLIC, 4)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_a_network_whose_batchnorm_sees_no_rows_in_dimension_0_is_refused(self) -> None:
        class Pixels(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(2)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(x.flatten(2).mT.reshape(-1, 2)).reshape(len(x), -1)

        with pytest.raises(Refused, match="dimension 0"):
            companion_model(nn.Sequential(Pixels(), nn.Linear(128, 3)), PUBLIC, 4)

    @pytest.mark.parametrize("count", [0, 13, -1])
    def test_companions_come_from_the_public_rows(self, count: int) -> None:
        with pytest.raises(InputError, match="between 1 and 12"):
            companion_model(made(conv_net), PUBLIC, count)

    def test_wrong_inputs_are_said(self) -> None:
        with pytest.raises(InputError, match="no BatchNorm"):
            companion_model(nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), PUBLIC, 4)
        with pytest.raises(InputError, match="NaN"):
            companion_model(made(conv_net), Split(PUBLIC.inputs * float("nan"), PUBLIC.targets), 4)
        net = companion_model(made(conv_net), PUBLIC, 4)
        with pytest.raises(InputError, match="predict"):
            net(PRIVATE.inputs)
        with pytest.raises(InputError, match="shape"):
            net(PRIVATE.inputs, torch.zeros(40, 3, dtype=torch.int64))


class TestPredictions:
    def test_a_prediction_is_a_function_of_the_input_and_the_seed(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 4)
        whole = predict(net, PRIVATE.inputs, draws=5)
        assert torch.equal(whole, predict(net, PRIVATE.inputs, draws=5))
        alone = torch.cat([predict(net, x[None], draws=5) for x in PRIVATE.inputs[:8]])
        assert torch.equal(whole[:8], alone)
        assert len(predict(net, PRIVATE.inputs[:0])) == 0

    def test_it_is_the_majority_of_what_torchs_batchnorm_says_in_each_draw(self) -> None:
        model = made(conv_net)
        net = companion_model(model, PUBLIC, 4)
        model.train()
        votes = []
        for k in range(5):
            others = draw_companions(keys(5), 12, 4, seed=0, step=-1)[k]
            with torch.no_grad():
                stacks = [model(torch.cat([x[None], PUBLIC.inputs[others]]))[0] for x in PRIVATE.inputs]
            votes.append(torch.stack(stacks).argmax(1))
        assert torch.equal(predict(net, PRIVATE.inputs, draws=5), torch.stack(votes).mode(0).values)

    def test_the_more_probable_of_equally_many_votes_wins(self) -> None:
        outputs = torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.0, 4.0]]])
        assert majority(outputs).tolist() == [2]
        assert majority(outputs[:1]).tolist() == [1]

    def test_modes_are_put_back_between_the_chunks(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 4).train()
        for _, outputs in draws_of(net, PRIVATE.inputs, draws=1):
            assert net.training
            assert torch.is_grad_enabled()
            assert not outputs.requires_grad
        with pytest.raises(InputError, match="draws = 0"):
            predict(net, PRIVATE.inputs, draws=0)


def declared(public: Split | None = PUBLIC, **changes: Any) -> Plan:
    options: dict[str, Any] = {
        "noise_multiplier": 1.0, "delta": 1e-5, "records": 40, "expected_batch": 10, "steps": 3, "insecure_seed": 1,
        "public": None if public is None else PublicSet.of(public, "made up for a test"),
    }  # fmt: skip
    return Plan.dpsgd(**options | changes)


class TestTraining:
    def test_it_trains_and_epsilon_is_that_of_dpsgd(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 4)
        plan = declared(steps=8)
        before = copy.deepcopy(net.state_dict())
        result = train(net, cross_entropy, PRIVATE, plan, lr=0.5)
        assert result.guarantee is not None
        assert result.guarantee.epsilon == declared(steps=8, public=None).guarantee().epsilon
        assert "12 rows are public" in str(result.guarantee)
        changed = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
        assert changed == {name for name, _ in net.named_parameters()}

    def test_a_run_that_was_left_half_way_ends_with_the_same_weights(self, tmp_path: Path) -> None:
        plan, settings = declared(steps=4), Settings(checkpoint_every=2, eval_every=3)
        whole = companion_model(made(conv_net), PUBLIC, 4)
        train(whole, cross_entropy, PRIVATE, plan, lr=0.5, settings=settings)

        def stops(row: object) -> None:
            raise KeyboardInterrupt

        half = companion_model(made(conv_net), PUBLIC, 4)
        with pytest.raises(KeyboardInterrupt):
            train(half, cross_entropy, PRIVATE, plan, lr=0.5, settings=settings, out=tmp_path, callbacks=[stops])
        again = companion_model(made(conv_net, seed=9), PUBLIC, 4)
        train(again, cross_entropy, PRIVATE, plan, lr=0.5, settings=settings, out=tmp_path, resume=True)
        wanted = whole.state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())

    def test_companions_that_the_plan_does_not_declare_are_refused(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 4)
        with pytest.raises(Refused, match="does not declare as public"):
            train(net, cross_entropy, PRIVATE, declared(public=None), lr=0.1)
        with pytest.raises(InputError, match="the given rows are different"):
            train(net, cross_entropy, PRIVATE, declared(rows(12, 9)), lr=0.1)

    def test_a_loop_of_ones_own_is_checked_too(self) -> None:
        net, plan = companion_model(made(conv_net), PUBLIC, 4), declared(public=None)
        gradients = record_gradients(net, cross_entropy, PRIVATE, plan.clipping)
        with (
            Ledger.open(None, plan.to_dict()) as ledger,
            pytest.raises(Refused, match="does not declare as public"),
        ):
            next(private_steps(plan, gradients, records=40, source=plan.source(), ledger=ledger))

    def test_a_private_row_among_the_companions_is_found(self) -> None:
        mixed = Split(torch.cat([PUBLIC.inputs, PRIVATE.inputs[17:18]]), torch.cat([PUBLIC.targets, torch.tensor([0])]))
        net = companion_model(made(conv_net), mixed, 4)
        with pytest.raises(InputError, match="same content as public rows"):
            train(net, cross_entropy, PRIVATE, declared(mixed), lr=0.1)

    def test_other_methods_are_refused(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 4)
        mixing = modelmix.plan(
            noise_multiplier=1.0, delta=1e-5, records=40, expected_batch=10, steps=3,
            clipping=FlatClip(1.0), lr=Schedule.from_dict(0.1), tau_over_lr=Schedule.from_dict(1.0),
        )  # fmt: skip
        with pytest.raises(Refused, match="not by that of modelmix"):
            train(net, cross_entropy, PRIVATE, mixing)

    def test_inner_momentum_and_augmentation_of_the_plan_are_carried_out(self) -> None:
        net = companion_model(made(conv_net), PUBLIC, 3)
        plan = declared(inner=InnerMomentum(1, 0.5), augmentation=Augmentation(views=2, flip=True))
        assert isinstance(train(net, cross_entropy, PRIVATE, plan, lr=0.1).model, CompanionNet)


def test_instruments_and_advice_see_each_row_with_its_companions() -> None:
    net, clipping = companion_model(made(conv_net), PUBLIC, 4), FlatClip(1.0)
    found = measure(net, cross_entropy, PRIVATE, clipping, public="made up")
    norms = record_gradients(net, cross_entropy, PRIVATE, clipping)(batch(range(40))).norms
    assert found.norm_quantiles["0.5"] == pytest.approx(float(norms.double().quantile(0.5)), rel=1e-4)
    vectors = noise_vectors(net, cross_entropy, PRIVATE, 40, public="made up")
    assert float(vectors.square().sum(1).mean()) == pytest.approx(found.sampling_noise, rel=1e-3)
    assert advise_clipping(net, cross_entropy, PRIVATE, clipping).noise_std ** 2 == pytest.approx(
        found.sampling_noise, rel=1e-3
    )
    rehearsed = trial(net, cross_entropy, PRIVATE, declared(), torch.optim.SGD, lr=0.5, steps=5, noisy=False)
    assert rehearsed.after < rehearsed.before
