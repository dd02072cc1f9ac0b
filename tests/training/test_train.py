"""Training: any optimizer, resumable at any moment, and never saying less than was released."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import sordino
from small_recipes import small_toml
from sordino.cli import main
from sordino.errors import InputError, Refused
from sordino.plan import Plan
from sordino.release.ledger import read_ledger
from sordino.training import Settings, train, train_without_noise
from sordino.training.updates import Averaging

Records = tuple[Tensor, Tensor]


def plan_for(**changes: object) -> Plan:
    options: dict[str, object] = {
        "epsilon": 4.0,
        "delta": 1e-5,
        "records": 200,
        "expected_batch": 40,
        "steps": 30,
        "insecure_seed": 3,
    }
    return Plan.dpsgd(**options | changes)  # type: ignore[arg-type]


def accuracy(records: Records):  # type: ignore[no-untyped-def]
    return lambda model: {"test_accuracy": float((model(records[0]).argmax(1) == records[1]).float().mean())}


def test_it_learns_and_says_what_may_be_said(records: Records, linear: nn.Module) -> None:
    plan = plan_for()
    result = train(linear, nn.functional.cross_entropy, records, plan, lr=1.0, evaluate=accuracy(records))
    assert result.metrics[-1]["test_accuracy"] > 0.7
    assert result.guarantee == plan.guarantee()
    assert result.metrics[-1]["epsilon"] == pytest.approx(plan.guarantee().epsilon, rel=1e-3)
    assert result.metrics[-1]["epsilon"] <= 4.0
    assert result.not_private == {"dropped_records": 0}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_torch_optimizer_and_scheduler_serve(records: Records, optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    settings = Settings(scheduler=lambda o: StepLR(o, 10, 0.5), averaging=Averaging("ema", 0.8))
    result = train(
        model, nn.functional.cross_entropy, records, plan_for(), optimizer=optimizer, lr=0.2, settings=settings
    )
    assert result.metrics[-1]["lr"] == pytest.approx(0.2 * 0.5**3)
    assert all(p.isfinite().all() for p in model.parameters())


def test_dropped_records_are_counted_and_kept_apart_from_what_is_published(
    records: Records, linear: nn.Module, tmp_path: Path
) -> None:
    inputs = records[0].clone()
    inputs[3] = torch.inf
    plan = plan_for(expected_batch=200, steps=5)
    result = train(linear, nn.functional.cross_entropy, (inputs, records[1]), plan, lr=0.1, out=tmp_path)
    assert result.not_private["dropped_records"] == 5
    assert "dropped" not in (tmp_path / "metrics.jsonl").read_text() + (tmp_path / "ledger.jsonl").read_text()


def test_a_finished_directory_is_not_trained_into_again(records: Records, linear: nn.Module, tmp_path: Path) -> None:
    train(linear, nn.functional.cross_entropy, records, plan_for(), lr=1.0, out=tmp_path)
    with pytest.raises(InputError, match="already contains a run"):
        train(linear, nn.functional.cross_entropy, records, plan_for(), lr=1.0, out=tmp_path)


def test_resuming_under_another_plan_is_refused(records: Records, linear: nn.Module, tmp_path: Path) -> None:
    train(linear, nn.functional.cross_entropy, records, plan_for(), lr=1.0, out=tmp_path)
    with pytest.raises(InputError):
        train(linear, nn.functional.cross_entropy, records, plan_for(epsilon=8.0), lr=1.0, out=tmp_path, resume=True)


class Interrupted(BaseException):
    """Raised by an evaluation, to stop a run between two checkpoints as a kill does: nothing is saved on the way."""


def interrupted_run(records: Records, out: Path, plan: Plan, stop: int) -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        nonlocal stop
        stop -= 1
        if stop < 0:
            raise Interrupted
        return {}

    torch.manual_seed(0)
    settings = Settings(eval_every=1, checkpoint_every=10)
    with pytest.raises(Interrupted):
        train(
            nn.Linear(6, 3), nn.functional.cross_entropy, records, plan, lr=1.0, settings=settings, evaluate=evaluate,
            out=out,
        )  # fmt: skip


def resumed_run(records: Records, out: Path | None, plan: Plan) -> sordino.Result:
    torch.manual_seed(0)
    return train(
        nn.Linear(6, 3), nn.functional.cross_entropy, records, plan, lr=1.0, settings=Settings(checkpoint_every=10),
        out=out, resume=out is not None,
    )  # fmt: skip


def test_a_seeded_run_resumes_to_the_same_weights_bit_for_bit(records: Records, tmp_path: Path) -> None:
    interrupted_run(records, tmp_path, plan_for(), stop=17)
    result = resumed_run(records, tmp_path, plan_for())
    whole = resumed_run(records, None, plan_for())
    assert torch.equal(result.model.weight, whole.model.weight)  # type: ignore[arg-type]
    assert result.skipped_steps == 0
    _, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert [entry["step"] for entry in entries] == list(range(30))


def test_a_secure_run_never_draws_a_recorded_step_again(records: Records, tmp_path: Path) -> None:
    plan = plan_for(insecure_seed=None)
    interrupted_run(records, tmp_path, plan, stop=17)
    result = resumed_run(records, tmp_path, plan)
    assert result.skipped_steps == 8, "ten steps were saved, eighteen recorded"
    _, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert [entry["step"] for entry in entries] == list(range(30)), "as many releases as the plan has, each once"


def test_a_secure_partition_is_not_resumed_under_another_shuffle(records: Records, tmp_path: Path) -> None:
    plan = plan_for(insecure_seed=None, sampling="partition", epsilon=20.0)
    interrupted_run(records, tmp_path, plan, stop=17)
    with pytest.raises(Refused, match="shuffle"):
        resumed_run(records, tmp_path, plan)


def test_records_that_interact_stop_the_run_before_anything_is_released(records: Records, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(Refused, match="1"):
        train(model, nn.functional.cross_entropy, records, plan_for(), lr=1.0, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_paid_histogram_goes_through_the_door_once(records: Records, linear: nn.Module, tmp_path: Path) -> None:
    from sordino.training.histogram import norm_histogram

    plan = plan_for(statistics=(norm_histogram(5.0, 0.2),))
    result = train(linear, nn.functional.cross_entropy, records, plan, lr=1.0, out=tmp_path)
    assert result.histogram is not None
    assert sum(result.histogram.shares) == pytest.approx(1.0, abs=6 * result.histogram.noise_std * 8**0.5)
    purposes = [entry["purpose"] for entry in read_ledger(tmp_path / "ledger.jsonl")[1]]
    assert purposes.count("record-norms") == 1
    assert plan.guarantee().epsilon <= 4.0
    assert plan.noise.noise_multiplier > plan_for().noise.noise_multiplier, "the histogram is paid for with noise"


def test_without_noise_is_a_yardstick_with_no_guarantee(records: Records, linear: nn.Module) -> None:
    result = train_without_noise(
        linear, nn.functional.cross_entropy, records, plan_for(), lr=1.0, evaluate=accuracy(records)
    )
    assert result.guarantee is None
    assert result.metrics[-1]["test_accuracy"] > 0.8


def test_bad_settings_are_refused_before_anything_is_written(
    records: Records, linear: nn.Module, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for settings in ({"optimizer_options": {"momentun": 0.9}},):
        with pytest.raises(InputError, match="momentun"):
            train(
                linear, nn.functional.cross_entropy, records, plan_for(), lr=1.0, settings=Settings(**settings), out=out
            )
    with pytest.raises(InputError, match="resume needs"):
        train(linear, nn.functional.cross_entropy, records, plan_for(), lr=1.0, resume=True)
    with pytest.raises(InputError, match="chunk"):
        Settings(chunk=0)
    linear.requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        train(linear, nn.functional.cross_entropy, records, plan_for(), lr=1.0, out=out)
    assert not out.exists()


RECIPE = small_toml(
    run={"name": "kill"},
    privacy={"insecure_seed": 5},
    sampling={"expected_batch": 100},
    train={"steps": 30, "momentum": 0.9, "average": "ema", "eval_every": 10, "checkpoint_every": 7},
)


def _train_until_killed(command: list[str], calls: int) -> None:
    """A child process that is killed in the middle of its next write once it has written or synced so many times."""
    write, sync, left = os.write, os.fsync, itertools.count(calls, -1)

    def written(file: int, content: bytes) -> int:
        if next(left) <= 0:
            write(file, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, content)

    def synced(file: int) -> None:
        next(left)
        sync(file)

    os.write, os.fsync = written, synced
    main(command)


def test_killed_at_any_moment_and_resumed_a_run_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert main(["train", str(recipe), "--json", "--out", str(tmp_path / "whole")]) == 0
    killed = tmp_path / "killed"
    for calls in (4, 23, 31):
        command = ["train", str(recipe), "--json", "--out", str(killed), "--resume"]
        process = multiprocessing.get_context("fork").Process(target=_train_until_killed, args=(command, calls))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert main(["train", str(recipe), "--json", "--out", str(killed), "--resume"]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed")]
    assert results[0]["epsilon"] == results[1]["epsilon"]
    assert results[0]["test_accuracy"] == results[1]["test_accuracy"]
    _, entries = read_ledger(killed / "ledger.jsonl")
    assert [entry["step"] for entry in entries] == list(range(30))


class Flaky(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Records that are read one by one, of which one can't be read for a while."""

    def __init__(self, records: Records) -> None:
        self.records, self.broken, self.reads = records, False, 0

    def __len__(self) -> int:
        return len(self.records[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        if self.broken and self.reads > 800:
            raise OSError("the disk does not answer")
        return self.records[0][index], self.records[1][index]


def test_a_dataset_that_fails_in_a_step_loses_none_of_the_steps_before(records: Records, tmp_path: Path) -> None:
    plan, settings = plan_for(expected_batch=100, steps=10), Settings(progress=False)
    torch.manual_seed(0)
    whole = nn.Linear(records[0].shape[1], 3)
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    train(whole, nn.functional.cross_entropy, Flaky(records), plan, lr=0.5, settings=settings)
    failing, again = Flaky(records), nn.Linear(records[0].shape[1], 3)
    failing.broken = True
    again.load_state_dict(start)
    with pytest.raises(OSError, match="does not answer"):
        train(again, nn.functional.cross_entropy, failing, plan, lr=0.5, settings=settings, out=tmp_path)
    saved = sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*"))
    assert saved
    made = len((tmp_path / "ledger.jsonl").read_text().splitlines()) - 1
    assert saved[-1] == f"step-{made:09d}.safetensors"
    failing.broken = False
    again.load_state_dict(start)
    train(again, nn.functional.cross_entropy, failing, plan, lr=0.5, settings=settings, out=tmp_path, resume=True)
    assert torch.equal(again.weight, whole.weight)


def test_a_metric_can_not_take_the_name_of_what_the_run_logs(
    records: Records, linear: nn.Module, tmp_path: Path
) -> None:
    """`epsilon` from evaluate replaced the ε of every row, and `verify` called the run not genuine."""
    for name in ("epsilon", "step", "lr", "seconds"):
        with pytest.raises(InputError, match=f"evaluate returns {name}, which the run itself logs"):
            train(
                linear, nn.functional.cross_entropy, records, plan_for(), lr=1.0,
                settings=Settings(eval_every=5), evaluate=lambda model, name=name: {name: 0.5}, out=tmp_path / name,
            )  # fmt: skip


class FrozenNorm(nn.Module):
    """A layer in evaluation mode inside a model in training mode, as a frozen backbone has it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(features).eval(), nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))  # type: ignore[no-any-return]


def test_an_evaluation_leaves_every_layer_in_its_own_mode(records: Records) -> None:
    """All layers were put in training mode, so a run with a frozen BatchNorm was refused after an evaluation."""
    model, settings = FrozenNorm(records[0].shape[1]), Settings(progress=False, eval_every=1)
    train(
        model, nn.functional.cross_entropy, records, plan_for(steps=2), lr=0.1, settings=settings,
        evaluate=lambda _: {"one": 1.0},
    )  # fmt: skip
    assert model.training
    assert not model.norm.training


class Noting(nn.Module):
    """Writes a record to a buffer, where nobody sees it, and fails."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.out, self.failing = nn.Linear(features, 3), [False]
        self.register_buffer("note", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.failing[0]:
            self.note.numpy()[:] = x[0].numpy()
            raise ValueError("it fails")
        return self.out(x)  # type: ignore[no-any-return]


def test_a_model_that_fails_in_a_step_leaves_no_record_in_the_checkpoint(records: Records, tmp_path: Path) -> None:
    """The state is saved when the user's code fails; it had the record that the model had written before."""
    model, settings = Noting(records[0].shape[1]), Settings(progress=False, eval_every=1)
    with pytest.raises(Refused, match="note"):
        train(
            model, nn.functional.cross_entropy, records, plan_for(steps=4), lr=0.1, settings=settings, out=tmp_path,
            evaluate=lambda _: {"one": 1.0}, callbacks=[lambda row: model.failing.__setitem__(0, row["step"] == 2)],
        )  # fmt: skip
    saved = [load_file(path)["model/note"] for path in (tmp_path / "checkpoint").glob("step-*")]
    assert not any(bool(note.any()) for note in saved)
