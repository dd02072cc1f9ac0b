"""The package's public names are imported when asked for: the same objects as ever, whatever was imported before."""

from __future__ import annotations

import ast
import multiprocessing
import pickle
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import sordino

ORDERS = [
    ["import sordino"],
    ["import sordino.training"],
    ["from sordino.training import Settings", "import sordino"],
    ["import sordino", "sordino.train", "import sordino.training", "import sordino.runs.run"],
    ["import sordino.plan", "import sordino.runs.sweep", "from sordino import train, plan"],
    ["from sordino import train", "from sordino.runs.api import train as same", "assert train is same"],
    ["from sordino.cli import train, sweep", "from sordino import *", "import sordino"],
]
CHECK = """
import sordino
from types import FunctionType, ModuleType
assert isinstance(sordino.train, FunctionType) and isinstance(sordino.training, ModuleType)
assert isinstance(sordino.plan, ModuleType) and sordino.plan.Plan is sordino.Plan
from sordino import train
assert train is sordino.train is sordino.runs.api.train
assert sordino.methods.modelmix.plan
"""


def _each(codes: list[str]) -> None:
    for code in codes:
        for name in [name for name in sys.modules if name.split(".")[0] == "sordino"]:
            del sys.modules[name]  # torch stays: loading it anew would take most of the time
        exec(code, {})


def anew(*codes: str) -> None:
    """Runs each code as if the package had not been imported, in a process of their own."""
    process = multiprocessing.get_context("fork").Process(target=_each, args=(codes,))
    process.start()
    process.join()
    assert process.exitcode == 0


SUBMODULES = [
    module.name for module in pkgutil.iter_modules(sordino.__path__) if module.name not in ("_kernels", "__main__")
]


def fresh(code: str, *arguments: str) -> str:
    """What the code prints in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_mean_the_same_in_every_order_of_imports() -> None:
    anew(*("\n".join(order) + CHECK for order in ORDERS))


def test_each_submodule_can_be_the_first_one_imported() -> None:
    anew(*(f"import sordino.{name}" for name in SUBMODULES))


def test_no_submodule_has_a_public_name() -> None:
    assert not set(SUBMODULES) & set(sordino.__all__)


def test_type_checkers_read_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(sordino.__file__).read_text(encoding="utf8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {name: f"sordino.{module}" for name, module in sordino._HOMES.items()}
    assert sorted(seen) == sorted(sordino.__all__)


def test_each_name_is_its_modules_object() -> None:
    everything: dict[str, object] = {}
    exec("from sordino import *", everything)
    for name in sordino.__all__:
        there = getattr(import_module(f"sordino.{sordino._HOMES[name]}"), name)
        assert getattr(sordino, name) is everything[name] is there
        assert pickle.loads(pickle.dumps(there)) is there
    assert set(sordino.__all__) <= set(dir(sordino))


def test_the_package_and_its_errors_load_nothing_heavy() -> None:
    code = "import sys, sordino; sordino.InputError, dir(sordino); print(*sys.modules)"
    assert not {"torch", "numpy", "scipy", "dp_accounting"} & set(fresh(code).split())


@pytest.mark.parametrize("name", ["trian", "_kernel", "__wrapped__"])
def test_what_is_not_there_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'sordino' has no attribute '{name}'"):
        getattr(sordino, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from sordino import {name}")


def test_a_submodule_that_misses_a_dependency_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import not_installed")
    monkeypatch.setattr(sordino, "__path__", [*sordino.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        sordino.needy  # noqa: B018
