"""From a hospital's CSV file to a private model, its report and predictions, using only the command line.

Run it with `python examples/hospital.py`. The page that explains it: docs/tutorials/hospital.md.
"""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

from sordino.cli import main as sordino  # what the command `sordino` calls

RECIPE = """
[run]
name = "visits"

[data]
name = "csv"
path = "{folder}/visits.csv"
test_path = "{folder}/held_out.csv"     # visits of patients who agreed: the guarantee does not protect them
records = 3000                          # the number that the hospital publishes; it is not counted from the file
target = "readmitted"
classes = ["no", "yes"]
ignore = ["patient"]

[data.columns]                          # public bounds and lists: none of them is computed from the file
age = {{ kind = "number", low = 0, high = 110 }}
glucose = {{ kind = "number", low = 40, high = 400, missing = true }}
sex = {{ kind = "category", values = ["f", "m"] }}
ward = {{ kind = "category", values = ["surgery", "internal"], other = true }}
note = {{ kind = "text", buckets = 16 }}

[model]
name = "linear"

[privacy]
epsilon = 3.0
delta = 1e-6

[sampling]
expected_batch = 300

[train]
steps = 60
lr = 4.0
average = "tail"                        # the mean of the last half of the iterates
"""


def visits(path: Path, count: int, seed: int) -> None:
    """Writes synthetic visits, in place of your data."""
    draw = random.Random(seed)
    lines = ["patient,age,glucose,sex,ward,note,readmitted"]
    for patient in range(count):
        age, glucose = draw.randint(18, 99), draw.uniform(60, 300)
        again = (age - 60) / 40 + (glucose - 150) / 100 + draw.gauss(0, 0.3) > 0
        shown = "" if draw.random() < 0.1 else f"{glucose:.0f}"
        ward, note = draw.choice(["surgery", "internal", "eye"]), draw.choice(["stable", '"fever, cough"', ""])
        lines.append(f"{patient},{age},{shown},{draw.choice('fm')},{ward},{note},{'yes' if again else 'no'}")
    path.write_text("\n".join(lines), encoding="utf8")


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        visits(folder / "visits.csv", 3000, seed=1)
        visits(folder / "held_out.csv", 500, seed=2)
        (folder / "visits.toml").write_text(RECIPE.format(folder=folder), encoding="utf8")
        run, new, found = folder / "run", folder / "held_out.csv", folder / "predictions.csv"
        assert sordino(["train", str(folder / "visits.toml"), "--out", str(run)]) == 0
        assert sordino(["predict", str(run), "--data", str(new), "--out", str(found)]) == 0
        result = json.loads((run / "result.json").read_text(encoding="utf8"))
        print(
            found.read_text(encoding="utf8").splitlines()[:3], (run / "report.html").stat().st_size, "bytes of report"
        )
        print(f"ε = {result['epsilon']:.3f}, {result['test_accuracy']:.0%} of held-out visits are classified correctly")


if __name__ == "__main__":
    main()
