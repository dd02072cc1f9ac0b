"""What is checked of a model while it is trained: gradients go to the right records, and records do not interact.

Attribution. Lineage (``lineage.py``) or a measurement (``measure.py``) gives each position its row. Wherever the
program of a pass is new, the result is compared with plain autograd at the real number of rows: with random weights w,
the sum of w_i times record i's gradient, from the engine's contributions, must be the gradient of Σ w_i L_i.

Interaction. Where the program itself shows that loss i depends on row i alone (``Pass.independent``) nothing remains to
be tested, but a test is made all the same, for the first chunk (``interaction.py``): the rows are put into other
groups, a larger batch and another order, one of them is changed, and the losses of the others must not move. A batch
with more rows than any that was tested is tested again: no label follows the number of rows. SAMPLE rows are enough for
the changed rows where no random numbers are drawn, for it is only the labels that are tested. Where the program does
not show it, the test is repeated for every new program and on later batches, chosen by the run's own randomness. A
program is also new where a question about several rows (``if x.max() > 3``) has another answer than before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sordino.errors import Refused
from sordino.gradients.checkpoints import without_checkpoints
from sordino.gradients.interaction import (
    EVERY,
    FEW,
    Data,
    changed,
    check_groups,
    check_places,
    generator_of,
    in_double,
    losses_of,
    most_rows,
    wide,
)
from sordino.gradients.measure import NotFinite
from sordino.gradients.neutral import Neutral, neutral
from sordino.gradients.passes import PassMemory, Setup, contributions
from sordino.gradients.rows import Chunk, call, take
from sordino.gradients.shards import reading
from sordino.gradients.survey import Held, check_state

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}  # coarser types are compared to a twentieth
LEVELS = 0.5, 0.02, 0.98  # of what takes the place of random numbers, so that gates are open in one of them
LATER = 0.25
"""A batch after the first is tested for interaction with this probability over its number: LATER · log(batches)."""
SAMPLE = 32
"""So many rows of the first chunk are changed where the program itself excludes interaction and draws no numbers."""


class Assurance:
    """The programs that were checked, over the passes of one training. Nothing is kept on the model."""

    def __init__(self) -> None:
        self.memory = PassMemory()
        self.programs: set[int] = set()
        self._contents: list[int] | None = None
        self.attributed = self.grouped = self.batches = 0  # checks made, and batches seen
        self.widest = 0  # rows of the largest batch that records were tested in
        self.proven = True  # that records do not interact, by every program so far

    def begin(self, setup: Setup) -> None:
        """Before a call's passes: until the first check, the content of all state is remembered."""
        self._contents = None if self.grouped else [held.content for held in setup.state]

    def examine(self, setup: Setup, data: Data, chunk: Chunk, program: int, independent: bool) -> None:
        """After a chunk was summed, and before anything is released. Refused where a check fails."""
        self.batches += 1
        if self._contents is not None:
            check_contents(setup.state, self._contents)
        self.proven = self.proven and independent
        new = program not in self.programs
        due = not independent and self._chosen()
        larger = chunk.rows > self.widest
        if not (new or due or larger) or chunk.rows < 2:
            return
        with _undisturbed(setup, self._contents):
            still = independent and not _draws(setup, data)
            if new:
                with nullcontext() if still else neutral():
                    check_attribution(setup, data, chunk)
                    if not independent:
                        check_lengths(setup, data, chunk.rows)
                self.attributed += 1
            if still and larger:
                self._test_some(setup, data, chunk.rows)
            elif (new and not independent) or due or larger:
                variants = EVERY if new and not independent else FEW
                for level in (0.5,) if independent else LEVELS:
                    with neutral(level) as mode:
                        check_groups(setup, data, chunk.rows, variants, self.batches, larger=larger)
                    if not mode.asked:
                        break
                    larger = False
                check_places(setup, data, chunk.rows, variants, self.batches)
                self.widest = max(self.widest, most_rows(chunk.rows))
                self.grouped += 1
        self.programs.add(program)

    def _chosen(self) -> bool:
        """Is this batch one of the later ones that are tested? By the run's own randomness."""
        return torch.rand((), generator=generator_of(64 * self.batches)).item() < LATER / self.batches

    def _test_some(self, setup: Setup, data: Data, rows: int) -> None:
        """For interaction, of a program that excludes it by itself and draws no random numbers: at first some rows,
        and all of them in batches of other sizes, for no label follows the number of rows (`len(x)`)."""
        check_groups(setup, data, rows, (), self.batches, larger=True)
        self.widest = most_rows(rows)
        if not self.grouped:
            if rows > SAMPLE:
                first = slice(0, SAMPLE)
                data, rows = (take(data[0], first, rows), take(data[1], first, rows)), SAMPLE
            check_groups(setup, data, rows, FEW, self.batches)
            check_places(setup, data, rows, FEW, self.batches)
        self.grouped += 1


def _draws(setup: Setup, data: Data) -> bool:
    """Does the forward pass ask torch for random numbers? Where it does not, nothing has to be made neutral, which
    takes longer than a small model."""
    with Neutral() as mode:
        losses_of(setup, data)
    drew: bool = mode.drew
    return drew


@contextmanager
def _undisturbed(setup: Setup, known: Sequence[int] | None) -> Iterator[None]:
    """Random numbers and state are afterwards what they were; a pass that wrote to state unseen is refused. known: the
    content of the state, where it has just been read."""
    contents = [held.content for held in setup.state] if known is None else known
    with torch.random.fork_rng(devices=[]):
        yield
    check_state(setup.state, [held.version for held in setup.state])
    check_contents(setup.state, contents)


def check_contents(state: Sequence[Held], before: Sequence[int]) -> None:
    """Refused if the content of a buffer or parameter changed: also by writes that bypass the version counter."""
    for held, content in zip(state, before, strict=True):
        if held.content != content:
            raise Refused(
                f"{held.name}: the forward pass changes it behind autograd's back, so what it stores of the data "
                "leaves unprotected; put the module in eval mode or remove the update"
            )


def check_attribution(setup: Setup, data: Data, chunk: Chunk) -> None:
    """Σ w_i g_i from the engine's contributions against plain autograd of Σ w_i L_i, for random w."""
    gap = _attribution_gap(setup, data, chunk.rows)
    kind = next(iter(setup.parameters.values())).dtype
    if gap is None or gap[1] <= TOLERANCE.get(kind, 0.05):
        return
    if kind == torch.float32:  # a kink, or a long chain of roundings? Double precision decides
        twin = in_double(setup)
        if twin is not None:
            finer = _attribution_gap(twin, wide(data), chunk.rows)
            if finer is None or finer[1] <= 1e-6:
                return
    raise Refused(
        f"{gap[0]}: with random weights on the records the engine's gradient differs from autograd's; the layer is not "
        "supported as it is used here: freeze it, or write it in plain PyTorch",
        private=f"it differs by {gap[1]:.1e}",
    )


def _attribution_gap(setup: Setup, data: Data, rows: int) -> tuple[str, float] | None:
    """The parameter that differs most, and by how much, over the length of the records' own gradients; None where
    nothing finite is left to be compared."""
    with _disable_current_modes():  # the model's random numbers are neutral, not these
        weight = 0.5 + torch.rand(rows, generator=generator_of(2))
        weight = torch.where(torch.rand(rows, generator=generator_of(3)) < 0.5, weight, -weight).to(setup.device)
    each = Chunk(slice(0, rows), slice(0, rows), rows, rows, None, None)
    free = replace(setup, once=False)
    try:
        with reading(setup.shards):
            made = contributions(free, data, each, [({}, 1.0)])
    except NotFinite:
        return None
    with torch.no_grad():
        squares = {name: g.norm2().double() for name, g in made.gradients.items()}
        total = sum(squares.values(), torch.zeros(rows, dtype=torch.float64, device=setup.device))
        good = torch.isfinite(total) & torch.isfinite(made.losses)
        if not bool(good.all()):
            setup.pool.give_back()
            kept = torch.nonzero(good).flatten()
            if len(kept) < 2:
                return None
            return _attribution_gap(setup, _taken(data, kept, rows), len(kept))
    scale = float((weight.double().square() * total).sum().sqrt())
    worst = ("", 0.0)
    for group in [list(setup.parameters)] if setup.shards is None else setup.shards.groups:
        want = _plain_gradients(setup, data, weight, group)
        for name in group:
            mine = torch.zeros(setup.parameters[name].shape, dtype=torch.float64, device=setup.device)
            if name in made.gradients:
                with torch.no_grad():
                    made.gradients[name].add_to(mine, weight.double())
            theirs = want.pop(name, None)
            difference = float((mine if theirs is None else mine.sub_(theirs)).norm())  # in place: a table is large
            own = float((weight.double().square() * squares[name]).sum().sqrt()) if name in squares else 0.0
            size = own + 1e-4 * scale
            if difference and (not size or difference / size > worst[1]):
                worst = name, difference / size if size else float("inf")
    setup.pool.give_back()
    return worst


def _plain_gradients(setup: Setup, data: Data, weight: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Those of these parameters; of a sharded model, one group after the other, so that no more is held."""
    inputs, targets = data
    with torch.enable_grad(), without_checkpoints(), reading(setup.shards, names) as leaves:
        losses = setup.loss(call(setup.model, inputs), targets)
        if setup.shards is not None and not losses.requires_grad:
            return {}  # the losses do not depend on this group
        found = torch.autograd.grad(
            losses, [leaves.get(n, setup.parameters[n]) for n in names], weight.to(losses.dtype), allow_unused=True
        )
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


def check_lengths(setup: Setup, data: Data, rows: int) -> None:
    """The lengths of the records' gradients in another group and order; Refused where they move.

    A backward pass of its own (a custom function, a hook) may take from other rows what the losses do not show.
    """
    gap = _length_gap(setup, data, rows)
    kind = next(iter(setup.parameters.values())).dtype
    if gap > TOLERANCE.get(kind, 0.05) and kind == torch.float32 and (twin := in_double(setup)) is not None:
        gap = _length_gap(twin, wide(data), rows)
    if gap > TOLERANCE.get(kind, 0.05):
        raise Refused(
            "a record's gradient is not the same when the others of its batch change, so records interact: look for a "
            "custom backward pass or a hook that computes over the batch dimension",
            private=f"the relative difference is {gap:.1e}",
        )


def _length_gap(setup: Setup, data: Data, rows: int) -> float:
    """How far the lengths of some rows move where the rest is left out, and where one of the rest is made large."""
    with _disable_current_modes():
        order = torch.randperm(rows, generator=generator_of(3))
    part, last = order[: max(1, rows // 2)], int(order[-1])
    whole, some = _lengths(setup, data, rows), _lengths(setup, _taken(data, part, rows), len(part))
    try:
        beside = _lengths(setup, changed(data, last, "large"), rows)
    except (ValueError, RuntimeError, IndexError, ArithmeticError):
        beside = None  # the model does not take such a row at all
    if whole is None:
        return 0.0
    size = max(float(whole.nan_to_num(0, 0, 0).max()), 1e-12)
    found = [t for t in (some, None if beside is None else beside[part]) if t is not None]
    return max((float((whole[part] - t).nan_to_num(0, 0, 0).abs().max()) / size for t in found), default=0.0)


def _lengths(setup: Setup, data: Data, rows: int) -> Tensor | None:
    """The length of each row's gradient; None where rows can't be told apart."""
    each = Chunk(slice(0, rows), slice(0, rows), rows, rows, None, None)
    try:
        with reading(setup.shards):
            made = contributions(replace(setup, once=False), data, each, [({}, 1.0)])
    except NotFinite:
        return None
    with torch.no_grad():
        none = torch.zeros(rows, dtype=torch.float64, device=setup.device)
        total = sum((g.norm2().double() for g in made.gradients.values()), none)
    setup.pool.give_back()
    return total.sqrt()


def _taken(data: Data, part: Tensor, rows: int) -> Data:
    return take(data[0], part, rows), take(data[1], part, rows)
