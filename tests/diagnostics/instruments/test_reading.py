"""The instruments against brute force, on problems where every gradient is known; and whose rows they may look at."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sordino.clipping import AutomaticClip, Clipping, FlatClip, L1Clip, NormalisedClip, PerLayerClip
from sordino.diagnostics.instruments import Reading, measure, noise_vectors, p_averaged, windowed_noise
from sordino.errors import InputError, Refused
from sordino.gradients import brute_force
from sordino.records.reading import row_reader


class Linear(nn.Module):
    """loss(w, x) = ⟨w, x⟩: the gradient of row x is x itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Linear(size, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x).squeeze(1)


def outputs(values: Tensor, targets: Tensor) -> Tensor:
    return values


def reading(gradients: Tensor, clipping: Clipping) -> Reading:
    rows = (gradients, torch.zeros(len(gradients)))
    return measure(Linear(gradients.shape[1]), outputs, rows, clipping, public="made up")


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 12),
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-5, 5),
    clip=st.floats(1e-2, 1e2),
    seed=st.integers(0, 1000),
)
def test_every_figure_is_that_of_brute_force(count: int, scale: float, shift: float, clip: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    g = scale * (torch.randn(count, 4, generator=generator, dtype=torch.float64) + shift)
    found, mean = reading(g, FlatClip(clip)), g.mean(0)
    clipped = g * (clip / g.norm(dim=1, keepdim=True)).clamp_max(1)
    assert found.sampling_noise == pytest.approx(
        float((g - mean).square().sum(1).mean()), rel=1e-6, abs=1e-9 * scale**2
    )
    assert found.gradient_norm == pytest.approx(float(mean.norm()))
    assert found.clipped_gradient_norm == pytest.approx(float(clipped.mean(0).norm()))
    assert found.clipped_square == pytest.approx(float(clipped.square().sum(1).mean()))
    assert found.clipped_share == float((g.norm(dim=1) > clip).double().mean())
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(mean, clipped.mean(0), dim=0)), abs=1e-9)
    assert found.norm_quantiles["0.25"] == pytest.approx(float(torch.quantile(g.norm(dim=1), 0.25)))


@pytest.mark.parametrize(
    "clipping", [AutomaticClip(0.1), NormalisedClip(0.1), PerLayerClip(0.1), L1Clip(0.1)], ids=lambda c: c.name
)
def test_every_clipping_is_read_and_the_square_is_never_too_small(
    clipping: Clipping, linear: nn.Module, records: tuple[Tensor, Tensor]
) -> None:
    rows = (records[0][:40], records[1][:40])
    loss = nn.functional.cross_entropy
    found = measure(linear, loss, rows, clipping, public="made up")
    every = [brute_force(linear, loss, row_reader(rows)(torch.tensor([i])), clipping) for i in range(40)]
    vectors = torch.stack([torch.cat([v.flatten() for v in one.sums.values()]) for one in every])
    assert found.clipped_gradient_norm == pytest.approx(float(vectors.mean(0).norm()), rel=1e-4)
    assert found.clipped_square >= float(vectors.square().sum(1).mean()) * (1 - 1e-5)
    assert found.norm_quantiles == measure(linear, loss, rows, FlatClip(1.0), public="made up").norm_quantiles


def test_opposite_rows_have_no_direction_to_compare() -> None:
    found = reading(torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64), FlatClip(0.5))
    assert (found.gradient_norm, found.cosine, found.sampling_noise) == (0.0, None, 1.0)
    assert "clip_cosine" not in found.metrics()


def test_a_row_that_is_not_finite_is_left_out() -> None:
    g = torch.tensor([[3.0, 0.0], [1.0, 0.0], [math.inf, 0.0]], dtype=torch.float64)
    found = reading(g, FlatClip(10.0))
    assert (found.gradient_norm, found.sampling_noise, found.clipped_share) == (2.0, 1.0, 0.0)
    with pytest.raises(InputError, match="only 1 of the 2 rows have a finite gradient"):
        reading(g[1:], FlatClip(1.0))


def test_the_rows_must_be_declared_public_or_the_reading_is_flagged(linear: nn.Module, records: object) -> None:
    loss = nn.functional.cross_entropy
    for look in (
        lambda **whose: measure(linear, loss, records, FlatClip(1.0), **whose),
        lambda **whose: p_averaged(linear, loss, records, FlatClip(1.0), 4, **whose),
        lambda **whose: noise_vectors(linear, loss, records, 4, **whose),
    ):
        with pytest.raises(Refused, match=r"without noise: give public= .* or not_private=True"):
            look()
        with pytest.raises(InputError, match="not both"):
            look(public="the web", not_private=True)
    assert measure(linear, loss, records, FlatClip(1.0), not_private=True).to_dict()["not_private"] is True
    assert measure(linear, loss, records, FlatClip(1.0), public="the web").to_dict()["not_private"] is False


def test_measuring_changes_neither_the_model_nor_the_global_generator(records: object) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    first = measure(model, nn.functional.cross_entropy, records, FlatClip(1.0), public="made up")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert first == measure(model, nn.functional.cross_entropy, records, FlatClip(1.0), public="made up")
    other = measure(model, nn.functional.cross_entropy, records, FlatClip(1.0), public="made up", seed=1)
    assert other.sampling_noise != first.sampling_noise, "dropout comes from the seed"


def test_averaging_p_rows_before_clipping_divides_the_sampling_noise_by_p() -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(6000, 3, generator=generator, dtype=torch.float64) + 1
    rows, model = (g, torch.zeros(len(g))), Linear(3)
    single = measure(model, outputs, rows, FlatClip(0.1), public="made up")
    for p in (2, 10):
        found = p_averaged(model, outputs, rows, FlatClip(0.1), p, public="made up")
        assert (found.group, found.rows) == (p, 6000)
        assert found.sampling_noise == pytest.approx(single.sampling_noise / p, rel=0.06)
        assert found.gradient_norm == pytest.approx(single.gradient_norm), "no row is lost"


def test_a_group_s_clipped_mean_is_what_brute_force_gives() -> None:
    g = torch.tensor([[4.0, 0.0], [0.0, 2.0], [6.0, 0.0], [0.0, 0.0], [9.0, 9.0]], dtype=torch.float64)
    found = p_averaged(Linear(2), outputs, (g, torch.zeros(5)), FlatClip(1.0), 2, public="made up", seed=3)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3))[:4]
    means = g[order].reshape(2, 2, 2).mean(1)
    clipped = means * (1 / means.norm(dim=1, keepdim=True)).clamp_max(1)
    assert found.clipped_gradient_norm == pytest.approx(float(clipped.mean(0).norm()))
    assert found.sampling_noise == pytest.approx(float((means - means.mean(0)).square().sum(1).mean()))


@pytest.mark.parametrize("p", [0, 3, True, 1.5])
def test_a_group_size_that_leaves_fewer_than_two_groups_is_refused(p: object) -> None:
    with pytest.raises(InputError, match="from 1 to 2, half of the 4 rows"):
        p_averaged(Linear(1), outputs, (torch.ones(4, 1).double(), torch.zeros(4)), FlatClip(1.0), p, public="x")  # type: ignore[arg-type]


def test_one_row_shows_no_sampling_noise() -> None:
    with pytest.raises(InputError, match="1 rows show no sampling noise"):
        reading(torch.ones(1, 2, dtype=torch.float64), FlatClip(1.0))


def test_noise_vectors_are_the_rows_less_their_mean_and_windows_average_them() -> None:
    generator = torch.Generator().manual_seed(0)
    history = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(4)]
    vectors = [noise_vectors(Linear(3), outputs, (g, torch.zeros(5)), 2, public="made up") for g in history]
    for g, found in zip(history, vectors, strict=True):
        assert torch.allclose(found, (g - g.mean(0))[:2])
    expected = (vectors[2] + vectors[3]).div(2).norm(dim=1).mean()
    assert windowed_noise(vectors, 2) == pytest.approx(float(expected))
    with pytest.raises(InputError, match="needs that many iterations"):
        windowed_noise(vectors, 5)


def test_independent_noise_falls_as_the_root_of_the_window_and_equal_noise_stays() -> None:
    generator = torch.Generator().manual_seed(0)
    independent = [torch.randn(50, 200, generator=generator) for _ in range(16)]
    assert windowed_noise(independent, 16) == pytest.approx(windowed_noise(independent, 1) / 4, rel=0.02)
    assert windowed_noise(independent[:1] * 16, 16) == pytest.approx(windowed_noise(independent[:1], 1))
