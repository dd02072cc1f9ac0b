"""The package's structure: modules import only from the layers above them, without cycles; the core names no method.

Imports inside functions count too, as do relative imports, `import_module` of a name written out, and names that a
package imports on first use (sordino.lazy). Imports for type checkers (`if TYPE_CHECKING:`) do not count, since they
are never run.
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
from sordino.methods import METHODS

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
    waiting = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                yield from child.orelse
                waiting += child.orelse
            else:
                yield child
                waiting.append(child)


@cache  # a tree is its own key: those of the package are parsed once
def imported(name: str, tree: ast.Module, package: bool) -> tuple[tuple[str, str], ...]:
    """(module, name in it or "") of each import in a module, at its top or in a function; relative ones resolved."""
    return tuple(_imported(name, tree, package))


def _imported(name: str, tree: ast.Module, package: bool) -> Iterator[tuple[str, str]]:
    for node in run_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                parts = f"sordino.{name}".split(".")
                above = parts[: len(parts) - node.level + package]
                home = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((home, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            texts = [
                arg.value for arg in (*node.args, *(k.value for k in node.keywords)) if isinstance(arg, ast.Constant)
            ]
            if called in ("import_module", "__import__") and texts and isinstance(texts[0], str):
                inside = texts[0].removeprefix(".")  # a relative name, with its package as the second argument
                yield texts[0] if inside == texts[0] else f"{texts[-1] if len(texts) > 1 else 'sordino'}.{inside}", ""


@cache
def homes(package: str) -> dict[str, str]:
    """The module of each name that a package imports on first use: it repeats them for type checkers."""
    path = ROOT / package.replace(".", "/") / "__init__.py"
    if not path.is_file() or "lazy_names(" not in (text := path.read_text(encoding="utf8")):
        return {}
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return {alias.name: (node.module or "").partition(".")[2] for node in found for alias in node.names}


def imports(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The package's modules that each module imports; "sordino" where it imports the package as a whole."""
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        targets = set()
        for home, member in imported(name, tree, (ROOT / name.replace(".", "/")).is_dir()):
            if home.split(".")[0] == "sordino" and member != "__version__":
                inside = home.partition(".")[2]
                deeper = f"{inside}.{member}".strip(".")
                targets.add(deeper if deeper in trees else inside or homes("").get(member, "sordino"))
                if deeper not in trees and inside and member in homes(inside):
                    targets.add(homes(inside)[member])
        graph[name] = targets - {name}
    return graph


def layer(module: str) -> tuple[int, str]:
    """(layer, entry of LAYERS) of a module; the longest entry that fits counts. The package as a whole comes last."""
    if module == "sordino":
        return len(LAYERS), module
    rooms = [(number, room) for number, row in enumerate(LAYERS) for room in row]
    fits = [(number, room) for number, room in rooms if module == room or module.startswith(room + ".")]
    assert fits, f"{module} is in no layer: add it to LAYERS"
    return max(fits, key=lambda found: len(found[1]))


def downward(trees: dict[str, ast.Module]) -> list[str]:
    """Imports from a layer that is not above the importing one."""
    found = []
    for name, targets in imports(trees).items():
        (own, room) = layer(name)
        for target in sorted(targets):
            (other, its_room) = layer(target)
            if room != its_room and other >= own:
                found.append(f"{name} imports {target}")
    return found


ENGINE = ("sums", "labels", "tape", "state", "layers", "checks")
"""The folders of gradients/, in their order; its other modules stand between and around them."""


def engine_backward(trees: dict[str, ast.Module]) -> list[str]:
    """Imports in a folder of gradients/ from a later one."""
    rooms = {room: number for number, room in enumerate(ENGINE)}
    found = []
    for name, targets in imports(trees).items():
        for target in sorted(targets):
            own, other = (rooms.get(m.split(".")[1], -1) if m.startswith("gradients.") else -1 for m in (name, target))
            if -1 < own < other:
                found.append(f"{name} imports {target}")
    return found


def cycles(trees: dict[str, ast.Module]) -> list[str]:
    """Chains of imports that lead back to their first module."""
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
                str(value)
                for key, value in ast.iter_fields(node)
                if key in ("id", "attr", "arg", "name", "asname", "module")
            ]
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                texts.append(node.value)
            found += [f"{name}:{getattr(node, 'lineno', '?')} says {text!r}" for text in texts if NAMES.search(text)]
    return found


WITHOUT_TORCH = ("errors", "checks", "console", "files", "lazy", "registry", "schedule", "shown", "accounting")
"""Commands that only compute must not wait for torch to load."""


def with_torch(trees: dict[str, ast.Module]) -> list[str]:
    """Imports of torch in modules that must work without it."""
    return [
        f"{name} imports torch"
        for name, tree in trees.items()
        if name.split(".")[0] in WITHOUT_TORCH
        and any(home.split(".")[0] == "torch" for home, _ in imported(name, tree, package=False))
    ]


def test_modules_import_only_from_the_layers_above_them() -> None:
    assert downward(modules()) == []


def test_the_engines_folders_import_only_from_those_before_them() -> None:
    assert {path.parent.name for path in ROOT.glob("gradients/*/__init__.py")} == set(ENGINE)
    assert engine_backward(modules()) == []


def test_there_is_no_cycle_of_imports() -> None:
    assert cycles(modules()) == []


def test_accounting_and_what_it_needs_import_no_torch() -> None:
    assert with_torch(modules()) == []


def test_the_core_contains_no_methods_name() -> None:
    assert named(modules()) == []


def test_every_method_has_a_folder_of_its_own_layer_and_a_name_that_is_looked_for() -> None:
    folders = {path.parent.name for path in ROOT.glob("methods/*/__init__.py")}
    assert folders == {room.removeprefix("methods.") for row in LAYERS for room in row if room.startswith("methods.")}
    assert [name for name in folders | set(METHODS) if not NAMES.search(name)] == []


def test_the_root_has_about_ten_modules() -> None:
    assert len(list(ROOT.glob("[a-z]*.py"))) <= 11


def test_files_have_at_most_400_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf8").splitlines()) for path in ROOT.rglob("*.py")}
    assert {path: n for path, n in lengths.items() if n > 400} == {}


def test_the_architecture_page_lists_every_module_and_folder_of_the_root() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf8")
    rooms = [path.stem for path in ROOT.glob("[a-z]*.py")] + [
        f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")
    ]
    assert [room for room in rooms if f"`{room}`" not in page] == []


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


def test_the_fast_selection_imports_no_browser_and_no_library_of_models() -> None:
    makefile = (TESTS.parent / "Makefile").read_text(encoding="utf8")
    ignored = tuple(re.findall(r"--ignore tests/(\S+)", makefile))
    foreign = {"selenium", "timm", "transformers", "peft"}
    found = []
    for path in TESTS.rglob("test_*.py"):
        name = path.relative_to(TESTS).as_posix()
        if not name.startswith(ignored):
            tops = ast.parse(path.read_text(encoding="utf8")).body  # imports inside of tests are for slow tests
            nodes = [
                node for top in tops if not isinstance(top, ast.FunctionDef | ast.ClassDef) for node in ast.walk(top)
            ]
            texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
            modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            if foreign & {*texts, *(module.split(".")[0] for module in modules)}:
                found.append(name)
    assert ignored, "make unit names the folders that it leaves out"
    assert found == []


IN_A_FUNCTION = "def f():\n    "
BREAKING = {
    "a lower layer": ("release/ledger.py", "from sordino.training.steps import private_steps", downward),
    "a lower layer, by its package": ("release/ledger.py", "from sordino import training", downward),
    "a lower layer, as a plain import": ("release/ledger.py", "import sordino.training.steps", downward),
    "a lower layer, in a function": ("plan/core.py", IN_A_FUNCTION + "from sordino.runs import recipe", downward),
    "a lower layer, by a relative import": ("release/ledger.py", "from ..training import steps", downward),
    "a lower layer, by import_module": ("plan/core.py", 'import_module("sordino.runs.recipe")', downward),
    "a lower layer, by import_module of a relative name": (
        "plan/core.py",
        'import_module(".runs.recipe", package="sordino")',
        downward,
    ),
    "a lower layer, by a public name of the package": ("release/ledger.py", "from sordino import train", downward),
    "the package as a whole, and so any layer": ("release/ledger.py", "import sordino\nsordino.train", downward),
    "a layer beside it": ("accounting/pld.py", "from sordino.gradients import Rows", downward),
    "a method, from the core": (
        "training/loop.py",
        IN_A_FUNCTION + "from sordino.methods.dpsgd import DPSGD",
        downward,
    ),
    "another method": ("methods/dp_mac/run.py", "from sordino.methods.coupling.use import PublicUse", downward),
    "a cycle": ("plan/core.py", "from sordino.plan.make import make_plan", cycles),
    "a cycle, in a function": ("plan/core.py", IN_A_FUNCTION + "from sordino.plan.make import make_plan", cycles),
    "a cycle, by a relative import": ("plan/core.py", "from .make import make_plan", cycles),
    "a cycle, by a name that a package imports on first use": (
        "plan/core.py",
        IN_A_FUNCTION + "from sordino.plan import make_plan",
        cycles,
    ),
    "a later folder of the engine": (
        "gradients/sums/gram.py",
        IN_A_FUNCTION + "from sordino.gradients.labels import lineage",
        engine_backward,
    ),
    "torch, in accounting": ("accounting/pld.py", IN_A_FUNCTION + "import torch", with_torch),
    "a method's name in a string": ("training/fit.py", "special = plan.method.name == 'dp-mac'", named),
    "a method's name in an f-string": ("training/fit.py", "text = f'{plan} with ModelMix'", named),
    "a method's name as an identifier": ("runs/run.py", "def run_modelmix(): ...", named),
    "a method's name as an attribute": ("runs/run.py", "plan.hidden_state", named),
    "a method's name as a keyword": ("runs/run.py", "f(coupling=1)", named),
    "a method's name as an alias": ("runs/run.py", "import math as dp_mac", named),
}


@pytest.mark.parametrize("kind", BREAKING)
def test_a_line_that_breaks_a_rule_is_found(kind: str) -> None:
    module, line, check = BREAKING[kind]
    text = (ROOT / module).read_text(encoding="utf8")
    name = module.removesuffix(".py").replace("/", ".")
    of_all = (downward, cycles, engine_backward)  # the other rules look at one module at a time
    others = modules() if check in of_all else {}
    found = check({**others, name: ast.parse(f"{text}\n{line}\n")})
    assert found, kind
    assert all(name in sentence for sentence in found), found


def test_a_module_outside_all_layers_is_found() -> None:
    with pytest.raises(AssertionError, match="is in no layer"):
        downward({**modules(), "new_module": ast.parse("import sordino.errors")})


def test_imports_for_type_checkers_do_not_count() -> None:
    line = "if TYPE_CHECKING:\n    from sordino.training import steps\nelse:\n    from sordino.runs import recipe"
    found = downward({**modules(), "plan.core": ast.parse(line)})
    assert found == ["plan.core imports runs.recipe"]
