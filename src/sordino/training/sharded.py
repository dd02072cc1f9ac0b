"""The loop of a sharded model (torch's fully_shard): every rank updates its shards by its part of each released step.

Formal guarantee: that of the steps (`ranks.sharded`). Only the leader draws batches, writes the ledger, the metrics and
the checkpoints, and decides when the run ends; the others update their shards likewise. Checkpoints contain whole
tensors, so that a run can be resumed with any number of ranks, sharded or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from sordino import ranks
from sordino.errors import InputError, Refused, SordinoError
from sordino.plan.core import Plan
from sordino.randomness import RandomSource
from sordino.ranks.layout import reshard, shard_of, whole_of
from sordino.ranks.run import heard
from sordino.ranks.sharded import Batch, Done, release_batch, sum_batch
from sordino.ranks.store import Store
from sordino.ranks.sums import reads_ahead
from sordino.records.gradients import Counted, Shardable
from sordino.release.ledger import Ledger
from sordino.release.ledger_lines import Head
from sordino.sampling import LogicalBatch
from sordino.training.loop import Loop, require_ledger
from sordino.training.rehearsal import rehearse
from sordino.training.sealed import open_sealed, write_sealed
from sordino.training.state import TrainState, remove_older, require_fingerprint
from sordino.training.steps import PrivateStep, mask_seed
from sordino.training.stopping import Stopping
from sordino.training.updates import Average, AveragingSGD

BY_COORDINATE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, AveragingSGD)
"""Optimizers that update each coordinate from its own gradient only, so that shards can be updated separately."""


class ShardedLoop(Loop):
    """The loop of one rank, over its shards."""

    def __init__(self, store: Store, folder: Path | None, *arguments: Any, **more: Any) -> None:
        rank = store.rank
        model, update, settings, plan, evaluate, fingerprint, label, watch, callbacks = arguments
        if watch is not None:
            raise Refused("instruments read whole parameters: train a sharded model without `watch`")
        own = folder if rank.leads else None

        def measured(net: nn.Module) -> Mapping[str, float]:
            try:
                return evaluate(net)  # type: ignore[no-any-return]
            finally:
                reshard(net)

        own_evaluate = None if evaluate is None else measured
        super().__init__(
            model, update, settings, plan, own_evaluate, own, fingerprint, label, None,
            callbacks if rank.leads else (), **more,
        )  # fmt: skip
        self.store, self.rank, self.keeps = store, rank, folder is not None
        if type(self.optimizer) not in BY_COORDINATE:
            raise Refused(
                f"{type(self.optimizer).__name__} may combine coordinates on different ranks: with a sharded "
                f"model use one of {', '.join(kind.__name__ for kind in BY_COORDINATE)}"
            )

    def rehearse(self) -> None:
        options, scheduler = self.settings.optimizer_options, self.settings.scheduler
        local = [one.local().reshape(-1)[:16] for one in self.store.trained.values()]  # coordinates are independent
        rehearse(lambda copies: self.update.make_optimizer(copies, options), local, scheduler, saved=self.keeps)

    def restore(self) -> TrainState:
        found = super().restore()
        rows = heard(self.rank, self.metrics.rows)
        for row in () if self.rank.leads else rows:  # so that every rank has what was logged
            self.metrics.append(row)
        return found

    def _measured(self, values: Mapping[str, Tensor] | None, logged: Collection[str]) -> dict[str, float]:
        """`evaluate` at every rank, with fully_shard's own gathering; the leader's results count."""
        found = super()._measured(values, logged)
        told: dict[str, float] = heard(self.rank, found)
        return told

    def _tell(self, row: Mapping[str, float]) -> bool:
        return bool(heard(self.rank, super()._tell(row)))

    def _signal(self, stopping: Stopping) -> int | None:
        return super()._signal(stopping) if self.rank.leads else None

    def _save_now(self, done: int, minutes: float, stopping: Stopping, ended: bool) -> bool:
        return self.keeps and bool(heard(self.rank, super()._save_now(done, minutes, stopping, ended)))

    def _save(self, state: TrainState, done: int, average: Average | None, seconds: float) -> None:
        if not self.keeps:
            return
        made = self._state(state, done, average, seconds)
        tensors, document = made.content(self.fingerprint)
        folder = self.checkpoints
        write_sealed(None if folder is None else made.place(folder), tensors, document, whole_of, private=True)
        if folder is not None:
            remove_older(folder)

    def _saved(self) -> TrainState | None:
        if not self.keeps:
            return None
        found = _newest(self.checkpoints, self.fingerprint, self.ledger) if self.rank.leads else None
        told = heard(self.rank, None if found is None else (found[0], found[2]))
        if told is None:
            return None
        document, names = told
        targets = self._targets(document)
        tensors = {}
        for name in names:
            whole = _sent(self.rank, None if found is None else found[1](name))
            tensors[name] = self._shard(targets.get(name), whole)
        return TrainState.of(tensors, document)

    def _targets(self, document: Mapping[str, Any]) -> dict[str, str]:
        """The parameter whose shape and layout each tensor of a checkpoint has."""
        trained = list(self.store.trained)
        names = {one.name for one in self.store.layout.all()}
        found = {f"model/{name}": name for name in names} | {f"average/{name}": name for name in trained}
        for age in range(document.get("past", 0)):
            found |= {f"past/{age}/{name}": name for name in trained}
        state = dict(document["optimizer"]["map"]).get("state", {"map": []})
        for number, entry in state["map"]:
            for _, value in entry["map"]:
                if "tensor" in value:
                    found[value["tensor"]] = trained[int(number)]
        return found

    def _shard(self, name: str | None, whole: Tensor) -> Tensor:
        one = None if name is None else {one.name: one for one in self.store.layout.all()}[name]
        if one is None or whole.shape != one.shape:  # a step counter or a buffer
            return whole
        return shard_of(one.parameter, whole)


def _sent(rank: ranks.Rank, tensor: Tensor | None) -> Tensor:
    """The leader's tensor at every rank."""
    shape, dtype = heard(rank, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
    here = torch.empty(shape, dtype=dtype) if tensor is None else tensor.clone()
    rank.copy_from_leader([here])
    return here


def _newest(folder: Path | None, fingerprint: str, ledger: Ledger | None) -> Any:
    """The newest undamaged checkpoint of this run, compared with the ledger; None if there is none."""
    failures = []
    for path in sorted(folder.glob("step-*.safetensors"), reverse=True) if folder is not None else ():
        try:
            found = open_sealed(path)
        except (SordinoError, OSError) as error:
            failures.append(f"{path.name}: {error}")
            continue
        require_fingerprint(path, found[0], fingerprint)
        if ledger is not None:
            head = found[0].get("ledger")
            require_ledger(ledger, found[0]["step"], None if head is None else Head(**head))
        return found
    if failures:
        raise InputError(f"no checkpoint can be read ({'; '.join(failures)}): start again in another directory")
    return None


def led_steps(
    plan: Plan,
    inner: Shardable,
    store: Store,
    drawn: Iterator[LogicalBatch],
    source: RandomSource,
    ledger: Ledger,
    loop: Loop,
    counted: Counted,
) -> Iterator[PrivateStep]:
    """The leader's private steps; each step involves all ranks."""
    ahead, batch = reads_ahead(inner), next(drawn, None)
    while batch is not None:
        after = next(drawn, None)
        work = Batch(batch, mask_seed(source, batch.step), after if ahead else None)
        heard(store.rank, work)
        sums, bad = sum_batch(inner, store, work, loop.past)
        counted.dropped += bad
        yield PrivateStep(batch.step, release_batch(store, sums, plan, source, ledger, batch.step))
        batch = after
    heard(store.rank, Done())


def followed_steps(
    plan: Plan, inner: Shardable, store: Store, source: RandomSource, loop: Loop
) -> Iterator[PrivateStep]:
    """The same steps at another rank. Its `source` is not used, only the leader's."""
    while isinstance(work := heard(store.rank), Batch):
        sums, _ = sum_batch(inner, store, work, loop.past)
        step = work.batch.step
        yield PrivateStep(step, release_batch(store, sums, plan, source, None, step))
