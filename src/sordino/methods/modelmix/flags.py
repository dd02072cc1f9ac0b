"""sordino account modelmix, sordino calibrate modelmix: ε of random mixing, and of its control."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sordino.console import Commands, add_json, emit
from sordino.shown import up

if TYPE_CHECKING:
    from sordino.methods.modelmix.accountant import MixAccount, MixStep

SHARED = ("sampling_rate", "clip_norm", "expected_batch", "linf_p", "delta", "mechanism")
SETTING = "--sampling-rate 0.02 --clip-norm 20 --expected-batch 1000 --linf-p 100 --steps 5000 --delta 1e-5"


def add(account: Commands, calibrate: Commands) -> None:
    summary = "the ε of ModelMix, and of Gaussian noise of the same variance"
    example = f"example: sordino account modelmix --noise-multiplier 0.37 --tau-over-lr 0.3 {SETTING}"
    parser = account.add_parser("modelmix", help=summary, description=_sentence(summary), epilog=example)
    _add_noise(parser, required=True)
    _add_tau(parser, required=True)
    _add_shared(parser)
    parser.set_defaults(run=_account)

    summary = "the noise (or the mixing) with which ModelMix meets a target ε"
    example = f"example: sordino calibrate modelmix --epsilon 3 --tau-over-lr 0.3 {SETTING}"
    parser = calibrate.add_parser("modelmix", help=summary, description=_sentence(summary), epilog=example)
    parser.add_argument("--epsilon", type=float, required=True, metavar="ε", help="the target; never exceeded")
    given = parser.add_argument_group("give one, the other is computed").add_mutually_exclusive_group(required=True)
    _add_noise(given, required=False)
    _add_tau(given, required=False)
    _add_shared(parser)
    parser.set_defaults(run=_calibrate)


def _add_noise(parser: Any, required: bool) -> None:
    parser.add_argument(
        "--noise-multiplier", type=float, required=required, metavar="σ",
        help="standard deviation of the noise (Laplace: its scale), in clip norms",
    )  # fmt: skip


def _add_tau(parser: Any, required: bool) -> None:
    parser.add_argument(
        "--tau-over-lr", type=float, required=required, metavar="τ/η",
        help="enforced gap between the mixed iterates divided by the step size, in units of the averaged gradient",
    )  # fmt: skip


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, required=True, metavar="T")
    parser.add_argument("--delta", type=float, required=True, metavar="δ")
    parser.add_argument("--sampling-rate", type=float, required=True, metavar="q", help="rate of Poisson sampling")
    parser.add_argument("--clip-norm", type=float, required=True, metavar="c", help="l2 (Laplace: l1) clipping bound")
    parser.add_argument(
        "--expected-batch", type=float, required=True, metavar="B", help="divisor of the summed gradient"
    )
    parser.add_argument(
        "--linf-p", type=float, default=1.0, metavar="p", help="coordinates are truncated at c/√p (default: 1, none)"
    )
    parser.add_argument("--mechanism", default="gaussian", choices=("gaussian", "laplace"), help="default: gaussian")
    add_json(parser)


def _account(arguments: argparse.Namespace) -> int:
    from sordino.methods.modelmix.accountant import MixStep, account_modelmix

    shared = {name: getattr(arguments, name) for name in SHARED}
    step = MixStep(arguments.noise_multiplier, arguments.tau_over_lr)
    found = account_modelmix([(step, arguments.steps)], **shared)
    emit(arguments, _document(arguments, found, step), _rows(found))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from sordino.methods.modelmix.accountant import MixStep
    from sordino.methods.modelmix.calibration import calibrate_modelmix

    shared = {name: getattr(arguments, name) for name in SHARED}
    sigma, tau = arguments.noise_multiplier, arguments.tau_over_lr
    solve = "noise_multiplier" if sigma is None else "tau_over_lr"
    value, found = calibrate_modelmix(
        arguments.epsilon, solve=solve, steps=arguments.steps, noise_multiplier=sigma, tau_over_lr=tau, **shared
    )
    step = MixStep(value, tau) if sigma is None else MixStep(sigma, value)
    document = {"target_epsilon": arguments.epsilon, "solved": solve} | _document(arguments, found, step)
    emit(arguments, document, {solve.replace("_", " "): f"{value:.6g}", **_rows(found)})
    return 0


def _document(arguments: argparse.Namespace, found: MixAccount, step: MixStep) -> dict[str, Any]:
    settings = {name: getattr(arguments, name) for name in (*SHARED, "steps")}
    return {**asdict(found), "relation": "add-remove", "sampler": "poisson", **asdict(step), **settings}


def _rows(found: MixAccount) -> dict[str, str]:
    return {
        "ε": f"{up(found.epsilon, 6)} at δ = {up(found.delta)} ({found.accountant})",
        "ε, equal variance": f"{up(found.equal_variance_epsilon, 6)} (the control: DP-SGD whose Gaussian noise has the "
        "joint variance of noise and mixing)",
        "ε, classic": f"{up(found.epsilon_classic, 6)} (converted as in Xiao et al. 2022)",
        "order": f"{found.order:.4g}",
        "relation": "add-remove",
        "sampler": "poisson",
        "theorem": found.theorem,
        "checked": "\n".join(found.checked),
    }


def _sentence(summary: str) -> str:
    return (
        summary[0].upper() + summary[1:] + ". Valid for a memoryless update in which every coordinate is mixed and has "
        "its gap enforced, with one Poisson draw per step."
    )
