"""Images made upright: by their own grey levels, one image at a time."""

from __future__ import annotations

import pytest
import torch

from sordino import features
from sordino.errors import InputError
from sordino.features import patches, synthetic
from sordino.features.upright import upright

SIDE = 21


def stroke(lean: float, right: int = 0, down: int = 0) -> torch.Tensor:
    """A stroke that moves by `lean` pixels to the right with every pixel downwards, (1, 1, 21, 21)."""
    y, x = torch.meshgrid(torch.arange(SIDE) - SIDE // 2, torch.arange(SIDE) - SIDE // 2, indexing="ij")
    image = (1 - (x - lean * y).abs() / 2).clamp(min=0) * (y.abs() <= 6)
    return image.roll((down, right), (0, 1))[None, None].float()


def test_a_leaning_stroke_becomes_the_upright_one() -> None:
    for lean in (-0.4, 0.3, 0.5):
        difference = (upright(stroke(lean)) - stroke(0.0)).abs()
        assert float(difference.max()) < 0.26  # half-way between two pixels, interpolation takes a quarter off the top
        assert float((stroke(lean) - stroke(0.0)).abs().max()) > 0.7


def test_the_centre_of_mass_is_put_in_the_middle() -> None:
    assert torch.allclose(upright(stroke(0.0, right=3, down=-2)), stroke(0.0), atol=1e-4)


def test_an_upright_or_even_image_stays_as_it_is_and_brightness_does_not_matter() -> None:
    assert torch.allclose(upright(stroke(0.0)), stroke(0.0), atol=1e-4)
    even = torch.full((2, 3, 8, 9), 0.3)
    assert torch.allclose(upright(even), even)
    assert torch.allclose(upright(stroke(0.4) - 2), upright(stroke(0.4)) - 2, atol=1e-4)


def test_a_flat_stroke_is_not_torn_and_slopes_are_bounded() -> None:
    flat = torch.zeros(1, 1, SIDE, SIDE)
    flat[0, 0, SIDE // 2, 3:18] = 1.0
    assert torch.allclose(upright(flat), flat, atol=1e-4)
    assert bool(upright(stroke(3.0)).isfinite().all())


def test_a_record_is_seen_alike_whatever_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(7, 2, 9, 11, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("sordino.features.upright.CHUNK", 3)
    whole = upright(images)
    assert whole.shape == images.shape
    assert torch.allclose(whole[4:5], upright(images[4:5]), atol=1e-6)


@pytest.mark.parametrize("given", [torch.zeros(3, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)])
def test_what_is_not_an_image_is_refused(given: torch.Tensor) -> None:
    with pytest.raises(InputError, match="floating-point images"):
        upright(given)


def test_patches_of_upright_images_are_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "PICTURES", 60)
    monkeypatch.setattr(synthetic, "IMAGES", 80)
    spec = {"name": "patches", "side": 4, "atoms": 10, "grid": 2}
    plain, straight = features.build(spec), features.build({**spec, "upright": True})
    assert "upright" not in plain.spec  # the caches and cards of earlier runs keep their names
    assert torch.equal(straight(stroke(0.4)), plain(upright(stroke(0.4))))
    with pytest.raises(InputError, match="upright must be true or false"):
        features.build({**spec, "upright": 1})
