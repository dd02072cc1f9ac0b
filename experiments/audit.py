"""How often the default audit rejects a correct claim, and how often it detects halved noise: one JSON file.

python experiments/audit.py
"""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from pathlib import Path

from torch.nn.functional import cross_entropy

from provenance import origin
from sordino.audit import audit_plan
from sordino.runs.prepared import prepare
from sordino.runs.recipe import Recipe

SEEDS = range(12)


def main() -> int:
    with as_file(files("sordino") / "recipes" / "audit.toml") as path:
        prepared = prepare(Recipe.read(path))
    runs = []
    for seed in SEEDS:
        for noise_scale in (1.0, 0.5):
            found = audit_plan(
                prepared.plan, prepared.model(), cross_entropy, prepared.dataset.train, seed=seed,
                noise_scale=noise_scale, chunk=prepared.settings.chunk,
            )  # fmt: skip
            runs.append({"seed": seed, "noise_scale": noise_scale, **found.to_dict()})
    broken = {str(s): sum(not r["holds"] for r in runs if r["noise_scale"] == s) for s in (1.0, 0.5)}
    target = Path(__file__).parent / "results" / "audit.json"
    document = {**origin("python experiments/audit.py"), "recipe": "audit.toml", "broken": broken, "runs": runs}
    target.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    print(f"{target}: of {len(SEEDS)} seeds broken: {broken}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
