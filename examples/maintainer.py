"""A new layer, dataset and method in your own package: sordino finds them and trains with them.

Run it with `python examples/maintainer.py`. It is explained in docs/howto/own_layer.md, docs/howto/your_data.md and
docs/howto/extend.md. A method with its own plan, recipe keys and update: tests/methods/sixth/signed_steps.py.
"""

import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import sordino
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

PACKAGE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from sordino.checks import known_keys
from sordino.plan import Assumption, Method, make_plan


class Gated(torch.nn.Module):
    """A layer. It need not be registered: the engine follows torch's operations."""

    def __init__(self, features, classes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(classes, features))
        self.gate = torch.nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return (x * torch.sigmoid(self.gate)) @ self.weight.T


def net(shape, classes):
    """A model for recipes: [model] name = "our_package:net"."""
    return Gated(shape[0], classes)


def rows():
    """A dataset for recipes: [data] name = "our_package:rows"."""
    inputs = torch.rand(500, 4, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > inputs[:, 1]).long()
    return {"train": (inputs[:400], targets[:400]), "test": (inputs[400:], targets[400:]), "classes": ["less", "more"]}


@dataclass(frozen=True)
class Plain(Method):
    """A method. What it does not override is DP-SGD's: here everything except its name and its recipe keys."""

    name: ClassVar[str] = "plain-steps"

    @classmethod
    def plan(cls, **options):
        return make_plan(cls(), **options)

    @classmethod
    def check_recipe(cls, recipe):
        known_keys(recipe.method.options, (), f"[method] of {cls.name}")

    @classmethod
    def from_recipe(cls, request):
        return cls.plan(**request.arguments())

    def assumptions(self, plan):
        return (Assumption("steps are plain", "they are those of the base class"),)
'''
ENTRY_POINT = "[sordino.methods]\nplain-steps = our_package:Plain\n"  # pip writes this from your pyproject.toml
RECIPE = {
    "data": {"name": "our_package:rows", "records": 400},
    "model": {"name": "our_package:net"},
    "privacy": {"epsilon": 3.0, "delta": 1e-5},
    "method": {"name": "plain-steps"},
    "sampling": {"expected_batch": 100},
    "train": {"steps": 10, "lr": 4.0},
}


def main() -> None:
    with TemporaryDirectory() as name:
        site, out = Path(name) / "site", Path(name) / "run"
        (site / "our_package-1.0.dist-info").mkdir(parents=True)
        (site / "our_package-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: our-package\n")
        (site / "our_package-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINT)
        (site / "our_package.py").write_text(PACKAGE, encoding="utf8")
        sys.path.insert(0, str(site))
        try:
            ours = import_module("our_package")
            rows = sordino.Rows(*ours.rows()["train"])
            sordino.verify(ours.Gated(4, 2), torch.nn.functional.cross_entropy, rows, sordino.FlatClip(1.0))
            print("layer: its per-record gradients equal those of a loop over records")
            result = run_recipe(Recipe.from_dict(RECIPE, allow_code=True), out, progress=False)
            print(f"{result['method']}: ε = {result['epsilon']:.3f}, accuracy {result['test_accuracy']:.0%}")
        finally:
            sys.path.remove(str(site))
            sys.modules.pop("our_package", None)


if __name__ == "__main__":
    main()
