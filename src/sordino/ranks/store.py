"""The shards of all ranks as one store, from which a rank reads whole parameters and to which it adds sums.

Every rank serves its shards to the others from threads, one for each other rank. So ranks need not be in step: a rank
may make any number of passes (checks of a new program, records that are not finite) while others make none, and an
error in one is reported to the others at the end of the batch. Sums are on a grid on which additions are exact
(`records.gradients.grid_spacing`), so the order in which they arrive does not change any bit.

    FETCH group, version     → this rank's rows of the group's parameters
    ADD   count, coordinates  adds to the sums of this rank's rows of so many parameters; their numbers come first
    FLUSH                    → an answer, once everything sent before has been added
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sordino.errors import InputError, Refused
from sordino.gradients.shards import Packing, Reading
from sordino.ranks.group import PATIENCE, Rank, noticing_loss
from sordino.ranks.layout import Placed, bytes_by, is_fsdp, layout_of, reshard, sharding_modules
from sordino.records.momentum import PastIterates

FETCH, ADD, FLUSH, STOP = range(4)
_ASK, _GIVE, _SUM, _DONE = 1, 2, 3, 4  # tags
_KEPT = 2  # groups that are whole at a time: the current one, and the one before it
_TOGETHER = 1 << 19  # coordinates of sums that are sent together: most parameters are small, and a message costs time


class _Part(NamedTuple):
    """A parameter in the messages that send its group: each rank's rows (the first, and the one after the last), and
    their bytes."""

    one: Placed
    shape: torch.Size
    dtype: torch.dtype
    rows: list[tuple[int, int]]
    bytes: list[int]

    @classmethod
    def of(cls, one: Placed, ranks: int) -> _Part:
        rows = [one.rows(rank, ranks) for rank in range(ranks)]
        each = one.row * one.parameter.element_size()
        return cls(one, one.shape, one.parameter.dtype, rows, [(last - first) * each for first, last in rows])


class Store:
    """Whole parameters for this rank, and its part of the sums of all ranks (a `gradients.shards.Shards`).

    All ranks of the process group create and close it together.

    Args:
        model: A model that fully_shard was applied to.
        rank: This process's rank.
    """

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        reshard(model)
        self.model, self.rank, self.layout = model, rank, layout_of(model)
        self.trained = self.layout.trained
        self.sums = {
            name: torch.zeros(one.local().shape, dtype=torch.float64, device=one.local().device)
            for name, one in self.trained.items()
        }
        self.spacing: float | None = None  # the grid of sums; None: a single chunk, which is not rounded
        self.sent = self.received = 0  # bytes, by this rank's own requests
        self._group_of = {id(one.parameter): k for k, group in enumerate(self.layout.groups) for one in group}
        self._name_of = {id(one.parameter): (0, one.name) for one in self.layout.all()}
        self._past: tuple[Mapping[str, Tensor], ...] = ()
        self._whole: dict[tuple[int, int], dict[str, tuple[Tensor, int]]] = {}
        self._packing = Packing(self.whole)
        self._names = list(self.trained)
        self._places = {name: k for k, name in enumerate(self._names)}
        self._unsent: list[tuple[str, Tensor]] = []  # sums of whole parameters
        self._leaving: list[tuple[Any, Tensor]] = []  # messages on their way, and the memory they are sent from
        self._parts = {
            (past, k): [_Part.of(one, rank.size) for one in bytes_by(group) if not past or one.begin >= 0]
            for k, group in enumerate(self.layout.groups)
            for past in (False, True)  # past iterates have only trained parameters
        }
        self._lock = threading.Lock()
        self._channel: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._peers = [k for k in range(rank.size) if k != rank.number]
        self._threads = [
            threading.Thread(target=self._serve, args=(peer,), name=f"sordino-shards-{peer}", daemon=True)
            for peer in self._peers
        ]
        for thread in self._threads:
            thread.start()

    # called by the engine

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        named = [[one.name for one in group if one.begin >= 0] for group in self.layout.groups]
        return [group for group in named if group]

    def whole(self, shard: Tensor) -> Tensor:
        version, name = self._name_of[id(shard)]
        group = self._group_of[id(shard)]
        held = self._whole.get((version, group)) or self._gathered(version, group)
        return held[name][0]

    def holds(self, t: Tensor) -> bool:
        return id(t) in self._name_of

    @contextmanager
    def reading(self, leaves: Sequence[str] = ()) -> Iterator[Mapping[str, Tensor]]:
        made = {name: self.whole(self.trained[name].parameter).detach().requires_grad_() for name in leaves}
        mode = Reading(self.holds, self.whole, {id(self.trained[name].parameter): leaf for name, leaf in made.items()})
        with _without_fsdp(self.model), self._packing.entered(), mode:
            yield made
        for held in self._whole.values():
            _refuse_written(held)

    def put(self, name: str, total: Tensor) -> None:
        one = self.trained[name]
        if self.spacing is not None:
            magic = 1.5 * self.spacing * 2.0**52
            total.add_(magic).sub_(magic)
        total = total.reshape(one.shape)  # a parameter without dimensions can't be sharded
        first, last = one.rows(self.rank.number, self.rank.size)
        with self._lock:
            self.sums[name] += total[first:last]
        if self._peers:
            self._unsent.append((name, total))
        if sum(whole.numel() for _, whole in self._unsent) >= _TOGETHER:
            self._send_sums()

    def _send_sums(self) -> None:
        """Sends the other ranks their rows of the sums that wait; the last message may still be on its way."""
        waiting, self._unsent = self._unsent, []
        parts = {peer: self._rows_of(peer, waiting) for peer in self._peers}
        self._sent_off()
        with noticing_loss(self.rank):  # nothing is allocated between a request and the data that follow it
            for peer, (count, flat) in parts.items():
                if count:
                    self._ask(peer, ADD, count, len(flat) - count)
                    self.sent += flat.numel() * flat.element_size()
                    self._leaving.append((dist.isend(flat, dst=peer, group=self._channel, tag=_SUM), flat))

    def _rows_of(self, peer: int, sums: Sequence[tuple[str, Tensor]]) -> tuple[int, Tensor]:
        """How many of these sums have rows at that rank; their parameters' numbers, and then the rows."""
        rows = [(name, total[slice(*self.trained[name].rows(peer, self.rank.size))]) for name, total in sums]
        held = [(self._places[name], part.reshape(-1).cpu()) for name, part in rows if len(part)]  # one name may recur
        numbers = torch.tensor([number for number, _ in held], dtype=torch.float64)
        return len(held), torch.cat([numbers, *(part for _, part in held)])

    def _sent_off(self) -> None:
        """Returns once the messages on their way have arrived."""
        with noticing_loss(self.rank):
            for work, _ in self._leaving:
                work.wait()
        self._leaving.clear()

    # called by an update, between batches

    def gradient(self, value: Callable[[], Tensor]) -> tuple[dict[str, Tensor], float]:
        """The gradient of a scalar function of the weights as shards, and the function's value; the same at every rank.

        One pass for each group, so that no more is whole at once; all of them have the same random numbers. All ranks
        must call this together: none reads shards before the others have updated them, or updates while others read.
        """
        self._whole.clear()
        self.rank.meet()
        found, finite, seen, random = {}, True, 0.0, torch.get_rng_state()
        for group in self.groups:
            torch.set_rng_state(random)
            with torch.enable_grad(), self.reading(group) as leaves:
                result = value()
                parts = torch.autograd.grad(result, list(leaves.values()), allow_unused=True)
            seen = float(result.detach())
            for name, leaf, part in zip(leaves, leaves.values(), parts, strict=True):
                whole = torch.zeros_like(leaf) if part is None else part.detach()
                finite = finite and bool(torch.isfinite(whole).all())
                one = self.trained[name]
                found[name] = one.like(whole[slice(*one.rows(self.rank.number, self.rank.size))].clone())
        self._whole.clear()
        self.rank.meet()
        if not finite:
            raise InputError(
                "the gradient of the public rows is not finite: a public row has a bad value, or the step size is too "
                "large (public gradients are not clipped)"
            )
        return {name: found[name] for name in self.trained}, seen

    # called between batches

    def begin(self, past: PastIterates, spacing: float | None) -> None:
        """Resets the sums and sets the past iterates before a batch. All ranks must call this together."""
        with self._lock:
            for value in self.sums.values():
                value.zero_()
        self.spacing, self._past = spacing, past.weights
        self._whole.clear()
        self._name_of = {id(one.parameter): (0, one.name) for one in self.layout.all()}
        for age, weights in enumerate(self._past):
            for name, value in weights.items():
                self._name_of[id(value)] = age + 1, name
                self._group_of[id(value)] = self._group_of[id(self.trained[name].parameter)]
        self.rank.meet()

    def flush(self) -> None:
        """Returns once everything that this rank sent was added by the others; releases whole parameters."""
        self._whole.clear()
        if self._unsent:
            self._send_sums()
        self._sent_off()
        with noticing_loss(self.rank):
            for peer in self._peers:
                self._ask(peer, FLUSH)
            for peer in self._peers:
                self._receive(torch.empty(3, dtype=torch.int64), peer, _DONE)

    def close(self) -> None:
        """Ends the threads of all ranks. All ranks must call this together, after a run without failure."""
        with noticing_loss(self.rank):
            for peer in self._peers:
                self._ask(peer, STOP)
        for thread in self._threads:
            thread.join()

    # messages

    def _ask(self, peer: int, kind: int, what: int = 0, version: int = 0) -> None:
        self._send(torch.tensor([kind, what, version]), peer, _ASK)

    def _send(self, values: Tensor, peer: int, tag: int) -> None:
        self.sent += values.numel() * values.element_size()
        dist.send(values, dst=peer, group=self._channel, tag=tag)

    def _receive(self, into: Tensor, peer: int, tag: int) -> None:
        self.received += into.numel() * into.element_size()
        dist.recv(into, src=peer, group=self._channel, tag=tag)

    def _gathered(self, version: int, group: int) -> dict[str, tuple[Tensor, int]]:
        """A whole group of parameters; the group before the last one is released."""
        while len(self._whole) >= _KEPT:
            _refuse_written(self._whole.pop(next(iter(self._whole))))
        with torch._C.DisableTorchFunction():  # of the engine's own modes
            held = self._fetched(version, group)
        self._whole[version, group] = held
        return held

    def _fetched(self, version: int, group: int) -> dict[str, tuple[Tensor, int]]:
        parts = self._parts[version > 0, group]
        whole = [torch.empty(part.shape, dtype=part.dtype) for part in parts]
        sent = {peer: [part.bytes[peer] for part in parts] for peer in self._peers}
        buffers = {peer: torch.empty(sum(sizes), dtype=torch.uint8) for peer, sizes in sent.items()}
        with noticing_loss(self.rank):  # nothing is allocated between a request and its answer
            for peer in self._peers:
                self._ask(peer, FETCH, group, version)
            for value, part in zip(whole, parts, strict=True):
                value[slice(*part.rows[self.rank.number])] = self._local(part.one, version)
            for peer, buffer in buffers.items():
                if len(buffer):
                    self._receive(buffer, peer, _GIVE)
        for peer, buffer in buffers.items():
            for value, part, flat in zip(whole, parts, torch.split(buffer, sent[peer]), strict=True):
                if len(flat):
                    rows = value[slice(*part.rows[peer])]
                    rows.copy_(flat.view(part.dtype).view(rows.shape))
        held = {}
        for value, part in zip(whole, parts, strict=True):
            there = value.to(part.one.parameter.device)
            held[part.one.name] = there, there._version
            self._packing.know(part.one.parameter if version == 0 else self._past[version - 1][part.one.name], there)
        return held

    def _local(self, one: Placed, version: int) -> Tensor:
        return one.local(None if version == 0 else self._past[version - 1][one.name])

    # requests of other ranks

    def _serve(self, peer: int) -> None:
        try:
            while self._answered(peer):
                pass
        except Exception:  # the other rank is gone, or this one ends: its own thread reports it
            return

    def _answered(self, peer: int) -> bool:
        header = torch.empty(3, dtype=torch.int64)
        dist.recv(header, src=peer, group=self._channel, tag=_ASK)
        kind, what, version = header.tolist()
        if kind == FETCH:
            with _dying():
                mine = [self._local(part.one, version).cpu().contiguous() for part in self._parts[version > 0, what]]
                flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in mine])
            if len(flat):
                dist.send(flat, dst=peer, group=self._channel, tag=_GIVE)
        elif kind == ADD:
            with _dying():
                flat = torch.empty(what + version, dtype=torch.float64)
            dist.recv(flat, src=peer, group=self._channel, tag=_SUM)
            with _dying():
                self._add(flat[:what].long().tolist(), flat[what:])
        elif kind == FLUSH:
            dist.send(header, dst=peer, group=self._channel, tag=_DONE)
        return bool(kind != STOP)

    def _add(self, numbers: Sequence[int], flat: Tensor) -> None:
        """Adds another rank's sums for this rank's rows of the parameters with these numbers."""
        here = [self.sums[self._names[number]] for number in numbers]
        with self._lock:
            for total, added in zip(here, torch.split(flat, [total.numel() for total in here]), strict=True):
                total += added.view(total.shape).to(total.device)


@contextmanager
def _dying() -> Iterator[None]:
    """Ends the process if a serving thread fails: the other ranks would wait for its answer forever."""
    try:
        yield
    except Exception as error:
        sys.stderr.write(f"sordino: a rank can't serve its shards to the others and ends: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def _refuse_written(held: Mapping[str, tuple[Tensor, int]]) -> None:
    for name, (value, version) in held.items():
        if value._version != version:
            raise Refused(
                f"{name}: the forward pass writes to this parameter, so data stored in it would leave without "
                "protection; remove the update"
            )


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """Turns off the hooks by which fully_shard gathers parameters: they would wait for the other ranks."""
    kept = []
    for module in sharding_modules(model):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            kept.append((hooks, dict(hooks)))
            for key in [key for key, hook in hooks.items() if is_fsdp(hook)]:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)
