"""What leaves a hidden-state run, and that every step is the one that is accounted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.errors import InputError, Refused
from sordino.methods.hidden_state import HiddenState, Huber, Softmax, Squared, plan
from sordino.methods.hidden_state.training import CHUNK, Records, bounded, descend, gradient_sum, train_hidden
from sordino.plan import Plan
from sordino.plan.spent import from_ledger
from sordino.randomness import RandomSource
from sordino.release.ledger import Ledger, read_ledger
from sordino.sampling import LogicalBatch
from sordino.schedule import Schedule, pieces


def blobs(records: int = 240, features: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, features, generator=generator) * 2
    labels = torch.arange(records) % classes
    return centres[labels] + torch.randn(records, features, generator=generator), labels


def small_plan(**changes: object) -> Plan:
    options: dict[str, object] = {
        "loss": Softmax(3, cap=0.5),
        "features": 6,
        "records": 240,
        "batch": 60,
        "epochs": 5,
        "regularisation": 0.01,
        "delta": 1e-5,
        "noise_multiplier": 0.5,
        "insecure_seed": 7,
    }
    return plan(**options | changes)  # type: ignore[arg-type]


def accuracy(model: torch.nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    return {"test_accuracy": float((model(data[0]).argmax(1) == data[1]).double().mean())}


def test_it_learns_and_leaves_only_the_last_iterate(tmp_path: Path) -> None:
    data = blobs()
    result = train_hidden(small_plan(epochs=30), data, out=tmp_path, evaluate=lambda model: accuracy(model, data))
    assert result.metrics[-1]["test_accuracy"] > 0.9
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.jsonl", "metrics.jsonl"}  # no checkpoint
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 120
    _, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert [entry["step"] for entry in entries] == list(range(120))
    assert {entry["purpose"] for entry in entries} == {"iterate"}
    assert all(not isinstance(value, list) for entry in entries for value in entry.values())


def test_without_noise_a_step_is_gradient_descent_on_the_regularised_objective() -> None:
    """Little noise: the iterates follow w − η·(mean gradient + λ·w), computed by autograd, to the noise's size."""
    data, made = blobs(), small_plan(batch=240, sampling="full", epochs=4, noise_multiplier=0.001)
    method = made.method
    assert isinstance(method, HiddenState)
    found = descend(made, Records.of(data, method), source=made.source(), ledger=Ledger.open(None, made.to_dict()))
    rows = bounded(data[0], 1.0)
    rows = torch.cat([rows, torch.ones(240, 1, dtype=torch.float64)], 1)
    weights = torch.zeros(3, 7, dtype=torch.float64, requires_grad=True)
    size = method.certificate.best_lr
    for _ in range(4):
        objective = method.loss.value(rows @ weights.T, data[1]).mean() + 0.01 / 2 * weights.square().sum()
        (slope,) = torch.autograd.grad(objective, weights)
        weights = (weights - size * slope).detach().requires_grad_()
    noise = size * 0.001 * made.sensitivity / 240 * math.sqrt(4)
    assert (found - weights.detach()).abs().max() < 6 * noise < 1e-3 * weights.abs().max()


def test_the_regulariser_acts_outside_of_what_bounds_the_gradients() -> None:
    """With a cap near zero the data pull hardly at all: weights must shrink by (1 − ηλ) per step, whatever the cap."""
    made = small_plan(loss=Softmax(3, cap=1e-6), regularisation=0.5, lr=0.1, batch=240, epochs=1, noise_multiplier=1.0)
    method = made.method
    assert isinstance(method, HiddenState)
    records = Records.of(blobs(), method)
    weights = torch.full((3, 7), 100.0, dtype=torch.float64)
    whole = LogicalBatch(0, torch.arange(240), CHUNK)
    summed = gradient_sum(method.loss, records, weights, whole) - (240 / 0.1) * (1 - 0.1 * 0.5) * weights
    assert torch.allclose(-(0.1 / 240) * summed, 0.95 * weights, atol=1e-4)


def test_noise_has_the_size_that_the_accountant_is_told() -> None:
    made = small_plan(steps=2, epochs=None, noise_multiplier=3.0, noise_factors=pieces((0, 1.0), (0.5, 4.0)))
    method = made.method
    assert isinstance(method, HiddenState)
    run = method.run(made)
    features = torch.zeros(240, 6)
    finals = []
    for seed in range(150):
        ledger = Ledger.open(None, made.to_dict())
        records = Records.of((features, torch.zeros(240, dtype=torch.long)), method)
        finals.append(descend(made, records, source=RandomSource.seeded(seed), ledger=ledger)[:, :6])
    shrink = 1 - run.step_sizes[1] * run.strong_convexity
    expected = math.hypot(shrink * run.step_sizes[0] * run.noise_stds[0], run.step_sizes[1] * run.noise_stds[1])
    measured = float(torch.stack(finals).std())
    assert abs(measured / expected - 1) < 5 / math.sqrt(2 * 150 * 18)
    assert run.noise_stds[1] == 4 * run.noise_stds[0]
    assert math.isclose(run.noise_stds[0], 3.0 * made.sensitivity / 60)
    assert np.allclose(run.noise_multipliers, [3.0, 12.0])  # the paper's σ_mul is ours


def test_long_features_are_scaled_down_and_bad_records_count_for_nothing() -> None:
    features, labels = blobs()
    features[3], features[5, 2] = 1e30, math.nan
    method = small_plan().method
    assert isinstance(method, HiddenState)
    records = Records.of((features, labels), method)
    rows, _ = records.rows(torch.arange(240))
    assert rows[:, :6].norm(dim=1).max() <= 1 + 1e-12
    assert torch.equal(rows[5, :6], torch.zeros(6, dtype=torch.float64))
    assert records.dropped == 1
    assert train_hidden(small_plan(), (features, labels)).not_private == {"dropped_records": 1}


def test_rows_are_the_same_held_in_memory_or_made_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    made, data = small_plan(), blobs()
    whole = train_hidden(made, data).model.state_dict()
    monkeypatch.setattr("sordino.methods.hidden_state.training.HELD", 0)
    parts = train_hidden(made, data, chunk=7).model.state_dict()
    assert all(torch.allclose(whole[name], parts[name], atol=1e-9) for name in whole)


def test_published_values_lie_on_the_grid_of_the_release() -> None:
    """The weights are a public number times multiples of a power of two: no digit below the grid."""
    made = small_plan(batch=240, sampling="full", epochs=3, lr=0.5, bias=0.0)
    weights = train_hidden(made, blobs()).model.state_dict()["weight"]
    grid = 2.0 ** (math.frexp(made.noise.noise_multiplier * made.sensitivity)[1] - 1 - 32)
    multiples = weights / (-0.5 / 240) / grid
    assert torch.allclose(multiples, multiples.round(), rtol=0, atol=1e-3)


def test_a_killed_run_is_not_resumed_but_a_seeded_one_may_be_repeated(tmp_path: Path) -> None:
    data, seeded, secure = blobs(), small_plan(), small_plan(insecure_seed=None)
    first = train_hidden(seeded, data, out=tmp_path / "seeded").model.state_dict()
    again = train_hidden(seeded, data, out=tmp_path / "seeded", resume=True).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    with pytest.raises(InputError, match="another directory"):
        train_hidden(seeded, data, out=tmp_path / "seeded")
    train_hidden(secure, data, out=tmp_path / "secure")
    with pytest.raises(Refused, match="published nothing"):
        train_hidden(secure, data, out=tmp_path / "secure", resume=True)


def test_the_ledger_tells_the_plan_s_epsilon(tmp_path: Path) -> None:
    made = small_plan(insecure_seed=None)
    train_hidden(made, blobs(), out=tmp_path)
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert math.isclose(from_ledger(header, entries, 1e-5)["epsilon"], made.guarantee().epsilon)
    some = from_ledger(header, entries[:7], 1e-5)["epsilon"]  # as if the iterate after 7 steps had been published
    assert some > 0
    assert from_ledger(header, [], 1e-5)["epsilon"] == 0
    with pytest.raises(InputError, match="differ"):
        from_ledger(header, [{**entries[0], "noise_multiplier": 9.0}], 1e-5)
    with pytest.raises(InputError, match="a step of the run is missing"):
        from_ledger(header, entries[1:], 1e-5)
    with pytest.raises(InputError, match="no release"):
        from_ledger(header, [{**entries[0], "purpose": "gradient"}], 1e-5)


def test_regression_with_squared_and_huber_losses() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.nn.functional.normalize(torch.randn(400, 3, generator=generator))
    targets = features @ torch.tensor([0.5, -0.3, 0.2])
    for loss, radius in ((Huber(1, bound=1.0), None), (Squared(1), 2.0)):
        made = plan(
            loss=loss, features=3, records=400, batch=400, sampling="full", epochs=200, regularisation=1e-3, bias=0.0,
            delta=1e-5, noise_multiplier=0.01, radius=radius, insecure_seed=1,
        )  # fmt: skip
        model = train_hidden(made, (features, targets)).model
        assert (model(features).squeeze(1) - targets).abs().max() < 0.05


def test_iterates_stay_in_the_ball() -> None:
    made = small_plan(radius=0.01, noise_multiplier=5.0)
    weights = torch.cat([p.flatten() for p in train_hidden(made, blobs()).model.parameters()])
    assert weights.norm() <= 0.01 * (1 + 1e-12)


def test_wrong_inputs_are_refused_before_anything_is_released(tmp_path: Path) -> None:
    features, labels = blobs()
    for data, match in (((features[:, :5], labels), "6 features"), ((features[:100], labels[:100]), "240 records")):
        with pytest.raises(InputError, match=match):
            train_hidden(small_plan(), data, out=tmp_path / "run")
    assert read_ledger(tmp_path / "run" / "ledger.jsonl")[1] == ()
    with pytest.raises(InputError, match="hidden-state plans"):
        train_hidden(Plan.dpsgd(delta=1e-5, records=240, expected_batch=60, epochs=1, epsilon=3), (features, labels))


def test_schedules_of_step_sizes_are_followed() -> None:
    made = small_plan(lr=Schedule("linear", (0.5, 0.05)), batch=240, sampling="full", epochs=10)
    method = made.method
    assert isinstance(method, HiddenState)
    assert np.allclose(method.run(made).step_sizes, np.linspace(0.5, 0.05, 10))


@pytest.mark.parametrize("sampling", ["partition", "without-replacement", "full"])
def test_the_three_algorithms(sampling: str) -> None:
    """Fixed partition, fresh subsets, all records: each learns, and its guarantee names its sampler."""
    batch = 240 if sampling == "full" else 60
    made = small_plan(sampling=sampling, batch=batch, epochs=None, steps=24, noise_multiplier=1.0)
    result = train_hidden(made, blobs(), evaluate=lambda model: accuracy(model, blobs()))
    assert result.metrics[-1]["test_accuracy"] > 0.6
    assert result.guarantee is not None
    assert result.guarantee.epsilon <= result.guarantee.beside["epsilon_if_every_iterate_were_seen"]
    run = made.method.run(made)  # type: ignore[attr-defined]
    assert run.sampling == sampling
