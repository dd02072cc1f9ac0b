"""Text classifiers on token ids (n, length): an LSTM, a pre-LN transformer encoder (W6 and W5 of the benchmarks), and
the GRU of Xiao et al. 2023 on frozen word vectors, plain and with standardised gate projections.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.errors import InputError
from sordino.gradients.layers.gru import standardised_gru


class LstmClassifier(nn.Module):
    """Embedding, one nn.LSTM layer, a linear layer on its last output. Padding is treated as any other token.

    Args:
        classes: The number of classes.
        vocabulary: The number of token ids.
        embedding: The width of the embedding.
        hidden: The width of the recurrent layer.
    """

    def __init__(self, classes: int, vocabulary: int = 20_000, embedding: int = 100, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))  # (n, length, hidden)
        logits: Tensor = self.head(outputs[:, -1])
        return logits


class GruClassifier(nn.Module):
    """Frozen word vectors, one recurrent layer with GRU gates, a linear layer on its last state or on the mean of its
    states (Xiao et al. 2023, section 5.1). Padding (id 0) belongs at the beginning of a text, so that the last state is
    that after the last word.

    Args:
        classes: The number of classes.
        vectors: (words, features) public word vectors: not trained, and stored with the model.
        hidden: The width of the recurrent layer.
        standardised: Whether both projections are standardised over their 3·hidden coordinates before the gates.
        mean: Use the mean of the states over the words, without padding, instead of the last state.
    """

    def __init__(
        self, classes: int, vectors: Tensor, hidden: int = 64, standardised: bool = False, mean: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors.clone())
        self.gru = nn.GRU(vectors.shape[1], hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)
        self.standardised, self.mean = standardised, mean

    def forward(self, tokens: Tensor) -> Tensor:
        words = nn.functional.embedding(tokens, self.get_buffer("vectors"))
        gru = self.gru
        if self.standardised:
            w_ih, w_hh, b_ih, b_hh = gru.parameters()
            states, _ = standardised_gru(words, w_ih, w_hh, b_ih, b_hh)
        else:
            states, _ = gru(words)
        logits: Tensor = self.head(_mean(states, tokens != 0) if self.mean else states[:, -1])
        return logits


def _mean(states: Tensor, here: Tensor) -> Tensor:
    """(n, length, hidden) → (n, hidden): the mean over the positions of words; zero for a text without any."""
    weight = here.to(states.dtype) / here.sum(1, keepdim=True).clamp_min(1)
    return torch.bmm(weight.unsqueeze(1), states).squeeze(1)


class SelfAttention(nn.Module):
    """Multi-head attention made of linear layers, so that each parameter belongs to a layer that the engine knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 × (n, heads, length, d)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, ffn), nn.GELU(), nn.Linear(ffn, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


class TransformerClassifier(nn.Module):
    """Token and position embeddings, pre-LN encoder layers, mean over positions, a linear layer.

    Args:
        classes: The number of classes.
        length: The number of tokens of a text.
        vocabulary: The number of token ids.
        width: The width of embeddings and layers.
        layers: The number of encoder layers.
        heads: The number of attention heads, which divides `width`.
        ffn: The width of the hidden layer of each feed-forward part.

    Raises:
        InputError: `heads` does not divide `width`.
    """

    def __init__(
        self,
        classes: int,
        length: int = 128,
        vocabulary: int = 20_000,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        ffn: int = 1024,
    ) -> None:
        super().__init__()
        if width % heads:
            raise InputError(f"transformer: heads ({heads}) must divide width ({width})")
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, ffn) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        # one row of position ids per record: an id shared by all records would have no per-record gradient
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.layers(self.embedding(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def lstm(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int = 20_000,
    embedding: int = 100,
    hidden: int = 128,
) -> nn.Module:
    _tokens(input_shape, "lstm")
    return LstmClassifier(classes, vocabulary, embedding, hidden)


def transformer(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int = 20_000,
    width: int = 256,
    layers: int = 4,
    heads: int = 4,
    ffn: int = 1024,
) -> nn.Module:
    length = _tokens(input_shape, "transformer")
    return TransformerClassifier(classes, length, vocabulary, width, layers, heads, ffn)


def gru(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: int = 64,
    form: str = "original",
    readout: str = "last",
    vectors: Tensor | None = None,
) -> nn.Module:
    """form: "original", or "enhanced" with standardised gate projections. readout: the "last" state or the "mean".
    vectors: those of the dataset's words."""
    _tokens(input_shape, "gru")
    if readout not in ("last", "mean"):
        raise InputError(f"gru: readout must be 'last' or 'mean', not {readout!r}")
    if form not in ("original", "enhanced"):
        raise InputError(f"gru: form must be 'original' or 'enhanced', not {form!r}")
    if vectors is None:
        raise InputError('gru: the dataset has no word vectors; use one that has, such as data.name = "imdb-glove"')
    return GruClassifier(classes, vectors, hidden, form == "enhanced", readout == "mean")


def _tokens(input_shape: tuple[int, ...], name: str) -> int:
    if len(input_shape) != 1:
        raise InputError(f"{name}: takes token ids (length,), not inputs of shape {input_shape}")
    return input_shape[0]
