"""A budget for the data's life: composed by the accountant, never exceeded, also by runs that start together."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from small_recipes import small_recipe, small_toml
from sordino.accounting.account import composed_epsilon
from sordino.accounting.events import Release, allocated
from sordino.cli import main
from sordino.errors import InputError, SordinoError
from sordino.plan import Plan
from sordino.release.ledger import Ledger
from sordino.runs.budget import TOKEN, Budget, charged
from sordino.runs.budget_cost import Cost, Limit
from sordino.training.state import TrainState
from sordino.training.witness import bind

DIGEST = "0" * 32


def plan_of(noise_multiplier: float, **options: Any) -> Plan:
    """One release of all records: its ε has a closed form."""
    return Plan.dpsgd(
        noise_multiplier=noise_multiplier, delta=1e-5, records=100, expected_batch=100, steps=1, **options
    )


def budget_of(folder: Path, epsilon: float = 3.0) -> Budget:
    budget = Budget(folder / "life.db", create=True)
    budget.set(DIGEST, "patients", epsilon, 1e-5, "add-remove", replace=True)
    return budget


def run_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


LIMIT = Limit.of(3.0, 1e-5, "add-remove")


def test_a_single_run_costs_what_its_guarantee_says_and_several_what_the_filter_says() -> None:
    one = Cost(((Release("gaussian", 4.0), 1),))
    single, two = LIMIT.together([one]), LIMIT.together([one, one])
    assert single == pytest.approx(composed_epsilon([(Release("gaussian", 4.0), 1)], 1e-5, "add-remove", "pld")[0])
    fixed_beforehand = composed_epsilon([(Release("gaussian", 4.0), 2)], 1e-5, "add-remove", "pld")[0]
    assert fixed_beforehand < two < fixed_beforehand + 0.8, "runs that may be chosen adaptively cost more"
    assert LIMIT.together([one] * 8) < 8 * single, "and less than their sum"
    apart = Cost((), 0.5, 2e-6)
    assert LIMIT.together([one]) < LIMIT.together([one, apart]) < LIMIT.filtered([one]) + 0.5 + 1e-9
    assert LIMIT.together([apart, apart, apart]) == float("inf"), "their δ take more than half"
    assert Cost.from_json(one.to_json()) == one


def test_a_mechanism_without_a_renyi_bound_enters_the_filter_by_its_epsilon() -> None:
    by_epoch = Cost(((allocated(4.0, 5, 5), 1),))
    both = LIMIT.together([by_epoch, Cost(((Release("gaussian", 9.0), 1),))])
    assert LIMIT.together([by_epoch]) < both < float("inf")


def test_the_only_run_may_use_the_whole_budget_and_then_nothing_is_given_back(tmp_path: Path) -> None:
    plan = Plan.dpsgd(noise_multiplier=8.0, delta=1e-5, records=100, expected_batch=100, steps=9)
    limit = plan.guarantee().epsilon * 1.001
    budget, folder = budget_of(tmp_path, epsilon=limit), run_folder(tmp_path, "a")
    assert Limit.of(limit, 1e-5, "add-remove").filtered([Cost.of_plan(plan)]) > limit
    budget.reserve(DIGEST, plan, folder)
    reserved = budget.accounts()[0].spent
    _ledger(folder, plan, entries=1)
    budget.settle(folder)
    assert budget.accounts()[0].spent == reserved
    with pytest.raises(InputError, match="would exceed"):
        budget.reserve(DIGEST, plan_of(100.0), run_folder(tmp_path, "b"))


def test_the_order_of_the_filter_stays_when_the_limit_changes_after_runs(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.reserve(DIGEST, plan_of(20.0), run_folder(tmp_path, "a"))
    before = budget.accounts()[0].limit.order
    budget.set(DIGEST, "patients", 30.0, 1e-9, "add-remove", replace=True)
    assert budget.accounts()[0].limit.order == before != Limit.of(30.0, 1e-9, "add-remove").order


def test_a_run_that_would_exceed_the_budget_is_not_reserved(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.reserve(DIGEST, plan_of(2.0), run_folder(tmp_path, "a"))
    before = budget.accounts()
    with pytest.raises(InputError, match=r"would exceed the budget of its records: ε = 1\.9"):
        budget.reserve(DIGEST, plan_of(1.8), run_folder(tmp_path, "b"))
    assert budget.accounts() == before
    assert not (tmp_path / "b" / TOKEN).exists()
    budget.reserve(DIGEST, plan_of(20.0), tmp_path / "b")
    assert budget.accounts()[0].spent <= 3.0


def test_a_run_under_another_relation_or_on_other_records_does_not_start(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    with pytest.raises(InputError, match="neither follows from the other"):
        budget.reserve(DIGEST, plan_of(9.0, relation="replace-one"), run_folder(tmp_path, "a"))
    with pytest.raises(InputError, match="has no budget for these records"):
        budget.reserve("1" * 32, plan_of(9.0), tmp_path / "a")


def _race(path: Path, folder: Path, barrier: Any, answers: Any) -> None:
    """Also the file is made by all of them at once."""
    folder.mkdir()
    plan = plan_of(10.0)
    barrier.wait()
    budget = Budget(path, create=True)
    budget.set(DIGEST, "patients", 1.2, 1e-5, "add-remove", replace=True)
    try:
        budget.reserve(DIGEST, plan, folder)
        answers.put("started")
    except InputError:
        answers.put("refused")


def test_of_twenty_runs_that_start_at_once_as_many_start_as_one_after_the_other(tmp_path: Path) -> None:
    # not a fork of this process: threads of tests before this one may hold locks, which a child would wait for
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sordino.runs.budget"])
    barrier, answers = context.Barrier(20), context.Queue()
    runs = [
        context.Process(target=_race, args=(tmp_path / "life.db", tmp_path / str(number), barrier, answers))
        for number in range(20)
    ]
    for run in runs:
        run.start()
    found = [answers.get(timeout=120) for _ in runs]
    for run in runs:
        run.join()
    forkserver._forkserver._stop()  # waited for, so that its processor time counts as this test's
    (account,) = Budget(tmp_path / "life.db").accounts()
    alone = [Cost.of_plan(plan_of(10.0))]
    fit = max(n for n in range(1, 20) if account.limit.together(alone * n) <= 1.2)
    assert found.count("started") == len(account.runs) == fit
    assert 2 <= fit < 20
    assert account.spent <= 1.2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["life.db"], "nothing is left beside it"


def _reserve_for_ever(path: Path, folder: Path) -> None:
    for number in range(10_000):
        out = folder / str(number)
        out.mkdir(parents=True)
        Budget(path).reserve(DIGEST, plan_of(1000.0), out)
        (out / "started").touch()


def test_a_process_that_is_killed_leaves_a_budget_that_counts_every_run_that_started(tmp_path: Path) -> None:
    budget, context = budget_of(tmp_path, epsilon=50.0), multiprocessing.get_context("fork")
    for number in range(6):
        run = context.Process(target=_reserve_for_ever, args=(budget.path, tmp_path / f"p{number}"))
        run.start()
        while not (tmp_path / f"p{number}" / str(number) / "started").exists():
            time.sleep(0.001)
        run.kill()  # SIGKILL, wherever it is
        run.join()
    counted = {folder for folder, _, _ in budget.accounts()[0].runs}
    started = {str(path.parent.resolve()) for path in tmp_path.rglob("started")}
    assert len(started) >= 21
    assert started <= counted
    assert len(counted - started) <= 6, "at most the one under way when each was killed"


FORGERIES = (
    "UPDATE runs SET cost = replace(cost, '2.0', '9.0')",
    "UPDATE runs SET cost = 'null'",
    "DELETE FROM runs",
    "UPDATE datasets SET epsilon = 99",
    "UPDATE datasets SET epsilon = x'00'",
    "UPDATE datasets SET delta = 0.5",
    "UPDATE datasets SET relation = 'replace-one'",
    "UPDATE runs SET digest = 'another'",
    "UPDATE about SET key = 'text'",
    "UPDATE about SET key = x'00'",
    "UPDATE about SET seal = NULL",
    "DELETE FROM about",
    "DROP TABLE runs",
    "INSERT INTO runs VALUES ('t', 'd', 'f', 'settled', '{}')",
)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_cell_that_was_edited_is_noticed_and_nothing_starts(tmp_path: Path, forgery: str) -> None:
    budget = budget_of(tmp_path)
    budget.reserve(DIGEST, plan_of(2.0), run_folder(tmp_path, "a"))
    with closing(sqlite3.connect(budget.path, isolation_level=None)) as base:
        base.execute(forgery)
    with pytest.raises(SordinoError, match=r"life\.db"):
        budget.reserve(DIGEST, plan_of(20.0), run_folder(tmp_path, "b"))
    with pytest.raises(SordinoError, match=r"life\.db"):
        Budget(budget.path)


def test_no_byte_of_the_file_can_lower_what_was_spent(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.reserve(DIGEST, plan_of(2.0), run_folder(tmp_path, "a"))
    before, content = budget.accounts(), budget.path.read_bytes()
    noticed = 0
    for place in range(0, len(content), 131):
        changed = bytearray(content)
        changed[place] ^= 0x15
        budget.path.write_bytes(changed)
        try:
            assert Budget(budget.path).accounts() == before, place
        except SordinoError:
            noticed += 1
    assert noticed >= 3  # most of a small file is empty pages


def test_a_file_from_before_the_seals_is_read_and_sealed(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.reserve(DIGEST, plan_of(2.0), run_folder(tmp_path, "a"))
    before = budget.accounts()
    with closing(sqlite3.connect(budget.path, isolation_level=None)) as base:
        base.execute("ALTER TABLE about DROP COLUMN seal")
        base.execute("UPDATE about SET version = 2")
    assert Budget(budget.path).accounts() == before
    with closing(sqlite3.connect(budget.path, isolation_level=None)) as base:
        base.execute("DELETE FROM runs")
    with pytest.raises(SordinoError, match="seal"):
        Budget(budget.path)


def test_datasets_are_told_apart_by_content_and_not_by_name_order_or_place(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "life.db", create=True)
    rows = ["a,b,y", *(f"{i}.5,{i * i},{i % 2}" for i in range(12))]
    (tmp_path / "one.csv").write_text("\n".join(rows))
    (tmp_path / "same.csv").write_text("\n".join(rows))
    (tmp_path / "other.csv").write_text("\n".join([*rows[:-1], "3.5,1,1"]))
    columns = {name: {"kind": "number", "low": 0, "high": 200} for name in ("a", "b")}
    table = {"name": "csv", "target": "y", "classes": ["0", "1"], "columns": columns}
    digests = [
        budget.digest(small_recipe(data={**table, "path": str(tmp_path / name)}), None)
        for name in ("one.csv", "same.csv", "other.csv")
    ]
    assert digests[0] == digests[1] != digests[2]
    some = [budget.digest(small_recipe(data={"records": n}), None) for n in (50, 60)]
    assert some[0] == some[1], "all records of a dataset have one budget, however many a run takes"


def _ledger(folder: Path, plan: Plan, entries: int) -> None:
    with Ledger.open(folder / "ledger.jsonl", plan.to_dict()) as ledger:
        for step in range(entries):
            ledger.record(
                {
                    "purpose": "gradient", "step": step, "mechanism": "gaussian", "noise_multiplier": 8.0,
                    "relation": "add-remove", "sampling": {"name": "poisson", "sampling_rate": 1.0}, "secure": True,
                }
            )  # fmt: skip


def test_a_killed_run_keeps_its_reservation_until_its_ledger_settles_it(tmp_path: Path) -> None:
    budget, folder = budget_of(tmp_path), run_folder(tmp_path, "a")
    plan = Plan.dpsgd(noise_multiplier=8.0, delta=1e-5, records=100, expected_batch=100, steps=9)
    budget.reserve(DIGEST, plan, folder)
    reserved = budget.accounts()[0].spent
    assert budget.settle_dead() == ([], [str(folder)]), "without a ledger nobody knows what it released"
    _ledger(folder, plan, entries=4)
    assert budget.settle_dead() == ([str(folder)], [])
    settled = budget.accounts()[0].spent
    assert settled == pytest.approx(LIMIT.together([Cost(((Release("gaussian", 8.0), 4),))]))
    assert settled < reserved
    budget.reserve(DIGEST, plan, folder)  # resumed: the same run, in full again and not twice
    assert budget.accounts()[0].spent == reserved
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(InputError, match="would exceed"):
        budget_of(tmp_path, epsilon=reserved * 1.01).reserve(DIGEST, plan, tmp_path / "copy")
    (folder / "ledger.jsonl").unlink()
    with pytest.raises(InputError, match="would exceed"):  # what it released is forgotten: it counts again
        budget.reserve(DIGEST, plan, folder)


@pytest.mark.parametrize("lost", ["ledger", "directory"])
def test_a_ledger_that_is_lost_while_the_run_is_at_work_gives_nothing_back(tmp_path: Path, lost: str) -> None:
    """Without a ledger at the end, a run was once taken for one that had released nothing."""
    recipe, life, out = small_recipe(), tmp_path / "life.db", run_folder(tmp_path, "a")
    plan = plan_of(4.0)
    budget = Budget(life, create=True)
    budget.set(budget.digest(recipe, None), "patients", 3.0, 1e-5, "add-remove", replace=True)

    def ended() -> None:
        _ledger(out, plan, entries=1)
        shutil.rmtree(out) if lost == "directory" else (out / "ledger.jsonl").unlink()
        raise SordinoError("the run ends")

    with pytest.raises(SordinoError, match="the run ends"), charged(life, recipe, plan, out, None):
        ended()
    assert budget.accounts()[0].runs[0][2] == Cost.of_plan(plan)
    other = run_folder(tmp_path, "b")
    with pytest.raises(InputError, match="before"), charged(life, recipe, plan, other, None):
        raise InputError("before a ledger was opened")
    assert budget.accounts()[0].runs[1][2] == Cost()


@pytest.mark.parametrize("bent", ["cut", "exchanged"])
def test_a_ledger_that_was_cut_or_exchanged_after_a_kill_settles_nothing(tmp_path: Path, bent: str) -> None:
    budget, folder = budget_of(tmp_path), run_folder(tmp_path, "a")
    plan = Plan.dpsgd(noise_multiplier=8.0, delta=1e-5, records=100, expected_batch=100, steps=9)
    budget.reserve(DIGEST, plan, folder)
    reserved = budget.accounts()[0].spent
    _ledger(folder, plan, entries=4)
    ledger = folder / "ledger.jsonl"
    with Ledger.open(ledger, plan.to_dict()) as opened:
        bind(folder / "checkpoint", opened, (torch.zeros(1, 1), torch.zeros(1)))
        TrainState(4, {}, {}, ledger=opened.head).save(folder / "checkpoint", "of this run")
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:3]))
    if bent == "exchanged":
        ledger.unlink()
        _ledger(folder, plan, entries=1)
    assert budget.settle_dead() == ([], [str(folder)])
    assert budget.accounts()[0].spent == reserved
    ledger.write_bytes(b"".join(lines))
    assert budget.settle_dead() == ([str(folder)], [])


def test_the_file_is_its_owners_alone_and_its_digest_is_keyed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(small_toml())
    digests = []
    before = os.umask(0)
    try:
        for name in ("one.db", "two.db"):
            assert main(["budget", "set", str(tmp_path / name), str(recipe), "--epsilon", "3", "--delta", "1e-5"]) == 0
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
            digests.append(Budget(tmp_path / name).accounts()[0].digest)
    finally:
        os.umask(before)
    assert digests[0] != digests[1]


def test_train_counts_itself_and_does_not_start_when_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, life = tmp_path / "recipe.toml", tmp_path / "life.db"
    recipe.write_text(small_toml(privacy={"noise_multiplier": 2.0, "insecure_seed": None}))
    assert main(["budget", "set", str(life), str(recipe), "--epsilon", "0.0115", "--delta", "1e-5"]) == 0
    train = ["train", str(recipe), "--budget", str(life), "--out"]
    assert main([*train, str(tmp_path / "a")]) == 0
    capsys.readouterr()
    assert main(["budget", "show", str(life), "--json"]) == 0
    (account,) = json.loads(capsys.readouterr().out)["datasets"]
    assert account["runs"][0]["state"] == "settled"
    assert account["spent"] == pytest.approx(json.loads((tmp_path / "a" / "result.json").read_text())["epsilon"])
    assert main([*train, str(tmp_path / "b")]) == 2
    assert "would exceed the budget" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("content", [b"", b"not a database", b"SQLite format 3\0" + bytes(100)])
def test_a_file_that_is_no_budget_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "life.db"
    path.write_bytes(content)
    with pytest.raises(SordinoError, match=r"life\.db"):
        Budget(path)


def test_a_run_that_protects_users_is_not_added_to_runs_that_protect_records(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="protects a user"):
        budget_of(tmp_path).reserve(DIGEST, plan_of(9.0, unit="user"), run_folder(tmp_path, "a"))


def test_a_run_of_a_budget_goes_on_only_under_that_budget(tmp_path: Path) -> None:
    """Killed, settled from its ledger and resumed without --budget, or with another file, its last steps were free."""
    recipe, life, out = small_recipe(), tmp_path / "life.db", run_folder(tmp_path, "a")
    plan = Plan.dpsgd(noise_multiplier=8.0, delta=1e-5, records=100, expected_batch=100, steps=9)
    for path in (life, tmp_path / "other.db"):
        budget = Budget(path, create=True)
        budget.set(budget.digest(recipe, None), "patients", 3.0, 1e-5, "add-remove", replace=True)
    shutil.copy(life, tmp_path / "older.db")
    Budget(life).reserve(Budget(life).digest(recipe, None), plan, out)
    _ledger(out, plan, entries=4)
    Budget(life).settle_dead()
    settled = Budget(life).accounts()[0].spent
    with pytest.raises(InputError, match="begun under a budget"), charged(None, recipe, plan, out, None):
        pass
    for path in (tmp_path / "other.db", tmp_path / "older.db"):
        with pytest.raises(InputError, match="another budget file"), charged(path, recipe, plan, out, None):
            pass
        assert Budget(path).accounts()[0].runs == ()
    with charged(life, recipe, plan, out, None):
        assert Budget(life).accounts()[0].spent > settled
    (out / TOKEN).unlink()  # the owner's decision: it is counted by hand
    with charged(None, recipe, plan, out, None):
        pass


def test_a_kill_between_reservation_and_recipe_leaves_a_directory_that_can_be_used(tmp_path: Path) -> None:
    recipe, life, out = tmp_path / "recipe.toml", tmp_path / "life.db", run_folder(tmp_path, "a")
    recipe.write_text(small_toml(privacy={"noise_multiplier": 2.0, "insecure_seed": None}))
    assert main(["budget", "set", str(life), str(recipe), "--epsilon", "3", "--delta", "1e-5"]) == 0
    (out / TOKEN).write_text(json.dumps({"reservation": "of a killed process"}))
    assert main(["train", str(recipe), "--budget", str(life), "--out", str(out)]) == 0
    assert len(Budget(life).accounts()[0].runs) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to read-only files")
def test_a_budget_that_can_not_be_written_starts_nothing(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.path.chmod(0o400)
    with pytest.raises(SordinoError, match="can't be used"):
        budget.reserve(DIGEST, plan_of(4.0), run_folder(tmp_path, "a"))


def test_a_full_disk_starts_nothing_and_loses_nothing(tmp_path: Path) -> None:
    budget = budget_of(tmp_path)
    budget.reserve(DIGEST, plan_of(8.0), run_folder(tmp_path, "a"))
    before = budget.accounts()[0].runs
    script = (
        "import resource, signal, sys; from pathlib import Path; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from sordino.errors import SordinoError; from sordino.plan import Plan\n"
        "from sordino.runs.budget import Budget\n"
        "here = Path(sys.argv[1]); budget = Budget(here / 'life.db')\n"
        "plan = Plan.dpsgd(noise_multiplier=8.0, delta=1e-5, records=100, expected_batch=100, steps=1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"  # every write beyond fails, as on a full disk
        "try:\n    budget.reserve(sys.argv[2], plan, here / 'b')\nexcept SordinoError as error:\n    print(error)\n"
    )
    run_folder(tmp_path, "b")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), DIGEST], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "can't be" in done.stdout
    assert budget.accounts()[0].runs == before
