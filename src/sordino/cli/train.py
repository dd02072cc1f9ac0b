"""sordino train, sordino demo: a recipe carried out into a run directory."""

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
"""Above this ε a run is announced with a word on what it does not promise."""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model under a privacy budget, from a recipe",
        description="Trains as RECIPE says and writes recipe.toml, ledger.jsonl, metrics.jsonl, model.safetensors, "
        "result.json and report.html into the run directory. With --dataset and --epsilon instead of a recipe it takes "
        "the best one known for that set: settings chosen on held-out training rows, with the test accuracy that was "
        "measured with them.",
        epilog="example: sordino train experiments/recipes/fashion_mnist_scattering_linear.toml "
        "--set privacy.epsilon=1 --out runs/eps1; or sordino train --dataset fashion-mnist --epsilon 3. Which method "
        "is for whom, measured: docs/which_method.md",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml", nargs="?", help="or --dataset and --epsilon")
    _add_best_flags(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the recipe (may be given several times); SECTION.KEY= takes the key out",
    )
    add_code(parser)
    _add_run_flags(parser)
    parser.add_argument(
        "--budget", type=Path, metavar="FILE", help="count the run in this budget (sordino budget), or don't start"
    )
    parser.add_argument(
        "--shard",
        action="store_true",
        help="under torchrun: divide the model over the processes (fully_shard), for models that are too large for "
        "one; results are the same",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in the directory, if there is one")
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="with --resume, of a directory that was copied, moved or restored: you state that no other copy of it is "
        "or will be resumed, and the ledger records that you did",
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
        "the same without noise for comparison. A finished demo is shown again, not made again.",
    )
    _add_run_flags(demo)
    demo.set_defaults(run=_demo)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run directory (default: runs/NAME)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are (default: $SORDINO_DATA)")
    add_json(parser)


def _add_best_flags(parser: argparse.ArgumentParser) -> None:
    from sordino.runs.best import best_names

    best = parser.add_argument_group("the best recipe known, instead of RECIPE.toml")
    best.add_argument(
        "--dataset",
        metavar="NAME",
        help=f"a set that has one: {', '.join(best_names())}. What it assumes, and the accuracy that was measured, is "
        "printed first",
    )
    best.add_argument("--epsilon", type=float, metavar="ε", help="what the run may cost; add/remove one record")
    best.add_argument("--delta", type=float, metavar="δ", help="default: 1e-5")


def _train(arguments: argparse.Namespace) -> int:
    return _run(arguments, _recipe_of(arguments), arguments.resume)


def _recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe that was named, or the best one known for a dataset."""
    from sordino.runs.best import DELTA, best_recipe
    from sordino.runs.recipe import Recipe

    given = [flag for flag in ("dataset", "epsilon", "delta") if getattr(arguments, flag) is not None]
    if arguments.recipe is not None:
        if given:
            key = "data.name" if given[0] == "dataset" else f"privacy.{given[0]}"
            raise InputError(f"--{given[0]} chooses a recipe by itself: beside RECIPE.toml say --set {key}=…")
        return Recipe.read(arguments.recipe, arguments.set, allow_code=arguments.allow_code)
    if arguments.dataset is None or arguments.epsilon is None:
        raise InputError("give RECIPE.toml, or --dataset NAME with --epsilon ε for the best recipe known")
    best = best_recipe(arguments.dataset, arguments.epsilon)
    delta = DELTA if arguments.delta is None else arguments.delta
    recipe = best.recipe([f"privacy.delta={delta!r}", *arguments.set])
    print(f"the best recipe known for {best.dataset}: {best.said()}", file=sys.stderr)
    if arguments.set:
        print("--set changes it: that accuracy was measured without", file=sys.stderr)
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
    key = None if given is None else private_key(given)  # a wrong one is found before anything is spent
    budget, adopt = getattr(arguments, "budget", None), getattr(arguments, "adopt", False)  # the demo has none
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
    """What the guarantee will mean, in words, before anything is spent; a large ε does not pass without one."""
    from sordino.plan.attack import in_words, success_rate

    try:
        rate = success_rate(plan)
    except SordinoError:  # the plan has no guarantee at the other δ that the bound is made of
        return
    print(in_words(rate, plan.unit), file=sys.stderr)
    if (epsilon := plan.guarantee().epsilon) > LARGE:
        print(
            f"ε = {up(epsilon)} is large. That is an average over all that may be published: some of it may make it "
            f"e^{up(epsilon, 3)} times likelier that a given {plan.unit} took part, more often than δ. "
            "If the data is sensitive, stop here and choose a smaller ε (1 to 10 is common).",
            file=sys.stderr,
        )


def _skipped(result: dict[str, Any]) -> str:
    return (
        f"{result['skipped_steps']} of {result['steps']}: released and paid for before the run was resumed; their "
        "updates were lost, the model has not seen them"
    )


def _rows(result: dict[str, Any], out: Path) -> dict[str, str]:
    def percent(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.2%}"

    epsilon = (
        f"{up(result['epsilon'])} at δ = {up(result['delta'])}, {result['relation']}, {result['sampler']} sampling, "
        f"{result['accountant']} accountant"
    )
    if not result["secure"]:
        epsilon += " (insecure seed: void for whoever knows it)"
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
