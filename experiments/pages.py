"""Markdown of the pages that are made from result files: tables, and blocks that are replaced in a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(head)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with the text between `<!-- name -->` and `<!-- end name -->` replaced, for each block that it has."""
    for name, content in blocks.items():
        found = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(\n<!-- end {re.escape(name)} -->)", re.DOTALL)
        page = found.sub(lambda match, content=content: match[1] + content + match[2], page)  # type: ignore[misc]
    return page
