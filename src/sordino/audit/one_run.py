"""The audit: one short private training with canaries, a lower bound on ε, and whether it contradicts the claim.

Formal guarantee. If the mechanism that is run is the plan's, `holds` is False with probability at most
1 − confidence, whatever the model, the data and the scores are. The bound `epsilon_lower_any` needs less: that what is
run has the privacy profile that the plan claims.
The canaries are made up and need no protection. The real records participate, however: what the result reveals about
them is post-processing of another private run (with Poisson sampling or a partition it is nothing, because the
real sums are subtracted). So audit with public records, or add the audit's ε to the total, if that matters.

The converse does not hold: an audit that finds nothing proves nothing. It detects noise that is too small
and sampling that is too frequent; it does not detect clipping that fails on real records, because canaries are
clipped already. `sordino.audit.neighbouring` tests that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sordino import checks
from sordino.audit.bounds import Curve, check_confidence, one_run_epsilon
from sordino.audit.canaries import Canaries, CanaryGradients, make_canaries, most_canaries
from sordino.audit.claims import HALVINGS, claim_family, epsilon_at, quick_epsilon_at, with_noise
from sordino.audit.guesses import Chosen, Family, OrderedGuesses, choose_guesses, least_noise
from sordino.audit.noise_check import LEVEL
from sordino.audit.scores import Scorer, StepScorer, scorer_of
from sordino.audit.updates import Trail, audited_update
from sordino.errors import ClaimBroken, InputError
from sordino.files import json_bytes, make_folder, write_atomically
from sordino.plan import Plan
from sordino.randomness import RandomSource
from sordino.records.gradients import GradientSum, plan_gradients
from sordino.records.reading import count_records
from sordino.release.ledger import Ledger
from sordino.sampling import Poisson
from sordino.shown import down, up
from sordino.training.steps import DEFAULT_CHUNK, private_steps

DEFAULT_CANARIES = 5000
BOUND = "f-DP in one run (Mahloujifar et al. 2024), against the claim's privacy profile"
ORDERED = "order statistics of independent canaries, against the claim's privacy profile"


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit. `epsilon_lower` is at `confidence`; `holds` means that it does not exceed the claim.

    `epsilon_lower` is the ε of the largest claim of the plan's own kind (the plan with another noise multiplier) that
    is rejected by one of two tests whose levels add up to 1 − confidence (`bound` names the test):

    * f-DP in one run, valid for every mechanism with the claim's privacy profile: `epsilon_lower_any`;
    * order statistics, if the plan's own mechanism makes canaries independent, at the level 10⁻⁴.

    These are not part of the verdict: `epsilon_lower_independent`, what order statistics alone show at `confidence`
    (above the truth in one audit of twenty if that is 0.95), and `epsilon_lower_point`, the bound of Steinke et al. for
    (ε, δ)-DP alone, which assumes nothing about the shape of the mechanism and is weaker.
    """

    epsilon_lower: float
    epsilon_claimed: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    steps: int
    relation: str
    sampler: str
    holds: bool
    bound: str
    epsilon_lower_point: float
    epsilon_lower_any: float
    epsilon_lower_independent: float | None = None  # None: canaries are not independent
    # p-value of the hypothesis that the noise is what the plan states; None if it has no uniform part
    noise_p_value: float | None = None

    @property
    def noise_fits(self) -> bool:
        return self.noise_p_value is None or self.noise_p_value >= LEVEL

    @property
    def sentence(self) -> str:
        verdict = "does not contradict" if self.holds else "CONTRADICTS"
        noise = "" if self.noise_fits else f" The noise is NOT what the plan states (p = {self.noise_p_value:.2g})."
        return (
            f"The audit {verdict} the claim: ε ≥ {down(self.epsilon_lower)} at {down(100 * self.confidence)} % "
            f"confidence for mechanisms of this kind; the claim is ε ≤ {up(self.epsilon_claimed)} "
            f"(δ = {up(self.delta)}, {self.relation}). {self.correct} of "
            f"{self.guesses} guesses about {self.canaries} canaries were right after {self.steps} steps with "
            f"{self.sampler} sampling.{noise}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields and the sentence, as JSON-serialisable values."""
        return {**asdict(self), "noise_fits": self.noise_fits, "sentence": self.sentence}

    def check(self) -> AuditResult:
        """Returns itself; raises ClaimBroken if the claim does not hold or the noise is not what the plan states."""
        if not (self.holds and self.noise_fits):
            raise ClaimBroken(
                f"{self.sentence} Do not release models of this plan; look for noise that is too small or "
                "records that are drawn too often."
            )
        return self


def audit_plan(
    plan: Plan,
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: Any,
    *,
    canaries: int | None = None,
    steps: int | None = None,
    lr: float = 0.1,
    confidence: float = 0.95,
    seed: int | None = None,
    noise_scale: float = 1.0,
    width_scale: float = 1.0,
    tamper: Callable[[Plan], Plan] | None = None,
    chunk: int = DEFAULT_CHUNK,
    public: Any = None,
    runs: int = 1,
    rows_per_canary: int | None = None,
    scorer: StepScorer | None = None,
) -> AuditResult:
    """Trains a copy of a model with canaries for some of the plan's steps, and guesses the canaries' coins.

    `noise_scale`, `width_scale` and `tamper` change the run but not the claim: they test the audit, not the plan.

    Args:
        plan: The plan whose claim is tested.
        model: The model; every run trains a copy.
        loss: `loss(outputs, targets)`, one value per row.
        dataset: The real records.
        canaries: The number of canaries of a run; None: 5000, or as many as the model has coordinates for.
        steps: The number of steps; None: all steps of the plan.
        lr: The step size of plain SGD, which is the update unless the plan has its own.
        confidence: The confidence of the bound.
        seed: Makes the audit repeatable, and its noise insecure.
        noise_scale: A factor on the noise.
        width_scale: A factor on the width of uniform noise, if the method adds some; 0: the gap is not enforced.
        tamper: Maps the plan of the run to the plan that is run instead.
        chunk: The largest number of records processed at a time.
        public: Public rows that act before the noise; the update does not use them.
        runs: The number of independent runs, each with its own canaries. Their p-values are combined, which shows more
            than one run with all canaries.
        rows_per_canary: The number of records of a canary; None: as many as a user may have under the plan. More than
            the claim assumes detects users that are counted as rows.
        scorer: Replaces the scores for the plan, for an auditor who suspects another mechanism: the bounds hold for
            every auditor.

    Returns:
        The lower bounds on ε and the verdict.

    Raises:
        InputError: a value is wrong, or does not fit the model or the dataset.
    """
    check_confidence(confidence)
    checks.whole("runs", runs, minimum=1)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    if not shapes:
        raise InputError("the model has no trainable parameter (requires_grad is False for all)")
    count = min(DEFAULT_CANARIES, most_canaries(shapes, plan.clipping)) if canaries is None else canaries
    records = _real_records(plan, count_records(dataset), count)
    rows = checks.whole("rows_per_canary", rows_per_canary or plan.examples_per_user or 1, minimum=1)
    claim = _claim(plan, records, count * rows, steps)
    scorer, family = scorer or scorer_of(claim), claim_family(claim)
    if rows > 1:
        if not isinstance(scorer, Scorer) or not isinstance(plan.sampling, Poisson):
            raise InputError("rows_per_canary requires Poisson sampling and independent noise")
        scorer = replace(scorer, rows=rows)
    # the values of all canaries are equal up to their signs, so those of any run can be used
    like = make_canaries(shapes, plan.clipping, count, plan.relation, RandomSource.seeded(0)).values
    chosen = choose_guesses(scorer, like, claim.steps, count, family, confidence, runs)
    parts: list[Played] = []
    for number in range(runs):
        own = None if seed is None else seed + _APART * number
        source = RandomSource.from_os() if own is None else RandomSource.seeded(own)
        marked = make_canaries(shapes, plan.clipping, count, plan.relation, source, rows)
        noise = with_noise(claim, noise_scale).noise
        run = replace(claim, records=records + len(marked.members), noise=noise, insecure_seed=own)
        copied = copy.deepcopy(model)
        trail = Trail(copied, plan)
        gradient_sum = plan_gradients(plan, copied, loss, dataset, past=trail.present, public=public)
        scores, noise_p_value = play(
            tamper(run) if tamper else run, copied, gradient_sum, marked, scorer, records=records, source=source,
            lr=lr, width_scale=width_scale, chunk=chunk, before_update=trail.keep,
        )  # fmt: skip
        parts.append((scores, marked.coins, noise_p_value))
    found = judge(claim, [(scores, coins) for scores, coins, _ in parts], chosen, confidence, family)
    p_values = [part[2] for part in parts if part[2] is not None]
    return replace(found, noise_p_value=min(1.0, runs * min(p_values)) if p_values else None)


Played = tuple[Tensor, Tensor, float | None]
"""Scores, coins, and the p-value of the noise, of one run."""

_APART = 1_000_003  # the difference between the seeds of an audit's runs


def run_audit(
    plan: Plan, model: nn.Module, loss: Callable[..., Tensor], dataset: Any, *, out: Path | None = None, **options: Any
) -> AuditResult:
    """`audit_plan`, with a file and an exception.

    Args:
        plan: The plan whose claim is tested.
        model: The model.
        loss: `loss(outputs, targets)`, one value per row.
        dataset: The real records.
        out: A directory; the result is written to its audit.json.
        **options: Further arguments of `audit_plan`.

    Returns:
        The lower bounds on ε and the verdict.

    Raises:
        ClaimBroken: the bound contradicts the claim, or the noise is not what the plan states (exit code 3).
        InputError: as for `audit_plan`.
    """
    result = audit_plan(plan, model, loss, dataset, **options)
    if out is not None:
        write_audit(result, out)
    return result.check()


def write_audit(result: AuditResult, out: Path | str) -> Path:
    """Writes a result to audit.json atomically; a report of the directory then shows it.

    Args:
        result: The result of an audit.
        out: The directory.

    Returns:
        The path of the file.
    """
    path = Path(out) / "audit.json"
    make_folder(path.parent)
    write_atomically(path, json_bytes(result.to_dict()))
    return path


def play(
    plan: Plan,
    model: nn.Module,
    gradient_sum: GradientSum,
    canaries: Canaries,
    scorer: StepScorer,
    *,
    records: int,
    source: RandomSource,
    lr: float,
    width_scale: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
    before_update: Callable[[], None] = lambda: None,
) -> tuple[Tensor, float | None]:
    """Runs the plan, with its own releases, with canaries among the records.

    Returns:
        The score of each canary and, if the noise has a uniform part, the p-value of the test of the noise.
    """
    drawn_rows = plan.examples_per_user is not None
    # the unit of privacy that a canary represents
    unit = ("row", plan.examples_per_user) if drawn_rows else (plan.unit, None)
    wrapped = CanaryGradients(gradient_sum, canaries, records, silent=not scorer.knows_sum, protects=unit)
    noise = scorer.noise_check()
    plan, update = audited_update(plan, model, lr, width_scale)
    total = torch.zeros((), dtype=torch.float64)
    with Ledger.open(None, plan.to_dict()) as ledger:
        steps = private_steps(
            plan, wrapped, records=plan.records, source=source, ledger=ledger, chunk=chunk, widths=update.widths
        )
        for private in steps:
            observed = canaries.flat(private.gradients) * plan.divisor
            if scorer.knows_sum:
                observed -= canaries.flat(wrapped.real)
            drawn = None
            if scorer.knows_draws:
                drawn = torch.zeros(len(canaries), dtype=torch.bool)
                drawn[wrapped.drawn] = True
            gaps = canaries.flat(update.gaps(private.step))
            at, step = canaries.coordinates, private.step
            total = total + scorer.step(observed[at], canaries.values, drawn, gaps[at], step)
            if noise is not None:
                coordinates, values = canaries.contribution(wrapped.drawn)
                observed[coordinates] -= values
                noise.add(observed, scorer.widths(gaps, step))
            before_update()
            update.apply(private)
    return scorer.final(total), noise.p_value() if noise is not None else None


def judge(
    claim: Plan,
    runs: Sequence[tuple[Tensor, Tensor]],
    chosen: Chosen,
    confidence: float,
    family: Family | None = None,
) -> AuditResult:
    """The verdict on a claim from (scores, coins) of each run; `chosen` must not depend on them."""
    family = family or claim_family(claim)
    each = len(runs[0][1])
    canaries, level = len(runs) * each, 1.0 - confidence
    strict, apart = chosen.levels(confidence)
    guesses = chosen.any
    right = [guesses.correct(scores, coins) for scores, coins in runs]
    correct, total, bound = sum(right), len(runs) * guesses.total, BOUND
    point = one_run_epsilon(correct, total, canaries, claim.delta, confidence)
    least = strictest = least_noise(lambda curve: guesses.rejects(curve, right, each, strict), family, HALVINGS)
    independent: float | None = None
    if chosen.ordered is not None:
        surest = chosen.ordered
        found = surest.correct(torch.cat([scores for scores, _ in runs]), torch.cat([coins for _, coins in runs]))
        shown, sure = (
            least_noise(partial(_too_many, surest, found, canaries, at), family, HALVINGS) for at in (level, apart)
        )
        independent = quick_epsilon_at(claim, shown)
        if sure < least:
            least, correct, total, bound = sure, found, surest.total, ORDERED
    lower = epsilon_at(claim, least)
    claimed = claim.guarantee().epsilon
    return AuditResult(
        epsilon_lower=lower,
        epsilon_claimed=claimed,
        delta=claim.delta,
        confidence=confidence,
        canaries=canaries,
        guesses=total,
        correct=correct,
        steps=claim.steps,
        relation=claim.relation,
        sampler=claim.sampling.name,
        holds=lower <= claimed,
        bound=bound,
        epsilon_lower_point=point,
        epsilon_lower_any=lower if strictest == least else quick_epsilon_at(claim, strictest),
        epsilon_lower_independent=independent,
    )


def _too_many(guesses: OrderedGuesses, right: int, canaries: int, level: float, curve: Curve) -> bool:
    return guesses.rejects(curve, [right], canaries, level)


def _real_records(plan: Plan, available: int, canaries: int) -> int:
    """The number of real records that participate. Under replace-one the canaries replace the last ones."""
    if plan.relation == "add-remove":
        return available
    if available != plan.records:
        raise InputError(f"the plan is for {plan.records} records but the dataset has {available}")
    if canaries >= available:
        raise InputError(
            f"canaries = {canaries}: under replace-one they replace records, and there are only {available}"
        )
    return available - canaries


def _claim(plan: Plan, records: int, canaries: int, steps: int | None) -> Plan:
    """The claim about the audited part: these steps, no statistics, and enough records for every canary."""
    if steps is not None and not 1 <= steps <= plan.steps:
        raise InputError(f"steps = {steps}: the plan has {plan.steps}, and an audit runs some or all of them")
    return replace(plan, records=records + canaries, steps=steps or plan.steps, statistics=(), insecure_seed=None)
