"""sordino audit: an empirical lower bound on ε, compared with the claim."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.console import Commands, add_code, add_json, emit
from sordino.errors import InputError
from sordino.shown import down, up

if TYPE_CHECKING:
    from sordino.audit import AuditResult
    from sordino.runs.recipe import Recipe


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "audit",
        help="an empirical lower bound on ε; exit code 3 if it breaks the claim",
        description="Runs a short private training with canaries (gradients exactly at the clipping bound, each in or "
        "out by a fair coin), guesses the coins from what was released, and turns the number of correct guesses into a "
        "lower bound on ε. A bound above the claim means that the mechanism is broken: exit code 3. A bound below it "
        "proves nothing, but a broken mechanism rarely passes.",
        epilog="example: sordino audit --noise-scale 0.5  (half the claimed noise: exit code 3)",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        type=Path,
        metavar="RECIPE.toml",
        help="default: the recipe of the run in --out, or a built-in one",
    )
    add_code(parser)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    parser.add_argument("--canaries", type=int, metavar="M", help="default: 5000, or as many as fit the model")
    parser.add_argument(
        "--runs", type=int, default=1, metavar="K", help="independent runs, each with that many canaries: tighter bound"
    )
    parser.add_argument("--steps", type=int, metavar="T", help="audit only the first T steps of the plan")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="P", help="default: 0.95")
    parser.add_argument("--seed", type=int, metavar="S", help="make the audit reproducible")
    parser.add_argument(
        "--noise-scale", type=float, default=1.0, metavar="F", help="scale the actual noise, but not the claim"
    )
    parser.add_argument(
        "--width-scale", type=float, default=1.0, metavar="F",
        help="scale the actual uniform noise, if the method adds some, but not the claim (0: no minimal gap)",
    )  # fmt: skip
    parser.add_argument(
        "--membership",
        action="store_true",
        help="instead: membership inference (LiRA) against models trained with the recipe, on its public test rows",
    )
    parser.add_argument("--models", type=int, default=36, metavar="K", help="for --membership (default: 36)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="write audit.json (or membership.json) there; the report of a run in it shows the audit",
    )  # fmt: skip
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are (default: $SORDINO_DATA)")
    add_json(parser)
    parser.set_defaults(run=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    from sordino.audit import write_audit

    if arguments.membership:
        return _membership(arguments)
    result = _result(arguments, _recipe(arguments))
    if arguments.out is not None:
        write_audit(result, arguments.out)
    sure = f"{down(100 * result.confidence)} % confidence"
    rows = {
        "verdict": "the claim is not contradicted" if result.holds and result.noise_fits else "THE CLAIM IS BROKEN",
        "ε, lower bound": f"{down(result.epsilon_lower)} at {sure} ({result.bound})",
        "ε, claimed": f"{up(result.epsilon_claimed)} at δ = {up(result.delta)}, {result.relation}",
        "guesses": f"{result.correct} of {result.guesses} right, {result.canaries} canaries, {result.steps} steps",
    }
    if result.noise_p_value is not None:
        rows["noise"] = f"{'as' if result.noise_fits else 'NOT as'} the plan states (p = {result.noise_p_value:.2g})"
    emit(arguments, result.to_dict(), rows)
    result.check()
    return 0


def _membership(arguments: argparse.Namespace) -> int:
    from sordino.audit.membership import membership, write_membership
    from sordino.runs.prepared import work_of

    work = work_of(_recipe(arguments), arguments.data_dir, False)
    targets = max(1, arguments.models // 9)
    seed = arguments.seed or 0
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if sys.stderr.isatty() else None
    found = membership(work, shadows=arguments.models - targets, targets=targets, seed=seed, say=say)
    if arguments.out is not None:
        write_membership(found, arguments.out)
    rows = {
        f"{found.false[k]:.2%} false alarms": f"LiRA recognises {found.true[k]:.2%} of the members, the guarantee "
        f"allows {up(100 * found.allowed[k])} %"
        for k in range(0, len(found.false), 10)
    }
    emit(arguments, found.to_dict(), rows)
    return 0


def _result(arguments: argparse.Namespace, recipe: Recipe) -> AuditResult:
    from sordino.runs.run import audit_recipe

    options = {key: getattr(arguments, key) for key in ("canaries", "steps", "confidence", "seed", "noise_scale")}
    if arguments.width_scale != 1.0:
        options["width_scale"] = arguments.width_scale
    if arguments.runs != 1:
        options["runs"] = arguments.runs
    return audit_recipe(recipe, arguments.data_dir, **options)


def _recipe(arguments: argparse.Namespace) -> Recipe:
    """The given recipe, else that of the run whose report will show the audit, else a built-in one."""
    from sordino.runs.recipe import Recipe

    run = arguments.out / "recipe.toml" if arguments.out else None
    if run is not None and run.exists():
        recipe = Recipe.read(arguments.recipe or run, arguments.set, allow_code=arguments.allow_code)
        if recipe != Recipe.read(run, allow_code=True):
            raise InputError(f"{run} has another recipe: its report must not show this audit; give another --out")
        return recipe
    if arguments.recipe is not None:
        return Recipe.read(arguments.recipe, arguments.set, allow_code=arguments.allow_code)
    with as_file(files("sordino") / "recipes" / "audit.toml") as path:
        return Recipe.read(path, arguments.set, allow_code=arguments.allow_code)
