"""ModelMix (Xiao, Wan & Devadas 2022): each step descends from a random mixture of the last two iterates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from sordino.methods.modelmix.method import ModelMix, averaging_control, plan
    from sordino.methods.modelmix.widths import mixing_widths
else:
    __getattr__, _ = lazy_names(
        __name__, {"method": ["ModelMix", "averaging_control", "plan"], "widths": ["mixing_widths"]}
    )

__all__ = ["ModelMix", "averaging_control", "mixing_widths", "plan"]
