"""sordino account hidden-state, sordino calibrate hidden-state: ε if only the last iterate is published."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sordino.console import Commands, add_json, emit
from sordino.errors import InputError, Refused
from sordino.methods.hidden_state.choices import HIDDEN_BOUNDS, HIDDEN_SAMPLINGS
from sordino.shown import up

if TYPE_CHECKING:
    from sordino.methods.hidden_state.accountant import Further, HiddenAccount
    from sordino.methods.hidden_state.run import HiddenRun

_SETTING = "--records 60000 --batch 2048 --epochs 1200 --lr 1.92 --strong-convexity 0.02 --smoothness 1.02 --delta 1e-5"


def add(account: Commands, calibrate: Commands) -> None:
    parser = account.add_parser(
        "hidden-state",
        help="the ε of the last iterate on a strongly convex loss",
        description="The ε of noisy gradient descent on a strongly convex, smooth loss if only the last iterate is "
        "published. Relation: replace-one. You must certify the constants of the loss.",
        epilog=f"example: sordino account hidden-state {_SETTING} --noise-multiplier 3.01",
    )
    parser.add_argument("--noise-multiplier", type=float, required=True, metavar="X", help=_NOISE)
    parser.add_argument("--bound", choices=HIDDEN_BOUNDS, help="default: the tightest that applies")
    parser.add_argument(
        "--credit-remainder",
        action="store_true",
        help="count the probability that the partition leaves the record out (if the batch does not divide N)",
    )
    _add_setting(parser)
    parser.set_defaults(run=_account)

    parser = calibrate.add_parser(
        "hidden-state",
        help="the smallest noise multiplier for a target ε of the last iterate",
        description="The smallest noise multiplier for which the ε of the last iterate is at most the target.",
        epilog=f"example: sordino calibrate hidden-state {_SETTING} --epsilon 3",
    )
    parser.add_argument("--epsilon", type=float, required=True, metavar="X", help="the target; never exceeded")
    _add_setting(parser)
    parser.set_defaults(run=_calibrate)


_NOISE = "standard deviation of the noise on the summed gradient, in clip norms (half of the sensitivity S_g)"


def _add_setting(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("the run")
    run.add_argument("--records", type=int, required=True, metavar="N", help="public number of records")
    run.add_argument("--batch", type=int, metavar="B", help="default, and with --sampling full: all records")
    run.add_argument("--epochs", type=int, metavar="K", help="passes over the ⌊N/B⌋ batches")
    run.add_argument("--steps", type=int, metavar="T", help="steps, instead of epochs")
    run.add_argument("--lr", type=float, required=True, metavar="η", help="step size, at most 2/smoothness")
    run.add_argument("--lr-final", type=float, metavar="η", help="decay the step size to this, geometrically")
    run.add_argument(
        "--noise-final", type=float, default=1.0, metavar="F", help="change the noise by this factor, geometrically"
    )
    run.add_argument(
        "--sampling", default="partition", choices=HIDDEN_SAMPLINGS, help="how batches are drawn (default: partition)"
    )
    loss = parser.add_argument_group("the loss of each record, with its regulariser")
    loss.add_argument("--strong-convexity", type=float, required=True, metavar="m")
    loss.add_argument("--smoothness", type=float, required=True, metavar="M")
    parser.add_argument("--delta", type=float, required=True, metavar="δ")
    parser.add_argument(
        "--statistic",
        type=float,
        action="append",
        default=[],
        metavar="X",
        help="noise multiplier of a Gaussian statistic that is also released (normalisation); may be repeated",
    )
    add_json(parser)


def _account(arguments: argparse.Namespace) -> int:
    from sordino.methods.hidden_state.accountant import account_hidden_state

    run, further = _run(arguments, arguments.noise_multiplier), _further(arguments)
    found = account_hidden_state(
        run,
        arguments.delta,
        bound=arguments.bound,
        further=further,
        credit_remainder=arguments.credit_remainder,
    )
    _emit(arguments, run, found, further, {"noise_multiplier": arguments.noise_multiplier})
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from sordino.methods.hidden_state.accountant import calibrate_hidden_state

    run, further = _run(arguments, 1.0), _further(arguments)
    factor, found = calibrate_hidden_state(arguments.epsilon, run, arguments.delta, further)
    chosen = {"target_epsilon": arguments.epsilon, "noise_multiplier": factor}
    _emit(arguments, run.noisier(factor), found, further, chosen)
    return 0


def _run(arguments: argparse.Namespace, noise_multiplier: float) -> HiddenRun:
    """The run in units of S_g = 1, which cancels: the noise is given relative to it."""
    import numpy as np

    from sordino.methods.hidden_state.run import HiddenRun
    from sordino.schedule import Schedule

    records = arguments.records
    batch = records if arguments.batch is None or arguments.sampling == "full" else arguments.batch
    if (arguments.epochs is None) == (arguments.steps is None):
        raise InputError("give either epochs or steps")
    if records < 1 or not 1 <= batch <= records:
        raise InputError(f"batch must lie between 1 and the number of records ({records}), got {batch}")
    steps = arguments.steps if arguments.steps is not None else arguments.epochs * (records // batch)
    if steps < 1:
        raise InputError("there must be at least one step")
    sizes = Schedule("geometric", (arguments.lr, arguments.lr_final or arguments.lr)).over(steps)
    factors = Schedule("geometric", (1.0, arguments.noise_final)).over(steps)
    return HiddenRun(
        records=records,
        batch=batch,
        sampling=arguments.sampling,
        step_sizes=np.full(steps, arguments.lr) if arguments.lr_final is None else sizes,
        noise_stds=noise_multiplier / (2 * batch) * factors,
        strong_convexity=arguments.strong_convexity,
        smoothness=arguments.smoothness,
        sensitivity=1.0,
    )


def _further(arguments: argparse.Namespace) -> Further:
    from sordino.accounting.events import Release

    return [(Release("gaussian", noise), 1) for noise in arguments.statistic]


def _emit(
    arguments: argparse.Namespace, run: HiddenRun, found: HiddenAccount, further: Further, chosen: dict[str, float]
) -> None:
    document: dict[str, Any] = {
        **asdict(found),
        "epsilon_classic": _classic(run, found.delta, further),
        **chosen,
        "sampling": run.sampling,
        "records": run.records,
        "batch": run.batch,
        "steps": run.steps,
        "epochs": run.steps / run.batches,
    }
    classic, composition = document["epsilon_classic"], found.epsilon_composition
    rows = {
        "ε": f"{up(found.epsilon, 6)} at δ = {up(found.delta)}, last iterate only ({found.bound})",
        "worst position": f"ε = {up(found.epsilon_worst_position, 6)}, μ = {found.mu_worst:.6g}",
        "as published": "no theorem applies" if classic is None else f"ε = {up(classic, 6)} (classic conversion)",
        "every iterate seen": "no bound" if composition is None else f"ε = {up(composition, 6)} (composition)",
        "relation": found.relation,
        "sampling": f"{run.sampling}, {run.batch} of {run.records} records in each of {run.steps} steps",
        "theorem": found.theorem,
    }
    if "target_epsilon" in chosen:
        rows = {"noise multiplier": f"{chosen['noise_multiplier']:.6g}", **rows}
    emit(arguments, document, rows)


def _classic(run: HiddenRun, delta: float, further: Further) -> float | None:
    """ε as Ye & Shokri 2022 would state it, if one of their theorems applies."""
    from sordino.methods.hidden_state.accountant import ye_shokri_rdp
    from sordino.methods.hidden_state.ye_shokri import classic_epsilon

    try:
        return classic_epsilon(ye_shokri_rdp(replace(run, disparity_slack=0.0), further), delta)
    except Refused:
        return None
