"""A recipe with users as the unit: a column of the table says whose a row is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sordino.cli import main

RECIPE = """
[run]
name = "visits"
[data]
name = "csv"
records = 10
path = "{path}"
target = "ill"
classes = ["no", "yes"]
user = "patient"
[data.columns]
age = {{kind = "number", low = 0, high = 100}}
[model]
name = "linear"
[privacy]
noise_multiplier = 1.0
delta = 1e-3
unit = "user"
rows_per_user = 2
[sampling]
expected_batch = 5
[train]
lr = 0.1
steps = 2
"""


def written(folder: Path, recipe: str = RECIPE) -> str:
    rows = "\n".join(f"p{i % 10},{20 + i},{'yes' if i % 3 else 'no'}" for i in range(40))
    (folder / "visits.csv").write_text(f"patient,age,ill\n{rows}\n")
    (folder / "recipe.toml").write_text(recipe.format(path=folder / "visits.csv"))
    return str(folder / "recipe.toml")


def test_a_table_with_a_user_column_is_trained_with_users_as_records(tmp_path: Path) -> None:
    assert main(["train", written(tmp_path), "--out", str(tmp_path / "run")]) == 0
    header = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])
    assert (header["unit"], header["rows_per_user"], header["records"]) == ("user", 2, 10)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["guarantee"]["unit"] == "user"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('user = "patient"', 'ignore = ["patient"]', "the rows have no owners"),
        ('user = "patient"', 'user = "age"', "can't be an input"),
        (
            "[train]\nlr = 0.1",
            '[method]\nname = "modelmix"\nlr = 0.1\ntau_over_lr = 0.1\n[train]',
            "treats a row as a record",
        ),
    ],
)
def test_what_would_not_protect_users_is_refused_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    recipe = written(tmp_path, RECIPE.replace(old, new))
    assert main(["train", recipe, "--out", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


CODE = """
import torch
def rows():
    return {{"train": (torch.ones(40, 3), torch.arange(40) % 2), "classes": 2, "users": {users}}}
"""


@pytest.mark.parametrize(
    ("users", "said"),
    [
        ("[i % 10 for i in range(40)]", None),
        ("torch.arange(40) % 10", None),
        ("[1, 2]", "one id for each row"),
        ("[None] * 40", "without missing values"),
        ("None", "the rows have no owners"),
    ],
)
def test_a_function_of_ones_own_says_whose_the_rows_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], users: str, said: str | None
) -> None:
    (tmp_path / "own.py").write_text(CODE.format(users=users))
    _, rest = RECIPE.split("[model]")
    recipe = f'[data]\nname = "{tmp_path / "own.py"}:rows"\nrecords = 10\n[model]{rest}'
    (tmp_path / "recipe.toml").write_text(recipe.format())
    out = tmp_path / "run"
    code = main(["train", str(tmp_path / "recipe.toml"), "--allow-code", "--out", str(out)])
    assert code == (0 if said is None else 2)
    if said is not None:
        assert said in capsys.readouterr().err
        assert not out.exists()
    else:
        assert json.loads((out / "ledger.jsonl").read_text().splitlines()[0])["unit"] == "user"
