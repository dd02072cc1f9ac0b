"""sordino plan: composition or hidden state, and with which batch, λ, epochs, step size and noise."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.console import Commands, add_json, emit
from sordino.errors import InputError
from sordino.files import write_atomically
from sordino.shown import up

if TYPE_CHECKING:
    from sordino.methods.hidden_state.comparison import Problem, Setting


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="composition or hidden state: which settings for a budget",
        description="Answers, for a linear classifier with n records and a budget: composition or hidden state (only "
        "the last iterate is published), which batch size, λ, epochs, step size and noise. ε is exact; which setting "
        "is best rests on a model of the excess loss (see --weight-norm). Relation: replace-one. Looks at no data.",
        epilog="example: sordino plan --records 60000 --features 3969 --classes 10 --epsilon 3 --delta 1e-5",
    )
    parser.add_argument("--records", type=int, required=True, metavar="N", help="public number of records")
    parser.add_argument("--features", type=int, required=True, metavar="D")
    parser.add_argument("--classes", type=int, default=10, metavar="C", help="default: 10")
    parser.add_argument("--epsilon", type=float, required=True, metavar="ε")
    parser.add_argument("--delta", type=float, required=True, metavar="δ")
    loss = parser.add_argument_group(
        "the loss, as a function of its scores; the defaults are those of softmax regression"
    )
    loss.add_argument(
        "--feature-norm", type=float, default=1.0, metavar="L", help="records are clipped to it (default: 1)"
    )
    loss.add_argument(
        "--curvature", type=float, default=0.5, metavar="h", help="largest second derivative (default: 0.5)"
    )
    loss.add_argument(
        "--slope", type=float, default=math.sqrt(2), metavar="g", help="largest norm of the gradient (default: √2)"
    )
    model = parser.add_argument_group("the model of the excess loss")
    model.add_argument(
        "--weight-norm", type=float, default=30.0, metavar="W", help="norm of weights that solve it well (default: 30)"
    )
    model.add_argument(
        "--max-epochs", type=int, default=1000, metavar="K", help="largest number of epochs (default: 1000)"
    )
    parser.add_argument("--plot", type=Path, metavar="SVG", help="write ε over the epochs, for both accountants")
    add_json(parser)
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from sordino.methods.hidden_state.comparison import Problem, Setting, compare

    names = Problem.__dataclass_fields__
    problem = Problem(**{name: getattr(arguments, name) for name in names})
    if arguments.plot is not None and not arguments.plot.parent.is_dir():
        raise InputError(f"{arguments.plot.parent} is not a folder")
    found = compare(problem)
    if arguments.plot is not None:
        _plot(problem, Setting(**found["hidden_state"]), arguments.plot)
        found["plot"] = str(arguments.plot)
    emit(arguments, found, _rows(found))
    return 0


def _plot(problem: Problem, setting: Setting, path: Path) -> None:
    from sordino.methods.hidden_state.comparison import curves
    from sordino.report.curves import curves_svg
    from sordino.report.plots import Series

    longest = max(setting.epochs, 8)
    epochs = sorted({max(1, round(longest * k / 24)) for k in range(1, 25)})
    lines = curves(problem, setting, epochs)
    series = Series(
        "ε over the epochs",
        f"batch {setting.batch}, step size {setting.lr:.3g}, λ = {setting.regularisation:.2g}, δ = {up(problem.delta)}",
        "epochs",
        "privacy",
    )
    write_atomically(path, curves_svg(epochs, lines, series, highest=3 * max(lines["hidden state"])).encode())


def _rows(found: dict[str, Any]) -> dict[str, str]:
    rows = {"recommended": found["recommendation"], "in words": found["why"]}
    for name in ("hidden_state", "composition"):
        best = found[name]
        rows[name.replace("_", " ")] = (
            f"batch {best['batch']}, {best['epochs']} epochs, step size {best['lr']:.4g}, λ = "
            f"{best['regularisation']:.3g}, noise multiplier {best['noise_multiplier']:.5g}, ε = "
            f"{up(best['epsilon'], 5)}; deviation per weight {best['weight_noise']:.3g} "
            f"({best['weight_noise_relative']:.3g} of W in all); excess loss "
            f"{best['excess_loss']:.3g} = noise {best['excess_noise']:.2g} + bias {best['excess_bias']:.2g}"
        )
    crossing = found["crossing_epochs"]
    rows["crossing"] = "none" if crossing is None else f"epoch {crossing}"
    rows["relation"] = found["relation"]
    return rows
