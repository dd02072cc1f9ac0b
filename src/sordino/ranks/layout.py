"""Which rows of each parameter of a sharded model belong to which rank (torch's fully_shard).

fully_shard divides the first dimension of every parameter as `torch.chunk` does: into equal parts, of which the last
ones may be shorter or empty. Parameters are grouped by the module that fully_shard was applied to: a group is gathered
at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sordino.errors import Refused
from sordino.gradients.survey import trainable


@dataclass(frozen=True, eq=False)
class Placed:
    """One parameter and its place in the vector of all trained coordinates (−1: it is not trained)."""

    name: str
    parameter: Tensor  # a DTensor
    begin: int

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def row(self) -> int:
        """The number of coordinates in one row."""
        return math.prod(self.shape[1:])

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """A rank's first row, and the row after its last."""
        each = -(-self.shape[0] // ranks)
        return min(rank * each, self.shape[0]), min((rank + 1) * each, self.shape[0])

    def local(self, value: Any = None) -> Tensor:
        """This rank's rows of the parameter, or of another DTensor with the same layout."""
        held: Any = self.parameter if value is None else value
        with torch.no_grad():  # a detach of the DTensor itself would take ten times as long
            return held.to_local().detach()  # type: ignore[no-any-return]

    def like(self, local: Tensor) -> Tensor:
        """A DTensor with the parameter's layout and these rows."""
        from torch.distributed.tensor import DTensor

        mine: Any = self.parameter
        return DTensor.from_local(
            local, mine.device_mesh, mine.placements, run_check=False, shape=mine.shape, stride=mine.stride()
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """All parameters of a sharded model, in the order in which one process releases them."""

    groups: tuple[tuple[Placed, ...], ...]
    coordinates: int  # trained coordinates of all ranks together

    def all(self) -> Iterator[Placed]:
        return (one for group in self.groups for one in group)

    @property
    def trained(self) -> dict[str, Placed]:
        """By name, in the order of release."""
        return {one.name: one for one in sorted(self.all(), key=lambda one: one.begin) if one.begin >= 0}


def is_sharded(model: nn.Module) -> bool:
    """Whether fully_shard was applied to the model or to a part of it."""
    return any(hasattr(p, "placements") for p in model.parameters()) or any(_shards(m) for m in model.modules())


def _shards(module: nn.Module) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def refuse_wrapped(model: nn.Module) -> nn.Module:
    """The model, unless another way of dividing batches was applied to it.

    Raises:
        Refused: the model, or a part of it, is a DistributedDataParallel, a DataParallel or an FSDP module of torch's
            first version.
    """
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    kinds: tuple[type[nn.Module], ...] = (DataParallel, DistributedDataParallel)
    if dist.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        kinds = (*kinds, FullyShardedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise Refused(
                f"{name or 'the model'} is a {type(module).__name__}, which adds up the gradients of the ranks without "
                "clipping or noise: give sordino the model inside it (.module); sordino divides the batches over the "
                "ranks itself, and shards a model by torch's fully_shard"
            )
    return model


def sharding_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that fully_shard was applied to."""
    return [m for m in model.modules() if _shards(m)]


def reshard(model: nn.Module) -> None:
    """Restores the shards after an evaluation that has left whole parameters."""
    for module in sharding_modules(model):
        module.reshard()  # type: ignore[operator]


def layout_of(model: nn.Module) -> Layout:
    """The layout of a sharded model.

    Raises:
        Refused: it is sharded in a way that is not supported.
    """
    _refuse(model)
    begins, count = {}, 0
    for parameter in trainable(model).values():
        begins[id(parameter)] = count
        count += parameter.numel()
    groups: dict[int, list[Placed]] = {}
    owner: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _shards(module):
            owner[name] = module
    for name, parameter in model.named_parameters():
        parts = name.split(".")[:-1]
        prefixes = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
        holder = next(owner[prefix] for prefix in prefixes if prefix in owner)
        groups.setdefault(id(holder), []).append(Placed(name, parameter, begins.get(id(parameter), -1)))
    return Layout(tuple(tuple(group) for group in groups.values()), count)


def _refuse(model: nn.Module) -> None:
    if not _shards(model):
        raise Refused(
            "fully_shard was applied to parts of the model and not to the model itself: apply it to its blocks and "
            "then to the model, so that every parameter is sharded"
        )
    world = dist.get_world_size()
    for name, parameter in model.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        placements: Any = getattr(parameter, "placements", ())
        if mesh is None or mesh.ndim != 1 or mesh.size() != world:
            raise Refused(
                f"{name}: sordino trains models that fully_shard has divided over all ranks of the process group; a "
                "mesh of several dimensions, or of some of the ranks, is not supported"
            )
        if len(placements) != 1 or not placements[0].is_shard(0):
            raise Refused(
                f"{name}: it is divided as {placements}; sordino trains models that are divided along the first "
                "dimension of every parameter: leave out shard_placement_fn"
            )
    for module in sharding_modules(model):
        for state in _states(module):
            policy = getattr(state, "_mp_policy", None)
            if policy is not None and (policy.param_dtype or policy.reduce_dtype or policy.output_dtype):
                raise Refused(
                    "fully_shard was given a mixed precision policy: norms and sums in half precision have rounding "
                    "errors that the bound on a record's contribution does not cover; leave out mp_policy (autocast "
                    "inside the model is fine)"
                )


def _states(module: nn.Module) -> Iterator[Any]:
    """The states that torch's fully_shard keeps of a module, found by its hooks."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if is_fsdp(hook) and hasattr(hook, "__self__"):
            yield hook.__self__


def is_fsdp(hook: Any) -> bool:
    """Whether the hook is one by which fully_shard gathers parameters."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def bytes_by(group: Sequence[Placed]) -> list[Placed]:
    """The parameters of a group in the order in which they are sent: the widest dtypes first, for alignment."""
    return sorted(group, key=lambda one: -one.parameter.element_size())


def whole_of(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard, at every rank; all ranks must call this together. Other tensors are returned."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_of(parameter: Any, whole: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, with the parameter's layout."""
    one = Placed("", parameter, -1)
    first, last = one.rows(parameter.device_mesh.get_local_rank(), parameter.device_mesh.size())
    return one.like(whole[first:last].clone())


def shard_blocks(model: nn.Module) -> nn.Module:
    """Applies fully_shard to the blocks of a model and then to the model itself, over all ranks; returns the model.

    Blocks are the members of its outermost lists and sequences (nn.ModuleList, nn.Sequential) that have parameters.

    Raises:
        Refused: the model can't be sharded; the message includes torch's reason.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise Refused(f"the model can't be sharded: {error}") from error
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost members of lists and sequences; none if two of them share a parameter."""
    found: list[nn.Module] = []
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        for child in module.children():
            inside = isinstance(module, nn.ModuleList | nn.Sequential)
            if inside and not isinstance(child, nn.ModuleList) and any(True for _ in child.parameters()):
                found.append(child)
            elif not inside or isinstance(child, nn.ModuleList):
                waiting.append(child)
    held = [id(p) for block in found for p in block.parameters()]
    outside = {id(p) for p in model.parameters()} - set(held)
    shared = len(held) != len(set(held)) or any(id(p) in outside for block in found for p in block.parameters())
    return [] if shared else found


def gather_into(model: nn.Module, plain: nn.Module) -> nn.Module:
    """Copies the weights of `model` into `plain`, the same model unsharded; all ranks must call this together."""
    theirs = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            tensor.copy_(whole_of(theirs[name]))
    return plain
