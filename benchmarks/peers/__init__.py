"""One training step of each engine: forward, clipped per-record gradients, noise, SGD update.

An engine is a function from a model and a batch to a step; a step makes one update and returns the seconds of its named
phases (empty if the engine does not provide them). All engines have clip norm 1, noise multiplier 1 and learning rate
0.01; the divisor is the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor, nn

from workloads import RowLoss

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01

Step = Callable[[], Mapping[str, float]]
Prepare = Callable[..., Step]


@dataclass(frozen=True)
class Engine:
    """The function that makes an engine's step, and the distribution that must be installed for it."""

    name: str
    title: str
    module: str
    function: str
    distribution: str
    only: tuple[str, ...] = ()  # the workloads that it supports, if not all; it is run only on request
    any_loss: bool = False  # supports any model and loss per record; the others: cross-entropy on the six workloads

    def version(self) -> str | None:
        """The installed version, or None if the distribution is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def prepare(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Step:
        """Imports the engine and wraps the model. It is imported here so that a process loads only one engine."""
        prepare: Prepare = getattr(import_module(self.module), self.function)
        return prepare(model, inputs, targets, loss) if self.any_loss else prepare(model, inputs, targets)


_BY_HAND = ("W2", "mlp10", "words", "logistic", "edgenext", "maxvit", "deberta", "resnet18")
ENGINES: dict[str, Engine] = {
    e.name: e
    for e in (
        Engine("plain", "plain PyTorch", "peers.plain", "plain", "torch", any_loss=True),
        Engine("plain-kept", "plain PyTorch, freed memory kept", "peers.plain", "kept", "torch", any_loss=True),
        Engine("sordino", "sordino", "peers.ours", "sordino", "sordino", any_loss=True),
        Engine("opacus-hooks", "Opacus hooks", "peers.opacus_engine", "hooks", "opacus"),
        Engine("opacus-ghost", "Opacus ghost", "peers.opacus_engine", "ghost", "opacus"),
        Engine("vmap", "torch.func vmap(grad), by hand", "peers.by_hand", "vmap_grad", "torch"),
        Engine("fastdp", "fastDP MixOpt", "peers.fastdp_engine", "mixopt", "fastDP"),
        Engine("floor", "by hand, same noise", "peers.floor", "by_hand", "sordino", _BY_HAND, any_loss=True),
    )
}
