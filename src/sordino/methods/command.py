"""sordino plan: recommends sampler, batch and noise for a budget; composition or hidden state for linear models."""

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
    from sordino.plan.pace import Pace

SPEEDS = ("seconds_per_step", "records_per_second", "seconds_per_noise")
STEP_SIZES = (
    "The step size of composition is a compromise: on held-out training rows, half of it was better for words (IMDb), "
    "twice of it for pixels (docs/tutorials/hidden_state.md)"
)


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="recommend sampler, batch and noise for a budget; composition or hidden state",
        description="With --epochs, --steps or --minutes, for any model: compares Poisson sampling, random allocation "
        "and correlated noise by the noise in the weights at equal ε, batch and steps or time (relation: add-remove). "
        "With --minutes every option makes the steps that fit the time; `sordino doctor RECIPE.toml` measures the time "
        "of a step and prints it as options of this command. With --features, for a linear classifier: composition or "
        "hidden state (only the last iterate is published), and how to train either way; ε is exact, but how to train "
        "is a rule, and which of both is better is an estimate of the points of accuracy that noise and limited "
        "training cost (relation: replace-one). Uses no data.",
        epilog="examples: sordino plan --records 60000 --epochs 30 --epsilon 3 --delta 1e-5; "
        "sordino plan --records 60000 --minutes 10 --seconds-per-step 0.004 --records-per-second 20000 --epsilon 3 "
        "--delta 1e-5; sordino plan --records 60000 --features 3969 --classes 10 --epsilon 3 --delta 1e-5",
    )
    parser.add_argument("--records", type=int, required=True, metavar="N", help="public number of records")
    parser.add_argument("--features", type=int, metavar="D", help="number of features, for a linear classifier")
    parser.add_argument("--epochs", type=float, metavar="E", help="expected passes over the records, for any model")
    parser.add_argument("--steps", type=int, metavar="T", help="or the number of steps, with one value of --batches")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        metavar="t",
        help="with --epochs or --minutes: batches per epoch to compare (default: three)",
    )
    time = parser.add_argument_group("time (without evaluations; a step takes S + batch/R seconds)")
    time.add_argument("--minutes", type=float, metavar="M", help="or the time of the training, with S, R or both")
    time.add_argument("--seconds-per-step", type=float, metavar="S", help="of a step, whatever its batch (default: 0)")
    time.add_argument("--records-per-second", type=float, metavar="R", help="in addition (default: no limit)")
    time.add_argument(
        "--seconds-per-noise",
        type=float,
        metavar="G",
        help="for each further Gaussian that correlated noise adds to every parameter (default: 0)",
    )
    parser.add_argument(
        "--momentum", type=float, default=0.0, metavar="β", help="momentum of the update, for the noise in the weights"
    )
    parser.add_argument(
        "--decay", type=float, default=0.0, metavar="w", help="step size × weight decay, for the noise in the weights"
    )
    parser.add_argument(
        "--gradient-dimension",
        type=float,
        default=500.0,
        metavar="d",
        help="number of directions in which the gradients lie, for the sampling noise (default: 500, fitted on images)",
    )
    parser.add_argument("--classes", type=int, default=10, metavar="C", help="default: 10")
    parser.add_argument("--epsilon", type=float, required=True, metavar="ε")
    parser.add_argument("--delta", type=float, required=True, metavar="δ")
    loss = parser.add_argument_group(
        "the loss, as a function of its scores; the defaults are those of softmax regression"
    )
    loss.add_argument(
        "--feature-norm", type=float, default=1.0, metavar="L", help="records are clipped to this norm (default: 1)"
    )
    loss.add_argument(
        "--curvature", type=float, default=0.5, metavar="h", help="largest second derivative (default: 0.5)"
    )
    loss.add_argument(
        "--slope", type=float, default=math.sqrt(2), metavar="g", help="largest norm of the gradient (default: √2)"
    )
    model = parser.add_argument_group("further")
    model.add_argument(
        "--weight-norm",
        type=float,
        default=30.0,
        metavar="W",
        help="norm of weights that fit well, where nothing is clipped",
    )
    model.add_argument(
        "--max-epochs", type=int, default=1000, metavar="K", help="largest number of epochs (default: 1000)"
    )
    parser.add_argument("--plot", type=Path, metavar="SVG", help="write ε over the epochs, for both accountants")
    add_json(parser)
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from sordino.methods.hidden_state.comparison import Problem, Setting, compare

    pace, epochs = _pace(arguments), _epochs(arguments)
    if pace is not None and (arguments.epochs is not None or arguments.steps is not None):
        raise InputError("--minutes excludes --epochs and --steps: the steps are those that fit the time")
    if arguments.features is None and epochs is None and pace is None:
        raise InputError("give --epochs or --minutes (for any model), --features (for a linear classifier), or both")
    if arguments.batches is not None and epochs is None and pace is None:
        raise InputError("--batches needs --epochs or --minutes: it is the number of steps in each epoch")
    ways = None if epochs is None and pace is None else _ways(arguments, epochs, pace)
    if arguments.features is None:
        assert ways is not None
        emit(arguments, {"ways": ways, "recommendation": ways["recommended"]}, _way_rows(ways, pace, arguments.records))
        return 0
    names = Problem.__dataclass_fields__
    problem = Problem(**{name: getattr(arguments, name) for name in names if name != "pace"}, pace=pace)
    if arguments.plot is not None and not arguments.plot.parent.is_dir():
        raise InputError(f"{arguments.plot.parent} is not a folder")
    found = compare(problem)
    if arguments.plot is not None:
        _plot(problem, Setting(**found["hidden_state"]), arguments.plot)
        found["plot"] = str(arguments.plot)
    if ways is not None:
        found["ways"] = ways
    emit(arguments, found, _rows(found, pace) | ({} if ways is None else _way_rows(ways, pace, arguments.records)))
    return 0


def _pace(arguments: argparse.Namespace) -> Pace | None:
    """The pace of --minutes and the time of a step."""
    from sordino.plan.pace import Pace

    speeds = {name: getattr(arguments, name) for name in SPEEDS}
    if arguments.minutes is not None:
        return Pace.of(minutes=arguments.minutes, **speeds)
    if given := [name for name, value in speeds.items() if value is not None]:
        raise InputError(f"--{given[0].replace('_', '-')} needs --minutes, the time that the training may take")
    return None


def _epochs(arguments: argparse.Namespace) -> float | None:
    """The epochs of --epochs, or of --steps with a number of batches."""
    if arguments.steps is None:
        return None if arguments.epochs is None else float(arguments.epochs)
    if arguments.epochs is not None or arguments.batches is None or len(arguments.batches) != 1:
        raise InputError("--steps needs one value of --batches (per epoch), and excludes --epochs")
    return float(arguments.steps / arguments.batches[0])


def _ways(arguments: argparse.Namespace, epochs: float | None, pace: Pace | None) -> dict[str, Any]:
    from sordino.methods.correlated.workloads import Workload
    from sordino.methods.planner import compare_batches

    return compare_batches(
        records=arguments.records, epochs=epochs, pace=pace, epsilon=arguments.epsilon, delta=arguments.delta,
        batches=arguments.batches, workload=Workload(arguments.momentum, arguments.decay),
        dimension=arguments.gradient_dimension,
    )  # fmt: skip


def _way_rows(found: dict[str, Any], pace: Pace | None, records: int) -> dict[str, str]:
    rows = {} if pace is None else {"equal time": _pace_words(pace)}
    rows |= {
        "take": f"{found['recommended']}, batch {found['batch']:.0f} (relation: {found['relation']})",
        "because": found["why"],
    }
    if len(found["by_batch"]) > 1:
        said = [f"{one['batch']:.0f} ({one['recommended']}) {one['expected_loss']:.1f}" for one in found["by_batch"]]
        rows["by batch"] = f"points expected to be lost: {', '.join(said)}; taken: the largest within half a point"
    for row in found["rows"]:
        passes = "" if row["seconds"] is None else f" ({row['steps'] * row['batch'] / records:.3g} epochs)"
        rows[f"{row['way']}, batch {row['batch']:.0f}"] = (
            f"noise multiplier {row['noise_multiplier']:.4g}, {row['steps']} steps{passes}, start tuning at lr "
            f"{row['lr']:.2g} (clip norm 1); expected to lose {row['expected_loss']:.1f} points; noise in the weights, "
            f"in clip norms: {row['noise_in_weights']:.3g} of the mechanism, {row['batch_noise']:.3g} of sampling"
        )
    rows["about the points"] = (
        "an estimate without data, by linear classifiers on images; differences of half a point are called alike. The "
        "noise multipliers meet ε, and may be a thousandth too large"
    )
    return rows


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


def _rows(found: dict[str, Any], pace: Pace | None) -> dict[str, str]:
    return ({} if pace is None else {"time": _time_words(found["time"], pace)}) | {
        "recommended": found["recommendation"],
        "how": found["how"],
        "why": found["reason"],
        "otherwise": found["otherwise"],
        "how sure": "No run exceeds its ε. How to train is a rule without data, and which of both is better an "
        f"estimate. {STEP_SIZES}.",
        "without clipping": found["accounting"],
        "relation": found["relation"],
    }


def _time_words(time: dict[str, Any], pace: Pace) -> str:
    taken = " and ".join(f"{name} {seconds:.3g} s" for name, seconds in time["seconds"].items())
    return f"{_pace_words(pace)}. As proposed, {taken}"


def _pace_words(pace: Pace) -> str:
    parts = [f"{pace.per_step:g} s"] if pace.per_step else []
    parts += [f"1 s for {1 / pace.per_record:g} records"] if pace.per_record else []
    noise = "each further Gaussian of correlated noise "
    noise += f"{pace.per_noise:g} s" if pace.per_noise else "no time (or give --seconds-per-noise)"
    return f"{pace.seconds / 60:g} minutes; a step takes {' and '.join(parts)}, {noise}; evaluations are not included"
