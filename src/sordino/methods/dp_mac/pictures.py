"""Images for the report of a DP-MAC run: reconstructions of test images, and learned features.

Everything is computed from public test images and from released values (weights, projection), so it is covered by the
run's guarantee and has no privacy cost (Figs. 1 and 5 of Harder et al. 2018; its curves are plots of the report).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sordino.methods.dp_mac.network import Network, chain
from sordino.methods.dp_mac.pca import Projection
from sordino.methods.dp_mac.recipe import MacRecipe
from sordino.report.pictures import grid

SHOWN = 10


def pictures(
    network: Network, projection: Projection | None, images: Tensor, inputs: Tensor, made: MacRecipe
) -> list[dict[str, Any]]:
    """JSON-serialisable pictures. `images`: public test images (n, 1, h, w); `inputs`: the same as network inputs."""
    if images.dim() != 4 or images.shape[1] != 1:
        return []
    side = tuple(images.shape[2:])
    if made.autoencoder:
        with torch.no_grad():
            rebuilt = network(inputs[:SHOWN]) / made.multiply
        rows = torch.cat([images[:SHOWN, 0], rebuilt.reshape(-1, *side)])
        shown = grid(
            rows, SHOWN, "Reconstructions", "Test images (above) and their reconstructions (below).",
            stretch=False,
        )  # fmt: skip
        first = chain(network)[0].weight[: 3 * SHOWN].reshape(-1, *side)
        return [shown, grid(first, SHOWN, "Features of the first layer", "The weights of its first units, as images.")]
    return [
        grid(
            features(network, projection, made).reshape(-1, *side), SHOWN, "Learned features",
            "For each class the three hidden units with the largest weight for it (one column each): the image to "
            "which the unit responds.",
        )
    ]  # fmt: skip


def features(network: Network, projection: Projection | None, made: MacRecipe) -> Tensor:
    """(3·classes, pixels): row by row, the pixels' weights of each class's strongest units."""
    layers = chain(network)
    strength = layers[-1].weight
    for layer in reversed(layers[1:-1]):  # further hidden layers enter by their weights only
        strength = strength @ layer.weight
    weights = layers[0].weight * made.multiply
    if projection is not None:
        weights = weights @ projection.matrix.T.to(weights.dtype)
    strongest = strength.topk(3, dim=1).indices  # (classes, 3)
    return weights[strongest.T.reshape(-1)]
