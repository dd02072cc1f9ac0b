"""What each sampling scheme releases about one record, with the theorem for it.

Sampling that is not Poisson is never accounted as Poisson:

    sampler              relation                 one step costs
    poisson              add-remove, replace-one  the subsampled pair
    truncated-poisson    add-remove, replace-one  a mixture: within the cap, over the cap
    partition            replace-one              the unsampled mechanism, once per epoch (no amplification)
    without-replacement  replace-one              the subset-sampled pair
    allocation           add-remove               an epoch: the mixture over its batches
    cyclic               add-remove, replace-one  the subsampled pair, once for each round through the groups
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sordino import checks
from sordino.accounting.events import Release, allocated, grouped
from sordino.errors import InputError, Refused

SAMPLERS = checks.SAMPLERS
MECHANISMS = ("gaussian", "laplace")


def default_relation(sampler: str) -> str:
    """Add/remove where the sampler supports it, else replace-one."""
    checks.choice("sampling", sampler, SAMPLERS)
    return "add-remove" if sampler in ("poisson", "truncated-poisson", "allocation", "cyclic") else "replace-one"


def check_scheme(sampler: str, mechanism: str, relation: str) -> None:
    """Refuses combinations that no theorem covers.

    Args:
        sampler: The name of the sampler.
        mechanism: "gaussian" or "laplace".
        relation: "add-remove" or "replace-one".

    Raises:
        InputError: a name is unknown.
        Refused: no theorem covers the combination.
    """
    checks.choice("sampling", sampler, SAMPLERS)
    checks.choice("mechanism", mechanism, MECHANISMS)
    checks.choice("relation", relation, checks.RELATIONS)
    if sampler == "partition" and relation == "add-remove":
        raise Refused(
            "partition has no add-remove guarantee: adding or removing one record moves other records to other "
            "batches, so every batch may change; use relation='replace-one', or sampling='allocation' (each record "
            "once per epoch, in an independently drawn batch), which has an amplified add-remove guarantee"
        )
    if sampler == "without-replacement" and relation == "add-remove":
        raise Refused(
            "without-replacement has no add-remove guarantee here: a batch is a fixed number of records out of a "
            "public number of records; use relation='replace-one', or sampling='poisson'"
        )
    if sampler == "allocation" and relation == "replace-one":
        raise Refused(
            "random allocation has no replace-one guarantee here: only for Poisson sampling is it proven that opposite "
            "gradients are the worst case; use relation='add-remove', or sampling='poisson'"
        )
    if sampler == "allocation" and mechanism == "laplace":
        raise Refused("random allocation is accounted for Gaussian noise only; use l2 clipping, or sampling='poisson'")
    if mechanism == "laplace" and sampler in ("truncated-poisson", "without-replacement"):
        raise Refused(f"Laplace noise has no accountant for {sampler} sampling; use poisson or partition")
    if mechanism == "laplace" and sampler in ("poisson", "cyclic") and relation == "replace-one":
        raise Refused("Laplace noise with Poisson sampling has no replace-one accountant; use relation='add-remove'")


def step_release(sampling: Mapping[str, Any], mechanism: str, noise_multiplier: float, records: int) -> Release:
    """The release of one step, to an adversary who sees it. `sampling` is the sampler's to_dict().

    The steps of random allocation depend on each other within an epoch: `releases_of` accounts for them.
    """
    name = checks.choice("sampling", sampling.get("name"), SAMPLERS)
    if name == "allocation":
        raise InputError("a step of random allocation has no separate cost: it is accounted as a part of its epoch")
    if sampling.get("examples_per_user") is not None:
        if name != "poisson" or mechanism != "gaussian":
            raise Refused("rows of users are accounted for Poisson sampling with Gaussian noise only")
        return grouped(noise_multiplier, _rate(sampling), checks.count("rows", sampling["examples_per_user"]))
    if name in ("poisson", "cyclic"):
        return Release(mechanism, noise_multiplier, _rate(sampling))
    if name == "truncated-poisson":
        cap = checks.count("cap", sampling.get("cap"))
        return Release(mechanism, noise_multiplier, _rate(sampling), records=records, cap=cap)
    batch = _batch(sampling, records)
    if name == "partition" or batch == records:  # a batch of all records is not sampled
        return Release(mechanism, noise_multiplier)
    return Release(mechanism, noise_multiplier, batch / records, records=records, batch=batch)


def releases_of(
    sampling: Mapping[str, Any], mechanism: str, noise_multiplier: float, records: int, steps: int
) -> list[tuple[Release, int]]:
    """Everything that `steps` steps release about one record.

    With a partition each record is in at most one batch of every epoch, and given the earlier releases the batches
    without it do not depend on it, so the releases that do are ⌈steps / batches per epoch⌉ Gaussians. With random
    allocation these are complete epochs and possibly a part of the last one. With cyclic sampling a record takes part
    only in the steps of its group, which is drawn independently of all other records: ⌈steps / groups⌉ steps.
    """
    if sampling["name"] == "allocation":
        check_scheme("allocation", mechanism, "add-remove")
        return allocation_releases(checks.count("batches", sampling.get("batches")), noise_multiplier, steps)
    release = step_release(sampling, mechanism, noise_multiplier, records)
    if sampling["name"] == "partition":
        steps = math.ceil(steps / (records // _batch(sampling, records)))
    if sampling["name"] == "cyclic":
        steps = math.ceil(steps / checks.count("batches", sampling.get("batches")))
    return [(release, steps)]


def allocation_releases(batches: int, noise_multiplier: float, steps: int) -> list[tuple[Release, int]]:
    """The epochs of random allocation: the complete ones, and the partial last one."""
    epochs, rest = divmod(steps, batches)
    whole = [(allocated(noise_multiplier, batches, batches), epochs)] if epochs else []
    return whole + ([(allocated(noise_multiplier, batches, rest), 1)] if rest else [])


def theorem(sampler: str, mechanism: str, relation: str, accountant: str, examples_per_user: int | None = None) -> str:
    """The sentence in a guarantee that states what is composed, and by which theorem."""
    noise = "Gaussian" if mechanism == "gaussian" else "Laplace"
    pairs = {
        "poisson": f"Poisson-subsampled {noise} mechanism",
        "truncated-poisson": f"truncated Poisson-subsampled {noise} mechanism (mixture over the cap, "
        "docs/guarantees/samplers.md)",
        "partition": f"{noise} mechanism, one release per epoch and record (parallel composition over the fixed "
        "partition; no amplification)",
        "without-replacement": f"{noise} mechanism on uniform subsets",
        "cyclic": f"{noise} mechanism, one Poisson draw for each round through groups that are fixed for the run",
        "allocation": "Gaussian mechanism with random allocation, each record in one uniformly drawn batch of every "
        "epoch; an epoch's pair is bounded in the convex order",
    }
    sources = {
        ("allocation", "add-remove"): "Chua et al. 2024; docs/guarantees/allocation.md",
        ("poisson", "add-remove"): "Zhu, Dong & Wang 2022, Thm 11",
        ("poisson", "replace-one"): "Lebeda et al. 2024, substitution",
        ("without-replacement", "replace-one"): "Zhu, Dong & Wang 2022, Thm 11"
        if accountant != "rdp"
        else "Wang, Balle & Kasiviswanathan 2019, Thm 27",
    }
    if sampler == "poisson" and accountant == "rdp":
        sources["poisson", "add-remove"] = "Mironov, Talwar & Zhang 2019"
    composition = {
        "pld": "composed as privacy loss distributions (Connect-the-Dots, Doroshenko et al. 2022; an upper bound)",
        "rdp": "composed in Rényi divergence, tight conversion (Canonne, Kamath & Steinke 2020, Prop. 12)",
        "gaussian": "composed in closed form (Balle & Wang 2018, Thm 8)",
    }[accountant]
    if examples_per_user is not None:
        return (
            f"a user has at most {examples_per_user} rows, each drawn separately: the mixture of Gaussians over the "
            f"number of rows drawn (Charles et al. 2024, arXiv 2407.07737), {composition}"
        )
    source = sources.get((sampler, relation))
    return f"{pairs[sampler]}{f' ({source})' if source else ''}, {composition}"


def _rate(sampling: Mapping[str, Any]) -> float:
    return checks.probability("sampling_rate", sampling.get("sampling_rate"), allow_one=True)


def _batch(sampling: Mapping[str, Any], records: int) -> int:
    batch = checks.count("batch", sampling.get("batch"))
    if batch > records:
        raise InputError(f"a batch of {batch} can't be drawn from {records} records")
    return batch
