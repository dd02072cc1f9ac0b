"""Checks a recipe's clipping threshold, batch and step size on rows that need no protection.

Readings at initial weights and after a short trial of the training (`diagnostics.instruments`), and four findings:

    bias       does clipping change the gradient's direction?    at most by the sampling noise τ (Thms 3.1, 3.2)
    clip_norm  the threshold whose released gradients are best aligned with the true one    the inequality (22)
    batch      noise relative to the gradient over the whole run    the first term of (9): noise²/T
    lr         does the loss decrease, without and with noise?    (22): η⟨∇F, Ḡ⟩ against βη²E‖Ḡ + Δ‖²/2

Theorems and numbered inequalities are those of Xiao, Xiang, Wang & Devadas 2023.

Everything is an estimate on some rows at some weights. No guarantee depends on it and nothing is released. Do not give
it rows that need protection: settings chosen by looking at private rows are themselves a leak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sordino import checks
from sordino.clipping import AutomaticClip, NormalisedClip
from sordino.diagnostics.instruments import Reading, measure
from sordino.diagnostics.instruments.signal import Signal, clip_curve, noise_length, signal_of
from sordino.diagnostics.instruments.theory import FLOOR, PRINTED_FLOOR
from sordino.diagnostics.instruments.trial import Trial, trial
from sordino.diagnostics.threshold import ClippingAdvice, advise_clipping
from sordino.methods.speed import Speed
from sordino.plan import Plan
from sordino.training.updates import Averaging

BETTER = 1.25  # a threshold is recommended if it improves the alignment by this factor
AS_GOOD = 0.95  # fraction of the best alignment: of these thresholds the one nearest to the recipe's is recommended
DROWNED = 2.0  # signal-to-noise ratio of the whole run below which the noise dominates
TRIES = (4.0, 16.0, 64.0, 256.0)


@dataclass(frozen=True)
class Finding:
    """One finding: `verdict` is "fine", "lower", "raise" or "watch"; `value` is the recommended setting, if known."""

    topic: str
    verdict: str
    sentence: str
    theorem: str
    value: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The findings, and the measurements behind them."""

    origin: str
    not_private: bool
    parameters: int
    findings: tuple[Finding, ...]
    readings: tuple[Reading, ...]
    signals: tuple[Signal, ...]
    trials: tuple[Trial, ...]
    tail: ClippingAdvice  # the tail of the sampling noise, and the threshold from which progress is proven
    caveats: tuple[str, ...] = ()
    speed: Speed | None = None

    def finding(self, topic: str) -> Finding:
        (found,) = [one for one in self.findings if one.topic == topic]
        return found

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON-serialisable values."""
        return {
            "origin": self.origin,
            "not_private": self.not_private,
            "parameters": self.parameters,
            "findings": [asdict(one) for one in self.findings],
            "readings": [one.to_dict() for one in self.readings],
            "signals": [{**asdict(one), "alignment": one.alignment} for one in self.signals],
            "trials": [
                {"lr": t.lr, "steps": t.steps, "noisy": t.noisy, "before": t.before, "after": t.after}
                for t in self.trials
            ],
            "tail": self.tail.to_dict(),
            "caveats": list(self.caveats),
            "speed": None if self.speed is None else self.speed.to_dict(),
        }


def diagnose(
    model: nn.Module,
    loss: Callable[..., Tensor],
    rows: Any,
    plan: Plan,
    *,
    lr: float | None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    averaging: Averaging | None = None,
    pool: Any = None,
    steps: int = 20,
    larger: Callable[[float], Plan] | None = None,
    public: str | None = None,
    not_private: bool = False,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Measures, runs a trial of `steps` steps, and judges. The model is not changed.

    Args:
        model: The network, at the weights to measure at.
        loss: A loss of outputs and targets, one number per row.
        rows: The rows to measure on: public, or otherwise not private.
        plan: The plan whose clipping, noise and steps are judged.
        lr: The step size of the trial; None: no trial, and no finding on lr.
        optimizer: Makes the optimizer of the trial.
        averaging: How iterates are averaged in the trial.
        pool: Rows for the trial, if other than `rows`: a model fits its own rows better.
        steps: The number of steps of the trial.
        larger: Returns the plan with another expected batch at the same ε, for the advice on the batch.
        public: Where the rows come from, if they are public.
        not_private: The rows may be looked at although they are not declared public.
        seed: The seed of views and trials.
        say: Called with a description of what is being done.

    Returns:
        The findings on bias, clip_norm, batch and, after a trial, lr.

    Raises:
        InputError: steps is below 1, or there are fewer than two rows.
    """
    whose: dict[str, Any] = {"public": public, "not_private": not_private, "seed": seed}
    views = getattr(plan.method, "augmentation", None)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    steps = checks.count("steps", steps)

    def rehearse(rate: float, noisy: bool) -> Trial:
        say(f"trying {steps} steps with lr {rate:g}, {'with' if noisy else 'without'} noise")
        return trial(
            model,
            loss,
            rows,
            plan,
            optimizer,
            lr=rate,
            steps=steps,
            noisy=noisy,
            averaging=averaging,
            pool=pool,
            seed=seed,
        )

    say("measuring at initial weights")
    readings = [measure(model, loss, rows, plan.clipping, views=views, **whose)]
    trials = () if lr is None else (rehearse(lr, noisy=False), rehearse(lr, noisy=True))
    places = [model]
    if trials and math.isfinite(trials[1].after):
        readings.append(measure(trials[1].model, loss, rows, plan.clipping, views=views, **whose))
        places.append(trials[1].model)
    signals = [signal_of(reading, plan, parameters) for reading in readings]
    say("trying other thresholds")
    candidates = clip_candidates(readings)
    curves = [clip_curve(place, loss, rows, plan, candidates, views=views, **whose) for place in places]
    tail = advise_clipping(model, loss, rows, plan.clipping)
    findings = [
        judge_bias(readings),
        judge_clip(plan, readings, signals, curves),
        judge_batch(plan, signals, parameters, larger),
    ]
    if trials:
        findings.append(judge_lr(*trials, plan.steps, rehearse))
    return Diagnosis(
        origin=readings[0].origin,
        not_private=not_private,
        parameters=parameters,
        findings=tuple(findings),
        readings=tuple(readings),
        signals=tuple(signals),
        trials=trials,
        tail=tail,
    )


def judge_bias(readings: Sequence[Reading]) -> Finding:
    """Judges the smallest cosine between the clipped and the true gradient."""
    worst = min(readings, key=lambda reading: 1.0 if reading.cosine is None else reading.cosine)
    theorem = f"Thms 3.1, 3.2 guarantee ‖∇F‖ down to {FLOOR:g}τ (printed: {PRINTED_FLOOR:g}τ) and no further"
    facts = (
        f"A record's gradient is at distance τ = {worst.tau:.3g} from the mean (of norm {worst.gradient_norm:.3g}); "
        f"{worst.clipped_share:.0%} of the rows are clipped"
    )
    if worst.cosine is None:
        return Finding("bias", "watch", f"{facts}; there is no gradient to compare with at these weights.", theorem)
    angle = f"the mean of the clipped gradients has cosine {worst.cosine:.3f} with the true one"
    if worst.cosine < 0.5:
        advice = (
            "Clipping changes the gradient's direction. Less sampling noise helps: views of each record "
            "([augmentation]), inner momentum, a normalised net or features; or a larger clip_norm, if noise allows."
        )
        return Finding("bias", "watch", f"{facts}, and {angle}. {advice}", theorem)
    return Finding("bias", "fine", f"{facts}, and {angle}: the direction is kept.", theorem)


def clip_candidates(readings: Sequence[Reading]) -> list[float]:
    """Thresholds from far below the records' norms to far above them."""
    means = {q: math.fsum(r.norm_quantiles[q] for r in readings) / len(readings) for q in readings[0].norm_quantiles}
    wanted = [means["0.05"] / 2, means["0.05"], means["0.25"], means["0.5"], means["0.75"], means["0.95"]]
    wanted += [2 * means["0.95"]]
    return sorted({value for value in wanted if value > 0})


def judge_clip(
    plan: Plan, readings: Sequence[Reading], signals: Sequence[Signal], curves: Sequence[Sequence[Signal]]
) -> Finding:
    """Finds the threshold with the largest mean alignment; "fine" if no other gains BETTER."""
    theorem = "(22) at its best step: the loss falls by ‖∇F‖²·alignment²/2β; Thm 3.2: noise grows with c, bias falls"
    clip_norm, share = plan.clipping.clip_norm, max(reading.clipped_share for reading in readings)
    if isinstance(plan.clipping, NormalisedClip | AutomaticClip):
        sentence = (
            "Gradients are normalised: only the product of clip_norm and lr matters, so there is nothing to choose."
        )
        return Finding("clip_norm", "fine", sentence, theorem)
    own = math.fsum(signal.alignment for signal in signals) / len(signals)
    gains = {
        column[0].clip_norm: math.fsum(signal.alignment for signal in column) / len(column)
        for column in zip(*curves, strict=True)
    }
    best = max(gains.values(), default=own)
    facts = (
        f"c = {clip_norm:g} clips {share:.0%} of the rows (median norm {readings[0].norm_quantiles['0.5']:.3g}); a "
        f"released gradient has cosine {own:.3f} with the true one"
    )
    if best <= max(own, 1e-6) * BETTER:
        tail = (
            " Every row is clipped, so c scales the step and its noise alike: below this c, only lr·c matters."
            if share == 1 and min(reading.clipped_share for reading in readings) == 1
            else ""
        )
        return Finding("clip_norm", "fine", f"{facts}; no other threshold gains a quarter.{tail}", theorem)
    good = [value for value, gain in gains.items() if gain >= AS_GOOD * best]
    value = min(good, key=lambda candidate: abs(math.log(candidate / clip_norm)))
    verdict = "lower" if value < clip_norm else "raise"
    why = "noise scales with c, the gradient does not" if verdict == "lower" else "clipping less keeps the direction"
    sentence = (
        f"{facts}; with c = {value:.3g} it would be {gains[value]:.3f}: {why}. {verdict.capitalize()} it, and "
        f"multiply lr by about {clip_norm / value:.3g} as far as rows are clipped, so that steps keep their length."
    )
    return Finding("clip_norm", verdict, sentence, theorem, value)


def judge_batch(
    plan: Plan, signals: Sequence[Signal], parameters: int, larger: Callable[[float], Plan] | None
) -> Finding:
    """Judges whether noise dominates the gradient over the whole run, and which batch avoids that at the same ε."""
    theorem = "Thm 3.1: the first term of (9) is √(noise²·2βF/T); gradients add up over T steps, noise as √T"
    best = max(signals, key=lambda signal: signal.gradient)
    ratio = best.over(plan.steps)
    facts = (
        f"Noise σ·c·√d/B = {best.noise:.3g} against a clipped gradient of {best.gradient:.3g} per step; over "
        f"{plan.steps} steps the gradient is {ratio:.2g} times the noise"
    )
    if ratio >= DROWNED:
        return Finding("batch", "fine", f"{facts}.", theorem)
    for factor in (2, 4, 8, 16) if larger is not None else ():
        batch = factor * plan.expected_batch
        if batch > plan.records or larger is None:
            break
        other = larger(batch)
        noise = noise_length(other, parameters)
        there = best.gradient / noise * math.sqrt(other.steps)
        if there >= DROWNED:
            sentence = (
                f"{facts}: noise dominates. A batch of {batch:g} at the same ε and steps needs σ = "
                f"{other.noise.noise_multiplier:.3g}; its noise is {noise:.3g}, and the ratio {there:.2g}."
            )
            return Finding("batch", "raise", sentence, theorem, batch)
    sentence = (
        f"{facts}: noise dominates, and a larger batch alone does not change that: use fewer parameters (features, a "
        "smaller net), more records, or a larger ε."
    )
    return Finding("batch", "raise", sentence, theorem)


def judge_lr(clean: Trial, noisy: Trial, steps: int, rehearse: Callable[[float, bool], Trial]) -> Finding:
    """Judges the loss of the trials; smaller and larger steps are tried only if there is reason to."""
    theorem = "(22): a step gains η⟨∇F, Ḡ⟩ and costs βη²E‖Ḡ + Δ‖²/2"
    facts = f"In {clean.steps} steps with lr {clean.lr:g} the loss goes from {clean.before:.3g} to "
    if not clean.after < clean.before or not noisy.after < noisy.before:
        with_noise = clean.after < clean.before
        reason = (
            f"{clean.after:.3g} without noise, but to {noisy.after:.3g} with it: the step is too large for this noise"
            if with_noise
            else f"{clean.after:.3g} even without noise: the step is too large"
        )
        for factor in TRIES:
            again = rehearse(clean.lr / factor, with_noise)
            if again.after < again.before:
                text = f"{facts}{reason}. With lr {again.lr:.3g} it falls to {again.after:.3g}."
                return Finding("lr", "lower", text, theorem, again.lr)
        text = f"{facts}{reason}; it does not fall with a step {TRIES[-1]:g} times smaller either."
        return Finding("lr", "watch", text, theorem)
    facts += f"{noisy.after:.3g} ({clean.after:.3g} without noise)"
    if noisy.fell / noisy.steps * steps < noisy.before / 2:
        again = rehearse(TRIES[0] * clean.lr, True)
        if again.fell > 1.5 * noisy.fell:
            text = (
                f"{facts}: at this rate {steps} steps would remove less than half of it. With lr {again.lr:.3g} it "
                f"falls to {again.after:.3g}."
            )
            return Finding("lr", "raise", text, theorem, again.lr)
    return Finding("lr", "fine", f"{facts}: it falls, also with noise.", theorem)
