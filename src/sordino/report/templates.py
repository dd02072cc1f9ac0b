"""The HTML templates of all pages: one base page, one style sheet, one set of number formats."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from sordino.report import numbers


def rendered(
    name: str, *, style: str = "", filters: Mapping[str, Callable[..., str]] | None = None, **values: Any
) -> str:
    """A page as a string of HTML.

    Args:
        name: The template, a file of this package that extends base.html.
        style: Rules to add to page.css.
        filters: Further filters of this page.
        values: What the template shows.

    Returns:
        The page. Its Content-Security-Policy allows only its own style sheet.
    """
    environment = _environment()
    if filters:
        environment = environment.overlay()
        environment.filters = {**environment.filters, **filters}
    sheet = _resource("page.css") + style
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    return environment.get_template(name).render(style=Markup(sheet), style_hash=digest, **values)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(_resource),
    )  # fmt: skip
    environment.filters.update(
        epsilon=numbers.epsilon, lower=numbers.lower, power=numbers.power, plain=numbers.plain, percent=numbers.percent,
        seconds=numbers.seconds,
    )  # fmt: skip
    return environment


def _resource(name: str) -> str:
    return (importlib.resources.files("sordino.report") / name).read_text(encoding="utf8")
