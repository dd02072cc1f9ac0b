"""The DP-MAC loop: it learns, its ledger is the plan's, it resumes bit for bit, it refuses other plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sordino.errors import InputError, Refused
from sordino.methods.dp_mac import plan
from sordino.methods.dp_mac.coefficients import Expansion
from sordino.methods.dp_mac.network import Network
from sordino.methods.dp_mac.optimise import WSteps
from sordino.methods.dp_mac.thresholds import PrivateThresholds, choose
from sordino.methods.dp_mac.training import Mac, train_mac, train_mac_without_privacy
from sordino.methods.dp_mac.zsteps import ZSteps
from sordino.plan import Plan
from sordino.plan.spent import from_ledger
from sordino.release.ledger import read_ledger
from sordino.training import Settings

BACKWARD = ZSteps(2, 0.01, start="backward", rate=0.1)


def blobs(count: int = 400) -> tuple[Tensor, Tensor]:
    """Three classes that a small network can tell apart, targets one-hot."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(count) % 3
    x = torch.nn.functional.one_hot(classes, 6) * 2.0 + torch.randn(count, 6, generator=generator)
    return x, torch.nn.functional.one_hot(classes, 3).float()


def small(activation: str = "relu") -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network([6, 8, 3], activation, "sigmoid")


def accuracy(net: Any) -> dict[str, float]:
    x, y = blobs()
    return {"accuracy": float((net(x).argmax(1) == y.argmax(1)).float().mean())}


def mac_plan(mac: Mac, **changes: Any) -> Plan:
    chosen: dict[str, Any] = {
        "delta": 1e-5, "records": 400, "expected_batch": 200, "steps": 30, "noise_multiplier": 1.0, "insecure_seed": 0,
        **changes,
    }  # fmt: skip
    if mac.private is not None:
        chosen["statistics"] = [mac.private.statistic(chosen["steps"], chosen["expected_batch"] / 400)]
    return plan(parts=mac.parts(2), **chosen)


CONFIGURATIONS = {
    "clip": Mac(BACKWARD, w=WSteps("adam", 0.05)),
    "paper": Mac(ZSteps(10, 0.02), w=WSteps("adam", 0.05), bounds={"gradient": 0.3}),
    "normalise": Mac(BACKWARD, Expansion(bounding="normalise", split="sqrt-dim"), WSteps("adam", 0.05)),
    "analytic": Mac(ZSteps(10, 0.02, radius=3.0), Expansion(bounding="analytic"), WSteps("adam", 0.05)),
    "second order": Mac(BACKWARD, Expansion(order=2, curvature="full"), WSteps("cg", 0.5, steps=5)),
    "diagonal": Mac(BACKWARD, Expansion(order=2), WSteps("sgd", 0.5, steps=3)),
    "private": Mac(BACKWARD, w=WSteps("adam", 0.05), private=PrivateThresholds(2.0, every=10)),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_kind_of_training_learns(name: str) -> None:
    mac = CONFIGURATIONS[name]
    net = small("softplus" if name == "analytic" else "relu")
    result = train_mac(net, blobs(), mac_plan(mac), mac, evaluate=accuracy)
    assert result.metrics[-1]["accuracy"] > 0.8
    assert result.guarantee is not None
    assert result.metrics[-1]["epsilon"] == pytest.approx(result.guarantee.epsilon, rel=1e-3)


def test_the_ledger_alone_gives_the_plans_epsilon(tmp_path: Path) -> None:
    mac = CONFIGURATIONS["private"]
    made = mac_plan(mac)
    train_mac(small(), blobs(), made, mac, out=tmp_path)
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert {e["purpose"] for e in entries} == {"gradient", "mac-thresholds"}
    assert len(entries) == 33
    assert len({e["coordinates"] for e in entries if e["purpose"] == "gradient"}) == 1
    assert from_ledger(header, entries, 1e-5)["epsilon"] == pytest.approx(made.guarantee().epsilon, rel=1e-6)


@pytest.mark.parametrize("name", ["paper", "private"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    mac = CONFIGURATIONS[name]
    whole, killed = small(), small()
    settings = Settings(checkpoint_every=7)
    train_mac(whole, blobs(), mac_plan(mac), mac, settings=settings, out=tmp_path / "whole")

    class Killed(Exception):
        pass

    def dies(net: Any) -> dict[str, float]:
        raise Killed

    with pytest.raises(Killed):
        train_mac(
            killed, blobs(), mac_plan(mac), mac, settings=replace(settings, eval_every=17), evaluate=dies,
            out=tmp_path / "killed",
        )  # fmt: skip
    with pytest.raises(InputError, match="already contains a run"):
        train_mac(small(), blobs(), mac_plan(mac), mac, settings=settings, out=tmp_path / "killed")
    again = small()
    train_mac(again, blobs(), mac_plan(mac), mac, settings=settings, out=tmp_path / "killed", resume=True)
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_with_secure_noise_lost_steps_are_skipped(tmp_path: Path) -> None:
    mac = CONFIGURATIONS["private"]
    made = mac_plan(mac, insecure_seed=None)

    def dies(net: Any) -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_mac(
            small(), blobs(), made, mac, settings=Settings(checkpoint_every=7, eval_every=17), evaluate=dies,
            out=tmp_path,
        )  # fmt: skip
    result = train_mac(small(), blobs(), made, mac, settings=Settings(checkpoint_every=7), out=tmp_path, resume=True)
    assert result.skipped_steps == 3
    _, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert sum(e["purpose"] == "gradient" for e in entries) == 30


def test_the_last_step_is_saved_whatever_the_checkpoints_are_due_at(tmp_path: Path) -> None:
    mac = CONFIGURATIONS["clip"]
    train_mac(small(), blobs(), mac_plan(mac), mac, settings=Settings(checkpoint_every=7), out=tmp_path)
    assert (tmp_path / "checkpoint" / "step-000000030.safetensors").exists()


def test_a_plan_of_another_mechanism_is_refused() -> None:
    mac = CONFIGURATIONS["clip"]
    with pytest.raises(InputError, match="parts"):
        train_mac(small(), blobs(), mac_plan(CONFIGURATIONS["second order"]), mac)
    with pytest.raises(InputError, match="dpsgd"):
        train_mac(small(), blobs(), Plan.dpsgd(
            noise_multiplier=1.0, delta=1e-5, records=400, expected_batch=200, steps=30
        ), mac)  # fmt: skip
    with pytest.raises(InputError, match="does not declare"):
        train_mac(small(), blobs(), mac_plan(mac), CONFIGURATIONS["private"])
    with pytest.raises(Refused, match="Poisson"):
        replace(mac_plan(mac), relation="replace-one")
    with pytest.raises(InputError, match="conjugate"):
        Mac(w=WSteps("cg"))
    with pytest.raises(InputError, match="are for clipping"):
        Mac(expansion=Expansion(bounding="normalise"), bounds={"gradient": 1.0})


def test_the_plan_survives_its_dict() -> None:
    made = mac_plan(CONFIGURATIONS["private"])
    assert Plan.from_dict(made.to_dict()) == made
    assert made.guarantee().method == "dp-mac"
    assert "coefficient blocks" in str(made.guarantee())


def test_mac_without_privacy_learns_and_says_nothing_of_epsilon() -> None:
    mac = CONFIGURATIONS["paper"]
    rows = train_mac_without_privacy(small(), blobs(), mac_plan(mac), mac, evaluate=accuracy).metrics
    assert rows[-1]["accuracy"] > 0.85
    assert "epsilon" not in rows[-1]


def test_thresholds_are_the_quantile_of_what_rises_above_the_noise() -> None:
    """All but nothing in the bin up to 2^-3: that is the bound; and noise alone leaves the old bound."""
    from sordino.methods.dp_mac.thresholds import EDGES

    counts = torch.randn(2, len(EDGES) + 1, dtype=torch.float64)
    counts[0, EDGES.index(2.0**-3)] += 500.0
    found = choose({"layers.0.gradient": counts[0], "layers.1.gradient": counts[1].clamp(-1, 1)},
                   {"layers.0.gradient": 1.0, "layers.1.gradient": 7.0}, 0.5, 2.0)  # fmt: skip
    assert found == {"layers.0.gradient": 2.0**-3, "layers.1.gradient": 7.0}
