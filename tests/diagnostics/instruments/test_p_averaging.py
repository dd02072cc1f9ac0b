"""p-averaged clipping: what one record can do to it, and that no plan and no recipe may hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sordino.cli import main
from sordino.clipping import P_AVERAGED, clipping_from_dict
from sordino.errors import Refused
from sordino.plan import Plan
from sordino.runs.prepared import prepare
from sordino.runs.recipe import Recipe


def clip(vector: Tensor, bound: float) -> Tensor:
    return vector * min(1.0, bound / max(float(vector.norm()), 1e-300))


def grouped_sum(gradients: Tensor, groups: list[int], bound: float) -> Tensor:
    """Σ over groups of clip(mean of the group): each record's group is fixed, so that others stay where they are."""
    total = torch.zeros(gradients.shape[1], dtype=torch.float64)
    for group in sorted(set(groups)):
        mine = gradients[[i for i, g in enumerate(groups) if g == group]]
        total += clip(mean, bound) if (mean := mine.mean(0)).numel() else 0
    return total


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), p=st.integers(2, 5), bound=st.floats(0.1, 5), size=st.floats(0.1, 100))
def test_one_record_moves_the_sum_by_at_most_two_c_and_not_less_in_the_worst_case(
    seed: int, p: int, bound: float, size: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(3 * p, 2, generator=generator, dtype=torch.float64) * size
    groups = [i // p for i in range(3 * p)]
    before = grouped_sum(gradients[:-1], groups[:-1], bound)
    after = grouped_sum(gradients, groups, bound)
    assert float((after - before).norm()) <= 2 * bound * (1 + 1e-9), "add-remove: 2c, where a single record has c"
    turned = gradients.clone()
    turned[-1] = -1e6 * gradients[-p:-1].mean(0)  # one record outweighs its group
    moved = float((grouped_sum(turned, groups, bound) - before).norm())
    length = float(gradients[-p:-1].mean(0).norm())
    assert moved == pytest.approx(bound + min(bound, length), rel=1e-6), "2c wherever the group was clipped"


def test_with_groups_by_position_one_record_moves_every_group() -> None:
    """Pairs of consecutive records: a record added in front shifts all of them, and m groups move by 2cm together. So
    even 2c holds only where a record's group does not depend on who else is in the batch."""
    sizes = torch.arange(160, 0, -10, dtype=torch.float64)
    records = (sizes * torch.tensor([-1.0, 1.0] * 8, dtype=torch.float64))[:, None]
    with_one_more = torch.cat([torch.tensor([[1e3]], dtype=torch.float64), records])[:16]
    before, after = (grouped_sum(rows, [i // 2 for i in range(16)], 1.0) for rows in (records, with_one_more))
    assert (float(before), float(after)) == (-8.0, 8.0)


@pytest.mark.parametrize("name", P_AVERAGED)
def test_no_clipping_of_that_name_can_be_made(name: str) -> None:
    with pytest.raises(Refused, match=r"moves the clipped mean of its group by up to 2c.* 2p times as large"):
        clipping_from_dict({"name": name, "clip_norm": 1.0, "p": 4})


def test_a_plan_that_names_it_is_refused() -> None:
    plain = Plan.dpsgd(delta=1e-5, records=100, expected_batch=10, noise_multiplier=1.0, steps=2).to_dict()
    with pytest.raises(Refused, match="not private at per-record noise"):
        Plan.from_dict({**plain, "clipping": {"name": "p-averaged", "clip_norm": 1.0, "p": 4}})


RECIPE: dict[str, Any] = {
    "data": {"name": "fashion-mnist-mini"},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5},
    "sampling": {"expected_batch": 100},
    "train": {"steps": 1, "lr": 0.1},
    "clipping": {"name": "p-averaged", "clip_norm": 1.0, "p": 10},
}


def test_a_recipe_that_names_it_is_refused_on_the_command_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Refused, match="not private at per-record noise"):
        prepare(Recipe.from_dict(RECIPE))
    (tmp_path / "recipe.toml").write_text(Recipe.from_dict(RECIPE).to_toml())
    assert main(["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]) == 2
    assert "diagnostics.instruments.p_averaged" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
