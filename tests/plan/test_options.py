"""Options that methods share are written once: makers show and document them, and refuse what they do not take."""

from __future__ import annotations

import inspect
import pickle
from typing import Required, get_origin, get_type_hints

import pytest

import sordino
from sordino.plan import make, options
from sordino.plan.public import PublicSet

SMALL = {"delta": 1e-5, "records": 1000, "expected_batch": 100.0, "steps": 10}
KEYWORDS = {
    name: value
    for name, value in inspect.signature(make.make_plan).parameters.items()
    if value.kind is value.KEYWORD_ONLY
}
OWN = {"modelmix": {"lr": 0.1}, "dp_mac": {"parts": 2}, "coupling": {"public": None}}


def test_the_typed_options_are_those_of_make_plan() -> None:
    names = {**vars(make), "PublicSet": PublicSet}
    typed = get_type_hints(options.PlanOptions, localns=names)
    hints = get_type_hints(make.make_plan)
    assert typed == {name: hints[name] for name in KEYWORDS}
    marked = get_type_hints(options.PlanOptions, localns=names, include_extras=True)
    required = {name for name, value in KEYWORDS.items() if value.default is value.empty}
    assert {name for name, hint in marked.items() if get_origin(hint) is Required} == required


def test_a_maker_shows_its_own_options_and_those_that_it_shares() -> None:
    shown = inspect.signature(sordino.modelmix).parameters
    assert list(shown)[:3] == ["lr", "tau_over_lr", "noise_factors"]
    assert shown["clip_norm"] == KEYWORDS["clip_norm"]
    assert "accountant" not in shown
    assert "accountant: pld or rdp" in (inspect.getdoc(sordino.dp_mac) or "")
    assert list(inspect.signature(sordino.dpsgd).parameters) == list(KEYWORDS)


@pytest.mark.parametrize("name", ["dpsgd", "modelmix", "dp_mac", "coupling", "correlated"])
def test_an_unknown_or_missing_keyword_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilom': did you mean 'epsilon'"):
        getattr(sordino, name)(**SMALL, **OWN.get(name, {}), epsilom=3.0)
    with pytest.raises(TypeError, match=r"missing a required (keyword-only )?argument: '"):
        getattr(sordino, name)(epsilon=3.0)


def test_an_option_that_the_method_does_not_support_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip_norm'"):
        sordino.dp_mac(parts=2, **SMALL, noise_multiplier=1.0, clip_norm=2.0)
    with pytest.raises(TypeError, match="no option nonsense"):
        options.with_options(make.make_plan, "nonsense")


def test_a_maker_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(sordino.dpsgd)) is sordino.dpsgd
