"""timm's image models run through the engine unmodified and match the loop over records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
from timm.layers import GroupNorm
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum, fix

SMALL_VIT = {"img_size": 32, "patch_size": 8, "num_classes": 10}


def resnet18() -> nn.Module:
    return timm.create_model("resnet18", num_classes=10, norm_layer=partial(GroupNorm, num_groups=16))


def vit_tiny() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=4, **SMALL_VIT)


def vit_tiny_with_layerscale() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=2, init_values=1e-5, qk_norm=True, **SMALL_VIT)


def deit_tiny() -> nn.Module:
    return timm.create_model("deit_tiny_patch16_224", depth=4, **SMALL_VIT)


def convnext_atto() -> nn.Module:
    return timm.create_model("convnext_atto", num_classes=10)


def mixer() -> nn.Module:
    return MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=3, embed_dim=64)


def images(records: int = 3, size: int = 32) -> Rows:
    return Rows(torch.randn(records, 3, size, size, dtype=torch.float64), torch.arange(records) % 10)


@pytest.mark.parametrize("build", [resnet18, vit_tiny, vit_tiny_with_layerscale, deit_tiny, convnext_atto, mixer])
def test_timm_model_matches_the_loop(build: Callable[[], nn.Module], agree, awaken) -> None:
    agree(awaken(build()), nn.CrossEntropyLoss(), images())


def test_distilled_deit_with_two_outputs_matches_the_loop(agree, awaken) -> None:
    model = awaken(timm.create_model("deit_tiny_distilled_patch16_224", depth=2, **SMALL_VIT))
    model.set_distilled_training(True)

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        head, distilled = outputs
        return F.cross_entropy(head, targets, reduction="none") + F.cross_entropy(distilled, targets, reduction="none")

    agree(model, loss, images())


def test_frozen_backbone_with_a_trained_head(agree, awaken) -> None:
    model = awaken(vit_tiny())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head.") or name == "cls_token")
    ours = agree(model, nn.CrossEntropyLoss(), images())
    assert set(ours.sums) == {"cls_token", "head.weight", "head.bias"}


def test_augmented_records_have_the_norm_of_their_mean(agree, awaken) -> None:
    """Two views of each of three images are three records, not six."""
    model = awaken(vit_tiny())
    views = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    rows = Rows(views, torch.arange(6) // 2, record=torch.arange(6) // 2, records=3)
    assert agree(model, nn.CrossEntropyLoss(), rows).norms.shape == (3,)


def test_batchnorm_in_training_mode_is_refused_by_name() -> None:
    model = timm.create_model("resnet18", num_classes=10).double().train()
    with pytest.raises(Refused, match=r"bn1") as refusal:
        clipped_sum(model, nn.CrossEntropyLoss(), images(), FlatClip(1.0))
    assert "fix" in str(refusal.value)


def test_fix_makes_resnet18_trainable_and_leaves_the_original_alone(agree, awaken) -> None:
    model = timm.create_model("resnet18", num_classes=10)
    fixed = fix(model)
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in fixed.modules())
    agree(awaken(fixed), nn.CrossEntropyLoss(), images())


def test_batchnorm_in_evaluation_mode_does_not_mix_records(agree, awaken) -> None:
    """Frozen statistics are a per-record affine map: nothing to refuse."""
    model = awaken(timm.create_model("resnet18", num_classes=10))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    agree(model, nn.CrossEntropyLoss(), images())
