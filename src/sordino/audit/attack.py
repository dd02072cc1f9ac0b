"""All attacks of this package against one recipe, whatever its method.

| check         | what is tried                                                                                      |
|---------------|----------------------------------------------------------------------------------------------------|
| neighbours    | made-up records through the whole pipeline: no release changes by more than the accountant assumes |
| outputs       | other records with the same releases: no output of the run and no argument of a release            |
|               | may change                                                                                         |
| noise         | the noise of every release is what the plan states, independent over steps, coordinates and runs   |
| ledger        | entries are written before noise is drawn; values lie on a public grid; the noise is the plan's    |
| sampling      | batches follow the distribution that is accounted                                                  |
| participation | a record changes exactly those steps whose batch contains it                                       |
| resume        | a run that is killed and resumed makes no step twice and repeats no noise                          |
| contraction   | if a guarantee relies on it: releases are forced to other values, whose change must shrink         |
| one run       | the audit with canaries: a lower bound on ε that must not exceed the claim                         |

False alarms: the tests of noise and sampling have level 10⁻⁶, the audit 5 %; the others are exact. If nothing is
found, nothing is proven; each finding is a counter-example.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sordino.audit import attack_noise
from sordino.audit.neighbours import Record, at, candidates, mutated, with_last
from sordino.audit.noise_check import LEVEL
from sordino.audit.one_run import AuditResult
from sordino.audit.pipeline import Trace, differing_arguments, leaked, moved, short, small, trace
from sordino.audit.sampling_check import sampling_findings
from sordino.audit.tap import Call, Cut, watched
from sordino.errors import ClaimBroken, InputError, Refused, SordinoError
from sordino.shown import down, up
from sordino.split import Split

if TYPE_CHECKING:
    from sordino.runs.work import Work

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checked:
    """One kind of attack: the number of trials, and the findings."""

    name: str
    tried: int
    found: tuple[str, ...]
    detail: str
    seconds: float


@dataclass(frozen=True)
class AttackResult:
    """What an attack on a recipe found. `holds`: it found nothing."""

    name: str
    method: str
    epsilon_claimed: float
    delta: float
    relation: str
    checks: tuple[Checked, ...]
    audit: AuditResult | None

    @property
    def found(self) -> tuple[str, ...]:
        return tuple(f"{check.name}: {text}" for check in self.checks for text in check.found)

    @property
    def holds(self) -> bool:
        return not self.found

    def to_dict(self) -> dict[str, Any]:
        """The fields, the findings, and the audit, as JSON-serialisable values."""
        plain = {key: value for key, value in asdict(self).items() if key != "audit"}
        audit = None if self.audit is None else self.audit.to_dict()
        return plain | {"holds": self.holds, "found": list(self.found), "audit": audit}

    def check(self) -> AttackResult:
        """Returns itself; raises ClaimBroken (exit code 3) if something was found."""
        if self.found:
            raise ClaimBroken(f"the attack found {len(self.found)} violation(s): " + "; ".join(self.found[:5]))
        return self


def attack(
    work: Work,
    *,
    name: str = "",
    quick: bool = False,
    seed: int = 0,
    only: Sequence[str] = (),
    first: bool = False,
    say: Say | None = None,
) -> AttackResult:
    """Runs all checks against a recipe.

    Args:
        work: the recipe's data, model and plan (`sordino.runs.prepared.work_of`).
        name: shown with the result.
        quick: fewer records and steps: takes seconds.
        seed: of the search and of the audit's coins.
        only: names of checks; empty: all of them.
        first: stop at the first check that finds something.
        say: called with a line of progress.

    Returns:
        What was found; `check()` raises ClaimBroken if it is not empty.

    Raises:
        InputError: `only` names a check that does not exist.
    """
    wrong = [check for check in only if check not in CHECKS]
    if wrong:
        raise InputError(f"unknown check {wrong[0]!r}: there are {', '.join(CHECKS)}")
    checked: list[Checked] = []
    audits: list[AuditResult] = []
    for title, made in CHECKS.items():
        if only and title not in only:
            continue
        if say is not None:
            say(f"{title} …")
        started = time.monotonic()
        tried, found, detail = _guarded(made, work, quick, seed, audits)
        checked.append(Checked(title, tried, tuple(found), detail, round(time.monotonic() - started, 1)))
        if say is not None:
            say(f"{title}: {'; '.join(found) or 'nothing found'} ({detail})")
        if found and first:
            break
    guarantee = work.plan.guarantee()
    return AttackResult(
        name, work.plan.method.name, guarantee.epsilon, guarantee.delta, guarantee.relation, tuple(checked),
        audits[0] if audits else None,
    )  # fmt: skip


Outcome = tuple[int, list[str], str]


def _guarded(made: Callable[..., Outcome], work: Work, quick: bool, seed: int, audits: list[AuditResult]) -> Outcome:
    """A run that fails one of the library's own checks counts as a finding; a refusal does not."""
    try:
        return made(work, quick, seed, audits)
    except (Refused, InputError) as error:
        return 0, [], f"not applicable: {error}"
    except RuntimeError as error:  # raised by torch: rows that the network does not accept
        return 0, [], f"not applicable: {error}"
    except SordinoError as error:
        return 1, [f"the run fails: {error}"], "stopped by a check of the library itself"


def neighbours(work: Work, quick: bool, seed: int, audits: list[AuditResult]) -> Outcome:
    """Tries made-up records, then searches from the one with the largest effect; for several numbers of records."""
    wrong: list[str] = []
    tried, refused, worst = 0, 0, 0.0
    for records, dtype in _sizes(work, quick):
        count, lost, share, found = _neighbours_of(work, records, dtype, quick, seed)
        tried, refused, worst, wrong = tried + count, refused + lost, max(worst, share), wrong + found
        if wrong:
            break
    return tried, wrong[:3], f"{tried} pairs, {refused} refused; the largest change is {worst:.3f} of what is allowed"


def _sizes(work: Work, quick: bool) -> list[tuple[int, torch.dtype | None]]:
    """(number of records, dtype of the rows; None: their own) of the datasets to try.

    One number equals the number of classes and one a dimension of the data: an engine may confuse equal sizes.
    """
    wide = work.dataset.train.inputs.is_floating_point()
    classes, width = work.dataset.classes, int(work.dataset.train.inputs.shape[-1])
    double: list[tuple[int, torch.dtype | None]] = [(6, torch.float64)] if wide else []
    if quick:
        return [(classes, None), *double]
    return [(5, None), *double, (classes, None), *([(width, None)] if width <= 64 else []), (2, None)]


def _neighbours_of(
    work: Work, records: int, dtype: torch.dtype | None, quick: bool, seed: int
) -> tuple[int, int, float, list[str]]:
    """(pairs, refused, largest share, findings) of one size."""
    try:
        base = small(work, records, 2 if quick else 3, dtype)
        split = base.dataset.train
        removed = base.plan.relation == "add-remove"
        less = Split(split.inputs[:-1], split.targets[:-1])
        first = trace(base.changed(replace(base.plan, records=records), base.dataset), less if removed else split)
    except (Refused, InputError, RuntimeError):
        # Only unusual sizes and dtypes may be refused. The recipe's own rows must run, so their error is not hidden.
        if dtype is None and records == work.dataset.classes:
            raise
        return 0, 1, 0.0, []
    pairs = _Pairs(base, first, removed)
    made = candidates(split, base.dataset.classes, quick=quick, seed=seed)
    if quick and dtype is not None:
        made = [record for record in made if record.kind in ("tiny", "huge", "one NaN")]
    for record in made:
        pairs.attempt(record)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(0 if quick or dtype is not None else 24):
        if pairs.best is not None:
            pairs.attempt(mutated(pairs.best, generator))
    return pairs.tried, pairs.refused, pairs.worst, pairs.wrong


class _Pairs:
    """Neighbouring datasets against one trace; under replace-one any two candidates are neighbours."""

    def __init__(self, base: Work, first: Trace, removed: bool) -> None:
        self.base, self.first, self.removed = base, first, removed
        self.seen: list[tuple[Record | None, Trace]] = [(None, first)]
        self.tried, self.refused, self.worst = 0, 0, 0.0
        self.wrong: list[str] = []
        self.best: Record | None = None

    def attempt(self, record: Record) -> None:
        try:
            run = trace(self.base, with_last(self.base.dataset.train, record), self.first.calls)
        except (Refused, InputError, RuntimeError):
            self.refused += 1
            return
        for other, earlier in self.seen if not self.removed else self.seen[:1]:
            self._compare(record, run, other, earlier)
        if not self.removed and len(self.seen) < 12:
            self.seen.append((record, run))

    def _compare(self, record: Record, run: Trace, other: Record | None, earlier: Trace) -> None:
        self.tried += 1
        texts = (differing_arguments(earlier, run), leaked(earlier, run))
        self.wrong += [f"{record.kind}: {text}" for text in texts if text is not None]
        for call, share in moved(earlier, run):
            if not share <= 1.0 + 1e-9:
                self.wrong.append(
                    f"a record ({record.kind}) changes {call.purpose!r}, step {call.step}, by {share:.4g} times what "
                    f"the accountant assumes under {call.relation}"
                )
            if share > self.worst or self.best is None:
                self.worst, self.best = max(self.worst, share), record


def outputs(work: Work, quick: bool, seed: int, audits: list[AuditResult]) -> Outcome:
    """Trains on other records with the same releases: no output may change."""
    base = small(work, max(4, work.dataset.classes), 2 if quick else 4)
    split = base.dataset.train
    first = trace(base)
    others = [Split(split.inputs.flip(0), split.targets.flip(0)), Split(torch.zeros_like(split.inputs), split.targets)]
    wrong: list[str] = []
    for other in others:
        run = trace(base, other, first.calls)
        wrong += [text for text in (differing_arguments(first, run), leaked(first, run)) if text is not None]
    return (
        len(others),
        wrong,
        f"{len(first.outputs)} outputs, {len(first.calls)} releases, {len(others)} other datasets",
    )


def participation(work: Work, quick: bool, seed: int, audits: list[AuditResult]) -> Outcome:
    """Replaces records at several indices, in a dataset of the plan's size: only steps that draw them may change."""
    base = short(work, 4 if quick else 8, seed=seed + 11)
    first, count = trace(base), len(base.dataset.train)
    record = next(r for r in candidates(base.dataset.train, base.dataset.classes, quick=True) if r.kind != "zeros")
    some = [int(batch[len(batch) // 2]) for batch in first.batches.values() if len(batch)]
    wrong, drawn, places = [], 0, list(dict.fromkeys([0, *some[:1], count - 1, *([] if quick else some[1:3])]))
    for index in places:
        run = trace(base, at(base.dataset.train, index, record), first.calls)
        for call, share in moved(first, run):
            batch = first.batches.get(call.step)
            if call.purpose != base.plan.method.purpose or batch is None:
                continue
            inside = bool((batch == index).any())
            drawn += inside
            if share > 0 and not inside:
                wrong.append(f"record {index} changes step {call.step}, whose batch does not contain it")
    return len(places), wrong[:3], f"{len(places)} records, {len(first.batches)} steps, drawn {drawn} times"


def resume(work: Work, quick: bool, seed: int, audits: list[AuditResult]) -> Outcome:
    """Kills a run with secret noise after its second step and resumes it: no step may be released twice."""
    base = short(work, 4 if quick else 6, seed=None)
    calls: list[Call] = []
    with tempfile.TemporaryDirectory(prefix="sordino-attack-") as folder:
        out = Path(folder) / "run"
        out.mkdir()
        for again in (False, True):
            with watched(stop_after=None if again else 2 + sum(s.count for s in base.plan.statistics)) as seen:
                try:
                    base.train(out, resume=again)
                except Cut:
                    pass
                except (Refused, InputError) as error:
                    return 1, [], f"refused, as required if a key or an iterate would have to be kept: {error}"[:150]
                finally:
                    calls += seen.calls
    keys = [(call.purpose, call.step) for call in calls]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    wrong = [f"{purpose!r}, step {step}, was released twice with secret noise" for purpose, step in twice]
    tests, _ = attack_noise.tests(calls)
    wrong += attack_noise.wrong(tests, "over a resume")
    return 1, wrong[:3], f"{len(calls)} releases over a kill and a resume"


def contraction(work: Work, quick: bool, seed: int, audits: list[AuditResult]) -> Outcome:
    """Forces releases to other values: if the guarantee relies on contraction, a change must shrink as claimed."""
    if work.plan.method.contraction(replace(work.plan, steps=2), 1) is None:
        return 0, [], "not applicable: the guarantee does not rely on contraction"
    base = small(work, max(4, work.dataset.classes), 2)
    split, purpose = base.dataset.train, base.plan.method.purpose
    generator = torch.Generator().manual_seed(seed)
    wrong, tried, worst = [], 0, 0.0
    for records in (split, Split(torch.zeros_like(split.inputs), split.targets)):
        first = trace(base, records)
        steps = [place for place, call in enumerate(first.calls) if call.purpose == purpose]
        here, after = steps[0], steps[1]
        allowed = base.plan.method.contraction(base.plan, first.calls[after].step)
        for size in (1e-3, 1.0, 1e3):
            changed = list(first.calls)
            noises = {
                name: size
                * first.calls[here].scale
                * torch.randn(value.shape, generator=generator, dtype=torch.float64)
                for name, value in first.calls[here].returned.items()
            }
            moved_by = {
                name: value + noises[name].to(value.dtype) for name, value in first.calls[here].returned.items()
            }
            changed[here] = replace(first.calls[here], returned=moved_by)
            run = trace(base, records, changed)
            change = float(torch.linalg.vector_norm(changed[here].observed - first.calls[here].observed))
            seen = float(torch.linalg.vector_norm(run.calls[after].values - first.calls[after].values))
            tried, worst = tried + 1, max(worst, seen / change / (allowed or 1.0))
            if allowed is not None and seen > change * allowed * (1 + 1e-6) + 1e-9:
                wrong.append(f"a change of the iterate grows by {seen / change:.6f}; the proof assumes {allowed:.6f}")
    return tried, wrong[:2], f"{tried} changes of the iterate; the largest is {worst:.4f} of what the proof assumes"


def sampling(work: Work, quick: bool, seed: int, audits: list[AuditResult]) -> Outcome:
    """Tests many batches against the distribution that the accountant assumes."""
    found, wrong = sampling_findings(work.plan, steps=300 if quick else 600)
    return len(found) or 1, wrong, ", ".join(f"{name} p = {p:.2g}" for name, p in found.items()) or "checked exactly"


def one_run(work: Work, quick: bool, seed: int, audits: list[AuditResult]) -> Outcome:
    """Runs the method's own audit, or the audit with canaries among the records."""
    steps = min(work.plan.steps, 12 if quick else 40)
    result = work.audit(seed=seed, steps=steps)
    audits.append(result)
    wrong = [] if result.holds and result.noise_fits else [result.sentence]
    return (
        result.canaries,
        wrong,
        f"ε ≥ {down(result.epsilon_lower)} of {up(result.epsilon_claimed)} in {result.steps} steps",
    )


CHECKS: dict[str, Callable[[Work, bool, int, list[AuditResult]], Outcome]] = {
    "neighbours": neighbours,
    "outputs": outputs,
    "noise": attack_noise.noise,
    "ledger": attack_noise.ledger,
    "sampling": sampling,
    "participation": participation,
    "resume": resume,
    "contraction": contraction,
    "one run": one_run,
}

__all__ = ["CHECKS", "LEVEL", "AttackResult", "Checked", "attack"]
