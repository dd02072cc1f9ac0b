"""sordino compare: compares methods at equal ε, δ and relation, over several seeds, and writes a page."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.console import Commands, add_code, add_json, emit
from sordino.errors import InputError
from sordino.shown import up

if TYPE_CHECKING:
    from rich.table import Table

    from sordino.runs.compare_suite import Suite

_EXAMPLES = """examples:
  sordino compare experiments/suites/fashion-mnist.toml --jobs 2
      every method at every ε, three seeds: a live table, compare.json and compare.html in runs/fashion-mnist-compare
  sordino compare experiments/suites/adult.toml --epsilon 1 --seeds 0 1
  sordino compare experiments/results/compare_adult.json --out adult.html
      only the page, from a result

A killed comparison continues where it stopped when the same command is given again."""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare recipes at equal ε, δ and relation, over several seeds",
        description="Runs every method of SUITE at every ε and seed, each in a separate process, and writes "
        "compare.json and compare.html: accuracy against ε with error bars, paired differences, seconds, and what each "
        "method assumes. Opacus and training without privacy may be among the methods.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "suite", type=Path, metavar="SUITE.toml", help="a suite; or a compare.json, whose page is written again"
    )
    parser.add_argument("--epsilon", type=float, nargs="+", metavar="ε", help="only these ε of the suite")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="these seeds instead of the suite's")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these methods of the suite")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, each on one core (default: 1)"
    )
    parser.add_argument("--collect", action="store_true", help="run nothing; write the result of the finished runs")
    parser.add_argument(
        "--earlier", type=Path, metavar="COMPARE.json", help="runs with the same settings are taken from this result"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/NAME-compare")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are (default: $SORDINO_DATA)")
    add_code(parser)
    add_json(parser)
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from sordino.runs.compare import PAGE, RESULT, read_result, run_suite
    from sordino.runs.compare_suite import Suite

    if arguments.suite.suffix == ".json":
        return _page(arguments)
    suite = _chosen(Suite.read(arguments.suite, allow_code=arguments.allow_code), arguments)
    out = arguments.out or Path("runs") / f"{arguments.suite.stem}-compare"
    earlier = read_result(arguments.earlier) if arguments.earlier else None
    with _shown(arguments) as show:
        document = run_suite(
            suite, out, command=_command(arguments), jobs=arguments.jobs, data_dir=arguments.data_dir, show=show,
            collect=arguments.collect, earlier=earlier,
        )  # fmt: skip
    failed = [run for run in document["runs"] if "error" in run]
    rows = {"result": str(out / RESULT), "page": str(out / PAGE)}
    if failed:
        first = failed[0]
        rows["failed"] = f"{len(failed)} of {document['planned']} runs; the first, {first['method']}: {first['error']}"
    emit(arguments, document, rows)
    return 0 if len(failed) < document["planned"] else 1


def _page(arguments: argparse.Namespace) -> int:
    from sordino.report.compare import write_page
    from sordino.runs.compare import PAGE, read_result

    document = read_result(arguments.suite)
    path = write_page(arguments.out or arguments.suite.with_name(PAGE), document)
    emit(arguments, {"page": str(path)}, {"page": str(path)})
    return 0


def _chosen(suite: Suite, arguments: argparse.Namespace) -> Suite:
    """The part of the suite that the flags select."""
    from dataclasses import replace

    from sordino.errors import did_you_mean

    names = [one.name for one in suite.methods]
    for name in arguments.only or []:
        if name not in names:
            raise InputError(f"--only {name!r}: {did_you_mean(name, names)}")
    for epsilon in arguments.epsilon or []:
        if epsilon not in suite.epsilons:
            known = ", ".join(f"{one:g}" for one in suite.epsilons)
            raise InputError(f"--epsilon {up(epsilon)} is not in the suite: {known}")
    if arguments.seeds and (min(arguments.seeds) < 0 or len(set(arguments.seeds)) < len(arguments.seeds)):
        raise InputError("--seeds must be different whole numbers from 0")
    methods = tuple(one for one in suite.methods if not arguments.only or one.name in arguments.only)
    kept = [one.name for one in methods]
    return replace(
        suite,
        methods=methods,
        epsilons=tuple(e for e in suite.epsilons if not arguments.epsilon or e in arguments.epsilon),
        seeds=tuple(arguments.seeds or suite.seeds),
        baseline=suite.baseline if suite.baseline in kept else "",
    )


def _command(arguments: argparse.Namespace) -> str:
    """The command that makes the result, without paths of this machine."""
    words = ["sordino", "compare", arguments.suite.as_posix()]
    for flag in ("epsilon", "seeds", "only"):
        values = getattr(arguments, flag)
        words += [f"--{flag}", *(f"{v:g}" if isinstance(v, float) else str(v) for v in values)] if values else []
    words += ["--earlier", arguments.earlier.as_posix()] if arguments.earlier else []
    return shlex.join(words)


@contextmanager
def _shown(arguments: argparse.Namespace) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A live table on a terminal; elsewhere a line for each run that has ended."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=2) as live:
            yield lambda document: live.update(_table(document))
        return
    said: set[tuple[Any, ...]] = set()

    def lines(document: Mapping[str, Any]) -> None:
        for run in document["runs"]:
            key = (run["method"], run["target_epsilon"], run["seed"])
            if key in said:
                continue
            said.add(key)
            seconds = run.get("core_seconds")
            found = run.get("error") or f"{run['test_accuracy']:.2%}"
            found += "" if seconds is None else f", {seconds:.0f} core seconds"
            where = "" if run["target_epsilon"] is None else f" ε = {up(run['target_epsilon'])}"
            print(f"{len(said)} of {document['planned']}: {run['method']}{where} seed {run['seed']}: {found}",
                  file=sys.stderr, flush=True)  # fmt: skip

    yield lines


def _table(document: Mapping[str, Any]) -> Table:
    from rich.table import Table

    from sordino.report.compare import accuracy, at

    table = Table(title=f"{document['title']}: {len(document['runs'])} of {document['planned']} runs")
    table.add_column("method")
    for epsilon in document["epsilons"]:
        table.add_column(f"ε = {up(epsilon)}", justify="right")
    seeds = len(document["seeds"])
    for method in document["methods"]:
        plain = at(document["table"], method["name"], None)
        cells = [
            accuracy(plain if plain is not None else at(document["table"], method["name"], epsilon), seeds)
            for epsilon in document["epsilons"]
        ]
        table.add_row(method["name"], *cells)
    return table
