"""Ways to forge a run directory, each a function that edits a copy of a genuine one."""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import load_file, save_file

from sordino import report
from sordino.plan.core import Plan
from sordino.release.ledger import read_chain
from sordino.release.ledger_lines import OWN_KEYS, encode, sealed
from sordino.runs.alike import without_none
from sordino.runs.closing import MODEL, file_digest, result_digest
from sordino.runs.stated import KEPT, wanted_result
from sordino.training.sealed import read_sealed
from sordino.training.sealed import sealed as sealed_model

Forge = Callable[[Path, Path], None]  # the directory to edit, and that of another genuine run
Lines = list[dict[str, Any]]


def ledger(folder: Path) -> Lines:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text("utf8").splitlines()]


def rewrite(folder: Path, lines: Lines) -> None:
    """The lines with a chain made anew: what a forger does who has read how the hashes are made."""
    content, before = b"", b""
    for line in lines:
        made, before = sealed(encode({k: v for k, v in line.items() if k != "hash"}, "a line"), before)
        content += made
    (folder / "ledger.jsonl").write_bytes(content)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf8")), **changes}, indent=2), "utf8")


def edit_result(**changes: Any) -> Forge:
    return lambda folder, other: edit_json(folder / "result.json", **changes)


def edit_text(name: str, old: str, new: str) -> Forge:
    def forge(folder: Path, other: Path) -> None:
        text = (folder / name).read_text("utf8")
        assert old in text, f"{name} has no {old!r}"
        (folder / name).write_text(text.replace(old, new), "utf8")

    return forge


def bent(change: Callable[[Lines], Lines], *, chained: bool = True) -> Forge:
    """Edited lines, with a new chain or with the old hashes."""

    def forge(folder: Path, other: Path) -> None:
        lines = change(ledger(folder))
        if chained:
            rewrite(folder, lines)
        else:
            (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf8")

    return forge


def in_entries(**values: Any) -> Callable[[Lines], Lines]:
    return lambda lines: [lines[0], *({**line, **values} for line in lines[1:])]


def in_header(**values: Any) -> Callable[[Lines], Lines]:
    return lambda lines: [{**lines[0], **values}, *lines[1:]]


def renumbered(lines: Lines) -> Lines:
    return [lines[0], *({**line, "step": step} for step, line in enumerate(lines[1:]))]


def without_own_keys(lines: Lines) -> Lines:
    return [{key: value for key, value in line.items() if key not in OWN_KEYS} for line in lines]


def noise_in_header(lines: Lines) -> Lines:
    return in_header(noise={"name": "gaussian", "noise_multiplier": 9.0})(lines)


def taken(name: str) -> Forge:
    return lambda folder, other: shutil.copyfile(other / name, folder / name) and None


def weights_exchanged(folder: Path, other: Path) -> None:
    """The other run's weights in a file of this run's name, without the library's document."""
    save_file(load_file(other / "model.safetensors"), folder / "model.safetensors")


def weights_under_the_old_header(folder: Path, other: Path) -> None:
    """The other run's weights behind this run's header, with its document and checksum."""
    ours, theirs = ((place / MODEL).read_bytes() for place in (folder, other))
    first, second = (8 + int.from_bytes(content[:8], "little") for content in (ours, theirs))
    (folder / MODEL).write_bytes(ours[:first] + theirs[second:])


def all_of(*forgeries: Forge) -> Forge:
    def forge(folder: Path, other: Path) -> None:
        for one in forgeries:
            one(folder, other)

    return forge


def flipped(name: str, at: int) -> Forge:
    def forge(folder: Path, other: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return forge


def consistent_smaller_epsilon(folder: Path, other: Path) -> None:
    """Noise × 3 in every line of the ledger with a new chain, the result's ε and ledger's end to match."""
    from sordino.plan.spent import from_ledger
    from sordino.release.ledger import read_chain

    bent(lambda lines: in_entries(noise_multiplier=9.0)(noise_in_header(lines)))(folder, other)
    chain = read_chain(folder / "ledger.jsonl")
    found = from_ledger(chain.header, chain.entries, 1e-5)
    head = {"format": chain.format, **chain.head.to_dict()}
    edit_json(folder / "result.json", epsilon=found["epsilon"], noise_multiplier=9.0, ledger=head)


def in_recipe(**sections: Mapping[str, Any]) -> Forge:
    def forge(folder: Path, other: Path) -> None:
        document = tomllib.loads((folder / "recipe.toml").read_text("utf8"))
        for name, keys in sections.items():
            document[name] = {**document.get(name, {}), **keys}
        (folder / "recipe.toml").write_text(tomli_w.dumps(document), "utf8")

    return forge


def recipe_listed(folder: Path, other: Path) -> None:
    """The hash of the recipe as it is now, in the result's list."""
    files = json.loads((folder / "result.json").read_text("utf8"))["files"]
    edit_json(folder / "result.json", files=files | {"recipe.toml": file_digest(folder / "recipe.toml")})


def restated(folder: Path, other: Path) -> None:
    """Result and model's document state what the ledger's plan gives, whatever it is: then all hashes."""
    header = {key: value for key, value in ledger(folder)[0].items() if key not in ("kind", *OWN_KEYS)}
    plan = Plan.from_dict(header)
    found = plan.guarantee()
    epsilon, guarantee = found.epsilon, json.loads(json.dumps(found.to_dict()))
    result = json.loads((folder / "result.json").read_text("utf8"))
    wanted = {**wanted_result(plan, result), "epsilon": epsilon, "guarantee": {**result["guarantee"], **guarantee}}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf8").splitlines()]
    curve = [{**row, "epsilon": epsilon} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve), "utf8")
    edit_json(folder / "result.json", **wanted)
    with_new_hashes(left_alone, guarantee=wanted["guarantee"]["sentence"])(folder, other)


def put(name: str, old: bytes, new: bytes) -> Forge:
    """Bytes in the place of others, once; old = b"": at the end."""

    def forge(folder: Path, other: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1) if old else content + new)

    return forge


def sentence_of_another_version(folder: Path, other: Path) -> None:
    """The words of a sentence may be another version's; its numbers may not."""
    result = json.loads((folder / "result.json").read_text("utf8"))
    words = result["guarantee"] | {"sentence": "This training is (ε = 0.0001, δ = 1e-15)-differentially private."}
    edit_json(folder / "result.json", environment=result["environment"] | {"sordino": "0.0.9"}, guarantee=words)


def metrics_not_listed(folder: Path, other: Path) -> None:
    files = json.loads((folder / "result.json").read_text("utf8"))["files"]
    edit_json(folder / "result.json", files={k: v for k, v in files.items() if k != "metrics.jsonl"})


def added(name: str, document: dict[str, Any]) -> Forge:
    """A file that this run did not write, and the page made anew, which shows it."""

    def forge(folder: Path, other: Path) -> None:
        (folder / name).write_text(json.dumps(document), "utf8")
        report.write(folder)

    return forge


HISTOGRAM = {"edges": [0.1, 1.0, 10.0], "counts": [500.0, 20.0, 3.0, 1.0], "noise": 1.0}
PICTURES = {"pictures": [{"title": "reconstructions", "rows": 1, "columns": 1, "values": [[0.5]]}]}


def with_new_hashes(forge: Forge, **stated: Any) -> Forge:
    """The forgery, and then every hash, the model's document and the page made anew: all that can be computed.

    stated: what the model's document says instead.
    """

    def made(folder: Path, other: Path) -> None:
        forge(folder, other)
        chain = read_chain(folder / "ledger.jsonl")
        result = json.loads((folder / "result.json").read_text("utf8"))
        result["ledger"] = {"format": chain.format, **chain.head.to_dict()}
        result["files"] = {name: file_digest(folder / name) for name in result["files"] if name != MODEL}
        tensors, about = read_sealed(folder / MODEL)
        repeated = {key: result.get(key) for key in KEPT}
        about |= repeated | {"ledger": chain.head.to_dict(), "result": result_digest(result), **stated}
        content = sealed_model(tensors, {key: value for key, value in about.items() if key != "format"})
        (folder / MODEL).write_bytes(content)
        result["files"][MODEL] = hashlib.sha256(content).hexdigest()
        (folder / "result.json").write_text(json.dumps(result, indent=2), "utf8")
        report.write(folder)

    return made


def left_alone(folder: Path, other: Path) -> None:
    """No change: only hashes are made anew."""


def without(key: str) -> Forge:
    def forge(folder: Path, other: Path) -> None:
        result = json.loads((folder / "result.json").read_text("utf8"))
        del result[key]
        (folder / "result.json").write_text(json.dumps(result, indent=2), "utf8")

    return forge


def measured(**row: Any) -> Forge:
    """One more row of metrics, before the last one or after it."""

    def forge(folder: Path, other: Path) -> None:
        path = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text("utf8").splitlines()]
        rows = sorted([*rows, {**rows[-1], **row}], key=lambda one: one["step"])
        path.write_text("".join(json.dumps(one) + "\n" for one in rows), "utf8")

    return forge


def rows_of_metrics(change: Callable[[Lines], list[Any]]) -> Forge:
    """Other rows; a text is written as it is."""

    def forge(folder: Path, other: Path) -> None:
        path = folder / "metrics.jsonl"
        rows = change([json.loads(line) for line in path.read_text("utf8").splitlines()])
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf8")

    return forge


def dropped(row: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}


def tensors_of_model(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Forge:
    def forge(folder: Path, other: Path) -> None:
        tensors, about = read_sealed(folder / MODEL)
        stated = {key: value for key, value in about.items() if key != "format"}
        (folder / MODEL).write_bytes(sealed_model(change(dict(tensors)), stated))

    return forge


def listed(name: str, document: dict[str, Any]) -> Forge:
    """A file that was made after the run, with its hash in the result's list."""

    def forge(folder: Path, other: Path) -> None:
        (folder / name).write_text(json.dumps(document), "utf8")
        files = json.loads((folder / "result.json").read_text("utf8"))["files"]
        edit_json(folder / "result.json", files=files | {name: file_digest(folder / name)})

    return forge


def in_guarantee(**values: Any) -> Forge:
    def forge(folder: Path, other: Path) -> None:
        given = json.loads((folder / "result.json").read_text("utf8"))["guarantee"]
        edit_json(folder / "result.json", guarantee=given | values)

    return forge


def described_instead(folder: Path, other: Path) -> None:
    """The description that `sordino.train` writes, with the ledger's plan and a section that is not compared."""
    header = {key: value for key, value in ledger(folder)[0].items() if key not in ("kind", *OWN_KEYS)}
    plan = without_none(Plan.from_dict(header).to_dict())
    claim = {"epsilon": 0.001, "delta": 1e-9}
    document = {"run": {"made_by": "sordino.train", "name": "run"}, "plan": plan, "privacy": claim}
    (folder / "recipe.toml").write_text(tomli_w.dumps(document), "utf8")


def first_repeated(rows: Lines) -> list[Any]:
    """The last row states two values for one key: readers disagree on which counts."""
    return [*rows[:-1], '{"test_accuracy": 0.99, "epsilon": 0.001,' + json.dumps(rows[-1])[1:]]


# What no run can have written, with every hash made anew.
IMPOSSIBLE: dict[str, tuple[Forge, str]] = {
    name: (with_new_hashes(forge), named)
    for name, (forge, named) in {
        "metrics without ε": (rows_of_metrics(lambda rows: [dropped(row, "epsilon") for row in rows]), "metrics"),
        "metrics without ε and time": (
            rows_of_metrics(lambda rows: [dropped(row, "epsilon", "seconds") for row in rows]),
            "metrics",
        ),
        "a row without ε on the way": (
            rows_of_metrics(lambda rows: [{**dropped(rows[-1], "epsilon"), "step": 3}, *rows]),
            "metrics",
        ),
        "an accuracy on the way, twice": (
            rows_of_metrics(lambda rows: [{**rows[-1], "step": 3}, {**rows[-1], "step": 3}, *rows]),
            "metrics",
        ),
        "a certificate in each entry": (bent(in_entries(certified="yes")), "steps"),
        "a certificate in the header": (bent(in_header(certified="yes")), "plan"),
        "metrics with a repeated key": (rows_of_metrics(first_repeated), "metrics"),
        "two rows of one step": (
            rows_of_metrics(lambda rows: [*rows[:-1], {**rows[-1], "test_accuracy": 0.99}, rows[-1]]),
            "metrics",
        ),
        "a row before the run": (
            rows_of_metrics(lambda rows: [{**rows[0], "step": -4, "epsilon": 0.0}, *rows]),
            "metrics",
        ),
        "a text among the metrics": (
            rows_of_metrics(lambda rows: [{**rows[0], "step": 1, "test_accuracy": "99 %"}, *rows]),
            "metrics",
        ),
        "an audit in the list of hashes": (listed("audit.json", {"epsilon_lower": 1e-4}), "hashes"),
        "a card in the list of hashes": (listed("card.md", {}), "hashes"),
        "a description with another ε": (described_instead, "recipe"),
        "no weights": (tensors_of_model(lambda tensors: {}), "model"),
        "smaller weights": (
            tensors_of_model(lambda tensors: {k: v[..., :1].contiguous() for k, v in tensors.items()}),
            "model",
        ),
        "releases of one coordinate": (bent(in_entries(coordinates=1)), "model"),
        "a run by a recipe that was stopped at its end": (edit_result(stopped_at=6), "claim"),
        "a run by a recipe that was stopped before": (
            all_of(
                bent(lambda lines: lines[:4]),
                edit_result(stopped_at=3),
                rows_of_metrics(lambda rows: [{**rows[-1], "step": 3}]),
            ),
            "claim",
        ),
        "a stop before the first step": (edit_result(stopped_at=0), "claim"),
        "more steps skipped than made": (edit_result(skipped_steps=10**9), "claim"),
        "a negative number of skipped steps": (edit_result(skipped_steps=-5), "claim"),
        "a negative duration": (edit_result(seconds=-1.0), "claim"),
        "another key that looks like ε": (edit_result(audited_epsilon=0.001), "claim"),
        "a unit beside the guarantee": (edit_result(unit="user"), "claim"),
        "a clip norm beside the guarantee": (edit_result(clip_norm=0.01), "claim"),
        "another key in the guarantee": (in_guarantee(pure=True), "claim"),
    }.items()
} | {"another key in the model's document": (with_new_hashes(left_alone, privacy="ε = 0.001"), "model")}

FORGERIES: dict[str, tuple[Forge, str]] = {
    **IMPOSSIBLE,
    "result and model of another run": (all_of(taken("result.json"), taken(MODEL)), "ledger end"),
    "all of another run but its ledger": (
        all_of(*map(taken, ("result.json", MODEL, "metrics.jsonl", "report.html"))),
        "ledger end",
    ),
    "page of another run": (taken("report.html"), "report"),
    "weights of another run under the old header": (weights_under_the_old_header, "model"),
    "zeros after the weights": (put(MODEL, b"", bytes(4096)), "model"),
    "a declaration": (in_recipe(declaration={"unit": "one patient"}), "hashes"),
    "a declaration, and its hash": (all_of(in_recipe(declaration={"unit": "one patient"}), recipe_listed), "model"),
    "a step size, and its hash": (all_of(in_recipe(train={"lr": 0.01}), recipe_listed), "model"),
    "users in header and recipe, restated": (
        all_of(bent(lambda lines: in_header(unit="user")(lines)), in_recipe(privacy={"unit": "user"}), restated),
        "recipe",
    ),
    "records × 9 in header and recipe, restated": (
        all_of(
            bent(in_header(records=108_000, delta=1e-6)),
            in_recipe(data={"records": 108_000}, privacy={"delta": 1e-6}),
            restated,
        ),
        "recipe",
    ),
    "steps removed from ledger and recipe, new hashes": (
        with_new_hashes(all_of(bent(lambda lines: in_header(steps=3)(lines[:4])), in_recipe(train={"steps": 3}))),
        "claim",
    ),
    "a run that stopped earlier, new hashes": (with_new_hashes(edit_result(stopped_at=3)), "steps"),
    "another version, new hashes": (with_new_hashes(edit_result(environment={"sordino": "99.0"})), "model"),
    "letters that look alike in the name of a file": (
        lambda f, o: (f / MODEL).rename(f / MODEL.replace("o", "\u043e")) and None,
        "files",
    ),
    "letters that look alike in a key": (put("result.json", b"{", '{"epsil\u043en": 0.001,'.encode()), "model"),
    "digits that look alike in the page": (edit_text("report.html", "ε</span> = ", "ε</span> = \uff10."), "report"),
    "a byte order mark before the ledger": (put("ledger.jsonl", b"{", b"\xef\xbb\xbf{"), "ledger"),
    "a result in another encoding": (
        lambda f, o: (f / "result.json").write_text((f / "result.json").read_text("utf8"), "utf-16") and None,
        "result",
    ),
    "ε in the model's document": (with_new_hashes(left_alone, epsilon=0.001), "model"),
    "δ in the model's document": (with_new_hashes(left_alone, delta=1e-9), "model"),
    "the guarantee in the model's document": (
        with_new_hashes(left_alone, guarantee="This training is (ε = 0.001, δ = 1e-05)-differentially private."),
        "model",
    ),
    "steps in the model's document": (with_new_hashes(left_alone, steps=1), "model"),
    "noise that the model's document calls secure": (with_new_hashes(left_alone, secure=None), "model"),
    "another theorem, new hashes": (with_new_hashes(edit_result(theorem="pure differential privacy")), "claim"),
    "no theorem, new hashes": (with_new_hashes(without("theorem")), "claim"),
    "another accountant, new hashes": (with_new_hashes(edit_result(accountant="exact")), "claim"),
    "another expected batch, new hashes": (with_new_hashes(edit_result(expected_batch=1)), "claim"),
    "another name, new hashes": (with_new_hashes(edit_result(name="certified")), "recipe"),
    "an accuracy without noise, new hashes": (with_new_hashes(edit_result(noise_free_accuracy=0.5)), "recipe"),
    "no accuracy, new hashes": (with_new_hashes(without("test_accuracy")), "metrics"),
    "a smaller ε on the way, new hashes": (with_new_hashes(measured(step=3, epsilon=1e-3)), "metrics"),
    "a row of metrics after the last step, new hashes": (with_new_hashes(measured(step=7)), "metrics"),
    "a histogram that the run did not release": (added("histogram.json", HISTOGRAM), "hashes"),
    "pictures that the run did not make": (added("pictures.json", PICTURES), "hashes"),
    "a page with a histogram that is gone again": (
        lambda f, o: (added("histogram.json", HISTOGRAM)(f, o), (f / "histogram.json").unlink())[1],
        "report",
    ),
    "a link in the place of the model": (
        lambda f, o: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors").symlink_to(o / "model.safetensors"),
        )[1],
        "model",
    ),
    "a hard link to another ledger": (
        lambda f, o: ((f / "ledger.jsonl").unlink(), (f / "ledger.jsonl").hardlink_to(o / "ledger.jsonl"))[1],
        "ledger end",
    ),
    "ε of 1e400": (put("result.json", b'"epsilon": ', b'"epsilon": 1e400, "was": '), "epsilon"),
    "ε that is no number": (put("result.json", b'"epsilon": ', b'"epsilon": NaN, "was": '), "epsilon"),
    "an accuracy that is no number": (
        put("metrics.jsonl", b'"test_accuracy": ', b'"test_accuracy": NaN, "was": '),
        "hashes",
    ),
    "a step twice in one line of the ledger": (
        put("ledger.jsonl", b'"purpose": "gradient"', b'"purpose": "x", "purpose": "gradient"'),
        "ledger",
    ),
    "letters that look alike in the sentence": (
        edit_text("result.json", "differentially private", "differentiaIly private"),
        "claim",
    ),
    "a direction mark in the name": (edit_text("result.json", '"name": "', '"name": "\u202e'), "model"),
    "markup in the page": (edit_text("report.html", "</h1>", "</h1><style>.bad{display:none}</style>"), "report"),
    "a byte order mark before the page": (put("report.html", b"<", b"\xef\xbb\xbf<"), "report"),
    "a second ε in result.json": (put("result.json", b"{", b'{"epsilon": 0.001,'), "result"),
    "a second ε in the guarantee": (
        put("result.json", b'"guarantee": {', b'"guarantee": {"epsilon": 0.001,'),
        "result",
    ),
    "a sentence of another version": (sentence_of_another_version, "claim"),
    "a sentence of a run that stopped": (
        lambda f, o: (edit_json(f / "result.json", stopped_at=3), sentence_of_another_version(f, o))[1],
        "claim",
    ),
    "public rows that the plan does not know": (edit_result(public={"records": 9}), "claim"),
    "metrics that are not listed": (metrics_not_listed, "hashes"),
    "half a line after the ledger's end": (put("ledger.jsonl", b"", b'{"kind": "release", "eps'), "ledger"),
    "a zero after the ledger's end": (put("ledger.jsonl", b"", b"\0"), "ledger"),
    "ε in result.json": (edit_result(epsilon=0.001), "epsilon"),
    "δ in result.json": (edit_result(delta=1e-9), "claim"),
    "relation in result.json": (edit_result(relation="replace-one"), "claim"),
    "accuracy in result.json": (edit_result(test_accuracy=0.99), "metrics"),
    "sentence in result.json": (edit_text("result.json", "differentially private", "perfectly private"), "claim"),
    "time in result.json": (edit_result(seconds=0.1), "model"),
    "model of another run": (taken("model.safetensors"), "model"),
    "weights of another run": (weights_exchanged, "model"),
    "a bit of the model": (flipped("model.safetensors", -3), "model"),
    "recipe": (in_recipe(clipping={"clip_norm": 0.5}), "recipe"),
    "metrics": (edit_text("metrics.jsonl", '"test_accuracy": 0.', '"test_accuracy": 0.9'), "hashes"),
    "page": (edit_text("report.html", "</h1>", ", certified</h1>"), "report"),
    "ledger of another run": (taken("ledger.jsonl"), "ledger end"),
    "sensitivity in each entry, old hashes": (bent(in_entries(sensitivity=0.001), chained=False), "ledger"),
    "sensitivity in each entry, new chain": (bent(in_entries(sensitivity=0.001)), "sensitivities"),
    "records × 100 in the header, old hashes": (bent(in_header(records=1_200_000), chained=False), "ledger"),
    "records × 100 in the header, new chain": (bent(in_header(records=1_200_000)), "recipe"),
    "steps dropped at the end": (bent(lambda lines: lines[:-2]), "steps"),
    "steps dropped in the middle": (bent(lambda lines: lines[:3] + lines[4:], chained=False), "ledger"),
    "steps dropped at the start, renumbered": (bent(lambda lines: renumbered([lines[0], *lines[2:]])), "steps"),
    "entries exchanged": (bent(lambda lines: [lines[0], lines[2], lines[1], *lines[3:]]), "steps"),
    "an entry twice": (bent(lambda lines: [*lines, lines[-1]]), "ledger"),
    "noise in the header": (bent(noise_in_header), "steps"),
    "noise in the entries": (bent(in_entries(noise_multiplier=9.0)), "sensitivities"),
    "noise in both": (bent(lambda lines: in_entries(noise_multiplier=9.0)(noise_in_header(lines))), "recipe"),
    "sampling rate": (bent(in_entries(sampling={"name": "poisson", "sampling_rate": 1e-5})), "steps"),
    "sampler": (bent(in_entries(sampling={"name": "without-replacement", "batch": 40})), "steps"),
    "δ in the header": (bent(in_header(delta=1e-2)), "claim"),
    "relation in the ledger": (bent(lambda lines: in_entries(relation="replace-one")(lines)), "steps"),
    "secure in the ledger": (bent(in_entries(secure=False)), "sensitivities"),
    "hashes taken off": (bent(without_own_keys, chained=False), "ledger"),
    "everything but the model and the page": (consistent_smaller_epsilon, "model"),
}
"""Each with the check that must name it (others may disagree too)."""
