"""How released values become weights, as far as the guarantee depends on it: one module for each method."""

from sordino.methods.base import Accounted, Assumption, Method, method_from_dict
from sordino.methods.coupling import Coupling
from sordino.methods.dp_mac import DPMAC
from sordino.methods.dpsgd import DPSGD
from sordino.methods.hidden_state import HiddenState
from sordino.methods.modelmix import ModelMix

__all__ = [
    "DPMAC",
    "DPSGD",
    "Accounted",
    "Assumption",
    "Coupling",
    "HiddenState",
    "Method",
    "ModelMix",
    "method_from_dict",
]
