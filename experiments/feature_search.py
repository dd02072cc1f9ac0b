"""Which fixed features? Compares feature maps on few training rows with the noise for all rows; one JSON file.

    python experiments/feature_search.py cifar10 --rows 12000 --judged 4000 --maps "grid=4 threshold=0.3 side=8" …

A softmax layer is trained on `rows` training rows and evaluated on `judged` other rows of the *training* split; test
rows are not read. The noise in the mean gradient has the standard deviation of the plan with all records, so every map
is evaluated with the noise of the final run; the better fit from more records is missing for all maps alike. Every
`--maps` word changes options of the base map (patches, 6 pixels, 128 atoms, mirrored, whitened by 0.5; `--base` changes
it for all maps), several of them with commas in between.

    python experiments/feature_search.py mnist --judged 10000 --base mirror=false,atoms=64 --maps upright=true …

Under "earlier" the file also has trials of earlier versions of this script, which cut out patches in another random
order, with the values that they printed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads import noise_of, trained
from provenance import COMMIT, origin
from sordino import data, features
from sordino.files import write_atomically

PATH = Path(__file__).parent / "results" / "feature_search.json"
BASE: dict[str, Any] = {"name": "patches", "side": 6, "atoms": 128, "grid": 3, "mirror": True, "whiten": 0.5}
SETTINGS = (
    {"epsilon": 1.0, "batch": 8192, "steps": 60, "clip": 0.01, "lr": 5000.0, "average": 0.95, "seed": 0},
    {"epsilon": 3.0, "batch": 8192, "steps": 100, "clip": 0.01, "lr": 6000.0, "average": 0.95, "seed": 0},
)


def some(name: str, rows: int, judged: int) -> tuple[Tensor, Tensor, int, int]:
    """(inputs, targets, the number of records of a full run, classes) of the first and the last rows, shuffled."""
    found = data.load(name)
    split = found.train
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(5))
    kept = torch.cat([order[:rows], order[-judged:]])
    return split.inputs[kept], split.targets[kept], len(split) - judged, found.classes


def judge(seen: Tensor, targets: Tensor, rows: int, records: int, classes: int, setting: dict[str, Any]) -> float:
    """The held-out accuracy, with a proportional batch and the noise of a plan for all records."""
    sigma = noise_of(setting["epsilon"], records, setting["batch"], setting["steps"])
    fewer = setting | {"batch": round(setting["batch"] * rows / records)}
    scaled = sigma * fewer["batch"] / setting["batch"]  # keeps noise / batch, the noise in the mean gradient
    weights, _ = trained(seen[:rows], targets[:rows], classes, fewer, sigma=scaled)
    right = (seen[rows:] @ weights[:-1] + weights[-1]).argmax(1) == targets[rows:]
    return float(right.float().mean())


def value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def options(text: str) -> dict[str, Any]:
    """{key: value} from "key=value,key=value"."""
    return {key: value(given) for key, _, given in (part.partition("=") for part in text.split(",") if part)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--judged", type=int, default=4000)
    parser.add_argument(
        "--maps", nargs="+", default=[], metavar="KEY=VALUE,…", help="changes of the base map; none: the base map"
    )
    parser.add_argument("--base", default="", metavar="KEY=VALUE,…", help="changes of the base map, for every one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    document = json.loads(PATH.read_text(encoding="utf8")) if PATH.exists() else {"trials": {}, "earlier": []}
    inputs, targets, records, classes = some(given.dataset, given.rows, given.judged)
    for word in given.maps or [""]:
        spec = BASE | options(given.base) | options(word)
        label = f"{given.dataset}, {given.rows} rows: {json.dumps(spec)}"
        if label in document["trials"]:
            continue
        started = time.process_time()
        seen = features.build(spec)(inputs).flatten(1)
        document["trials"][label] = {
            "dataset": given.dataset, "rows": given.rows, "judged": given.judged, "features": spec,
            "dimensions": seen.shape[1],
            "held_out_accuracy": {
                f"{s['epsilon']:g}": judge(seen, targets, given.rows, records, classes, s) for s in SETTINGS
            },
            "core_seconds": round(time.process_time() - started, 1),
            "commit": COMMIT,
        }  # fmt: skip
        about = origin(f"python experiments/feature_search.py {given.dataset} …") | {"settings": list(SETTINGS)}
        write_atomically(PATH, (json.dumps({**about, **document}, indent=1, ensure_ascii=False) + "\n").encode())
        print(label, document["trials"][label]["held_out_accuracy"], flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
