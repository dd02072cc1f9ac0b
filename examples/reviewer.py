"""A reviewer receives run directories, twenty of them forged: `sordino verify` accepts only the genuine one.

Run it with `python examples/reviewer.py`. docs/howto/verify.md explains what is compared.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import sordino
from sordino.runs.verify import verify  # what the command `sordino verify DIR` calls; its exit code is 0 or 3


def run(out: Path, epsilon: float) -> None:
    """A genuine run."""
    inputs = torch.rand(400, 4, generator=torch.Generator().manual_seed(0))
    plan = sordino.dpsgd(epsilon=epsilon, delta=1e-5, records=400, expected_batch=40, steps=4)
    loss = torch.nn.functional.cross_entropy
    settings = sordino.Settings(progress=False)
    sordino.train(torch.nn.Linear(4, 2), loss, (inputs, (inputs[:, 0] > 0.5).long()), plan, lr=0.5, out=out,
                  settings=settings)  # fmt: skip


def replaced(name: str, old: str, new: str) -> Callable[[Path, Path], None]:
    """A forgery that replaces a text in a file."""

    def forge(folder: Path, other: Path) -> None:
        text = (folder / name).read_text(encoding="utf8")
        assert old in text, (name, old)
        (folder / name).write_text(text.replace(old, new), encoding="utf8")

    return forge


def result(**changes: object) -> Callable[[Path, Path], None]:
    """A forgery that changes entries of result.json."""

    def forge(folder: Path, other: Path) -> None:
        document = json.loads((folder / "result.json").read_text(encoding="utf8"))
        (folder / "result.json").write_text(json.dumps({**document, **changes}), encoding="utf8")

    return forge


def lines(keep: Callable[[list[str]], list[str]]) -> Callable[[Path, Path], None]:
    """A forgery that changes the lines of the ledger."""

    def forge(folder: Path, other: Path) -> None:
        found = (folder / "ledger.jsonl").read_text(encoding="utf8").splitlines(keepends=True)
        (folder / "ledger.jsonl").write_text("".join(keep(found)), encoding="utf8")

    return forge


def swapped(name: str) -> Callable[[Path, Path], None]:
    """A forgery with a file of another genuine run, which has a larger ε."""
    return lambda folder, other: shutil.copy(other / name, folder / name) and None


def flipped(folder: Path, other: Path) -> None:
    """A forgery that flips one bit of the last weight."""
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(content))


FORGERIES: dict[str, Callable[[Path, Path], None]] = {
    "a smaller ε": result(epsilon=0.1),
    "a smaller δ": result(delta=1e-9),
    "another relation": result(relation="replace-one"),
    "fewer steps": result(steps=2),
    "another sampler": result(sampler="partition"),
    "an insecure seed that was none": result(secure=False),
    "another digest of the model": result(model_sha256="0" * 64),
    "the model of another run": swapped("model.safetensors"),
    "the ledger of another run": swapped("ledger.jsonl"),
    "the result of another run": swapped("result.json"),
    "one bit of a weight": flipped,
    "more records": replaced("ledger.jsonl", '"records": 400', '"records": 40000'),
    "a smaller clip norm": replaced("ledger.jsonl", '"clip_norm": 1.0', '"clip_norm": 0.001'),
    "smaller sensitivities": replaced("ledger.jsonl", '"sensitivity": 1.0', '"sensitivity": 0.001'),
    "larger noise": replaced("ledger.jsonl", '"noise_multiplier": ', '"noise_multiplier": 9'),
    "a release less": lines(lambda found: found[:-1]),
    "a release in the middle less": lines(lambda found: found[:2] + found[3:]),
    "releases in another order": lines(lambda found: [found[0], *reversed(found[1:])]),
    "no releases": lines(lambda found: found[:1]),
    "another recipe": replaced("recipe.toml", "lr = 0.5", "lr = 0.25"),
}


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        run(folder / "genuine", 3.0)
        run(folder / "other", 8.0)
        found = verify(folder / "genuine")
        assert found.genuine
        print(f"genuine: ε = {found.epsilon:.3f}, computed from the ledger alone")
        for what, forge in FORGERIES.items():
            shutil.copytree(folder / "genuine", folder / what)
            forge(folder / what, folder / "other")
            said = [one.why for one in verify(folder / what).checks if not one.ok]
            assert said, f"{what} was not found"
            print(f"forged, {what}: {said[0]}")


if __name__ == "__main__":
    main()
