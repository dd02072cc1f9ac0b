"""Makes Markdown tables from the measurements in the JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heldout import WORKLOADS
from peers import ENGINES
from workloads import SIX

MEMORY_GOAL = 1.6
BEGIN, END = "<!-- engine:begin -->", "<!-- engine:end -->"
HELD_BEGIN, HELD_END = "<!-- heldout:begin -->", "<!-- heldout:end -->"
SHORT_BEGIN, SHORT_END = "<!-- speed:begin -->", "<!-- speed:end -->"


CLOCKS = {"seconds": 1, "cpu_seconds": 2}  # their positions in the tuple of a turn


def ratios(results: Mapping[str, Any], workload: str, engine: str, quantity: str) -> list[float]:
    """One ratio to plain for each round; for times it is the median over the round's neighbouring turns."""
    by_key = {(m["workload"], m["engine"], m["round"]): m for m in results["measurements"] if m["status"] == "ok"}
    rounds = sorted({r for w, e, r in by_key if (w, e) == (workload, engine)})
    pairs = [(by_key[workload, engine, r], by_key.get((workload, "plain", r))) for r in rounds]
    return [_ratio(m, base, quantity) for m, base in pairs if base is not None and base[quantity] > 0]


def _ratio(measured: Mapping[str, Any], plain: Mapping[str, Any], quantity: str) -> float:
    place = CLOCKS.get(quantity)
    if place is None:
        return float(measured[quantity] / plain[quantity])
    beside = {turn[0]: turn[place] for turn in plain["turns"]}
    return statistics.median(float(turn[place] / beside[turn[0]]) for turn in measured["turns"] if beside.get(turn[0]))


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def three_digits(value: float) -> str:
    """The number rounded to three digits, never with an exponent: 0.123, 12.3, 1,230."""
    return f"{value:.3g}" if value < 999.5 else f"{float(f'{value:.3g}'):,.0f}"


def _cell(results: Mapping[str, Any], workload: str, engine: str, quantity: str) -> str:
    values = ratios(results, workload, engine, quantity)
    if values:
        spread = f" ({_number(min(values))}–{_number(max(values))})" if len(values) > 1 else ""
        return _number(statistics.median(values)) + spread
    if engine in results["absent"]:
        return "absent"
    failed = [m for m in results["measurements"] if (m["workload"], m["engine"]) == (workload, engine)]
    return failed[0]["status"] if failed else "–"


def _plain(results: Mapping[str, Any], workload: str, quantity: str, factor: float) -> str:
    values = [
        m[quantity] * factor
        for m in results["measurements"]
        if (m["workload"], m["engine"], m["status"]) == (workload, "plain", "ok")
    ]
    return three_digits(statistics.median(values)) if values else "–"


def _rows(results: Mapping[str, Any], names: Sequence[str], quantity: str) -> list[list[str]]:
    engines = [e for e in ENGINES if e in results["settings"]["engines"] and e != "plain"]
    return [[ENGINES[e].title, *(_cell(results, w, e, quantity) for w in names)] for e in engines]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _phases(results: Mapping[str, Any], names: Sequence[str]) -> list[list[str]]:
    rows = []
    for phase in ("gradients", "release", "update"):
        cells = []
        for w in names:
            values = [
                m["phases"][phase] * 1e3
                for m in results["measurements"]
                if (m["workload"], m["engine"], m["status"]) == (w, "sordino", "ok") and phase in m["phases"]
            ]
            cells.append(three_digits(statistics.median(values)) if values else "–")
        rows.append([phase, *cells])
    return rows


def failures(results: Mapping[str, Any]) -> list[str]:
    """One line for each engine that is absent, crashed or ran out of time, with its message."""
    lines = [f"{ENGINES[e].title}: {reason}" for e, reason in results["absent"].items()]
    wrong = {w: c["error"] for w, c in results["checks"].items() if "error" in c}
    lines += [f"sordino on {w}: not timed, for its check failed: {error}" for w, error in wrong.items()]
    for m in results["measurements"]:
        if m["status"] != "ok":
            lines.append(f"{ENGINES[m['engine']].title} on {m['workload']}: {m['status']}: {m['error']}")
    return lines


def environment_line(results: Mapping[str, Any]) -> str:
    """The machine and the versions in one sentence."""
    e, s = results["environment"], results["settings"]
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items() if v)
    return (
        f"{e['cpu']}, {e['cores']} cores, {s['threads']} thread(s), {versions}; Python {e['python']}; "
        f"{s['rounds']} rounds, in each a fresh process for every engine, in turns of {s['turn']:g} s; {e['date']}."
    )


def tables(results: Mapping[str, Any], clock: str = "wall") -> str:
    """Time, memory and the phases of sordino's step as Markdown, with the environment and the failures."""
    names = [w for w in SIX if w in results["settings"]["workloads"]]
    if not names:
        return held_out(results, clock)
    seconds = {"wall": "seconds", "cpu": "cpu_seconds"}[clock]
    heads = [f"{w.split('-')[0]} b{results['settings']['records'][w]}" for w in names]
    goals = [_number(WORKLOADS[w].goal) for w in names]
    time_rows = [
        ["plain, ms", *(_plain(results, w, seconds, 1e3) for w in names)],
        *_rows(results, names, seconds),
        ["goal for sordino", *goals],
    ]
    memory_rows = [
        ["plain, MB", *(_plain(results, w, "extra_bytes", 1e-6) for w in names)],
        *_rows(results, names, "extra_bytes"),
        ["goal for sordino", *[_number(MEMORY_GOAL)] * len(names)],
    ]
    parts = [
        environment_line(results),
        _markdown([f"{clock} time ratio", *heads], time_rows),
        _markdown(["extra peak memory ratio", *heads], memory_rows),
        *([_markdown(["sordino's step, ms", *heads], _phases(results, names))] if clock == "wall" else []),
    ]
    if results["checks"]:
        passed = [c for c in results["checks"].values() if "error" not in c]
        worst = max(max(c["sums_error"], c["norms_error"]) for c in passed)
        parts.append(f"Checked before timing against a float64 loop over records: largest relative error {worst:.1e}.")
    parts += ["Not measured:\n\n" + "\n".join(f"- {line}" for line in failures(results))] if failures(results) else []
    return "\n\n".join(parts)


RUN_STEPS = 200  # length of the run with which the additional time of the first step is compared


def first_share(results: Mapping[str, Any], workload: str, engine: str) -> float | None:
    """(first step − median step) ÷ (RUN_STEPS · median step): an engine's one-time work as a share of a short run."""
    shares = [
        (m["first_seconds"] - m["seconds"]) / (RUN_STEPS * m["seconds"])
        for m in results["measurements"]
        if (m["workload"], m["engine"], m["status"]) == (workload, engine, "ok") and m.get("first_seconds")
    ]
    return statistics.median(shares) if shares else None


def held_out(results: Mapping[str, Any], clock: str = "wall") -> str:
    """One line for each held-out workload: time and memory over plain, sordino's phases, the first step's share."""
    seconds = {"wall": "seconds", "cpu": "cpu_seconds"}[clock]
    rows = []
    for w in (w for w in WORKLOADS if w in results["settings"]["workloads"]):
        share = first_share(results, w, "sordino")
        on_the_clock = [
            " + ".join(row[1] for row in _phases(results, [w])),
            "–" if share is None else f"{100 * share:.1f} %",
        ]
        rows.append(
            [
                f"{WORKLOADS[w].title}, batch {results['settings']['records'][w]}",
                _plain(results, w, seconds, 1e3),
                _cell(results, w, "sordino", seconds),
                _number(WORKLOADS[w].goal),
                _plain(results, w, "extra_bytes", 1e-6),
                _cell(results, w, "sordino", "extra_bytes"),
                *(on_the_clock if clock == "wall" else []),
            ]
        )
    head = ["workload", "plain, ms", f"{clock} time ratio", "goal", "plain, MB", "extra peak memory ratio"]
    if clock == "wall":  # phases and the first step are measured by the wall clock only
        head += ["gradients + release + update, ms", f"first step's extra, of {RUN_STEPS} steps"]
    parts = [environment_line(results), _markdown(head, rows)]
    parts += ["Not measured:\n\n" + "\n".join(f"- {line}" for line in failures(results))] if failures(results) else []
    return "\n\n".join(parts)


def summary(results: Mapping[str, Any], clock: str = "wall") -> str:
    """The short table: one line for each workload with the medians of the engines that ran."""
    seconds = {"wall": "seconds", "cpu": "cpu_seconds"}[clock]
    engines = [e for e in results["settings"]["engines"] if not e.startswith("plain") and e not in results["absent"]]
    rows = []
    for w in results["settings"]["workloads"]:
        found = {e: ratios(results, w, e, seconds) for e in engines}
        cells = [_number(statistics.median(values)) if values else "–" for values in found.values()]
        rows.append([f"{WORKLOADS[w].title}, batch {results['settings']['records'][w]}", *cells])
    return _markdown(["time over plain PyTorch's", *(ENGINES[e].title for e in engines)], rows)


def fill(document: Path, results: Mapping[str, Any], clock: str = "wall") -> None:
    """Writes the tables, or the summary, between the two markers of a document."""
    text = document.read_text()
    six = any(w in SIX for w in results["settings"]["workloads"])
    places = ((BEGIN, END, tables), (SHORT_BEGIN, SHORT_END, summary)) if six else ((HELD_BEGIN, HELD_END, held_out),)
    if any(e == "floor" for e in results["settings"]["engines"]):
        places = (("<!-- floor:begin -->", "<!-- floor:end -->", floors),)
    for begin, end, made in places:
        if begin in text:
            put(document, begin, end, made(results, clock))
            return
    raise SystemExit(f"{document} has no {places[0][0]} … {places[0][1]} to fill")


def put(document: Path, begin: str, end: str, table: str) -> None:
    """Replaces the text between two markers of a document."""
    before, found, rest = document.read_text().partition(begin)
    if not found:
        raise SystemExit(f"{document} has no {begin} … {end} to fill")
    document.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}")


def floors(results: Mapping[str, Any], clock: str = "wall") -> str:
    """Time and memory of sordino's step and of the step by hand, divided by plain's."""
    seconds = {"wall": "seconds", "cpu": "cpu_seconds"}[clock]
    names = [w for w in WORKLOADS if w in results["settings"]["workloads"]]
    rows = [
        [
            f"{WORKLOADS[w].title}, batch {results['settings']['records'][w]}",
            _plain(results, w, seconds, 1e3),
            *(_cell(results, w, e, seconds) for e in ("floor", "sordino")),
            _number(WORKLOADS[w].goal),
            _plain(results, w, "extra_bytes", 1e-6),
            *(_cell(results, w, e, "extra_bytes") for e in ("floor", "sordino")),
        ]
        for w in names
    ]
    head = ["workload", "plain, ms", f"by hand, {clock} time ratio", "sordino", "goal"]
    head += ["plain, MB", "by hand, extra peak memory ratio", "sordino"]
    return environment_line(results) + "\n\n" + _markdown(head, rows)
