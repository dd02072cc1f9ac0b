"""all-MiniLM-L6-v2, frozen: a text → the 384 numbers of its sentence embedding, of length one.

A BERT encoder of six layers (Devlin et al. 2019; Wang et al. 2020; Reimers & Gurevych 2019), trained by others on
public sentences: if no private record was among them, it is a public function of one record at a time and has no
privacy cost. Texts are UTF-8 bytes, padded with zeros (dataset `imdb-texts`). Of a text with more than `tokens` word
pieces, [CLS] and [SEP] included, the first and the last half of that number are kept: a review's verdict is often at
its end. The embedding is the mean over the kept word pieces, scaled to length one, as its authors compute it.

Computed in single precision. Dynamic int8 quantisation would take less than half the time, but its scale is that of a
whole batch: a record's embedding would depend on other records, and clipping would no longer bound a record's effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, scaled_dot_product_attention

from sordino.errors import InputError
from sordino.features.published import one_file

FOLDER = "all-MiniLM-L6-v2"
GET = (
    "get config.json, model.safetensors and tokenizer.json of sentence-transformers/all-MiniLM-L6-v2 "
    "(huggingface.co, Apache 2.0) and put them there"
)
_UNUSED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
_BATCH_TOKENS = 4096  # word pieces in one pass: memory does not depend on the number of texts


@dataclass(frozen=True)
class Config:
    """The required entries of config.json; other entries do not affect the function."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, path: Path) -> Config:
        try:
            document = json.loads(path.read_text("utf8"))
            kind, act = document.get("model_type"), document.get("hidden_act")
            position = document.get("position_embedding_type", "absolute")
            if (kind, act, position) != ("bert", "gelu", "absolute"):
                raise InputError(f"{path}: a {kind} with {act} and {position} positions, not the BERT of MiniLM; {GET}")
            return cls(**{name: document[name] for name in cls.__dataclass_fields__})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{path} is not the configuration of a BERT encoder: {error!r}; {GET}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that the encoder consists of."""
        width, wide = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (self.vocab_size, width),
            "embeddings.position_embeddings.weight": (self.max_position_embeddings, width),
            "embeddings.token_type_embeddings.weight": (self.type_vocab_size, width),
            **_pair("embeddings.LayerNorm", (width,)),
        }
        for layer in (f"encoder.layer.{index}" for index in range(self.num_hidden_layers)):
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                shapes |= _pair(f"{layer}.attention.{name}", (width, width))
            shapes |= _pair(f"{layer}.attention.output.LayerNorm", (width,))
            shapes |= _pair(f"{layer}.intermediate.dense", (wide, width))
            shapes |= _pair(f"{layer}.output.dense", (width, wide))
            shapes |= _pair(f"{layer}.output.LayerNorm", (width,))
        return shapes


def _pair(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


@dataclass(frozen=True)
class MiniLM:
    """The encoder and its tokenizer, as the files have them."""

    config: Config
    weights: Mapping[str, Tensor]
    tokenizer: Any

    @torch.no_grad()
    def embed(self, texts: Tensor, tokens: int) -> Tensor:
        """(n, bytes) uint8 → (n, hidden_size), each of length one. An empty text is [CLS] [SEP]."""
        if not 4 <= tokens <= self.config.max_position_embeddings:
            raise InputError(f"minilm: tokens must be from 4 to {self.config.max_position_embeddings}, not {tokens}")
        ids = [self._shortened(one.ids, tokens) for one in self.tokenizer.encode_batch(decode(texts))]
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))  # similar lengths together: little padding
        out = torch.empty(len(ids), self.config.hidden_size)
        while order:
            batch = order[-max(1, _BATCH_TOKENS // len(ids[order[-1]])) :]
            del order[-len(batch) :]
            width = len(ids[batch[-1]])
            padded = torch.tensor([ids[row] + [0] * (width - len(ids[row])) for row in batch])
            lengths = torch.tensor([len(ids[row]) for row in batch])
            out[batch] = pooled(encode(self.config, self.weights, padded, lengths), lengths)
        return out

    @staticmethod
    def _shortened(ids: Sequence[int], tokens: int) -> list[int]:
        ids = list(ids)
        head = tokens // 2
        return ids if len(ids) <= tokens else ids[:head] + ids[head - tokens :]


def read(root: Path) -> MiniLM:
    """The published model from root/all-MiniLM-L6-v2; an error says what is missing or wrong."""
    folder = root / FOLDER
    config = Config.read(one_file(folder, "config.json", "minilm", GET))
    weights = _weights(one_file(folder, "model.safetensors", "minilm", GET), config)
    return MiniLM(config, weights, _tokenizer(one_file(folder, "tokenizer.json", "minilm", GET)))


def _weights(path: Path, config: Config) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys() if name not in _UNUSED}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} can't be read: {error}; {GET}") from error
    expected = config.shapes()
    wrong = sorted(set(weights) ^ set(expected)) or [
        name for name, tensor in weights.items() if tuple(tensor.shape) != expected[name]
    ]
    if wrong:
        raise InputError(
            f"{path} does not match the config.json next to it: {wrong[0]} is missing, unknown or of another size"
        )
    return {name: tensor.float() for name, tensor in weights.items()}


def _tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError(
            "features 'minilm' needs the tokenizers library: install sordino with its extra 'text'"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise InputError(f"{path} is not a tokenizer: {error}; {GET}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def decode(texts: Tensor) -> list[str]:
    """(n, bytes) uint8 → strings; incomplete characters (from truncation) and trailing zeros are dropped."""
    if texts.dim() != 2 or texts.dtype != torch.uint8:
        raise InputError(
            f"texts must be UTF-8 bytes (n, bytes), as in the dataset imdb-texts, not {texts.dtype} "
            f"{tuple(texts.shape)}"
        )
    return [row.tobytes().rstrip(b"\0").decode("utf8", errors="ignore") for row in texts.numpy()]


def encode(config: Config, weights: Mapping[str, Tensor], ids: Tensor, lengths: Tensor) -> Tensor:
    """BERT's last hidden states (n, width, hidden_size) of padded ids (n, width), one segment; those of padding are
    meaningless.
    """
    n, width = ids.shape

    def through(name: str, x: Tensor) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def normed(name: str, x: Tensor) -> Tensor:
        return layer_norm(
            x, (config.hidden_size,), weights[f"{name}.weight"], weights[f"{name}.bias"], config.layer_norm_eps
        )

    def heads(x: Tensor) -> Tensor:
        return x.view(n, width, config.num_attention_heads, -1).transpose(1, 2)

    places = weights["embeddings.position_embeddings.weight"][:width]
    x = weights["embeddings.word_embeddings.weight"][ids] + places
    x = normed("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0])
    whole = bool((lengths == width).all())
    mask = None if whole else (torch.arange(width) < lengths[:, None])[:, None, None, :]
    for layer in (f"encoder.layer.{index}" for index in range(config.num_hidden_layers)):
        q, k, v = (heads(through(f"{layer}.attention.self.{name}", x)) for name in ("query", "key", "value"))
        seen = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(n, width, -1)
        x = normed(f"{layer}.attention.output.LayerNorm", x + through(f"{layer}.attention.output.dense", seen))
        wide = gelu(through(f"{layer}.intermediate.dense", x))
        x = normed(f"{layer}.output.LayerNorm", x + through(f"{layer}.output.dense", wide))
    return x


def pooled(states: Tensor, lengths: Tensor) -> Tensor:
    """The mean over each text's own word pieces, scaled to length one."""
    kept = (torch.arange(states.shape[1]) < lengths[:, None]).unsqueeze(-1)
    return normalize((states * kept).sum(1) / lengths[:, None], dim=1)
