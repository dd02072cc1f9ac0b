"""DP-MAC (Harder, Köhler, Welling & Park 2018): private per-layer objectives instead of one deep gradient.

records ─► zsteps (auxiliary coordinates, not released) ─► taylor (coefficients per record and layer)
        ─► coefficients (bounded, scaled to sensitivity 1, one release) ─► optimise (W-steps on the noisy polynomial)

The guarantee and its proof: docs/guarantees/dp_mac.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from sordino.methods.dp_mac.method import DPMAC, plan
    from sordino.methods.dp_mac.network import Network
    from sordino.methods.dp_mac.training import Mac, train_mac
else:
    __getattr__, _ = lazy_names(
        __name__, {"method": ["DPMAC", "plan"], "network": ["Network"], "training": ["Mac", "train_mac"]}
    )

__all__ = ["DPMAC", "Mac", "Network", "plan", "train_mac"]
