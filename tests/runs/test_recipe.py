"""Recipes: strict keys, typed values, defaults filled in, and a round trip through TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from small_recipes import small_toml
from sordino.errors import InputError
from sordino.runs.overrides import with_overrides
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.runs.verify import verify

MINIMAL = """
[data]
name = "fashion-mnist-mini"
[model]
name = "linear"
[privacy]
epsilon = 3
delta = 1e-5
[sampling]
expected_batch = 100
[train]
steps = 10
lr = 1
momentum = 0.9
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(MINIMAL)
    return file


def test_defaults_are_filled_in_and_survive_a_round_trip(path: Path) -> None:
    recipe = Recipe.read(path)
    assert recipe.sampling.name == "poisson"
    assert recipe.train.options == {"momentum": 0.9}
    written = recipe.to_toml()
    assert tomllib.loads(written)["clipping"]["clip_norm"] == 1.0
    path.write_text(written)
    assert Recipe.read(path) == recipe


def test_a_whole_number_may_stand_for_a_float_but_not_the_reverse(path: Path) -> None:
    assert Recipe.read(path).privacy.epsilon == 3.0
    with pytest.raises(InputError, match=r"train\.steps = 2\.5 must be of type int"):
        Recipe.read(path, ["train.steps=2.5"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("privacy.epsilom=3", "did you mean 'epsilon'"),
        ("sampling.expected_bach=3", "did you mean 'expected_batch'"),
        ("privcy.epsilon=3", "unknown section 'privcy': did you mean 'privacy'"),
        ("privacy.epsilon=true", r"privacy\.epsilon = True must be of type float"),
        ("data.name=3", r"data\.name = 3 must be of type str"),
        ("nonsense", "write section.key=value"),
        ("privacy.epsilon=3,0", r"privacy\.epsilon = '3,0' must be of type float: write 3\.0, with a point"),
        ("train.learning_rate=0.1", "did you mean 'lr'"),
        ("sampling.batch_size=10", "did you mean 'expected_batch'"),
        ("features.name=dp-pcx", "with the method dp-mac: dp-pca"),
        ("train.lr.decay=2", r"there is no section \[train\.lr\] in the recipe"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_nearest_right_one(path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe.read(path, [override])


def test_overrides_take_toml_values_and_bare_words(path: Path) -> None:
    recipe = Recipe.read(path, ["train.lr=0.25", "sampling.name=partition", 'run.name="a b"'])
    assert (recipe.train.lr, recipe.sampling.name, recipe.run.name) == (0.25, "partition", "a b")


def test_a_missing_key_is_named_with_its_near_miss(path: Path) -> None:
    path.write_text(MINIMAL.replace("lr = 1", "l_r = 1"))
    with pytest.raises(InputError, match=r"unknown key in .train.: 'l_r': did you mean 'lr'"):
        Recipe.read(path)


def test_an_unreadable_recipe_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no recipe"):
        Recipe.read(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n")
    with pytest.raises(InputError, match="not valid TOML"):
        Recipe.read(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8 text"):
        Recipe.read(broken)
    with pytest.raises(InputError, match="can't be read: Is a directory"):
        Recipe.read(tmp_path)


def test_a_recipe_without_a_name_is_called_like_its_file(tmp_path: Path) -> None:
    for file, name in [("visits.toml", "visits"), ("a b.v2.toml", "a b.v2"), (".hidden", "run"), ("a:b.toml", "run")]:
        (tmp_path / file).write_text(small_toml(), encoding="utf8")
        assert Recipe.read(tmp_path / file).run.name == name
    assert Recipe.read(tmp_path / "visits.toml", ["run.name='mine'"]).run.name == "mine"


def test_a_renamed_recipe_continues_its_run_under_the_first_name(tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text(small_toml(), encoding="utf8")
    out = tmp_path / "out"
    done = run_recipe(Recipe.read(tmp_path / "first.toml"), out, progress=False)
    assert done["name"] == "first"
    (tmp_path / "first.toml").rename(tmp_path / "second.toml")
    assert run_recipe(Recipe.read(tmp_path / "second.toml"), out, resume=True, progress=False) == done
    assert verify(out).genuine


def test_overrides_reach_the_tables_of_a_section() -> None:
    document = {"data": {"columns": {"age": {"kind": "number", "low": 0, "high": 100}}}, "train": {"lr": 1}}
    changed = with_overrides(document, ["data.columns.age.high=90", "data.columns.age.low="])
    assert changed == {"data": {"columns": {"age": {"kind": "number", "high": 90}}}, "train": {"lr": 1}}
    assert document["data"]["columns"]["age"]["high"] == 100  # type: ignore[index]
    with pytest.raises(InputError, match=r"there is no section \[data\.colums\]"):
        with_overrides(document, ["data.colums.age.high=90"])
    with pytest.raises(InputError, match=r"\[data\.columns\.age\] has no 'hihg': did you mean 'high'"):
        with_overrides(document, ["data.columns.age.hihg="])


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Notepad writes one; it was `Invalid statement (at line 1, column 1)`."""
    path = tmp_path / "recipe.toml"
    path.write_text(small_toml(), encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert Recipe.read(path).data.name
