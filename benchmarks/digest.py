"""What it costs that every rank reads all records once before the first step: the digest by which ranks are compared.

    python benchmarks/digest.py --json benchmarks/results/digest.json

Memory-mapped arrays of 10⁸ records with 8 bytes and a label each, and of 10⁷ records with 128 bytes. The files have no
blocks on disk, so this is processor time (of one thread), without the disk's own time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sordino.records.digest import KEY_BYTES, keyed_digest
from sordino.records.mapped import Mapped
from sordino.runs.origin import commit
from sordino.runs.results import environment

SIZES = {"8 bytes": (10**8, 8, np.uint8), "128 bytes": (10**7, 32, np.float32)}


def measure(records: int, width: int, kind: Any) -> dict[str, Any]:
    """Processor seconds of the digest."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = np.memmap(f"{folder}/inputs", kind, "w+", shape=(records, width))
        targets = np.memmap(f"{folder}/targets", np.uint8, "w+", shape=(records,))
        begin = time.process_time()
        keyed_digest(Mapped(inputs, targets, classes=True), bytes(KEY_BYTES))
        seconds = time.process_time() - begin
        return {
            "records": records, "bytes_of_a_record": inputs[0].nbytes, "seconds": seconds,
            "nanoseconds_a_record": 1e9 * seconds / records,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "digest.json")
    path = parser.parse_args().json
    torch.set_num_threads(1)
    rows = {name: measure(*size) for name, size in SIZES.items()}
    document = {
        "command": "python benchmarks/digest.py", "commit": commit(Path(__file__)), "environment": environment(),
        "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf8")
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
