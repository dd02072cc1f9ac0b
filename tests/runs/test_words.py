"""Names and keys of recipes are checked before anything slow is loaded, by tables that are those of the parts."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from small_recipes import small_recipe, small_toml
from sordino import nets, registry
from sordino.clipping import _BY_NAME as CLIPPINGS
from sordino.clipping import P_AVERAGED
from sordino.data.sources import SOURCES
from sordino.data.words import SOURCE_KEYS
from sordino.errors import InputError
from sordino.methods.correlated.strategies import KINDS as STRATEGIES
from sordino.methods.coupling.recipe import BEFORE_NOISE, WARM_UP
from sordino.methods.coupling.weights import RULES
from sordino.methods.dp_mac import recipe as mac
from sordino.methods.hidden_state.losses import LOSSES
from sordino.methods.hidden_state.recipe import _OWN as HIDDEN_KEYS
from sordino.plan.core import UNITS
from sordino.runs import words
from sordino.runs.build import OPTIMIZERS
from sordino.runs.recipe import Recipe
from sordino.training.settings import SCHEDULERS
from sordino.training.updates import Averaging

TYPOS = {
    "trian.lr": "did you mean 'train'",
    "train.lrr": "did you mean 'lr'",
    "train.optimizer": "did you mean 'sgd'",
    "model.name": "did you mean 'linear'",
    "model.zerro": "did you mean 'zero'",
    "data.name": "did you mean 'fashion-mnist-mini'",
    "data.record": "did you mean 'records'",
    "features.name": "did you mean 'scattering'",
    "method.name": "did you mean 'dpsgd'",
    "method.inner_lenght": "did you mean 'inner_length'",
    "clipping.name": "did you mean 'flat'",
    "sampling.name": "did you mean 'poisson'",
}
WRONG = {
    "train.optimizer": "sdg", "model.name": "liner", "data.name": "fashion-mnist-mni", "features.name": "scater",
    "method.name": "dpsdg", "clipping.name": "flt", "sampling.name": "poison",
}  # fmt: skip
READ = """
import sys
from sordino.cli import main
for wrong in sys.argv[2:]:
    assert main(["train", sys.argv[1], "--set", wrong, "--out", "/nowhere/at/all"]) == 2, wrong
for slow in ("torch", "scipy", "numpy", "dp_accounting"):
    assert slow not in sys.modules, slow
"""


def test_a_misspelling_is_told_before_anything_slow_is_loaded(tmp_path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(small_toml())
    given = [f"{key}={WRONG.get(key, '1')}" for key in TYPOS]
    done = subprocess.run([sys.executable, "-c", READ, path, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.strip().splitlines()
    assert len(said) == len(TYPOS)
    for line, expected in zip(said, TYPOS.values(), strict=True):
        assert expected in line
        assert "known names are" in line


def test_the_tables_are_those_of_the_parts() -> None:
    assert tuple(SCHEDULERS) == words.SCHEDULERS
    assert words.UNITS == UNITS
    assert words.REFUSED_CLIPPINGS == P_AVERAGED
    for name in words.AVERAGES:
        Averaging(name)
    clippings = {
        name: [key for key in kind.__dataclass_fields__ if key not in ("name", "norm", "clip_norm")]
        for name, kind in CLIPPINGS.items()
    }
    assert {name: list(keys) for name, keys in words.CLIPPINGS.items()} == clippings


def test_the_optimizers_have_these_options() -> None:
    assert set(words.OPTIMIZERS) == set(OPTIMIZERS)
    for name, kind in OPTIMIZERS.items():
        options = set(inspect.signature(kind).parameters) - {"params", "lr"}
        assert set(words.OPTIMIZERS[name]) == options, name


def test_the_networks_have_these_options() -> None:
    for name in nets.names():
        parameters = inspect.signature(nets._function(name)).parameters.values()
        options = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "vectors"]
        assert list(nets.options_of(name)) == options


def test_the_sources_of_data_have_these_keys() -> None:
    assert {name: {one.name for one in fields(kind)} for name, kind in SOURCES.items()} == {
        name: set(keys) for name, keys in SOURCE_KEYS.items()
    }


def test_each_built_in_method_gives_its_words() -> None:
    for name in registry.names():
        assert isinstance(registry.words(name), registry.Words)


def test_the_words_of_methods_are_those_that_they_read() -> None:
    hidden, coupling, dp_mac = (registry.words(name) for name in ("hidden-state", "coupling", "dp-mac"))
    assert hidden is not None
    assert coupling is not None
    assert dp_mac is not None
    assert set(hidden.choices["loss"]) == set(LOSSES)
    options = {one.name for loss in LOSSES.values() for one in fields(loss)} - {"outputs"}
    assert set(hidden.keys) == {*HIDDEN_KEYS, *options, "clip"}
    assert set(coupling.choices["rule"]) == set(RULES)
    options = {one.name for rule in RULES.values() for one in fields(rule)}
    assert set(coupling.keys) == {*options, *BEFORE_NOISE, *WARM_UP, "projection", "rule"}
    read = {*mac._Z, *mac._EXPANSION, *mac._BOUNDS, *mac._THRESHOLDS, "w_steps", "floor"}
    assert set(dp_mac.keys) == read


def test_every_key_of_a_method_has_a_meaning_and_correlated_noise_names_its_strategies() -> None:
    for name in registry.names():
        assert all((registry.words(name) or registry.Words()).keys.values()), name
    correlated = registry.words("correlated")
    assert correlated is not None
    assert correlated.choices["strategy"] == STRATEGIES


def test_a_name_that_only_another_method_knows_says_which() -> None:
    with pytest.raises(InputError, match="'dp-pca' is for the method dp-mac"):
        small_recipe(features={"name": "dp-pca"})
    with pytest.raises(InputError, match="'classifier' is for the method dp-mac"):
        small_recipe(model={"name": "classifier"})


def test_a_key_can_be_taken_out_of_a_recipe(tmp_path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(small_toml())
    read = Recipe.read(path, ["train.steps=", "train.epochs=2"])
    assert (read.train.steps, read.train.epochs) == (None, 2.0)
    with pytest.raises(InputError, match=r"\[train\] has no 'stps': did you mean 'steps'"):
        Recipe.read(path, ["train.stps="])
    assert Recipe.read(path, ["declaration.contact=''"]).declaration.contact == ""
