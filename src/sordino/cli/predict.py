"""sordino predict: predicts the rows of a file with a run's published model."""

from __future__ import annotations

import argparse
from pathlib import Path

from sordino.console import Commands, add_code, add_json, emit
from sordino.errors import InputError


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "predict",
        help="predict the rows of a file with a run's published model",
        description="Encodes the rows of FILE according to the run's recipe (with the same public bounds and lists), "
        "and writes the label and the probabilities of each. It has no privacy cost for the training records; the rows "
        "of FILE have no protection here.",
        epilog="example: sordino predict runs/visits --data new_visits.csv --out predictions.csv",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of a finished run")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="rows like the training rows")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".csv, .npz or .parquet")
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where public weights are (default: $SORDINO_DATA)"
    )
    add_code(parser)
    add_json(parser)
    parser.set_defaults(run=_predict)


def _predict(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    if out.suffix.lower() not in (".csv", ".npz", ".parquet"):
        raise InputError(f"--out {out}: give a name that ends in .csv, .npz or .parquet")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir() or (out.exists() and not arguments.force):
        raise InputError(f"--out {out} exists already: give another name, or overwrite it with --force")
    if out.exists() and arguments.data.exists() and out.samefile(arguments.data):
        raise InputError(f"--out {out} is the data: give another name")
    from sordino.runs.trained import load, write_predictions

    run = load(arguments.directory, allow_code=arguments.allow_code, data_dir=arguments.data_dir)
    rows = run.read(arguments.data)
    labels, shares = run.predict(rows), run.probabilities(rows)
    names = run.labels or tuple(str(number) for number in range(shares.shape[1]))
    write_predictions(out, labels, shares, names)
    document = {"predictions": str(out), "rows": len(labels), "epsilon": run.result["epsilon"],
                "delta": run.result["delta"]}  # fmt: skip
    sentence = run.guarantee.partition(" It assumes:")[0]  # the report has the assumptions
    emit(arguments, document, {"predictions": str(out), "rows": str(len(labels)), "guarantee": sentence})
    return 0
