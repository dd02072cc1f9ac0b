"""Checks that a run directory is genuine: every file is compared with the others.

`verify` recomputes ε from the ledger and its header, and compares: the ledger's hashes with each other, its end with
what result and model state, its releases with the plan in its header (steps, sampling, noise, sensitivities against the
clip norm), that plan with the recipe, the result with plan, ledger, metrics and model, every file with its hash, and
the report page with the one that the listed files give. Each disagreement is named. Files that were added after the run
(an audit, a card, notes) have no hash in it: they are named as not covered.

It can't detect a directory in which everything was rewritten consistently. For that the owner signs the run with their
own key (`sordino.runs.signing`), and the reviewer gives the public key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sordino import __version__, report
from sordino.errors import InputError, SordinoError
from sordino.files import require_regular, strict_json
from sordino.plan.core import Plan
from sordino.plan.explained import Explained, missing_step
from sordino.plan.spent import from_ledger
from sordino.release.ledger import read_chain
from sordino.release.ledger_lines import FORMAT, Chain
from sordino.runs import possible
from sordino.runs import stated as agreed
from sordino.runs.alike import alike, near, number, without_none
from sordino.runs.closing import EQUAL, LEDGER, MODEL, REPORT, RESULT, SIGNATURE, file_digest, result_digest
from sordino.runs.recipe import Recipe
from sordino.runs.replan import differences, plan_of_recipe
from sordino.runs.signing import public_key, why_not_signed
from sordino.shown import up
from sordino.training.sealed import read_sealed

T = TypeVar("T")
RECIPE, METRICS = "recipe.toml", "metrics.jsonl"
_FILES = (RECIPE, LEDGER, METRICS, MODEL, RESULT, REPORT)
PUBLISHED = ("histogram.json", "pictures.json", "statistics.safetensors", "projection.safetensors")
"""Files that only some runs have, and that a report or `sordino.load` reads: they must be in the result's list."""
_EXPECTED = (SordinoError, OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError,
             MemoryError)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One comparison: its name, whether the files agree, and what was found (if not, what disagrees)."""

    name: str
    ok: bool
    why: str


@dataclass(frozen=True)
class Verdict:
    """The findings of `verify`. `epsilon` is the ledger's; `stated_epsilon` that of result.json."""

    genuine: bool
    epsilon: float | None
    stated_epsilon: float | None
    delta: float | None
    relation: str | None
    secure: bool | None
    adopted: int
    not_covered: tuple[str, ...]  # files that no hash of the run covers
    checks: tuple[Check, ...]

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON-serialisable values."""
        return {**asdict(self), "checks": [asdict(check) for check in self.checks]}


class _Disagreement(Exception):
    """A check has failed."""


@dataclass
class _Found:
    """What has been read so far. A part that can't be read is None, and the checks that need it then fail."""

    folder: Path
    chain: Chain | None = None
    plan: Plan | None = None
    result: Mapping[str, Any] | None = None
    epsilon: float | None = None

    def ledger(self) -> Chain:
        return _there(self.chain, LEDGER)

    def stated(self) -> Mapping[str, Any]:
        return _there(self.result, RESULT)

    def planned(self) -> Plan:
        return _there(self.plan, f"the plan in {LEDGER}")


def verify(folder: Path, key: Path | None = None, *, only: Collection[str] | None = None) -> Verdict:
    """Checks that a run directory is genuine.

    Args:
        folder: The directory of a finished run.
        key: The owner's public key; then the run must be signed by it.
        only: The names of the checks to make; None: all.

    Returns:
        Every check and what it found, and ε of the ledger.

    Raises:
        InputError: it is not a run directory, or the key can't be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory: give the directory of a run")
    if not any((folder / name).is_file() for name in (RECIPE, LEDGER, RESULT)):
        raise InputError(f"{folder} contains no run: there is neither {RECIPE} nor {LEDGER} nor {RESULT}")
    require_regular(folder)
    trusted = None if key is None else public_key(key)
    found = _Found(folder)
    checks = [_made(name, check, found) for name, check in _CHECKS.items() if only is None or name in only]
    if trusted is not None:
        why = why_not_signed(folder, trusted)
        checks.append(Check("signature", why is None, why or f"{SIGNATURE} is by the given key"))
    chain, stated = found.chain, found.result or {}
    return Verdict(
        genuine=all(check.ok for check in checks),
        epsilon=found.epsilon,
        stated_epsilon=number(stated.get("epsilon")),
        delta=None if found.plan is None else found.plan.delta,
        relation=None if found.plan is None else found.plan.relation,
        secure=None if found.plan is None else found.plan.insecure_seed is None,
        adopted=0 if chain is None else max(0, len(chain.places) - 1),
        not_covered=tuple(possible.not_covered(folder, {*_FILES, SIGNATURE}, stated.get("files"))),
        checks=tuple(checks),
    )


def _made(name: str, check: Callable[[_Found], str], found: _Found) -> Check:
    try:
        return Check(name, True, check(found))
    except _Disagreement as error:
        return Check(name, False, str(error))
    except _EXPECTED as error:
        return Check(name, False, f"can't be checked: {error or type(error).__name__}")


def _files(found: _Found) -> str:
    missing = [name for name in _FILES if not (found.folder / name).is_file()]
    if missing:
        raise _Disagreement(f"{', '.join(missing)} missing: the run is not finished, or files were removed")
    return "all there"


def _ledger(found: _Found) -> str:
    found.chain = chain = read_chain(found.folder / LEDGER)
    if chain.format != FORMAT:
        raise _Disagreement("the ledger has format 1, whose lines have no hashes: edits can't be detected")
    if (found.folder / LEDGER).stat().st_size != chain.complete:
        raise _Disagreement(
            "there is something after the ledger's last line, although the run is finished: it was edited"
        )
    return f"{len(chain.entries)} releases, last hash {chain.head.hash[:16]}…"


def _plan(found: _Found) -> str:
    chain = found.ledger()
    found.plan = plan = Plan.from_dict({key: value for key, value in chain.header.items() if key != "kind"})
    return f"{plan.method.name}, {plan.steps} steps, {plan.records} records"


def _result(found: _Found) -> str:
    document = strict_json((found.folder / RESULT).read_text(encoding="utf8"))
    if not isinstance(document, Mapping):
        raise _Disagreement(f"{RESULT} is not a JSON object")
    found.result = document
    return "read"


def _closed(found: _Found) -> str:
    chain, stated = found.ledger(), found.stated().get("ledger")
    if not isinstance(stated, Mapping):
        raise _Disagreement(f"{RESULT} does not state where the ledger ended")
    if {**chain.head.to_dict(), "format": chain.format} != dict(stated):
        raise _Disagreement(
            f"{RESULT} was written after {stated.get('entries')} releases with hash {str(stated.get('hash'))[:16]}…, "
            f"but the ledger has {chain.head.entries} with {chain.head.hash[:16]}…: lines are missing, or it is "
            "another ledger"
        )
    return "the ledger ends where the result says"


def _steps(found: _Found) -> str:
    plan, entries = found.planned(), found.ledger().entries
    Explained(plan, entries)
    _possible(possible.unknown_key(entries, found.result or {}), LEDGER)
    steps = [entry["step"] for entry in entries if entry["purpose"] == plan.method.purpose]
    made = (found.result or {}).get("stopped_at") or plan.steps  # set if a callback ended the run
    if (missing := missing_step(plan, steps, made)) is not None:
        raise _Disagreement(
            f"the ledger has {len(steps)} steps, not 0 to {made - 1} in order: step {missing} is missing or "
            "out of order"
        )
    return f"{len(steps)} steps and {len(entries) - len(steps)} further releases, each explained by the plan"


def _sensitivities(found: _Found) -> str:
    plan = found.planned()
    for entry in found.ledger().entries:
        place = f"step {entry['step']} of {entry['purpose']!r}"
        bound = number(entry.get("sensitivity"))
        if bound is None or not bound > 0:
            raise _Disagreement(f"{place} has the sensitivity {entry.get('sensitivity')!r}")
        if entry["purpose"] != plan.method.purpose:
            continue
        if not near(bound, plan.sensitivity) or entry.get("norm") != plan.clipping.norm:
            raise _Disagreement(
                f"{place} has sensitivity {bound:g} in {entry.get('norm')}, but the plan's clip norm gives "
                f"{plan.sensitivity:g} in {plan.clipping.norm}"
            )
        noise = plan.noise_at(entry["step"])
        if entry.get("mechanism") != noise.name or not alike(entry.get("noise_multiplier"), noise.noise_multiplier):
            raise _Disagreement(
                f"{place} has {entry.get('mechanism')} noise with multiplier {entry.get('noise_multiplier')}, but the "
                f"plan has {noise.name} noise with {noise.noise_multiplier:g}"
            )
        if entry.get("secure") is not (plan.insecure_seed is None):
            raise _Disagreement(f"{place} has secure = {entry.get('secure')}, unlike the plan")
    return f"every step has the plan's noise and its sensitivity, {plan.sensitivity:g} in {plan.clipping.norm}"


def _epsilon(found: _Found) -> str:
    chain, plan = found.ledger(), found.planned()
    found.epsilon = spent = float(from_ledger(chain.header, chain.entries, plan.delta)["epsilon"])
    stated = number(found.stated().get("epsilon"))
    whole = plan.guarantee().epsilon
    if stated is None:
        raise _Disagreement(f"{RESULT} states ε = {found.stated().get('epsilon')!r}, the ledger gives {up(spent, 6)}")
    # A declared statistic that was never released leaves the plan's ε as an upper bound.
    unused = len(chain.entries) < plan.steps + sum(statistic.count for statistic in plan.statistics)
    single = number(found.stated().get(agreed.SINGLE, stated))  # the result of a selection states more
    if single is None or not (near(single, spent) or (unused and near(single, whole) and spent <= whole)):
        raise _Disagreement(f"{RESULT} states ε = {up(stated, 6)}, the ledger gives {up(spent, 6)}")
    if stated < single:
        raise _Disagreement(f"{RESULT} states ε = {up(stated, 6)} of a selection, less than of the run alone")
    more = f"; {up(stated, 6)} of the whole selection is not computed again" * (agreed.SINGLE in found.stated())
    return f"ε = {up(spent, 6)} from the ledger{more}"


def _claim(found: _Found) -> str:
    plan, result = found.planned(), found.stated()
    for key, value in agreed.wanted_result(plan, result).items():
        if not alike(result.get(key), value):
            raise _Disagreement(f"{RESULT} states {key} = {result.get(key)!r}, the ledger's plan {value!r}")
    given = result.get("guarantee")
    if not isinstance(given, Mapping):
        raise _Disagreement(f"{RESULT} has no guarantee")
    for key, value in agreed.wanted_guarantee(plan, result).items():
        if not alike(given.get(key), value):
            raise _Disagreement(f"the guarantee in {RESULT} has a different {key} than the ledger's plan")
    claimed = number(result.get("epsilon")) if agreed.SINGLE in result else None
    claim = f"(ε = {up(claimed or plan.guarantee().epsilon)}, δ = {up(plan.delta)})"
    if claim not in str(given.get("sentence")):  # the other words may be those of another version
        raise _Disagreement(f"the sentence in {RESULT} does not state {claim}, which the ledger's plan gives")
    last, by_recipe = possible.last_row(found.folder / METRICS), not possible.described(found.folder / RECIPE)
    _possible(possible.result(plan, result, last, by_recipe=by_recipe), f"{RESULT} states")
    words = f"; other words, of sordino {v}, were not compared" if (v := agreed.written_by(result)) else ""
    return f"δ, relation, records, noise and the sentence's numbers are those of the ledger's plan{words}"


def _recipe(found: _Found) -> str:
    plan, written = found.planned(), tomllib.loads((found.folder / RECIPE).read_text(encoding="utf8"))
    if possible.described(found.folder / RECIPE):
        if unknown := sorted(written.keys() - set(possible.DESCRIBED)):
            raise _Disagreement(f"{RECIPE} has [{unknown[0]}], which sordino.train does not write")
        if not alike(written.get("plan"), without_none(plan.to_dict())):
            raise _Disagreement(f"the plan in {RECIPE} is not the ledger's")
        return "made by sordino.train, with the ledger's plan"
    recipe = Recipe.read(found.folder / RECIPE, allow_code=True)  # its code is not run
    if other := differences(plan_of_recipe(recipe, plan), plan):
        raise _Disagreement(f"{RECIPE} gives a different plan than the ledger: {other}")
    asked = recipe.privacy.epsilon
    if found.epsilon is not None and asked is not None and found.epsilon > asked * (1 + EQUAL):
        raise _Disagreement(f"{RECIPE} asks for ε = {up(asked)}, but {up(found.epsilon)} was spent")
    run, result = recipe.run, found.stated()
    stated = {"name": run.name, "seed": run.seed} if agreed.SINGLE not in result else {}
    if not run.noise_free:
        stated["noise_free_accuracy"] = None
    for key, value in stated.items():
        if result.get(key) != value:
            raise _Disagreement(f"{RESULT} states {key} = {result.get(key)!r}, but {RECIPE} gives {value!r}")
    return "the recipe gives the ledger's plan"


def _hashes(found: _Found) -> str:
    listed = found.stated().get("files")
    if not isinstance(listed, Mapping) or not {MODEL, RECIPE, METRICS} <= set(listed):
        raise _Disagreement(f"{RESULT} does not list the files of the run")
    added = [name for name in PUBLISHED if name not in listed and (found.folder / name).exists()]
    if added:
        raise _Disagreement(f"{', '.join(added)} was added: {RESULT} does not list it")
    _possible(possible.listed(listed), f"{RESULT} lists")
    for name, digest in listed.items():
        path = found.folder / name
        if not path.is_file():
            raise _Disagreement(f"{name} is missing")
        if file_digest(path) != digest:
            raise _Disagreement(f"{name} is not the file that {RESULT} was written with: its hash differs")
    return f"{len(listed)} files have the hashes that the result lists"


def _model(found: _Found) -> str:
    tensors, about = read_sealed(found.folder / MODEL)
    if "format" not in about:
        raise _Disagreement(f"{MODEL} has no checksum: it was not written at the end of this run")
    if about.get("ledger") != found.ledger().head.to_dict():
        raise _Disagreement(f"{MODEL} was made from another ledger, or the ledger was changed since")
    if about.get("result") != result_digest(found.stated()):
        raise _Disagreement(f"{RESULT} was edited: it is not the one that {MODEL} was written with")
    if (key := agreed.model_differs(about, found.stated())) is not None:
        raise _Disagreement(f"{MODEL} states {key} = {about.get(key)!r}, which is not what {RESULT} states")
    _possible(possible.model(tensors, about, found.stated(), found.plan, found.ledger().entries), MODEL)
    return f"{len(tensors)} tensors, undamaged, made from this ledger and with this result, and stating the same"


def _metrics(found: _Found) -> str:
    plan, result = found.planned(), found.stated()
    lines = (found.folder / METRICS).read_text(encoding="utf8").splitlines()
    rows = [strict_json(line) for line in lines]
    _possible(possible.metrics(rows, selected=agreed.SINGLE in result), METRICS)
    if rows[-1]["step"] != (result.get("stopped_at") or plan.steps):
        raise _Disagreement(f"{METRICS} ends at step {rows[-1]['step']}, which is not the last step of the run")
    last = rows[-1]
    stopped = result.get("stopped_at") is not None  # then the result states the plan's ε, which is larger
    for key in ("test_accuracy", "test_error", *(() if stopped else ("epsilon",))):
        shown = result.get(agreed.SINGLE if key == "epsilon" and agreed.SINGLE in result else key)
        if key in last and (key in result or key != "test_error") and not alike(shown, last[key]):
            raise _Disagreement(f"{RESULT} states {key} = {shown!r}, the last line of {METRICS} {last[key]!r}")
    if (step := agreed.understated_row(plan, rows)) is not None:
        raise _Disagreement(f"{METRICS} states a smaller ε after {step} steps than the plan gives")
    return f"{len(rows)} rows, and the result states the last one"


def _page(found: _Found) -> str:
    page = (found.folder / REPORT).read_bytes()
    run, listed = report.read_run(found.folder), dict(found.stated().get("files") or {})
    run = replace(
        run,
        histogram=run.histogram if "histogram.json" in listed else None,
        pictures=run.pictures if "pictures.json" in listed else None,
    )
    for audit in dict.fromkeys([run.audit is not None, False]):  # made after the run, before or after its page
        for membership in dict.fromkeys([run.membership is not None, False]):
            each = replace(run, audit=run.audit if audit else None, membership=run.membership if membership else None)
            if page == report.render(each).encode():
                later = [name for name, on in (("audit.json", audit), ("membership.json", membership)) if on]
                return "the page is what these files give" + (f"; not covered: {', '.join(later)}" if later else "")
    written_by = dict(found.stated().get("environment") or {}).get("sordino")
    other = f"; it was written by sordino {written_by}, this is {__version__}" if written_by != __version__ else ""
    raise _Disagreement(f"{REPORT} is not what these files give: it or they were edited{other} (`sordino report`)")


_CHECKS: dict[str, Callable[[_Found], str]] = {
    "files": _files,
    "ledger": _ledger,
    "plan": _plan,
    "result": _result,
    "ledger end": _closed,
    "steps": _steps,
    "sensitivities": _sensitivities,
    "epsilon": _epsilon,
    "claim": _claim,
    "recipe": _recipe,
    "hashes": _hashes,
    "model": _model,
    "metrics": _metrics,
    "report": _page,
}


QUICK = ("files", "ledger", "result", "ledger end", "hashes", "model")
"""Checks that do not compute ε."""


def failed(verdict: Verdict) -> Iterator[Check]:
    """The checks that disagree."""
    return (check for check in verdict.checks if not check.ok)


def _possible(why_not: str | None, what: str) -> None:
    if why_not:
        raise _Disagreement(f"{what} {why_not}")


def _there(value: T | None, what: str) -> T:
    if value is None:
        raise _Disagreement(f"{what} could not be read")
    return value
