"""The points of old_breaks.py: each shows one fault on the package of that day, which is the one that is imported.

    python old_points.py                 the names
    python old_points.py NAME FOLDER     tries one, in FOLDER; prints {"shown": …, "seen": …}

Its interface of that day is looked up by name (`old`), for today's package has other modules.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import importlib
import inspect
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Seen = tuple[bool, str]
POINTS: dict[str, Callable[[Path], Seen]] = {}
SMALL = """
[data]
name = "fashion-mnist-mini"
[model]
name = "linear"
[privacy]
noise_multiplier = 1.0
delta = 1e-5
[sampling]
expected_batch = 40
[train]
steps = 3
lr = 0.5
"""


def point(name: str) -> Callable[[Callable[[Path], Seen]], Callable[[Path], Seen]]:
    def add(function: Callable[[Path], Seen]) -> Callable[[Path], Seen]:
        POINTS[name] = function
        return function

    return add


def old(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"sordino.{module}" if module else "sordino"), name)


def records(count: int = 200) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    return torch.randn(count, 5), torch.randint(0, 2, (count,))


def plan_of(**changes: Any) -> Any:
    options = {"noise_multiplier": 20.0, "delta": 1e-5, "records": 200, "expected_batch": 200, "steps": 5, **changes}
    return old("", "Plan").dpsgd(**options)


def trained(plan: Any, out: Path | None, **options: Any) -> Any:
    from torch import nn

    given: dict[str, Any] = {"lr": 0.1, **options}
    return old("", "train")(nn.Linear(5, 2), nn.functional.cross_entropy, records(), plan, out=out, **given)


def of_ledger(path: Path) -> float:
    header, entries = old("ledger", "read_ledger")(path)
    return float(old("accounting.spent", "from_ledger")(header, entries, 1e-5)["epsilon"])


def command(*words: str, **options: Any) -> Any:
    """The command line of that day, in a process of its own."""
    code = "import sys; from sordino.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, **options)


def traceback(done: Any) -> bool:
    return "Traceback (most recent call last)" in done.stderr


def recipe_file(folder: Path, text: str = SMALL) -> str:
    path = folder / "small.toml"
    path.write_text(text, encoding="utf8")
    return str(path)


@point("1 truncated Poisson below a certified bound")
def truncated(folder: Path) -> Seen:
    from scipy.stats import binom

    printed = old("accounting.dpsgd", "account_dpsgd")(
        2.0, 100, 1e-5, sampling="truncated-poisson", sampling_rate=1.0, records=1000, cap=100
    )["epsilon"]
    lower = {}
    for size in (1000, 900):
        over = binom.sf(99, size - 1, 1.0)
        release = old("accounting.events", "Release")("gaussian", 1.0, binom.sf(100, size, 1.0) * 100 / size / over)
        composed = old("accounting.events", "compose_events")([(release, 100)])
        lower[size] = old("accounting", "account")(composed, 1e-5, "add-remove").epsilon_lower
    text = f"ε printed {printed:.4f}; certified {lower[1000]:.4f}, and {lower[900]:.4f} with 10 % fewer records"
    return printed < min(lower.values()), text


@point("2 a row of 1e-200 under the hidden state")
def tiny_hidden(folder: Path) -> Seen:
    import torch

    made = old("methods.hidden_state", "plan")(
        loss=old("hidden.losses", "Softmax")(3), features=4, records=100, batch=100, sampling="full", delta=1e-5,
        regularisation=0.1, epsilon=1.0, steps=20, unit=True,
    )  # fmt: skip
    torch.manual_seed(0)
    inputs, targets = torch.randn(100, 4, dtype=torch.float64), torch.randint(0, 3, (100,))
    batch = old("sampling", "LogicalBatch")(0, torch.arange(100), 4096)
    sums = []
    for last in (None, 1e-200):
        rows = inputs.clone()
        rows[-1] = inputs[-1] if last is None else last
        kept = old("hidden.training", "Records").of((rows, targets), made.method)
        zeros = torch.zeros(3, 5, dtype=torch.float64)
        sums.append(old("hidden.training", "gradient_sum")(made.method.loss, kept, zeros, batch))
    moved, bound = float((sums[0] - sums[1]).norm()), made.method.certificate.sensitivity
    return moved > 2 * bound, f"the sum moved by {moved:.1e}, the certified sensitivity is {bound:.1f}"


@point("2 a row of 1e-300 in DP-PCA")
def tiny_pca(folder: Path) -> Seen:
    import torch

    norm = float(old("features.pca", "unit_rows")(torch.full((1, 4), 1e-300, dtype=torch.float64), None).norm())
    return norm > 2, f"its norm is {norm:.1e} where 1 is promised, its second moment {norm**2:.0e}"


@point("3 a histogram declared at a lower rate than it is used at")
def histogram(folder: Path) -> Seen:
    plan = plan_of(statistics=[old("histogram", "norm_histogram")(0.5, 1e-4)])
    printed = trained(plan, folder / "run").guarantee.epsilon
    true = of_ledger(folder / "run" / "ledger.jsonl")
    return printed < true / 2, f"ε printed {printed:.3f}, of the ledger {true:.2f}"


@point("3 statistics that the plan does not declare, released by first=")
def undeclared(folder: Path) -> Seen:
    def first(dataset: Any, source: Any, ledger: Any) -> Any:
        budget = old("features.normalise", "ChannelBudget")(200, 1.0, 1.0, 0.1)
        old("features.normalise", "private_statistics")(dataset[0], budget, source=source, ledger=ledger)
        return dataset

    printed = trained(plan_of(), folder / "run", first=first).guarantee.epsilon
    true = of_ledger(folder / "run" / "ledger.jsonl")
    return printed < true / 2, f"ε printed {printed:.3f}, of the ledger {true:.1f}"


@point("4 a partition resumed under a new shuffle")
def reshuffled(folder: Path) -> Seen:
    import torch
    from torch import nn

    plan = plan_of(noise_multiplier=2.0, expected_batch=50, steps=None, epochs=1, sampling="partition")
    data, model, seen = records(), nn.Linear(5, 2), []
    sums = old("", "record_gradients")(model, nn.functional.cross_entropy, data, plan.clipping)

    def counted(batch: Any) -> Any:
        seen.append(batch.indices.clone())
        return sums(batch)

    counted.clipping, counted.model = plan.clipping, model  # type: ignore[attr-defined]
    for stop in (2, 4):
        with old("", "Ledger").open(folder / "ledger.jsonl", plan.to_dict()) as ledger:
            steps = old("", "private_steps")(
                plan, counted, records=200, source=plan.source(), ledger=ledger, start=ledger.last_step("gradient") + 1
            )
            for step in steps:
                if step.step + 1 >= stop:
                    break
    twice = int((torch.bincount(torch.cat(seen), minlength=200) > 1).sum())
    return twice > 0, f"{twice} of 200 records took part twice in one epoch; ε printed {plan.guarantee().epsilon:.3f}"


def stopped(folder: Path, at: int = 3, **options: Any) -> Path:
    """A run with secure noise that was stopped after so many steps."""
    seen = []

    def evaluate(model: Any) -> dict[str, float]:
        seen.append(1)
        if len(seen) == at:
            raise KeyboardInterrupt
        return {}

    settings = old("", "Settings")(eval_every=1, checkpoint_every=1, progress=False)
    with contextlib.suppress(KeyboardInterrupt):
        trained(plan_of(), folder / "run", evaluate=evaluate, settings=settings)
    return folder / "run"


@point("4 a copied run directory resumed twice")
def copied(folder: Path) -> Seen:
    run = stopped(folder)
    shutil.copytree(run, folder / "copy")
    settings = old("", "Settings")(eval_every=1, checkpoint_every=1, progress=False)
    ends = [trained(plan_of(), place, resume=True, settings=settings) for place in (run, folder / "copy")]
    return True, f"both end with ε = {ends[0].guarantee.epsilon:.3f}; steps from the third on were released twice"


@point("4 a fork that releases under one lock")
def forked(folder: Path) -> Seen:
    path = folder / "ledger.jsonl"
    entry = {"purpose": "gradient", "step": 0, "secure": True}
    with old("ledger", "Ledger").open(path, {"any": "plan"}) as ledger:
        child = os.fork()
        if child == 0:
            ledger.record(entry)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ledger.record(entry)
    lines = path.read_text().count('"release"')
    return code == 0 and lines == 2, f"{lines} releases of one step by two processes"


@point("5 ε of 1.000343 shown as 1")
def nearest(folder: Path) -> Seen:
    guarantee = plan_of().guarantee().to_dict() | {"epsilon": 1.000343}
    result = guarantee | {"guarantee": guarantee, "test_accuracy": None, "noise_free_accuracy": None, "seconds": 1.0}
    shown = old("cli.train", "_rows")(result, folder)["ε"]
    return shown.startswith("1 at"), f"1.000343 is shown as {shown.split(' at')[0]}"


@point("5 δ rounded to the nearest")
def nearest_delta(folder: Path) -> Seen:
    done = command(
        "account", "dpsgd", "--noise-multiplier=2", "--steps=10", "--sampling-rate=0.1", "--delta=1.00000049e-5"
    )
    return "δ = 1e-05" in done.stdout, "1.00000049e-5 is shown as 1e-05"


@point("6 times of ledger entries")
def times(folder: Path) -> Seen:
    trained(plan_of(), folder / "run")
    stamp = old("ledger", "read_ledger")(folder / "run" / "ledger.jsonl")[1][0]["time"]
    digits = len(stamp.partition(".")[2].partition("+")[0])
    return digits == 3, "entries have milliseconds, which show how long the step of each batch took"


@point("6 times of files in a paid sweep")
def sweep_times(folder: Path) -> Seen:
    source = inspect.getsource(importlib.import_module("sordino.sweep_paid"))
    (folder / "hidden").mkdir()
    kept = folder / "hidden" / "0"
    kept.mkdir()
    (kept / "result.json").write_text("{}")
    before = (kept / "result.json").stat().st_mtime_ns
    time.sleep(0.05)
    kept.replace(folder / "run")
    same = (folder / "run" / "result.json").stat().st_mtime_ns == before
    return (
        same and "utime" not in source,
        "the selected run is moved with the times of its making: later runs show as a gap",
    )


@point("6 errors print private values")
def errors(folder: Path) -> Seen:
    from torch import nn

    said = []
    inputs, targets = records()
    targets[7] = 7777
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: old("", "train")(nn.Linear(5, 2), nn.functional.cross_entropy, (inputs, targets), plan_of(), lr=0.1),
        lambda: old("steps", "check_records")(plan_of(), 137),
    )
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            said.append(str(error))
    return any("7777" in text for text in said) and any("137" in text for text in said), " / ".join(
        t[:60] for t in said
    )


@point("6 the folder of cached features is readable by all")
def cache(folder: Path) -> Seen:
    import torch

    (folder / "cache").mkdir(mode=0o755)
    rows = torch.randn(3, 3)
    old("features.cache", "cached")(lambda rows: rows, {"any": 1}, rows, folder / "cache")
    mode = stat.S_IMODE((folder / "cache").stat().st_mode)
    (path,) = (folder / "cache").iterdir()
    guessed = old("features.cache", "_key")({"any": 1}, rows).startswith(path.stem)
    kept = stat.S_IMODE(path.stat().st_mode)
    text = (
        f"a folder that was there stays {mode:o}, and names are unkeyed hashes of the records (the files are {kept:o})"
    )
    return bool(mode & 0o077) and guessed, text


@point("6 accuracy without noise in result.json")
def noise_free(folder: Path) -> Seen:
    recipe = old("recipe", "Recipe").read(recipe_file(folder, "[run]\nnoise_free = true\n" + SMALL))
    old("run", "run_recipe")(recipe, folder / "run", progress=False)
    found = json.loads((folder / "run" / "result.json").read_text())["noise_free_accuracy"]
    return isinstance(found, float), f"noise_free_accuracy is {found:.3f}, among what may be published"


@point("7 the accuracy of lost weights is published")
def lost(folder: Path) -> Seen:
    settings = old("", "Settings")(eval_every=1, checkpoint_every=3, progress=False)
    options = {"settings": settings, "evaluate": lambda model: {"test_accuracy": 0.7085}}
    trained(plan_of(), folder / "run", **options)
    shutil.rmtree(folder / "run" / "checkpoint")
    options["evaluate"] = lambda model: {"test_accuracy": 0.1}
    ended = trained(plan_of(), folder / "run", resume=True, **options)
    accuracy = ended.metrics[-1]["test_accuracy"]
    return (
        accuracy == 0.7085,
        f"all {ended.skipped_steps} of 5 steps skipped, accuracy {accuracy} of weights that have 0.1",
    )


@point("7 DP-MAC does not save its last step")
def mac_last(folder: Path) -> Seen:
    import torch

    mac = old("mac.training", "Mac")(w=old("mac.optimise", "WSteps")("adam", 0.05))
    plan = old("methods.dp_mac", "plan")(
        parts=mac.parts(2), delta=1e-5, records=400, expected_batch=200, steps=9, noise_multiplier=1.0, insecure_seed=0
    )
    net = old("mac.network", "Network")([6, 8, 3], "relu", "sigmoid")
    data = torch.randn(400, 6), torch.nn.functional.one_hot(torch.arange(400) % 3, 3).float()
    settings = old("", "Settings")(checkpoint_every=7, progress=False)
    old("mac.training", "train_mac")(net, data, plan, mac, settings=settings, out=folder)
    names = [path.stem for path in sorted((folder / "checkpoint").iterdir())]
    return "step-000000009" not in names, f"9 steps, checkpoints: {names}"


@point("7 two overlapping resumes: the second overwrites a finished model with skipped steps")
def overlapping(folder: Path) -> Seen:
    runs = importlib.import_module("sordino.run")
    recipe, out, read = old("recipe", "Recipe").read(recipe_file(folder)), folder / "run", runs.prepare

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        runs.prepare = read  # type: ignore[attr-defined]
        runs.run_recipe(recipe, out, progress=False)
        return read(*arguments, **options)

    runs.prepare = meanwhile  # type: ignore[attr-defined]
    ended = runs.run_recipe(recipe, out, resume=True, progress=False)
    return ended[
        "skipped_steps"
    ] == 3, f"{ended['skipped_steps']} of 3 steps skipped in what was a finished run, exit 0"


@point("7 skipped steps are not on the screen")
def unseen(folder: Path) -> Seen:
    guarantee = plan_of().guarantee().to_dict()
    result = guarantee | {
        "guarantee": guarantee, "test_accuracy": 0.1, "noise_free_accuracy": None, "seconds": 1.0, "skipped_steps": 5
    }  # fmt: skip
    shown = old("cli.train", "_rows")(result, folder)
    return "skip" not in str(shown), f"the table has {', '.join(shown)}"


@point("7 SIGTERM does not save")
def sigterm(folder: Path) -> Seen:
    child = os.fork()
    if child == 0:
        settings = old("", "Settings")(eval_every=1, checkpoint_every=100, progress=False)

        def evaluate(model: Any) -> dict[str, float]:
            os.kill(os.getpid(), signal.SIGTERM)
            return {}

        trained(plan_of(), folder / "run", settings=settings, evaluate=evaluate)
        os._exit(0)
    os.waitpid(child, 0)
    saved = list((folder / "run").glob("checkpoint/*"))
    return not saved, "no checkpoint after the signal: the released step is lost"


@point("8 a ledger that is lost, emptied or cut is accepted")
def cut_ledger(folder: Path) -> Seen:
    accepted = []
    settings = old("", "Settings")(eval_every=1, checkpoint_every=1, progress=False)
    for name in ("deleted", "emptied", "cut", "a line taken out"):
        run = stopped(folder / name, at=4)
        path = run / "ledger.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        if name == "deleted":
            path.unlink()
        else:
            path.write_bytes({"emptied": b"", "cut": b"".join(lines[:2])}.get(name, b"".join(lines[:2] + lines[3:])))
        with contextlib.suppress(old("errors", "SordinoError")):
            trained(plan_of(), run, resume=True, settings=settings)
            accepted.append(f"{name} ({len(path.read_bytes().splitlines()) - 1} of 5 releases)")
    return len(accepted) == 4, f"accepted: {', '.join(accepted)}"


def bytes_changed(content: bytes, tries: int, accepted: Callable[[bytes], bool]) -> int:
    draw, found = random.Random(0), 0
    for _ in range(tries):
        place = draw.randrange(len(content))
        changed = content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]
        found += accepted(changed)
    return found


@point("8 changed bytes of a ledger lower ε unnoticed")
def ledger_bytes(folder: Path) -> Seen:
    trained(plan_of(noise_multiplier=2.0), folder / "run")
    path = folder / "run" / "ledger.jsonl"
    content, right = path.read_bytes(), of_ledger(path)

    def lower(changed: bytes) -> bool:
        path.write_bytes(changed)
        try:
            return of_ledger(path) < right * (1 - 1e-9)
        except Exception:
            return False

    found = bytes_changed(content, 1500, lower)
    return found > 0, f"{found} of 1,500 changed bits lower the ledger's ε"


@point("8 changed bytes of a checkpoint go unnoticed")
def checkpoint_bytes(folder: Path) -> Seen:
    run = stopped(folder)
    path = sorted((run / "checkpoint").iterdir())[-1]
    content = path.read_bytes()
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        fingerprint = json.loads(file.metadata()["sordino"])["fingerprint"]
    for other in run.glob("checkpoint/*"):
        other.unlink()

    def read(changed: bytes) -> bool:
        path.write_bytes(changed)
        try:
            return old("state", "TrainState").load(path.parent, fingerprint) is not None
        except Exception:
            return False

    found = bytes_changed(content, 500, read)
    return found > 0, f"{found} of 500 changed bits are read as if nothing was"


@point("8 a damaged model goes unnoticed")
def damaged_model(folder: Path) -> Seen:
    old("run", "run_recipe")(old("recipe", "Recipe").read(recipe_file(folder)), folder / "run", progress=False)
    path = folder / "run" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
    done = command("report", str(folder / "run"))
    return done.returncode == 0 and not done.stderr, "no command notices a changed bit of the model"


@point("9 settings that fail, or make a NaN model, after a release")
def bad_settings(folder: Path) -> Seen:
    import torch

    seen = []
    for name, optimizer, options, rate in (
        ("capturable", torch.optim.Adam, {"capturable": True}, 0.1),
        ("three betas", torch.optim.Adam, {"betas": (0.9, 0.9, 0.9)}, 0.1),
        ("lr = nan", torch.optim.SGD, {}, float("nan")),
        ("momentum = nan", torch.optim.SGD, {"momentum": float("nan")}, 0.1),
    ):
        settings = old("", "Settings")(optimizer_options=options, progress=False)
        try:
            trained(plan_of(), folder / name, optimizer=optimizer, lr=rate, settings=settings)
            how = "accepted"
        except Exception as error:
            how = type(error).__name__
        path = folder / name / "ledger.jsonl"
        lines = max(0, path.read_text().count('"release"')) if path.exists() else 0
        seen.append((lines > 0, f"{name}: {how}, {lines} releases"))
    return all(paid for paid, _ in seen), "; ".join(text for _, text in seen)


@point("9 another dataset of equal size on resume")
def other_data(folder: Path) -> Seen:
    from torch import nn

    run = stopped(folder)
    inputs, targets = records()
    net, settings = nn.Linear(5, 2), old("", "Settings")(eval_every=1, checkpoint_every=1, progress=False)
    ended = old("", "train")(
        net, nn.functional.cross_entropy, (inputs + 5, 1 - targets), plan_of(), lr=0.1, out=run, resume=True,
        settings=settings,
    )  # fmt: skip
    return True, f"accepted; ε stated {ended.guarantee.epsilon:.3f}"


@point("10 tracebacks at directories that can't be made")
def directories(folder: Path) -> Seen:
    recipe = recipe_file(folder)
    (folder / "file").write_text("")
    (folder / "dangling").symlink_to(folder / "nowhere" / "there")
    outs = {"a file": "file", "below a file": "file/run", "too long": "x" * 300, "dangling": "dangling"}
    bad = [name for name, out in outs.items() if traceback(command("train", recipe, "--out", str(folder / out)))]
    return bool(bad), f"--out on: {', '.join(bad)}"


@point("10 tracebacks at a damaged result.json or metrics")
def damaged_files(folder: Path) -> Seen:
    recipe, out, bad = recipe_file(folder), folder / "run", []
    for name, content in (("result.json", b"{"), ("result.json", b"[]"), ("metrics.jsonl", b'{"step": "x"}\n')):
        shutil.rmtree(out, ignore_errors=True)
        command("train", recipe, "--out", str(out))
        (out / name).write_bytes(content)
        if name != "result.json":
            (out / "result.json").unlink()
        bad += (
            [f"{name} = {content.decode().strip()}"]
            if traceback(command("train", recipe, "--out", str(out), "--resume"))
            else []
        )
    return bool(bad), f"on --resume: {', '.join(bad)}"


@point("10 tracebacks at mutated recipes")
def mutated_recipes(folder: Path) -> Seen:
    read = old("recipe", "Recipe").read
    prepare, wrong, bad = old("run", "prepare"), old("errors", "SordinoError"), set()
    changes = {
        "a list for a name": SMALL.replace('"linear"', "[1]"),
        "a table for the model's name": SMALL.replace('name = "linear"', "name = {a = 1}"),
        "a number of 400 digits": SMALL.replace("steps = 3", "steps = " + "9" * 400),
        "infinite steps": SMALL.replace("steps = 3", "epochs = inf"),
        "a huge batch": SMALL.replace("expected_batch = 40", "expected_batch = " + "9" * 30),
        "hidden layers of text": SMALL.replace('"linear"', '"mlp"\nhidden = "x"'),
        "a clip norm of 1e-320": SMALL + "[clipping]\nclip_norm = 1e-320\n",
        "δ of 1e-320": SMALL.replace("delta = 1e-5", "delta = 1e-320"),
        "noise of 1e308": SMALL.replace("noise_multiplier = 1.0", "noise_multiplier = 1e308"),
        "noise of 1e-300": SMALL.replace("noise_multiplier = 1.0", "noise_multiplier = 1e-300"),
    }
    for name, text in changes.items():
        try:
            prepare(read(recipe_file(folder, text))).model()
        except wrong:
            pass
        except Exception as error:
            bad.add(f"{name} ({type(error).__name__})")
    return bool(bad), f"{len(bad)} of {len(changes)}: {', '.join(sorted(bad))}"


@point("10 tracebacks at damaged dataset files")
def damaged_data(folder: Path) -> Seen:
    """Today's fuzzer, which needs nothing that the old package lacks."""
    sys.path.insert(0, str(Path(__file__).parent))
    from faulty import datasets
    from faulty.outcome import Tally

    tally = Tally()
    for seed in range(400):
        datasets.fuzz(seed, tally, folder / "try")
    kinds = sorted({text.split()[1].rstrip(":") for text in tally.uncaught})
    count = sum(one["count"] for one in tally.uncaught.values())
    return count > 0, f"{count} of {tally.tried} damaged files: {', '.join(kinds)}"


@point("10 tracebacks at command lines with huge numbers")
def huge(folder: Path) -> Seen:
    lines = [
        "account dpsgd --noise-multiplier=1 --steps=" + "9" * 400 + " --delta=1e-5 --sampling-rate=0.01",
        "plan --records=600 --features=20 --epsilon=3 --delta=1e-5 --feature-norm=2147483648 --max-epochs=20",
        "plan --records=600 --features=20 --epsilon=3 --delta=1e-5 --feature-norm=1 --weight-norm=1e300 --max-epochs=9",
    ]
    bad = [line.split()[0] for line in lines if traceback(command(*line.split()))]
    return bool(bad), f"{len(bad)} of {len(lines)}: {', '.join(bad)}"


@point("10 a file that unpacks without limit")
def unpacks(folder: Path) -> Seen:
    path = folder / "file.gz"
    path.write_bytes(gzip.compress(bytes(300_000_000), 9))
    size = len(old("data.files", "read_bytes")(path))
    return size > 100 * path.stat().st_size, f"{path.stat().st_size:,} bytes become {size:,}, unasked"


@point("10 a kill while recipe.toml is written")
def torn(folder: Path) -> Seen:
    recipe, out = recipe_file(folder), folder / "run"
    out.mkdir()
    (out / "recipe.toml.partial").write_bytes(b"[data]\n")  # what write_atomically leaves if it is killed
    done = command("train", recipe, "--out", str(out), "--resume")
    return done.returncode != 0, done.stderr.strip().splitlines()[-1][:100].replace(str(folder), "…")


@point("10 run.name escapes runs/")
def escapes(folder: Path) -> Seen:
    (folder / "work").mkdir()
    done = command("train", recipe_file(folder, '[run]\nname = "../../outside"\n' + SMALL), cwd=folder / "work")
    there = (folder / "outside" / "result.json").exists()
    return there and done.returncode == 0, "a run was written outside of the working directory"


@point("10 not_private.json is readable by all")
def readable(folder: Path) -> Seen:
    os.umask(0o022)
    command("train", recipe_file(folder), "--out", str(folder / "run"))
    mode = stat.S_IMODE((folder / "run" / "not_private.json").stat().st_mode)
    return bool(mode & 0o077), f"mode {mode:o}"


@point("10 parents of a run directory are not synced")
def parents(folder: Path) -> Seen:
    synced, sync = [], os.fsync

    def noted(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    os.fsync = noted  # type: ignore[assignment]
    trained(plan_of(), folder / "a" / "b" / "run")
    os.fsync = sync
    missing = [
        str(p.relative_to(folder.parent)) for p in (folder, folder / "a", folder / "a" / "b") if str(p) not in synced
    ]
    return len(missing) == 3, f"never synced: {len(missing)} of 3 directories above it"


@point("10 an assert guards a paid sweep")
def asserted(folder: Path) -> Seen:
    tree = ast.parse(inspect.getsource(importlib.import_module("sordino.sweep_paid")))
    found = [ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return "epsilon <= price.epsilon" in found, "assert epsilon <= price.epsilon, which python -O leaves out"


def main(arguments: list[str]) -> int:
    if not arguments:
        print("\n".join(POINTS))
        return 0
    import torch

    torch.set_num_threads(1)
    shown, seen = POINTS[arguments[0]](Path(arguments[1]))
    print(json.dumps({"shown": bool(shown), "seen": seen}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
