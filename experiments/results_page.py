"""Writes experiments/RESULTS.md: every result file with its command, commit, versions, age and figures.

    python experiments/results_page.py            write the page
    python experiments/results_page.py --check    exit 1 if the page differs from the files

Everything on the page is read from the files; a test compares the two. A file whose trainings are older than today's
engine is marked; its figures remain until they are measured again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results", ROOT / "experiments" / "RESULTS.md"
ENGINE = (
    "2026-11-17"  # sums in double precision, rows followed by version: trainings before this day used another engine
)
NO_TRAINING = (
    "allocation", "coupling_monotonicity", "coupling_table6", "hidden_state_figures", "kernel_errors", "mac_fig4",
    "modelmix_fig3", "modelmix_gep", "step_costs",
)  # fmt: skip  # accounting, drawings, and one simulation in NumPy

Document = Mapping[str, Any]


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


def commits(document: Document) -> list[str]:
    """The commits of a file's runs, as far as they name them; else that of the file."""
    runs = document.get("runs")
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


def percent(mean: float | None, spread: float | None = None) -> str:
    if mean is None:
        return "–"
    return f"{100 * mean:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(head)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def accuracies(document: Document) -> str:
    """The `table` of a file: for each setting the accuracy, its standard deviation and the number of seeds."""
    rows = document["table"]
    names = [
        key
        for key in ("dataset", "column", "relation", "arm", "method", "share", "target_epsilon", "epsilon")
        if any(key in r for r in rows)
    ]
    if "target_epsilon" in names and "epsilon" in names:
        names.remove("epsilon")

    def label(value: Any) -> str:
        return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    def shown(row: Mapping[str, Any]) -> list[str]:
        scale = 0.01 if row["mean"] is not None and row["mean"] > 1.5 else 1.0  # some files have per cent
        spread = row.get("spread")
        mean = None if row["mean"] is None else scale * row["mean"]
        return [*(label(row.get(n)) for n in names), percent(mean, None if spread is None else scale * spread),
                str(row["seeds"])]  # fmt: skip

    heads = {"target_epsilon": "ε", "epsilon": "ε", "share": "public share"}
    return table([*(heads.get(n, n) for n in names), "test accuracy, %", "seeds"], map(shown, rows))


def compared(document: Document) -> str:
    """A comparison: methods by ε, then the paired differences."""
    epsilons = document["epsilons"]
    rows, pairs = [], []
    for method in document["methods"]:
        name = method["name"]
        own = {row["epsilon"]: row for row in document["table"] if row["method"] == name}
        cells = [own.get(None, own.get(epsilon)) for epsilon in epsilons]
        planned = len(document["seeds"])
        shown = [
            "–" if c is None else percent(c["mean"], c["spread"]) + (f" ({c['seeds']})" if c["seeds"] < planned else "")
            for c in cells
        ]
        seconds = [row["core_seconds"] for row in own.values() if row["core_seconds"] is not None]
        rows.append([name, *shown, f"{sum(seconds) / len(seconds):.0f}" if seconds else "–", method["assumes"] or "–"])
        found = {d["epsilon"]: d for d in document["differences"] if d["method"] == name}
        if found:
            some = [found.get(epsilon) for epsilon in epsilons]
            pairs.append([name, *("–" if d is None else _difference(d) for d in some)])
    heads = [f"ε = {epsilon:g}" for epsilon in epsilons]
    said = [
        f"{document['title']}: test accuracy in per cent, δ = {document['delta']:g}, {document['relation']}, seeds "
        f"{', '.join(map(str, document['seeds']))}"
        + (
            "."
            if document["complete"]
            else f"; {len(document['runs'])} of {document['planned']} runs (in brackets: seeds, if fewer)."
        )
        + (f" {document['notes']}" if document["notes"] else ""),
        table(["method", *heads, "core s", "assumes"], rows),
    ]
    if pairs:
        said += [f"Points above *{document['baseline']}*, seed by seed (half width of the 95 % interval):",
                 table(["method", *heads], pairs)]  # fmt: skip
    return "\n\n".join(said)


def _difference(row: Mapping[str, Any]) -> str:
    interval = "" if row["interval"] is None else f" ± {100 * row['interval']:.2f}"
    return f"{100 * row['mean']:+.2f}{interval}"


def hidden_state(document: Document) -> str:
    rows = [
        [r["dataset"], r["row"], f"{r['target_epsilon']:g}", r["relation"],
         percent(r["mean_test_accuracy"], r["spread"]), str(len(r["runs"]))]
        for r in document["rows"]
    ]  # fmt: skip
    return table(["dataset", "row", "ε", "relation", "test accuracy, %", "seeds"], rows)


def mac(document: Document) -> str:
    rows = [
        [part, *key.split(", "), f"{v['mean']:.4f}" + ("" if v["spread"] is None else f" ± {v['spread']:.4f}"),
         str(v["seeds"])]
        for part, found in document["summary"].items()
        for key, v in found.items()
        if isinstance(v, dict) and {"mean", "spread", "seeds"} <= set(v) and key.count(", ") == 1
    ]  # fmt: skip
    return table(["part", "ε", "method", "accuracy (MNIST) or squared error (USPS)", "seeds"], rows)


def one_recipe(document: Document) -> str:
    return table(
        ["recipe", "ε", "relation", "test accuracy, %", "seeds"],
        [[document["recipe"], f"{document['runs'][0]['epsilon']:.4g}", document["runs"][0]["relation"],
          percent(document["mean_test_accuracy"], document["spread"]), str(len(document["runs"]))]],
    )  # fmt: skip


def audits(document: Document) -> str:
    if "summary" in document:
        rows = [
            [name, f"{v['epsilon_claimed']:.3g}", ", ".join(f"{e:.2f}" for e in v["epsilon_lower"]), str(v["broken"])]
            for name, v in document["summary"].items()
        ]
        return table(["case", "ε claimed", "lower bounds", "broken"], rows)
    return "Claims broken, by factor on the noise: " + ", ".join(f"{k}: {v}" for k, v in document["broken"].items())


def monotonicity(document: Document) -> str:
    rows = [
        [
            key,
            document["claimed"][key],
            ", ".join(f"{r[key]:g}" for r in some),
            ", ".join(f"{r['best']:g}" for r in some),
        ]
        for key, some in document["varied"].items()
    ]
    return table(["varied", "the paper: α", "values", "best α measured"], rows)


def ways(document: Document) -> str:
    """Poisson sampling, allocation and correlated noise by task and budget, and the planner's predictions."""
    if isinstance(document["table"], list):  # the file of the comparison before its design was fixed
        return plain(document)
    names = document["table"]["design"]["ways"]
    rows = [
        [r["task"], f"{r['batches']} × {r['epochs']}", f"{r['epsilon']:g}",
         *(f"{percent(r[n]['accuracy'], r[n]['spread'])} (σ {r[n]['noise_multiplier']:.2f})" for n in names),
         r["planned"], ", ".join(r["alike"]), "yes" if r["fails"] else "no"]
        for r in document["table"]["rows"]
    ]  # fmt: skip
    found = document["table"]["summary"]
    called, alike = found["called_different"], found["called_alike"]
    said = (
        f"The planner fails in {found['planner_fails']} of {found['rows']} rows. Of {called['pairs']} pairs that it "
        f"calls different, {called['expected_sign']} have the expected sign; {called['told_apart_as_expected']} differ "
        f"by more than 2.5 standard errors in the expected direction and {called['told_apart_against']} in the other. "
        f"Of {alike['pairs']} that it calls alike, {alike['told_apart']} differ by more than 2.5 standard errors, "
        f"{alike['told_apart_by_a_point']} of them by more than a point. The measured differences correlate with the "
        f"planner's model by {found['correlation_with_the_model']:.2f}, and with the mechanism's noise alone by "
        f"{found['correlation_with_the_mechanisms_noise']:.2f}."
    )
    heads = ["task", "batches × epochs", "ε", *names, "planner", "alike", "fails"]
    return f"{said}\n\n{table(heads, rows)}"


def optimizers(document: Document) -> str:
    """Optimizers against their controls."""
    rows = [
        [r["task"], r["optimizer"], percent(r["accuracy"], r["spread"]), r.get("control", "–"),
         f"{100 * r['gain']:+.2f} ({r['standard_errors']:+.1f} s.e.)" if "gain" in r else "–"]
        for r in document["table"]["rows"]
    ]  # fmt: skip
    verdicts = ", ".join(f"{name}: {said}" for name, said in document["table"]["verdicts"].items())
    return f"{verdicts}.\n\n" + table(["task", "optimizer", "test accuracy, %", "control", "gain, points"], rows)


def caught(document: Document) -> str:
    """Audits of correct runs and of broken ones."""
    rows = [
        [r["case"], f"{r['epsilon_claimed']:.2f}", f"{r['broken']} of {r['audits']}",
         ", ".join(f"{r[key]:.2f}" for key in ("lower_least", "lower_median", "lower_greatest"))]
        for r in document["table"]
    ]  # fmt: skip
    return table(["run", "ε claimed", "reported as broken", "lower bounds: least, median, greatest"], rows)


def settings(document: Document) -> str:
    """The rows of one task or of several, each with its setting."""
    rows = [
        [r["row"], percent(r["accuracy"], r["spread"]), str(r["steps"] if "steps" in r else r["setting"]["steps"]),
         f"{r['noise_multiplier']:.3g}", ", ".join(f"{key} {value:.4g}" for key, value in r["setting"].items())]
        for r in document["table"]
    ]  # fmt: skip
    return table(["row", "test accuracy, %", "steps", "noise multiplier", "setting"], rows)


def two_ways(document: Document) -> str:
    """Hidden state and composition, each as the planner proposes it."""
    rows = [
        [r["row"], percent(r["accuracy"], r["spread"]), f"{r['noise_multiplier']:.3g}",
         "{:.1f} to {:.1f}".format(*r["expected_losses"])]
        for r in document["table"]
    ]  # fmt: skip
    return table(["row", "test accuracy, %", "noise multiplier", "points expected to be lost"], rows)


def gained(document: Document) -> str:
    """Points gained by fractions of the proposed step size, over all budgets of a task."""
    columns = ("least", "median", "greatest")
    rows = [
        [r["task"], f"{r['factor']:g}", str(r["budgets"]), *(f"{r[key]:+.2f}" for key in columns)]
        for r in document["table"]
    ]
    heads = ["task", "of the step size", "budgets", "points gained on held-out rows: least", "median", "greatest"]
    return table(heads, rows)


def table6(document: Document) -> str:
    rows = [
        [r["set"], f"{r['records']:,}", f"{r['epsilon']:.4f}", f"{r['small_delta']:.2e}", f"{r['printed']:g}",
         f"{r['small_delta_epsilon']:.4f}"]
        for r in document["rows"]
    ]  # fmt: skip
    heads = ["set", "private records", "ε at δ = 1e-5", "δ = n^(−1.1)", "ε printed there", "ε accounted there"]
    return table(heads, rows)


def bounds(document: Document) -> str:
    rows = [[r["tau"], f"{r['p']:g}", r["bound"], f"{r['epsilon']:.3f}"] for r in document["table"]]
    setting = document["setting"]
    said = (
        f"Accounting only: σ = {setting['noise_multiplier']:.3f} in both blocks, {setting['steps']} steps, δ = "
        f"{setting['delta']:g}; without mixing ε = {document['without_mixing']:.2f}, published {setting['published']}."
    )
    return said + "\n\n" + table(["τ", "p", "bound", "ε"], rows)


def heads(document: Document) -> str:
    """A search on held-out training rows: the best trial of each ε and feature map."""
    best: dict[tuple[float, str], Mapping[str, Any]] = {}
    for trial in document["trials"].values():
        key = (trial["epsilon"], trial["recipe"])
        if key not in best or trial["held_out_accuracy"] > best[key]["held_out_accuracy"]:
            best[key] = trial
    rows = [
        [f"{epsilon:g}", recipe, f"{t['steps']:g}", f"{t['batch']:g}", f"{t['clip']:g}", f"{t['lr']:g}",
         f"{t['average']:g}", percent(t["held_out_accuracy"])]
        for (epsilon, recipe), t in sorted(best.items())
    ]  # fmt: skip
    trials = document["trials"].values()
    said = (
        f"{len(trials)} trials, {sum(t['core_seconds'] for t in trials) / 60:.0f} core-minutes; trained on "
        f"{document['trained_on']:,} rows and evaluated on {document['held_out']:,} others of the *training* split. On "
        f"private rows, looking at all trials would cost about √{len(trials)} times ε; a choice by `sordino sweep "
        "--pay` costs two to three times ε. The best trial for each feature map and ε:"
    )
    names = ["ε", "features", "steps", "batch", "clip", "lr", "average", "held-out accuracy, %"]
    return said + "\n\n" + table(names, rows)


def resolutions(document: Document) -> str:
    rows = [
        [f"{r['resolution']}", "yes" if r["mirror"] else "no", percent(r["mean"]), percent(r["at_epsilon"]),
         f"{r['milliseconds_per_image']:g}", f"{60 * r['milliseconds_per_image'] / 3600:.2f}"]
        for r in document["found"]
    ]  # fmt: skip
    said = (
        f"EfficientNet-Lite0's features of CIFAR-10 on {document['rows']:,} training rows, evaluated on "
        f"{document['judged']:,} others of the training split: a ridge regression without privacy, and a softmax layer "
        f"at ε = {document['epsilon']:g} with the noise of a plan for all records. Both are the best of a few settings "
        "on the rows that judge. All 50,000 rows fit better than these few."
    )
    heads = ["pixels", "mirrored too", "without privacy, %", f"ε = {document['epsilon']:g}, %", "core ms for an image",
             "core hours for 60,000"]  # fmt: skip
    return said + "\n\n" + table(heads, rows)


def steadier(document: Document) -> str:
    def shown(row: Mapping[str, Any]) -> str:
        return f"{row['error']:.4f}" + ("" if row["spread"] is None else f" ± {row['spread']:.4f}")

    rows = [[r["images"], r["setting"], r["z"], shown(r), str(r["seeds"])] for r in document["table"]]
    return table(["measured on", "setting", "Z", "squared error", "seeds"], rows)


def costs(document: Document) -> str:
    rows = [[r["what"], f"{1000 * r['seconds_per_record']:.3g}"] for r in document["networks"]]
    larger = [[r["item"], r["network"], f"{r['gradients']:,}", f"{r['core_hours']:.3g}"] for r in document["items"]]
    return (
        "Core milliseconds for the clipped gradient of one record, on random rows:\n\n"
        + table(["network", "ms"], rows)
        + "\n\nWhat items of the papers would take at their full size, one run:\n\n"
        + table(["item", "network", "gradients", "core hours"], larger)
    )


def searched_features(document: Document) -> str:
    """The maps that were compared, and the earlier trials."""
    rows = [
        [t["dataset"], ", ".join(f"{k} {v}" for k, v in t["features"].items() if k != "name"), f"{t['rows']:,}",
         str(t["dimensions"]), *(percent(t["held_out_accuracy"][e]) for e in ("1", "3"))]
        for t in document["trials"].values()
    ]  # fmt: skip
    said = (
        f"{len(rows)} maps, compared on a part of the training rows with the noise of all records, and "
        f"{len(document['earlier'])} earlier trials of scratch versions (in the file). Test rows were not read."
    )
    heads = ["dataset", "patches", "rows", "dimensions", "held out, ε = 1, %", "held out, ε = 3, %"]
    return said + "\n\n" + table(heads, rows)


GOALS = (  # what, ε, per cent, file, method
    ("Fashion-MNIST", 1.0, 88.5, "compare_fashion_mnist", "patches, linear"),
    ("Fashion-MNIST", 3.0, 90.2, "compare_fashion_mnist", "patches, linear"),
    ("MNIST", 1.0, 98.2, "compare_mnist", "upright patches, linear"),
    ("MNIST", 3.0, 99.0, "compare_mnist", "upright patches, linear"),
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


def plain(document: Document) -> str:
    """The numbers and notes of a file that has no table of accuracies."""
    left = ("command", "commit", "torch", "written", "origin_note", "environment", "sources", "note")
    rows = [
        [key, str(value) if not isinstance(value, list | dict) else f"{len(value)} entries"]
        for key, value in document.items()
        if key not in left
    ]
    return table(["entry", "value"], rows)


def figures(name: str, document: Document) -> str:
    """The figures of a file as Markdown."""
    shown: dict[str, Callable[[Document], str]] = {
        "hidden_state": hidden_state, "mac": mac, "audit": audits, "bias_audit": audits,
        "coupling_table6": table6, "feature_search": searched_features,
        "frozen_resolution": resolutions, "mac_steady": steadier, "step_costs": costs,
        "coupling_monotonicity": monotonicity, "fashion_mnist_scattering_linear": one_recipe,
        "correlated": ways, "correlated_again": ways, "optimizers": optimizers, "full_batch": settings,
        "linear_rule": settings, "hidden_rule": two_ways, "caught": caught, "modelmix_gep": bounds,
        "step_sizes": gained,
    }  # fmt: skip
    if name.startswith("heads_"):
        return heads(document)
    if name in shown:
        return shown[name](document)
    if "differences" in document and "methods" in document:
        return compared(document)
    rows = document.get("table")
    has_accuracies = isinstance(rows, list) and rows and "mean" in rows[0]
    return accuracies(document) if has_accuracies else plain(document)


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
    marked = [path.stem for path in paths if older(path.stem, json.loads(path.read_text(encoding="utf8")))]
    took = sum(seconds(json.loads(path.read_text(encoding="utf8"))) for path in paths)
    head = (
        "# Results\n\n`python experiments/results_page.py` writes this page from the files in `experiments/results`; "
        "nothing on it is written by hand. ± is one standard deviation over the seeds, unless stated otherwise. If a "
        "file did not record its commit, the commit that added the file is given (`origin_note` in the file).\n\n"
        f"{len(marked)} of {len(paths)} files were measured before the present engine ({ENGINE}) and are marked.\n\n"
        f"The runs of all files took {took / 3600:.0f} hours by the files' own entries (core time if it was recorded, "
        "otherwise time on a shared core); each section states the time of its runs."
    )
    return "\n\n".join([head, goals(), *map(section, paths)]) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf8") == page() else 1
    PAGE.write_text(page(), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
