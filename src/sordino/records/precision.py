"""The floating-point precisions that the bound on a record's contribution covers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sordino.errors import Refused


def refuse_half(parameters: Iterable[Tensor]) -> None:
    """Refuses weights in half precision: docs/guarantees/noise.md, section 6, covers single and double precision.

    Raises:
        Refused: a parameter is in half precision.
    """
    kinds = {p.dtype for p in parameters if p.is_floating_point()}
    half = sorted(str(kind).removeprefix("torch.") for kind in kinds if kind in (torch.bfloat16, torch.float16))
    if half:
        raise Refused(
            f"the model's weights are {half[0]}: norms and sums in that precision have rounding errors that the bound "
            "on a record's contribution does not cover. Use model.float(); autocast inside the model is fine"
        )
