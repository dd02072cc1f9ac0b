"""The recipes behind `sordino train --dataset NAME --epsilon ε`, written from result files.

    python experiments/best.py            write src/sordino/recipes/best/NAME.toml, and the table in README.md
    python experiments/best.py --check    exit 1 if a recipe or the table differs from the result files

For every dataset and every method named here, the file has each ε at which the method was run: its recipe, the number
of seeds, the mean test accuracy and its standard deviation. If several methods were run at one ε, the last one counts.
Their order was decided by held-out training rows (experiments/results/heads_*.json), before the later methods were
evaluated on a test row.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).parents[1]
RESULTS, FOLDER = ROOT / "experiments" / "results", ROOT / "src" / "sordino" / "recipes" / "best"
CHOSEN = {
    "fashion-mnist": (
        ("compare_fashion_mnist_scattering.json", "whitened scattering, linear"),
        ("compare_fashion_mnist.json", "patches, linear"),
        ("compare_fashion_mnist.json", "patches, whitened privately, linear"),
    ),
    "mnist": (
        ("compare_mnist_patches.json", "patches, linear"),
        ("compare_mnist.json", "upright patches, linear"),
        ("compare_mnist.json", "upright patches, linear, last iterate"),
        ("compare_mnist.json", "upright patches, whitened privately, linear"),
    ),
    "cifar10": (("compare_cifar10.json", "patches, linear"),),
    "imdb": (("compare_imdb.json", "words, linear"),),
    "adult": (("compare_adult.json", "linear"),),
}


def measured(name: str, method: str) -> Iterator[dict[str, Any]]:
    """The results of this method in a result file, one for each ε."""
    path = RESULTS / name
    if not path.exists():
        return
    document = json.loads(path.read_text(encoding="utf8"))
    about = {"method": method, "source": f"experiments/results/{name}"}
    if "recipe" in document:  # a file of experiments/run.py: one recipe at its own ε
        recipe = tomllib.loads((ROOT / "experiments" / "recipes" / document["recipe"]).read_text(encoding="utf8"))
        first = document["runs"][0]
        yield {
            **about, "assumes": "no public data", "epsilon": recipe["privacy"]["epsilon"], "delta": first["delta"],
            "relation": first["relation"], "accuracy": document["mean_test_accuracy"], "seeds": len(document["runs"]),
            "spread": document["spread"], "recipe": recipe,
        }  # fmt: skip
        return
    described = next((one for one in document["methods"] if one["name"] == method), None)
    for row in document["table"]:
        if described is not None and row["method"] == method and row["seeds"]:
            yield {
                **about, "assumes": described["assumes"], "epsilon": row["epsilon"], "delta": document["delta"],
                "relation": document["relation"], "accuracy": row["mean"], "seeds": row["seeds"],
                "spread": row["spread"], "recipe": described["settings"][f"{row['epsilon']:g}"],
            }  # fmt: skip


def best(dataset: str) -> str | None:
    """The text of the recipe file; None if nothing was run."""
    found = {one["epsilon"]: one for source in CHOSEN[dataset] for one in measured(*source)}
    if not found:
        return None
    for one in found.values():
        one["recipe"]["run"] = {"name": dataset}
    known = [{k: v for k, v in found[epsilon].items() if v is not None} for epsilon in sorted(found)]
    return "# Written by experiments/best.py; accuracies are on the test rows.\n" + tomli_w.dumps({"known": known})


BEGIN, END = "<!-- best:begin -->", "<!-- best:end -->"


def plain(dataset: str) -> str:
    """The best accuracy without privacy in the files of `sordino compare`."""
    found = []
    for name, _ in CHOSEN[dataset]:
        document = json.loads((RESULTS / name).read_text(encoding="utf8")) if (RESULTS / name).exists() else {}
        kinds = {one["name"]: one["kind"] for one in document.get("methods", [])}
        found += [r for r in document.get("table", []) if kinds.get(r.get("method")) == "plain" and r["seeds"]]
    return _cell(max(found, key=lambda r: float(r["mean"]))) if found else "–"


def _cell(row: dict[str, Any]) -> str:
    mean, spread = float(row["mean"] if "mean" in row else row["accuracy"]), row.get("spread")
    return f"{100 * mean:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}") + f" ({row['seeds']})"


def overview() -> str:
    """The table of README.md: for every dataset the best known recipe at each ε, and its assumptions."""
    rows, epsilons = [], (0.5, 1.0, 2.0, 3.0, 8.0)
    for dataset in CHOSEN:
        text = best(dataset)
        known = {one["epsilon"]: one for one in tomllib.loads(text)["known"]} if text else {}
        if not known:
            continue
        first = min(known.values(), key=lambda one: abs(one["epsilon"] - 1))
        cells = [_cell(known[e]) if e in known else "–" for e in epsilons]
        rows.append([dataset, *cells, plain(dataset), f"{first['method']}: {first['assumes']}"])
    head = [
        "test accuracy in % (seeds)",
        *(f"ε = {e:g}" for e in epsilons),
        "no privacy, same features",
        "how (at ε = 1)",
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_overview(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{overview()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    check, wrong = "--check" in sys.argv[1:], False
    for dataset in CHOSEN:
        text, path = best(dataset), FOLDER / f"{dataset}.toml"
        if text is None:
            continue
        if check:
            wrong |= not path.exists() or path.read_text(encoding="utf8") != text
        else:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf8")
    readme = ROOT / "README.md"
    if check:
        wrong |= with_overview(readme.read_text(encoding="utf8")) != readme.read_text(encoding="utf8")
    else:
        readme.write_text(with_overview(readme.read_text(encoding="utf8")), encoding="utf8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
