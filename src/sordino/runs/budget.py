"""A budget for the data's life: what all runs on a dataset have spent together, in one SQLite file.

    sordino budget set FILE RECIPE.toml --epsilon 3 --delta 1e-5
    sordino train RECIPE.toml --budget FILE

**What is kept.** For each run, the releases that its plan allows (a *reservation*, made before the first of them) or,
once it has ended, those that its ledger holds (*settled*). A run that was killed keeps its reservation until it is
settled from its ledger. So at every moment the file says no less than was released.

**How runs are composed.** Formal guarantee: let runs M_1, …, M_k on the same records be chosen adaptively. If those
that compose release mechanisms with dominating pairs P_i, and the others are (ε_j, δ_j)-differentially private, then
seeing all of them is (ε, δ)-differentially private with δ_s = δ − Σ δ_j and ε = ε_P(δ_s) + Σ ε_j, where ε_P is the
privacy loss of the composed pairs (Zhu, Dong & Wang 2022, Thm 27; basic composition for the others, Dwork & Roth 2014,
Thm 3.16). All runs have one relation: (ε, δ) under replace-one says nothing under add-remove, so a run under another
relation than the budget's does not start.

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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sordino import checks, data
from sordino.accounting.account import checked_releases, composed_epsilon
from sordino.accounting.events import Release
from sordino.accounting.spent import entry_releases
from sordino.data.own import found
from sordino.data.sources import source_of
from sordino.errors import InputError, SordinoError
from sordino.files import json_bytes, locked, read_json, write_atomically
from sordino.plan.core import Plan
from sordino.plan.method import Method
from sordino.plan.spent import from_ledger
from sordino.registry import method_class
from sordino.release.ledger import read_ledger
from sordino.runs.recipe import Recipe
from sordino.shown import up

VERSION = 1
WAIT = 120.0  # seconds for other runs that add up their cost
TOKEN = "budget.json"  # in the run directory: which reservation the run has
_TABLES = """
CREATE TABLE about (version INTEGER NOT NULL, key BLOB NOT NULL);
CREATE TABLE datasets (
    digest TEXT PRIMARY KEY, name TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL, relation TEXT NOT NULL
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
        known = json.loads(text)
        releases = tuple((Release(**values), int(count)) for values, count in known["releases"])
        return cls(releases, known["epsilon"], known["delta"])


def together(costs: Sequence[Cost], delta: float, relation: str) -> float:
    """ε at δ of all of these runs, an upper bound; infinite where their own δ leave nothing of it."""
    left = delta - math.fsum(cost.delta for cost in costs) * (1 + 1e-12)
    apart = math.fsum(cost.epsilon for cost in costs) * (1 + 1e-12)
    if left <= 0:
        return math.inf
    releases = [one for cost in costs for one in cost.releases]
    if not releases:
        return apart
    return composed_epsilon(checked_releases(releases), left, relation, "pld")[0] + apart


@dataclass(frozen=True)
class Account:
    """One dataset of a budget file: its limit and what its runs cost."""

    digest: str
    name: str
    epsilon: float
    delta: float
    relation: str
    runs: tuple[tuple[str, str, Cost], ...]  # folder, state, cost

    @property
    def spent(self) -> float:
        """ε at the account's δ of all runs, reserved ones in full."""
        return together([cost for _, _, cost in self.runs], self.delta, self.relation)

    def to_dict(self) -> dict[str, Any]:
        spent = self.spent
        return {
            "dataset": self.digest,
            "name": self.name,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "relation": self.relation,
            "spent": spent,
            "runs": [
                {"folder": folder, "state": state, "epsilon": together([cost], self.delta, self.relation)}
                for folder, state, cost in self.runs
            ],
        }


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
        with self._transaction() as base:
            version, key = base.execute("SELECT version, key FROM about").fetchone() or (None, b"")
        if version != VERSION:
            raise InputError(f"{path} is no budget file of this version of sordino")
        self._key: bytes = key

    def _create(self) -> None:
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return  # another process makes it
        except OSError as error:
            raise InputError(f"the budget file {self.path} can't be made: {error.strerror or error}") from error
        with self._transaction() as base:
            for statement in _TABLES.split(";"):
                base.execute(statement)
            base.execute("INSERT INTO about VALUES (?, ?)", (VERSION, secrets.token_bytes(32)))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, one process at a time; on return it is on the disk."""
        try:
            base = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
            try:
                base.execute("PRAGMA synchronous = EXTRA")
                base.execute("BEGIN IMMEDIATE")
                try:
                    yield base
                except BaseException:
                    base.execute("ROLLBACK")
                    raise
                base.execute("COMMIT")
            finally:
                base.close()
        except sqlite3.OperationalError as error:
            raise SordinoError(f"the budget file {self.path} can't be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise InputError(f"{self.path} is no budget file, or is damaged: {error}") from error

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
                    f"{self.path} has a budget for these records already (ε = {up(known.epsilon)}, δ = "
                    f"{up(known.delta)}, {known.relation}): give --replace to change it"
                )
            if known is not None and known.runs and known.relation != relation:
                raise InputError(f"runs under {known.relation} are counted there: its relation can't be changed")
            base.execute(
                "INSERT INTO datasets VALUES (?, ?, ?, ?, ?) ON CONFLICT (digest) DO UPDATE SET name = excluded.name, "
                "epsilon = excluded.epsilon, delta = excluded.delta, relation = excluded.relation",
                (digest, name, epsilon, delta, relation),
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
            if plan.relation != known.relation:
                raise InputError(
                    f"the budget counts under {known.relation} and this run's guarantee is under {plan.relation}: "
                    "neither follows from the other without loss, so they are not added; use privacy.relation = "
                    f'"{known.relation}", or keep a budget of its own for these runs'
                )
            others = [
                Cost.from_json(text)
                for other, text in base.execute("SELECT token, cost FROM runs WHERE digest = ?", (digest,))
                if other != token or not self._is_of(base, token, digest, folder)
            ]
            total = together([*others, cost], known.delta, known.relation)
            if not total <= known.epsilon:
                spent = together(others, known.delta, known.relation)
                raise InputError(
                    f"this run would exceed the budget of its records: ε = {up(spent)} of {up(known.epsilon)} at δ = "
                    f"{up(known.delta)} is spent or reserved, and {up(total)} it would be with this run. It was not "
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

    def settle(self, out: Path, token: str | None = None) -> None:
        """The run in `out` has ended: its reservation becomes what its ledger holds.

        Args:
            out: the run directory.
            token: what `reserve` returned, from the process that made the run: without a ledger it released nothing.
        """
        token, ledger = token or _token(out), out / "ledger.jsonl"
        if token is None:
            return
        cost = Cost.of_ledger(ledger) if ledger.exists() else Cost()
        with self._transaction() as base:
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
        row = base.execute("SELECT name, epsilon, delta, relation FROM datasets WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return None
        runs = base.execute("SELECT folder, state, cost FROM runs WHERE digest = ? ORDER BY rowid", (digest,))
        costs = tuple((folder, state, Cost.from_json(text)) for folder, state, text in runs)
        name, epsilon, delta, relation = row
        return Account(digest, name, epsilon, delta, relation, costs)


@contextmanager
def charged(path: Path | None, recipe: Recipe, plan: Plan, out: Path, data_dir: Path | None) -> Iterator[None]:
    """Reserves before, settles after; where the run fails, too. Without a file nothing is counted."""
    if path is None:
        yield
        return
    budget = Budget(path)
    token = budget.reserve(budget.digest(recipe, data_dir), plan, out)
    try:
        yield
    finally:
        budget.settle(out, token)


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
