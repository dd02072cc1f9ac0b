"""ε and δ are rounded up wherever they are printed, and lower bounds down."""

from __future__ import annotations

import ast
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sordino
from sordino import shown
from sordino.cli import train as train_command
from sordino.methods.dpsgd import flags as dpsgd_flags
from sordino.report import numbers
from sordino.training.progress import _brief

ROOT = Path(sordino.__file__).parent
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
LITTLE_ABOVE_ONE = 1.000343


@given(value=POSITIVE, digits=st.integers(1, 8))
def test_what_is_shown_is_never_on_the_wrong_side_and_close(value: float, digits: int) -> None:
    exact = Decimal(repr(value))
    above, below = Decimal(shown.up(value, digits)), Decimal(shown.down(value, digits))
    assert below <= exact <= above
    assert above - below <= exact * Decimal(10) ** (1 - digits)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.000343, "1.001"),
        (3.0, "3"),
        (1e-5, "1e-05"),
        (1.23456e-7, "1.235e-07"),
        (0.0001, "0.0001"),
        (12345.0, "12350"),
        (0.0, "0"),
        (float("inf"), "∞"),
        (9.9999, "10"),
    ],
)
def test_numbers_as_they_are_shown(value: float, text: str) -> None:
    assert shown.up(value) == text


def test_a_lower_bound_is_rounded_down() -> None:
    assert shown.down(1.000943) == "1"
    assert numbers.lower(0.99996) == "0.9999"


def formatted(tree: ast.AST) -> list[tuple[str, ast.FormattedValue]]:
    """(the text before it, value) of every value in an f-string, with implicit concatenation."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = ""
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    found.append((text, part))
                    text = ""
                elif isinstance(part, ast.Constant):
                    text = str(part.value)
    return found


def rounds_to_the_nearest(before: str, value: ast.FormattedValue) -> bool:
    source = ast.unparse(value.value)
    if re.search(r"\b(up|down|numbers\.\w+|len|range)\(", source) or value.format_spec is None:
        return False
    named = re.search(r"epsilon|delta(?!_)", source) is not None
    return named or re.search(r"[εδ]( is|,)?\s*[=≤≥]?\s*$", before) is not None


def test_no_source_file_formats_an_epsilon_or_a_delta_by_itself() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{value.lineno}: {ast.unparse(value)}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != "shown.py"
        for before, value in formatted(ast.parse(path.read_text(encoding="utf8")))
        if rounds_to_the_nearest(before, value)
    ]
    assert wrong == []


def test_the_search_for_such_formats_finds_them() -> None:
    for code in ('f"{found.epsilon:.6g}"', 'f"at δ = {value:g}"', 'f"ε {x:.2f}"', "f\"{r['delta']:g}\""):
        assert [rounds_to_the_nearest(*one) for one in formatted(ast.parse(code))] == [True]


def test_templates_show_epsilons_through_the_same_function() -> None:
    for path in sorted(ROOT.rglob("*.html")):
        for place in re.findall(r"\{\{([^}]*(?:epsilon|delta)[^}]*)\}\}", path.read_text(encoding="utf8")):
            assert re.search(r"\| *(epsilon|lower|power)\b", place), (path.name, place)


def test_a_little_above_one_is_nowhere_shown_as_one() -> None:
    plan = sordino.Plan.dpsgd(noise_multiplier=5.0, delta=1e-5, records=200, expected_batch=20, steps=3)
    guarantee = plan.guarantee()
    object.__setattr__(guarantee, "epsilon", LITTLE_ABOVE_ONE)
    object.__setattr__(guarantee, "delta", 1.0000001e-5)
    found = guarantee.to_dict()
    result = {**found, "guarantee": found, "test_accuracy": None, "noise_free_accuracy": None, "seconds": 1.0}
    result["skipped_steps"] = 0
    texts = [
        str(guarantee),
        train_command._rows(result, Path("run"))["ε"],
        dpsgd_flags._rows(found)["ε"],
        numbers.epsilon(LITTLE_ABOVE_ONE),
        _brief({"epsilon": LITTLE_ABOVE_ONE}),
    ]
    for text in texts:
        assert re.search(r"1\.0(01|1|0035)(?!\d)", text), text
        assert ("δ = " in text) == ("δ = 1.001e-05" in text)
