"""The audit of DP-MAC stays below its claim, and catches halved noise: the fault that the authors had to correct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_mac_run import CLASSIFIER

from sordino.cli import main
from sordino.methods.dp_mac import plan
from sordino.methods.dp_mac.audit import audit_mac
from sordino.methods.dp_mac.coefficients import Expansion
from sordino.methods.dp_mac.network import Network
from sordino.methods.dp_mac.training import Mac
from sordino.methods.dp_mac.zsteps import ZSteps
from sordino.runs.recipe import Recipe

MAC = Mac(ZSteps(1, 0.01, start="backward"), Expansion(order=2))


def audit(noise_scale: float, seed: int) -> Any:
    """ε = 2 in eight full-batch steps, 64 real records and 4000 canaries."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network([80, 30, 10], "relu", "sigmoid")
        x, y = torch.rand(64, 80), torch.nn.functional.one_hot(torch.arange(64) % 10, 10).float()
    made = plan(parts=MAC.parts(2), epsilon=2.0, delta=1e-5, records=64, expected_batch=64, steps=8)
    return audit_mac(made, network, (x, y), MAC, canaries=4000, seed=seed, noise_scale=noise_scale)


def test_the_claim_stands() -> None:
    found = audit(1.0, seed=1)
    assert found.holds
    assert 0.3 < found.epsilon_lower <= found.epsilon_claimed


def test_noise_reduced_by_half_is_caught() -> None:
    found = audit(0.5, seed=1)
    assert not found.holds
    assert found.epsilon_lower > found.epsilon_claimed


def test_a_recipe_is_audited_from_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(Recipe.from_dict(CLASSIFIER).to_toml())
    assert main(["audit", str(recipe), "--steps", "1", "--canaries", "200", "--seed", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"]
