"""Public rows: declared, set aside by a public seed, and never a private row among them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_recipes import small_toml
from sordino.data import Split
from sordino.errors import InputError, Refused
from sordino.plan import Plan
from sordino.plan.public import PublicSet, drop_shared_rows, refuse_shared_rows, shared_rows, split_public
from sordino.runs.prepared import prepare
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

RECIPE = small_toml(
    sampling={"expected_batch": 100}, train={"steps": 2, "lr": 1}, public={"fraction": 0.05, "shared": "drop"}
)


def rows(count: int, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    return Split(torch.randn(count, 3, generator=generator), torch.arange(count) % 2)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 60), share=st.floats(0.05, 0.95), seed=st.integers(0, 5))
def test_the_two_parts_hold_every_row_once_and_in_order(count: int, share: float, seed: int) -> None:
    whole = Split(torch.arange(count)[:, None].float(), torch.zeros(count, dtype=torch.int64))
    number = min(max(round(share * count), 1), count - 1)
    public, private = split_public(whole, records=number, seed=seed)
    assert len(public) == number
    both = torch.cat([public.inputs, private.inputs])[:, 0]
    assert both.sort().values.tolist() == list(range(count))
    assert all((part.inputs.diff(dim=0) > 0).all() for part in (public, private))


def test_a_larger_public_set_holds_the_smaller_one_of_the_same_seed() -> None:
    small, _ = split_public(rows(40), fraction=0.1, seed=3)
    large, _ = split_public(rows(40), fraction=0.5, seed=3)
    ours, _ = shared_rows(small, large)
    assert len(ours) == len(small) == 4


@pytest.mark.parametrize("wrong", [{}, {"fraction": 0.5, "records": 3}, {"fraction": 1.0}, {"records": 10}])
def test_how_many_rows_are_public_must_be_said_once_and_leave_both_parts_some(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        split_public(rows(10), **wrong)  # type: ignore[arg-type]


def test_a_private_row_among_the_public_ones_is_named_whatever_its_label() -> None:
    private = rows(30)
    public = rows(8, seed=1)
    refuse_shared_rows(public, private)
    sneaked = Split(torch.cat([public.inputs, private.inputs[[17]]]), torch.cat([public.targets, torch.tensor([1])]))
    assert int(private.targets[17]) == 1
    for label in (0, 1):
        sneaked.targets[-1] = label
        with pytest.raises(InputError, match="some private rows have the same content as public rows"):
            refuse_shared_rows(sneaked, private)


def test_zero_and_minus_zero_are_the_same_content() -> None:
    zero = Split(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    minus = Split(-torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    assert len(shared_rows(zero, minus)[0]) == 1


def test_dropping_shared_rows_looks_at_each_private_row_alone() -> None:
    """So one private row more or less changes the result by that row at most."""
    private = rows(12)
    public = Split(private.inputs[:5], private.targets[:5])
    kept = drop_shared_rows(public, private)
    assert torch.equal(kept.inputs, private.inputs[5:])
    without = drop_shared_rows(public, Split(private.inputs[:-1], private.targets[:-1]))
    assert torch.equal(without.inputs, kept.inputs[:-1])


def test_the_plan_declares_the_rows_and_recognises_them() -> None:
    split = rows(10)
    declared = PublicSet.of(split, "collected with consent")
    declared.check(split)
    for other in (rows(10, seed=1), rows(9), Split(split.inputs, 1 - split.targets)):
        with pytest.raises(InputError, match="the given rows are different"):
            declared.check(other)
    with pytest.raises(InputError, match="needs an origin"):
        replace(declared, origin=" ")


def test_public_rows_are_part_of_the_plan_and_leave_its_epsilon_alone() -> None:
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, records=1000, expected_batch=50, steps=10)
    assert "public" not in plan.to_dict()  # ledgers from before stay readable
    with_public = replace(plan, public=PublicSet.of(rows(10), "the archive of 1990"))
    assert Plan.from_dict(json.loads(json.dumps(with_public.to_dict()))) == with_public != plan
    assert with_public.guarantee().epsilon == plan.guarantee().epsilon
    assert "10 rows are public and not protected; their origin: the archive of 1990" in str(with_public.guarantee())


def read(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return Recipe.read(path, overrides)


def test_a_recipe_sets_rows_aside_and_counts_the_others(tmp_path: Path) -> None:
    recipe = read(tmp_path)
    assert tomllib.loads(recipe.to_toml())["public"]["fraction"] == 0.05
    prepared = prepare(recipe, progress=False)
    assert prepared.public is not None
    assert len(prepared.public) == 600
    assert prepared.plan.records == 11_400
    assert len(prepared.dataset.train) == 11_400
    prepared.plan.public.check(prepared.public)  # type: ignore[union-attr]


def test_a_recipe_without_public_rows_does_not_mention_them(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.partition("[public]")[0])
    assert "[public]" not in Recipe.read(path).to_toml()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("public.fracton=0.1", "did you mean 'fraction'"),
        ("public.records=10", "either fraction or records"),
        ("public.fraction=1.5", "strictly between 0 and 1"),
        ("public.shared=ignore", 'use "refuse" or "drop"'),
    ],
)
def test_what_is_wrong_with_the_section_is_said(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare(read(tmp_path, override), progress=False)


def test_a_shared_row_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Split(torch.randn(12_000, 1, 2, 2), torch.arange(12_000) % 10)
    whole.inputs[1] = whole.inputs[0]
    seed = next(
        seed
        for seed in range(99)
        if (torch.randperm(12_000, generator=torch.Generator().manual_seed(seed))[:600] < 2).sum() == 1
    )
    from sordino import data

    dataset = replace(data.load("fashion-mnist-mini"), train=whole)
    monkeypatch.setattr(data, "read", lambda *_: dataset)
    recipe = read(tmp_path, 'public.shared="refuse"', f"public.seed={seed}")
    with pytest.raises(InputError, match="some private rows have the same content"):
        run_recipe(recipe, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_method_that_would_not_look_at_public_rows_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="does not use public rows"):
        run_recipe(read(tmp_path, "method.name=modelmix", "method.lr=0.1"), tmp_path / "out", progress=False)
