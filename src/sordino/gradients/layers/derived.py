"""Tensors that were computed from several parameters: F.linear(x, U @ V), a bias b + c, a weight-normalised kernel.

Autograd's graph tells which parameters these are.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sordino.gradients.sums.memory import address
from sordino.gradients.tape.tape import Tape


def leaves(tensor: Tensor) -> list[Tensor]:
    """The leaves of the tensor's autograd graph."""
    if tensor.grad_fn is None:
        return [tensor]
    found: dict[int, Tensor] = {}
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = leaf
        waiting += [earlier for earlier, _ in node.next_functions if earlier is not None and earlier not in seen]
    return list(found.values())


def reached(tensor: Tensor, candidates: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the candidates from which the tensor was computed, according to autograd's graph.

    The call's arguments do not suffice: a parameter may only have given its shape (u.expand_as(v)), may have entered
    another of several results (torch.broadcast_tensors), or may have been written into the tensor through a view.
    """
    found = {id(leaf) for leaf in leaves(tensor)}
    return {name: leaf for name, leaf in candidates.items() if id(leaf) in found}


def adopt(tape: Tape, t: Tensor) -> bool:
    """Was this tensor, whose operation was not intercepted, computed from parameters alone? Then it becomes a slot.

    Examples are tensors into which a parameter was written (matrix[rows, columns] = p) and results of a custom
    autograd.Function. The latter are connected to the parameters themselves, which then serve as leaves.
    """
    parents = [tape.slot(leaf) for leaf in leaves(t)]
    if not parents or any(p is None or p.name is None for p in parents):
        return False
    for leaf, parent in zip(leaves(t), parents, strict=True):
        assert parent is not None
        if parent.tensor is None and address(leaf) and leaf.data_ptr() == parent.value.data_ptr():
            assert parent.name is not None
            parent.tensor = tape.leaves[parent.name] = leaf
        if parent.tensor is not leaf:
            return False  # a leaf of the tape is in use already, or the weights are not the parameter's
    tape.add_slot(t, frozenset(p.name for p in parents if p is not None and p.name is not None))
    return True
