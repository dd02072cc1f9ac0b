"""The process group of a run, and the messages that its ranks exchange.

Rank 0 is the leader: only it draws batches and noise, writes the ledger, updates the weights and saves. The other ranks
are followers: they have the same records and model, and sum the chunks assigned to them. So the guarantee of one
process is the guarantee of the group: there is one key, one source of noise and one ledger, and all ranks use the
leader's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sordino.errors import SordinoError

PATIENCE = timedelta(hours=12)
"""How long a rank waits for a message. A dead rank is noticed at once, by its closed connection, and a stopped one by
`ranks.pulse`; a rank that evaluates or saves may take long."""


class Lost(SordinoError):
    """Another rank of the run has ended."""


@dataclass(frozen=True)
class Rank:
    """This process's rank in the group."""

    number: int
    size: int

    @property
    def leads(self) -> bool:
        return self.number == 0

    def tell(self, message: Any = None) -> Any:
        """The leader's message, at every rank."""
        box = [message]
        with noticing_loss(self):
            dist.broadcast_object_list(box, src=0, group=channel())
        return box[0]

    def collect(self, message: Any) -> list[Any]:
        """The messages of all ranks, at the leader; elsewhere an empty list."""
        box: list[Any] | None = [None] * self.size if self.leads else None
        with noticing_loss(self):
            dist.gather_object(message, box, dst=0, group=channel())
        return box or []

    def copy_from_leader(self, tensors: Sequence[Tensor]) -> None:
        """The leader's values, into the tensors of every rank, in place."""
        with noticing_loss(self), torch.no_grad():
            for kind in sorted({t.dtype for t in tensors}, key=str):
                here = [t for t in tensors if t.dtype == kind]
                flat = torch.cat([t.detach().reshape(-1).cpu() for t in here])
                dist.broadcast(flat, src=0, group=channel())
                if not self.leads:
                    for tensor, values in zip(here, torch.split(flat, [t.numel() for t in here]), strict=True):
                        tensor.copy_(values.view(tensor.shape))

    def meet(self) -> None:
        """Returns once every rank has called this."""
        with noticing_loss(self):
            dist.barrier(group=channel())

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks, at the leader, in double precision: exact if all are multiples of one grid."""
        flat = torch.cat([t.reshape(-1).double().cpu() for t in tensors])
        with noticing_loss(self):
            dist.reduce(flat, dst=0, group=channel())
        shapes = zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True)
        return [values.view(tensor.shape).to(tensor.device) for tensor, values in shapes]


_made: tuple[Any, Any] | None = None  # the process group, and its channel


def channel() -> Any:
    """The group of all ranks through which messages go; all ranks call this together for the first time.

    The process group may be the user's: with a backend that has no tensors of the CPU (nccl), or with a timeout shorter
    than an evaluation. So messages have a group of their own.
    """
    global _made
    world: Any = dist.group.WORLD
    if _made is None or _made[0] is not world:
        if torch.device("cpu") in world._device_types:
            dist.barrier()  # a new group would wait for a rank that has ended; this one notices its closed connection
        _made = world, dist.new_group(backend="gloo", timeout=PATIENCE)
    return _made[1]


def grouped() -> bool:
    """Whether there is an initialised process group, of any size."""
    return dist.is_available() and dist.is_initialized()


def current() -> Rank | None:
    """This process's rank in the initialised process group; None if there is no group, or no other rank in it."""
    if not grouped() or dist.get_world_size() == 1:
        return None
    return Rank(dist.get_rank(), dist.get_world_size())


def of_group() -> Rank:
    """This process's rank in the initialised process group, also if it is the only one."""
    return Rank(dist.get_rank(), dist.get_world_size())


@contextmanager
def noticing_loss(rank: Rank) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo raises when a connection closes
        if "allocate" in str(error):
            raise
        raise lost(rank) from error


_CLOSED = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe")


@contextmanager
def noticing_closed(rank: Rank | None) -> Iterator[None]:
    """The same around code that may use torch's own collectives (fully_shard in `evaluate`, gathered weights).

    Its other errors are not about ranks, and pass.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if rank is None or "allocate" in text or not any(word in text for word in _CLOSED):
            raise
        raise lost(rank) from error


def lost(rank: Rank) -> Lost:
    """What a rank reports that can't continue without the others."""
    return Lost(
        f"rank {rank.number} of {rank.size} has lost another rank of the run; everything that was released is in "
        "the ledger: continue with --resume, with any number of ranks"
    )
