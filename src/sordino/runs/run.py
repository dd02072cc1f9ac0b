"""Runs a recipe in a run directory.

    recipe.toml        the recipe, with all defaults
    ledger.jsonl       every release, recorded before its value was used
    metrics.jsonl      ε and test metrics over the steps
    model.safetensors  the published weights
    result.json        the guarantee and the metrics
    report.html        the report for a reviewer
    not_private.json   for the data's owner only; no guarantee covers it

Errors in the input are found before the directory is created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sordino import ranks, report
from sordino.audit.one_run import AuditResult
from sordino.diagnostics.instruments.watch import check_watched
from sordino.errors import InputError, Refused, SordinoError
from sordino.files import (
    PARTIAL,
    locked,
    make_folder,
    remove_empty,
    usable_folder,
    write_atomically,
)
from sordino.plan.core import Plan
from sordino.release.ledger import adopt as adopt_ledger
from sordino.runs.budget import TOKEN, charged
from sordino.runs.build import check_companions, private_records
from sordino.runs.closing import LEDGER
from sordino.runs.finished import read_result
from sordino.runs.prepared import Prepared, work_of
from sordino.runs.recipe import Recipe
from sordino.runs.results import Described, write_results
from sordino.runs.verify import QUICK, failed, verify
from sordino.runs.work import Work
from sordino.training.agreement import reporting
from sordino.training.callbacks import AtStart
from sordino.training.job import Result

Begin = Callable[[Plan], None]
FITTING = tuple(check for check in QUICK if check != "files")  # a missing report is written again


def run_recipe(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    data_dir: Path | None = None,
    progress: bool | None = None,
    adopt: bool = False,
    budget: Path | None = None,
    shard: bool = False,
    begin: Begin | None = None,
) -> dict[str, Any]:
    """Trains according to the recipe, writes the run directory, and returns the content of result.json.

    A complete run is not repeated: with `resume` its result is returned.

    Args:
        recipe: The recipe.
        out: The run directory; it must be new, or contain a run of the same recipe.
        resume: Continue the run in `out`.
        data_dir: Where the datasets are.
        progress: Show a progress bar; None: on a terminal.
        adopt: `out` was copied, moved or restored, and no other copy of it is or will be resumed: the ledger records
            this statement.
        budget: A budget file (sordino.runs.budget) in which the run is counted.
        shard: In a process group, divide the model over its ranks (torch's fully_shard); the results are the same.
        begin: Called with the plan after all checks, before the first step.

    Raises:
        InputError: the recipe is wrong, or the run would exceed the budget; nothing was written.
        Refused: no guarantee covers the recipe.
    """
    rank = ranks.current()
    with ranks.watched(rank):
        if rank is not None and not rank.leads:
            with ranks.noticing_closed(rank):
                return _followed(recipe, out, rank, data_dir, shard)
        if shard and not ranks.grouped():
            raise InputError("--shard divides the model over several processes: start them with torchrun")
        with ranks.leading(rank), ranks.noticing_closed(rank):
            done = _made(recipe, out, resume, data_dir, progress, budget, adopt, shard, begin)
        if rank is not None:
            rank.tell(ranks.Ended())
        return done


def _followed(recipe: Recipe, out: Path, rank: ranks.Rank, data_dir: Path | None, shard: bool) -> dict[str, Any]:
    """A follower's run: it neither writes nor reads the run directory."""
    try:
        work = work_of(recipe, data_dir, False)
    except SordinoError:
        if isinstance(message := rank.tell(), ranks.Begin):
            with reporting(rank):
                raise
        ranks.end(message)  # the leader has found the same error, and reports it
        raise
    if isinstance(message := rank.tell(), ranks.Begin):
        _trained(work, out, False, shard)
        message = rank.tell()
    ranks.end(message)
    return {}


def _made(
    recipe: Recipe,
    out: Path,
    resume: bool,
    data_dir: Path | None,
    progress: bool | None,
    budget: Path | None,
    adopt: bool,
    shard: bool,
    begin: Begin | None,
) -> dict[str, Any]:
    """The run itself, in the only process or in the leader."""
    usable_folder(out)
    if adopt and not resume:
        raise InputError("--adopt is for continuing a run: give --resume as well")
    if resume and (out / "recipe.toml").exists():  # a run keeps the name that it began with
        recipe = recipe.called(Recipe.read(out / "recipe.toml", allow_code=True).run.name)
    if (done := _earlier_result(recipe, out, resume)) is not None:
        return done
    private_records(recipe)  # refuses public rows if the method does not use them
    check_watched(recipe)
    check_companions(recipe)
    work = work_of(recipe, data_dir, progress)
    rank = ranks.current()
    if rank is not None and work.plan.method.trained_by is not None:
        raise Refused(f"the method {work.plan.method.name} trains in one process: run it without torchrun")
    made = make_folder(out)
    with locked(out):
        # another process may have started or finished the run since: check again under the lock
        if (done := _earlier_result(recipe, out, resume)) is not None:
            return done
        if adopt and (out / LEDGER).exists():
            adopt_ledger(out / LEDGER)
        try:
            with charged(budget, recipe, work.plan, out, data_dir):
                return _carried_out(recipe, work, out, resume, shard, begin)
        except InputError:
            _take_back(out, made)
            raise


def _trained(work: Work, out: Path, resume: bool, shard: bool, begin: Begin | None = None) -> Result:
    callbacks = () if begin is None else (AtStart(begin),)
    if not shard:
        return work.train(out, resume=resume, callbacks=callbacks)
    if not isinstance(work, Prepared):
        raise Refused(f"the method {work.plan.method.name} trains in one process: run it without torchrun")
    return work.train_sharded(out, resume=resume, callbacks=callbacks)


def _carried_out(
    recipe: Recipe, work: Work, out: Path, resume: bool, shard: bool, begin: Begin | None
) -> dict[str, Any]:
    write_atomically(out / "recipe.toml", recipe.to_toml().encode())
    if (rank := ranks.current()) is not None:
        rank.tell(ranks.Begin())
    result = _trained(work, out, resume, shard, begin)
    noise_free = work.without_noise() if recipe.run.noise_free else None
    described = Described(recipe.run.name, recipe.run.seed, work.inputs, _companions(recipe))
    return write_results(out, work.plan, result, described, noise_free)


def audit_recipe(recipe: Recipe, data_dir: Path | None = None, **options: Any) -> AuditResult:
    """The audit of a recipe's plan with its model and records."""
    return work_of(recipe, data_dir, None).audit(**options)


def _earlier_result(recipe: Recipe, out: Path, resume: bool) -> dict[str, Any] | None:
    """The result of an earlier, complete run of the same recipe in `out`; None if there is work to do."""
    earlier = out / "recipe.toml"
    if not earlier.exists():
        if out.exists() and not _is_empty(out):
            raise InputError(f"{out} is not empty and contains no run: give another directory with --out")
        return None
    if not resume:
        raise InputError(f"{out} already contains a run: give --resume to continue it, or another directory with --out")
    if Recipe.read(earlier, allow_code=True) != recipe:  # read for comparison only: its code is not run
        raise InputError(
            f"{earlier} is not the given recipe: resume with the same one, or give another directory with --out"
        )
    finished = out / "result.json"
    if not finished.exists():
        return None
    result = read_result(finished)
    if not (out / "report.html").exists():
        report.write(out)
    if "ledger" in result:  # results of earlier versions have no head of the ledger
        wrong = [f"{check.name}: {check.why}" for check in failed(verify(out, only=FITTING))]
        if wrong:
            raise InputError(f"the run in {out} is finished, but its files are inconsistent: {'; '.join(wrong)}")
    return result


def _is_empty(out: Path) -> bool:
    """Whether the directory contains nothing but what a process leaves that is killed before it writes the recipe."""
    try:
        return all(path.name in (f"recipe.toml{PARTIAL}", TOKEN, f"{TOKEN}{PARTIAL}") for path in out.iterdir())
    except OSError as error:
        raise InputError(f"{out} can't be read: {error.strerror or error}") from error


def _take_back(out: Path, made: list[Path]) -> None:
    """Removes what was created, for a run whose input was wrong and that has released nothing."""
    if not (out / "ledger.jsonl").exists():
        for name in ("recipe.toml", TOKEN):
            (out / name).unlink(missing_ok=True)
        remove_empty(made)


def _companions(recipe: Recipe) -> Mapping[str, Any]:
    """What predictions of a network with companions need."""
    section = recipe.batch_clipping
    if not section.given:
        return {}
    return {
        "batch_clipping": {
            "companions": section.companions,
            "draws": section.draws,
            "seed": recipe.run.seed,
            "public_rows": "in model.safetensors, as `public`: predictions need them",
        }
    }
