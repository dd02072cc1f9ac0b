"""Works are cited by authors and year, and each has its line in the bibliography."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = r"(?:De )?[A-Z][a-zéöü][A-Za-zéöü-]*"
CITED = re.compile(rf"\b({NAME})((?:, {NAME})*(?:,? (?:&|and) {NAME})| et al\.|(?:, {NAME})+|),? \(?((?:19|20)\d\d)\b")
LICENCES = "catalogue.py"  # names the authors of datasets, not works


def texts() -> Iterator[tuple[Path, str]]:
    for pattern in (
        "src/**/*.py",
        "docs/**/*.md",
        "*.md",
        "examples/*.py",
        "experiments/**/*.toml",
        "experiments/*.py",
    ):
        for path in ROOT.glob(pattern):
            yield path, re.sub(r"\s+", " ", path.read_text(encoding="utf8"))


def keys(text: str) -> set[tuple[str, str]]:
    """(first author, year) of every work that is cited."""
    return {(found[1], found[3]) for found in CITED.finditer(text) if found[1] not in ("Copyright", "November")}


def test_no_work_is_cited_by_a_number_of_ours() -> None:
    assert [path for path, text in texts() if re.search(r"\bpapers? 00\d", text, re.IGNORECASE)] == []


def test_every_cited_work_is_in_the_bibliography() -> None:
    listed = keys((ROOT / "docs" / "bibliography.md").read_text(encoding="utf8"))
    missing = {path.name: keys(text) - listed for path, text in texts() if path.name not in (LICENCES, "CHANGELOG.md")}
    assert {name: works for name, works in missing.items() if works} == {}


def test_citations_are_recognised_in_their_forms() -> None:
    text = "(Xiao, Wan & Devadas 2022, Thm 3.2; Box and Muller, 1958), Mironov 2017 and De et al. (2022), ICML 2024"
    assert keys(text) == {("Xiao", "2022"), ("Box", "1958"), ("Mironov", "2017"), ("De", "2022")}
