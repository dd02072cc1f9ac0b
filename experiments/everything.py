"""Everything that docs/trust.md shows, on one commit, in two lanes of one process each.

    python experiments/trust.py --everything [--data-dir DIR] [--one]

--one takes the lanes one after the other.

Each command keeps what this commit has made already and drops what another commit made, so a run that was stopped goes
on. The source must be committed: results of changed files belong to no commit. MNIST, for the black-box audit, is
looked for in DIR (or $SORDINO_DATA); without it the rows of the earlier commit stay, and the page says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
Command = tuple[str, ...]


def lanes(data_dir: str | None) -> tuple[tuple[Command, ...], ...]:
    """Commands that run one after the other, for each of two processors; of about equal length."""
    black = ("--data-dir", data_dir) if data_dir else ()
    audits = (*(("black",) if data_dir or os.environ.get("SORDINO_DATA") else ()), "white", "ceiling", "false")
    return (
        (("audit_strength.py", "--anew", *audits, *black), ("mutants.py",)),
        (("forged.py",), ("faults.py",), ("trust.py", "--again", "--no-page")),
    )


def run(commands: Sequence[Command], codes: dict[str, int]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for command in commands:
        started = time.monotonic()
        words = [sys.executable, str(HERE / command[0]), *command[1:]]
        codes[command[0]] = subprocess.run(words, env=environment, check=False).returncode
        print(f"== {command[0]}: exit {codes[command[0]]} after {time.monotonic() - started:.0f} s", flush=True)


def main(commit: str, data_dir: str | None, *, one: bool = False) -> int:
    """Runs all lanes; 1 if a command found, lost or missed something, or the source is not committed."""
    if commit.endswith("+changes"):
        print("the source has changes that are not committed: commit them first, so that the results name their code")
        return 1
    codes: dict[str, int] = {}
    threads = [threading.Thread(target=run, args=(lane, codes)) for lane in lanes(data_dir)]
    for thread in threads:
        thread.start()
        if one:
            thread.join()
    for thread in threads:
        thread.join()
    return 1 if any(codes.values()) else 0
