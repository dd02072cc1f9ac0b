"""Checks of a model during training: gradients are attributed to the right records, and records do not interact.

Attribution. Lineage (``lineage.py``) or a measurement (``measure.py``) gives each position its row. Whenever the
program of a pass is new, the result is compared with plain autograd at the real number of rows: with random weights w,
the sum of w_i times record i's gradient, from the engine's contributions, must be the gradient of Σ w_i L_i.

Interaction. If the program itself shows that loss i depends on row i alone (``Pass.independent``), nothing remains to
be tested; a test is nevertheless made for the first chunk and for one that is much larger (``interaction.py``): the
rows are regrouped and reordered, one of them is changed, and the losses of the others must not change.
SAMPLE rows suffice if no random numbers are drawn, because only the labels are tested. If the program does not show it,
the test is repeated for every new program and on later batches, chosen by the run's own randomness. A
program is also new if a comparison over several rows (``if x.max() > 3``) has another result than before.

Values outside of tensors. Labels follow tensors, not Python code that uses a size (``len(x) == 61``) or a value that it
reads (``x.max().item()``). The tape detects both. In each batch in which a value is read that one record may decide
(``answers.py``), in which a row's place may matter, or in which a model that asks for the number of rows does not
compute the same as for others (``course.py``), all rows are computed again in smaller groups (``check_some``): their
losses must be those of that batch. A model that queries sizes, or selects rows by position (``x[:60]``), is also given
few different numbers of rows (``Assurance.room``), and each of them is tested where it first occurs, unless the course
shows that the model computes the same for every number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients.checks.again import check_gradients
from sordino.gradients.checks.attribution import Summed, check_attribution, check_lengths, compared, summed
from sordino.gradients.checks.gates import check_behind_gates
from sordino.gradients.checks.interaction import (
    EVERY,
    FEW,
    Data,
    check_groups,
    check_places,
    check_some,
    decisive_draws,
    fails_in_groups,
    generator_of,
    losses_of,
    refuse_other_losses,
)
from sordino.gradients.checks.neutral import Draw, Neutral, neutral
from sordino.gradients.passes import Found, Pass, Setup
from sordino.gradients.rows import Chunk, take, tensors
from sordino.gradients.shards import reading
from sordino.gradients.state.kept import put_back
from sordino.gradients.state.marks import settings_of
from sordino.gradients.state.pass_memory import PassMemory
from sordino.gradients.sums.memory import give_back_freed_memory
from sordino.gradients.survey import Held, check_state

LEVELS = 0.5, 0.02, 0.98  # values that replace random numbers, so that every gate is open in one of them
LATER = 0.25
"""A batch after the first is tested for interaction with this probability divided by its number: LATER ·
log(batches)."""
MOST_KNOWN = 1 << 14
"""The number of tested sizes and values that are remembered."""
TWICE = 2
"""The number of rows on which a new program is run twice in a row."""
COMPARED = 3
"""The number of rows for which the course of a new program is compared."""
SAMPLE = 32
"""The number of rows of the first chunk that are tested if the program excludes interaction within it and draws no
numbers."""
FEWER = 6
"""If these are all rows of the chunk: the number with which it is tested what changed rows and earlier passes do to the
others."""


class Assurance:
    """The programs, sizes and values that were checked in the passes of one training. Nothing is stored on the model.

    sized: the computation may depend on the number of rows or on their positions. widest: the number of rows of the
    largest tested batch. proven: every program so far shows that records do not interact. attributed, grouped, looked:
    the numbers of comparisons with plain autograd, and of thorough and brief tests for interaction.
    """

    def __init__(self) -> None:
        self.memory = PassMemory()
        self.programs: dict[int, bool] = {}  # the compared programs, and whether they draw no random numbers
        self.operations: dict[int, bool] = {}  # the same, whatever the lengths: tested for interaction where new
        self.sized = False
        self.held: int | None = None  # bytes of a record's stored gradients, if they were measured
        self.attributed = self.grouped = self.looked = self.batches = 0
        self.widest = 0
        self.proven = True
        self._left: set[tuple[int, int | None]] = set()  # (rows, values read) that were tested
        self._sizes: set[int] = set()  # sizes of batches whose gradients were compared with those of smaller groups
        self._courses: dict[Any, Known] = {}  # what a model that knows its number of rows computes, by shapes of data
        self._contents: list[int] | None = None
        self._settings: Any = None
        self._summed: Summed | None = None  # of a new program, until it is compared
        self._began: Tensor | None = None  # torch's random numbers where the last pass began

    def room(self, chunk: Chunk) -> int:
        """The number of rows to which a chunk is padded: a multiple of about a sixteenth, if their number may matter.

        It depends on the chunk alone, not on earlier tests: processes that share a batch pad in the same way.
        """
        if not self.sized:
            return chunk.rows
        together = 1 if chunk.slots is None or bool((chunk.slots < 0).any()) else chunk.slots.shape[1]
        count = chunk.rows // together
        step = 1 << max(0, count.bit_length() - 5)
        return -(-count // step) * step * together

    def begin(self, setup: Setup) -> None:
        """Called before a call's passes: until the first check, the content of all state is recorded. If the user has
        changed attributes of the model (a phase, a temperature), sizes and values are tested anew: with the same
        operations it may use them otherwise."""
        settings = settings_of(setup.roots) if self.sized or not self.proven else self._settings
        if settings != self._settings:
            self._left.clear()
            self._courses.clear()
            self._settings = settings
        self._contents = None if self.grouped else [held.content for held in setup.state]

    def prepare(self, setup: Setup, chunk: Chunk, made: Found) -> None:
        """Called before a chunk is clipped and summed, which may overwrite its gradients: those of a new program are
        summed with random weights, for the comparison.

        It takes every row to be a record, with its full weight, at the present weights of the model; otherwise the
        comparison computes the gradients again. made: receives norms that the clipping needs as well.
        """
        self._summed, self._began = None, setup.memory.began
        if made.program in self.programs or chunk.rows < 2:
            return
        if chunk.slots is None and chunk.weight is None and made.again and setup.shards is None:
            self._summed = summed(setup, made, chunk.rows)

    def examine(self, setup: Setup, data: Data, chunk: Chunk, made: Found) -> None:
        """Called after a chunk was summed, and before anything is released. Raises Refused if a check fails.

        data: the rows of the chunk. made: the result of its passes.
        """
        self.batches += 1
        if self._contents is not None:
            check_contents(setup.state, self._contents)
        self.proven = self.proven and made.independent
        new = made.program not in self.programs
        due = not made.independent and self._chosen()
        larger = chunk.rows > 2 * self.widest
        # a model that queried the size of an earlier batch (by an error that it caught) may know this one without
        moved = chunk.rows > 1 and made.course is not None and self._moves(setup, data, chunk.rows, made)
        same = made.course is not None and not (moved or made.cut) and made.numbers is None  # for every number of rows
        left = (chunk.rows if (made.sized or self.sized) and not same else 0, made.numbers)
        unseen = moved or (left != (0, None) and left not in self._left)
        if not (new or due or larger or unseen) or (chunk.rows < 2 and made.numbers is None):
            return
        with (
            _the_same_afterwards(setup, data, (new or due) and made.numbers is not None),
            _undisturbed(setup, self._contents, new or due or larger or made.opened),
        ):
            if chunk.rows < 2:
                self._look(setup, data, chunk.rows, made, not _draws(setup, data), every=True)
            else:
                # if only a length coincides with the batch's, what could be misled are labels, which are compared
                first = made.operations not in self.operations
                if new:
                    self.programs[made.program] = self._attribute(setup, data, chunk, made, first)
                tested = self._test(setup, data, chunk, made, new=first, due=due, larger=larger)
                self.operations[made.operations] = still = self.programs[made.program]
                draws = [] if still or not unseen else decisive_draws(setup, data, chunk.rows, self._began)
                if unseen and not (tested and (still or not (moved or made.numbers is not None))):
                    self._look(setup, data, chunk.rows, made, still, moved, draws)
                if unseen or (first and not made.independent):
                    check_behind_gates(setup, data, chunk.rows, self.batches, still, draws)
                if made.stops and (unseen or new):
                    with nullcontext() if still else neutral(fixed=draws):
                        check_gradients(setup, data, chunk.rows, self.batches, _lengths_of_rows(chunk, made))
                if first or due or larger:
                    give_back_freed_memory()
        if len(self._left) >= MOST_KNOWN:
            self._left.clear()
        self._left.add(left)

    def _attribute(self, setup: Setup, data: Data, chunk: Chunk, made: Found, first: bool) -> bool:
        """Compares the gradients of a new program with plain autograd; returns whether it draws no random numbers.
        first: its operations are new as well, so that lengths of gradients are compared in other groups."""
        given, self._summed = self._summed, None
        if first:
            give_back_freed_memory()
            if (state := setup.memory.state) is not None and (state.restored or state.changed_variable(True)):
                _pass_twice(setup, data, chunk.rows)
        # if only a length is another than before, it is known whether numbers are drawn: nothing is watched again
        drawn = not self.operations.get(made.operations, True)
        found = None if given is None or drawn else compared(setup, data, given, watched=first)
        still = found is not None
        if given is None:
            # a program that depends neither on sizes nor on values is the same for a few rows
            few = made.independent and not made.sized and made.numbers is None
            still = not _draws(setup, _first(data, chunk.rows)[0] if few else data)
            give_back_freed_memory()
        del given
        with nullcontext() if still else neutral():
            lengths = check_attribution(setup, data, chunk.rows, found)
        if first and not made.alike:
            check = partial(check_lengths, setup, data, chunk.rows, lengths)
            if not still or not _without_draws(setup, check):
                with neutral():
                    check()
        self.attributed += 1
        return still

    def _test(self, setup: Setup, data: Data, chunk: Chunk, made: Found, *, new: bool, due: bool, larger: bool) -> bool:
        """Tests for interaction if the program or the batch requires it; returns whether all rows were tested."""
        if not ((new and not made.independent) or due or larger):
            return False
        still = self.programs[made.program]
        rows, some = chunk.rows, made.alike and still
        known = made.losses if still and made.again else None
        if some:  # only the labels are tested
            data, rows = _first(data, rows)
            known = None if known is None else known[:rows]
        every = EVERY if new and not made.independent else FEW
        test = setup, data, rows, every, self.batches, known
        check = partial(self._compare_groups, test, FEWER if some and rows == chunk.rows else rows)
        if known is None or not _without_draws(setup, partial(check, still=True)):
            check(still=False, levels=(0.5,) if made.independent else LEVELS)
        self.widest = max(self.widest, chunk.rows)
        self.grouped += 1
        return rows == chunk.rows

    def _compare_groups(self, test: Any, few: int, *, still: bool, levels: Sequence[float] = (0.5,)) -> None:
        """Other groups of the rows, and changed rows in their places. few: only the groups are made of all rows, the
        rest is tested with so many. still: no random numbers are drawn."""
        setup, data, rows, every, number, known = test
        if few < rows:
            with nullcontext() if still else neutral():
                check_groups(setup, data, rows, FEW, number, known, after=False)
            test = setup, _first(data, rows, few)[0], few, every, number, None if known is None else known[:few]
        for level in levels:
            with nullcontext() if still else neutral(level) as mode:
                check_groups(*test)
            if mode is None or not mode.asked:
                break
        check_places(*test, still=still)

    def _moves(self, setup: Setup, data: Data, rows: int, made: Found) -> bool:
        """May the number of rows, or a row's place, matter in this batch? Not if its course is one that was the same
        for another number of rows, and no constants differ from row to row, except for random ones."""
        shapes = tuple((t.dtype, t.shape[1:]) for t in tensors(data))
        if shapes not in self._courses and rows > COMPARED:
            self._courses[shapes] = _known_course(setup, data, rows, made)
        known = self._courses.get(shapes)
        return known is None or known.course != made.course or not made.places <= known.drawn

    def _look(
        self, setup: Setup, data: Data, rows: int, made: Found, still: bool, every: bool, draws: Sequence[Draw] = ()
    ) -> None:
        """Computes rows again in smaller groups: their losses must be those of this batch.

        All rows for a program that has read values which no tested batch had, or if `every`; some rows for one that
        knows a new number of rows. still: it draws no random numbers. draws: those that may decide which way it goes.
        """
        self.looked += 1
        with nullcontext() if still else neutral(fixed=draws):
            known = made.losses if still and made.again else None
            check_some(setup, data, rows, known, self.batches, every or made.numbers is not None)
            if not made.proven and rows > 1 and rows not in self._sizes:
                check_lengths(setup, data, rows)
                self._sizes.add(rows)

    def _chosen(self) -> bool:
        """Is this batch one of the later ones that are tested? Decided by the run's own randomness."""
        return torch.rand((), generator=generator_of(64 * self.batches)).item() < LATER / self.batches


class Known(NamedTuple):
    """The course of the first batch with these shapes; None if it was another one for fewer rows. drawn: the steps in
    which only random numbers differ from row to row."""

    course: tuple[Any, ...] | None
    drawn: frozenset[int] = frozenset()


def _known_course(setup: Setup, data: Data, rows: int, made: Found) -> Known:
    """Compares the course of a batch with that of its first rows, and its places with those of equal draws."""

    def run(part: Data, count: int) -> Pass:
        with put_back(setup.roots, setup.memory.numbers), reading(setup.shards):
            found = Pass(setup, part, count, {})
            found.close()
        return found

    few, drawn = slice(0, COMPARED), made.places
    try:
        with torch.random.fork_rng(devices=[]):
            if run((take(data[0], few, rows), take(data[1], few, rows)), COMPARED).course != made.course:
                return Known(None)
            if drawn:
                with Neutral():
                    drawn -= run(data, rows).places
    except (ValueError, RuntimeError, IndexError, ArithmeticError, Refused):  # so it is tested in groups
        return Known(None)
    return Known(made.course, drawn)


def _lengths_of_rows(chunk: Chunk, made: Found) -> Tensor | None:
    """For every row the norm of its record's gradient, if norms were computed; the last one for padding."""
    if not made.norms:
        return None
    known = made.norms[0].double().cpu()
    known = torch.cat([known, known[-1:].expand(chunk.records - len(known))])
    if chunk.slots is None:
        return known
    found = torch.zeros(chunk.rows, dtype=torch.float64)
    used = chunk.slots >= 0
    found[chunk.slots[used]] = known[:, None].expand(chunk.slots.shape)[used]
    return found


def _first(data: Data, rows: int, most: int = SAMPLE) -> tuple[Data, int]:
    """The first rows of the data, and their number."""
    first = slice(0, min(rows, most))
    return (take(data[0], first, rows), take(data[1], first, rows)), first.stop


def _pass_twice(setup: Setup, data: Data, rows: int) -> None:
    """Refused if a pass uses a tensor that the one before it has left in an attribute: in training it would be put back
    (``kept.py``), and the model would not do what its author means. A few rows show it: this is no test of privacy."""
    few = slice(0, min(rows, TWICE))
    part = take(data[0], few, rows), take(data[1], few, rows)
    with put_back(setup.roots, setup.memory.numbers):
        for _ in range(2):
            try:
                with reading(setup.shards):
                    Pass(setup, part, few.stop, {}).close()
            except (ValueError, RuntimeError, IndexError, ArithmeticError) as error:
                raise fails_in_groups(error) from error


@contextmanager
def _the_same_afterwards(setup: Setup, data: Data, wanted: bool) -> Iterator[None]:
    """Refused if the losses after the checks are not those before: whatever keeps values from one pass to the next,
    also outside of the model, has then seen rows that are large."""
    if not wanted:
        yield
        return
    with neutral(), torch.random.fork_rng(devices=[]):
        before = losses_of(setup, data)
    yield
    with neutral(), torch.random.fork_rng(devices=[]):
        refuse_other_losses(losses_of(setup, data), before)


def _without_draws(setup: Setup, check: Callable[[], None]) -> bool:
    """Makes a check of a program that drew no random numbers; False if it draws some in other groups or beside changed
    rows. Then they must be replaced, and the check made again; otherwise there is nothing to replace, and to look for
    it at every operation would take a fifth of a small model's pass."""
    if setup.device.type != "cpu":
        return False  # it has a generator of its own
    before = torch.get_rng_state()
    try:
        check()
    except Refused:
        if torch.equal(torch.get_rng_state(), before):
            raise
    return torch.equal(torch.get_rng_state(), before)


def _draws(setup: Setup, data: Data) -> bool:
    """Does the forward pass draw random numbers from torch? If not, they need not be replaced, which would take longer
    than a small model."""
    with Neutral() as mode:
        losses_of(setup, data)
    drew: bool = mode.drew
    return drew


@contextmanager
def _undisturbed(setup: Setup, known: Sequence[int] | None, read: bool) -> Iterator[None]:
    """Restores random numbers and state afterwards; a pass that wrote to state without being intercepted is refused.
    known: the content of the state, if it has just been read. read: whether it is compared."""
    versions = [held.version for held in setup.state]
    contents = known if known is not None or not read else [held.content for held in setup.state]
    with torch.random.fork_rng(devices=[]):
        yield
    check_state(setup.state, versions)
    if contents is not None:
        check_contents(setup.state, contents)


def check_contents(state: Sequence[Held], before: Sequence[int]) -> None:
    """Raises Refused if the content of a buffer or parameter changed, also by writes that bypass the version
    counter."""
    for held, content in zip(state, before, strict=True):
        if held.content != content:
            raise Refused(
                f"{held.name}: the forward pass changes it without autograd's knowledge, so what it stores of the data "
                "is published without noise; put the module in eval mode or remove the update"
            )
