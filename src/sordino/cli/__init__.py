"""The command line. Exit codes: 0 done; 1 failed while running; 2 the input is wrong, nothing was written;
3 an audit broke its claim.

Each command is a module with `add(commands)`, which declares its flags and the function behind them. What is slow to
load (torch, scipy) is imported in that function, so that help is there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sordino.errors import SordinoError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except SordinoError as error:
        print(f"sordino: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("sordino: interrupted; a run that writes checkpoints goes on with --resume", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    from sordino import __version__
    from sordino.cli import account, advise, attack, audit, data, doctor, report, sweep, train
    from sordino.registry import command_modules

    parser = argparse.ArgumentParser(
        prog="sordino",
        description="Train PyTorch models with differential privacy, with an epsilon that is true.",
        epilog="exit codes: 0 done, 1 failed while running, 2 wrong input (nothing was written), 3 claim broken",
    )
    parser.add_argument("--version", action="version", version=f"sordino {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (train, sweep, account, *command_modules(), doctor, audit, attack, advise, report, data):
        command.add(commands)
    return parser
