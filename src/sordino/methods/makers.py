"""The functions that make plans, under the methods' names: `sordino.dpsgd(…)`, `sordino.modelmix(…)`, …"""

from __future__ import annotations

from sordino.methods.correlated.method import plan as correlated
from sordino.methods.coupling.method import plan as coupling
from sordino.methods.dp_mac.method import plan as dp_mac
from sordino.methods.dpsgd.method import plan as dpsgd
from sordino.methods.hidden_state.method import plan as hidden_state
from sordino.methods.modelmix.method import plan as modelmix

__all__ = ["correlated", "coupling", "dp_mac", "dpsgd", "hidden_state", "modelmix"]
