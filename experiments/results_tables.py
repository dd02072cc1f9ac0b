"""The tables of experiments/RESULTS.md: the figures of one result file as Markdown, by the kind of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sordino.shown import up

Document = Mapping[str, Any]
ROWS, WORDS = 30, 60  # of a list that is shown as it is; of one of its cells


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
    """A search on held-out training rows: the best trial of each ε and feature map, with and without whitening."""
    best: dict[tuple[float, str, bool], Mapping[str, Any]] = {}
    for trial in document["trials"].values():
        key = (trial["epsilon"], trial["recipe"], bool(trial.get("whiten")))
        if key not in best or trial["held_out_accuracy"] > best[key]["held_out_accuracy"]:
            best[key] = trial
    rows = [
        [f"{epsilon:g}", recipe, f"{t['whiten']:g}" if t.get("whiten") else "–", f"{t['steps']:g}", f"{t['batch']:g}",
         f"{t['clip']:g}", f"{t['lr']:g}{' to 0' if t.get('cosine') else ''}", f"{t['average']:g}",
         percent(t["held_out_accuracy"])]
        for (epsilon, recipe, _), t in sorted(best.items())
    ]  # fmt: skip
    trials = document["trials"].values()
    said = (
        f"{len(trials)} trials, {sum(t['core_seconds'] for t in trials) / 60:.0f} core-minutes; trained on "
        f"{document['trained_on']:,} rows and evaluated on {document['held_out']:,} others of the *training* split. On "
        f"private rows, looking at all trials would cost about √{len(trials)} times ε; a choice by `sordino sweep "
        "--pay` costs two to three times ε. The best trial for each feature map and ε:"
    )
    names = ["ε", "features", "whitened with noise", "steps", "batch", "clip", "lr", "average", "held-out accuracy, %"]
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


def plain(document: Document) -> str:
    """The numbers and notes of a file that has no table of accuracies; its short lists as tables."""
    left = ("command", "commit", "torch", "written", "origin_note", "environment", "sources", "note")
    rows, lists = [], []
    for key, value in document.items():
        shown = listed(value)
        if key not in left and shown:
            lists.append(f"{key}:\n\n{shown}")
        elif key not in left:
            rows.append([key, f"{len(value)} entries" if isinstance(value, list | dict) else str(value)])
    return "\n\n".join(([table(["entry", "value"], rows)] if rows else []) + lists)


def listed(value: Any) -> str:
    """A short list (or mapping) of entries with plain values as a table; empty if it is none."""
    if isinstance(value, dict) and all(isinstance(one, dict) for one in value.values()):
        value = [{"": name} | one for name, one in value.items()]
    if not isinstance(value, list) or not 0 < len(value) <= ROWS or not all(isinstance(one, dict) for one in value):
        return ""
    cells = [{key: cell(key, found) for key, found in one.items() if not _nested(found)} for one in value]
    names = [key for key in cells[0] if all(len(one.get(key, "–")) <= WORDS for one in cells)]
    return table(names, [[one.get(name, "–") for name in names] for one in cells]) if len(names) > 1 else ""


def _nested(value: object) -> bool:
    return isinstance(value, list | dict)


def cell(key: str, value: object) -> str:
    """One plain value: four significant digits, an upper bound rounded up, and no sign that would end the cell."""
    if isinstance(value, float) and key.startswith("epsilon") and "lower" not in key:
        return up(value)
    shown = "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return shown.replace("|", "∣").replace("\n", " ")


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
