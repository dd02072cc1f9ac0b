"""The house: modules import only what stands above them, without cycles, and the core knows no method by name.

Imports inside functions count too; imports for type checkers (`if TYPE_CHECKING:`) do not, since they are never run.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import sordino

ROOT = Path(sordino.__file__).parent
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "lazy"),
    ("checks", "console", "files", "registry", "shown", "split"),
    ("native",),
    ("randomness", "schedule"),
    ("sampling", "clipping"),
    ("release", "gradients", "accounting"),  # blind to each other
    ("plan",),
    ("records",),
    ("ranks",),
    ("training",),
    ("audit", "data", "nets"),
    ("features", "report"),
    (
        "methods.dpsgd",
        "methods.modelmix",
        "methods.hidden_state",
        "methods.dp_mac",
        "methods.coupling",
        "methods.correlated",
    ),
    ("methods",),
    ("diagnostics",),
    ("runs",),
    ("sklearn", "hf"),  # for callers of other libraries: nothing of the core knows them
    ("cli",),
    ("__main__",),
)
NAMES = re.compile(r"dp[-_ ]?sgd|model[-_ ]?mix|hidden[-_ ]state|dp[-_ ]?mac\b|coupling|\bcorrelated\b", re.IGNORECASE)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package but its own __init__, by dotted name without the package's."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            found[name] = ast.parse(path.read_text(encoding="utf8"))
    return found


def run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from (other, *run_nodes(other))
            continue
        yield child
        yield from run_nodes(child)


def imports(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The package's modules that each module imports, at its top or in a function."""
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        targets = set()
        for node in run_nodes(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sordino":
                home = (node.module or "").partition(".")[2]
                for alias in node.names:
                    deeper = f"{home}.{alias.name}".lstrip(".")
                    targets.add(deeper if deeper in trees else home)
            elif isinstance(node, ast.Import):
                targets |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("sordino.")}
        graph[name] = targets - {"", name}
    return graph


def layer(module: str) -> tuple[int, str]:
    """(number, room) of a module; the longest name that fits counts."""
    rooms = [(number, room) for number, row in enumerate(LAYERS) for room in row]
    fits = [(number, room) for number, room in rooms if module == room or module.startswith(room + ".")]
    assert fits, f"{module} stands in no room: say where it belongs in LAYERS"
    return max(fits, key=lambda found: len(found[1]))


def downward(trees: dict[str, ast.Module]) -> list[str]:
    """Imports of a room that does not stand above the importing one."""
    found = []
    for name, targets in imports(trees).items():
        (own, room) = layer(name)
        for target in sorted(targets):
            (other, its_room) = layer(target)
            if room != its_room and other >= own:
                found.append(f"{name} imports {target}")
    return found


def cycles(trees: dict[str, ast.Module]) -> list[str]:
    """Modules that import themselves through others."""
    graph, found = imports(trees), []
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == 1:
            found.append(" → ".join((*path[path.index(name) :], name)))
        elif name in graph and name not in state:
            state[name] = 1
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            state[name] = 2

    for name in graph:
        visit(name, ())
    return found


def named(trees: dict[str, ast.Module]) -> list[str]:
    """Names of methods in the code of the core: identifiers and strings, not docstrings or comments."""
    found = []
    for name, tree in trees.items():
        if name.split(".")[0] == "methods":
            continue
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            texts = [
                str(value) for key, value in ast.iter_fields(node) if key in ("id", "attr", "arg", "name", "module")
            ]
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                texts.append(node.value)
            found += [f"{name}:{getattr(node, 'lineno', '?')} says {text!r}" for text in texts if NAMES.search(text)]
    return found


def test_modules_import_only_what_stands_above_them() -> None:
    assert downward(modules()) == []


def test_no_module_imports_itself_through_others() -> None:
    assert cycles(modules()) == []


def test_the_core_contains_no_methods_name() -> None:
    assert named(modules()) == []


def test_the_root_has_about_ten_modules() -> None:
    assert len(list(ROOT.glob("[a-z]*.py"))) <= 12


TESTS = Path(__file__).parent
OUTSIDE = ("benchmarks", "bit_identity", "devices", "docs", "experiments", "methods/sixth", "models")
"""Folders of tests that mirror no folder of the package."""


def test_tests_stand_where_what_they_test_stands() -> None:
    for path in TESTS.rglob("test_*.py"):
        folder = path.parent.relative_to(TESTS).as_posix()
        assert folder in OUTSIDE or (ROOT / folder).is_dir(), f"{path}: the package has no {folder}/"
    loose = [path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py") if path != Path(__file__)]
    modules_of_root = tuple(path.stem for path in ROOT.glob("[a-z]*.py"))
    assert [name for name in loose if not name.startswith(modules_of_root)] == [], "tests of a room go into its folder"


def test_the_tests_that_were_measured_as_slow_exist() -> None:
    for name in json.loads((TESTS / "slow.json").read_text(encoding="utf8")):
        path, *_, function = name.split("::")
        assert f"def {function}(" in (TESTS / path).read_text(encoding="utf8"), f"slow.json names {name}: measure anew"


@pytest.mark.parametrize(
    ("module", "line", "check", "said"),
    [
        ("release/ledger.py", "from sordino.training.steps import private_steps", downward, "release.ledger imports"),
        ("accounting/pld.py", "from sordino.gradients import Rows", downward, "accounting.pld imports gradients"),
        (
            "training/loop.py",
            "def f():\n    from sordino.methods.dpsgd import DPSGD",
            downward,
            "imports methods.dpsgd",
        ),
        (
            "methods/dp_mac/run.py",
            "from sordino.methods.coupling.use import PublicUse",
            downward,
            "methods.coupling.use",
        ),
        ("plan/core.py", "def f():\n    from sordino.plan.make import make_plan", cycles, "plan.core → plan.make"),
        ("training/fit.py", "special = plan.method.name == 'dp-mac'", named, "training.fit"),
        ("runs/run.py", "def run_modelmix(): ...", named, "run_modelmix"),
    ],
)
def test_a_line_that_breaks_the_house_is_found(module: str, line: str, check: object, said: str) -> None:
    text = (ROOT / module).read_text(encoding="utf8")
    name = module.removesuffix(".py").replace("/", ".")
    found = check({**modules(), name: ast.parse(f"{text}\n{line}\n")})  # type: ignore[operator]
    assert any(said in sentence for sentence in found), found
