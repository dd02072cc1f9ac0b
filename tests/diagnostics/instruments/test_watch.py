"""Instruments during training: nothing of the run changes, public readings are logged, private ones are kept apart."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sordino.diagnostics.instruments import ReadingSteps, Watch, measure
from sordino.errors import InputError, Refused
from sordino.plan import Plan
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.runs.verify import failed, verify
from sordino.training import Result, Settings, train

Records = tuple[Tensor, Tensor]


def plan() -> Plan:
    given: dict[str, Any] = {"delta": 1e-5, "records": 200, "expected_batch": 200, "noise_multiplier": 1.0, "steps": 6}
    return Plan.dpsgd(**given, insecure_seed=1, accountant="rdp")


def watch(rows: Records, every: int = 2, **options: Any) -> Watch:
    given = {"public": "made up"} if "not_private" not in options else {}
    some = torch.utils.data.TensorDataset(rows[0][:30], rows[1][:30])
    return Watch(ReadingSteps(every, options.pop("window", 0)), loss, lambda: some, plan().clipping, **given, **options)


loss = nn.functional.cross_entropy


def fresh() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))


def trained(rows: Records, seen: Watch | None = None, **options: Any) -> Result:
    return train(fresh(), loss, rows, plan(), lr=0.5, watch=seen, settings=Settings(eval_every=3), **options)


def test_a_watched_run_ends_with_the_same_bits(records: Records) -> None:
    plain, watched = trained(records), trained(records, watch(records, window=2))
    for left, right in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert len(watched.metrics) > len(plain.metrics)


def test_readings_are_rows_of_the_metrics_before_the_first_step_at_each_interval_and_at_the_end(
    records: Records,
) -> None:
    found = trained(records, watch(records, every=4)).metrics
    assert [row["step"] for row in found if "sampling_noise" in row] == [0, 4, 6]
    assert [row["step"] for row in found if "epsilon" in row] == [3, 6]
    assert "epsilon" in found[-1], "the last row is the evaluation"
    here = measure(fresh(), loss, (records[0][:30], records[1][:30]), plan().clipping, public="made up").metrics()
    assert {key: found[0][key] for key in here} == here
    assert set(here) >= {"sampling_noise", "gradient_norm", "norm_quantile_0.25", "clipped_share", "clip_cosine"}


def test_without_evaluations_the_last_row_is_still_one(records: Records) -> None:
    found = train(fresh(), loss, records, plan(), lr=0.5, watch=watch(records)).metrics
    assert "epsilon" in found[-1]
    assert found[-1]["step"] == 6


def test_a_window_averages_the_noise_of_consecutive_iterations(records: Records) -> None:
    found = [row for row in trained(records, watch(records, every=3, window=3)).metrics if "sampling_noise" in row]
    assert "noise_window_3" not in found[0], "there is one iterate only before the first step"
    for row in found[1:]:
        assert 0 < row["noise_window_3"] <= row["noise_window_1"] * 1.2


def test_readings_of_private_records_never_enter_the_metrics(records: Records, tmp_path: Path) -> None:
    found = trained(records, watch(records, not_private=True), out=tmp_path)
    assert not any("sampling_noise" in row for row in found.metrics)
    assert "sampling_noise" not in (tmp_path / "metrics.jsonl").read_text()
    assert [row["step"] for row in found.not_private["instruments"]] == [0, 2, 4, 6]
    assert all(row["not_private"] is True for row in found.not_private["instruments"])


@pytest.mark.parametrize("checkpoint_every", [2, 0])
def test_a_run_that_was_killed_has_each_reading_once(records: Records, tmp_path: Path, checkpoint_every: int) -> None:
    calls = iter(range(100))

    def killed(model: nn.Module) -> dict[str, float]:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return {}

    settings = Settings(eval_every=3, checkpoint_every=checkpoint_every)
    run = partial(
        train, loss=loss, dataset=records, plan=plan(), lr=0.5, settings=settings, evaluate=killed, out=tmp_path
    )
    with pytest.raises(KeyboardInterrupt):
        run(fresh(), watch=watch(records))
    found = run(fresh(), watch=watch(records), resume=True)
    plain = trained(records, watch(records))
    readings = [[row for row in one.metrics if "sampling_noise" in row] for one in (found, plain)]
    assert readings[0] == readings[1]
    assert [row["step"] for row in readings[0]] == [0, 2, 4, 6]


def test_a_run_that_diverges_is_not_ended_by_its_instruments(records: Records) -> None:
    seen = watch(records, every=1)
    model = fresh()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))  # type: ignore[index, union-attr, operator]
    assert seen(model, 1, 6) is None


@pytest.mark.parametrize(("every", "window"), [(0, 0), (2, 3), (2, -1)])
def test_impossible_schedules(every: int, window: int) -> None:
    with pytest.raises(InputError):
        ReadingSteps(every, window)


def test_a_watch_needs_to_know_whose_rows_it_reads(records: Records) -> None:
    with pytest.raises(Refused, match="without noise"):
        Watch(ReadingSteps(2), loss, lambda: records, plan().clipping)


RECIPE: dict[str, dict[str, Any]] = {
    "data": {"name": "fashion-mnist-mini"},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5, "insecure_seed": 1, "accountant": "rdp"},
    "sampling": {"expected_batch": 100},
    "train": {"steps": 4, "lr": 0.1, "checkpoint_every": 0},
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.from_dict({**RECIPE, **sections})


def test_a_recipe_s_instruments_read_the_public_rows_and_the_report_draws_them(tmp_path: Path) -> None:
    with_public = {"public": {"records": 300, "shared": "drop"}}
    run_recipe(recipe(**with_public), tmp_path / "plain")
    run_recipe(recipe(**with_public, instruments={"every": 2, "rows": 50, "window": 2}), tmp_path / "watched")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "watched"))
    assert all(torch.equal(one[name], two[name]) for name in one | two), "the same weights, bit for bit"
    rows = [json.loads(line) for line in (tmp_path / "watched" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "sampling_noise" in row] == [0, 2, 4]
    page = (tmp_path / "watched" / "report.html").read_text()
    assert "Sampling noise" in page
    assert "cosine" in page
    assert "Sampling noise" not in (tmp_path / "plain" / "report.html").read_text()
    kept = Recipe.read(tmp_path / "watched" / "recipe.toml")
    assert (kept.instruments.every, kept.instruments.rows) == (2, 50)
    assert list(failed(verify(tmp_path / "watched"))) == [], "a reading and the step's own row are not one step twice"


def test_a_recipe_s_private_readings_are_kept_apart_and_the_report_says_so_in_red(tmp_path: Path) -> None:
    run_recipe(recipe(instruments={"every": 2, "rows": 50, "not_private": True}), tmp_path / "run")
    apart = json.loads((tmp_path / "run" / "not_private.json").read_text())
    assert "do not publish" in apart["warning"]
    assert [row["step"] for row in apart["instruments"]] == [0, 2, 4]
    for name in ("metrics.jsonl", "result.json"):
        assert "sampling_noise" not in (tmp_path / "run" / name).read_text()
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'class="warning"' in page
    assert "read the private records without noise" in page
    assert "clip_cosine" not in page
    assert not list((tmp_path / "run").rglob("not_private.jsonl"))


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"instruments": {"rows": 10}}, InputError, "needs every"),
        ({"instruments": {"every": 2}}, Refused, "declares no public rows"),
        ({"instruments": {"every": 2, "split": "train"}}, InputError, "is unknown"),
        ({"instruments": {"every": 2, "split": "test", "not_private": True}}, InputError, "leave out split"),
        (
            {"instruments": {"every": 2, "split": "test"}, "method": {"name": "hidden-state"}},
            Refused,
            "does not publish them",
        ),
        (
            {
                "instruments": {"every": 2, "split": "test"},
                "method": {"name": "dp-mac"},
                "model": {"name": "classifier"},
            },
            Refused,
            "does not publish",
        ),
    ],
)
def test_a_recipe_s_instruments_are_refused_where_they_would_leak(
    sections: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run_recipe(recipe(**sections), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_test_rows_serve_where_the_recipe_says_that_they_are_public(tmp_path: Path) -> None:
    run_recipe(recipe(instruments={"every": 4, "rows": 20, "split": "test"}), tmp_path / "run")
    assert "clip_cosine" in (tmp_path / "run" / "metrics.jsonl").read_text()
