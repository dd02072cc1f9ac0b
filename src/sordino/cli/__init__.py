"""The command line. Exit codes: 0 done; 1 failed at run time; 2 the input is wrong, nothing was written;
3 an audit broke its claim, or a run directory is not genuine.

Each command is a module with `add(commands)`, which declares its flags and the function behind them. Slow imports
(torch, scipy) are in that function, so that help is shown at once.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from sordino.console import Parser
from sordino.errors import InputError, SordinoError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Errors are shown without a traceback, unless the variable SORDINO_TRACEBACK is set.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that can't print ε must not cause a failure
    arguments = _parser().parse_args(argv)
    try:
        _refuse_boundless(arguments)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except SordinoError as error:
        if not getattr(error, "quiet", False):  # otherwise the leader of several ranks has reported it
            print(f"sordino: {error}", file=sys.stderr)
            _show_private(error.private)
        return error.exit_code
    except ArithmeticError as error:
        if os.environ.get("SORDINO_TRACEBACK") and not _computes(arguments):
            raise
        print(f"sordino: {_beyond_double(arguments, error)}", file=sys.stderr)
        return 2 if _computes(arguments) else 1
    except KeyboardInterrupt:
        print(f"sordino: {_INTERRUPTED}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the interpreter reports an error
        return 1
    except OSError as error:
        print(f"sordino: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError:
        print("sordino: not enough memory", file=sys.stderr)
        return 1
    except Exception as error:
        if _was_interrupted(error):
            print(f"sordino: {_INTERRUPTED}", file=sys.stderr)
            return 1
        if isinstance(error, RuntimeError) and "allocate" in str(error):  # torch's out-of-memory error
            print("sordino: not enough memory", file=sys.stderr)
            return 1
        if os.environ.get("SORDINO_TRACEBACK"):
            raise
        print(f"sordino: {_unforeseen(error)}", file=sys.stderr)
        _show_private(str(error))
        return 1


_INTERRUPTED = "interrupted; a run with checkpoints can be continued with --resume"


def _was_interrupted(error: BaseException) -> bool:
    """Whether a library made another error of a Ctrl-C: those in C do, while they are imported."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def _show_private(text: str) -> None:
    """Prints what an error says about private records: on a terminal, never into a log."""
    if not text:
        return
    if sys.stderr.isatty():
        print(f"for the data's owner only: {text}", file=sys.stderr)
    else:
        print("details about the records are private: they are shown on a terminal only", file=sys.stderr)


def _computes(arguments: argparse.Namespace) -> bool:
    """Whether the command computes only from the numbers on its line: no records, no files."""
    return getattr(arguments, "command", None) in ("account", "calibrate", "plan")


def _beyond_double(arguments: argparse.Namespace, error: ArithmeticError) -> str:
    """The message if a formula left double precision; only if no records are involved may it say more."""
    if not _computes(arguments):
        return _unforeseen(error)
    return (
        "these numbers are too large, too small or too far apart for double precision, so no ε can be computed: "
        "give less extreme ones"
    )


def _unforeseen(error: Exception) -> str:
    """The message for an unexpected error: its type and place. Its own message may contain private values."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "sordino" in Path(f.filename).parts]
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return (
        f"an unexpected error: {type(error).__name__}{place}. What was released is in the ledger. Please "
        "report it; with SORDINO_TRACEBACK=1 the whole traceback is shown"
    )


def _refuse_boundless(arguments: argparse.Namespace) -> None:
    """Refuses integers beyond 64 bits and numbers that are not finite."""
    for name, given in vars(arguments).items():
        for value in given if isinstance(given, list) else [given]:
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise InputError(f"{flag} is a number beyond 64 bits: give a smaller one")
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{flag} must be a finite number, got {value}")


def _parser() -> argparse.ArgumentParser:
    from sordino import __version__
    from sordino.cli import (
        account,
        attack,
        audit,
        budget,
        card,
        compare,
        data,
        doctor,
        predict,
        report,
        sweep,
        train,
        verify,
    )
    from sordino.registry import command_modules

    parser = Parser(
        prog="sordino",
        description="Train PyTorch models with differential privacy, with an epsilon that is true.",
        epilog="exit codes: 0 done, 1 failed at run time, 2 wrong input (nothing was written), 3 claim broken "
        "or run not genuine",
    )
    parser.add_argument("--version", action="version", version=f"sordino {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    own = (doctor, audit, attack, verify, report, card, budget, data)
    for command in (train, predict, sweep, compare, account, *command_modules(), *own):
        command.add(commands)
    return parser
