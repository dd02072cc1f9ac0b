"""The site builds without a warning and without the network; its generated pages cover recipes and commands."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from sordino import nets, registry
from sordino.cli import _parser
from sordino.data.words import SOURCE_KEYS
from sordino.features.words import OPTIONS as FEATURES
from sordino.runs import words
from sordino.runs.recipe import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    import generated_pages

    return generated_pages


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    offline = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees",
         ROOT / "docs", tmp_path / "html"],
        capture_output=True, text=True, timeout=250, check=False, env=offline,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    for page in ("index", "which_method", "reference/api", "reference/recipe", "reference/commands", "engine"):
        assert (tmp_path / "html" / f"{page}.html").exists()
    shown = (tmp_path / "html" / "reference" / "commands.html").read_text(encoding="utf8")
    assert "With --pay the choice" in shown, "options keep their two hyphens"
    assert "<!-- generated" not in (tmp_path / "html" / "reference" / "recipe.html").read_text(encoding="utf8")


def test_every_key_of_a_recipe_is_in_the_reference(generated) -> None:
    parts = dict(part.split("`\n", 1) for part in generated.recipe_keys().removeprefix("## `[").split("\n## `["))
    for section, kind in get_type_hints(Recipe).items():
        for key in fields(kind):
            if key.name != "options":
                assert f"| `{key.name}` |" in parts[f"{section}]"], f"{section}.{key.name}"


def test_every_key_of_a_recipe_has_a_meaning(generated) -> None:
    rows = [row for row in generated.recipe_keys().splitlines() if row.startswith("| `")]
    assert len(rows) > 50
    assert not [row for row in rows if row.endswith("|  |")]


def test_every_part_that_a_recipe_can_name_is_in_the_reference(generated) -> None:
    parts, methods = generated.recipe_parts(), generated.method_keys()
    for name in [*SOURCE_KEYS, *FEATURES, *nets.names(), *words.CLIPPINGS, *words.OPTIMIZERS]:
        assert f"| `{name}` |" in parts or f"### `{name}`" in parts, name
    for name, keys in SOURCE_KEYS.items():
        section = parts.split(f"### `{name}`")[1].split("\n## ")[0].split("\n### ")[0]
        assert [key for key in keys if f"| `{key}` |" not in section] == [], name
        assert "|  |" not in section, f"{name}: a key without a meaning"
    for name in registry.names():
        section = methods.split(f"## `{name}`\n")[1].split("\n## ")[0]
        found = registry.words(name)
        assert found is not None
        assert [key for key in found.keys if f"| `{key}` |" not in section] == [], name
        assert [one for one in (*found.models, *found.features) if f"| `{one}` |" not in section] == []


def commands(parser: argparse.ArgumentParser, path: str = "sordino") -> Iterator[str]:
    """The words of the program and of every command below it."""
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, f"{path} {name}")


def test_every_command_and_method_is_in_the_reference(generated) -> None:
    page, everything = generated.commands(), list(commands(_parser()))
    assert {"sordino train", "sordino account dpsgd", "sordino data fetch"} <= set(everything)
    assert [command for command in everything if f"`{command}`\n" not in page] == []
    assert "`--resume`" in page
    methods = generated.method_keys()
    assert [name for name in registry.names() if f"## `{name}`\n" not in methods] == []


def test_a_field_without_a_comment_is_shown_without_a_meaning(generated) -> None:
    from dataclasses import dataclass

    @dataclass
    class Section:
        spoken: int = 1  # what | it means
        silent: str | None = None

    table = generated._key_table(Section, list(fields(Section)))
    assert "| `silent` | `str` | – |  |" in table
