"""The recipes behind `sordino train --dataset NAME --epsilon ε`, written from the results of `sordino compare`.

    python experiments/best.py            write src/sordino/recipes/best/NAME.toml
    python experiments/best.py --check    exit 1 where a recipe is not what the results say

For every dataset one method of one comparison: its recipe, and at each ε that was run with all seeds the settings,
the mean test accuracy and its standard deviation. The methods are named here, not chosen by their test accuracy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).parents[1]
RESULTS, FOLDER = ROOT / "experiments" / "results", ROOT / "src" / "sordino" / "recipes" / "best"
CHOSEN = {
    "fashion-mnist": ("compare_fashion_mnist.json", "whitened scattering, linear"),
    "mnist": ("compare_mnist.json", "whitened scattering, linear"),
    "cifar10": ("compare_cifar10.json", "EfficientNet-Lite0 features, linear"),
    "imdb": ("compare_imdb.json", "MiniLM features, linear"),
    "adult": ("compare_adult.json", "linear"),
}
SEEDS = 3


def flat(document: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in document.items() for key, value in keys.items()}


def best(dataset: str) -> str | None:
    """The file's text; None where the comparison was not run."""
    name, method = CHOSEN[dataset]
    path = RESULTS / name
    if not path.exists():
        return None
    document = json.loads(path.read_text(encoding="utf8"))
    (described,) = [one for one in document["methods"] if one["name"] == method]
    rows = [r for r in document["table"] if r["method"] == method and r["seeds"] >= SEEDS]
    if not rows:
        return None
    settings = described["settings"]
    base = settings[f"{rows[0]['epsilon']:g}"]
    base["run"]["name"] = dataset
    known = []
    for row in rows:
        own = flat(settings[f"{row['epsilon']:g}"])
        changed = [
            f"{key}={json.dumps(value)}"
            for key, value in own.items()
            if value != flat(base).get(key) and key not in ("privacy.epsilon", "run.name")
        ]
        known.append(
            {
                "epsilon": row["epsilon"],
                "delta": document["delta"],
                "relation": document["relation"],
                "accuracy": row["mean"],
                "spread": row["spread"],
                "seeds": row["seeds"],
                "settings": changed,
            }
        )
    head = {
        "dataset": dataset,
        "assumes": described["assumes"],
        "method": method,
        "source": f"experiments/results/{name}",
    }
    comment = f"# Written by experiments/best.py from experiments/results/{name}; accuracies are on the test rows.\n"
    return comment + tomli_w.dumps({**head, "recipe": base, "known": known})


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
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
