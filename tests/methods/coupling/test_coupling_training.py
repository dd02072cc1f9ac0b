"""Public rows beside private steps: what they may change, and what they can't."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.audit import audit_plan, check_neighbouring
from sordino.clipping import AutomaticClip, FlatClip, L1Clip
from sordino.data import Split
from sordino.errors import InputError, Refused
from sordino.gradients import Rows
from sordino.methods import coupling
from sordino.methods.coupling import (
    DPMD,
    AdaMix,
    Constant,
    CoupledUpdate,
    Equation5,
    LeastError,
    OnlyPrivate,
    OnlyPublic,
    PublicUse,
    Rule,
    SampleMechanism,
    Theorem31,
    WarmUp,
)
from sordino.methods.coupling.estimates import mean_gradient
from sordino.plan import Plan
from sordino.plan.public import PublicSet, split_public
from sordino.records.gradients import plan_gradients
from sordino.release.ledger import read_ledger
from sordino.training import Settings, train, train_without_noise
from sordino.training.steps import PrivateStep

LOSS = nn.functional.cross_entropy
RULES: list[Rule] = [
    Constant(0.3), OnlyPublic(), OnlyPrivate(), AdaMix(), SampleMechanism(), DPMD(), Equation5(),
    Theorem31(distance=3.0), LeastError(every=2),
]  # fmt: skip


def some(count: int = 300, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % 3
    return Split(nn.functional.one_hot(targets, 6) * 2.0 + torch.randn(count, 6, generator=generator), targets)


PUBLIC, PRIVATE = split_public(some(), records=60, seed=0)


def plan_for(public: Split = PUBLIC, **options: Any) -> Plan:
    defaults: dict[str, Any] = {
        "noise_multiplier": 1.0, "delta": 1e-5, "records": len(PRIVATE), "expected_batch": 40, "steps": 6,
        "clipping": AutomaticClip(1.0, gamma=1.0), "insecure_seed": 3,
    }  # fmt: skip
    return coupling.plan(public=PublicSet.of(public, "made for this test"), **{**defaults, **options})


def linear() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 3))


def fit(plan: Plan, use: PublicUse, **options: Any) -> Any:
    model = options.pop("model", None) or linear()
    return train(model, LOSS, PRIVATE, plan, **{"lr": 0.5, "public": use, **options})


def companion(plan: Plan, public: Split = PUBLIC, model: nn.Module | None = None, **options: Any) -> CoupledUpdate:
    return CoupledUpdate(PublicUse(public, **{"rule": OnlyPrivate(), **options}), plan, model or linear(), LOSS)


def loss_on(model: nn.Module, split: Split) -> float:
    with torch.no_grad():
        return float(LOSS(model(split.inputs), split.targets))


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten().double() for value in gradients.values()])


@pytest.fixture(scope="module")
def epsilon() -> float:
    """That of DP-SGD on the private rows alone."""
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, records=len(PRIVATE), expected_batch=40, steps=6)
    return plan.guarantee().epsilon


class TestTheUpdate:
    def test_it_is_the_weighted_sum_of_the_public_mean_and_the_released_gradient(self) -> None:
        plan, model = plan_for(), linear()
        mine = companion(plan, model=model, rule=Constant(0.3), expected_batch=len(PUBLIC))
        public, _ = mean_gradient(model, LOSS, Rows(PUBLIC.inputs, PUBLIC.targets))
        released = {name: torch.randn_like(value) for name, value in public.items()}
        found = mine.combined(PrivateStep(0, {name: value.clone() for name, value in released.items()}))
        for name, value in found.gradients.items():
            torch.testing.assert_close(value, 0.3 * public[name] + 0.7 * released[name])

    def test_public_batches_are_a_function_of_seed_and_step_and_have_the_size_asked_for(self) -> None:
        first, again = companion(plan_for(), expected_batch=11), companion(plan_for(), expected_batch=11)
        assert torch.equal(first._rows(4, "batch", 11).inputs, again._rows(4, "batch", 11).inputs)
        assert not torch.equal(first._rows(4, "batch", 11).inputs, first._rows(5, "batch", 11).inputs)
        assert companion(plan_for(), expected_batch=1000).batch == len(PUBLIC)
        assert companion(plan_for()).batch == 40

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    def test_any_optimizer_takes_it(self, optimizer: type[torch.optim.Optimizer]) -> None:
        plan, use = plan_for(steps=25, noise_multiplier=2.0), PublicUse(PUBLIC, rule=Constant(0.5))

        def evaluate(model: nn.Module) -> dict[str, float]:
            return {"right": float((model(PRIVATE.inputs).argmax(1) == PRIVATE.targets).float().mean())}

        found = fit(plan, use, optimizer=optimizer, lr=0.3, evaluate=evaluate)
        assert found.metrics[-1]["right"] > 0.75
        assert found.metrics[-1]["alpha"] == 0.5

    def test_only_private_is_dp_sgd_and_only_public_does_not_look_at_private_rows(self) -> None:
        ours = fit(plan_for(), PublicUse(PUBLIC, rule=OnlyPrivate()))
        plain = train(linear(), LOSS, PRIVATE, Plan.dpsgd(
            noise_multiplier=1.0, delta=1e-5, records=len(PRIVATE), expected_batch=40, steps=6,
            clipping=AutomaticClip(1.0, gamma=1.0), insecure_seed=3,
        ), lr=0.5)  # fmt: skip
        torch.testing.assert_close(ours.model.weight, plain.model.weight)
        other = Split(PRIVATE.inputs + 1, PRIVATE.targets)
        use = PublicUse(PUBLIC, rule=OnlyPublic())
        there = train(linear(), LOSS, other, plan_for(), lr=0.5, public=use)
        assert torch.equal(fit(plan_for(), use).model.weight, there.model.weight)

    def test_warm_up_comes_before_the_first_private_step(self) -> None:
        found = companion(plan_for(), warm_up=WarmUp(30, 0.3))
        before = loss_on(found.model, PUBLIC)
        found.begin({}, None)
        assert loss_on(found.model, PUBLIC) < 0.7 * before
        warm = {name: value.clone() for name, value in found.model.state_dict().items()}
        found.begin({"alpha": 0.5, "private_scale": 1.0}, None)  # a resumed run was warmed up before
        assert all(torch.equal(warm[name], value) for name, value in found.model.state_dict().items())

    def test_projection_leaves_what_the_public_gradient_of_the_last_layer_spans(self) -> None:
        model = network()
        mine = companion(plan_for(), model=model, projection=1)
        public = mine.public(0).gradient
        released = PrivateStep(0, {name: torch.randn_like(value) for name, value in public.items()})
        found = mine.combined(released).gradients
        assert int(torch.linalg.matrix_rank(found["3.weight"])) == 1
        assert torch.equal(found["0.weight"], released.gradients["0.weight"])
        span = torch.cat([found["3.weight"], torch.linalg.svd(public["3.weight"]).Vh[:1]])
        assert int(torch.linalg.matrix_rank(span, atol=1e-5)) == 1

    def test_a_threshold_from_public_norms_is_multiplied_back(self) -> None:
        """Clipping at the quantile R = clipping g·C/R at C; with R above every norm nothing is lost."""
        plan = plan_for(
            clipping=FlatClip(0.01), quantile=1.0, divisor=len(PRIVATE), expected_batch=len(PRIVATE), steps=1
        )
        model = linear()
        everything = Split(torch.cat([PUBLIC.inputs * 3, PUBLIC.inputs]), torch.cat([PUBLIC.targets, PUBLIC.targets]))
        plan = replace(plan, public=PublicSet.of(everything, "longer ones too"))
        mine = companion(plan, everything, model, expected_batch=len(everything))
        sums = mine.gradient_sum(PRIVATE)(_batch(range(len(PRIVATE)))).sums
        step = mine.combined(PrivateStep(0, {name: value / len(PRIVATE) for name, value in sums.items()}))
        wanted, _ = mean_gradient(model, LOSS, Rows(PRIVATE.inputs, PRIVATE.targets))
        torch.testing.assert_close(flat(step.gradients), flat(wanted), rtol=1e-3, atol=1e-4)

    def test_centring_is_undone_exactly_where_nothing_is_clipped(self) -> None:
        model = linear()
        plan = plan_for(clipping=FlatClip(100.0), centring=True, expected_batch=len(PRIVATE), steps=1)
        mine = companion(plan, model=model)
        sums = mine.gradient_sum(PRIVATE)(_batch(range(len(PRIVATE)))).sums
        step = mine.combined(PrivateStep(0, {name: value / plan.divisor for name, value in sums.items()}))
        wanted, _ = mean_gradient(model, LOSS, Rows(PRIVATE.inputs, PRIVATE.targets))
        torch.testing.assert_close(flat(step.gradients), flat(wanted), rtol=1e-4, atol=1e-6)

    def test_centred_records_are_clipped_less(self) -> None:
        """Why DOPE-SGD helps: differences from the public gradient are shorter than the gradients."""
        model = linear()
        plain, centred = (
            companion(plan_for(centring=c), model=model).gradient_sum(PRIVATE)(_batch(range(100))).norms.square().mean()
            for c in (False, True)
        )
        assert centred < plain


def _batch(indices: Any, step: int = 0) -> Any:
    from sordino.sampling import LogicalBatch

    return LogicalBatch(step, torch.tensor(list(indices), dtype=torch.int64), 64)


BEFORE_NOISE: list[dict[str, Any]] = [
    {},
    {"centring": True},
    {"quantile": 0.9},
    {"centring": True, "quantile": 0.5},
]


class TestTheGuarantee:
    @pytest.mark.parametrize("options", BEFORE_NOISE, ids=lambda o: "+".join(o) or "plain")
    @pytest.mark.parametrize("clipping", [AutomaticClip(1.0, gamma=1.0), FlatClip(0.3)], ids=lambda c: c.name)
    def test_one_private_row_moves_the_sum_by_the_bound_at_most(self, options: dict[str, Any], clipping: Any) -> None:
        model = network().eval()
        plan = plan_for(clipping=clipping, **options)
        loud = Split(PRIVATE.inputs.clone(), PRIVATE.targets)
        loud.inputs[7] *= 1e4
        sums = companion(plan, model=model, projection=1).gradient_sum(loud)
        for record in (0, 7, 50):
            found = check_neighbouring(plan, sums, record, others=torch.arange(0, 120, 3))
            assert found.difference <= clipping.clip_norm * (1 + 1e-5)
        assert check_neighbouring(plan, sums, 7, others=torch.arange(30)).difference > 0.3 * clipping.clip_norm

    @pytest.mark.parametrize("options", BEFORE_NOISE, ids=lambda o: "+".join(o) or "plain")
    def test_replacing_a_private_row_moves_it_by_twice_that(self, options: dict[str, Any]) -> None:
        model = linear()
        plan = plan_for(relation="replace-one", sampling="without-replacement", **options)
        other = Split(PRIVATE.inputs.clone(), PRIVATE.targets)
        other.inputs[3] = -50 * other.inputs[3]
        mine = companion(plan, model=model)
        check_neighbouring(
            plan, mine.gradient_sum(PRIVATE), 3, others=torch.arange(40), replaced=mine.gradient_sum(other)
        )

    @pytest.mark.parametrize("options", BEFORE_NOISE, ids=lambda o: "+".join(o) or "plain")
    def test_other_public_rows_leave_ledger_and_plan_as_they_are(self, options: dict[str, Any], tmp_path: Path) -> None:
        """But for the digest, by which the plan knows its rows."""
        seen = []
        for number, public in enumerate((PUBLIC, some(60, seed=9))):
            plan = plan_for(public, **options)
            out = tmp_path / str(number)
            result = fit(plan, PublicUse(public, rule=Constant(0.4)), out=out)
            header, entries = read_ledger(out / "ledger.jsonl")
            header = json.loads(json.dumps(header))
            header["public"].pop("digest")
            entries = [{k: v for k, v in dict(entry).items() if k not in ("time", "at")} for entry in entries]
            seen.append((header, entries, result.guarantee.epsilon, plan.noise))
        assert seen[0] == seen[1]

    def test_the_noise_is_the_same_whatever_the_public_rows_are(self) -> None:
        """α = 0 and no companion before the noise: the released gradients do not notice the public rows at all."""
        weights = [
            fit(plan_for(public), PublicUse(public, rule=OnlyPrivate())).model.weight
            for public in (PUBLIC, some(60, seed=9))
        ]
        assert torch.equal(*weights)

    @pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
    def test_epsilon_does_not_depend_on_the_rule(self, rule: Rule, epsilon: float) -> None:
        found = fit(plan_for(), PublicUse(PUBLIC, rule=rule, warm_up=WarmUp(2, 0.1)))
        assert found.guarantee.epsilon == epsilon
        assert 0 <= found.metrics[-1]["alpha"] <= 1

    def test_the_ledger_alone_gives_the_same_epsilon(self, epsilon: float, tmp_path: Path) -> None:
        plan = plan_for(centring=True)
        fit(plan, PublicUse(PUBLIC, rule=Constant(0.9)), out=tmp_path)
        _, entries = read_ledger(tmp_path / "ledger.jsonl")
        assert len(entries) == plan.steps
        assert plan.method.spent(plan, entries, plan.delta).epsilon == pytest.approx(epsilon)

    def test_a_private_row_among_the_public_ones_stops_the_run_before_anything_is_written(self, tmp_path: Path) -> None:
        sneaked = Split(
            torch.cat([PUBLIC.inputs, PRIVATE.inputs[[5]]]), torch.cat([PUBLIC.targets, PRIVATE.targets[[5]]])
        )
        out = tmp_path / "run"
        with pytest.raises(InputError, match="some private rows have the same content as public rows"):
            fit(plan_for(sneaked), PublicUse(sneaked), out=out)
        assert not out.exists()

    def test_it_is_found_in_a_dataset_that_is_read_record_by_record_too(self) -> None:
        rows = list(zip(PRIVATE.inputs, PRIVATE.targets, strict=True))
        sneaked = Split(
            torch.cat([PUBLIC.inputs, PRIVATE.inputs[[5]]]), torch.cat([PUBLIC.targets, PRIVATE.targets[[5]]])
        )
        with pytest.raises(InputError, match="some private rows have the same content"):
            train(linear(), LOSS, rows, plan_for(sneaked), lr=0.1, public=PublicUse(sneaked))

    def test_an_audit_of_centred_sums_does_not_contradict_the_claim_and_finds_missing_noise(self) -> None:
        plan = plan_for(centring=True, noise_multiplier=4.0, expected_batch=120, steps=12)
        model = nn.Linear(6, 60)
        use = PublicUse(PUBLIC, rule=OnlyPrivate())
        honest, broken = (
            audit_plan(plan, model, LOSS, PRIVATE, canaries=200, seed=0, public=use, noise_scale=scale)
            for scale in (1.0, 0.05)
        )
        assert honest.holds
        assert not broken.holds

    def test_the_guarantee_says_which_rows_it_does_not_protect(self) -> None:
        sentence = str(plan_for(centring=True, quantile=0.9).guarantee())
        for part in ("60 rows are public", "made for this test", "subtracted from every record's", "0.9 quantile"):
            assert part in sentence


class TestWhatIsRefused:
    def test_rows_that_the_plan_does_not_declare(self) -> None:
        with pytest.raises(InputError, match="the given rows are different"):
            fit(plan_for(), PublicUse(some(60, seed=9)))

    def test_a_coupling_plan_without_rows_and_rows_without_a_coupling_plan(self) -> None:
        with pytest.raises(Refused, match="also trains on public rows"):
            train(linear(), LOSS, PRIVATE, plan_for(), lr=1.0)
        plain = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, records=len(PRIVATE), expected_batch=40, steps=6)
        with pytest.raises(Refused, match="plans of the method coupling"):
            fit(plain, PublicUse(PUBLIC))
        with pytest.raises(Refused, match="plans of the method coupling"):
            fit(replace(plan_for(), public=None), PublicUse(PUBLIC))

    def test_the_least_error_of_centred_gradients(self) -> None:
        with pytest.raises(Refused, match="not centred"):
            fit(plan_for(centring=True), PublicUse(PUBLIC, rule=LeastError()))

    def test_a_plan_with_centred_sums_is_not_carried_out_by_plain_ones(self) -> None:
        with pytest.raises(Refused, match="centred or scaled"):
            plan_gradients(plan_for(centring=True), linear(), LOSS, PRIVATE)

    def test_thresholds_of_l2_norms_for_l1_clipping(self) -> None:
        with pytest.raises(Refused, match="quantile is one of l2 norms"):
            plan_for(clipping=L1Clip(1.0), quantile=0.9)

    @pytest.mark.parametrize("wrong", [{"quantile": 1.5}, {"quantile": 0.0}, {"centring": 1}])
    def test_options_outside_their_range(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InputError):
            plan_for(**wrong)

    def test_public_gradients_that_are_not_finite(self) -> None:
        bad = Split(PUBLIC.inputs.clone(), PUBLIC.targets)
        bad.inputs[0] = torch.inf
        with pytest.raises(InputError, match="gradient of the public rows is not finite"):
            fit(plan_for(bad), PublicUse(bad, rule=Constant(0.5), expected_batch=60))

    def test_projection_without_a_linear_layer(self) -> None:
        with pytest.raises(InputError, match="trainable linear layer"):
            companion(plan_for(), model=nn.Conv1d(1, 1, 1), projection=1)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    ("rule", "options"),
    [(LeastError(every=4), {}), (Equation5(), {"quantile": 0.8, "centring": True})],
    ids=["mse", "equation-5"],
)
def test_a_run_that_was_cut_short_ends_with_the_same_weights(
    rule: Rule, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_for(steps=14, **options)
    use = PublicUse(PUBLIC, rule=rule, warm_up=WarmUp(3, 0.1), expected_batch=20)

    def attempt(stop: int, out: Path | None) -> Any:
        left = stop

        def evaluate(model: nn.Module) -> dict[str, float]:
            nonlocal left
            left -= 1
            if left < 0:
                raise Interrupted
            return {}

        settings = Settings(eval_every=1, checkpoint_every=3)
        return fit(plan, use, model=network(), settings=settings, evaluate=evaluate, out=out, resume=out is not None)

    whole = attempt(99, None)
    for stop in (1, 5, 3):  # before the first checkpoint, and between two
        with pytest.raises(Interrupted):
            attempt(stop, tmp_path / "run")
    found = attempt(99, tmp_path / "run")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, found.model.state_dict()[name])
    assert found.metrics[-1]["alpha"] == whole.metrics[-1]["alpha"]


def test_the_yardstick_without_noise_uses_the_public_rows_too() -> None:
    plan, use = plan_for(noise_multiplier=50.0), PublicUse(PUBLIC, rule=Constant(0.5))
    found = train_without_noise(linear(), LOSS, PRIVATE, plan, lr=0.5, public=use)
    assert found.metrics[-1]["alpha"] == 0.5
    assert loss_on(found.model, PRIVATE) < 0.9
