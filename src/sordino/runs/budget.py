"""A budget for a dataset: what all runs on it may release together, in one SQLite file.

    sordino budget set FILE RECIPE.toml --epsilon 3 --delta 1e-5
    sordino train RECIPE.toml --budget FILE

**What the file holds.** For each run, the releases that its plan allows (a *reservation*, made before the first of
them) or, once the run has ended, the releases in its ledger (*settled*). A killed run keeps its reservation until it is
settled from its ledger. So at every moment the file counts at least what was released.

**How runs are composed.** A later run may be chosen by looking at earlier ones. So runs are not composed as privacy
loss distributions, which bound mechanisms that are fixed in advance. Formal guarantee: seeing all runs that a budget of
(ε, δ) admits is (ε, δ)-differentially private, however they were chosen, by a Rényi filter of an order that is fixed
when the budget is set (`accounting.adaptive`). If a dataset has only one run, that run may instead cost what its own
guarantee says, which is less: it is fixed in advance. Such a run counts in full even if it stopped early, and if it has
spent more than the filter allows, no other run can follow. All runs have one relation: (ε, δ) under replace-one says
nothing under add-remove, so a run under another relation than the budget's does not start; nor does one whose unit is
a user.

**Two runs at once.** A reservation is one transaction that first adds up everything: of two runs that each fit but not
together, one starts.

**Which dataset.** A dataset is identified by a digest of its content, keyed by a secret of this file. With a plain hash
anyone who can guess the dataset up to one record could test the guess; with the key, only those who can read this file
can (mode 0600). The same rows in another order, or with other columns selected, are the same dataset if they come from
the same file. A dataset with one more row is *another* one: a budget is attached to content, not to people.
"""

from __future__ import annotations

import hmac
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sordino import checks
from sordino.accounting.adaptive import filter_order
from sordino.errors import InputError, SordinoError
from sordino.files import json_bytes, locked, read_json, write_atomically
from sordino.plan.core import Plan
from sordino.release.ledger import noted_ledgers, read_chain
from sordino.runs.budget_cost import Account, Cost, Limit
from sordino.runs.budget_file import create as create_file
from sordino.runs.budget_file import transaction
from sordino.runs.dataset_digest import content_digest
from sordino.runs.recipe import Recipe
from sordino.shown import up
from sordino.training.witness import require_own

TOKEN = "budget.json"  # in the run directory: the run's reservation


class Budget:
    """A budget file. Every method is one transaction.

    Args:
        path: The SQLite file.
        create: Create it if it does not exist.

    Raises:
        InputError: it does not exist, can't be opened, or is not a budget file.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if not path.is_file():
            if not create or path.exists():
                raise InputError(f"there is no budget file {path}: make one with `sordino budget set`")
            create_file(path)
        with self._transaction():
            pass  # raises if the file can't be read, or its seal does not match

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with transaction(self.path) as (base, key):
            self._key = key
            yield base

    def digest(self, recipe: Recipe, data_dir: Path | None) -> str:
        """The dataset of a recipe, keyed by this file's secret."""
        return hmac.new(self._key, content_digest(recipe, data_dir), "sha256").hexdigest()[:32]

    def set(self, digest: str, name: str, epsilon: float, delta: float, relation: str, *, replace: bool) -> None:
        """Sets the limit of a dataset; InputError if it has one and `replace` is not given."""
        epsilon, delta = checks.positive("epsilon", epsilon), checks.delta_value(delta)
        checks.choice("relation", relation, checks.RELATIONS)
        with self._transaction() as base:
            known = self._account(base, digest)
            if known is not None and not replace:
                raise InputError(
                    f"{self.path} already has a budget for these records (ε = {up(known.limit.epsilon)}, δ = "
                    f"{up(known.limit.delta)}, {known.limit.relation}): give --replace to change it"
                )
            if known is not None and known.runs and known.limit.relation != relation:
                raise InputError(f"it already counts runs under {known.limit.relation}: its relation can't be changed")
            # the order must not depend on what was seen: once there are runs, it is fixed
            order = known.limit.order if known is not None and known.runs else filter_order(epsilon, delta)
            base.execute(
                "INSERT INTO datasets VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO UPDATE SET "
                "name = excluded.name, epsilon = excluded.epsilon, delta = excluded.delta, "
                "relation = excluded.relation, filter_order = excluded.filter_order",
                (digest, name, epsilon, delta, relation, order),
            )

    def accounts(self) -> list[Account]:
        """All datasets with their runs."""
        with self._transaction() as base:
            digests = [row[0] for row in base.execute("SELECT digest FROM datasets ORDER BY name, digest")]
            return [found for digest in digests if (found := self._account(base, digest)) is not None]

    def reserve(self, digest: str, plan: Plan, out: Path) -> str:
        """Reserves the plan's cost for the run in `out`, or raises; nothing may be released before it returns.

        A resumed run keeps its reservation; one that was settled in the meantime is reserved again in full.

        Raises:
            InputError: the dataset has no budget, the relation differs, all runs together would exceed it, or the run
                was begun under another budget file.
        """
        cost, folder, token = Cost.of_plan(plan), str(out.resolve()), _token(out)
        with self._transaction() as base:
            if token is not None and not base.execute("SELECT 1 FROM runs WHERE token = ?", (token,)).fetchone():
                raise InputError(
                    f"the run in {out} was begun under another budget file, or {self.path} is an older copy: give the "
                    f"file that counts it. If that is lost, count the run's ledger by hand and delete {out / TOKEN}"
                )
            known = self._account(base, digest)
            if known is None:
                raise InputError(f"{self.path} has no budget for these records: set one with `sordino budget set`")
            limit = known.limit
            if plan.unit != "record":
                raise InputError(
                    f"the budget is for record-level guarantees, and this run protects a {plan.unit}: neither follows "
                    "from the other without loss, so they are not added; run it without --budget and account for it "
                    "separately"
                )
            if plan.relation != limit.relation:
                raise InputError(
                    f"the budget counts under {limit.relation} and this run's guarantee is under {plan.relation}: "
                    "neither follows from the other without loss, so they are not added; use privacy.relation = "
                    f'"{limit.relation}", or set a separate budget for these runs'
                )
            others = [
                Cost.from_json(text)
                for other, text in base.execute("SELECT token, cost FROM runs WHERE digest = ?", (digest,))
                if other != token or not self._is_of(base, token, digest, folder)
            ]
            total = limit.together([*others, cost])
            if not total <= limit.epsilon:
                spent = limit.together(others)
                raise InputError(
                    f"this run would exceed the budget of its records: ε = {up(spent)} of {up(limit.epsilon)} at δ = "
                    f"{up(limit.delta)} is spent or reserved, and with this run it would be {up(total)}. It was not "
                    "started. Give it less ε, or settle runs that were killed: sordino budget settle"
                )
            if token is None or not self._is_of(base, token, digest, folder):
                token = secrets.token_hex(16)
            write_atomically(out / TOKEN, json_bytes({"reservation": token}), private=True)
            base.execute(
                "INSERT INTO runs VALUES (?, ?, ?, 'reserved', ?) ON CONFLICT (token) DO UPDATE SET "
                "state = excluded.state, cost = excluded.cost",
                (token, digest, folder, cost.to_json()),
            )
        return token

    def settle(self, out: Path, token: str | None = None, *, began: bool = True) -> None:
        """Replaces the reservation of the ended run in `out` by what its ledger contains.

        Args:
            out: The run directory.
            token: What `reserve` returned, if this process made the run.
            began: Whether a ledger was opened. If it was and is missing now, the reservation stays forever.

        Raises:
            SordinoError: the ledger was lost, exchanged, truncated or rolled back; the reservation stays.
        """
        token, ledger = token or _token(out), out / "ledger.jsonl"
        if token is None or (began and not ledger.exists()):
            return
        if ledger.exists():
            require_own(out / "checkpoint", read_chain(ledger))
        cost = Cost.of_ledger(ledger) if ledger.exists() else Cost()
        with self._transaction() as base:
            row = base.execute("SELECT digest, cost FROM runs WHERE token = ?", (token,)).fetchone()
            known = self._account(base, row[0]) if row is not None else None
            if known is not None and known.limit.filtered([c for _, _, c in known.runs]) > known.limit.epsilon:
                cost = Cost.from_json(row[1])  # it was admitted as the only run, so it counts in full
            base.execute(
                "UPDATE runs SET state = 'settled', cost = ? WHERE token = ? AND folder = ? AND state = 'reserved'",
                (cost.to_json(), token, str(out.resolve())),
            )

    def settle_dead(self) -> tuple[list[str], list[str]]:
        """Settles the reservations of runs that have ended: (settled, left as they are).

        A run in progress is left, and so is one whose directory or ledger is missing: it counts in full forever.
        """
        with self._transaction() as base:
            folders = [row[0] for row in base.execute("SELECT folder FROM runs WHERE state = 'reserved'")]
        settled, left = [], []
        for folder in folders:
            try:
                if not (Path(folder) / "ledger.jsonl").exists():
                    raise SordinoError("no ledger")
                with locked(Path(folder)):
                    self.settle(Path(folder))
                settled.append(folder)
            except SordinoError:
                left.append(folder)
        return settled, left

    def _is_of(self, base: sqlite3.Connection, token: str | None, digest: str, folder: str) -> bool:
        """Whether the reservation was made for this dataset and directory: a copied directory needs its own."""
        row = base.execute("SELECT digest, folder FROM runs WHERE token = ?", (token,)).fetchone()
        return bool(row == (digest, folder))

    def _account(self, base: sqlite3.Connection, digest: str) -> Account | None:
        row = base.execute(
            "SELECT name, epsilon, delta, relation, filter_order FROM datasets WHERE digest = ?", (digest,)
        ).fetchone()
        if row is None:
            return None
        runs = base.execute("SELECT folder, state, cost FROM runs WHERE digest = ? ORDER BY rowid", (digest,))
        costs = tuple((folder, state, Cost.from_json(text)) for folder, state, text in runs)
        name, *limit = row
        return Account(digest, name, Limit(*limit), costs)


@contextmanager
def charged(path: Path | None, recipe: Recipe, plan: Plan, out: Path, data_dir: Path | None) -> Iterator[None]:
    """Reserves before and settles after the block, also if the run fails. Without a file nothing is counted.

    Raises:
        InputError: the run may not start (`Budget.reserve`), or it was begun under a budget and none is given.
    """
    if path is None:
        if _token(out) is not None:  # it may have been settled since, and would go on uncounted
            raise InputError(f"the run in {out} was begun under a budget: give its file with --budget to continue it")
        yield
        return
    budget = Budget(path)
    token = budget.reserve(budget.digest(recipe, data_dir), plan, out)
    with noted_ledgers() as opened:
        try:
            yield
        except BaseException:
            with suppress(SordinoError):  # the reservation stays; the caller sees why the run ended
                budget.settle(out, token, began=bool(opened))
            raise
        budget.settle(out, token, began=bool(opened))


def _token(out: Path) -> str | None:
    """The reservation of the run in `out`; None if it has no ledger, as its earlier releases are then unknown."""
    path = out / TOKEN
    if not path.exists() or not (out / "ledger.jsonl").exists():
        return None
    token = read_json(path, "the reservation of the run").get("reservation")
    return token if isinstance(token, str) else None


def shown(document: Mapping[str, Any]) -> dict[str, str]:
    """The rows of `sordino budget show`."""
    rows: dict[str, str] = {}
    for one in document["datasets"]:
        spent = "∞" if one["spent"] is None else up(one["spent"])
        rows[f"{one['name']} {one['dataset'][:8]}"] = (
            f"ε = {spent} of {up(one['epsilon'])} at δ = {up(one['delta'])}, {one['relation']}; "
            f"{len(one['runs'])} runs, {sum(run['state'] == 'reserved' for run in one['runs'])} of them reserved"
        )
    return rows or {"budget": "no dataset has one yet: sordino budget set"}
