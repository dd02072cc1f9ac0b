"""Attacks every recipe and writes one page with all tests of trust: audits, neighbours, mutants, faults, bad inputs.

    python experiments/trust.py --everything [--data-dir DIR]
                                            all that the page shows, on this commit (everything.py); continues an
                                            interrupted run
    python experiments/trust.py             attack every recipe (zoo.py, bundled) that is not in trust.json yet
    python experiments/trust.py --again     attack also those that another commit attacked
    python experiments/trust.py --table     make no attack: write the page from the result files
    python experiments/trust.py NAME…       attack these again

Writes results/trust.json after each recipe. The page docs/trust.md is made from this file, results/mutants.json
(mutants.py), results/faults.json (faults.py), results/forgeries.json (forged.py), results/audit_strength.json
(audit_strength.py) and results/breaks.json (old_breaks.py); it says whether all are of one commit. Missing values are
shown as a dash, never as zero. Exits with 1 if anything was found, lost or not caught.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import everything
from breaks import lines as break_lines
from provenance import COMMIT, origin
from sordino.audit.attack import attack
from sordino.runs.prepared import work_of
from sordino.runs.recipe import Recipe
from sordino.shown import down, up
from zoo import ZOO, recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
PAGE = ROOT / "docs" / "trust.md"
SLOW = {"companions": ("neighbours", "outputs", "sampling"), "record-momentum": ("neighbours", "outputs", "noise")}
"""For recipes whose other checks take minutes: the checks that are made."""
BUNDLED = {"the bundled audit.toml": "audit.toml", "the bundled demo.toml": "demo.toml"}
NAMES = (*ZOO, *BUNDLED)
Row = dict[str, Any]


def attacked(name: str) -> Row:
    """The attack on one recipe, as a row."""
    started = time.process_time()
    work = work_of(_recipe(name), None, False)
    found = attack(
        work, name=name, quick=True, only=SLOW.get(name, ()), say=lambda text: print(f"  {text}", flush=True)
    )
    tried = {check.name: check.tried for check in found.checks}
    return {
        "recipe": name,
        "method": found.method,
        "sampler": work.plan.sampling.name,
        "relation": found.relation,
        "epsilon": found.epsilon_claimed,
        "delta": found.delta,
        "audit": None if found.audit is None else found.audit.to_dict(),
        "neighbours": tried.get("neighbours", 0),
        "tried": tried,
        "found": list(found.found),
        "details": {check.name: check.detail for check in found.checks},
        "processor_seconds": round(time.process_time() - started, 1),
        "commit": COMMIT,
    }


def _recipe(name: str) -> Recipe:
    if name not in BUNDLED:
        return recipe(name)
    with as_file(files("sordino") / "recipes" / BUNDLED[name]) as path:
        return Recipe.read(path)


def read(name: str) -> dict[str, Any]:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf8")) if path.exists() else {}


def mutants_of(name: str, rows: list[Row]) -> str:
    own = [row for row in rows if row["recipe"] == name and row["mutant"] != "none"]
    return f"{sum(row['caught'] for row in own)} of {len(own)}" if own else "–"


def black_of(name: str, strength: dict[str, Any]) -> str:
    """The black-box bound of the recipe `dpsgd` (DP-SGD with full batches), the only one that has it."""
    rows = strength.get("table", {}).get("black", []) if name == "dpsgd" else []
    return "; ".join(f"{down(row['epsilon_lower'], 3)} of {up(row['epsilon_claimed'], 3)}" for row in rows) or "–"


def table(rows: list[Row]) -> Iterator[str]:
    """One line for each recipe."""
    mutants, strength = read("mutants.json").get("mutants", []), read("audit_strength.json")
    yield (
        "| recipe | method | sampler | claimed ε | white box ε ≥ | black box ε ≥ | neighbours tried | mutants caught | "
        "found |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        audit = row["audit"]
        white = f"{down(audit['epsilon_lower'], 3)} of {up(audit['epsilon_claimed'], 3)}" if audit else "–"
        yield (
            f"| {row['recipe']} | {row['method']} | {row['sampler']} | {up(row['epsilon'])} | {white} | "
            f"{black_of(row['recipe'], strength)} | {row['neighbours']} | {mutants_of(row['recipe'], mutants)} | "
            f"{'; '.join(row['found']) or 'nothing'} |"
        )


def mutant_lines() -> Iterator[str]:
    document = read("mutants.json")
    real = [row for row in document.get("mutants", []) if row["mutant"] != "none"]
    if not real:
        yield "Not measured."
        return
    refused = [row["mutant"] for row in real if row["how"] == "refusal"]
    yield (
        f"{sum(row['caught'] for row in real)} of {len(real)} faults that were put into our own code are detected, on "
        f"commit {document['commit']}: {len(real) - len(refused)} by a counter-example, {len(refused)} only because "
        f"the library itself refuses or stops ({', '.join(refused) or 'none'})."
    )
    yield ""
    yield "| mutant | recipe | caught by | how |"
    yield "|---|---|---|---|"
    for row in real:
        yield f"| {row['mutant']} | {row['recipe']} | {', '.join(row['by']) or '–'} | {row['how']} |"


def fault_lines() -> Iterator[str]:
    parts = read("faults.json").get("parts", {})
    yield "| kind | tried | tracebacks | accepted or left behind | commit |"
    yield "|---|---|---|---|---|"
    for kind, part in parts.items():
        of = f" of {part['possible']}" if part.get("possible", part["tried"]) != part["tried"] else ""
        left = len(part["left_behind"])
        yield f"| {kind} | {part['tried']:,}{of} | {part['uncaught']} | {left} | {part['commit'][:10]} |"
    disk = parts.get("disk")
    if disk:
        yield ""
        yield (
            f"Of the {disk['tried']} faults at file operations {disk['kills']} are kills. Entries of the ledger that "
            f"were lost: {disk['entries_lost']}; steps that were drawn twice: {disk['steps_redrawn']}; runs that could "
            f"not be resumed: {disk['not_resumed']}."
        )


def forgery_lines() -> Iterator[str]:
    document = read("forgeries.json")
    rows = [row for row in document.get("forgeries", []) if row["expected"] is not None]
    if not rows:
        yield "Not tried."
        return
    yield (
        f"{sum(row['right'] for row in rows)} of {len(rows)} forged run directories are rejected by "
        f"`sordino verify`, each by the check that it targets, on commit {document['commit']}; both genuine runs are "
        "accepted."
    )
    yield ""
    yield "| forgery | checks that fail |"
    yield "|---|---|"
    for row in rows:
        yield f"| {row['forgery']} | {', '.join(row['named_by']) or '–'} |"


def strength_lines() -> Iterator[str]:
    found = read("audit_strength.json").get("table", {})
    yield "| q | steps | runs | canaries | by the verdict | order statistics at 95 % | f-DP in one run | ceiling |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found.get("white", []):
        names = ("share", "share_independent", "share_any")
        shares = " | ".join(", ".join(f"{share:.2f}" for share in row["shares"][name]) for name in names)
        most = "–" if row["ceiling"] is None else f"{row['ceiling']:.2f}"
        yield f"| {row['rate']} | {row['steps']} | {row['runs']} | {row['canaries']:,} | {shares} | {most} |"
    yield ""
    for row in found.get("one_run", []):
        yield (
            f"f-DP in one run with {row['canaries']:,} simulated canaries at q = {row['rate']} and {row['guesses']:,} "
            f"guesses shows {row['share']:.2f} of ε.\n"
        )
    for runs, one in found.get("false", {}).items():
        if one["audits"]:
            yield (
                f"A mechanism exactly at its claim, audited in {runs} run{'s' if runs != '1' else ''}: reported as "
                f"broken in {one['called_broken']} of {one['audits']} audits; order statistics at 95 %, which are not "
                f"part of the verdict, exceed the claim in {one['above_at_95']}.\n"
            )
    for row in found.get("black", []):
        yield (
            f"Black box, {row['network']} on {row['data']}, {row['runs']} models: ε ≥ {down(row['epsilon_lower'], 3)} "
            f"of {up(row['epsilon_claimed'], 3)}.\n"
        )


def commits() -> dict[str, set[str]]:
    """File → the commits whose code made what it holds."""
    found = {
        "trust.json": {row["commit"] for row in read("trust.json").get("rows", [])},
        "mutants.json": {read("mutants.json").get("commit")},
        "forgeries.json": {read("forgeries.json").get("commit")},
        "faults.json": {part["commit"] for part in read("faults.json").get("parts", {}).values()},
        "audit_strength.json": {run["commit"] for run in read("audit_strength.json").get("runs", {}).values()},
    }
    return {name: {str(each)[:10] for each in known if each} for name, known in found.items()}


def commit_lines(found: dict[str, set[str]]) -> Iterator[str]:
    """Whether everything on the page was made by one commit; if not, which file comes from which."""
    every = set().union(*found.values())
    if len(every) == 1 and all(found.values()):
        yield f"Everything below was made by the code of one commit, {every.pop()}."
        return
    yield "**These results come from different commits**, so no single version of the code was tested in all ways:"
    yield ""
    for name, known in found.items():
        yield f"- `{name}`: {', '.join(sorted(known)) or 'not made'}"


def _missing(rows: list[Row]) -> str:
    """A sentence with the recipes that are not in the file, because they were not attacked."""
    left = [name for name in NAMES if name not in {row["recipe"] for row in rows}]
    return f"Not attacked yet: {', '.join(left)}." if left else "Every recipe was attacked."


def page(rows: list[Row]) -> str:
    """docs/trust.md."""
    made_by = ", ".join(sorted({row["commit"] for row in rows})) or "–"
    text = "\n".join(
        [
            "# Attacks and audits: results",
            "",
            "`python experiments/trust.py` writes this page from the files in `experiments/results`; a test compares",
            "the two. Definitions and proofs of the bounds: [the audit](guarantees/audit.md); the adversaries:",
            "[threat model](threat-model.md).",
            "",
            *commit_lines(commits()),
            "",
            "## Every method",
            "",
            "`sordino attack --quick` on one small recipe for each method and each part of a record's vector, and on",
            f"the bundled recipes (commit {made_by}).",
            "The claimed ε is that of the recipe. White-box bounds come from a few steps of one run, so they show less",
            "than the whole claim.",
            "",
            *table(rows),
            "",
            _missing(rows),
            "",
            "## Mutants",
            "",
            *mutant_lines(),
            "",
            "## Kills, faults and bad inputs",
            "",
            *fault_lines(),
            "",
            "## Forgeries",
            "",
            *forgery_lines(),
            "",
            "## What was broken, and is held by a test",
            "",
            *break_lines(),
            "",
            "## How much of a true ε an audit shows",
            "",
            "DP-SGD at ε = 4, δ = 10⁻⁵, add-remove, 7,800 canaries in each run: the share of ε shown, for three seeds.",
            "The verdict uses order statistics at 99.99 % confidence and f-DP in one run at 94.99 %. The ceiling is",
            "what an auditor could show at 95 % who knows the exact pair of distributions and has as many independent",
            "trials.",
            "",
            *strength_lines(),
            "",
        ]
    )
    return "\n".join(line if line.startswith("|") else _wrapped(line) for line in text.split("\n"))


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 128, break_long_words=False, break_on_hyphens=False)


def known_rows() -> list[Row]:
    known = {row["recipe"]: row for row in read("trust.json").get("rows", [])}
    return [known[name] for name in NAMES if name in known]


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    code = 0
    if "--everything" in arguments:
        data_dir = dict(pairwise(arguments)).get("--data-dir")
        code = everything.main(COMMIT, data_dir, one="--one" in arguments)
        arguments = ["--table"]
    known = {row["recipe"]: row for row in known_rows()}
    done = {name for name, row in known.items() if "--again" not in arguments or row["commit"] == COMMIT}
    wanted = [name for name in arguments if name in NAMES] or [name for name in NAMES if name not in done]
    for name in () if "--table" in arguments else wanted:
        print(f"{name} …", flush=True)
        known[name] = attacked(name)
        rows = [known[each] for each in NAMES if each in known]
        document = {**origin("python experiments/trust.py"), "rows": rows}
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        (RESULTS / "trust.json").write_text(text, encoding="utf8")
    rows = known_rows()
    if "--no-page" in arguments:  # another process writes it at the end
        return 1 if any(row["found"] for row in rows) else 0
    PAGE.write_text(page(rows), encoding="utf8")
    print(page(rows))
    uncaught = [row for row in read("mutants.json").get("mutants", []) if row["caught"] == (row["mutant"] == "none")]
    faults = read("faults.json")
    lost = sum(faults.get(key, 0) for key in ("uncaught", "left_behind", "entries_lost", "steps_redrawn"))
    passed = [row for row in read("forgeries.json").get("forgeries", []) if not row["right"]]
    return 1 if code or uncaught or lost or passed or any(row["found"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
