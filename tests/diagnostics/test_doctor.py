"""The doctor on problems that were made ill on purpose: the advice must name the illness, and its cure must work."""

from __future__ import annotations

import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from small_recipes import small_toml
from sordino.cli import main
from sordino.clipping import Clipping, FlatClip, NormalisedClip
from sordino.diagnostics.doctor import Diagnosis, diagnose
from sordino.diagnostics.instruments import measure
from sordino.diagnostics.instruments.signal import noise_length, signal_of
from sordino.diagnostics.instruments.trial import trial
from sordino.errors import InputError, Refused
from sordino.plan import Plan

Records = tuple[Tensor, Tensor]
cross_entropy = nn.functional.cross_entropy


def plan(clipping: Clipping | None = None, noise: float = 0.5, batch: float = 100, **options: Any) -> Plan:
    given = {"delta": 1e-5, "records": 2000, "steps": 200, "noise_multiplier": noise, **options}
    return Plan.dpsgd(**given, expected_batch=batch, clipping=clipping or FlatClip(1.0))


def fresh() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3)


def examined(records: Records, made: Plan, lr: float = 0.5, **options: Any) -> Diagnosis:
    return diagnose(fresh(), cross_entropy, records, made, lr=lr, steps=5, public="made up", **options)


def test_a_sound_plan_is_told_that_it_is_fine(records: Records) -> None:
    found = examined(records, plan())
    assert {one.topic: one.verdict for one in found.findings} == {
        "bias": "fine", "clip_norm": "fine", "batch": "fine", "lr": "fine",
    }  # fmt: skip
    assert json.dumps(found.to_dict())
    assert all(one.theorem for one in found.findings)


def test_a_threshold_far_above_the_norms_is_to_be_lowered_and_that_helps(records: Records) -> None:
    made = plan(FlatClip(500.0))
    found = examined(records, made).finding("clip_norm")
    assert found.verdict == "lower"
    assert found.value is not None
    assert found.value < 25
    assert "clips 0% of the rows" in found.sentence
    model, rows = fresh(), records
    parameters = sum(p.numel() for p in model.parameters())
    signals = [
        signal_of(measure(model, cross_entropy, rows, one.clipping, public="made up"), one, parameters)
        for one in (made, plan(FlatClip(found.value)))
    ]
    assert signals[1].alignment > 10 * signals[0].alignment


class Point(nn.Module):
    """f(w, x) = ‖w − x‖²/2."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w[None] - x).square().sum(1) / 2


def outputs(values: Tensor, targets: Tensor) -> Tensor:
    return values


SKEWED = (torch.tensor([[-20.0], [-10.0], [90.0]]).repeat(20, 1), torch.zeros(60))  # Xiao et al. 2022, Ex. 3.1


def test_a_threshold_that_turns_the_gradient_is_to_be_raised_where_there_is_little_noise() -> None:
    found = diagnose(Point(), outputs, SKEWED, plan(FlatClip(1.0), noise=0.4), lr=0.1, steps=5, public="made up")
    assert found.finding("bias").verdict == "watch"
    assert "changes the gradient's direction" in found.finding("bias").sentence
    clip = found.finding("clip_norm")
    assert clip.verdict == "raise"
    assert clip.value is not None
    turned = measure(Point(), outputs, SKEWED, FlatClip(1.0), public="made up").cosine
    cured = measure(Point(), outputs, SKEWED, FlatClip(clip.value), public="made up").cosine
    assert turned is not None
    assert cured is not None
    assert turned < 0 < cured


def test_a_tiny_threshold_under_heavy_noise_is_not_the_illness_but_the_noise_and_the_step_are(
    records: Records,
) -> None:
    """Below all norms c scales gradient and noise alike; what is wrong is the noise of the run, and lr·c."""
    found = examined(records, plan(FlatClip(1e-6), noise=100.0))
    assert found.finding("clip_norm").verdict == "fine"
    assert "only lr·c matters" in found.finding("clip_norm").sentence
    assert found.finding("batch").verdict == "raise"
    assert "noise dominates" in found.finding("batch").sentence


def test_a_tiny_threshold_without_much_noise_makes_steps_that_lead_nowhere(records: Records) -> None:
    found = examined(records, plan(FlatClip(1e-6))).finding("lr")
    assert found.verdict == "raise"
    assert found.value == 2.0


def test_a_batch_too_small_for_its_noise_is_to_be_raised_to_one_that_is_not(records: Records) -> None:
    small = cache(partial(plan, noise=None, epsilon=3.0, steps=4, accountant="rdp"))
    made = small(batch=2)
    found = examined(records, made, larger=lambda batch: small(batch=batch)).finding("batch")
    assert found.verdict == "raise"
    assert found.value is not None
    assert found.value > 2
    cured = small(batch=found.value)
    assert noise_length(cured, 21) < noise_length(made, 21) / 1.5
    again = examined(records, cured).finding("batch")
    assert again.verdict == "fine", "the batch that it names is enough"


def test_noise_that_no_batch_cures_is_said_to_be(records: Records) -> None:
    made = plan(noise=2000.0)
    found = examined(records, made, larger=lambda batch: plan(noise=2000.0, batch=batch)).finding("batch")
    assert (found.verdict, found.value) == ("raise", None)
    assert "a larger batch alone does not change that" in found.sentence


def test_a_step_that_is_too_large_even_without_noise(records: Records) -> None:
    found = examined(records, plan(FlatClip(1e4)), lr=200.0).finding("lr")
    assert found.verdict == "lower"
    assert "even without noise" in found.sentence
    assert found.value is not None
    cured = trial(
        fresh(), cross_entropy, records, plan(FlatClip(1e4)), torch.optim.SGD, lr=found.value, steps=10, noisy=False
    )
    assert cured.fell > 0


def test_a_step_that_is_too_large_for_the_noise_alone() -> None:
    """A bowl in 200 dimensions, half-way at each step: fine without noise, which costs βη²E‖Δ‖²/2 with it."""
    rows = (torch.full((40, 200), 0.05), torch.zeros(40))
    made = plan(FlatClip(1.0), noise=30.0, batch=40, records=400)
    found = diagnose(Point(200), outputs, rows, made, lr=0.5, steps=5, public="made up").finding("lr")
    assert found.verdict == "lower"
    assert "too large for this noise" in found.sentence
    assert found.value is not None
    assert found.value < 0.5


def test_normalised_gradients_leave_no_threshold_to_choose(records: Records) -> None:
    found = examined(records, plan(NormalisedClip(1.0))).finding("clip_norm")
    assert found.verdict == "fine"
    assert "nothing to choose" in found.sentence


def test_the_model_is_left_alone_and_rows_must_be_declared(records: Records) -> None:
    model = fresh()
    before = [p.detach().clone() for p in model.parameters()]
    diagnose(model, cross_entropy, records, plan(), lr=0.5, steps=3, not_private=True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(Refused, match="without noise"):
        diagnose(model, cross_entropy, records, plan(), lr=0.5)
    with pytest.raises(InputError, match="steps"):
        diagnose(model, cross_entropy, records, plan(), lr=0.5, steps=0, public="made up")


def test_alignment_is_the_cosine_of_released_and_true_gradients() -> None:
    """E⟨∇F, R⟩ / (‖∇F‖·√E‖R‖²) over Poisson batches and noise, by simulation."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(60, 4, generator=generator) + 1
    model, made = Point(4), plan(FlatClip(0.7), noise=0.8, batch=12, records=60)
    rows = (points, torch.zeros(60))
    found = signal_of(measure(model, outputs, rows, made.clipping, public="made up"), made, 4)
    gradients = -points
    clipped = gradients * (0.7 / gradients.norm(dim=1, keepdim=True)).clamp_max(1)
    taken = (torch.rand(40_000, 60, generator=generator) < 12 / 60).float()
    noise = torch.randn(40_000, 4, generator=generator) * 0.8 * made.sensitivity
    released = (taken @ clipped + noise) / 12
    true = gradients.mean(0)
    expected = float((released @ true).mean() / (true.norm() * released.square().sum(1).mean().sqrt()))
    assert found.alignment == pytest.approx(expected, rel=0.02)
    assert found.over(100) == pytest.approx(10 * found.gradient / found.noise)


def test_a_signal_without_noise_or_gradient() -> None:
    reading = measure(
        Point(), outputs, (torch.tensor([[1.0], [-1.0]]), torch.zeros(2)), FlatClip(1.0), public="made up"
    )
    found = signal_of(reading, plan(), 1)
    assert found.alignment == 0
    assert math.isfinite(found.over(10))


RECIPE = small_toml(privacy={"insecure_seed": None}, sampling={"expected_batch": 300}, train={"steps": 40})


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


def test_the_command_refuses_to_look_at_rows_that_nobody_declared(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", recipe]) == 2
    said = capsys.readouterr().err
    assert "declares no public rows" in said
    assert "--not-private" in said


def test_the_command_prints_one_json_object(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", recipe, "--test-rows", "--rows", "60", "--steps", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["topic"] for one in found["findings"]] == ["bias", "clip_norm", "batch", "lr"]
    assert found["not_private"] is False
    assert "test split" in found["origin"]
    assert found["parameters"] == 7850
    assert found["speed"]["seconds_per_step"] > 0


def test_the_command_s_text_says_whose_rows_it_read(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "60", "--steps", "3", "--set", "clipping.clip_norm=1e5", "--set", "train.lr=1e-5"]
    assert main(["doctor", recipe, "--not-private", *arguments]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("NOT PRIVATE")
    assert "public benchmark" in said
    assert "Time of a step on this machine" in said
    assert "--minutes M --seconds-per-step" in said
    assert "clip_norm: lower" in said
    assert "Thm 3.2" in said


def test_public_rows_of_the_recipe_are_read_without_a_flag(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "public.records=200", "--set", "public.shared=drop", "--rows", "60", "--steps", "2", "--json"]
    assert main(["doctor", recipe, *options]) == 0
    assert "drawn by the public seed" in json.loads(capsys.readouterr().out)["origin"]


def test_the_command_names_a_batch_that_is_calibrated_to_the_same_epsilon(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["sampling.expected_batch=128", "train.steps=12", "privacy.accountant=rdp", "privacy.noise_multiplier=0.7"]
    sets = [word for one in sizes for word in ("--set", one)]
    assert main(["doctor", recipe, "--test-rows", "--rows", "60", "--steps", "2", "--json", *sets]) == 0
    findings = {one["topic"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["batch"]["verdict"] == "raise"
    assert findings["batch"]["value"] in (256, 512)
    assert "at the same ε and steps" in findings["batch"]["sentence"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--set", "method.name=hidden-state", "--set", "method.cap=0.2", "--test-rows"],
            "the method hidden-state does not clip gradients of records",
        ),
        (["--steps", "0", "--test-rows"], "--steps must be at least 1"),
        (["--rows", "1", "--test-rows"], "--rows must be at least 2"),
    ],
)
def test_the_command_s_errors(
    recipe: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", recipe, *options]) == 2
    assert message in capsys.readouterr().err


def test_the_threshold_of_a_method_with_steps_of_its_own_is_judged_without_a_rehearsal(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(recipe).read_text().replace("lr =", "# lr =")
    Path(recipe).write_text(text + '\n[method]\nname = "modelmix"\nlr = 0.1\ntau_over_lr = 0.01\n')
    assert main(["doctor", recipe, "--test-rows", "--rows", "40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["topic"] for one in found["findings"]] == ["bias", "clip_norm", "batch"]
    assert found["trials"] == []
    assert "modelmix are not tried" in found["caveats"][0]
