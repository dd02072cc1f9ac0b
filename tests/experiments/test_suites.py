"""The suites of experiments/: every recipe is read with its overrides, and Opacus and a ceiling stand beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from sordino.runs.compare_suite import Suite

SUITES = sorted((Path(__file__).parents[2] / "experiments" / "suites").glob("*.toml"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_has_opacus_a_ceiling_and_recipes_that_read(path: Path) -> None:
    suite = Suite.read(path)
    assert {"private", "opacus", "plain"} <= {one.kind for one in suite.methods}
    assert path.stem == "mini" or {0.5, 1.0, 2.0, 3.0, 8.0} <= set(suite.epsilons)
    assert len(suite.seeds) == 3
    first = [job for job in suite.jobs() if job.seed == 0]
    for job in first:
        recipe = job.recipe()
        epsilon = 1.0 if job.method.kind == "plain" else job.epsilon  # without privacy: whatever ε is
        assert (recipe.privacy.epsilon, recipe.privacy.delta) == (epsilon, 1e-5)
        assert recipe.privacy.relation == "add-remove"
    assert len({job.folder for job in suite.jobs()}) == len(suite.jobs())
    assert all(one.assumes for one in suite.methods)
