"""Faults put into a copy of our own code, one at a time, and which general check of `sordino attack` catches each.

    python experiments/mutants.py            every mutant; writes results/mutants.json and results/mutants.md
    python experiments/mutants.py NAME…      some of them (or all of a recipe), whose rows are replaced
    python experiments/mutants.py --all      with all checks of the attack for every mutant, not the quickest that fits

Each mutant is a change of the source, applied to a copy in a temporary directory. A process of its own attacks one of
the small recipes of zoo.py with that code, quickly, and stops at the first finding. No check knows of a mutant. A
mutant is caught if the attack finds a counter-example, or if the library refuses to run what it runs unchanged (its own
checks: the engine against a plain loop, the ledger's guard). The unchanged code goes through the same attacks, as the
control. A mutant whose text is no longer in the source is an error: it has to be written anew.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dp_accounting  # noqa: F401 (what every child needs is loaded once, before it is forked off)
import scipy.stats  # noqa: F401
import torch

_SPEC = importlib.util.find_spec("sordino")  # found and not imported: children import their own copy
assert _SPEC is not None
assert _SPEC.origin is not None
SOURCE = Path(_SPEC.origin).parent
RESULTS = Path(os.environ.get("MUTANTS_RESULTS", Path(__file__).parent / "results"))


@dataclass(frozen=True)
class Mutant:
    """One fault: changes (file, old text, new text), the recipe that runs through it, and the checks that are run."""

    name: str
    recipe: str
    edits: tuple[tuple[str, str, str], ...]
    only: tuple[str, ...] = ()  # all of them where it is empty


def read_mutants() -> tuple[Mutant, ...]:
    """Those of mutants.toml."""
    document = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf8"))
    return tuple(
        Mutant(
            one["name"],
            one["recipe"],
            tuple((edit["file"], edit["old"], edit["new"]) for edit in one["edits"]),
            tuple(one.get("only", ())),
        )
        for one in document["mutant"]
    )


@dataclass(frozen=True)
class Outcome:
    """What an attack on one copy of the code found, by check; a refusal is the library's own."""

    found: dict[str, list[str]]
    refused: dict[str, str]
    seconds: float


def applied(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package with the mutant in it; ValueError where its text is not there exactly once."""
    root = folder / "sordino"
    shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in mutant.edits:
        text = (root / file).read_text(encoding="utf8")
        if text.count(old) != 1:
            raise ValueError(f"mutant {mutant.name!r}: {file} holds its text {text.count(old)} times; write it anew")
        (root / file).write_text(text.replace(old, new), encoding="utf8")
    return folder


def attacked(name: str, source: Path, only: tuple[str, ...] = ()) -> Outcome:
    """The quick attack on the recipe, by the code in `source`, in a process of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _attack(name, source, only, answer)
            finally:
                os._exit(code)
        os.waitpid(child, 0)
        document: dict[str, Any] = (
            json.loads(answer.read_text(encoding="utf8")) if answer.exists() else {"start": "it died"}
        )
    seconds = round(time.monotonic() - started, 1)
    if "start" in document:
        return Outcome({}, {"start": document["start"]}, seconds)
    found = {check["name"]: check["found"] for check in document["checks"] if check["found"]}
    refused = {c["name"]: c["detail"] for c in document["checks"] if c["detail"].startswith("not applicable")}
    return Outcome(found, refused, seconds)


def _attack(name: str, source: Path, only: tuple[str, ...], answer: Path) -> int:
    sys.path.insert(0, str(source))
    torch.set_num_threads(1)
    try:
        from sordino.audit.attack import attack
        from sordino.runs.prepared import work_of
        from zoo import recipe

        document = attack(work_of(recipe(name), None, False), name=name, quick=True, only=only, first=True).to_dict()
    except Exception as error:
        document = {"start": f"{type(error).__name__}: {error}"}
    answer.write_text(json.dumps(document), encoding="utf8")
    return 0


def caught(clean: Outcome, broken: Outcome) -> dict[str, str]:
    """Check → what it said. A refusal counts where the unchanged code was not refused."""
    said = {check: texts[0] for check, texts in broken.found.items()}
    return said | {f"library ({c})": text for c, text in broken.refused.items() if c not in clean.refused}


def run(mutants: tuple[Mutant, ...]) -> list[dict[str, Any]]:
    """A row for each mutant, and one for each recipe with the unchanged code."""
    clean: dict[str, Outcome] = {}
    rows: list[dict[str, Any]] = []
    for mutant in mutants:
        if mutant.recipe not in clean:
            looks = [other.only for other in mutants if other.recipe == mutant.recipe]
            same = tuple(dict.fromkeys(check for only in looks for check in only)) if all(looks) else ()
            found = clean[mutant.recipe] = attacked(mutant.recipe, SOURCE.parent, same)
            rows.append({"mutant": "none", "recipe": mutant.recipe, "caught": bool(found.found), "by": found.found})
            print(f"{'(unchanged)':48s} {mutant.recipe:16s} {found.found or 'nothing found'}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            broken = attacked(mutant.recipe, applied(mutant, Path(folder)), mutant.only)
        said = caught(clean[mutant.recipe], broken)
        rows.append(
            {
                "mutant": mutant.name,
                "recipe": mutant.recipe,
                "caught": bool(said),
                "by": said,
                "seconds": broken.seconds,
            }
        )
        print(f"{mutant.name:48s} {mutant.recipe:16s} {', '.join(said) or 'NOT CAUGHT'}", flush=True)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    real = [row for row in rows if row["mutant"] != "none"]
    lines = [
        f"{sum(row['caught'] for row in real)} of {len(real)} mutants caught; on the unchanged code the attacks find "
        f"{sum(row['caught'] for row in rows if row['mutant'] == 'none')} of {len(rows) - len(real)}.",
        "", "| mutant | recipe | caught by |", "|---|---|---|",
        *(f"| {row['mutant']} | {row['recipe']} | {', '.join(row['by']) or '**not caught**'} |" for row in real),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> int:
    everything = "--all" in names
    names = [name for name in names if name != "--all"]
    known = read_mutants()
    if everything:
        known = tuple(replace(mutant, only=()) for mutant in known)
    chosen = tuple(m for m in known if not names or m.name in names or m.recipe in names)
    rows = run(chosen)
    print(markdown(rows).splitlines()[0])
    kept = [*_earlier(known, rows), *rows]
    order = {mutant.name: place for place, mutant in enumerate(known)}
    kept.sort(key=lambda row: (order.get(row["mutant"], -1), row["recipe"]))
    document = {"command": "python experiments/mutants.py", "mutants": kept}
    (RESULTS / "mutants.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
    (RESULTS / "mutants.md").write_text(markdown(kept), encoding="utf8")
    return 0 if all(row["caught"] == (row["mutant"] != "none") for row in rows) else 1


def _earlier(known: tuple[Mutant, ...], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of mutants that still exist and were not run now."""
    path = RESULTS / "mutants.json"
    if not path.exists():
        return []
    new = {(row["mutant"], row["recipe"]) for row in rows}
    names = {mutant.name for mutant in known} | {"none"}
    earlier = json.loads(path.read_text(encoding="utf8"))["mutants"]
    return [row for row in earlier if (row["mutant"], row["recipe"]) not in new and row["mutant"] in names]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
