"""Recipes with users as the unit: a column, an array or the names of pictures say whose a row is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
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


IMAGES = """
[run]
name = "pictures"
[data]
name = "{kind}"
records = 10
path = "{path}"
classes = ["cat", "dog"]
{more}
[model]
name = "linear"
[privacy]
noise_multiplier = 1.0
delta = 1e-3
unit = "user"
rows_per_user = 3
[sampling]
name = "{sampler}"
expected_batch = 5
[train]
lr = 0.1
steps = 2
"""


def pictures(folder: Path) -> tuple[Path, str]:
    from PIL import Image

    generator = np.random.default_rng(0)
    for i in range(40):
        place = folder / "pictures" / ("cat" if i % 3 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (6, 6), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"p{i % 10}_{i}.png")
    return folder / "pictures", 'size = [4, 4]\nchannels = 1\nuser = "^(p[0-9]+)_"'


def arrays(folder: Path) -> tuple[Path, str]:
    generator = np.random.default_rng(0)
    np.savez(
        folder / "pictures.npz",
        inputs=generator.integers(0, 256, (40, 1, 4, 4), dtype=np.uint8),
        targets=np.array(["cat" if i % 3 else "dog" for i in range(40)]),
        owner=np.arange(40) % 10,
    )
    return folder / "pictures.npz", 'user = "owner"'


def notes(folder: Path) -> tuple[Path, str]:
    rows = "\n".join(f"p{i % 10},a note of {i},{'cat' if i % 3 else 'dog'}" for i in range(40))
    (folder / "notes.csv").write_text(f"who,note,kind\n{rows}\n")
    return folder / "notes.csv", 'target = "kind"\nuser = "who"\n[data.columns]\nnote = {kind = "text", buckets = 16}'


@pytest.mark.parametrize(
    ("kind", "made", "sampler"),
    [("images", pictures, "allocation"), ("npz", arrays, "poisson"), ("csv", notes, "allocation")],
    ids=["pictures", "arrays", "texts"],
)
def test_pictures_arrays_and_texts_are_trained_with_users_and_everything_says_so(
    kind: str, made: Callable[[Path], tuple[Path, str]], sampler: str, tmp_path: Path
) -> None:
    path, more = made(tmp_path)
    (tmp_path / "recipe.toml").write_text(IMAGES.format(kind=kind, path=path, more=more, sampler=sampler))
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "recipe.toml"), "--out", str(out)]) == 0
    header = json.loads((out / "ledger.jsonl").read_text().splitlines()[0])
    assert (header["unit"], header["rows_per_user"], header["records"]) == ("user", 3, 10)
    guarantee = json.loads((out / "result.json").read_text())["guarantee"]
    assert guarantee["unit"] == "user"
    assert "user" in guarantee["sentence"]
    assert main(["report", str(out)]) == 0
    page = next(out.glob("*.html")).read_text()
    assert "one user" in page
    assert main(["verify", str(out)]) == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('user = "^(p[0-9]+)_"', 'user = "^p[0-9]+_"', "one group"),
        ('user = "^(p[0-9]+)_"', 'user = "(p"', "regular expression"),
        ('user = "^(p[0-9]+)_"', 'user = "^(p[0-4])_"', "without an id"),
        ('user = "^(p[0-9]+)_"', "user = 3", "must be a text"),
    ],
)
def test_names_of_pictures_that_do_not_say_whose_they_are_are_an_error(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, more = pictures(tmp_path)
    text = IMAGES.format(kind="images", path=path, more=more.replace(old, new), sampler="poisson")
    (tmp_path / "recipe.toml").write_text(text)
    assert main(["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
