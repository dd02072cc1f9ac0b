"""ModelMix as a plan and as a training: what is accounted is what is run, and the rest is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from small_recipes import small_toml
from sordino.cli import main
from sordino.clipping import FlatClip, L1Clip, L2LinfClip
from sordino.errors import InputError, Refused
from sordino.methods import modelmix
from sordino.methods.modelmix import ModelMix, averaging_control
from sordino.methods.modelmix.widths import mixing_widths
from sordino.plan import Plan, Statistic
from sordino.plan.spent import from_ledger
from sordino.records.gradients import record_gradients
from sordino.release.ledger import Ledger, read_ledger
from sordino.schedule import Schedule, pieces
from sordino.training import Settings, train, train_without_noise
from sordino.training.steps import private_steps
from sordino.training.updates import Averaging, AveragingSGD

Records = tuple[Tensor, Tensor]


def mix_plan(**changes: Any) -> Plan:
    options: dict[str, Any] = {
        "noise_multiplier": 2.0, "tau_over_lr": 0.2, "lr": 0.5, "delta": 1e-5, "records": 200, "expected_batch": 40,
        "steps": 12, "insecure_seed": 3,
    }  # fmt: skip
    return modelmix.plan(**options | changes)


class TestUpdate:
    @settings(deadline=None, max_examples=100)
    @given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0.01, 2), st.floats(0, 1))
    def test_algorithm_1_is_the_mean_of_the_iterates_and_a_uniform_as_wide_as_the_enforced_gap(
        self, last: float, before: float, tau: float, a: float
    ) -> None:
        gap, mean = last - before, (last + before) / 2
        side = 1.0 if gap >= 0 else -1.0
        if abs(gap) < tau:  # steps 6-8 of Algorithm 1
            last, before = mean + side * tau / 2, mean - side * tau / 2
        printed = a * last + (1 - a) * before
        assert printed == pytest.approx(mean + side * max(abs(gap), tau) * (a - 0.5), abs=1e-9)

    def test_the_width_at_the_door_is_the_gap_in_units_of_the_summed_gradient_never_below_tau(self) -> None:
        plan, model = mix_plan(lr=0.5, tau_over_lr=0.2), nn.Linear(2, 1, bias=False).double()
        optimizer = AveragingSGD(model.parameters(), lr=0.5)
        widths = mixing_widths(plan, model, optimizer)
        least = 0.2 * 40 * (1 + 2**-10)
        assert widths(0)["weight"].flatten().tolist() == [least, least], "no gap yet: τ/η everywhere"
        model.weight.grad = torch.tensor([[0.01, 3.0]], dtype=torch.float64)
        optimizer.step()
        assert widths(1)["weight"].flatten().tolist() == pytest.approx([least, 3.0 * 40])

    def test_one_step_has_gaussian_and_uniform_noise_together_on_every_coordinate(self) -> None:
        model = nn.Linear(1, 20_000, bias=False)
        before = model.weight.detach().clone()
        plan = mix_plan(steps=1, tau_over_lr=0.5, lr=2.0, noise_multiplier=1.0, records=10, expected_batch=10)

        def nothing(outputs: Tensor, targets: Tensor) -> Tensor:
            return 0.0 * outputs.sum(1)

        train(model, nothing, (torch.ones(10, 1), torch.zeros(10)), plan)
        noise = ((before - model.weight.detach()) / 2.0 * 10).flatten().double().numpy()
        margin = 1 + 2**-10
        sigma, width = margin, 0.5 * 10 * margin

        def cdf(x: np.ndarray) -> np.ndarray:
            upper, lower = (x + width / 2) / sigma, (x - width / 2) / sigma
            total = [z * stats.norm.cdf(z) + stats.norm.pdf(z) for z in (upper, lower)]
            return np.asarray((total[0] - total[1]) * sigma / width)

        assert stats.kstest(noise, cdf).pvalue > 1e-3
        assert stats.kstest(noise / noise.std(), "norm").pvalue < 1e-6, "a Gaussian it is not"


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sampling": "partition", "relation": "replace-one"}, "Poisson"),
            ({"sampling": "without-replacement", "relation": "replace-one"}, "Poisson"),
            ({"relation": "replace-one"}, "adding or removing"),
            ({"clipping": L2LinfClip(1.0, 0.5)}, "p ≥ 1"),
            ({"tau_over_lr": Schedule("listed", (0.1, 0.2))}, "lists 2 values"),
            ({"epsilon": 2.0}, "give two of"),
            ({"tau_over_lr": None}, "give two of"),
        ],
    )
    def test_what_the_proof_does_not_cover(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            mix_plan(**changes)

    @pytest.mark.parametrize(
        "options",
        [
            {"lr": 0.5},
            {"optimizer": torch.optim.Adam},
            {"optimizer": torch.optim.SGD},
            {"settings": Settings(optimizer_options={"momentum": 0.9})},
            {"settings": Settings(optimizer_options={"weight_decay": 0.1})},
            {"settings": Settings(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 10))},
        ],
    )
    def test_momentum_adam_weight_decay_and_step_sizes_of_the_callers(
        self, options: dict[str, Any], records: Records, linear: nn.Module, tmp_path: Path
    ) -> None:
        out = tmp_path / "run"
        with pytest.raises(Refused, match="plan contains it"):
            train(linear, nn.functional.cross_entropy, records, mix_plan(), out=out, **options)
        assert not out.exists()

    def test_steps_without_the_uniform_noise_that_is_accounted_for(self, records: Records, linear: nn.Module) -> None:
        plan = mix_plan()
        sums = record_gradients(linear, nn.functional.cross_entropy, records, plan.clipping)
        with Ledger.open(None, plan.to_dict()) as ledger:
            options: dict[str, Any] = {"records": 200, "source": plan.source(), "ledger": ledger}
            with pytest.raises(Refused, match="needs uniform noise"):
                next(private_steps(plan, sums, **options))
            optimizer = AveragingSGD(linear.parameters(), lr=0.5)
            right = mixing_widths(plan, linear, optimizer)

            def gap_not_enforced(step: int) -> dict[str, Tensor]:
                return {name: torch.zeros_like(value) for name, value in right(step).items()}

            def too_narrow(step: int) -> dict[str, Tensor]:
                return {name: value * 0.999 for name, value in right(step).items()}

            for wrong in (gap_not_enforced, too_narrow):
                with pytest.raises(Refused, match="gap between the iterates was not enforced"):
                    next(private_steps(plan, sums, widths=wrong, **options))
            assert ledger.last_step("gradient") == -1, "nothing was released"
            next(private_steps(plan, sums, widths=right, **options))

    def test_uniform_noise_that_nobody_accounts_for(self, records: Records, linear: nn.Module) -> None:
        plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, records=200, expected_batch=40, steps=3, insecure_seed=1)
        sums = record_gradients(linear, nn.functional.cross_entropy, records, plan.clipping)
        with Ledger.open(None, plan.to_dict()) as ledger, pytest.raises(Refused, match="leave out `widths`"):
            next(private_steps(plan, sums, records=200, source=plan.source(), ledger=ledger, widths=lambda step: {}))
        with pytest.raises(InputError, match="does not mix"):
            mixing_widths(plan, linear, AveragingSGD(linear.parameters(), lr=0.5))

    def test_dpsgd_still_needs_a_step_size(self, records: Records, linear: nn.Module) -> None:
        plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, records=200, expected_batch=40, steps=3)
        with pytest.raises(InputError, match="lr"):
            train(linear, nn.functional.cross_entropy, records, plan)


class TestTraining:
    def test_it_learns_and_every_trainable_coordinate_is_mixed(self, records: Records, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        model[0].bias.requires_grad_(False)
        plan = mix_plan(lr=2.0, noise_multiplier=0.5, tau_over_lr=0.01, steps=40)

        def accuracy(model: nn.Module) -> dict[str, float]:
            return {"accuracy": float((model(records[0]).argmax(1) == records[1]).float().mean())}

        result = train(
            model, nn.functional.cross_entropy, records, plan, out=tmp_path,
            settings=Settings(averaging=Averaging("ema")), evaluate=accuracy,
        )  # fmt: skip
        assert result.metrics[-1]["accuracy"] > 0.6
        _, entries = read_ledger(tmp_path / "ledger.jsonl")
        assert {entry["coordinates"] for entry in entries} == {6 * 4 + 4 * 3 + 3}
        assert all(entry["least_width"] >= 0.01 * 40 for entry in entries)
        assert result.guarantee is not None
        assert set(result.guarantee.beside) == {"equal_variance_epsilon", "epsilon_classic"}

    def test_step_sizes_are_the_plan_s(self, records: Records, linear: nn.Module) -> None:
        plan = mix_plan(lr=pieces((0, 0.5), (0.5, 0.125)))
        result = train(linear, nn.functional.cross_entropy, records, plan, settings=Settings(eval_every=3))
        assert [row["lr"] for row in result.metrics] == [0.5, 0.5, 0.125, 0.125]

    def test_without_noise_it_is_plain_averaging(self, records: Records, linear: nn.Module) -> None:
        result = train_without_noise(linear, nn.functional.cross_entropy, records, mix_plan(lr=2.0, steps=30))
        assert result.guarantee is None

    @pytest.mark.parametrize("seed", [3, None])
    def test_interrupted_and_resumed(self, seed: int | None, records: Records, tmp_path: Path) -> None:
        plan = mix_plan(insecure_seed=seed, lr=pieces((0, 0.5), (0.5, 0.125)))
        left = 8

        def evaluate(model: nn.Module) -> dict[str, float]:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return {}

        def run(**options: Any) -> nn.Module:
            torch.manual_seed(0)
            chosen = Settings(checkpoint_every=5, eval_every=1)
            return train(
                nn.Linear(6, 3), nn.functional.cross_entropy, records, plan, settings=chosen, **options
            ).model  # fmt: skip

        with pytest.raises(KeyboardInterrupt):
            run(out=tmp_path, evaluate=evaluate)
        resumed = run(out=tmp_path, resume=True)
        _, entries = read_ledger(tmp_path / "ledger.jsonl")
        assert [entry["step"] for entry in entries] == list(range(12)), "each step released once"
        if seed is not None:
            whole = run()
            assert torch.equal(resumed.weight, whole.weight)  # type: ignore[arg-type]


class TestPlan:
    def test_it_survives_json_and_says_its_control_beside_its_epsilon(self) -> None:
        plan = mix_plan(tau_over_lr=pieces((0, 0.2), (0.5, 0.1)), noise_factors=Schedule("linear", (1.0, 2.0)))
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert "equal variance epsilon" in str(plan.guarantee())
        assert plan.noise_at(11).noise_multiplier == pytest.approx(4.0)

    def test_two_of_epsilon_noise_and_tau_give_the_third(self) -> None:
        by_noise = mix_plan(epsilon=1.0, noise_multiplier=None)
        by_tau = mix_plan(epsilon=1.0, noise_multiplier=by_noise.noise.noise_multiplier, tau_over_lr=None)
        listed = mix_plan(epsilon=1.0, noise_multiplier=None, tau_over_lr=pieces((0, 0.2), (0.5, 0.2000001)))
        for plan in (by_noise, by_tau, listed):
            assert 0.998 <= plan.guarantee().epsilon <= 1.0
        assert isinstance(by_tau.method, ModelMix)
        assert by_tau.method.tau_over_lr.over(12)[0] == pytest.approx(0.2, rel=0.02)
        assert listed.noise.noise_multiplier == pytest.approx(by_noise.noise.noise_multiplier, rel=1e-3)

    def test_more_tau_noise_or_truncation_never_costs_more(self) -> None:
        base = mix_plan(clipping=FlatClip(1.0)).guarantee().epsilon
        for changes in ({"tau_over_lr": 0.4}, {"noise_multiplier": 3.0}, {"clipping": L2LinfClip(1.0, 16)}):
            assert mix_plan(**changes).guarantee().epsilon <= base
        assert mix_plan(steps=24).guarantee().epsilon > base

    def test_without_uniform_noise_it_is_dpsgd(self) -> None:
        plain = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, records=200, expected_batch=40, steps=12)
        assert mix_plan(tau_over_lr=1e-6).guarantee().epsilon == pytest.approx(plain.guarantee().epsilon, rel=1e-3)

    def test_epsilon_grows_along_the_run_and_ends_at_the_guarantee(self) -> None:
        plan = mix_plan(statistics=(Statistic("statistics", 10.0),))
        curve = plan.method.epsilons(plan, [0, 3, 12])
        assert curve == sorted(curve)
        assert 0 < curve[0] < curve[1]
        assert curve[-1] == pytest.approx(plan.guarantee().epsilon, rel=1e-3)

    def test_laplace_noise_goes_with_l1_clipping(self) -> None:
        plan = mix_plan(clipping=L1Clip(1.0))
        assert plan.noise.name == "laplace"
        assert plan.guarantee().epsilon > 0

    def test_the_control_has_equal_variance_and_the_epsilon_that_is_printed_beside(self) -> None:
        plan = mix_plan()
        control = averaging_control(plan)
        assert control.noise.noise_multiplier == pytest.approx((2.0**2 + (0.2 * 40) ** 2 / 12) ** 0.5)
        beside = plan.guarantee().beside["equal_variance_epsilon"]
        assert control.guarantee().epsilon == pytest.approx(beside, rel=1e-3)
        assert beside < plan.guarantee().epsilon
        with pytest.raises(InputError, match="constant"):
            averaging_control(mix_plan(tau_over_lr=pieces((0, 0.2), (0.5, 0.1))))
        with pytest.raises(InputError, match="is for a ModelMix plan"):
            averaging_control(control)


class TestLedger:
    def spent(self, plan: Plan, entries: list[dict[str, Any]]) -> float:
        return float(from_ledger(json.loads(json.dumps(plan.to_dict())), entries, plan.delta)["epsilon"])

    def entries(self, plan: Plan, steps: int) -> list[dict[str, Any]]:
        assert isinstance(plan.method, ModelMix)
        return [
            {
                "kind": "release", "purpose": "gradient", "step": step, "mechanism": "gaussian",
                "noise_multiplier": plan.noise_at(step).noise_multiplier, "sampling": plan.sampling.to_dict(),
                "relation": "add-remove", "least_width": plan.method.least_width(plan, step),
            }
            for step in range(steps)
        ]  # fmt: skip

    def test_a_ledger_costs_what_its_steps_cost(self) -> None:
        plan = mix_plan(tau_over_lr=pieces((0, 0.2), (0.5, 0.1)))
        assert self.spent(plan, []) == 0.0
        assert self.spent(plan, self.entries(plan, 12)) == pytest.approx(plan.guarantee().epsilon)
        half = replace(mix_plan(), steps=6)
        assert self.spent(plan, self.entries(plan, 6)) == pytest.approx(half.guarantee().epsilon)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"least_width": 1.0}, "gap was not enforced"),
            ({"least_width": None}, "least_width"),
            ({"noise_multiplier": 1.0}, "noise_multiplier"),
            ({"sampling": {"name": "poisson", "sampling_rate": 0.5}}, "sampling"),
            ({"step": 12}, "12 steps"),
            ({"purpose": "statistics"}, "explains"),
        ],
    )
    def test_an_entry_that_the_plan_does_not_explain_is_an_error(self, changes: dict[str, Any], message: str) -> None:
        plan = mix_plan()
        entries = self.entries(plan, 3)
        entries[1] |= changes
        with pytest.raises(InputError, match=message):
            self.spent(plan, entries)


RECIPE = small_toml(
    run={"name": "mixed"},
    privacy={"epsilon": 3.0, "noise_multiplier": None},
    sampling={"expected_batch": 300},
    method={"name": "modelmix", "lr": 0.5, "tau_over_lr": {"kind": "pieces", "values": [[0, 0.002], [0.5, 0.001]]}},
    train={"steps": 6, "eval_every": 3, "lr": None},
)


class TestRecipe:
    @pytest.fixture
    def recipe(self, tmp_path: Path) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(RECIPE)
        return path

    def test_a_run_shows_the_control_beside_its_epsilon(
        self, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["train", str(recipe), "--out", str(tmp_path / "run"), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["method"] == "modelmix"
        assert result["epsilon"] <= 3.0
        assert 0 < result["equal_variance_epsilon"] < result["epsilon"]
        page = (tmp_path / "run" / "report.html").read_text()
        assert "equal variance epsilon" in page
        assert "The ledger agrees with the plan" in page
        assert main(["train", str(recipe), "--out", str(tmp_path / "run"), "--resume"]) == 0
        assert "equal variance" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("method.tau_over_rl=1", "did you mean 'tau_over_lr'"),
            ("train.lr=1", "plan"),
            ("train.momentum=0.9", "momentum"),
            ("train.optimizer=adam", "optimizer"),
            ("train.scheduler=cosine", "scheduler"),
            ("train.weight_decay=0.1", "weight_decay"),
            ("train.stepz=3", "did you mean 'steps'"),
            ("sampling.name=partition", "Poisson"),
            ("method.name=modelmixx", "did you mean 'modelmix'"),
            ("method.name=dpsgd", "unknown key in [method] of dpsgd"),
        ],
    )
    def test_what_is_not_covered_or_not_known_is_said_before_anything_is_written(
        self, override: str, message: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        assert main(["train", str(recipe), "--out", str(out), "--set", override]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
