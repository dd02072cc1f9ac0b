"""Matrix products in full single precision.

torch may round the factors of such a product to 8 or 11 bits if the user allows it, for speed
(`torch.set_float32_matmul_precision`). A record's share of a sum would exceed its bound by up to 2⁻⁷, and the margin of
docs/guarantees/noise.md, section 6, is 2⁻¹⁰.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_WHOLE = ("none", "ieee")


def _setting() -> Any:
    """torch's setting for products on the processor; None in versions before 2.9, which have one for all devices."""
    found = getattr(torch.backends.mkldnn, "matmul", None)
    return found if hasattr(found, "fp32_precision") else None


def are_whole() -> bool:
    """Whether torch multiplies in full single precision."""
    setting = _setting()
    if setting is None:
        return torch.get_float32_matmul_precision() == "highest"
    return setting.fp32_precision in _WHOLE


@contextlib.contextmanager
def whole_products() -> Iterator[None]:
    """Inside this context torch multiplies in full single precision; afterwards the user's setting is restored."""
    if are_whole():
        yield
        return
    setting = _setting()
    if setting is None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    else:
        before, setting.fp32_precision = setting.fp32_precision, "ieee"
    try:
        yield
    finally:
        if setting is None:
            torch.set_float32_matmul_precision(before)
        else:
            setting.fp32_precision = before
