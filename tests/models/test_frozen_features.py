"""The frozen networks are the published ones: the same function as timm's and transformers' with the same weights."""

from __future__ import annotations

import timm
import torch
from transformers import BertConfig, BertModel

from sordino.features import efficientnet, minilm


def test_efficientnet_lite0_is_timms_tensorflow_port() -> None:
    ours, theirs = efficientnet.EfficientNetLite0(), timm.create_model("tf_efficientnet_lite0").eval()
    with torch.no_grad():
        for tensor in ours.state_dict().values():  # statistics too, so that folding has something to fold
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) * 0.5 + 0.1 if tensor.dim() < 2 else torch.randn_like(tensor) / 9)
    tensors = zip(theirs.state_dict(), ours.state_dict().values(), strict=True)  # the same order, other names
    theirs.load_state_dict(dict(tensors))
    for side in (64, 97):  # an odd side is padded otherwise
        images = torch.randn(2, 3, side, side)
        with torch.no_grad():
            expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
            assert expected.std() > 0
            assert torch.allclose(ours.eval().features(images), expected, atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(efficientnet.folded(ours).features(images), expected, atol=1e-3)


def test_minilm_is_transformers_bert() -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    theirs = BertModel(config).eval()
    fields = minilm.Config.__dataclass_fields__
    ours = minilm.Config(**{name: getattr(config, name) for name in fields})
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if name in ours.shapes()}
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == ours.shapes()
    ids, lengths = torch.randint(1, 50, (4, 9)), torch.tensor([9, 2, 5, 7])
    mask = torch.arange(9) < lengths[:, None]
    with torch.no_grad():
        states = theirs(ids, attention_mask=mask.long()).last_hidden_state
        encoded = minilm.encode(ours, weights, ids, lengths)
    assert torch.allclose(encoded[mask], states[mask], atol=1e-5)
    mean = (states * mask.unsqueeze(-1)).sum(1) / lengths[:, None]
    expected = mean / mean.norm(dim=1, keepdim=True)
    assert torch.allclose(minilm.pooled(encoded, lengths), expected, atol=1e-5)
