"""The recipes of the clipping-bias tables run, at a small size; the page says what the result files say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from scripts import experiment as module
from sordino.cli import main
from sordino.data.glove import TEXTS
from sordino.plan import Plan
from sordino.runs.recipe import Recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "experiments" / "recipes").glob("bias_*.toml"))
WORDS = ["good", "bad", "never", "great", "!", "best"]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty reviews and six word vectors, in the layouts of IMDb and GloVe."""
    root, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    for path in (root / TEXTS[0], root / "IMDb" / "train.csv"):
        path.parent.mkdir(parents=True)
    lines = [f"{word} {' '.join(f'{draw.gauss(0, 1):.3f}' for _ in range(50))}" for word in WORDS]
    (root / TEXTS[0]).write_text("\n".join(lines) + "\n")
    for side in ("train", "test"):
        rows = [f"{' '.join(draw.choices(WORDS, k=9))},{number % 2}" for number in range(60)]
        (root / "IMDb" / f"{side}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return root


def small(recipe: Recipe, texts: Path) -> list[str]:
    """Two steps on embedded images with the smallest member of the family, or on sixty reviews."""
    chosen = {"sampling.expected_batch": 8, "train.chunk": 8, "train.steps": 2}
    if recipe.model.name == "gru":
        further = {"data.records": 60}
    else:
        further = {"data.name": "fashion-mnist-mini", "model.depth": 8, "train.eval_every": 0}
    options = [word for key, value in (chosen | further).items() for word in ("--set", f"{key}={value}")]
    return [*options, *(["--data-dir", str(texts)] if recipe.model.name == "gru" else [])]


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs_two_steps(
    path: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe.read(path)
    copy = tmp_path / "recipe.toml"
    copy.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("epochs")) + "\n")
    assert main(["train", str(copy), "--out", str(tmp_path / "run"), "--json", *small(recipe, texts)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] <= recipe.privacy.epsilon  # type: ignore[operator]
    assert result["steps"] == 2


def test_the_tables_differ_by_what_they_compare_and_by_nothing_else() -> None:
    for task in ("cifar10", "imdb"):
        enhanced, original = (
            Recipe.read(ROOT / "experiments" / "recipes" / f"bias_table{number}_{task}.toml") for number in (1, 2)
        )
        assert dict(enhanced.model.options) | {"form": "original"} == dict(original.model.options)
        assert {"inner_length", "inner_decay"} == set(enhanced.method.options) - set(original.method.options)
        for section in ("data", "privacy", "sampling", "clipping", "train"):
            assert getattr(enhanced, section) == getattr(original, section)


@pytest.mark.parametrize("part", ["imdb", "cifar10", "cifar10_8000", "fashion_mnist"])
def test_the_page_says_what_the_result_file_says(part: str) -> None:
    page = module("clipping_bias_page")
    text = page.PAGE.read_text("utf8")
    assert f"<!-- {part} table -->" in text
    own = {name: block for name, block in page.blocks().items() if name.startswith(part)}
    assert page.pages.filled(text, own) == text, "run python experiments/clipping_bias_page.py"


def test_the_readings_of_the_theory_page_are_those_of_the_result_file() -> None:
    script = module("instruments_figures")
    text = script.PAGE.read_text(encoding="utf8")
    document = json.loads((script.ROOT / "experiments" / "results" / "instruments.json").read_text(encoding="utf8"))
    assert script.pages.filled(text, script.blocks(document)) == text, "run python experiments/instruments_figures.py"
    at = next(row for row in document["runs"]["c = 1"]["noise_by_window"] if row["step"] == 75)
    assert f"{at['1']:.1f} for K₀ = 1 and {at['8']:.1f} for K₀ = 8" in " ".join(text.split())


def test_a_column_of_the_table_is_the_mean_over_its_seeds() -> None:
    script, page = module("clipping_bias"), module("clipping_bias_page")
    part = script.PARTS["cifar10"]
    shared = {
        "target_epsilon": 8.0, "epsilon": 7.99, "delta": 1e-5, "noise_multiplier": 1.0, "records": 10, "test_rows": 4,
        "lr": 2.0, "held_out": False, "column": "enhanced", "core_seconds": 3.0,
        "readings": [{"sampling_noise": 0.5, "gradient_norm": 0.5}],
    }  # fmt: skip
    runs = {str(seed): shared | {"seed": seed, "accuracy": value} for seed, value in enumerate((0.4, 0.5))}
    (row,) = script.table(part, runs)
    assert (row["mean"], row["seeds"], row["sampling_noise"]) == (pytest.approx(0.45), 2, 0.5)
    assert "| enhanced | 45.0 ± 7.1 (2) | 0.5 | 2 | 2 | 3 |" in page.table({"table": [row]})
    assert not script.complete(part, runs)


@pytest.mark.parametrize("name", ["cifar10", "imdb"])
def test_step_sizes_are_climbed_alike_and_dear_columns_take_their_parents(name: str) -> None:
    script = module("clipping_bias")
    part, runs = script.PARTS[name], {}
    first = part.first_lr
    own = [name for name, column in part.columns.items() if column.lr_of is None]
    dear = {"enhanced + self-augmentation 8", "enhanced + self-augmentation 16", "WRN-16-4"}  # not searched
    assert name != "cifar10" or part.columns.keys() - set(own) == dear
    best = dict.fromkeys(own, 2 * first) | {"original": 4 * first, "enhanced": first / 2}
    done = []
    for job in script.jobs(part, runs, tuple(part.columns), part.epsilons, 3):
        found = {"column": job.column, "held_out": job.held_out, "lr": job.lr}
        runs[job.key] = found | {"accuracy": 1 / (1 + abs(job.lr - best.get(job.column, 0)) / first)}
        done.append(job)
    tried = {name: [job.lr for job in done if job.held_out and job.column == name] for name in part.columns}
    assert tried["original"] == [first, 2 * first, 4 * first, 8 * first]
    assert tried["enhanced"] == [first, 2 * first, first / 2, first / 4]
    assert not any(tried[name] for name, column in part.columns.items() if column.lr_of)
    for job in done:
        if not job.held_out:
            assert job.lr == best[part.columns[job.column].lr_of or job.column]
    seeds = {name: {job.seed for job in done if job.column == name and not job.held_out} for name in part.columns}
    assert all(found == {0, 1, 2} for found in seeds.values())
    assert script.complete(part, runs)


def test_the_page_says_what_the_same_noise_would_have_on_all_records_of_cifar10() -> None:
    runs = json.loads((ROOT / "experiments" / "results" / "clipping_bias_cifar10_8000.json").read_text("utf8"))["runs"]
    run = next(r for r in runs.values() if not r["held_out"])
    plan = Plan.dpsgd(
        noise_multiplier=run["noise_multiplier"], delta=run["delta"], records=50_000, steps=run["steps"],
        expected_batch=run["expected_batch"], clip_norm=1.0,
    )  # fmt: skip
    assert f"{plan.guarantee().epsilon:.2f}" == "2.00"
    assert "ε = 2.00" in (ROOT / "docs" / "clipping_bias.md").read_text("utf8")


def test_cifar10_is_trained_on_all_records_but_those_that_choose_step_sizes() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "clipping_bias_cifar10.json").read_text("utf8"))
    assert {run["records"] for run in document["runs"].values()} == {47_900}


def test_the_sentences_on_cifar10_are_those_of_the_file() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "clipping_bias_cifar10.json").read_text("utf8"))
    text = " ".join((ROOT / "docs" / "clipping_bias.md").read_text("utf8").split())
    at = {(row["column"], row["target_epsilon"]): 100 * row["mean"] for row in document["table"]}
    gains = [f"{at['enhanced', epsilon] - at['original', epsilon]:.1f}" for epsilon in (8.0, 4.0, 2.0, 1.0)]
    assert f"gains {gains[0]} points at ε = 8 (three seeds)" in text
    assert f"{gains[1]}, {gains[2]} and {gains[3]} at ε = 4, 2 and 1" in text
    scattered = at["small CNN on scattering", 8.0]
    assert f"{scattered - at['enhanced', 8.0]:.1f} points ahead of the enhanced ResNet** ({scattered:.1f}, one" in text
    runs = [run for run in document["runs"].values() if not run["held_out"] and run["target_epsilon"] == 8.0]
    own = {name: {run["seed"]: 100 * run["accuracy"] for run in runs if run["column"] == name} for name, _ in at}
    lost = [
        [own["enhanced"][seed] - value for seed, value in sorted(own[f"enhanced + inner-outer momentum{more}"].items())]
        for more in ("", ", γ₀ = 0.3")
    ]
    assert {f"{value:.1f}" for value in lost[0]} == {"1.4"}
    assert f"γ₀ = 0.08 1.4 points in each of two seeds, with γ₀ = 0.3 {lost[1][0]:.1f} and {lost[1][1]:.1f}," in text


def test_the_sentence_on_the_sampling_noise_of_normalised_networks_is_that_of_the_files() -> None:
    text, at = " ".join((ROOT / "docs" / "clipping_bias.md").read_text("utf8").split()), []
    for part, epsilon in (("cifar10", 8.0), ("imdb", 4.0)):
        path = ROOT / "experiments" / "results" / f"clipping_bias_{part}.json"
        rows = [row for row in json.loads(path.read_text("utf8"))["table"] if row["target_epsilon"] == epsilon]
        at += [row["relative_noise"] for name in ("original", "enhanced") for row in rows if row["column"] == name]
    said = [f"{value:.0f}" for value in at]
    assert f"{said[0]} for the original ResNet-8 and {said[1]} for the enhanced one, and on IMDb {said[2]} and" in text
    assert f"and on IMDb {said[2]} and {said[3]}." in text
    assert at[1] > at[0]
    assert at[3] > at[2]


def test_fashion_mnist_is_trained_on_all_records_but_those_that_choose_step_sizes() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "clipping_bias_fashion_mnist.json").read_text("utf8"))
    assert {run["records"] for run in document["runs"].values()} == {56_000}
    assert "56,000 records" in (ROOT / "docs" / "clipping_bias.md").read_text("utf8")
