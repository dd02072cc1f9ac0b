"""sordino sweep: runs a recipe over a grid of settings; the privacy cost of choosing is stated, or paid for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.checks import SHAPES
from sordino.console import Commands, add_code, add_json, emit
from sordino.errors import InputError

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe

_EXAMPLES = """examples:
  sordino sweep recipe.toml --over method.alpha=0,0.2,0.5 --over train.lr=0.1,0.5 --seeds 3
      six settings, three runs each: table, sweep.json, heatmap.svg, sweep.html, and the cost of looking at them
  sordino sweep recipe.toml --over clipping.clip_norm=0.1,1 --over train.optimizer=sgd,adamw --jobs 2
  sordino sweep recipe.toml --over train.lr=0.1,0.5,2 --pay --epsilon 3 --delta 1e-5 --mean-runs 10
      a random number of runs, the best one released, ε = 3 for all of it; the others are deleted

A killed sweep continues where it stopped when the same command is given again."""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "sweep",
        help="run a recipe over a grid of settings, and state (or pay) the cost of choosing",
        description="Runs RECIPE at every combination of the given values, each in its own run directory. The cost of "
        "looking at all results is always stated. With --pay the choice itself is private: a secret, random "
        "number of runs with settings drawn from the grid, of which only the best is kept.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        required=True,
        metavar="SECTION.KEY=V1,V2,…",
        help="values for a key of the recipe (may be repeated)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key in all runs"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each setting (default: 1)")
    parser.add_argument(
        "--metric", default="test_accuracy", metavar="NAME", help="test_accuracy (default), test_loss or test_error"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, each on one core (default: 1)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/NAME-sweep")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are (default: $SORDINO_DATA)")
    paid = parser.add_argument_group("paying for the choice")
    paid.add_argument("--pay", action="store_true", help="release the best of a random number of runs, for one ε")
    paid.add_argument("--epsilon", type=float, metavar="ε", help="ε of the whole sweep")
    paid.add_argument("--delta", type=float, metavar="δ", help="δ of the whole sweep (default: the recipe's)")
    paid.add_argument(
        "--distribution",
        choices=sorted(SHAPES),
        help="distribution of the number of runs K (default: geometric; K ≥ 1 except for poisson)",
    )
    paid.add_argument("--mean-runs", type=float, metavar="M", help="its mean (default: 10)")
    add_code(parser)
    add_json(parser)
    parser.set_defaults(run=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    from sordino.runs.recipe import Recipe
    from sordino.runs.sweep import Sweep, SweptKey, run_sweep

    sweep = Sweep(
        arguments.recipe,
        tuple(map(SweptKey.parse, arguments.over)),
        arguments.seeds,
        arguments.metric,
        tuple(arguments.set),
        arguments.allow_code,
    )
    base = Recipe.read(arguments.recipe, arguments.set, allow_code=arguments.allow_code)
    out = arguments.out or Path("runs") / f"{base.run.name}-sweep"
    if arguments.pay:
        return _pay(arguments, sweep, base, out)
    given = [name for name in ("epsilon", "delta", "distribution", "mean_runs") if getattr(arguments, name) is not None]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} needs --pay; without it the recipe determines what a run costs"
        )
    document = run_sweep(sweep, out, jobs=arguments.jobs, data_dir=arguments.data_dir)
    if not arguments.json:
        _print_table(document)
    emit(arguments, {**document, "sweep": str(out)}, _rows(document, out))
    return 0 if any(run["status"] == "finished" for run in document["runs"]) else 1


def _pay(arguments: argparse.Namespace, sweep: Any, base: Recipe, out: Path) -> int:
    from sordino.accounting.selection import Repetition
    from sordino.runs.selection import Price, run_paid

    if arguments.epsilon is None:
        raise InputError("--pay needs --epsilon: what the whole sweep may cost")
    if arguments.jobs != 1:
        raise InputError("--pay makes its runs one after another: leave out --jobs")
    law = Repetition(arguments.distribution or "geometric", arguments.mean_runs or 10.0)
    price = Price(arguments.epsilon, base.privacy.delta if arguments.delta is None else arguments.delta, law)
    document = run_paid(sweep, price, out, data_dir=arguments.data_dir)
    selected = document["selected"]
    rows = {"guarantee": document["sentence"]}
    if selected is not None:
        rows["selected"] = ", ".join(f"{key} = {value}" for key, value in selected["settings"].items())
        rows[sweep.metric.replace("_", " ")] = _shown(selected["value"], sweep.metric)
        rows["report"] = str(out / "run" / "report.html")
    emit(arguments, {**document, "sweep": str(out)}, rows)
    return 0


def _print_table(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(pad_edge=False)
    for key in document["over"]:
        table.add_column(key)
    for name in (document["metric"].replace("_", " "), "± over seeds", "failed"):
        table.add_column(name, justify="right")
    for row in document["table"]:
        best = document["best"] is not None and row["settings"] == document["best"]["settings"]
        table.add_row(
            *(str(value) for value in row["settings"].values()),
            _shown(row["mean"], document["metric"]),
            _shown(row["deviation"], document["metric"]),
            str(row["failed"] or ""),
            style="bold" if best else "",
        )
    Console(width=None if Console().is_terminal else 110).print(table)


def _rows(document: dict[str, Any], out: Path) -> dict[str, str]:
    failed = [run for run in document["runs"] if run["status"] == "failed"]
    rows = {"the cost of looking": document["cost"]["sentence"], "page": str(out / "sweep.html")}
    if failed:
        rows["failed"] = f"{len(failed)} of {len(document['runs'])} runs; the first: {failed[0]['error']}"
    return rows


def _shown(value: float | None, metric: str) -> str:
    return "–" if value is None else f"{value:.2%}" if metric == "test_accuracy" else f"{value:.4g}"
