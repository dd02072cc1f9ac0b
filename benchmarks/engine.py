r"""Step time and extra peak memory of the gradient engine and its peers, as ratios to plain PyTorch.

    python benchmarks/engine.py --fresh                                    everything, five rounds: about 45 minutes
    python benchmarks/engine.py                                            continues an interrupted measurement
    python benchmarks/engine.py --quick --workloads W3 --engines sordino --out quick.json         a quick measurement
    python benchmarks/engine.py --table benchmarks/results/engine.json --into docs/benchmarks.md
    python benchmarks/engine.py --only mlp10 words logistic deberta --engines sordino floor \
        --out benchmarks/results/floor.json
    python benchmarks/engine.py --only mlp10 words                         two of the held-out workloads
    python benchmarks/engine.py --only held-out                            all of them, into results/heldout.json
    python benchmarks/engine.py --only gpt2 --fresh                        measures this one again, keeps the others

Each engine runs in a fresh process in every round, and all engines of a workload take turns of a tenth of a second, so
that other load on the machine affects them equally; ratios are taken between neighbouring turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from heldout import HELD_OUT, WORKLOADS
from peers import ENGINES
from peers.tables import fill, tables
from peers.turns import Child, Failed, interleaved
from workloads import SIX

Results = dict[str, Any]
LIBRARIES = ("torch", "sordino", "opacus", "fastDP", "timm", "transformers", "peft")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results (JSON); benchmarks/results/engine.json or heldout.json")
    choices = [*WORKLOADS, "held-out"]
    parser.add_argument("--workloads", "--only", nargs="+", choices=choices, default=list(SIX), help="the six")
    general = [name for name, engine in ENGINES.items() if not engine.only]
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=general, help="plain is always run")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (5, quick 2)")
    parser.add_argument("--budget", type=float, help="seconds of timed steps of plain and sordino (4, quick 1.5)")
    parser.add_argument("--peer-budget", type=float, help="the same for each peer; one step may be enough (1)")
    parser.add_argument("--turn", type=float, default=0.1, help="seconds of steps in one turn of an engine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one measurement")
    parser.add_argument("--records", type=int, help="replaces the workload's batch size (for a smoke test)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    parser.add_argument("--unchecked", action="store_true", help="time sordino without the comparison with a loop")
    parser.add_argument("--only-checks", action="store_true", help="compare with the loop, without timing")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results of these workloads")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the tables of a results file and stop")
    parser.add_argument("--into", type=Path, metavar="MD", help="with --table: fill them into this document")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="which time the tables compare")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    typed = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(typed)
    options.typed = typed
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.budget = options.budget if options.budget is not None else (1.5 if options.quick else 4.0)
    options.peer_budget = 1.0 if options.peer_budget is None else options.peer_budget
    options.engines = [e for e in ENGINES if e in options.engines or e == "plain"]
    everything = HELD_OUT if "held-out" in options.workloads else {}
    options.workloads = [w for w in WORKLOADS if w in options.workloads or w in everything]
    kind = "engine" if set(options.workloads) & set(SIX) else "heldout"
    options.out = options.out or Path(f"benchmarks/results/{kind}.json")
    return options


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name as reported by the system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The measured revision, marked if files differ from it; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def environment() -> dict[str, Any]:
    """The machine and the versions, on which the results depend besides the code."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "workloads": options.workloads,
        "engines": options.engines,
        "rounds": options.rounds,
        "budget": options.budget,
        "peer_budget": options.peer_budget,
        "turn": options.turn,
        "threads": options.threads,
        "records": {w: options.records or WORKLOADS[w].records for w in options.workloads},
    }


def load(options: argparse.Namespace) -> Results:
    """The results so far, also those of other workloads, if measured with the same settings; otherwise an empty set."""
    fresh: Results = {
        "environment": environment(),
        "settings": settings(options),
        "commands": [],
        "absent": {},
        "checks": {},
        "measurements": [],
    }
    if not options.out.exists():
        return fresh
    found: Results = json.loads(options.out.read_text())
    if options.fresh:
        found["measurements"] = [m for m in found["measurements"] if m["workload"] not in options.workloads]
        found["checks"] = {w: c for w, c in found["checks"].items() if w not in options.workloads}
    if not found["measurements"] and not found["checks"]:
        return fresh
    for part, ignored in (("settings", {"workloads", "records"}), ("environment", {"date", "commit"})):
        differs = [k for k, v in fresh[part].items() if k not in ignored and found[part].get(k) != v]
        if differs:
            names = ", ".join(differs)
            raise SystemExit(f"{options.out} was measured with other {names}: use --fresh, or another --out")
    for w, n in fresh["settings"]["records"].items():
        measured = any(m["workload"] == w for m in found["measurements"])
        if measured and found["settings"]["records"][w] != n:
            raise SystemExit(f"{options.out} was measured with other records of {w}: use --fresh, or another --out")
    found["settings"]["records"] |= fresh["settings"]["records"]
    found["settings"]["workloads"] = [w for w in WORKLOADS if w in found["settings"]["records"]]
    return found


def save(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def child(job: dict[str, Any], threads: int) -> None:
    """Runs in a fresh process: writes one line of JSON at the start, and one for each line that it reads."""
    answers, sys.stdout = sys.stdout, sys.stderr  # other output must not be mistaken for an answer
    import torch

    from peers.measure import check, serve

    torch.set_num_threads(threads)
    for answer in [check(**job["check"])] if "check" in job else serve(**job["measure"]):
        print(json.dumps(answer), file=answers, flush=True)
        if not sys.stdin.readline():
            return


def check_all(options: argparse.Namespace, results: Results) -> None:
    """Compares sordino with the plain loop on each workload before anything is timed."""
    for workload in options.workloads:
        if workload in results["checks"]:
            continue
        process = Child({"check": {"workload": workload}}, options.threads, options.timeout)
        try:
            outcome = process.answer()
            said = f"sums {outcome['sums_error']:.1e}  norms {outcome['norms_error']:.1e}"
        except Failed as failure:
            if workload in SIX:
                raise SystemExit(f"check of sordino on {workload} failed: {failure}") from failure
            outcome, said = {"error": str(failure)}, f"failed, not timed: {failure}"
        finally:
            process.close()
        results["checks"][workload] = outcome
        print(f"check {workload:9s} {said}", flush=True)
        save(results, options.out)


def present(options: argparse.Namespace, results: Results) -> list[str]:
    """The engines that can run; for the others the reason is stored in the results."""
    results["absent"] = {
        e: f"the distribution {ENGINES[e].distribution} is not installed"
        for e in options.engines
        if ENGINES[e].version() is None
    }
    return [e for e in options.engines if e not in results["absent"]]


def amount(engine: str, options: argparse.Namespace) -> tuple[float, int]:
    """(seconds, least number of steps) of a measurement: for peers, which are much slower, one step suffices."""
    if engine in ("plain", "plain-kept", "sordino", "floor"):
        return options.budget, 3 if options.quick else 5
    return options.peer_budget, 1


def run(options: argparse.Namespace) -> Results:
    results = load(options)
    revision, command = commit(), " ".join(["python", "benchmarks/engine.py", *options.typed])
    results["commands"] = [*dict.fromkeys([*results.get("commands", []), command])]
    engines = present(options, results)
    for e, reason in results["absent"].items():
        print(f"{e}: {reason}", flush=True)
    if "sordino" in engines and not options.unchecked:
        check_all(options, results)
    if options.only_checks:
        return results
    done = {(m["round"], m["workload"]) for m in results["measurements"]}
    broken = {(m["workload"], m["engine"]) for m in results["measurements"] if m["status"] != "ok"}
    broken |= {(w, "sordino") for w, outcome in results["checks"].items() if "error" in outcome}
    jobs = [(turn, workload) for turn in range(options.rounds) for workload in options.workloads]
    start = time.monotonic()
    for number, (turn, workload) in enumerate(jobs, 1):
        if (turn, workload) in done:
            continue
        shift = turn % len(engines)  # each round starts with a different engine
        able = [e for e in engines if not ENGINES[e].only or workload in ENGINES[e].only]
        able = [e for e in able if workload in SIX or ENGINES[e].any_loss]
        here = [e for e in [*able[shift:], *able[:shift]] if (workload, e) not in broken]
        told = {"workload": workload, "turn": options.turn, "records": options.records}
        outcomes = interleaved(
            {e: {"measure": told | {"engine": e}} for e in here},
            {e: amount(e, options) for e in here},
            options.threads,
            options.timeout,
        )
        for engine, outcome in outcomes.items():
            named = {"workload": workload, "engine": engine, "round": turn, "commit": revision}
            results["measurements"].append(named | outcome)
            if outcome["status"] != "ok":
                broken.add((workload, engine))
            clock = f"[{number:3d}/{len(jobs)} {time.monotonic() - start:5.0f}s]"
            print(f"{clock} round {turn} {workload:9s} {engine:13s} {said(outcome)}", flush=True)
        save(results, options.out)
    save(results, options.out)
    return results


def said(outcome: dict[str, Any]) -> str:
    if outcome["status"] != "ok":
        return f"{outcome['status']}: {outcome['error']}"
    milliseconds, megabytes = outcome["seconds"] * 1e3, outcome["extra_bytes"] / 1e6
    return f"{milliseconds:9.2f} ms {megabytes:8.1f} MB ({outcome['steps']} steps)"


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    if options.child:
        child(json.loads(options.child), options.threads)
    elif options.table:
        results: Results = json.loads(options.table.read_text())
        if options.into:
            fill(options.into, results, options.clock)
        else:
            print(tables(results, options.clock))
    elif options.only_checks:
        run(options)
    else:
        print("\n" + tables(run(options), options.clock))


if __name__ == "__main__":
    main()
