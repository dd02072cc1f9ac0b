"""The workloads on which the gradient engines are compared: model, synthetic batch and loss.

Time and memory of a step do not depend on the records' values, so the batches are random. The models of the six
workloads here are plain torch modules that every engine accepts unmodified or through its own documented replacement.
`heldout` has further models, some of them from libraries, on which only plain PyTorch and sordino are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RowLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """One model with one batch: `model()` builds it from a fixed seed, `batch(n)` draws n records.

    loss: from outputs and targets to one value per record; a step's loss is their mean. None: cross-entropy.
    """

    name: str
    title: str
    records: int
    goal: float  # the time over plain that the engine should reach
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: RowLoss | None = None

    @property
    def row_loss(self) -> RowLoss:
        return self.loss or nn.CrossEntropyLoss(reduction="none")

    def build(self, records: int | None = None) -> tuple[nn.Module, Tensor, Tensor]:
        """Model, inputs and targets; the same values in every process."""
        torch.manual_seed(0)
        model = self.model().train()
        inputs, targets = self.batch(self.records if records is None else records)
        return model, inputs, targets


class MnistCnn(nn.Module):
    """The CNN of appendix A.1 of "Coupling public and private gradient provably helps optimization"."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with GroupNorm(16); the shortcut is a 1×1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(16, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(16, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.GroupNorm(16, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet20() -> nn.Module:
    """ResNet-20 for 3×32×32 images: three stages of three blocks, 16, 32 and 64 channels."""
    widths = [(16, 16, 1), (16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 1)]
    widths += [(32, 64, 2), (64, 64, 1), (64, 64, 1)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(16, 16), nn.ReLU()]
    blocks = [ResidualBlock(*shape) for shape in widths]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class EncoderLayer(nn.Module):
    """Pre-LN encoder layer; query, key and value are one Linear, which every engine supports."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class TransformerClassifier(nn.Module):
    """Four pre-LN layers, width 256, four heads, mean pooling, two classes.

    Position ids are repeated for each record and not broadcast: Opacus' ghost mode crashes on expanded ids.
    """

    def __init__(self, vocabulary: int = 20_000, length: int = 128, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(EncoderLayer(width, 4, 1024) for _ in range(4)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)
        x = self.layers(self.tokens(ids) + self.positions(places))
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class LstmClassifier(nn.Module):
    """An embedding of width 100, one nn.LSTM of 128 units, and a classifier on the mean of its states.

    It does not use the last state only: that gradient decays over 200 steps to subnormal numbers, on which this kind of
    CPU takes ten times as long with every engine (3.9 s instead of 0.37 s for a plain step).
    """

    def __init__(self, vocabulary: int = 20_000, width: int = 100, hidden: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(ids))
        logits: Tensor = self.head(states.mean(1))
        return logits


def vectors(*shape: int, classes: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(classes, (n,)))


def texts(length: int, vocabulary: int = 20_000, classes: int = 2) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randint(vocabulary, (n, length)), torch.randint(classes, (n,)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))


SIX: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("W1", "logistic regression 4096→10", 2048, 1.4, lambda: nn.Linear(4096, 10), vectors(4096)),
        Workload("W2", "MLP 784-300-10", 1000, 1.25, mlp, vectors(784)),
        Workload("W3", "MNIST CNN", 512, 1.25, MnistCnn, vectors(1, 28, 28)),
        Workload("W4-64", "ResNet-20 GroupNorm", 64, 1.35, resnet20, vectors(3, 32, 32)),
        Workload("W4-256", "ResNet-20 GroupNorm", 256, 1.35, resnet20, vectors(3, 32, 32)),
        Workload("W5", "transformer encoder", 32, 1.3, TransformerClassifier, texts(128)),
        Workload("W6", "nn.LSTM", 128, 2.5, LstmClassifier, texts(200)),
    )
}
