"""From a CSV to predictions: one recipe for each method, the same encoding at training and at prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import sordino
from small_recipes import small_recipe
from sordino.cli import main
from sordino.errors import InputError, Refused
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.runs.trained import load
from sordino.runs.verify import failed, verify

DATA: dict[str, Any] = {
    "name": "csv",
    "records": 240,
    "path": "visits.csv",
    "test_path": "held_out.csv",
    "target": "y",
    "classes": ["no", "yes"],
    "columns": {
        "a": {"kind": "number", "low": -3, "high": 3},
        "b": {"kind": "category", "values": ["f", "m"]},
    },
}
# the two whose published model is not [model] on [features]; examples/five_methods.py runs all five
METHODS: dict[str, dict[str, Any]] = {
    "hidden-state": {
        "method": {"name": "hidden-state", "regularisation": 0.1}, "train": {"lr": None}, "model": {"name": "linear"},
        "sampling": {"name": "partition"},
    },
    "dp-mac": {
        "method": {"name": "dp-mac"}, "model": {"name": "classifier", "hidden": [4]},
        "train": {"optimizer": "adam", "lr": 0.01}, "features": {"name": "none"},
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for name in ("visits.csv", "held_out.csv"):
        lines = ["a,b,y"]
        for value in generator.normal(size=240):
            lines.append(f"{value:.6f},{'fm'[int(value > 1)]},{'yes' if value > 0 else 'no'}")
        (tmp_path / name).write_text("\n".join(lines), encoding="utf8")
    return tmp_path


def recipe(**sections: Any) -> Recipe:
    return small_recipe(**{**sections, "data": {**DATA, **sections.get("data", {})}})


@pytest.mark.parametrize("method", METHODS)
def test_a_table_is_trained_on_and_predicted_under_each_method(method: str, folder: Path) -> None:
    result = run_recipe(recipe(**METHODS[method]), folder / "run", progress=False)
    trained = load(folder / "run")
    found = trained.predict(folder / "held_out.csv")
    truth = [line.rsplit(",", 1)[1] for line in (folder / "held_out.csv").read_text().splitlines()[1:]]
    assert np.mean([one == other for one, other in zip(found, truth, strict=True)]) == pytest.approx(
        result["test_accuracy"]
    )
    assert torch.allclose(trained.probabilities(folder / "visits.csv").sum(1), torch.ones(240, dtype=torch.float64))


def test_arrays_whose_shape_no_recipe_states_are_trained_on_and_verified(folder: Path) -> None:
    """DP-MAC makes its network from the data, whose shape is not known when a reviewer makes the plan again."""
    generator = np.random.default_rng(0)
    np.savez(folder / "rows.npz", inputs=generator.normal(size=(240, 3)), targets=generator.integers(0, 2, 240))
    given = {"name": "npz", "path": "rows.npz", "records": 240, "classes": 2, "low": -3, "high": 3}
    for method, sections in METHODS.items():
        run_recipe(small_recipe(**{**sections, "data": given}), folder / method, progress=False)
        assert [check.why for check in failed(verify(folder / method))] == []


def test_the_command_writes_predictions_and_loses_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe(recipe(), folder / "run", progress=False)
    (folder / "new.csv").write_text("b,a\nm,2.5\nf,-2.5\n", encoding="utf8")
    command = ["predict", "run", "--data", "new.csv", "--out", "out.csv"]
    assert main(command) == 0
    lines = (folder / "out.csv").read_text().splitlines()
    assert lines[0] == "row,prediction,probability_no,probability_yes"
    assert [line.split(",")[1] for line in lines[1:]] == ["yes", "no"]
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert main(["predict", "run", "--data", "new.csv", "--out", "new.csv", "--force"]) == 2
    assert main(["predict", "nowhere", "--data", "new.csv", "--out", "other.csv"]) == 2
    assert (folder / "new.csv").read_text().startswith("b,a")


class Column(list[Any]):
    """A column as pandas has them: a marker stands where a value is missing."""

    def to_list(self) -> list[Any]:
        return list(self)

    def isna(self) -> Column:
        return Column(value == "<missing>" for value in self)


class Frame(dict[str, Any]):
    @property
    def columns(self) -> list[str]:
        return list(self)

    def to_numpy(self) -> Any:
        raise AssertionError("columns of texts are no numbers")


def test_a_data_frame_is_encoded_like_a_file(folder: Path) -> None:
    run_recipe(recipe(), folder / "run", progress=False)
    trained = load(folder / "run")
    (folder / "new.csv").write_text("b,a\nm,2.5\nf,-2.5\n", encoding="utf8")
    expected = trained.probabilities(folder / "new.csv")
    columns = {"b": ["m", "f"], "other": [None, None], "a": [2.5, -2.5]}
    for rows in (columns, Frame({name: Column(values) for name, values in columns.items()})):
        assert torch.equal(trained.probabilities(rows), expected)
        assert trained.predict(rows) == ["yes", "no"]
    import pandas  # here, so that a missing package fails this test alone

    assert torch.equal(trained.probabilities(pandas.DataFrame(columns).convert_dtypes()), expected)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": [1.0]}, "there is no column 'b'"),
        ({"a": [1.0, 2.0], "b": ["f"]}, "different lengths"),
        ({"a": 1.0, "b": "f"}, "a list or an array of values"),
        (Frame(a=Column(["<missing>"]), b=Column(["f"])), "a: no value"),
        ({"a": [], "b": []}, "no row to predict"),
        (torch.tensor([[float("nan"), 0.0, 1.0]]), "not finite"),
        (3, "not a single number"),
        (None, "a data frame or a path"),
    ],
)
def test_rows_that_do_not_fit_are_not_predicted(rows: Any, said: str, folder: Path) -> None:
    run_recipe(recipe(), folder / "run", progress=False)
    with pytest.raises(InputError, match=said) as error:
        load(folder / "run").predict(rows)
    assert "spent" not in str(error.value)


@pytest.mark.parametrize("wrong", [None, 3, b"run"])
def test_what_is_no_directory_or_no_module_is_not_loaded(wrong: Any, folder: Path) -> None:
    with pytest.raises(InputError, match="give the directory of a run"):
        load(wrong)
    with pytest.raises(InputError, match="an instance of"):
        load(folder, model=torch.nn.Linear)  # type: ignore[arg-type]


def test_the_models_own_file_says_what_it_is(folder: Path) -> None:
    run_recipe(recipe(), folder / "run", progress=False)
    with safe_open(str(folder / "run" / "model.safetensors"), framework="pt") as file:
        stated = json.loads(file.metadata()["sordino"])
    assert stated["inputs"] == {"input_shape": [3], "input_type": "float32", "classes": 2, "labels": ["no", "yes"]}
    assert stated["epsilon"] > 0
    assert "differentially private" in stated["guarantee"]


def test_what_is_wrong_with_the_data_leaves_no_file(folder: Path) -> None:
    text = (folder / "visits.csv").read_text()
    (folder / "visits.csv").write_text(text + "\nsecret-value,f,no", encoding="utf8")
    with pytest.raises(InputError, match=r"nothing was spent: visits\.csv: a: not a number") as error:
        run_recipe(recipe(), folder / "run", progress=False)
    assert "line 242" in error.value.private
    assert "secret-value" not in str(error.value)
    assert "242" not in str(error.value), "how many records there are is private"
    assert error.value.private.startswith("line 242, a")
    assert not (folder / "run").exists()


CODE = """
import torch

def rows(scale=1.0):
    inputs = torch.arange(240.0)[:, None] / 240 * scale
    return {"train": (inputs, (inputs[:, 0] > 0.5).long()), "classes": ["low", "high"]}

def net(shape, classes, width=3):
    return torch.nn.Sequential(torch.nn.Linear(shape[0], width), torch.nn.Tanh(), torch.nn.Linear(width, classes))
"""


def test_ones_own_code_is_a_dataset_and_a_model_where_it_is_allowed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text(CODE, encoding="utf8")
    made = recipe()
    document = made.to_toml().replace('name = "csv"', 'name = "mine.py:rows"')
    text = "\n".join(line for line in document.splitlines() if not line.startswith(("path", "test_path", "target")))
    text = text.replace('name = "linear"', 'name = "mine.py:net"\nwidth = 5')
    start, end = text.index("classes = ["), text.index("[model]")
    (folder / "own.toml").write_text(text[:start] + text[end:], encoding="utf8")
    assert main(["train", "own.toml", "--out", "run"]) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert main(["train", "own.toml", "--out", "run", "--allow-code"]) == 0
    with pytest.raises(Refused, match="names a function"):
        load(folder / "run")
    trained = sordino.load(folder / "run", allow_code=True)
    assert trained.labels == ("low", "high")
    assert set(trained.predict(torch.tensor([[0.0], [1.0]]))) <= {"low", "high"}


def test_rows_may_be_arrays_lists_or_tables_and_must_fit(folder: Path) -> None:
    run_recipe(recipe(), folder / "run", progress=False)
    trained = load(folder / "run")
    rows = torch.tensor([[0.9, 0.0, 1.0], [0.1, 1.0, 0.0]])
    expected = trained.predict(rows)
    assert trained.predict(rows.double().numpy()) == trained.predict(rows.tolist()) == expected
    with pytest.raises(InputError, match=r"the model fails on rows of shape \(7,\)"):
        trained.predict(torch.zeros(2, 7))
    with pytest.raises(InputError, match="rows must be numbers, a data frame or a path, got a list"):
        trained.predict(["a.csv", "b.csv"])
