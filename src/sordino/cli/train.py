"""sordino train, sordino demo: runs a recipe in a run directory."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.console import Commands, add_code, add_json, emit
from sordino.errors import InputError, SordinoError
from sordino.shown import up

if TYPE_CHECKING:
    from sordino.plan.core import Plan
    from sordino.runs.recipe import Recipe


LARGE = 10.0
"""Above this ε, the command says before the run that the guarantee is weak."""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model under a privacy budget, from a recipe",
        description="Trains according to RECIPE and writes recipe.toml, ledger.jsonl, metrics.jsonl, "
        "model.safetensors, result.json and report.html into the run directory. With --dataset and --epsilon instead "
        "of a recipe it uses the best known one for that dataset: settings chosen on held-out training rows, with "
        "their measured test accuracy.",
        epilog="example: sordino train experiments/recipes/fashion_mnist_scattering_linear.toml "
        "--set privacy.epsilon=1 --out runs/eps1; or sordino train --dataset fashion-mnist --epsilon 3. Which method "
        "to use, with measurements: docs/which_method.md",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml", nargs="?", help="or --dataset and --epsilon")
    _add_best_flags(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the recipe (may be repeated); SECTION.KEY= removes the key",
    )
    add_code(parser)
    _add_run_flags(parser)
    parser.add_argument(
        "--budget", type=Path, metavar="FILE", help="count the run in this budget (sordino budget), or do not start"
    )
    parser.add_argument(
        "--shard",
        action="store_true",
        help="under torchrun: divide the model over the processes (fully_shard), for models that are too large for "
        "one; the results are the same",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the directory, if there is one")
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="with --resume, for a directory that was copied, moved or restored: you state that no other copy of it is "
        "or will be resumed, and the ledger records your statement",
    )
    parser.add_argument(
        "--sign",
        type=Path,
        metavar="KEY",
        help="sign the finished run with this Ed25519 private key (PEM or OpenSSH), for `sordino verify --public-key`",
    )
    parser.set_defaults(run=_train)
    demo = commands.add_parser(
        "demo",
        help="a private training run on the embedded data",
        description="Trains a linear layer on scattering features of the embedded Fashion-MNIST subset at ε = 3, and "
        "the same without noise for comparison. A finished demo is shown again, not repeated.",
    )
    _add_run_flags(demo)
    demo.set_defaults(run=_demo)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run directory (default: runs/NAME)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are (default: $SORDINO_DATA)")
    add_json(parser)


def _add_best_flags(parser: argparse.ArgumentParser) -> None:
    from sordino.runs.best import best_names

    best = parser.add_argument_group("the best known recipe, instead of RECIPE.toml")
    best.add_argument(
        "--dataset",
        metavar="NAME",
        help=f"a dataset that has one: {', '.join(best_names())}. Its assumptions and measured accuracy are printed "
        "first",
    )
    best.add_argument("--epsilon", type=float, metavar="ε", help="ε of the run, under add/remove of one record")
    best.add_argument("--delta", type=float, metavar="δ", help="default: 1e-5")


def _train(arguments: argparse.Namespace) -> int:
    return _run(arguments, _recipe_of(arguments), arguments.resume)


def _recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The given recipe, or the best known one for a dataset."""
    from sordino.runs.best import DELTA, best_recipe
    from sordino.runs.recipe import Recipe

    given = [flag for flag in ("dataset", "epsilon", "delta") if getattr(arguments, flag) is not None]
    if arguments.recipe is not None:
        if given:
            key = "data.name" if given[0] == "dataset" else f"privacy.{given[0]}"
            raise InputError(f"--{given[0]} selects the best known recipe: with RECIPE.toml use --set {key}=…")
        return Recipe.read(arguments.recipe, arguments.set, allow_code=arguments.allow_code)
    if arguments.dataset is None or arguments.epsilon is None:
        raise InputError("give RECIPE.toml, or --dataset NAME with --epsilon ε for the best known recipe")
    best = best_recipe(arguments.dataset, arguments.epsilon)
    delta = DELTA if arguments.delta is None else arguments.delta
    recipe = best.recipe([f"privacy.delta={delta!r}", *arguments.set])
    print(f"the best known recipe for {best.dataset}: {best.sentence()}", file=sys.stderr)
    if arguments.set:
        print("--set changes the recipe: the accuracy was measured without these changes", file=sys.stderr)
    return recipe


def _demo(arguments: argparse.Namespace) -> int:
    from sordino.runs.recipe import Recipe

    with as_file(files("sordino") / "recipes" / "demo.toml") as path:
        return _run(arguments, Recipe.read(path), resume=True)


def _run(arguments: argparse.Namespace, recipe: Recipe, resume: bool) -> int:
    from sordino.ranks import from_environment
    from sordino.runs.run import run_recipe
    from sordino.runs.signing import private_key, sign

    out = arguments.out or Path("runs") / recipe.run.name
    given: Path | None = getattr(arguments, "sign", None)
    key = None if given is None else private_key(given)  # finds a wrong key before anything is spent
    budget, adopt = getattr(arguments, "budget", None), getattr(arguments, "adopt", False)  # the demo has neither
    shard = getattr(arguments, "shard", False)
    with from_environment() as rank:
        result = run_recipe(
            recipe,
            out,
            resume=resume,
            data_dir=arguments.data_dir,
            budget=budget,
            adopt=adopt,
            shard=shard,
            begin=_promise,
        )
    if rank is not None and not rank.leads:
        return 0
    if key is not None:
        sign(out, key)
    emit(arguments, {**result, "run": str(out)}, _rows(result, out))
    return 0


def _promise(plan: Plan) -> None:
    """Prints what the guarantee means in words, before anything is spent, and a warning if ε is large."""
    from sordino.plan.attack import in_words, success_rate

    try:
        rate = success_rate(plan)
    except SordinoError:  # the plan has no guarantee at another δ that the bound uses
        return
    print(in_words(rate, plan.unit), file=sys.stderr)
    if (epsilon := plan.guarantee().epsilon) > LARGE:
        print(
            f"ε = {up(epsilon)} is large: an output that is e^{up(epsilon, 3)} times likelier if a given {plan.unit} "
            "took part may occur, even with a probability above δ. "
            "If the data are sensitive, stop here and choose a smaller ε (1 to 10 is common).",
            file=sys.stderr,
        )


def _skipped(result: dict[str, Any]) -> str:
    return (
        f"{result['skipped_steps']} of {result['steps']}: released before the run was resumed, so they count in ε; "
        "their updates were lost"
    )


def _rows(result: dict[str, Any], out: Path) -> dict[str, str]:
    def percent(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.2%}"

    epsilon = (
        f"{up(result['epsilon'])} at δ = {up(result['delta'])}, {result['relation']}, {result['sampler']} sampling, "
        f"{result['accountant']} accountant"
    )
    if not result["secure"]:
        epsilon += " (insecure seed: no guarantee against anyone who knows it)"
    beside = result["guarantee"]["beside"]
    return {
        "ε": epsilon,
        **{name.replace("_", " "): f"{up(value)} (for comparison)" for name, value in beside.items()},
        **({"test error": f"{error:.4g} (mean square)"} if (error := result.get("test_error")) is not None else {}),
        "test accuracy": percent(result["test_accuracy"]),
        **({"skipped steps": _skipped(result)} if result["skipped_steps"] else {}),
        **(
            {"noise-free accuracy": f"{percent(free)} (same recipe without noise; not private)"}
            if (free := result["noise_free_accuracy"]) is not None
            else {}
        ),
        "seconds": f"{result['seconds']:.1f} of private training",
        "report": str(out / "report.html"),
    }
