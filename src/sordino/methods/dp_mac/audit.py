"""The audit of DP-MAC: canaries are artificial coefficient vectors of norm 1 in the concatenated vector.

They pass through the real pipeline: drawn by the plan's sampler, added to the scaled coefficients of the real records,
released by `release()`, and the network is updated by W-steps on the result. The auditor knows the sum over the real
records (under Poisson sampling it is independent of the canaries' draws), so the score is that of sordino.audit.scores.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from sordino.audit.bounds import check_confidence
from sordino.audit.canaries import Canaries, CanaryGradients, make_canaries, most_canaries
from sordino.audit.claims import claim_family
from sordino.audit.guesses import choose_guesses
from sordino.audit.one_run import DEFAULT_CANARIES, AuditResult, judge
from sordino.audit.scores import Scorer
from sordino.errors import InputError
from sordino.methods.dp_mac.coefficients import Coefficients, polynomials
from sordino.methods.dp_mac.network import Network
from sordino.methods.dp_mac.optimise import w_step
from sordino.methods.dp_mac.training import Data, Mac, check_mac_plan
from sordino.plan.core import Plan
from sordino.randomness import RandomSource
from sordino.records.reading import row_reader
from sordino.release.ledger import Ledger
from sordino.sampling import LogicalBatch
from sordino.training.steps import DEFAULT_CHUNK, private_steps


def audit_mac(
    plan: Plan,
    network: Network,
    dataset: Data,
    mac: Mac,
    *,
    canaries: int | None = None,
    steps: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    noise_scale: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
) -> AuditResult:
    """Trains a copy of a network for some of the plan's steps with canaries among the records.

    Thresholds stay at their initial values: the audited claim is that of the steps, without the statistics.

    Args:
        plan: The plan whose claim is tested.
        network: The network; a copy is trained.
        dataset: Records (n, in) and targets (n, out).
        mac: How the coefficients are computed, bounded and used.
        canaries: The number of canaries; None: 5000, or as many as the coefficients have coordinates for.
        steps: The number of steps; None: all steps of the plan.
        confidence: The confidence of the bound.
        seed: Makes the audit repeatable, and its noise insecure.
        noise_scale: A factor on the noise, but not on that of the claim: it tests the audit, not the plan.
        chunk: The largest number of records processed at a time.

    Returns:
        The lower bounds on ε and the verdict.

    Raises:
        InputError: a value is wrong, or the plan does not fit the network.
    """
    check_confidence(confidence)
    check_mac_plan(plan, mac, len(network.layers))
    if steps is not None and not 1 <= steps <= plan.steps:
        raise InputError(f"steps = {steps}: an audit runs at most the plan's {plan.steps} steps")
    copied = copy.deepcopy(network)
    layers = len(copied.layers)
    coefficients = Coefficients(copied, row_reader(dataset), mac.z, mac.expansion, mac.start(layers))
    empty = coefficients(LogicalBatch(0, torch.zeros(0, dtype=torch.int64), chunk))
    shapes = {name: value.shape for name, value in empty.sums.items()}
    count = min(DEFAULT_CANARIES, most_canaries(shapes, plan.clipping)) if canaries is None else canaries
    source = RandomSource.from_os() if seed is None else RandomSource.seeded(seed)
    marked = make_canaries(shapes, plan.clipping, count, plan.relation, source)
    records = len(dataset[1])
    claim = replace(plan, records=records + count, steps=steps or plan.steps, statistics=(), insecure_seed=None)
    scorer, family = Scorer.of(claim), claim_family(claim)
    guesses = choose_guesses(scorer, marked.values, claim.steps, count, family, confidence)
    run = replace(
        claim.with_noise(claim.noise.noise_multiplier * noise_scale),
        records=records + len(marked.members),
        insecure_seed=seed,
    )
    scores = _play(run, coefficients, marked, scorer, mac, records, source, chunk)
    return judge(claim, [(scores, marked.coins)], guesses, confidence, family)


def _play(
    plan: Plan, coefficients: Coefficients, canaries: Canaries, scorer: Scorer, mac: Mac, records: int,
    source: RandomSource, chunk: int,
) -> Tensor:  # fmt: skip
    """The score of each canary after the plan's steps."""
    wrapped = CanaryGradients(coefficients, canaries, records)
    network, layers = coefficients.network, len(coefficients.network.layers)
    optimizer = mac.w.make(network)
    noise = plan.noise.noise_multiplier * plan.sensitivity / plan.divisor
    scores = torch.zeros(len(canaries), dtype=torch.float64)
    with Ledger.open(None, plan.to_dict()) as ledger:
        for private in private_steps(plan, wrapped, records=plan.records, source=source, ledger=ledger, chunk=chunk):
            observed = canaries.flat(private.gradients) * plan.divisor - canaries.flat(wrapped.real)
            scores += scorer.step(observed[canaries.coordinates], canaries.values)
            noisy = polynomials(private.gradients, mac.expansion, coefficients.bounds(), layers, noise)
            w_step(network, noisy, mac.w, optimizer)
    return scores
