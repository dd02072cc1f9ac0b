"""The tail of the sampling noise, measured on PUBLIC rows, and the clipping threshold that is proven to suffice.

Xiao, Wan & Devadas 2022, Thm 3.2: clipped (DP-)SGD provably makes progress if c ≥ 4·κ·log 10 (and another term
with an unknown constant ψ), where κ bounds the tail of the sampling noise ξ = ‖∇f(w, record) − ∇F(w)‖ (Assumption 2.1):

    Pr(ξ ≥ t) ≤ e^{−t/κ}.

Example 3.1 shows that some such condition is necessary: with c far below the noise, the mean of the clipped gradients
may point away from the gradient.

What is estimated. As printed, the assumption has to hold for every t, which is impossible if ξ is bounded away from 0
(in Example 3.1 ξ ≥ 30, so Pr(ξ ≥ 20) = 1). The proof uses it from Pr(ξ ≥ c/4) ≤ 1/10 on (Lemma B.1 with c₀ = c/4; its
footnote 6 says the same), so κ here is the smallest value for which the *empirical* tail below 1/10 satisfies it. With
n rows nothing is seen beyond Pr = 1/n. It is an estimate at the given weights, not a bound, and no guarantee depends on
it.

Nothing here is private. Do not give it rows that need protection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sordino.clipping import Clipping
from sordino.diagnostics.instruments.reading import UNCLIPPED, all_rows, flat, mean_gradient, measure
from sordino.gradients import clipped_sum
from sordino.records.companions import with_companions
from sordino.records.reading import row_reader

TAIL = 0.1  # the proof needs the bound where the tail is at most this: e^{−c₀/κ} with c₀ = κ·log 10


@dataclass(frozen=True)
class ClippingAdvice:
    """The sampling noise, the threshold of Thm 3.2, and what clipping does to the mean gradient of these rows."""

    rows: int
    clip_norm: float
    kappa: float
    threshold: float  # 4·κ·log 10
    second_term: float | None  # κ·log κ·log(nε/√(d·log 1/δ)), the other term of eq. (12) for ψ = 1
    noise_std: float  # √E ξ²
    noise_quantiles: Mapping[str, float]
    gradient_norm: float
    clipped_gradient_norm: float
    cosine: float | None  # between the mean gradient and the mean of the clipped gradients; None if one is 0
    clipped_share: float

    @property
    def verdict(self) -> str:
        """ "misleading" if clipping changes the direction; else "covered" if c ≥ 4·κ·log 10; else "below"."""
        turned = self.cosine is not None and self.cosine < 0.5
        invented = self.cosine is None and self.clipped_gradient_norm > self.gradient_norm
        if turned or invented:
            return "misleading"
        return "covered" if self.clip_norm >= self.threshold else "below"

    @property
    def sentence(self) -> str:
        middle, high = self.noise_quantiles["0.5"], self.noise_quantiles["0.9"]
        text = (
            f"On {self.rows} public rows a record's gradient is at distance {middle:.4g} from the mean (median) and "
            f"{high:.4g} at the 90 % quantile (κ ≈ {self.kappa:.4g}). Thm 3.2 asks for c ≥ 4·κ·log 10 = "
            f"{self.threshold:.4g}; c = {self.clip_norm:g} is {self.clip_norm / self.threshold:.2g} of it, and "
            f"{self.clipped_share:.0%} of the rows are clipped. "
        )
        angle = "has no direction to compare" if self.cosine is None else f"has cosine {self.cosine:.3f} with that"
        return text + f"The mean of the clipped gradients {angle} of the unclipped ones. " + _WORDS[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The fields, the verdict and the sentence as JSON-serialisable values."""
        return {**asdict(self), "verdict": self.verdict, "sentence": self.sentence}


_WORDS = {
    "covered": "The theorem covers this threshold; a smaller one would need less noise.",
    "below": "The theorem says nothing about this threshold; at these weights clipping keeps the direction.",
    "misleading": "Clipping turns the gradient away from its direction (Example 3.1): raise c, or reduce the "
    "sampling noise (normalisation, other features).",
}


def advise_clipping(
    model: nn.Module,
    loss: Callable[..., Tensor],
    public: Any,
    clipping: Clipping,
    *,
    records: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> ClippingAdvice:
    """Measures on public rows at the model's current weights.

    `records`, `epsilon` and `delta` are those of the private training; they are needed for the second term of eq. (12).
    """
    everyone, fetch = all_rows(public), row_reader(public)
    reading = measure(model, loss, public, clipping, public="declared by the caller")
    mean = mean_gradient(model, loss, everyone, UNCLIPPED).mean
    rows = (with_companions(fetch(torch.tensor([i])), model, seed=0, step=0) for i in range(reading.rows))
    singles = (clipped_sum(model, loss, row, UNCLIPPED).sums for row in rows)
    noise = torch.stack([(flat(single) - mean).norm() for single in singles])
    kappa = tail_kappa(noise)
    return ClippingAdvice(
        rows=reading.rows,
        clip_norm=clipping.clip_norm,
        kappa=kappa,
        threshold=4 * kappa * math.log(10),
        second_term=_second_term(kappa, len(mean), records, epsilon, delta),
        noise_std=float(noise.square().mean().sqrt()),
        noise_quantiles={str(q): float(torch.quantile(noise, q)) for q in (0.5, 0.9, 0.99)},
        gradient_norm=reading.gradient_norm,
        clipped_gradient_norm=reading.clipped_gradient_norm,
        cosine=reading.cosine,
        clipped_share=reading.clipped_share,
    )


def tail_kappa(noise: Tensor) -> float:
    """The smallest κ with S(t) ≤ e^{−t/κ} wherever the empirical tail S(t) = Pr(ξ ≥ t) is at most TAIL."""
    ordered = noise.double().sort().values
    tail = torch.arange(len(ordered), 0, -1, dtype=torch.float64) / len(ordered)  # S at each value
    seen = tail <= max(TAIL, 1.5 / len(ordered))  # few rows: at least the largest value counts
    return float((ordered[seen] / -tail[seen].log()).max())


def _second_term(
    kappa: float, dimension: int, records: int | None, epsilon: float | None, delta: float | None
) -> float | None:
    if records is None or epsilon is None or delta is None or kappa <= 0:
        return None
    return -kappa * math.log(kappa) * math.log(math.sqrt(dimension * math.log(1 / delta)) / (records * epsilon))
