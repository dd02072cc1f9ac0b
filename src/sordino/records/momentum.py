"""Momentum of single records, before clipping: Algorithms 1 and 2 of "Clipping bias reduction" (Xiao et al. 2023).

Formal guarantee. A record contributes *one* vector, computed from its own gradients at iterates that were released
before, and clipped once. So a record moves the sum by at most `clip_norm` for all lengths and factors, and the plan is
accounted as plain DP-SGD (docs/guarantees/clipping_bias.md).

    InnerMomentum    m_i = Σ_{age=0..length} decay^age · ∇f(w_{k−age}, x_i)         (13), for the sampled records
    RecordMomentum   m_i ← kept · m_i + (1 − kept) · ∇f(w_k, x_i), initially m_i = ∇f(w_0, x_i)   Algorithm 1

The outer momentum of Algorithm 2 acts on released sums and is torch's: `SGD(momentum=outer_kept)` computes
M_k = outer_kept · M_{k−1} + G_k. Equation (14) as printed keeps 1 − γ₁ of the history, the authors' code keeps γ₁;
therefore the key is named after what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from sordino.clipping import Clipping
from sordino.errors import Refused
from sordino.gradients import ClippedSum, Rows
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.engine import Iterates, add_clipped, per_record_gradients
from sordino.gradients.spectral import advance
from sordino.gradients.sums.contributions import Contribution as Form
from sordino.gradients.sums.contributions import Dense
from sordino.gradients.survey import checked_parameters
from sordino.plan.contribution import Contribution, InnerMomentum, RecordMomentum
from sordino.records.chunks import stable_chunks
from sordino.sampling import LogicalBatch

MEMORY = 2 << 30
"""Default limit on the bytes of the momenta of Algorithm 1."""


@dataclass(frozen=True)
class PastIterates:
    """The last published weights, the oldest first; stored once for all records.

    They are released values: they are part of every checkpoint, and not secret.
    """

    weights: tuple[Mapping[str, Tensor], ...] = ()

    def followed_by(self, model: nn.Module, length: int) -> PastIterates:
        """These iterates and the model's current weights, at most the last `length` of them."""
        now = {name: p.detach().clone() for name, p in checked_parameters(model).items()}
        return PastIterates((*self.weights, now)[-length:])

    def with_present(self, inner: InnerMomentum) -> Iterates:
        """(weights, factor) of every iterate that counts; the last is the current one, {} with factor 1.

        The first steps have fewer: w_{−1} and earlier do not exist and contribute nothing.
        """
        factors = inner.factors(len(self.weights))
        kept = self.weights[len(self.weights) - len(factors) :]
        return [*zip(kept, factors, strict=True), ({}, 1.0)]


def made_up_past(model: nn.Module, inner: InnerMomentum) -> PastIterates:
    """Iterates close to the model's weights, for the comparison with a plain loop before the first step."""
    generator = torch.Generator().manual_seed(0)
    weights: list[dict[str, Tensor]] = []
    for _ in range(inner.length):
        values = {}
        for name, p in checked_parameters(model).items():
            noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            values[name] = p.detach() + 0.01 * p.detach().abs().mean() * noise
        weights.append(values)
    return PastIterates(tuple(weights))


def refuse_momenta(records: int, coordinates: int, itemsize: int, memory: int = MEMORY) -> None:
    """Refuses momenta that do not fit in memory, and says how much they would need."""
    needed = records * coordinates * itemsize
    if needed > memory:
        raise Refused(
            f"the momentum of each record over {coordinates} weights takes more than the {memory / 1e9:.3g} GB "
            "allowed: use inner_length and inner_decay (Algorithm 2), which keep no momentum per record, or fewer "
            "records or weights",
            private=f"{records} records would take {needed / 1e9:.3g} GB",
        )


@dataclass(eq=False)
class RecordMomenta:
    """The gradient sum of Algorithm 1: Σ over records of clip(momentum), on full batches only.

    The momenta are functions of single private records. They exist only in this object, in memory: no checkpoint
    contains them, so such a run can't be resumed. A record whose gradient was not finite once has no finite momentum
    from then on, and contributes zero.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    fetch: Callable[[Tensor, int], Rows]  # (indices, step) → rows
    clipping: Clipping
    momentum: RecordMomentum
    records: int
    of: Contribution = field(default_factory=Contribution)  # what the gradient is computed from
    memory: int = MEMORY
    protects: tuple[str, int | None] = ("record", None)
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _assurance: Assurance = field(default_factory=Assurance, repr=False)

    @property
    def contribution(self) -> Contribution:
        return replace(self.of, record_momentum=self.momentum)

    def __post_init__(self) -> None:
        parameters = checked_parameters(self.model)
        first = next(iter(parameters.values()))
        refuse_momenta(self.records, sum(p.numel() for p in parameters.values()), first.element_size(), self.memory)

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        if len(batch.indices) != self.records:
            raise Refused(
                f"step {batch.step} does not draw all records: the momentum of single records is proven for full "
                "batches only (expected_batch = records); for sampled batches use inner_length",
                private=f"{len(batch.indices)} of {self.records} records are drawn",
            )
        advance(self.model)
        parameters = checked_parameters(self.model)
        sums: dict[str, Tensor] = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        norms, losses, dropped, first = [], [], 0, not self._kept
        for indices in stable_chunks(batch):
            rows = self.fetch(indices, batch.step)
            gradients, values = per_record_gradients(self.model, self.loss, rows, self._assurance)
            with torch.no_grad():
                moved: dict[str, Form] = {}
                moved |= {name: Dense(self._moved(name, indices, g, first)) for name, g in gradients.items()}
                kind = next(iter(gradients.values())).dtype
                part: dict[str, Tensor] = {}
                found, bad = add_clipped(moved, self.clipping, parameters, part, len(indices), kind)
                for name, value in part.items():
                    sums[name] += value
            norms.append(found)
            losses.append(values)
            dropped += bad
        return ClippedSum(sums, torch.cat(norms), dropped, torch.cat(losses))

    def _moved(self, name: str, indices: Tensor, gradient: Tensor, first: bool) -> Tensor:
        """The momenta of these records after this step, which are also stored for the next step."""
        if name not in self._kept:
            self._kept[name] = gradient.new_zeros(self.records, *gradient.shape[1:])
        kept = self.momentum.kept
        now = gradient if first else kept * self._kept[name][indices] + (1 - kept) * gradient
        self._kept[name][indices] = now
        return now
