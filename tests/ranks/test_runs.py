"""A run of several ranks: the same weights and ledger as of one process; what ends it loses nothing that was paid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_ranks
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from small_recipes import small_toml
from sordino import ranks
from sordino.cli import main
from sordino.errors import InputError, Refused, SordinoError
from sordino.plan import Plan
from sordino.release.ledger import Ledger
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.training import Settings, train

STEPS = 5


def _train(out: Path, steps: int = STEPS, resume: bool = False, **changes: Any) -> bytes:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(90, 6, generator=generator), torch.randint(3, (90,), generator=generator)
    given: dict[str, Any] = {"noise_multiplier": 1.0, "expected_batch": 40, "insecure_seed": 4, "records": 90}
    plan = Plan.dpsgd(delta=1e-5, steps=STEPS, clip_norm=1.0, **(given | changes))
    settings = Settings(chunk=8, checkpoint_every=1, progress=False)
    result = train(net, cross_entropy, (x, y), plan, lr=0.3, settings=settings, out=out, resume=resume)
    assert result.guarantee is not None
    assert result.metrics[-1]["step"] == STEPS
    return b"".join(p.detach().numpy().tobytes() for p in result.model.parameters())


def _entries(out: Path) -> list[Any]:
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    kept = ("kind", "purpose", "step", "noise_multiplier", "sensitivity", "source", "coordinates")
    return [[line.get(key) for key in kept] for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    out = tmp_path_factory.mktemp("alone") / "run"
    torch.set_num_threads(1)
    return _train(out), _entries(out)


def _rank_train(number: int, out: Path, resume: bool) -> bytes:
    return _train(out, resume=resume)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_ends_with_the_weights_of_a_run_alone(size: int, alone: Any, tmp_path: Path) -> None:
    assert in_ranks(size, tmp_path, _rank_train, tmp_path / "run", False) == [alone[0]] * size
    assert _entries(tmp_path / "run") == alone[1]


def _dies(number: int, out: Path, who: int, at: int) -> bytes:
    """Rank `who` is killed while the sum of step `at` is made."""
    from sordino.ranks import sums

    whole = sums.own_chunks

    def own(inner: Any, rank: Any, batch: Any, *more: Any) -> Any:
        if rank.number == who and batch.step == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(inner, rank, batch, *more)

    sums.own_chunks = own
    return _train(out)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_ends_the_others_and_the_run_goes_on_with_any_number(
    who: int, alone: Any, tmp_path: Path
) -> None:
    found = in_ranks(2, tmp_path, _dies, tmp_path / "run", who, 2)
    assert found[who] is None
    assert isinstance(found[1 - who], ranks.Lost)
    assert "--resume" in str(found[1 - who])
    assert len(_entries(tmp_path / "run")) == 3  # the header and two steps: nothing of the third was released
    resumed = (
        in_ranks(3, tmp_path, _rank_train, tmp_path / "run", True) if who else [_train(tmp_path / "run", resume=True)]
    )
    assert set(resumed) == {alone[0]}
    assert _entries(tmp_path / "run") == alone[1]


def _refused(number: int, out: Path) -> bytes:
    return _train(out, records=300)


def test_wrong_input_ends_every_rank_with_its_error(tmp_path: Path) -> None:
    found = in_ranks(2, tmp_path, _refused, tmp_path / "run")
    assert all(isinstance(one, InputError) for one in found)
    assert not (tmp_path / "run").exists()


def _leader_fails(number: int, out: Path) -> bytes:
    if number == 0:
        out.mkdir()
        (out / "ledger.jsonl").write_text("no ledger\n")
    return _train(out)


def test_what_only_the_leader_finds_wrong_ends_the_followers_as_well(tmp_path: Path) -> None:
    led, followed = in_ranks(2, tmp_path, _leader_fails, tmp_path / "run")
    assert isinstance(led, Exception)
    assert isinstance(followed, Exception)
    assert "leader" in str(followed)
    assert not isinstance(followed, ranks.Lost)


def test_a_directory_that_another_job_uses_is_refused_at_every_rank(tmp_path: Path) -> None:
    plan = Plan.dpsgd(
        delta=1e-5, steps=STEPS, clip_norm=1.0, noise_multiplier=1.0, expected_batch=40, insecure_seed=4, records=90
    )
    (tmp_path / "run").mkdir()
    with Ledger.open(tmp_path / "run" / "ledger.jsonl", plan.to_dict()):
        led, followed = in_ranks(2, tmp_path, _rank_train, tmp_path / "run", False)
    assert isinstance(led, SordinoError)
    assert "in use by another run" in str(led)
    assert isinstance(followed, SordinoError)


def _momenta(number: int) -> bytes:
    from sordino.plan.contribution import RecordMomentum

    return _train(None, record_momentum=RecordMomentum(kept=0.5), expected_batch=90)  # type: ignore[arg-type]


def test_a_sum_that_can_not_be_divided_is_refused_at_every_rank(tmp_path: Path) -> None:
    found = in_ranks(2, tmp_path, _momenta)
    assert isinstance(found[0], Refused)
    assert "without torchrun" in str(found[0])
    assert isinstance(found[1], Exception)


def test_torchrun_makes_the_run_of_one_process(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(small_toml(train={"chunk": 8}))
    train_it = ["train", str(recipe), "--json", "--out"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sordino"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [*run, *train_it, str(tmp_path / "two")], env=environment, capture_output=True, text=True, timeout=240
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["steps"] == 3  # one rank prints
    assert main([*train_it, str(tmp_path / "one")]) == 0
    one, two = tmp_path / "one", tmp_path / "two"
    assert _weights(one) == _weights(two)
    assert _entries(one) == _entries(two)
    assert in_ranks(2, tmp_path, _resumed, recipe, two) == [3, None]  # a finished run: no rank waits for it


def _cli(number: int, recipe: Path, out: Path, options: list[str]) -> int:
    return main(["train", str(recipe), "--out", str(out), "--json", *options])


@pytest.mark.parametrize("options", [[], ["--shard"]], ids=["chunks", "shards"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_command_writes_the_model_of_one_process(
    size: int, options: list[str], command_alone: Path, tmp_path: Path
) -> None:
    codes = in_ranks(size, tmp_path, _cli, command_alone.parent / "r.toml", tmp_path / "run", options)
    assert codes == [0] * size
    assert _weights(tmp_path / "run") == _weights(command_alone)
    assert _entries(tmp_path / "run") == _entries(command_alone)


def _weights(out: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in load_file(out / "model.safetensors").items()}


@pytest.fixture(scope="module")
def command_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch.distributed.fsdp

    folder = tmp_path_factory.mktemp("command")
    (folder / "r.toml").write_text(small_toml(train={"chunk": 8}))
    torch.set_num_threads(1)
    assert _cli(0, folder / "r.toml", folder / "alone", []) == 0
    return folder / "alone"


def _resumed(number: int, recipe: Path, out: Path) -> Any:
    return run_recipe(Recipe.read(recipe), out, resume=True).get("steps")
