"""Renders a run as HTML: the content and its wording. The markup is in page.html, the style in page.css."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from sordino.plan.attack import in_words
from sordino.report import numbers
from sordino.report.instruments import instrument_figures
from sordino.report.ledger_table import group_releases
from sordino.report.membership import shown_membership
from sordino.report.pictures import shown
from sordino.report.plots import Series, bar_plot, line_plot
from sordino.report.reading import Run
from sordino.report.templates import rendered
from sordino.shown import up

RELATIONS = {
    "add-remove": "one {unit} is added to the data or removed from it",
    "replace-one": "one {unit} is replaced by another",
}


@dataclass(frozen=True)
class Plot:
    """A plot, and its numbers."""

    heading: str
    svg: Markup
    columns: tuple[str, str]
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Verdict:
    """A finding, marked "good", "bad" or "open"."""

    mark: str
    title: str
    text: str


def render(run: Run) -> str:
    """The report of a run.

    Args:
        run: The files of the run.

    Returns:
        The page as a string of HTML.
    """
    guarantee = _guarantee(run.result) | {"delta": run.header.get("delta", run.result.get("delta"))}
    protected = str(run.header.get("unit", "record"))
    return rendered(
        "page.html",
        run=run,
        result=run.result,
        guarantee=guarantee,
        promise=_promise(run),
        corrected=_corrected(run),
        unit=_unit(run),
        sentence=str(guarantee.get("sentence") or "").partition(" It assumes:")[0],  # assumptions have their own table
        ledger_relations=" and ".join(sorted({str(e["relation"]) for e in run.entries if e.get("relation")})),
        relation_words=relation_in_words(str(guarantee.get("relation")), protected),
        protected=protected,
        secure=_is_secure(run, guarantee),
        assumptions=_assumptions(guarantee),
        ledger=group_releases(run.entries),
        releases=sum(1 for entry in run.entries if entry.get("kind", "release") == "release"),
        verdicts=[_ledger_verdict(run), _audit_verdict(run.audit), *_adopted(run), *_skipped(run.result)],
        plots=_plots(run),
        instruments=instrument_figures(run.metrics),
        read_private=_read_private(run.recipe),
        histogram=_histogram(run.histogram),
        pictures=shown(run.pictures),
        membership=shown_membership(run.membership),
        environment=_flat(run.result.get("environment")),
    )


def relation_in_words(relation: str, unit: str) -> str:
    """Which datasets are neighbours; empty if the relation is unknown."""
    return RELATIONS.get(relation, "").format(unit=unit)


def unit_in_words(plan: Mapping[str, Any]) -> str:
    """Whose contribution the plan (as its to_dict()) protects, whatever the owner declares."""
    if plan.get("unit") != "user":
        return "one record of the dataset"
    found = "one user of the dataset with all their rows"
    for key, part in (("rows_per_user", "a step"), ("examples_per_user", "the training")):
        if plan.get(key) is not None:
            found += f", of which at most {plan[key]} take part in {part}"
    return found


def _unit(run: Run) -> str:
    """Whose contribution is protected, and what that is in the owner's words."""
    declared = run.declaration.get("unit")
    return unit_in_words(run.header) + (f"; declared: {declared}" if declared else " (the recipe declares no unit)")


def _promise(run: Run) -> str:
    """The guarantee in words: an upper bound on any attack on one record."""
    if run.attack is None:
        return ""
    return in_words(run.attack, str(run.header.get("unit", "record")))


def _corrected(run: Run) -> str:
    """Why the headline is not the ε in result.json; empty if it is."""
    stated, shown = run.result.get("epsilon"), run.epsilon
    if isinstance(run.recomputed, str) or not _number(stated) or not _number(shown):
        return ""
    assert stated is not None
    if abs(run.recomputed - stated) <= 1e-6 * max(abs(stated), abs(run.recomputed)):
        return ""
    return (
        f"result.json states ε = {numbers.epsilon(stated)}, but the ledger gives ε = "
        f"{numbers.epsilon(run.recomputed)}: the larger one is shown"
    )


def _guarantee(result: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the guarantee, from result.json's `guarantee` object or its top level."""
    nested = result.get("guarantee")
    fields = {key: value for key, value in result.items() if key != "guarantee"}
    if isinstance(nested, str):
        return {**fields, "sentence": nested}
    if isinstance(nested, Mapping):
        inner = nested.get("dict") or nested.get("value") or {}
        return {**fields, **(inner if isinstance(inner, Mapping) else {}), **nested}
    return fields


def _assumptions(guarantee: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(assumption, how it was checked)."""
    rows = []
    for item in guarantee.get("assumptions") or ():
        if isinstance(item, Mapping):
            how = item.get("checked") or item.get("check") or item.get("how") or "not stated"
            rows.append((str(item.get("text", "")), str(how)))
        elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
            rows.append((str(item[0]), str(item[1])))
        else:
            rows.append((str(item), "not stated"))
    return rows


def _is_secure(run: Run, guarantee: Mapping[str, Any]) -> bool:
    """False if any file says that the noise can be reproduced."""
    stated = [guarantee.get("secure"), *(entry.get("secure") for entry in run.entries)]
    return all(value is not False for value in stated) and run.header.get("insecure_seed") is None


def _read_private(recipe: str) -> bool:
    """Whether the recipe's instruments read private records; their readings are never on this page."""
    try:
        section = tomllib.loads(recipe).get("instruments", {})
    except tomllib.TOMLDecodeError:
        return False
    return isinstance(section, Mapping) and section.get("not_private") is True


def _ledger_verdict(run: Run) -> Verdict:
    claimed, found = run.result.get("epsilon"), run.recomputed
    if isinstance(found, str):
        return Verdict("open", "ε could not be recomputed from the ledger", found)
    if not isinstance(claimed, int | float):
        return Verdict("open", "result.json states no ε", f"Ledger alone: ε = {up(found, 6)}.")
    values = f"Ledger alone: ε = {up(found, 6)}; plan: ε = {up(claimed, 6)}"
    if found > claimed * (1 + 1e-6) + 1e-9:
        return Verdict("bad", "The ledger contains more than the plan allows", f"{values}. Do not rely on this run.")
    header_delta = run.header.get("delta")
    if header_delta is not None and header_delta != run.result.get("delta"):
        return Verdict(
            "bad", "The result states another δ than the ledger's plan", f"{values}. Do not rely on this run."
        )
    if found < claimed * (1 - 1e-3) - 1e-9:
        return Verdict("open", "The ledger contains less than the plan", f"{values}. The plan's ε is an upper bound.")
    return Verdict("good", "The ledger agrees with the plan", f"{values}.")


def _adopted(run: Run) -> list[Verdict]:
    """Continued copies: only the owner can say that no other copy was continued."""
    if not run.adopted:
        return []
    text = "The owner states that no other copy of the directory was continued; otherwise their releases add to this ε."
    return [Verdict("open", f"The run was copied or moved, and adopted, {numbers.plain(run.adopted)} times", text)]


def _skipped(result: Mapping[str, Any]) -> list[Verdict]:
    """Steps whose updates were lost; they count in ε, but did not change the model."""
    count = result.get("skipped_steps")
    if not _number(count) or not count:
        return []
    title = f"{numbers.plain(count)} of {numbers.plain(result.get('steps'))} steps were skipped"
    text = "They were released and count in ε, but their updates were lost when the run was interrupted."
    return [Verdict("open", title, text)]


def _audit_verdict(audit: Mapping[str, Any] | None) -> Verdict:
    if audit is None:
        return Verdict("open", "Not audited", "This run has no audit.json: the command sordino audit makes one.")
    lower, claimed = numbers.lower(audit.get("epsilon_lower")), numbers.epsilon(audit.get("epsilon_claimed"))
    confidence = numbers.plain(100 * audit["confidence"]) if _number(audit.get("confidence")) else "unknown"
    steps = numbers.plain(audit.get("steps"))
    values = f"ε ≥ {lower} at {confidence} % confidence; for the {steps} steps audited, ε ≤ {claimed} is claimed"
    if audit.get("noise_fits") is False:
        return Verdict("bad", "The noise is not what the plan states", f"{values}. Do not rely on this run.")
    if audit.get("holds") is True:
        return Verdict("good", "The audit does not contradict the claim", f"{values}.")
    return Verdict("bad", "The audit breaks the claim", f"{values}. Do not rely on this run.")


def _plots(run: Run) -> list[Plot]:
    plots = []
    steps, values = _series(run.metrics, "epsilon")
    if steps:
        end = f"ε = {numbers.epsilon(values[-1])} after step {numbers.plain(steps[-1])}"
        series = Series("Privacy spent over the steps", f"It rises to {end}.", "step", "privacy")
        rows = tuple((numbers.plain(s), numbers.epsilon(v)) for s, v in zip(steps, values, strict=True))
        # Only computed points: a line from 0 to the first one would not be the ε of any step.
        svg = line_plot(steps, values, series)
        plots.append(Plot("Privacy spent, ε", svg, ("step", "ε"), rows))
    steps, values = _series(run.metrics, "test_accuracy")
    if steps:
        noise_free = run.result.get("noise_free_accuracy")
        level = None
        if noise_free is not None and _number(noise_free):
            level = (float(noise_free), f"without noise: {numbers.percent(noise_free)}")
        first, last = numbers.percent(values[0]), numbers.percent(values[-1])
        series = Series(
            "Test accuracy over the steps", f"It goes from {first} to {last}, at best {numbers.percent(max(values))}.",
            "step", "accuracy", percent=True, reference=level,
        )  # fmt: skip
        rows = tuple((numbers.plain(s), numbers.percent(v)) for s, v in zip(steps, values, strict=True))
        plots.append(Plot("Test accuracy, %", line_plot(steps, values, series), ("step", "test accuracy"), rows))
    steps, values = _series(run.metrics, "test_error")
    if steps:
        first, last = numbers.plain(values[0], 4), numbers.plain(values[-1], 4)
        series = Series(
            "Test error over the steps", f"It goes from {first} to {last}, at best {numbers.plain(min(values), 4)}.",
            "step", "accuracy",
        )  # fmt: skip
        rows = tuple((numbers.plain(s), numbers.plain(v, 4)) for s, v in zip(steps, values, strict=True))
        plots.append(
            Plot("Test error, mean square per pixel", line_plot(steps, values, series), ("step", "error"), rows)
        )
    return plots


def _histogram(histogram: Mapping[str, Any] | None) -> Plot | None:
    """The released histogram: `edges` are the lower edges of the bins, the last of which is open."""
    if histogram is None:
        return None
    edges, shares = histogram.get("edges"), histogram.get("shares")
    if not (isinstance(edges, list) and isinstance(shares, list) and len(edges) == len(shares) and shares):
        return None
    if not all(_number(value) for value in [*edges, *shares]):
        return None
    most = max(range(len(shares)), key=shares.__getitem__)
    names = [f"{numbers.plain(low, 4)} to {numbers.plain(high, 4)}" for low, high in pairwise(edges)]
    names.append(f"{numbers.plain(edges[-1], 4)} and more")
    series = Series(
        "Record norms", f"{len(shares)} bins of noisy shares, the largest from {names[most]}.",
        "norm of a record's gradient before clipping", "norms", percent=True,
    )  # fmt: skip
    svg = bar_plot([numbers.plain(edge, 4) for edge in edges], shares, series)
    rows = tuple(zip(names, (numbers.percent(share) for share in shares), strict=True))
    return Plot("Share of the records by gradient norm, %", svg, ("norm", "noisy share"), rows)


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """The steps at which `key` was measured, and its values; values that are not finite are left out."""
    rows = [row for row in metrics if _number(row.get(key)) and _number(row.get("step"))]
    return [float(row["step"]) for row in rows], [float(row[key]) for row in rows]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted names and texts."""
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}{key}.")]
    if value is None and not prefix:
        return []
    return [(prefix.removesuffix("."), str(value))]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
