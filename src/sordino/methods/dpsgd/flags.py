"""sordino account dpsgd, sordino calibrate dpsgd: ε of noisy sums, all of which are seen."""

from __future__ import annotations

import argparse
from typing import Any

from sordino import checks
from sordino.console import Commands, add_json, emit
from sordino.shown import down, up

SHARED = (
    "steps",
    "epochs",
    "delta",
    "sampling_rate",
    "sampling",
    "records",
    "batch",
    "batches",
    "examples_per_user",
    "cap",
    "relation",
    "accountant",
    "mechanism",
)


def add(account: Commands, calibrate: Commands) -> None:
    _add_parser(
        account,
        "the ε of DP-SGD with every iterate visible",
        "example: sordino account dpsgd --sampling-rate 0.01 --noise-multiplier 1.1 --steps 10000 --delta 1e-5",
        "--noise-multiplier",
        "standard deviation of the noise, in clip norms",
        _account,
    )
    _add_parser(
        calibrate,
        "the smallest noise multiplier of DP-SGD for a target ε",
        "example: sordino calibrate dpsgd --epsilon 3 --delta 1e-5 --sampling-rate 0.01 --steps 10000",
        "--epsilon",
        "the target; the result never exceeds it",
        _calibrate,
    )


def _add_parser(methods: Commands, summary: str, epilog: str, flag: str, flag_help: str, run: Any) -> None:
    dpsgd = methods.add_parser("dpsgd", help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog)
    dpsgd.add_argument(flag, type=float, required=True, metavar="X", help=flag_help)
    dpsgd.add_argument("--steps", type=int, metavar="T", help="the number of steps; or give --epochs")
    dpsgd.add_argument("--epochs", type=float, metavar="E", help="passes over the records, rounded up to whole steps")
    dpsgd.add_argument("--delta", type=float, required=True, metavar="δ")
    rate = dpsgd.add_argument_group("sampling: give the rate, or the records and the (expected) batch")
    rate.add_argument("--sampling-rate", type=float, metavar="q")
    rate.add_argument("--records", type=int, metavar="N", help="public number of records")
    rate.add_argument("--batch", type=int, metavar="B", help="batch, or expected batch of Poisson sampling")
    rate.add_argument("--batches", type=int, metavar="t", help="batches per epoch of random allocation")
    rate.add_argument(
        "--sampling",
        "--sampler",
        dest="sampling",
        default="poisson",
        choices=checks.SAMPLERS,
        help="how batches are drawn (default: poisson)",
    )
    rate.add_argument(
        "--examples-per-user",
        type=int,
        metavar="k",
        help="sample rows; the unit of privacy is a user with at most k of them",
    )
    rate.add_argument("--cap", type=int, metavar="B", help="largest batch of truncated Poisson sampling")
    how = dpsgd.add_argument_group("accounting")
    how.add_argument("--relation", choices=("add-remove", "replace-one"), help="default: that of the sampler")
    how.add_argument("--accountant", default="pld", choices=("pld", "rdp"), help="default: pld")
    how.add_argument("--mechanism", default="gaussian", choices=("gaussian", "laplace"), help="default: gaussian")
    add_json(dpsgd)
    dpsgd.set_defaults(run=run)


def _account(arguments: argparse.Namespace) -> int:
    from sordino.methods.dpsgd.accountant import account_dpsgd

    shared = {name: getattr(arguments, name) for name in SHARED}
    found = account_dpsgd(arguments.noise_multiplier, **shared)
    emit(arguments, found, _rows(found))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from sordino.methods.dpsgd.accountant import calibrate_dpsgd

    shared = {name: getattr(arguments, name) for name in SHARED}
    found = calibrate_dpsgd(arguments.epsilon, **shared)
    emit(arguments, found, {"noise multiplier": f"{found['noise_multiplier']:.6g}", **_rows(found)})
    return 0


def _rows(found: dict[str, Any]) -> dict[str, str]:
    rdp = found["epsilon_rdp"]
    instead = (
        "random allocation (--sampler allocation) also uses every record once per epoch, and sampling amplifies privacy"
    )
    return {
        "ε": f"{up(found['epsilon'], 6)} at δ = {up(found['delta'])} ({found['accountant']})",
        "ε at least": "no bound" if found["epsilon_lower"] is None else down(found["epsilon_lower"], 6),
        "ε by Rényi": "no bound" if rdp is None else up(rdp, 6),
        "relation": found["relation"],
        "sampler": found["sampler"],
        "theorem": found["theorem"],
    } | ({"cheaper": instead} if found["sampler"] == "partition" else {})
