"""Under Neutral nothing is random: a row gets the same numbers alone and in a batch, at every level."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.gradients.checks.assurance import LEVELS
from sordino.gradients.checks.neutral import Neutral

D = torch.distributions


def _lstm() -> nn.Module:
    torch.manual_seed(0)
    return nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)


def _encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True)


def _attended(x: Tensor) -> Tensor:
    q = x[:, None].expand(-1, 3, -1) * torch.arange(1.0, 4)[:, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


LSTM, ENCODER = _lstm(), _encoder()
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli of a tensor": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli with p": lambda x: torch.bernoulli(x, 0.5),
    "bernoulli_ with p": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "rand": lambda x: torch.rand(x.shape),
    "rand of doubles": lambda x: torch.rand(x.shape, dtype=torch.float64),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(len(x), 4),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(10, x.shape),
    "randint from low": lambda x: torch.randint(-3, 10, x.shape),
    "randint with keywords": lambda x: torch.randint(low=2, high=5, size=x.shape),
    "randint_like": lambda x: torch.randint_like(x, 3, 10),
    "normal of tensors": lambda x: torch.normal(x, x.abs() + 1),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of a deviation": lambda x: torch.normal(1.0, x.abs() + 1),
    "normal of a size": lambda x: torch.normal(0.0, 1.0, x.shape),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal_ with keywords": lambda x: torch.empty_like(x).normal_(mean=1, std=2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.5),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "random_": lambda x: torch.empty_like(x).random_(3, 9),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2),
    "multinomial with replacement": lambda x: torch.multinomial(x.softmax(1), 9, replacement=True),
    "poisson": lambda x: torch.poisson(x.abs()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5.0), x.sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout1d": lambda x: F.dropout1d(x[:, None], 0.5),
    "dropout2d": lambda x: F.dropout2d(x[:, :, None, None], 0.5),
    "dropout3d": lambda x: F.dropout3d(x[:, :, None, None, None], 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[:, :, None], 0.5, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": _attended,
    "lstm": lambda x: LSTM(x[:, None].expand(-1, 3, -1))[0],
    "encoder layer": lambda x: ENCODER(x[:, None].expand(-1, 3, -1)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "hard gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "fractional_max_pool": lambda x: F.fractional_max_pool2d(
        x[:, :, None, None].expand(-1, -1, 5, 5) * torch.arange(25.0).reshape(5, 5), 2, 3
    ),
    "Normal": lambda x: D.Normal(x, 1.0).rsample(),
    "Bernoulli": lambda x: D.Bernoulli(logits=x).sample(),
    "Categorical": lambda x: D.Categorical(logits=x).sample(),
    "OneHotCategorical": lambda x: D.OneHotCategorical(logits=x).sample(),
    "Uniform": lambda x: D.Uniform(x, x + 1).rsample(),
    "Exponential": lambda x: D.Exponential(x.abs() + 1).rsample(),
    "Laplace": lambda x: D.Laplace(x, 1.0).rsample(),
    "Gamma": lambda x: D.Gamma(x.abs() + 1, 1.0).rsample(),
    "Beta": lambda x: D.Beta(x.abs() + 1, x.abs() + 2).rsample(),
    "Dirichlet": lambda x: D.Dirichlet(x.abs() + 1).rsample(),
    "Poisson": lambda x: D.Poisson(x.abs() + 1).sample(),
    "Gumbel": lambda x: D.Gumbel(x, 1.0).rsample(),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x, torch.eye(4)).rsample(),
    "RelaxedOneHotCategorical": lambda x: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x).rsample(),
    "StudentT": lambda x: D.StudentT(x.abs() + 3).rsample(),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", DRAWS)
def test_a_row_draws_the_same_alone_as_in_a_batch(name: str, level: float) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with Neutral(level), torch.no_grad():
        whole = DRAWS[name](x)
        rows = torch.cat([DRAWS[name](x[i : i + 1]) for i in range(len(x))])
        again = DRAWS[name](x)
    assert torch.equal(whole, again)
    assert whole.shape == rows.shape
    assert torch.allclose(whole.double(), rows.double(), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert bool(torch.isfinite(whole).all())


@pytest.mark.parametrize(
    "name", ["rand", "randn_like", "uniform_", "normal_", "bernoulli with p", "randint", "exponential_"]
)
def test_levels_give_different_numbers(name: str) -> None:
    x = torch.zeros(2, 4)
    found = []
    for level in LEVELS:
        with Neutral(level):
            found.append(DRAWS[name](x).double())
    assert not torch.equal(found[1], found[2])


def test_integers_stay_in_their_range_at_every_level() -> None:
    for level in (0.0, 0.02, 0.5, 0.98, 1.0):
        with Neutral(level):
            assert 2 <= int(torch.randint(2, 5, ())) < 5
            assert 2 <= int(torch.randint(low=2, high=5, size=())) < 5
            assert int(torch.randint(1, ())) == 0
            assert 3 <= int(torch.empty(()).random_(3, 9)) < 9
            assert 3 <= int(torch.randint_like(torch.zeros(()), 3, 4)) < 4


def test_a_permutation_moves_every_row_and_is_one() -> None:
    with Neutral():
        order = torch.randperm(5)
    assert sorted(order.tolist()) == list(range(5))
    assert all(i != place for place, i in enumerate(order.tolist()))


def test_gradients_pass_through_neutral_dropout_as_through_the_identity() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with Neutral(0.98):
        torch.native_dropout(x, 0.5, True)[0].sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


def test_numbers_are_random_again_afterwards() -> None:
    with Neutral():
        torch.rand(3)
    assert not torch.equal(torch.rand(8), torch.rand(8))
