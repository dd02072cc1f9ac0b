"""One pass over the modules of a model: what is trained, what must not be written to, and what is not supported.

It is repeated for each sum, because a model may change in between (a mode, a frozen layer), so it must be fast.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import InputError, Refused
from sordino.gradients import spectral
from sordino.gradients.layers.normalisation import refuse_batchnorm
from sordino.gradients.state.roots import has_state
from sordino.gradients.sums.memory import checksum


@dataclass(slots=True, eq=False)
class Held:
    """A buffer or parameter, its owner, and its name."""

    name: str
    holder: Mapping[str, Tensor | None]
    own: str
    tensor: Tensor
    trained: bool = False

    @property
    def version(self) -> int:
        return 0 if self.tensor.is_inference() else self.tensor._version

    @property
    def content(self) -> int:
        """A checksum of the values, which also detects writes that bypass the version counter."""
        held = self.tensor.detach()
        return checksum(held.to_local() if hasattr(held, "to_local") else held)  # for a shard: the local part


def check_state(state: Sequence[Held], before: Sequence[int]) -> None:
    """Raises Refused if a pass wrote to a buffer or parameter, or replaced it."""
    for held, version in zip(state, before, strict=True):
        if held.holder.get(held.own) is not held.tensor:
            raise Refused(
                f"{held.name}: the forward pass replaces this tensor by another one, so what it stores of the data is "
                "published without noise; put the module in eval mode or remove the update"
            )
        if held.version != version:
            raise written_to(held.name)


def written_to(name: str) -> Refused:
    return Refused(
        f"{name}: the forward pass writes to this buffer or parameter (or a hook does, in the backward pass), so what "
        "it stores of the data is published without noise; put the module in eval mode or remove the update"
    )


@dataclass(frozen=True)
class Survey:
    """By name, each tensor once, in the order of the modules."""

    parameters: dict[str, nn.Parameter]  # those that require a gradient
    state: list[Held]  # what a forward pass must not change: buffers and parameters
    tables: int  # bytes of the trained tables among the parameters, whose gradients stay row-sparse
    powers: list[Any]  # modules that iterate in the forward pass, as in spectral.py
    watched: list[nn.Module] = field(default_factory=list)  # all modules, if code of the user runs in any (kept.py)

    @property
    def dense_bytes(self) -> int:
        """The memory of one record's gradient, at most."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values()) - self.tables


@dataclass(frozen=True)
class _Kind:
    """What the class of a module tells about it."""

    scripted: bool
    batchnorm: bool
    table: bool
    spectral: bool
    own: bool


_TORCHS = "torch.nn.", "torch.ao."


@functools.lru_cache(1 << 10)  # each parametrised module has its own class
def _kind(cls: Any) -> _Kind:
    bases = torch.jit.ScriptModule, nn.modules.batchnorm._BatchNorm, (nn.Embedding, nn.EmbeddingBag), spectral.KIND
    own = any(not one.__module__.startswith(_TORCHS) for one in cls.__mro__[: cls.__mro__.index(nn.Module)])
    scripted, batchnorm, table, powers = (issubclass(cls, base) for base in bases)
    return _Kind(scripted, batchnorm, table, powers, own)


def survey(model: nn.Module) -> Survey:
    """Raises Refused for modules that are compiled or scripted and for BatchNorm in training mode; InputError if
    nothing is trained."""
    parameters: dict[str, nn.Parameter] = {}
    state: list[Held] = []
    powers: list[Any] = []
    tables, seen, modules, own = 0, set(), [], False
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        kind = _kind(type(module))  # type: ignore[arg-type]
        refuse_compiled(name, module, kind)
        modules.append(module)
        own = own or kind.own or has_state(module)
        if kind.batchnorm:
            refuse_batchnorm(name, module)
        if kind.spectral:
            powers.append(module)
        elif module._forward_pre_hooks:
            powers += spectral.hooks(module)
        prefix = f"{name}." if name else ""
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                refuse_parameter(prefix + key, parameter)
                seen.add(id(parameter))
                parameters[prefix + key] = parameter
                if kind.table:
                    tables += parameter.numel() * parameter.element_size()
        for held in (module._buffers, module._parameters):
            state += [Held(prefix + key, held, key, t, t.requires_grad) for key, t in held.items() if t is not None]
        waiting += [(prefix + key, m) for key, m in reversed(module._modules.items()) if m is not None]
    if not parameters:
        raise InputError("the model has no trainable parameter; set requires_grad_(True) on what is to be trained")
    return Survey(parameters, state, tables, powers, modules if own else [])


def survey_loss(loss: nn.Module) -> list[Held]:
    """The buffers and parameters of a loss, which a pass must not change either."""
    return [
        Held(f"the loss's {name + '.' if name else ''}{own}", held, own, t, t.requires_grad)
        for name, module in loss.named_modules()
        for held in (module._buffers, module._parameters)
        for own, t in held.items()
        if t is not None
    ]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def checked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, by name; InputError if there are none, or if the engine does not support one."""
    found = trainable(model)
    for name, p in found.items():
        refuse_parameter(name, p)
    if not found:
        raise InputError("the model has no trainable parameter; set requires_grad_(True) on what is to be trained")
    return found


def refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    """Refuses a parameter that has no weights yet, or for whose type the noise is not defined."""
    if parameter.is_complex():
        raise Refused(
            f"{name}: a complex parameter, but the noise is proven for real ones only; store its real and imaginary "
            "parts as one real parameter of shape (…, 2) and use torch.view_as_complex(parameter)"
        )
    if parameter._backward_hooks:
        raise Refused(
            f"{name}: a hook on this parameter (register_hook) changes its gradient, and a private gradient does not "
            "pass through it; remove the hook and apply its change to the released gradient"
        )
    if parameter._post_accumulate_grad_hooks:
        raise Refused(
            f"{name}: a hook that runs after this parameter's gradient was accumulated "
            "(register_post_accumulate_grad_hook) would see gradients without noise; remove it, and use the released "
            "gradient"
        )
    if isinstance(parameter, nn.UninitializedParameter):
        raise InputError(
            f"{name}: a lazy layer that has no weights yet; run the model once on a few rows before training, so "
            "that its layers know their sizes"
        )


def refuse_compiled(name: str, module: nn.Module, kind: _Kind) -> None:
    if kind.scripted:
        raise Refused(f"{name or 'the model'}: a scripted module hides its operations; pass the Python module instead")
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        raise Refused(
            f"{name or 'the model'}: torch.compile hides the layers, and a private gradient needs them; "
            "pass the module that was compiled (model._orig_mod) instead"
        )
