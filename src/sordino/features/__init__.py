"""Fixed, public feature extractors: functions of one record at a time, so they have no privacy cost.

    extract = build({"name": "scattering", "normalise": "group", "groups": 27})
    features = extract(images)                          # (n, c, h, w) → (n, c·81, h/4, w/4)
    features = extract.cached(images, folder)           # the same, cached on disk
    extract = build({"name": "efficientnet-lite0"})     # (n, 3, h, w) → (n, 1280); "minilm": texts → (n, 384)

Statistics that have to be measured from the records are different: see `normalise.private_statistics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.features.words import OPTIONS
from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from sordino.features.cache import default_folder
    from sordino.features.extractor import Extractor, build
    from sordino.features.normalise import (
        ChannelBudget,
        ChannelStatistics,
        group_normalise,
        low_frequencies,
        private_statistics,
        record_normalise,
        standardise,
    )
    from sordino.features.scattering import Scattering2D
else:  # imported on first use: the names of extractors are needed before torch is loaded
    __getattr__, _ = lazy_names(
        __name__,
        {
            "cache": ["default_folder"],
            "extractor": ["Extractor", "build"],
            "normalise": [
                "ChannelBudget", "ChannelStatistics", "group_normalise", "low_frequencies", "private_statistics",
                "record_normalise", "standardise",
            ],
            "scattering": ["Scattering2D"],
        },
    )  # fmt: skip

__all__ = [
    "OPTIONS",
    "ChannelBudget",
    "ChannelStatistics",
    "Extractor",
    "Scattering2D",
    "build",
    "default_folder",
    "group_normalise",
    "low_frequencies",
    "private_statistics",
    "record_normalise",
    "standardise",
]
