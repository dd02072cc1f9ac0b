"""The accountant's ε against a contour integral that shares nothing with it, on random compositions: one JSON file.

    python experiments/accountants.py [KIND…] [--count N]

KIND: poisson, replace, users, without replacement (default: all); N random compositions of each (default: 300), made
as those of tests/accounting/test_contour.py. Writes results/accountants.json. Exits with 1 if an ε is below the
reference, or if one ε takes more than ten seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import origin
from sordino.accounting.account import composed_epsilon
from sordino.errors import SordinoError

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "experiments" / "results" / "accountants.json"
KINDS = ("poisson", "replace", "users", "without replacement")
sys.path.insert(0, str(ROOT / "tests" / "accounting"))

from contour import TooHard, log_delta  # type: ignore[import-not-found]  # noqa: E402
from test_contour import case  # type: ignore[import-not-found]  # noqa: E402


def compared(kind: str, seed: int) -> dict[str, Any]:
    """One composition: ε, how far it lies above the reference, and the processor time of the accountant."""
    releases, attained, relation, delta = case(kind, seed)
    started = time.process_time()
    try:
        epsilon, _ = composed_epsilon(releases, delta, relation, "pld")
    except SordinoError:
        return {"seed": seed, "refused": True}
    row: dict[str, Any] = {"seed": seed, "epsilon": epsilon, "seconds": time.process_time() - started}
    gaps = []
    for parts in attained:
        try:
            exact, theta = log_delta(parts, epsilon)
            if exact > math.log(delta):
                exact, theta = log_delta([(replace(pair, fine=2), count) for pair, count in parts], epsilon)
        except TooHard:
            continue
        gaps.append((math.log(delta) - exact) / theta)
        row["below"] = row.get("below", False) or exact > math.log(delta) + 1e-7
    return row | ({"gap": min(gaps)} if gaps else {})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and how far ε lies above the reference, relative to it."""
    checked = [row for row in rows if "gap" in row]
    gaps = sorted(row["gap"] / row["epsilon"] for row in checked if row["epsilon"] > 1e-9)
    return {
        "tried": len(rows), "refused": sum("refused" in row for row in rows), "compared": len(checked),
        "below": [row["seed"] for row in checked if row["below"]],
        "relative_gap_median": statistics.median(gaps) if gaps else None,
        "relative_gap_largest": gaps[-1] if gaps else None,
        "longest_seconds": round(max(row.get("seconds", 0.0) for row in rows), 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--count", type=int, default=300)
    arguments = parser.parse_args()
    known = json.loads(TARGET.read_text(encoding="utf8")).get("kinds", {}) if TARGET.exists() else {}
    made = origin(f"python experiments/accountants.py --count {arguments.count}")
    found: dict[str, Any] = {}
    for kind in arguments.kinds or KINDS:
        found[kind] = summary([compared(kind, seed) for seed in range(arguments.count)])
        print(kind, found[kind], flush=True)
        document = {**made, "kinds": known | {name: one | {"commit": made["commit"]} for name, one in found.items()}}
        TARGET.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
    return 1 if any(one["below"] or one["longest_seconds"] > 10 for one in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
