"""Whitening by synthetic pictures: a public constant that makes the directions of features even."""

from __future__ import annotations

import pytest
import torch

from sordino import features
from sordino.errors import InputError
from sordino.features import synthetic

SPEC = {"name": "scattering", "normalise": "group", "groups": 27, "frequencies": 1, "power": 0.5}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "IMAGES", 300)


def test_the_pictures_are_the_same_every_time_and_have_mean_zero_and_variance_one() -> None:
    images = synthetic.pictures(40, (1, 16, 16))
    assert images.shape == (40, 1, 16, 16)
    assert abs(float(images.mean())) < 1e-5
    assert float(images.std()) == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(images, synthetic.pictures(40, (1, 16, 16)))
    assert synthetic.pictures(4, (3, 8, 12)).shape == (4, 3, 8, 12)


def test_the_map_whitens_the_synthetic_pictures_themselves_and_gives_records_of_length_one() -> None:
    extract = features.build(SPEC)
    images = synthetic.pictures(300, (1, 16, 16))
    found = synthetic.whitening(extract, (1, 16, 16), 1.0)
    rows = (extract(images).flatten(1).double() - found.mean) @ found.matrix
    values = torch.linalg.eigvalsh(rows.T @ rows / len(rows))
    assert float(values.max()) == pytest.approx(1.0, abs=1e-3)
    assert float((values > 0.9).double().mean()) > 0.5
    out = features.build({**SPEC, "whiten": 0.8})(images)
    assert out.shape == (300, 81)
    assert torch.allclose(out.norm(dim=1), torch.ones(300), atol=1e-5)


def test_a_record_is_seen_alike_whatever_stands_beside_it() -> None:
    extract = features.build({**SPEC, "whiten": 0.5})
    images = torch.rand(6, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(extract(images)[2:3], extract(images[2:3]), atol=1e-5)


@pytest.mark.parametrize("option", [{"whiten": -1}, {"whiten": True}, {"power": "a"}, {"power": 9.0}])
def test_settings_that_mean_nothing_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(InputError, match="from 0 to 4"):
        features.build({**SPEC, **option})


def test_features_of_published_networks_are_normalised_within_a_record() -> None:
    rows = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [2], [3], [4], [0]])
    out = features.record_normalise(rows)
    assert torch.allclose(out[:4].mean(1), torch.zeros(4), atol=1e-6)
    assert torch.allclose(out[:4].norm(dim=1), torch.ones(4))
    assert torch.equal(out[4], torch.zeros(7))
