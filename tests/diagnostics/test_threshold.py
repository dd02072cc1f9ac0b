"""The clipping threshold against the sampling noise: Example 3.1 of Xiao et al. 2022, and tails that are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from small_recipes import small_toml
from sordino.cli import main
from sordino.clipping import FlatClip
from sordino.diagnostics.threshold import advise_clipping, tail_kappa
from sordino.errors import InputError

SAMPLES = torch.tensor([[-20.0], [-10.0], [90.0]])


class Weight(nn.Module):
    """f(w, x) = (w − x)²/2."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x).square().sum(1) / 2


def example(w: float, clip_norm: float):  # type: ignore[no-untyped-def]
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs

    return advise_clipping(Weight(w), loss, (SAMPLES, torch.zeros(3)), FlatClip(clip_norm))


def test_example_3_1_at_the_optimum_clipping_invents_a_gradient() -> None:
    found = example(20.0, 1.0)
    assert found.noise_std == pytest.approx(49.7, abs=0.05)
    assert found.gradient_norm == pytest.approx(0.0, abs=1e-5)
    assert found.clipped_gradient_norm == pytest.approx(1 / 3)
    assert found.verdict == "misleading"


def test_example_3_1_away_from_it_clipping_points_the_wrong_way() -> None:
    found = example(0.0, 1.0)
    assert found.noise_std == pytest.approx(49.7, abs=0.05), "for any w"
    assert found.gradient_norm == pytest.approx(20.0)
    assert found.clipped_gradient_norm == pytest.approx(1 / 3)
    assert found.cosine == pytest.approx(-1.0)
    assert found.verdict == "misleading"
    assert "Example 3.1" in found.sentence


def test_a_threshold_above_the_theorem_s_is_covered_and_changes_nothing() -> None:
    found = example(0.0, 1000.0)
    assert found.threshold == pytest.approx(4 * math.log(10) * 70 / math.log(3))
    assert found.verdict == "covered"
    assert found.cosine == pytest.approx(1.0)
    assert found.clipped_share == 0.0


def test_the_kappa_of_an_exponential_tail_is_its_mean() -> None:
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    assert tail_kappa(-2.5 * (1 - grid).log()) == pytest.approx(2.5, rel=0.1)


def test_kappa_scales_with_the_noise_and_its_tail_bound_holds() -> None:
    noise = torch.randn(500, generator=torch.Generator().manual_seed(0)).abs()
    kappa = tail_kappa(noise)
    assert tail_kappa(7 * noise) == pytest.approx(7 * kappa)
    for t in noise[noise >= noise.quantile(0.91)].tolist():
        assert float((noise >= t).double().mean()) <= math.exp(-t / kappa) * (1 + 1e-9)


def test_one_row_shows_nothing() -> None:
    with pytest.raises(InputError, match="at least 2"):
        advise_clipping(Weight(0.0), lambda o, t: o, (SAMPLES[:1], torch.zeros(1)), FlatClip(1.0))


RECIPE = small_toml(
    privacy={"epsilon": 3.0, "noise_multiplier": None, "insecure_seed": None},
    sampling={"expected_batch": 300},
    train={"steps": 6},
)


def test_the_command_measures_a_recipe_s_threshold_on_test_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert main(["advise", "clipping", str(recipe), "--public", "40", "--steps", "2", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert main(["doctor", str(recipe), "--test-rows", "--rows", "40", "--steps", "2", "--json"]) == 0
    doctor = json.loads(capsys.readouterr().out)
    assert doctor.pop("speed").keys() == advice.pop("speed").keys(), "times are measured anew"
    assert doctor == advice, "one command under two names: one answer"
    found = advice["tail"]
    assert (found["rows"], found["clip_norm"]) == (40, 1.0)
    assert found["threshold"] == pytest.approx(4 * math.log(10) * found["kappa"])
    assert found["verdict"] in ("covered", "below")
    assert main(["advise", "clipping", str(recipe), "--weights", str(tmp_path / "none")]) == 2
