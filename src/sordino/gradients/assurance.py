"""What is checked of a model while it is trained: gradients go to the right records, and records do not interact.

Attribution. Lineage (``lineage.py``) or a measurement (``measure.py``) gives each position its row. Wherever the
program of a pass is new, the result is compared with plain autograd at the real number of rows: with random weights w,
the sum of w_i times record i's gradient, from the engine's contributions, must be the gradient of Σ w_i L_i.

Interaction. Where the program itself shows that loss i depends on row i alone (``Pass.independent``) nothing remains to
be tested, but a test is made all the same, for the first chunk and one that is much larger (``interaction.py``): the
rows are put into other groups and another order, one of them is changed, and the losses of the others must not move.
SAMPLE rows are enough where no random numbers are drawn, for it is only the labels that are tested. Where the program
does not show it, the test is repeated for every new program and on later batches, chosen by the run's own randomness. A
program is also new where a question about several rows (``if x.max() > 3``) has another answer than before.

What leaves the tensors. Labels follow tensors, not what Python makes of a size (``len(x) == 61``) or of a value that it
reads (``x.max().item()``). The tape sees both leave. A model that asks for the number of rows, or takes rows by their
places (``x[:60]``), is given few different numbers of them (``Assurance.room``); and in each batch whose size, or whose
values read, were not tested before, rows are computed again in smaller groups (``check_some``): their losses must be
those of that very batch. A model that asks for nothing, takes rows alike and reads nothing can't depend on either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sordino.errors import Refused
from sordino.gradients.checkpoints import without_checkpoints
from sordino.gradients.contributions import Contribution
from sordino.gradients.interaction import (
    EVERY,
    FEW,
    Data,
    changed,
    check_groups,
    check_places,
    check_some,
    generator_of,
    in_double,
    losses_of,
    wide,
)
from sordino.gradients.measure import NotFinite
from sordino.gradients.memory import Pool, give_back_freed_memory
from sordino.gradients.narrow import narrow_sum
from sordino.gradients.neutral import Neutral, neutral
from sordino.gradients.passes import Found, PassMemory, Setup, contributions
from sordino.gradients.refusals import Aside
from sordino.gradients.rows import Chunk, call, take
from sordino.gradients.shards import reading
from sordino.gradients.survey import Held, check_state

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}  # coarser types are compared to a twentieth
LEVELS = 0.5, 0.02, 0.98  # of what takes the place of random numbers, so that gates are open in one of them
LATER = 0.25
"""A batch after the first is tested for interaction with this probability over its number: LATER · log(batches)."""
MOST_KNOWN = 1 << 14
"""So many sizes and values that were tested are remembered."""
SAMPLE = 32
"""So many rows of the first chunk are changed where the program itself excludes interaction and draws no numbers."""


class Assurance:
    """The programs, sizes and values that were checked, over the passes of one training. Nothing is kept on the model.

    sized: what the model does may depend on the number of rows or on their places. widest: rows of the largest batch
    that records were tested in. proven: that records do not interact, by every program so far. attributed, grouped,
    looked: how many times gradients were compared with plain autograd, and records tested for interaction, thoroughly
    and briefly.
    """

    def __init__(self) -> None:
        self.memory = PassMemory()
        self.programs: dict[int, bool] = {}  # those that were checked, and whether they draw no random numbers
        self.sized = False
        self.held: int | None = None  # bytes of the gradients that are held of a record, where they were measured
        self.attributed = self.grouped = self.looked = self.batches = 0
        self.widest = 0
        self.proven = True
        self._left: set[tuple[int, int | None]] = set()  # what left the tensors and was tested: (rows, values read)
        self._sizes: set[int] = set()  # of batches whose gradients were compared with those of smaller groups
        self._contents: list[int] | None = None

    def room(self, chunk: Chunk) -> int:
        """How many rows a chunk is filled up to: a multiple of about a sixteenth, if their number may matter.

        It depends on the chunk alone, not on what was tested before: processes that share a batch fill up alike.
        """
        if not self.sized:
            return chunk.rows
        together = 1 if chunk.slots is None or bool((chunk.slots < 0).any()) else chunk.slots.shape[1]
        count = chunk.rows // together
        step = 1 << max(0, count.bit_length() - 5)
        return -(-count // step) * step * together

    def begin(self, setup: Setup) -> None:
        """Before a call's passes: until the first check, the content of all state is remembered."""
        self._contents = None if self.grouped else [held.content for held in setup.state]

    def examine(self, setup: Setup, data: Data, chunk: Chunk, made: Found) -> None:
        """After a chunk was summed, and before anything is released. Refused where a check fails.

        data: the rows of the chunk. made: what its passes found.
        """
        self.batches += 1
        if self._contents is not None:
            check_contents(setup.state, self._contents)
        self.proven = self.proven and made.independent
        new = made.program not in self.programs
        due = not made.independent and self._chosen()
        larger = chunk.rows > 2 * self.widest
        left = (chunk.rows if made.sized else 0, made.numbers)
        unseen = left != (0, None) and left not in self._left
        if not (new or due or larger or unseen) or (chunk.rows < 2 and made.numbers is None):
            return
        with _undisturbed(setup, self._contents, new or due or larger or made.opened):
            if chunk.rows < 2:
                self._look(setup, data, chunk.rows, made, not _draws(setup, data))
            else:
                if new:
                    self.programs[made.program] = self._attribute(setup, data, chunk, made)
                tested = self._test(setup, data, chunk, made, new=new, due=due, larger=larger)
                if unseen and not tested:
                    self._look(setup, data, chunk.rows, made, self.programs[made.program])
        if len(self._left) >= MOST_KNOWN:
            self._left.clear()
        self._left.add(left)

    def _attribute(self, setup: Setup, data: Data, chunk: Chunk, made: Found) -> bool:
        """Compares the gradients of a new program with plain autograd; tells whether it draws no random numbers."""
        give_back_freed_memory()
        # a program that follows neither sizes nor values is the same for a few rows
        few = made.independent and not made.sized and made.numbers is None
        still = not _draws(setup, _first(data, chunk.rows)[0] if few else data)
        with nullcontext() if still and made.independent else neutral():
            check_attribution(setup, data, chunk)
            give_back_freed_memory()
            if not made.independent:
                check_lengths(setup, data, chunk.rows)
        self.attributed += 1
        return still

    def _test(self, setup: Setup, data: Data, chunk: Chunk, made: Found, *, new: bool, due: bool, larger: bool) -> bool:
        """Tests for interaction, where the program or the batch calls for it; tells whether all rows were tested."""
        if not ((new and not made.independent) or due or larger):
            return False
        rows, some = chunk.rows, made.independent and self.programs[made.program]
        if some:  # only the labels are tested
            data, rows = _first(data, rows)
        variants = EVERY if new and not made.independent else FEW
        for level in (0.5,) if made.independent else LEVELS:
            with nullcontext() if some else neutral(level) as mode:
                check_groups(setup, data, rows, variants, self.batches)
            if mode is None or not mode.asked:
                break
        check_places(setup, data, rows, variants, self.batches)
        self.widest = max(self.widest, chunk.rows)
        self.grouped += 1
        return rows == chunk.rows

    def _look(self, setup: Setup, data: Data, rows: int, made: Found, still: bool) -> None:
        """Rows again in smaller groups: their losses must be those of this very batch.

        For a program that has read values which no tested batch had, all rows; for one that knows a new number of rows,
        some. still: it draws no random numbers.
        """
        self.looked += 1
        with nullcontext() if still else neutral():
            known = made.losses if still and made.again else None
            check_some(setup, data, rows, known, self.batches, every=made.numbers is not None)
            if not made.proven and rows > 1 and rows not in self._sizes:
                check_lengths(setup, data, rows)
                self._sizes.add(rows)

    def _chosen(self) -> bool:
        """Is this batch one of the later ones that are tested? By the run's own randomness."""
        return torch.rand((), generator=generator_of(64 * self.batches)).item() < LATER / self.batches


def _first(data: Data, rows: int) -> tuple[Data, int]:
    """Up to SAMPLE rows of the data, and how many they are."""
    if rows <= SAMPLE:
        return data, rows
    first = slice(0, SAMPLE)
    return (take(data[0], first, rows), take(data[1], first, rows)), SAMPLE


def _draws(setup: Setup, data: Data) -> bool:
    """Does the forward pass ask torch for random numbers? Where it does not, nothing has to be made neutral, which
    takes longer than a small model."""
    with Neutral() as mode:
        losses_of(setup, data)
    drew: bool = mode.drew
    return drew


@contextmanager
def _undisturbed(setup: Setup, known: Sequence[int] | None, read: bool) -> Iterator[None]:
    """Random numbers and state are afterwards what they were; a pass that wrote to state unseen is refused. known: the
    content of the state, where it has just been read. read: whether it is compared."""
    versions = [held.version for held in setup.state]
    contents = known if known is not None or not read else [held.content for held in setup.state]
    with torch.random.fork_rng(devices=[]):
        yield
    check_state(setup.state, versions)
    if contents is not None:
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
    try:
        with reading(setup.shards):
            made = contributions(replace(setup, once=False), data, each, [({}, 1.0)])
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
        mine = {}
        for name in list(made.gradients):  # each is gone before the next, and all before autograd makes its activations
            mine[name] = _weighted(made.gradients.pop(name), weight, setup.parameters[name], setup.pool)
    setup.pool.give_back()
    scale = float((weight.double().square() * total).sum().sqrt())
    worst = ("", 0.0)
    for name, difference in _differences(setup, data, weight, mine):
        own = float((weight.double().square() * squares[name]).sum().sqrt()) if name in squares else 0.0
        size = own + 1e-4 * scale
        if difference and (not size or difference / size > worst[1]):
            worst = name, difference / size if size else float("inf")
    return worst


def _weighted(of: Contribution, weight: Tensor, parameter: Tensor, pool: Pool) -> Tensor:
    """Σ_i w_i g_i, in single precision where the parameter has it."""
    if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
        return narrow_sum(of, weight.double(), parameter, pool)
    total = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
    of.add_to(total, weight.double())
    return total


def _differences(setup: Setup, data: Data, weight: Tensor, mine: dict[str, Tensor]) -> list[tuple[str, float]]:
    """How far these sums are from plain autograd's gradient of Σ w_i L_i, parameter by parameter.

    Each gradient is compared when it is made, and not kept; of a sharded model, one group after the other is whole.
    """
    found: list[tuple[str, float]] = []

    def compare(name: str, parameter: Tensor) -> None:
        theirs, parameter.grad = parameter.grad, None
        if theirs is not None:
            ours = mine.pop(name, None)
            found.append((name, float((theirs if ours is None else ours.sub_(theirs)).norm())))

    for group in [list(setup.parameters)] if setup.shards is None else setup.shards.groups:
        with (
            Aside(setup.parameters),
            torch.enable_grad(),
            without_checkpoints(),
            reading(setup.shards, group) as leaves,
        ):
            losses = setup.loss(call(setup.model, data[0]), data[1])
            if not losses.requires_grad:
                continue  # they do not depend on this group, or on no parameter in this batch
            given = {name: leaves.get(name, setup.parameters[name]) for name in group}
            hooks = [t.register_post_accumulate_grad_hook(partial(compare, n)) for n, t in given.items()]
            try:
                torch.autograd.backward(losses, weight.to(losses.dtype), inputs=list(given.values()))
            finally:
                for hook in hooks:
                    hook.remove()
    return [*found, *((name, float(total.norm())) for name, total in mine.items())]


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
    beside = _lengths_beside(setup, data, rows, last)
    if whole is None:
        return 0.0
    size = max(float(whole.nan_to_num(0, 0, 0).max()), 1e-12)
    found = [t for t in (some, None if beside is None else beside[part]) if t is not None]
    return max((float((whole[part] - t).nan_to_num(0, 0, 0).abs().max()) / size for t in found), default=0.0)


def _lengths_beside(setup: Setup, data: Data, rows: int, row: int) -> Tensor | None:
    """The lengths where this row is made large; None where the model does not take such a row at all.

    Beside a large gradient the others may be too small to be told apart (``measure.py``): then the row is made like
    its neighbour, and whatever is refused even so is refused.
    """
    try:
        return _lengths(setup, changed(data, row, "large"), rows)
    except (ValueError, RuntimeError, IndexError, ArithmeticError):
        return None
    except Refused:
        return _lengths(setup, changed(data, row, "copy"), rows)


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
