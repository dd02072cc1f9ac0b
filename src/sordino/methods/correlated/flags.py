"""sordino account correlated, sordino calibrate correlated: ε of noise that later steps partly cancel."""

from __future__ import annotations

import argparse
from typing import Any

from sordino.console import Commands, add_json, emit
from sordino.shown import up

STRATEGIES = ("identity", "lambda", "inverse-root", "banded-root", "banded-lambda")
SHARED = (
    "records",
    "batch",
    "epochs",
    "steps",
    "groups",
    "strategy",
    "value",
    "bands",
    "momentum",
    "decay",
    "relation",
)
EXAMPLE = "--records 60000 --batch 1200 --epochs 1 --delta 1e-5"


def add(account: Commands, calibrate: Commands) -> None:
    _add_parser(
        account,
        "the ε of noise that is correlated between steps",
        f"example: sordino account correlated --noise-multiplier 2 --strategy lambda --lambda 0.9 {EXAMPLE}",
        "--noise-multiplier",
        "standard deviation of each step's own noise, in clip norms",
        _account,
    )
    _add_parser(
        calibrate,
        "the smallest correlated noise for a target ε, and the strategy with the least noise in the weights",
        f"example: sordino calibrate correlated --epsilon 8 {EXAMPLE}",
        "--epsilon",
        "the target; the result never exceeds it",
        _calibrate,
    )


def _add_parser(methods: Commands, summary: str, epilog: str, flag: str, flag_help: str, run: Any) -> None:
    description = (
        summary[0].upper() + summary[1:] + ". Each record takes part in the steps of one group; the groups take turns."
    )
    parser = methods.add_parser("correlated", help=summary, description=description, epilog=epilog)
    parser.add_argument(flag, type=float, required=True, metavar="X", help=flag_help)
    parser.add_argument("--records", type=int, required=True, metavar="N", help="public number of records")
    parser.add_argument("--batch", type=float, required=True, metavar="B", help="expected batch")
    parser.add_argument("--steps", type=int, metavar="T", help="the number of steps; or give --epochs")
    parser.add_argument("--epochs", type=float, metavar="E", help="passes over the records, rounded up to whole steps")
    parser.add_argument("--delta", type=float, required=True, metavar="δ")
    parser.add_argument(
        "--groups", type=int, metavar="b",
        help="groups that take turns; with fewer than N/B a part of the group is sampled in each step (default: N/B; "
        "calibrate: the best)",
    )  # fmt: skip
    how = parser.add_argument_group("the strategy (default: the one with the least noise in the weights)")
    how.add_argument("--strategy", choices=STRATEGIES)
    how.add_argument("--lambda", dest="value", type=float, metavar="λ", help="for lambda and banded-lambda")
    how.add_argument("--bands", type=int, metavar="p", help="for inverse-root, banded-root and banded-lambda")
    how.add_argument("--momentum", type=float, default=0.0, metavar="β", help="of the update; only picks the strategy")
    how.add_argument(
        "--decay", type=float, default=0.0, metavar="w", help="step size × weight decay; only picks the strategy"
    )
    parser.add_argument("--relation", default="add-remove", choices=("add-remove", "replace-one"))
    add_json(parser)
    parser.set_defaults(run=run)


def _account(arguments: argparse.Namespace) -> int:
    from sordino.methods.correlated.accountant import account_correlated

    found = account_correlated(arguments.noise_multiplier, arguments.delta, **_options(arguments))
    emit(arguments, found, _rows(found))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from sordino.methods.correlated.accountant import calibrate_correlated

    found = calibrate_correlated(arguments.epsilon, arguments.delta, **_options(arguments))
    emit(arguments, found, {"noise multiplier": f"{found['noise_multiplier']:.6g}", **_rows(found)})
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in SHARED}


def _rows(found: dict[str, Any]) -> dict[str, str]:
    strategy = ", ".join(f"{key} {value}" for key, value in found["strategy"].items() if key != "name")
    return {
        "ε": f"{up(found['epsilon'], 6)} at δ = {up(found['delta'])} ({found['accountant']})",
        "strategy": f"{found['strategy']['name']}{f' ({strategy})' if strategy else ''}, "
        f"{found['noises_per_step']} Gaussians for each coordinate of a step",
        "groups": f"{found['groups']}, of which a step draws each record with probability {found['sampling_rate']:.4g}",
        "sensitivity": f"{found['sensitivity']:.6g} over {found['participations']} participations at most",
        "noise in weights": f"{found['noise_in_weights']:.5g} clip norms per coordinate (root mean square over the "
        "steps, step size 1)",
        "relation": found["relation"],
        "sampler": found["sampler"],
        "theorem": found["theorem"],
    }
