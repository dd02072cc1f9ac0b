"""Writes the results of modelmix.json, modelmix_table1.json, modelmix_transfer.json, modelmix_variants.json,
modelmix_audit.json and modelmix_momentum.json into docs/modelmix.md; draws its plots.

    python experiments/modelmix_page.py

A block is the text between <!-- name --> and <!-- end name -->; the rest of the page is not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pages import filled, table
from results_page import age
from sordino.report.curves import curves_svg
from sordino.report.plots import Series

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results" / "modelmix.json", ROOT / "docs" / "modelmix.md"
TABLE1 = ROOT / "experiments" / "results" / "modelmix_table1.json"
TABLE1_CIFAR = ROOT / "experiments" / "results" / "modelmix_table1_cifar10.json"
VARIANTS = ROOT / "experiments" / "results" / "modelmix_variants.json"
TRANSFER = ROOT / "experiments" / "results" / "modelmix_transfer.json"
AUDIT = ROOT / "experiments" / "results" / "modelmix_audit.json"
MOMENTUM = ROOT / "experiments" / "results" / "modelmix_momentum.json"
FIGURE = ROOT / "docs" / "figures" / "modelmix_accuracy.svg"
FIGURE2 = ROOT / "docs" / "figures" / "modelmix_fig2.svg"
NAMES = {
    "dpsgd": "DP-SGD, momentum 0.9",
    "averaging": "averaging control, same ε",
    "modelmix": "ModelMix",
    "same-variance": "averaging control, same variance",
    "modelmix-paper": "ModelMix, the paper's c, η, τ",
    "averaging-paper": "its averaging control, same ε",
}
PRINTED = {"DP-SGD in the paper": (0.534, 0.815, 0.856), "ModelMix in the paper": (0.839, 0.861, 0.888)}


def rows_of(document: Mapping[str, Any], arm: str) -> list[Mapping[str, Any]]:
    return [row for row in document["table"] if row["arm"] == arm]


def accuracy(row: Mapping[str, Any]) -> str:
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    return f"{100 * row['mean']:.2f}{spread}"


def accuracies(document: Mapping[str, Any]) -> str:
    rows = []
    for arm, name in NAMES.items():
        found = rows_of(document, arm)
        if found:
            rows.append([name, *(accuracy(row) for row in found), str(found[0]["seeds"])])
    rows += [[f"*{name}*", *(f"*{100 * value:.1f}*" for value in values), ""] for name, values in PRINTED.items()]
    return table(["test accuracy in %", "ε = 0.2", "ε = 0.6", "ε = 1", "seeds"], rows)


def long_runs(document: Mapping[str, Any]) -> str:
    """Table 1 with the 800 steps of Appendix E, and the published values."""
    names = {"dpsgd": "DP-SGD, c = 0.1, η = 4", "averaging": "averaging control, same ε", "modelmix": "ModelMix"}
    epsilons = sorted({row["target_epsilon"] for row in document["table"]})
    rows = []
    for arm, name in names.items():
        own = {row["target_epsilon"]: row for row in rows_of(document, arm)}
        rows.append([name, *(_measured(own.get(epsilon)) for epsilon in epsilons)])
        printed = [own[epsilon]["published"] if epsilon in own else None for epsilon in epsilons]
        if any(printed):
            rows.append([f"*{name} in the paper*", *("–" if value is None else f"*{value:.1f}*" for value in printed)])
    equal = [
        min((r["beside"]["equal_variance_epsilon"] for r in document["runs"].values()
             if (r["arm"], r["target_epsilon"]) == ("modelmix", epsilon)), default=None)
        for epsilon in epsilons
    ]  # fmt: skip
    rows.append(["ε that ModelMix's noise would have as Gaussian", *("–" if e is None else f"{e:.3f}" for e in equal)])
    runs, first = document["runs"].values(), next(iter(document["runs"].values()))
    records = 50_000 if first.get("dataset") == "cifar10" else 60_000
    said = (
        f"{first['steps']} steps, expected batch 8192, {records:,} records, δ = {first['delta']:g}, "
        f"{first['relation']}; {len(runs)} runs, {len({r['seed'] for r in runs})} seed(s), the last iterate on the "
        f"test images; {sum(r['seconds'] for r in runs) / 60:.0f} minutes of training on a core that was shared."
    )
    return table(["test accuracy in %", *(f"ε = {e:g}" for e in epsilons)], rows) + f"\n\n{said}"


def _measured(row: Mapping[str, Any] | None, unit: float = 1.0) -> str:
    if row is None:
        return "–"
    spread = "" if row["spread"] is None else f" ± {unit * row['spread']:.2f}"
    return f"{unit * row['mean']:.2f}{spread} ({row['seeds']})"


def transfer(document: Mapping[str, Any]) -> str:
    """Section 5.3: the softmax layer on public features."""
    names = {"dpsgd": "DP-SGD, 2,700 steps", "averaging": "averaging control, same ε", "modelmix": "ModelMix"}
    epsilons = sorted({row["target_epsilon"] for row in document["table"]})
    rows = []
    for arm, name in names.items():
        own = {row["target_epsilon"]: row for row in rows_of(document, arm)}
        rows.append([name, *(_measured(own.get(epsilon), 100) for epsilon in epsilons)])
        printed = [own[epsilon]["published"] if epsilon in own else None for epsilon in epsilons]
        if any(printed):
            rows.append([f"*{name} in the paper*", *("–" if value is None else f"*{value:.1f}*" for value in printed)])
    runs = document["runs"].values()
    said = (
        f"50,000 records, δ = {next(iter(runs))['delta']:g}, add/remove; the last iterate on the test images; "
        f"{sum(r['seconds'] for r in runs) / 60:.1f} minutes of training in all."
    )
    return table(["test accuracy in %", *(f"ε = {e:g}" for e in epsilons)], rows) + f"\n\n{said}"


def differences(document: Mapping[str, Any]) -> str:
    rows = []
    for arm in ("dpsgd", "modelmix", "same-variance", "modelmix-paper"):
        cells = [row["over_averaging"] for row in rows_of(document, arm)]
        if all(cells) and cells:
            shown = [f"{100 * cell['mean']:+.2f} ± {100 * cell['standard_error']:.2f}" for cell in cells]
            rows.append([NAMES[arm], *shown])
    return table(["points above the averaging control at the same ε", "ε = 0.2", "ε = 0.6", "ε = 1"], rows)


def noise(document: Mapping[str, Any]) -> str:
    rows = []
    for arm in ("modelmix", "modelmix-paper"):
        for row in rows_of(document, arm):
            taus = row["tau_over_lr"]["values"]
            tau = " then ".join(f"{value:.3g}" for _, value in taus)
            figures = (row["beside"]["epsilon_classic"], row["noise_multiplier"])
            control = f"**{row['beside']['equal_variance_epsilon']:.4f}**"
            rows.append(
                [NAMES[arm], f"{row['epsilon']:.4f}", control, *(f"{x:.3f}" for x in figures), tau, f"{row['lr']:g}"]
            )
    head = ["", "ε", "ε of equal variance", "ε, classic conversion", "noise multiplier", "τ/η", "η"]
    return table(head, rows)


def sizes(document: Mapping[str, Any]) -> str:
    def setting(arm: str) -> str:
        row = rows_of(document, arm)[0]
        return f"{row['steps']} steps, expected batch {row['expected_batch']:g}, c = {row['clip_norm']:g}"

    runs = document["runs"].values()
    rates = [f"{NAMES[arm]}: " + ", ".join(f"{row['lr']:g}" for row in rows_of(document, arm)) for arm in NAMES]
    return (
        f"{setting('modelmix')} (the paper's settings: {setting('modelmix-paper')}); step sizes at ε = 0.2, 0.6, 1: "
        f"{'; '.join(rates)}. {len(runs)} runs, {sum(run['held_out'] for run in runs)} of them to choose step sizes; "
        f"{sum(run['seconds'] for run in runs) / 60:.0f} minutes of training in all, on a core that was "
        f"shared.{age('modelmix', document)}"
    )


def figure(document: Mapping[str, Any]) -> str:
    arms = ("dpsgd", "averaging", "modelmix", "same-variance")
    epsilons = [row["target_epsilon"] for row in rows_of(document, "dpsgd")]
    curves = {NAMES[arm]: [row["mean"] for row in rows_of(document, arm)] for arm in arms}
    best = {name: values[-1] for name, values in curves.items()}
    summary = "At ε = 1: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in best.items()) + "."
    series = Series("Fashion-MNIST: test accuracy over ε", summary, "ε", "accuracy", percent=True)
    return curves_svg(epsilons, curves, series, from_zero=False)


def audit(runs: list[Mapping[str, Any]]) -> str:
    """Over the seeds: the lower bounds, how often they exceeded ε, and how often the test of the noise failed."""
    rows = []
    for key in dict.fromkeys((run["noise_multiplier"], run["width"], run["steps"], run["width_scale"]) for run in runs):
        sigma, width, steps, scale = key
        names = ("noise_multiplier", "width", "steps", "width_scale")
        found = [run for run in runs if tuple(run[name] for name in names) == key]
        bounds = [run["epsilon_lower"] for run in found]
        broken = [sum(not run[verdict] for run in found) for verdict in ("holds", "noise_fits")]
        what = {1.0: "as claimed", 0.0: "gap not enforced"}.get(scale, f"widths × {scale:g}")
        setting = [f"{sigma:g}, {width:g}, {steps}", f"{found[0]['epsilon_claimed']:.2f}", what]
        rows.append([*setting, f"{min(bounds):.2f} to {max(bounds):.2f}", *(f"{b} of {len(found)}" for b in broken)])
    head = ["σ, width, steps", "ε claimed", "what is run", "lower bounds on ε (95 %)", "ε broken", "noise does not fit"]
    return table(head, rows)


def momenta(runs: list[Mapping[str, Any]]) -> str:
    """Algorithm 1 as printed with a buffer inside: the lower bounds of the seeds beside the claim without one."""
    rows = []
    for momentum in dict.fromkeys(run["momentum"] for run in runs):
        found = [run for run in runs if run["momentum"] == momentum]
        bounds = ", ".join(f"{run['epsilon_lower']:.2f}" for run in found)
        broken = sum(not run["holds"] for run in found)
        rows.append([f"{momentum:g}", f"{found[0]['epsilon_claimed']:.2f}", bounds, f"{broken} of {len(found)}"])
    return table(["momentum", "ε claimed without it", "lower bounds on ε (95 %), by seed", "ε broken"], rows)


def variants(document: Mapping[str, Any]) -> str:
    """Algorithm 2 at one ε, then Fig. 2 at one Gaussian noise."""
    rows = [
        [row["arm"], accuracy(row), f"{row['epsilon']:.3f}", f"{row['noise_multiplier']:.3f}", str(row["seeds"])]
        for row in document["table"]
    ]
    return table(["arm", "test accuracy in %", "ε", "noise multiplier", "seeds"], rows)


def figure2(document: Mapping[str, Any]) -> str:
    """Fig. 2: accuracy over the steps at equal Gaussian noise, the mean of the seeds."""
    names = {"p = 1": "mixing", "mean of two": "mean of two iterates, no mixing noise", "no mixing": "plain descent"}
    curves, steps = {}, []
    for arm, name in names.items():
        own = [dict(map(tuple, run["curve"])) for run in document["runs"].values() if run["arm"] == arm]
        steps = sorted(own[0])
        curves[name] = [sum(run[step] for run in own) / len(own) for step in steps]
    last = ", ".join(f"{name} {100 * values[-1]:.1f} %" for name, values in curves.items())
    series = Series(
        "Equal Gaussian noise, with and without mixing", f"At the end: {last}.", "step", "accuracy", percent=True
    )
    return curves_svg([float(step) for step in steps], curves, series, from_zero=False)


def blocks(document: Mapping[str, Any]) -> dict[str, str]:
    return {
        "audit": audit(json.loads(AUDIT.read_text())["runs"]),
        "momentum": momenta(json.loads(MOMENTUM.read_text("utf8"))["runs"]),
        "accuracies": accuracies(document),
        "appendix e": long_runs(json.loads(TABLE1.read_text("utf8"))),
        "appendix e cifar10": long_runs(json.loads(TABLE1_CIFAR.read_text("utf8")))
        if TABLE1_CIFAR.exists()
        else "*Not run yet: `python experiments/modelmix_table1.py --dataset cifar10 …`.*",
        "transfer": transfer(json.loads(TRANSFER.read_text("utf8"))),
        "differences": differences(document),
        "noise": noise(document),
        "sizes": sizes(document),
    } | ({"variants": variants(json.loads(VARIANTS.read_text("utf8")))} if VARIANTS.exists() else {})


def main() -> int:
    document = json.loads(RESULTS.read_text())
    PAGE.write_text(filled(PAGE.read_text("utf8"), blocks(document)), "utf8")
    FIGURE.write_text(figure(document), "utf8")
    if VARIANTS.exists():
        FIGURE2.write_text(figure2(json.loads(VARIANTS.read_text("utf8"))), "utf8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
