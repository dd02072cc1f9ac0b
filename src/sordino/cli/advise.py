"""sordino advise clipping: where the clipping threshold of a recipe stands, measured on public rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from sordino.console import Commands, add_code, add_json, emit


def add(commands: Commands) -> None:
    parser = commands.add_parser("advise", help="measure on public rows what a setting should be")
    topics = parser.add_subparsers(title="topics", metavar="TOPIC", required=True)
    clipping = topics.add_parser(
        "clipping",
        help="the clipping threshold against the sampling noise",
        description="Measures, on public rows, how far single records' gradients lie from the mean gradient, and says "
        "where the recipe's clipping threshold stands against Thm 3.2 of Xiao, Wan & Devadas 2022 (c ≥ 4·κ·log 10). "
        "The rows are the first N of the TEST split, which recipes take to be public: an estimate at these weights.",
        epilog="example: sordino advise clipping experiments/recipes/fashion_mnist_scattering_linear.toml --public 500",
    )
    clipping.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    clipping.add_argument("--public", type=int, default=500, metavar="N", help="rows of the test split (default: 500)")
    clipping.add_argument("--weights", type=Path, metavar="FILE", help="a model.safetensors (default: fresh weights)")
    add_code(clipping)
    clipping.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    clipping.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are")
    add_json(clipping)
    clipping.set_defaults(run=_clipping)


def _clipping(arguments: argparse.Namespace) -> int:
    from safetensors.torch import load_file
    from torch.nn.functional import cross_entropy

    from sordino.diagnostics.threshold import advise_clipping
    from sordino.errors import InputError
    from sordino.runs.prepared import prepare
    from sordino.runs.recipe import Recipe
    from sordino.training.state import load_model

    prepared = prepare(
        Recipe.read(arguments.recipe, arguments.set, allow_code=arguments.allow_code), arguments.data_dir
    )
    plan, model, split = prepared.plan, prepared.model(), prepared.dataset.test
    if arguments.weights is not None:
        if not arguments.weights.is_file():
            raise InputError(f"there is no file {arguments.weights}")
        load_model(model, load_file(arguments.weights))
    rows = (split.inputs[: arguments.public], split.targets[: arguments.public])
    found = advise_clipping(
        model, cross_entropy, rows, plan.clipping, records=plan.records, epsilon=plan.guarantee().epsilon,
        delta=plan.delta,
    )  # fmt: skip
    shown = {
        "verdict": found.verdict,
        "c": f"{found.clip_norm:g}, {found.clip_norm / found.threshold:.3g} of 4·κ·log 10 = {found.threshold:.4g}",
        "κ": f"{found.kappa:.4g} (the tail below 1/10 of {found.rows} public rows)",
        "sampling noise": ", ".join(f"{q}: {value:.4g}" for q, value in found.noise_quantiles.items()) + " (quantiles)",
        "advice": found.sentence,
    }
    emit(arguments, found.to_dict(), shown)
    return 0
