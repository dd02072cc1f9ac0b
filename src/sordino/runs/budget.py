"""A budget for the data's life: what all runs on a dataset have spent together, in one SQLite file.

    sordino budget set FILE RECIPE.toml --epsilon 3 --delta 1e-5
    sordino train RECIPE.toml --budget FILE

**What is kept.** For each run, the releases that its plan allows (a *reservation*, made before the first of them) or,
once it has ended, those that its ledger holds (*settled*). A run that was killed keeps its reservation until it is
settled from its ledger. So at every moment the file says no less than was released.

**How runs are composed.** Later runs may be chosen by looking at earlier ones, so they are not composed as privacy loss
distributions, which bound mechanisms that are fixed beforehand. Formal guarantee: seeing all runs that a budget of
(ε, δ) admits is (ε, δ)-differentially private, however they were chosen, by a Rényi filter of an order that is fixed
when the budget is set (`accounting.adaptive`). A dataset's *only* run may instead cost what its own guarantee says,
which is less: it is fixed beforehand. Such a run counts in full even where it stopped early, and where it has spent
more than the filter allows, no other run can follow. All runs have one relation: (ε, δ) under replace-one says nothing
under add-remove, so a run under another relation than the budget's does not start; nor does one that protects users.

**Two runs at once.** A run is reserved in one transaction that adds up everything first: of two runs that each fit but
not together, one starts.

**Which dataset.** By a digest of the content, keyed by a secret of this file. A plain hash would let anybody who
guesses the dataset up to one record test the guess; with the key, only who can read this file can (mode 0600). The same
rows in another order or with other columns chosen are the same dataset where they come from the same file. A dataset
with a row more is *another* one: a budget follows content, not people.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sordino import checks, data
from sordino.accounting.account import checked_releases, composed_epsilon
from sordino.accounting.adaptive import divergence, filter_order, filtered_epsilon, pure_divergence
from sordino.accounting.events import Release
from sordino.accounting.spent import entry_releases
from sordino.data.own import found
from sordino.data.sources import source_of
from sordino.errors import InputError, SordinoError
from sordino.files import json_bytes, locked, read_json, sync_folder, write_atomically
from sordino.plan.core import Plan
from sordino.plan.method import Method
from sordino.plan.spent import from_ledger
from sordino.registry import method_class
from sordino.release.ledger import noted_ledgers, read_chain, read_ledger
from sordino.runs.recipe import Recipe
from sordino.shown import up
from sordino.training.witness import require_own

VERSION = 3
WAIT = 120.0  # seconds for other runs that add up their cost
TOKEN = "budget.json"  # in the run directory: which reservation the run has
_TABLES = """
CREATE TABLE about (version INTEGER NOT NULL, key BLOB NOT NULL, seal BLOB);
CREATE TABLE datasets (
    digest TEXT PRIMARY KEY, name TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL, relation TEXT NOT NULL,
    filter_order REAL NOT NULL
);
CREATE TABLE runs (
    token TEXT PRIMARY KEY, digest TEXT NOT NULL REFERENCES datasets, folder TEXT NOT NULL, state TEXT NOT NULL,
    cost TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class Cost:
    """What a run releases: mechanisms that compose, or one (ε, δ) where its method does not compose."""

    releases: tuple[tuple[Release, int], ...] = ()
    epsilon: float = 0.0
    delta: float = 0.0

    @classmethod
    def of_plan(cls, plan: Plan) -> Cost:
        """Of everything that the plan allows."""
        if plan.method.composes:
            return cls(tuple(checked_releases(plan.releases())))
        found = plan.guarantee()
        return cls((), found.epsilon, found.delta)

    @classmethod
    def of_ledger(cls, path: Path) -> Cost:
        """Of what a ledger holds."""
        header, entries = read_ledger(path)
        stated = header.get("plan", header)
        lines = [entry for entry in entries if entry.get("kind", "release") == "release"]
        if not lines:
            return cls()
        method = method_class(stated["method"]["name"])
        if method.composes and method.spent is Method.spent:
            return cls(tuple(entry_releases(stated, lines)[0]))
        delta = checks.delta_value(stated.get("delta"))
        return cls((), float(from_ledger(header, entries, delta)["epsilon"]), delta)

    def to_json(self) -> str:
        releases = [[asdict(release), count] for release, count in self.releases]
        return json.dumps({"releases": releases, "epsilon": self.epsilon, "delta": self.delta})

    @classmethod
    def from_json(cls, text: str) -> Cost:
        try:
            known = json.loads(text)
            releases = checked_releases([(Release(**values), int(count)) for values, count in known["releases"]])
            epsilon, delta = (checks.real(name, known[name]) for name in ("epsilon", "delta"))
            if epsilon < 0.0 or delta < 0.0:
                raise ValueError("a cost below zero")
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise InputError(f"a run's cost in the budget file is damaged: {error}") from error
        return cls(tuple(releases), epsilon, delta)


@dataclass(frozen=True)
class Limit:
    """What all runs on a dataset may cost together, and the order of the filter that adds them up."""

    epsilon: float
    delta: float
    relation: str
    order: float

    @classmethod
    def of(cls, epsilon: float, delta: float, relation: str) -> Limit:
        return cls(epsilon, delta, relation, filter_order(epsilon, delta))

    def filtered(self, costs: Sequence[Cost]) -> float:
        """ε at δ of runs that were chosen adaptively."""
        found, failures = [], []
        for cost in costs:
            here = divergence(cost.releases, self.order, self.relation)
            if math.isinf(here):  # no Rényi bound is known: the run's own ε, at a quarter of δ
                own = self.delta / 4
                here = pure_divergence(self._alone(cost.releases, own), self.order)
                failures.append(own)
            found += [here, pure_divergence(cost.epsilon, self.order)]
            failures.append(cost.delta)
        return filtered_epsilon(found, failures, self.order, self.delta)

    def together(self, costs: Sequence[Cost]) -> float:
        """ε at δ of all of these runs, an upper bound; infinite where their own δ leave nothing of it."""
        if len(costs) > 1:
            return self.filtered(costs)
        if not costs:
            return 0.0
        left = self.delta - costs[0].delta * (1 + 1e-12)
        if costs[0].releases:
            return min(self.filtered(costs), self._alone(costs[0].releases, left)) if left > 0 else math.inf
        return costs[0].epsilon if left >= 0 or costs[0].delta <= self.delta else math.inf

    def _alone(self, releases: Sequence[tuple[Release, int]], delta: float) -> float:
        return composed_epsilon(checked_releases(releases), delta, self.relation, "pld")[0]


@dataclass(frozen=True)
class Account:
    """One dataset of a budget file: its limit and what its runs cost."""

    digest: str
    name: str
    limit: Limit
    runs: tuple[tuple[str, str, Cost], ...]  # folder, state, cost

    @property
    def spent(self) -> float:
        """ε at the account's δ of all runs, reserved ones in full."""
        return self.limit.together([cost for _, _, cost in self.runs])

    def to_dict(self) -> dict[str, Any]:
        spent = self.spent
        return {
            "dataset": self.digest,
            "name": self.name,
            **asdict(self.limit),
            "spent": spent,
            "runs": [
                {"folder": folder, "state": state, "epsilon": self.limit.together([cost])}
                for folder, state, cost in self.runs
            ],
        }


class _Bent(Exception):
    """The file holds what this package did not write there."""


def _content(base: sqlite3.Connection) -> bytes:
    tables = [base.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in ("datasets", "runs")]
    return json.dumps(tables).encode()


def _seal(base: sqlite3.Connection, key: bytes) -> None:
    base.execute("UPDATE about SET seal = ?", (hmac.digest(key, _content(base), "sha256"),))


def _opened(base: sqlite3.Connection) -> bytes:
    """The key of a file whose seal fits. It finds damage and edits, not a forger who reads the key beside it."""
    rows = base.execute("SELECT * FROM about").fetchall()
    if len(rows) == 1 and rows[0][0] == 2:  # made before there were seals
        base.execute("ALTER TABLE about ADD COLUMN seal BLOB")
        base.execute("UPDATE about SET version = ?", (VERSION,))
        _seal(base, rows[0][1])
        rows = base.execute("SELECT * FROM about").fetchall()
    if len(rows) != 1 or rows[0][0] != VERSION or not isinstance(rows[0][1], bytes) or len(rows[0][1]) != 32:
        raise _Bent("it is not of this version of sordino")
    _, key, seal = rows[0]
    try:
        content = _content(base)
    except TypeError as error:
        raise _Bent("a cell has a type that it never has") from error
    if not isinstance(seal, bytes) or not hmac.compare_digest(seal, hmac.digest(key, content, "sha256")):
        raise _Bent("its rows do not fit its seal")
    return bytes(key)


class Budget:
    """A budget file. Every method is one transaction.

    Args:
        path: the SQLite file.
        create: make it if it is not there.

    Raises:
        InputError: it is not there, can't be opened, or is no budget file.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if not path.is_file():
            if not create or path.exists():
                raise InputError(f"there is no budget file {path}: make one with `sordino budget set`")
            self._create()
        with self._transaction():
            pass  # it can be read, and its seal fits

    def _create(self) -> None:
        """Made aside and then linked into its place: whoever finds the file finds it whole."""
        aside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        try:
            os.close(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            try:
                with closing(sqlite3.connect(aside, isolation_level=None)) as base:
                    for statement in _TABLES.split(";"):
                        base.execute(statement)
                    key = secrets.token_bytes(32)
                    base.execute("INSERT INTO about VALUES (?, ?, NULL)", (VERSION, key))
                    _seal(base, key)
                os.link(aside, self.path)
            finally:
                os.unlink(aside)
            sync_folder(self.path.absolute().parent)
        except FileExistsError:
            return  # another process has made it
        except OSError as error:
            raise InputError(f"the budget file {self.path} can't be made: {error.strerror or error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, one process at a time; on return it is on the disk."""
        try:
            base = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
            try:
                base.execute("PRAGMA synchronous = EXTRA")
                base.execute("BEGIN IMMEDIATE")
                try:
                    self._key = _opened(base)
                    yield base
                    _seal(base, self._key)
                except BaseException:
                    base.execute("ROLLBACK")
                    raise
                base.execute("COMMIT")
            finally:
                base.close()
        except sqlite3.OperationalError as error:
            raise SordinoError(f"the budget file {self.path} can't be used: {error}") from error
        except (sqlite3.DatabaseError, _Bent) as error:
            raise InputError(
                f"{self.path} is no budget file, or was damaged or edited: {error}. Nothing was counted; use the "
                "newest copy that you have, and count what was run since"
            ) from error

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
                    f"{self.path} has a budget for these records already (ε = {up(known.limit.epsilon)}, δ = "
                    f"{up(known.limit.delta)}, {known.limit.relation}): give --replace to change it"
                )
            if known is not None and known.runs and known.limit.relation != relation:
                raise InputError(f"runs under {known.limit.relation} are counted there: its relation can't be changed")
            # the order may not follow from what was seen: with runs, it stays
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

        A run that is resumed keeps its reservation; one that was settled meanwhile is reserved again in full.

        Raises:
            InputError: the dataset has no budget, the relation differs, or all runs together would exceed it.
        """
        cost, folder, token = Cost.of_plan(plan), str(out.resolve()), _token(out)
        with self._transaction() as base:
            known = self._account(base, digest)
            if known is None:
                raise InputError(f"{self.path} has no budget for these records: set one with `sordino budget set`")
            limit = known.limit
            if plan.unit != "record":
                raise InputError(
                    f"the budget counts what protects a record, and this run protects a {plan.unit}: neither follows "
                    "from the other without loss, so they are not added; run it without --budget, and count it apart"
                )
            if plan.relation != limit.relation:
                raise InputError(
                    f"the budget counts under {limit.relation} and this run's guarantee is under {plan.relation}: "
                    "neither follows from the other without loss, so they are not added; use privacy.relation = "
                    f'"{limit.relation}", or keep a budget of its own for these runs'
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
                    f"{up(limit.delta)} is spent or reserved, and {up(total)} it would be with this run. It was not "
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
        """The run in `out` has ended: its reservation becomes what its ledger holds.

        Args:
            out: the run directory.
            token: what `reserve` returned, from the process that made the run.
            began: whether a ledger was opened. Where it was and is gone, the reservation stays for ever.

        Raises:
            SordinoError: the ledger was lost, exchanged, cut or rolled back; the reservation stays.
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
                cost = Cost.from_json(row[1])  # admitted as the only run: nothing is given back
            base.execute(
                "UPDATE runs SET state = 'settled', cost = ? WHERE token = ? AND folder = ? AND state = 'reserved'",
                (cost.to_json(), token, str(out.resolve())),
            )

    def settle_dead(self) -> tuple[list[str], list[str]]:
        """Settles the reservations of runs that are not at work any more: (settled, left as they are).

        Left is a run that is at work, and one whose directory or ledger is gone: it counts in full for ever.
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
        """The reservation was made for this dataset in this directory: a copied directory gets its own."""
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
    """Reserves before, settles after; where the run fails, too. Without a file nothing is counted."""
    if path is None:
        yield
        return
    budget = Budget(path)
    token = budget.reserve(budget.digest(recipe, data_dir), plan, out)
    with noted_ledgers() as opened:
        try:
            yield
        except BaseException:
            with suppress(SordinoError):  # the reservation stays, and why the run ended is what counts
                budget.settle(out, token, began=bool(opened))
            raise
        budget.settle(out, token, began=bool(opened))


def _token(out: Path) -> str | None:
    """Of the run in `out`; None where it has no ledger, for then nobody knows what it released before."""
    path = out / TOKEN
    if not path.exists() or not (out / "ledger.jsonl").exists():
        return None
    token = read_json(path, "the reservation of the run").get("reservation")
    return token if isinstance(token, str) else None


def content_digest(recipe: Recipe, data_dir: Path | None) -> bytes:
    """SHA-256 of a dataset's content: of its file, or of its rows in any order. Not keyed: never to be written down."""
    source = source_of(recipe.data)
    if source is not None:
        place = found(source.path, data_dir)
        paths = [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else [place]
        parts = sorted(_of_file(path) for path in paths)
    else:
        parts = sorted(_rows(data.read(recipe.data, data_dir).train))
    return hashlib.sha256(b"".join(parts)).digest()


def _of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error


def _rows(split: data.Split) -> Iterator[bytes]:
    inputs = split.inputs.contiguous().numpy().reshape(len(split), -1)
    for row, target in zip(inputs, split.targets.tolist(), strict=True):
        yield hashlib.sha256(row.tobytes() + str(target).encode()).digest()


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
