"""Mutation tests: faults in a copy of sordino, one at a time, and the check of `sordino attack` that detects each.

    python experiments/mutants.py            every mutant that is not in results/mutants.json for this commit
    python experiments/mutants.py NAME…      run these mutants (or all mutants of a recipe) again
    python experiments/mutants.py --all      with all checks of the attack for every mutant, not only the quickest one

Writes results/mutants.json and results/mutants.md after each mutant, so an interrupted run continues; rows of other
commits are dropped. Each mutant is a change of the source, applied to a copy in a temporary directory. A separate
process attacks one of the small recipes of zoo.py with that code, quickly, and stops at the first finding. No check is
written for a particular mutant. A mutant is caught if the attack finds a *counter-example*, or if the library *refuses*
or stops a run that the unchanged code completes (by its own checks: the engine against a plain loop, the ledger's
guard); the two are counted separately. As the control, the unchanged code is attacked in the same way. It is an error
if a mutant's text is no longer in the source, or if it fails like no real mistake would (a name that does not exist):
such a mutant must be rewritten.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting  # noqa: F401 (what every child needs is loaded once, before it is forked off)
import scipy.stats  # noqa: F401
import torch

_SPEC = importlib.util.find_spec("sordino")  # found and not imported: children import their own copy
assert _SPEC is not None
assert _SPEC.origin is not None
SOURCE = Path(_SPEC.origin).parent
COSTS = ("ledger", "sampling", "noise", "resume", "outputs", "participation", "contraction", "neighbours", "one run")
STOPPED = "the run fails:"  # how the attack reports that a check of the library itself stopped a run
RESULTS = Path(os.environ.get("MUTANTS_RESULTS", Path(__file__).parent / "results"))


def _commit() -> str:
    """The same as in provenance.py, which can't be used here: it imports the package, and only children may do that."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", "*.py", "*.toml")
    return git("rev-parse", "--short=10", "HEAD") + ("+changes" if changed else "")


COMMIT = _commit()


@dataclass(frozen=True)
class Mutant:
    """One fault: changes (file, old text, new text), the recipe that uses this code, and the checks that are run."""

    name: str
    recipe: str
    edits: tuple[tuple[str, str, str], ...]
    only: tuple[str, ...] = ()  # if it is empty, all checks


def read_mutants() -> tuple[Mutant, ...]:
    """The mutants of mutants.toml."""
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
    """What an attack on one copy of the code found, by check, and whether the library itself refused the run."""

    found: dict[str, list[str]]
    refused: dict[str, str]
    seconds: float  # of processor time


def applied(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package with the mutant in it; ValueError if its text does not occur exactly once."""
    root = folder / "sordino"
    shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in mutant.edits:
        text = (root / file).read_text(encoding="utf8")
        if text.count(old) != 1:
            raise ValueError(f"mutant {mutant.name!r}: {file} holds its text {text.count(old)} times; write it anew")
        (root / file).write_text(text.replace(old, new), encoding="utf8")
    return folder


def attacked(name: str, source: Path, only: tuple[str, ...] = ()) -> Outcome:
    """Makes the quick attack on the recipe with the code in `source`, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _attack(name, source, only, answer)
            finally:
                os._exit(code)
        usage = os.wait4(child, 0)[2]
        document: dict[str, Any] = (
            json.loads(answer.read_text(encoding="utf8")) if answer.exists() else {"start": "it died"}
        )
    seconds = round(usage.ru_utime + usage.ru_stime, 1)
    if "broken" in document:
        raise ValueError(f"the mutant on {name!r} does not run: {document['broken']}; write it anew")
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
    except (NameError, AttributeError, ImportError, SyntaxError, TypeError) as error:
        document = {"broken": f"{type(error).__name__}: {error}"}
    except Exception as error:
        document = {"start": f"{type(error).__name__}: {error}"}
    answer.write_text(json.dumps(document), encoding="utf8")
    return 0


def caught(clean: Outcome, broken: Outcome) -> dict[str, str]:
    """Check → its message. A refusal counts only if the unchanged code was not refused."""
    said = {check: texts[0] for check, texts in broken.found.items()}
    return said | {f"library ({c})": text for c, text in broken.refused.items() if c not in clean.refused}


def how(said: Mapping[str, str]) -> str:
    """Whether there is a counter-example to the guarantee, or only the library's own refusal."""
    if not said:
        return "not caught"
    own = [text for check, text in said.items() if not check.startswith("library") and STOPPED not in text]
    return "counter-example" if own else "refusal"


Row = dict[str, Any]


def control(recipe: str, mutants: Iterable[Mutant]) -> tuple[Outcome, Row]:
    """The unchanged code under every check that is used for a mutant of the recipe."""
    looks = [mutant.only for mutant in mutants if mutant.recipe == recipe]
    same = tuple(dict.fromkeys(check for only in looks for check in only)) if all(looks) else ()
    found = attacked(recipe, SOURCE.parent, same)
    row = {
        "mutant": "none", "recipe": recipe, "caught": bool(found.found), "by": found.found, "refused": found.refused,
        "seconds": found.seconds,
    }  # fmt: skip
    print(f"{'(unchanged)':48s} {recipe:16s} {found.found or 'nothing found'}", flush=True)
    return found, row


def tried(mutant: Mutant, clean: Outcome) -> Row:
    """The row of one mutant."""
    with tempfile.TemporaryDirectory() as folder:
        broken = attacked(mutant.recipe, applied(mutant, Path(folder)), mutant.only)
    said = caught(clean, broken)
    print(f"{mutant.name:48s} {mutant.recipe:16s} {how(said)}: {', '.join(said)}", flush=True)
    return {
        "mutant": mutant.name, "recipe": mutant.recipe, "caught": bool(said), "how": how(said), "by": said,
        "seconds": broken.seconds,
    }  # fmt: skip


def markdown(rows: list[Row]) -> str:
    real = [row for row in rows if row["mutant"] != "none"]
    refusals = sum(row["how"] == "refusal" for row in real)
    lines = [
        f"{sum(row['caught'] for row in real)} of {len(real)} mutants caught, {refusals} of them by a refusal or stop "
        f"of the library itself and not by a counter-example; on the unchanged code the attacks find "
        f"{sum(row['caught'] for row in rows if row['mutant'] == 'none')} of {len(rows) - len(real)}.",
        "", "| mutant | recipe | caught by | how |", "|---|---|---|---|",
        *(f"| {row['mutant']} | {row['recipe']} | {', '.join(row['by']) or '–'} | {row['how']} |" for row in real),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> int:
    everything = "--all" in names
    names = [name for name in names if name != "--all"]
    known = read_mutants()
    if everything:
        known = tuple(replace(mutant, only=()) for mutant in known)
    order = {mutant.name: place for place, mutant in enumerate(known)}
    rows: dict[tuple[str, str], Row] = {(row["mutant"], row["recipe"]): row for row in _earlier(known)}
    for mutant in sorted(known, key=_cost):
        if names and mutant.name not in names and mutant.recipe not in names:
            continue
        if (mutant.name, mutant.recipe) in rows and not names:
            continue
        if ("none", mutant.recipe) not in rows:
            rows["none", mutant.recipe] = control(mutant.recipe, known if not names else [mutant])[1]
        unchanged = rows["none", mutant.recipe]
        clean = Outcome(unchanged["by"], unchanged["refused"], 0.0)
        rows[mutant.name, mutant.recipe] = tried(mutant, clean)
        _write(sorted(rows.values(), key=lambda row: (order.get(row["mutant"], -1), row["recipe"])))
    done = [row for row in rows.values() if not names or {row["mutant"], row["recipe"]} & set(names)]
    print(markdown(list(rows.values())).splitlines()[0])
    return 0 if all(row["caught"] == (row["mutant"] != "none") for row in done) else 1


def _cost(mutant: Mutant) -> tuple[int, str]:
    """Sorts quick checks first and keeps recipes together, so that each control is made once and early."""
    return max((COSTS.index(check) for check in mutant.only), default=len(COSTS)), mutant.recipe


def _write(rows: list[Row]) -> None:
    about = {"command": "python experiments/mutants.py", "commit": COMMIT, "torch": version("torch")}
    document = {**about, "mutants": rows}
    (RESULTS / "mutants.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
    (RESULTS / "mutants.md").write_text(markdown(rows), encoding="utf8")


def _earlier(known: tuple[Mutant, ...]) -> list[Row]:
    """The rows of this commit whose mutants still exist."""
    path = RESULTS / "mutants.json"
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf8"))
    if document.get("commit") != COMMIT or COMMIT.endswith("+changes"):
        return []
    names = {mutant.name for mutant in known} | {"none"}
    return [row for row in document["mutants"] if row["mutant"] in names]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
