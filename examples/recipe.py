"""The command line with your own recipe. The run directory contains the model, the ledger and the report.

Run it with `python examples/recipe.py`.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

RECIPE = """
[data]
name = "fashion-mnist-mini"

[model]
name = "linear"

[privacy]
epsilon = 3.0
delta = 1e-5

[sampling]
expected_batch = 1000

[train]
steps = 30
lr = 0.5
average = "ema"
average_decay = 0.9
"""


def sordino(*arguments: str) -> None:
    """Runs `sordino …` as a shell would."""
    subprocess.run([sys.executable, "-m", "sordino", *arguments], check=True)


def main() -> None:
    with TemporaryDirectory() as folder:
        recipe, run = Path(folder) / "recipe.toml", Path(folder) / "run"
        recipe.write_text(RECIPE, encoding="utf8")
        sordino("train", str(recipe), "--set", "run.name=first", "--out", str(run))
        result = json.loads((run / "result.json").read_text(encoding="utf8"))
        print(f"ε = {result['epsilon']:.3f}, written: {', '.join(sorted(path.name for path in run.iterdir()))}")


if __name__ == "__main__":
    main()
