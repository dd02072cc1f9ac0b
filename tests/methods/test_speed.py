"""What a step takes: for itself, for each record, for each further Gaussian of correlated noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.methods import speed
from sordino.methods.speed import Speed, speed_of
from sordino.plan import Plan
from sordino.plan.pace import Pace
from sordino.records import gradients
from sordino.release import noise
from sordino.training import announced

cross_entropy = nn.functional.cross_entropy
Rows = tuple[Tensor, Tensor]


@pytest.fixture
def rows() -> Rows:
    return torch.randn(300, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(300, dtype=torch.long)


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for each gradient sum, a hundredth for each of its records, a tenth for each earlier noise."""
    now = [0.0]

    def charging(function: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            now[0] += seconds(*args)
            return function(*args, **options)

        return made

    for module in (announced, speed):
        monkeypatch.setattr(module, "clock", lambda: now[0])
    summed = charging(gradients.clipped_sum, lambda model, loss, rows, *rest: 0.5 + len(rows.targets) / 100)
    monkeypatch.setattr(gradients, "clipped_sum", summed)
    mixed = charging(noise._add_mixture, lambda parts, out, earlier, *rest: len(earlier) / 10)
    monkeypatch.setattr(noise, "_add_mixture", mixed)


def plan(**options: Any) -> Plan:
    return Plan.dpsgd(
        **{"delta": 1e-5, "records": 2000, "expected_batch": 100, "steps": 20, "noise_multiplier": 1.0} | options
    )


@pytest.mark.parametrize("options", [{}, {"sampling": "allocation"}, {"clipping": FlatClip(2.0)}])
@pytest.mark.usefixtures("charged")
def test_the_three_parts_are_told_apart(rows: Rows, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    before = [p.clone() for p in model.parameters()]
    found = speed_of(model, cross_entropy, rows, plan(**options), lr=0.5)
    assert found is not None
    assert found.seconds_per_step == pytest.approx(0.5)
    assert found.records_per_second == pytest.approx(100)
    assert found.seconds_per_noise == pytest.approx(0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_real_steps_have_a_time(rows: Rows) -> None:
    found = speed_of(nn.Linear(6, 3), cross_entropy, rows, plan(), lr=0.5)
    assert found is not None
    assert 0 < found.seconds_per_step < 1


def test_the_options_are_those_of_the_planner() -> None:
    given = Speed(0.0125, 2000.0, 0.0005)
    assert given.options() == "--seconds-per-step 0.0125 --records-per-second 2e+03 --seconds-per-noise 0.0005"
    assert Speed(0.0125, None, 0.0).options() == "--seconds-per-step 0.0125"
    assert Pace.of(minutes=1, **given.to_dict()).step(100, 3) == pytest.approx(0.0125 + 0.05 + 0.001)


def test_what_can_not_be_measured_is_not_stated(rows: Rows) -> None:
    def broken(outputs: Tensor, targets: Tensor, **rest: Any) -> Tensor:
        raise RuntimeError

    assert speed_of(nn.Linear(6, 3), broken, rows, plan(), lr=0.5) is None
    assert speed_of(nn.Linear(6, 3), cross_entropy, rows, plan(unit="user", rows_per_user=2), lr=0.5) is None
