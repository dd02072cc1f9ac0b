"""What a pass left outside of the model, where nothing is put back: refused if it may tell something of the data."""

from __future__ import annotations

from sordino.errors import Refused
from sordino.gradients.state.kept import Taken
from sordino.gradients.state.libraries import Libraries


def leaves(taken: Taken | None, libraries: Libraries) -> bool:
    """Did a pass change anything outside of the model? libraries: as they were before it."""
    return taken is not None and bool(taken.changed_variable(False) or libraries.changed() or taken.acted())


class Kept(Refused):
    """A pass left values outside of the model, where others in the same process may see them."""


def refuse_kept_values(taken: Taken | None, libraries: Libraries, custom: bool) -> None:
    """Called after a pass whose operations alone do not show that records are independent. libraries: as they were
    before it. custom: it has hooks or its own backward pass, where tensors are made that no label follows."""
    if taken is None:
        return
    name = taken.changed_variable(custom) or libraries.changed()
    if name is not None:
        raise Kept(
            f"{name}: the forward pass changes this variable outside of the model, and it reads values of the data or "
            "has its own backward pass, so that a later batch could see records without noise; pass values on by "
            "tensors, or remove the variable"
        )
    act = taken.acted()
    if act is not None:
        raise Kept(
            f"the forward pass {act}, and it reads values of the data, so that these would be outside of the model "
            "without noise, where a later batch or anyone else could see them; remove it from the model and the loss"
        )
