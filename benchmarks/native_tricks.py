"""The gain of each optimisation that only saves time: a private step without it compared with the same step with it.

    python benchmarks/native_tricks.py                                     all optimisations: about 15 minutes
    python benchmarks/native_tricks.py --tricks rounded-sum --workloads mlp10 --seconds 2
    python benchmarks/native_tricks.py --table benchmarks/results/native.json --into docs/engine.md

An optimisation is switched off by replacing it with its slow form in this process; sordino itself has no such switch.
Steps with and without it take turns, and the ratio is that of the processor times of neighbouring turns. An
optimisation that saves less than 3 % on every workload is removed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine import commit, environment, save
from heldout import WORKLOADS
from peers import ENGINES, Step
from peers.tables import put
from sordino.native.kernels import Kernels, compiled

EARNED = 1.03  # time without over time with, on the workload that gains most


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _outside(*names: str) -> Callable[[], Kernels | None]:
    """The C library, hidden from these functions only."""
    library = compiled()
    return lambda: None if sys._getframe(1).f_code.co_name in names else library


_SUMS = "sordino.gradients.sums.memory.compiled"
TRICKS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "rounded-sum": (
        "`rounded_sum`, `rounded_again`: noise and rounding in one pass",
        {"sordino.randomness.rounded_sum.compiled": _nothing},
        ("mlp10", "words"),
    ),
    "key-stream": (
        "`key_stream`: the processor's AES instructions without OpenSSL's calls",
        {"sordino.randomness.keystream.compiled": _nothing},
        ("mlp10", "words"),
    ),
    "largest": (
        "`largest`: the range of what is released, in one pass",
        {"sordino.release.requests.compiled": _nothing},
        ("mlp10", "words"),
    ),
    "squares": ("`squares`: norms of rows in one pass", {_SUMS: _outside("squares")}, ("W2", "W4-64")),
    "scaled": ("`scaled`: clipped rows and their sum in one pass", {_SUMS: _outside("scaled")}, ("mlp10", "W2")),
    "narrow": (
        "sums of one chunk rounded to single precision",
        {"sordino.gradients.engine.MOST": 0},
        ("mlp10", "words", "W5"),
    ),
    "placed": (
        "`placed`: sums of rows of tables, rounded to single precision",
        {_SUMS: _outside("scatter_narrow")},
        ("words",),
    ),
    "merged": ("`merged`: rows for equal words of a record added up", {_SUMS: _outside("merge")}, ("words", "W5")),
    "gathered": ("`gathered`: sums of products in double precision", {_SUMS: _outside("gather")}, ("W4-256", "W4-64")),
    "scattered": ("`scattered`: sums of rows of tables in double precision", {_SUMS: _outside("scatter")}, ("words",)),
    "blocked": ("`blocked`: sums of blocks in double precision", {_SUMS: _outside("blocked")}, ("mlp10", "W2", "vit")),
    "lstm": (
        "`lstm_forward`, `lstm_backward`: all steps of an LSTM in one call",
        {"sordino.gradients.layers.lstm.compiled": _nothing},
        ("bilstm", "W6"),
    ),
    "products": (
        "`products`: the product of each record, with its norm",
        {"sordino.gradients.sums.record_products.compiled": _nothing},
        ("bilstm", "maxvit", "W5"),
    ),
    "maps": (
        "`maps`: linear maps on processors for which torch's library has no instructions with 512 bits",
        {"sordino.gradients.layers.mapped._loop": _nothing},
        ("deberta", "vit", "gpt2"),
    ),
    "few-outputs": (
        "`few_outputs`: linear maps to few outputs with the norms of their inputs, in one pass",
        {"sordino.gradients.layers.linear.reads_memory": _no},
        ("logistic", "W1"),
    ),
    "patches": (
        "`patches` of a convolution copied by a loop",
        {"sordino.gradients.layers.convolution.compiled": _nothing},
        ("W3", "W4-64"),
    ),
    "depthwise": (
        "`depthwise`: gradients of depthwise convolutions",
        {"sordino.gradients.layers.depthwise.compiled": _nothing},
        ("convnext", "edgenext"),
    ),
    "in-place": (
        "`ownership`: results overwrite values that nothing else refers to",
        {"sordino.gradients.sums.single.alone": _no, "sordino.release.noise.alone": _no},
        ("mlp10", "W2", "logistic"),
    ),
    "pulled-once": (
        "gradients of derived tensors kept from norms to sums",
        {"sordino.gradients.tape.pulled.PULLED_BYTES": -1},
        ("deberta", "maxvit"),
    ),
}

MANY = {"gathered", "scattered", "blocked"}
"""Only sums over many records stay in double precision: these loops are measured without rounding to single."""


@contextmanager
def without(trick: str) -> Iterator[None]:
    """Replaces the optimisation by its slow form inside the block."""
    with ExitStack() as stack:
        for target, slow in TRICKS[trick][1].items():
            stack.enter_context(mock.patch(target, slow))
        yield


def _turn(step: Step, seconds: float) -> float:
    """The mean processor time of the steps that fit into this time, at least one step."""
    began, deadline, steps = time.process_time(), time.perf_counter() + seconds, 0
    while not steps or time.perf_counter() < deadline:
        step()
        steps += 1
    return (time.process_time() - began) / steps


def measure(trick: str, workload: str, seconds: float) -> dict[str, Any]:
    """Measures both forms in turns: the median of the ratios of neighbouring turns, and the quartiles."""
    steps: list[Step] = []
    for _ in range(2):
        model, inputs, targets = WORKLOADS[workload].build()
        steps.append(ENGINES["sordino"].prepare(model, inputs, targets, WORKLOADS[workload].row_loss))
    fast, slow = steps

    def slowly(do: Callable[[], Any]) -> Any:
        with without(trick):
            return do()

    ratios: list[float] = []
    with without("narrow") if trick in MANY else nullcontext():
        for _ in range(2):
            fast()
            slowly(slow)
        end = time.perf_counter() + seconds
        while len(ratios) < 5 or time.perf_counter() < end:
            quick = _turn(fast, 0.1)
            ratios.append(slowly(lambda: _turn(slow, 0.1)) / quick)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"trick": trick, "workload": workload, "ratio": middle, "quartiles": [low, high], "turns": len(ratios)}


def table(results: dict[str, Any]) -> str:
    """The time without each optimisation divided by the time with it, as a Markdown table."""
    lines = ["| optimisation | time of a step without it |", "|---|---|"]
    for trick, (title, _, _) in TRICKS.items():
        found = [m for m in results["measurements"] if m["trick"] == trick]
        works = [(m["ratio"], WORKLOADS[m["workload"]]) for m in found]
        said = "; ".join(f"× {ratio:.2f} {work.title}, batch {work.records}" for ratio, work in works)
        if found:
            lines.append(f"| {title} | {said} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tricks", nargs="+", choices=TRICKS, default=list(TRICKS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="instead of those of each optimisation")
    parser.add_argument("--seconds", type=float, default=20.0, help="for one optimisation on one workload")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/native.json"))
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of a results file and stop")
    parser.add_argument("--into", type=Path, metavar="MD", help="with --table: fill it into this document")
    options = parser.parse_args(argv)
    if options.table:
        found = table(json.loads(options.table.read_text()))
        if options.into:
            put(options.into, "<!-- native:begin -->", "<!-- native:end -->", found)
        else:
            print(found)
        return
    torch.set_num_threads(1)
    known = json.loads(options.out.read_text())["measurements"] if options.out.exists() else []
    results: dict[str, Any] = {"environment": environment(), "seconds": options.seconds, "measurements": known}
    for trick in options.tricks:
        for workload in options.workloads or TRICKS[trick][2]:
            if any(m["trick"] == trick and m["workload"] == workload for m in results["measurements"]):
                continue  # measured before: delete the file to measure everything again
            one = measure(trick, workload, options.seconds) | {"commit": commit()}
            results["measurements"].append(one)
            print(f"{trick:12s} {workload:9s} without it × {one['ratio']:.3f}", flush=True)
            save(results, options.out)
    print("\n" + table(results))
    for trick in options.tricks:
        most = max((m["ratio"] for m in results["measurements"] if m["trick"] == trick), default=EARNED)
        if most < EARNED:
            print(f"{trick} saves less than 3 % on all of these workloads: remove it", file=sys.stderr)


if __name__ == "__main__":
    main()
