"""The methods, each in a folder: its plan, accountant, training hooks, audit, recipe keys and command-line flags.

No method imports another. The rest of the package finds them through `sordino.registry`, which reads the tables below
by name and finds further methods through entry points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

METHODS = {
    "dpsgd": "sordino.methods.dpsgd.method:DPSGD",
    "modelmix": "sordino.methods.modelmix.method:ModelMix",
    "hidden-state": "sordino.methods.hidden_state.method:HiddenState",
    "dp-mac": "sordino.methods.dp_mac.method:DPMAC",
    "coupling": "sordino.methods.coupling.method:Coupling",
    "correlated": "sordino.methods.correlated.method:Correlated",
}
"""The class of each method: one line for each method."""

FLAGS = {
    "dpsgd": "sordino.methods.dpsgd.flags",
    "modelmix": "sordino.methods.modelmix.flags",
    "hidden-state": "sordino.methods.hidden_state.flags",
    "correlated": "sordino.methods.correlated.flags",
}
"""Modules with command-line flags. They import nothing slow, so that help is shown at once."""

WORDS = {
    "dpsgd": "sordino.methods.dpsgd.words",
    "modelmix": "sordino.methods.modelmix.words",
    "hidden-state": "sordino.methods.hidden_state.words",
    "dp-mac": "sordino.methods.dp_mac.words",
    "coupling": "sordino.methods.coupling.words",
    "correlated": "sordino.methods.correlated.words",
}
"""Modules with the names that methods allow in recipes. They import nothing slow."""

COMMANDS = ("sordino.methods.command",)
"""Modules with further commands. They import nothing slow."""

DEFAULT = "dpsgd"
"""The method of a recipe that names none."""

if TYPE_CHECKING:
    from sordino.methods.correlated.method import Correlated
    from sordino.methods.coupling.method import Coupling
    from sordino.methods.dp_mac.method import DPMAC
    from sordino.methods.dpsgd.method import DPSGD
    from sordino.methods.hidden_state.method import HiddenState
    from sordino.methods.modelmix.method import ModelMix
else:
    __getattr__, _ = lazy_names(
        __name__,
        {
            "correlated.method": ["Correlated"],
            "coupling.method": ["Coupling"],
            "dp_mac.method": ["DPMAC"],
            "dpsgd.method": ["DPSGD"],
            "hidden_state.method": ["HiddenState"],
            "modelmix.method": ["ModelMix"],
        },
    )

__all__ = [
    "COMMANDS",
    "DEFAULT",
    "DPMAC",
    "DPSGD",
    "FLAGS",
    "METHODS",
    "WORDS",
    "Correlated",
    "Coupling",
    "HiddenState",
    "ModelMix",
]
