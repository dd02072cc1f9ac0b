"""The ledger as a table: consecutive releases that differ only in the step form one row, with their number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sordino.report import numbers

_LIKE = (
    "purpose", "mechanism", "noise_multiplier", "sensitivity", "norm", "sampling", "relation", "secure",
    "coordinates",
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Releases of consecutive steps that differ only in the step."""

    entry: Mapping[str, Any]
    first: int
    last: int
    count: int

    @property
    def steps(self) -> str:
        return numbers.plain(self.first) if self.count == 1 else (
            f"{numbers.plain(self.first)}–{numbers.plain(self.last)}"
        )  # fmt: skip

    @property
    def noise(self) -> str:
        """ "Gaussian, 1.1 × sensitivity": the recorded noise multiplier times the sensitivity."""
        name = str(self.entry.get("mechanism", "unknown")).capitalize()
        return f"{name}, {numbers.plain(self.entry.get('noise_multiplier'))} × sensitivity"

    @property
    def sampling(self) -> str:
        """ "poisson, q = 0.01", from the recorded sampler."""
        sampling = self.entry.get("sampling")
        if not isinstance(sampling, Mapping):
            return str(sampling or "none: all records")
        fields = {"sampling_rate": "q", "batch": "batch", "cap": "cap"}
        known = [f"{fields[k]} = {numbers.plain(v)}" for k, v in sampling.items() if k in fields]
        other = [f"{k} = {v}" for k, v in sampling.items() if k not in fields and k != "name"]
        return ", ".join([str(sampling.get("name", "unknown")), *known, *other])

    @property
    def bound(self) -> str:
        """ "0.1 in l2": the sensitivity and its norm."""
        return f"{numbers.plain(self.entry.get('sensitivity'))} in {self.entry.get('norm', '?')}"


def group_releases(entries: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Groups in the order of the ledger. A gap in the steps, or any difference, starts a new one."""
    groups: list[Group] = []
    for entry in entries:
        if entry.get("kind", "release") != "release":
            continue
        step = int(entry.get("step", 0))
        last = groups[-1] if groups else None
        if last is not None and step == last.last + 1 and all(entry.get(k) == last.entry.get(k) for k in _LIKE):
            groups[-1] = replace(last, last=step, count=last.count + 1)
        else:
            groups.append(Group(entry, step, step, 1))
    return groups
