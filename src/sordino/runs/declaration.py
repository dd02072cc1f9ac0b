"""What only the owner of the data can say about a run, for the report, the card and a registry of deployments."""

from __future__ import annotations

from dataclasses import dataclass

from sordino.errors import InputError

SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
"""The sectors that OpenDP's registry lists."""
CURATORS = ("Government", "Industry", "Nonprofit")
"""The kinds of curators that OpenDP's registry lists."""


@dataclass(frozen=True)
class DeclarationSection:
    """Statements that only the owner of the data can make, for the report and the card; they do not affect training."""

    unit: str | None = None  # what one record is, and how many a person may have
    trust: str | None = None  # who runs the training and sees the records, and who gets the model
    tuning: str | None = None  # how settings were chosen, and its cost: "on public data", "20 trials, not accounted"
    public_sources: str | None = None  # public data and pre-trained weights that were used, and their overlap
    collection: str | None = None  # how the data were collected, and with which consent
    contact: str | None = None  # who answers questions about this run
    curator: str | None = None  # who publishes the model
    curator_type: str | None = None  # Government, Industry or Nonprofit (OpenDP's registry)
    intended_use: str | None = None  # what the model is for
    region: str | None = None  # the region that the data are about, or whose law applies
    sector: str | None = None  # Technology, Healthcare, Education, Government, Energy or Finance (OpenDP's registry)

    def __post_init__(self) -> None:
        for key, names in (("curator_type", CURATORS), ("sector", SECTORS)):
            value = getattr(self, key)
            if value is not None and value not in names:
                raise InputError(f"declaration.{key} = {value!r} is not in the registry's list: {', '.join(names)}")

    @property
    def given(self) -> bool:
        return self != type(self)()
