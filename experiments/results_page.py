"""Writes experiments/RESULTS.md: every result file with its command, commit, versions, age and figures.

    python experiments/results_page.py            write the page
    python experiments/results_page.py --check    exit 1 if the page differs from the files

Everything on the page is read from the files; a test compares the two. A file whose trainings are older than today's
engine is marked; its figures remain until they are measured again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from results_tables import Document, figures, percent, table

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results", ROOT / "experiments" / "RESULTS.md"
ENGINE = (
    "2026-11-17"  # sums in double precision, rows followed by version: trainings before this day used another engine
)
NO_TRAINING = (
    "allocation", "coupling_monotonicity", "coupling_table6", "hidden_state_figures", "kernel_errors", "mac_fig4",
    "modelmix_fig3", "modelmix_gep", "step_costs",
)  # fmt: skip  # accounting, drawings, and one simulation in NumPy


def torch_version(document: Document) -> str | None:
    """The version of torch that a result file names."""
    found = document.get("torch") or document.get("environment", {}).get("torch")
    return None if found is None else str(found)


def day(document: Document) -> str | None:
    """The day on which the figures were finished."""
    found = document.get("written") or document.get("environment", {}).get("finished")
    return None if found is None else str(found)[:10]


def older(name: str, document: Document) -> bool:
    """Whether the file has trainings on an earlier engine; files that record no day are judged by their commit."""
    return name not in NO_TRAINING and (day(document) or ENGINE) < ENGINE


def age(name: str, document: Document) -> str:
    """A sentence for a page, if the trainings of a file are older than the engine; otherwise nothing."""
    return f" Measured with the engine before {ENGINE}; not run again." if older(name, document) else ""


def commits(document: Document) -> list[str]:
    """The commits of a file's runs or trials, as far as they name them; else that of the file."""
    runs = document.get("runs") or document.get("trials")
    each = list(runs.values()) if isinstance(runs, dict) else runs if isinstance(runs, list) else []  # or a number
    return [str(one["commit"]) for one in each if isinstance(one, dict) and one.get("commit")] or [
        str(document.get("commit"))
    ]


def unclean(document: Document) -> str | None:
    """A sentence, if runs were made from source that no commit has: nobody can check out what they ran."""
    found = commits(document)
    changed = [one for one in found if "+changes" in one]
    if not changed:
        return None
    of = f"{len(changed)} of {len(found)} runs" if len(found) > 1 else "This file"
    return f"**Source that differed from its commit**: {of} ({', '.join(sorted(set(changed)))})."


def seconds(part: Any) -> float:
    """The time of the runs of a file, from their own entries (processor time if they have it)."""
    if isinstance(part, list):
        return sum(map(seconds, part))
    if not isinstance(part, dict):
        return 0.0
    for key in ("core_seconds", "seconds"):
        if isinstance(part.get(key), int | float):
            return float(part[key])
    return sum(seconds(value) for key, value in part.items() if key not in ("table", "summary"))


GOALS = (  # what, ε, per cent, file, method
    ("Fashion-MNIST", 1.0, 88.5, "compare_fashion_mnist", "patches, whitened privately, linear"),
    ("Fashion-MNIST", 3.0, 90.2, "compare_fashion_mnist", "patches, whitened privately, linear"),
    ("MNIST", 1.0, 98.2, "compare_mnist", "upright patches, whitened privately, linear"),
    ("MNIST", 3.0, 99.0, "compare_mnist", "upright patches, whitened privately, linear"),
    ("CIFAR-10 from scratch", 1.0, 62.0, "compare_cifar10", "patches, linear"),
    ("CIFAR-10 from scratch", 3.0, 70.0, "compare_cifar10", "patches, linear"),
    ("CIFAR-10 from scratch", 8.0, 74.0, "compare_cifar10", "patches, linear"),
    ("CIFAR-10, public ImageNet features", 1.0, 90.0, "compare_cifar10_frozen", "EfficientNet-Lite0 features, linear"),
    ("IMDb (the goal allows public sentence features)", 1.0, 80.0, "compare_imdb", "words, linear"),
    ("IMDb without public data", 4.0, 81.0, "compare_imdb", "words, linear"),
    ("Adult (goal: 0.5 below no privacy)", 1.0, 84.12, "compare_adult", "linear"),
)


def goals() -> str:
    """Each goal of the suites, the accuracy that was reached, and that of the same features without privacy."""
    rows = []
    for what, epsilon, wanted, name, method in GOALS:
        path = RESULTS / f"{name}.json"
        document = json.loads(path.read_text(encoding="utf8")) if path.exists() else {"methods": [], "table": []}
        own = next((r for r in document["table"] if (r["method"], r["epsilon"]) == (method, epsilon)), None)
        if own is None:
            rows.append([what, f"{epsilon:g}", f"{wanted:g}", "not run", "–", "–", "–"])
            continue
        kinds = {one["name"]: one["kind"] for one in document["methods"]}
        free = [r for r in document["table"] if kinds[r["method"]] == "plain" and r["seeds"]]
        ceiling = percent(max(float(r["mean"]) for r in free)) if free else "–"
        verdict = "yes" if own["seeds"] >= 3 else "above, fewer than three seeds"
        if 100 * own["mean"] < wanted:
            larger = [r for r in document["table"] if r["method"] == method and 100 * r["mean"] >= wanted]
            first = min(larger, key=lambda r: float(r["epsilon"]), default=None)
            verdict = "no" + (f", but at ε = {first['epsilon']:g}: {percent(first['mean'])}" if first else "")
        reached, source = percent(own["mean"], own["spread"]), f"[{name}](results/{name}.json)"
        rows.append([what, f"{epsilon:g}", f"{wanted:g}", reached, str(own["seeds"]), ceiling, f"{verdict} ({source})"])
    heads = ["what", "ε", "goal, %", "reached, %", "seeds", "no privacy, same features, %", "met"]
    found = json.loads((RESULTS / "frozen_resolution.json").read_text("utf8"))
    curve = ", ".join(f"{percent(r['mean'])} at {r['resolution']} pixels" for r in found["found"] if not r["mirror"])
    slow = max(found["found"], key=lambda r: int(r["resolution"]))
    minutes = slow["milliseconds_per_image"] / 1000 * 60_000 / 60
    said = (
        "Add/remove, δ = 1e-5, all training records, true Poisson sampling. EfficientNet-Lite0's features of CIFAR-10, "
        f"on {found['rows']:,} training rows and without privacy: {curve} "
        f"([frozen_resolution](results/frozen_resolution.json)). At {slow['resolution']} pixels an image takes "
        f"{slow['milliseconds_per_image']:g} ms of a core, all 60,000 {minutes:.0f} minutes before the first run."
    )
    return f"## Goals\n\n{said}\n\n" + table(heads, rows)


PARTS = (  # what, how the names of its files begin
    ("The best accuracy at each ε: suites", ("compare_", "fashion_mnist_scattering")),
    ("The same: searches on held-out training rows", ("heads_", "feature_search", "frozen_resolution", "imdb_kept")),
    ("ModelMix", ("modelmix",)),
    ("Hidden state", ("hidden_",)),
    ("Clipping bias", ("clipping_bias", "bias_", "instruments")),
    ("DP-MAC", ("mac",)),
    ("Coupling", ("coupling",)),
)


def times(documents: Mapping[str, Document]) -> str:
    """What each part of the evidence took, by the entries of its files."""
    rows, total = [], 0.0
    for what, starts in PARTS:
        mine = [seconds(document) / 60 for name, document in documents.items() if name.startswith(starts)]
        rows.append([what, str(len(mine)), f"{sum(mine):.0f}"])
        total += sum(mine)
    return "## Time\n\n" + table(["part", "files", "minutes"], [*rows, ["all", "", f"{total:.0f}"]])


def section(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf8"))
    name = path.stem
    origin = (
        f"`{document.get('command') or 'no single command'}` · commit {document.get('commit') or '–'} · "
        f"torch {torch_version(document) or '–'} · {day(document) or 'day not recorded'}"
    )
    if took := seconds(document):
        origin += f" · runs took {max(took / 60, 1):.0f} min"
    parts = [f"## [{name}.json](results/{name}.json)", origin]
    if older(name, document):
        parts.append("**Measured with an earlier engine**; not run again for lack of time.")
    if said := unclean(document):
        parts.append(said)
    if document.get("note"):
        parts.append(f"*{document['note']}*")
    return "\n\n".join([*parts, figures(name, document)])


def page() -> str:
    """The whole page."""
    paths = sorted(RESULTS.glob("*.json"))
    documents = {path.stem: json.loads(path.read_text(encoding="utf8")) for path in paths}
    marked = [name for name, document in documents.items() if older(name, document)]
    took = sum(map(seconds, documents.values()))
    head = (
        "# Results\n\n`python experiments/results_page.py` writes this page from the files in `experiments/results`; "
        "nothing on it is written by hand. ± is one standard deviation over the seeds, unless stated otherwise. If a "
        "file did not record its commit, the commit that added the file is given (`origin_note` in the file).\n\n"
        f"{len(marked)} of {len(paths)} files were measured before the present engine ({ENGINE}) and are marked.\n\n"
        f"The runs of all files took {took / 3600:.0f} hours by the files' own entries (core time if it was recorded, "
        "otherwise time on a shared core); each section states the time of its runs."
    )
    return "\n\n".join([head, goals(), times(documents), *map(section, paths)]) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf8") == page() else 1
    PAGE.write_text(page(), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
