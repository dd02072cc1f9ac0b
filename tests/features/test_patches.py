"""Patches of synthetic pictures as filters: a public constant, each image by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sordino import features
from sordino.errors import InputError
from sordino.features import patches, synthetic
from sordino.features.patches import Patches

IMAGES = torch.randn(6, 3, 12, 14, generator=torch.Generator().manual_seed(0))
SMALL = Patches(side=4, atoms=10, grid=2, threshold=0.1, soften=0.2)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "PICTURES", 60)
    monkeypatch.setattr(synthetic, "IMAGES", 80)


def by_hand(image: torch.Tensor, extract: Patches) -> torch.Tensor:
    """The definition, patch by patch, in double precision."""
    cut = extract._patches(tuple(image.shape))
    values, vectors = torch.linalg.eigh(cut.T @ cut / len(cut))
    whitening = vectors @ torch.diag((values.clamp(min=0) + patches.FLOOR * values.mean()) ** -0.5) @ vectors.T
    atoms = torch.nn.functional.normalize(cut[: extract.atoms] @ whitening, dim=1)
    down, across = (side - extract.side + 1 for side in image.shape[1:])
    maps = torch.zeros(2 * extract.atoms, down, across, dtype=torch.float64)
    for row in range(down):
        for column in range(across):
            patch = image[:, row : row + extract.side, column : column + extract.side].double().flatten()
            q = whitening @ (patch - patch.mean())
            near = atoms @ q / (q.norm() + extract.soften)
            maps[:, row, column] = torch.cat([near - extract.threshold, -near - extract.threshold]).clamp(min=0)
    return torch.nn.functional.adaptive_avg_pool2d(maps, extract.grid)


def test_the_features_are_those_of_the_definition() -> None:
    out = SMALL(IMAGES[:1])
    assert out.shape == (1, 20, 2, 2)
    assert float(out.max()) > 0.01
    assert torch.allclose(out[0].double(), by_hand(IMAGES[0], SMALL), atol=1e-5)


def test_a_record_is_seen_alike_whatever_stands_beside_it_and_however_passes_are_cut() -> None:
    whole = SMALL(IMAGES)
    in_parts = Patches(side=4, atoms=10, grid=2, threshold=0.1, soften=0.2, chunk=4)(IMAGES)
    assert torch.allclose(whole, in_parts, atol=1e-6)
    assert torch.allclose(whole[2:3], SMALL(IMAGES[2:3]), atol=1e-6)


def test_mirrored_features_do_not_tell_left_from_right_but_for_the_order_of_the_cells() -> None:
    both = Patches(side=4, atoms=10, grid=2, threshold=0.1, soften=0.2, mirror=True)
    plain = SMALL(IMAGES)
    assert torch.allclose(both(IMAGES), both(IMAGES.flip(3)), atol=1e-5)
    assert not torch.allclose(plain, SMALL(IMAGES.flip(3)), atol=1e-3)


def test_brightness_does_not_matter_and_a_flat_image_has_no_features() -> None:
    assert torch.allclose(SMALL(IMAGES + 3), SMALL(IMAGES), atol=1e-4)
    assert float(SMALL(torch.full((1, 3, 12, 14), 0.7)).abs().max()) < 1e-4


def test_an_extractor_takes_the_root_and_whitens(tmp_path: Path) -> None:
    spec = {"name": "patches", "side": 4, "atoms": 10, "grid": 2, "threshold": 0.1, "soften": 0.2}
    assert torch.allclose(features.build(spec)(IMAGES), SMALL(IMAGES).sqrt())
    extract = features.build({**spec, "whiten": 0.5})
    out = extract.cached(IMAGES, tmp_path)
    assert out.shape == (6, 80)
    assert torch.allclose(out.norm(dim=1), torch.ones(6), atol=1e-5)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2  # the features, and the map for other records
    assert torch.allclose(extract(IMAGES), out, atol=1e-5)
    other = features.build({**spec, "whiten": 0.7}).cached(IMAGES, tmp_path)
    assert not torch.allclose(other, out, atol=1e-3)


def test_patches_of_several_sizes_stand_one_after_the_other_and_are_whitened_together(tmp_path: Path) -> None:
    spec = {"name": "patches", "atoms": 10, "grid": 2, "threshold": 0.1, "soften": 0.2}
    small, large = (features.build({**spec, "side": side})(IMAGES) for side in (4, 5))
    assert torch.equal(features.build({**spec, "side": [4, 5]})(IMAGES), torch.cat([small, large], 1))
    assert torch.equal(features.build({**spec, "side": [4]})(IMAGES), small)
    both = features.build({**spec, "side": [4, 5], "whiten": 0.5})
    assert both.cached(IMAGES, tmp_path).shape == (6, 160)
    assert torch.allclose(both.cached(IMAGES, tmp_path)[2:3], both(IMAGES[2:3]), atol=1e-5)  # each image by itself


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"side": 1}, "at least 2"),
        ({"side": []}, "a list with at least one"),
        ({"side": [6, 1]}, "at least 2"),
        ({"side": 2.5}, "integer"),
        ({"atoms": 0}, "integer from 1"),
        ({"grid": True}, "integer"),
        ({"threshold": -0.1}, "from 0 to 1"),
        ({"threshold": 1.5}, "from 0 to 1"),
        ({"soften": "a"}, "number"),
        ({"mirror": 1}, "true or false"),
        ({"whiten": 9}, "from 0 to 4"),
        ({"power": -1}, "from 0 to 4"),
        ({"sides": 3}, "did you mean 'side'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(option: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        features.build({"name": "patches", **option})


@pytest.mark.parametrize("images", [IMAGES[0], IMAGES.to(torch.int64), IMAGES[:, :, :4]])
def test_what_holds_no_patches_is_refused(images: torch.Tensor) -> None:
    with pytest.raises(InputError, match="patches"):
        SMALL(images)
