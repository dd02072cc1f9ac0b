"""Your own dataset and model with each of the five methods, one recipe each.

Run it with `python examples/five_methods.py`. Two methods are proven for one kind of model only, which their recipes
name: hidden state for linear models, DP-MAC for chains of layers.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import sordino
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

CODE = '''
import torch

def rows():
    """Your data: inputs, targets and the names of the classes."""
    inputs = 2 * torch.rand(2500, 4, generator=torch.Generator().manual_seed(0)) - 1
    targets = (inputs[:, 0] > inputs[:, 1]).long()
    train, test = (inputs[:2000], targets[:2000]), (inputs[2000:], targets[2000:])
    return {"train": train, "test": test, "classes": ["less", "more"]}

def net(shape, classes, width=8):
    """Your model."""
    return torch.nn.Sequential(torch.nn.Linear(shape[0], width), torch.nn.Tanh(), torch.nn.Linear(width, classes))
'''
COMMON = {
    "data": {"name": "student.py:rows", "records": 2000},
    "model": {"name": "student.py:net", "width": 8},
    "privacy": {"epsilon": 3.0, "delta": 1e-5},
    "sampling": {"expected_batch": 500},
    "train": {"steps": 20, "lr": 2.0},
}
METHODS = {
    "dpsgd": {},
    "modelmix": {"method": {"lr": 2.0, "tau_over_lr": 0.1}, "train": {"steps": 20}},
    "coupling": {
        "method": {"alpha": 0.5}, "public": {"records": 100}, "data": {"name": "student.py:rows", "records": 1900},
    },
    "hidden-state": {
        "method": {"regularisation": 0.01}, "model": {"name": "linear"}, "train": {"steps": 20},
        "sampling": {"name": "partition", "expected_batch": 500},
    },
    "dp-mac": {
        "model": {"name": "classifier", "hidden": [8]}, "train": {"steps": 20, "lr": 0.05, "optimizer": "adam"},
    },
}  # fmt: skip


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "student.py").write_text(CODE, encoding="utf8")
        for method, changes in METHODS.items():
            sections = {**COMMON, **changes, "method": {"name": method, **changes.get("method", {})}}
            for section in ("data", "model"):
                sections[section] = {
                    key: value.replace("student.py", str(folder / "student.py")) if key == "name" else value
                    for key, value in sections[section].items()
                }
            # --allow-code on the command line: without it, a recipe never runs code
            recipe = Recipe.from_dict(sections, allow_code=True)
            result = run_recipe(recipe, folder / method, progress=False)
            model = sordino.load(folder / method, allow_code=True)
            predictions = model.predict(sys.modules["sordino_own_student"].rows()["test"][0][:2])
            print(f"{method}: ε = {result['epsilon']:.3f}, accuracy {result['test_accuracy']:.0%}, {predictions}")


if __name__ == "__main__":
    main()
