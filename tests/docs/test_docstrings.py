"""Every public function and class documents each of its parameters, and the examples in docstrings run."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sordino
from sordino.registry import method_class, names

PUBLIC = {name: getattr(sordino, name) for name in sordino.__all__}
PACKAGES = ("data", "report", "features", "nets", "diagnostics.instruments", "hf", "sklearn", "training", "plan")
REFERS = {  # their docstrings refer to another one for the arguments
    "training.train",
    "training.train_without_noise",
    "sklearn.PrivateClassifier",
}
MAKERS = {name: method_class(name).plan for name in names()}
SOURCE = Path(sordino.__file__).parent
WITH_EXAMPLES = sorted(
    "sordino." + ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf8")
)


def documented() -> Iterator[tuple[str, Any, list[str]]]:
    """(name, thing, parameters) of all that the API reference shows: functions, classes, and their own methods."""
    for name, thing in PUBLIC.items():
        if not inspect.isclass(thing):
            yield name, thing, list(inspect.signature(thing).parameters)
            continue
        fields = [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
        if not dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
            fields = list(inspect.signature(thing).parameters)
        yield name, thing, fields
        for own, member in vars(thing).items():
            function = getattr(member, "__func__", member)
            inherited = any(own in vars(base) for base in thing.__mro__[1:])  # documented where it is declared
            if not own.startswith("_") and inspect.isfunction(function) and not inherited:
                parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
                yield f"{name}.{own}", function, parameters


def of_packages() -> Iterator[tuple[str, Any, list[str]]]:
    """(name, thing, parameters) of the functions and classes that the packages export."""
    for package in PACKAGES:
        module = importlib.import_module(f"sordino.{package}")
        for name in module.__all__:
            thing = getattr(module, name)
            own = getattr(thing, "__module__", "").startswith("sordino.")
            if not own or not (inspect.isfunction(thing) or inspect.isclass(thing)) or f"{package}.{name}" in REFERS:
                continue
            if not inspect.isclass(thing) or dataclasses.is_dataclass(thing) or "__init__" in vars(thing):
                yield f"{package}.{name}", thing, [p for p in inspect.signature(thing).parameters if p != "self"]


def sections(thing: Any) -> dict[str, str]:
    """The Google-style sections of a docstring, by title; "" is what stands before them."""
    parts = re.split(r"^(Args|Returns|Raises|Example):\n", inspect.getdoc(thing) or "", flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize(
    ("name", "thing", "parameters"), list(documented()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_parameter_is_named_in_args(name: str, thing: Any, parameters: list[str]) -> None:
    found = sections(thing)
    assert found[""].strip(), f"{name} has no docstring"
    named = re.findall(r"^    (\w+):", found.get("Args", ""), re.M)
    assert named == parameters, f"{name}: Args are those of the signature, in its order"


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if not inspect.isclass(thing)])
def test_a_public_function_says_what_it_returns_or_raises(name: str) -> None:
    found = sections(PUBLIC[name])
    returns = inspect.signature(PUBLIC[name]).return_annotation not in (None, "None")
    assert ("Returns" in found) == returns
    assert "Raises" in found or returns


@pytest.mark.parametrize(("name", "thing", "parameters"), list(of_packages()))
def test_what_a_package_exports_documents_its_arguments_and_result(
    name: str, thing: Any, parameters: list[str]
) -> None:
    found = sections(thing)
    assert found[""].strip(), f"{name} has no docstring"
    missing = set(parameters) - set(re.findall(r"^    (\w+):", found.get("Args", ""), re.M))
    assert not missing, f"{name}: Args lack {missing}"
    if inspect.isfunction(thing) and inspect.signature(thing).return_annotation not in (None, "None"):
        assert "Returns" in found, f"{name} does not say what it returns"


@pytest.mark.parametrize("name", MAKERS)
def test_every_method_has_a_plan_maker_under_its_name_in_the_package(name: str) -> None:
    assert name.replace("-", "_") in PUBLIC


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0
