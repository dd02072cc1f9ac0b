"""A second device: memory of its own as far as torch is told, kernels of the CPU, and a refusal to mix the two.

Registered under PrivateUse1 from Python. A tensor of it is a DLPack capsule of numpy's memory that says it lies on an
extension device (kDLExtDev); every operation is run by a fallback on CPU tensors that look at the same memory. As on a
GPU, an operation on tensors of both devices raises, but for copies, numbers without dimensions, and indices.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

NAME = "far"
_EXTENSION = 12  # kDLExtDev
_CODES = {torch.float32: (2, 32), torch.float64: (2, 64), torch.int64: (0, 64), torch.int32: (0, 32),
          torch.bool: (6, 8), torch.uint8: (1, 8), torch.int16: (0, 16), torch.int8: (0, 8), torch.float16: (2, 16),
          torch.bfloat16: (4, 16), torch.complex64: (5, 64), torch.complex128: (5, 128)}  # fmt: skip


class _Managed(ctypes.Structure):
    """DLManagedTensor."""


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [
    ("data", ctypes.c_void_p),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
    ("context", ctypes.c_void_p),
    ("deleter", _DELETER),
]
_kept: dict[int, Any] = {}  # what a far tensor's memory needs, until torch lets go of it
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@_DELETER
def _delete(managed: Any) -> None:
    _kept.pop(ctypes.addressof(managed.contents), None)


def to_far(t: Tensor) -> Tensor:
    """A far tensor that looks at the memory of a CPU tensor."""
    t = t.detach()
    code, bits = _CODES[t.dtype]
    shape, strides = (ctypes.c_int64 * max(1, t.ndim))(*t.shape), (ctypes.c_int64 * max(1, t.ndim))(*t.stride())
    empty = torch.empty(1, dtype=t.dtype) if not t.numel() else t  # no null pointers
    managed = _Managed(empty.data_ptr(), _EXTENSION, 0, t.ndim, code, bits, 1, shape, strides, 0, None, _delete)
    _kept[ctypes.addressof(managed)] = managed, shape, strides, t, empty
    return torch.from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))


def to_cpu(t: Tensor) -> Tensor:
    """A CPU tensor that looks at the memory of a far one."""
    size = t.untyped_storage().nbytes()
    if not size or not t.numel():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    memory = (ctypes.c_uint8 * size).from_address(t.untyped_storage().data_ptr())
    memory.owner = t.untyped_storage()  # type: ignore[attr-defined] # lives as long as somebody looks at it
    whole = torch.from_numpy(np.ctypeslib.as_array(memory)).view(t.dtype)
    found = whole.as_strided(t.shape, t.stride(), t.storage_offset())
    if t.is_conj():
        found = found.conj()
    return found


def is_far(t: Any) -> bool:
    return isinstance(t, Tensor) and t.device.type == NAME


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize")
_INDEXED = ("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _resized(old: Tensor, new: Tensor) -> None:
    """Gives a far tensor the memory and sizes of another."""
    op = torch.ops.aten.set_.source_Storage_storage_offset
    op.redispatch(_CPU, old, new.untyped_storage(), 0, new.shape, new.stride())


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name
    tensors = _tensors((args, kwargs))
    device = kwargs.get("device")
    wanted = device is not None and torch.device(device).type == NAME
    if name not in _COPIES:
        near = [t for t in tensors if not is_far(t) and t.ndim]
        if near and name not in _INDEXED:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {NAME} and cpu")
    if name == "aten::_copy_from":
        source, target = args[0], args[1]
        (to_cpu(target) if is_far(target) else target).copy_(to_cpu(source) if is_far(source) else source)
        return target
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args = tuple(
        torch.tensor(a) if str(known.type) == "Tensor" and isinstance(a, int | float | complex) else a
        for known, a in zip(op._schema.arguments, args, strict=False)
    )
    back: dict[int, Tensor] = {}

    def near_of(a: Any) -> Any:
        if is_far(a):
            found = to_cpu(a)
            back[id(found)] = a
            return found
        if isinstance(a, torch.device):
            return torch.device("cpu")
        return a

    given = tree_map(near_of, args), tree_map(near_of, kwargs)
    shapes = {id(t): t.shape for t in _tensors(given)}
    out = op(*given[0], **given[1])
    for t in _tensors(given):
        if id(t) in back and t.shape != shapes[id(t)]:  # an `out=` that got its size now
            _resized(back[id(t)], to_far(t))
    far = wanted or (any(map(is_far, tensors)) and (device is None or torch.device(device).type == NAME))

    def far_of(a: Any) -> Any:
        if not isinstance(a, Tensor) or not far:
            return a
        return back[id(a)] if id(a) in back else to_far(a)

    return tree_map(far_of, out)


def _alias(op: Any) -> Any:
    """Views: the CPU's kernel, which looks at sizes alone, gives a tensor of the same storage, and so device."""
    return lambda *args, **kwargs: op.redispatch(_CPU, *args, **kwargs)


def _instead(op: Any) -> Any:
    """torch asks a backend of its own for convolutions: the backward pass has no sizes of a bias."""

    def run(*args: Any) -> Any:
        if op is torch.ops.aten.convolution_backward.default:
            bias = [args[0].shape[1]] if args[-1][2] else None
            return _fallback(op, *args[:3], bias, *args[3:])
        return _fallback(op, *args)

    return run


class _Module(_DummyBackendModule):
    """What torch asks of a device's module beside that."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class _Hook(_DummyPrivateUse1Hook):
    """The device is there for those who name it: nobody else's default changes."""

    def is_available(self) -> bool:
        return False


_libraries: list[Any] = []


def register() -> None:
    """Makes the device known to torch, once in a process."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, _Module(), _Hook())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_fallback, "PrivateUse1")
    for name, op in (
        ("convolution_overrideable", torch.ops.aten.convolution.default),
        ("convolution_backward_overrideable", torch.ops.aten.convolution_backward.default),
    ):
        aten.impl(name, _instead(op), "PrivateUse1")
    for view in (torch.ops.aten.as_strided.default, torch.ops.aten.view.default, torch.ops.aten._reshape_alias.default):
        aten.impl(view._schema.name.split("::")[1], _alias(view), "PrivateUse1")
    _libraries.extend((every, aten))
