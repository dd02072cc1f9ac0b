"""Z-steps lower the MAC objective, and where they lead is back-propagation's recursion."""

from __future__ import annotations

import pytest
import torch
from mac_nets import network, records

from sordino.errors import InputError
from sordino.methods.dp_mac.network import Network, chain, loss
from sordino.methods.dp_mac.taylor import expand
from sordino.methods.dp_mac.zsteps import ZSteps, auxiliary, backward, residual_gradient


def objective(net: Network, z: list[torch.Tensor], y: torch.Tensor, mu: float) -> torch.Tensor:
    layers = chain(net)
    total = loss(net.output)(layers[-1].pre(z[-1]), y)
    for layer, below, above in zip(layers[:-1], z[:-1], z[1:], strict=True):
        total = total + 0.5 * mu * (above - layer(below)).square().sum(1)
    return total


@pytest.mark.parametrize("activation", ["linear", "relu", "softplus"])
@pytest.mark.parametrize("output", ["squared", "sigmoid"])
def test_the_gradient_is_autograds(activation: str, output: str) -> None:
    net = network(activation=activation, output=output)
    x, y = records(net)
    z = [x, *(torch.randn(len(x), w, dtype=torch.float64).requires_grad_() for w in (5, 4))]
    expected = torch.autograd.grad(objective(net, z, y, 1.7).sum(), z[1:])
    for k, value in enumerate(expected, 1):
        torch.testing.assert_close(residual_gradient(chain(net), z, y, k, 1.7), value)


@pytest.mark.parametrize("order", ["joint", "sweep"])
@pytest.mark.parametrize("start", ["forward", "backward"])
def test_z_steps_lower_the_objective_of_every_record(order: str, start: str) -> None:
    net = network()
    x, y = records(net)
    forward = [x]
    for layer in chain(net)[:-1]:
        forward.append(layer(forward[-1]))
    found = auxiliary(chain(net), x, y, ZSteps(40, 0.02, start=start, order=order, rate=0.1))
    assert (objective(net, found, y, 1.0) < objective(net, forward, y, 1.0)).all()


def test_the_radius_is_kept() -> None:
    net = network()
    x, y = records(net)
    for z in auxiliary(chain(net), 9 * x, y, ZSteps(10, 0.3, radius=0.8)):
        assert float(z.norm(dim=1).max()) <= 0.8 * (1 + 1e-12)


def test_backward_residuals_are_back_propagation() -> None:
    """The layer gradients of a backward start are rate·μ times those of the network, up to O(rate²)."""
    net = network(output="squared")
    x, y = records(net)
    expected = torch.autograd.grad(loss("squared")(net(x), y).sum(), [*net.parameters()])
    rate = 1e-6
    z = auxiliary(chain(net), x, y, ZSteps(0, 0.1, start="backward", rate=rate, mu=2.0))
    ones = torch.ones(len(x), dtype=torch.float64)
    for k, layer in enumerate(chain(net)[:-1]):
        found = expand(layer, z[k], z[k + 1], 2.0).gradient_sum(ones) / (2.0 * rate)
        torch.testing.assert_close(found[:, :-1], expected[2 * k], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[:, -1], expected[2 * k + 1], rtol=1e-4, atol=1e-4)


def test_at_the_minimum_the_residuals_obey_the_recursion_of_back_propagation() -> None:
    """r_k = J_{k+1}ᵀ·r_{k+1}: so MAC's layer gradients are those of back-propagation at the moved coordinates."""
    net = network(activation="softplus", output="squared")
    x, y = records(net)
    layers, z = chain(net), auxiliary(chain(net), x, y, ZSteps(3000, 0.01))
    residual = [above - layer(below) for layer, below, above in zip(layers[:-1], z[:-1], z[1:], strict=True)]
    a = layers[1].pre(z[1])
    torch.testing.assert_close(
        residual[0], (residual[1] * layers[1].activation.first(a)) @ layers[1].weight, rtol=1e-2, atol=1e-3
    )
    pulled = backward(layers, z, y)
    torch.testing.assert_close(residual[1], -pulled[1], rtol=1e-2, atol=1e-3)


def test_a_forward_start_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match="no hidden layer learns"):
        ZSteps(0)
