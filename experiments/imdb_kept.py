"""Which words of a review the recurrent networks of clipping_bias.py read; one JSON file, a minute, no privacy.

    python experiments/imdb_kept.py

A logistic regression (L-BFGS, no noise) on the mean GloVe vector of the words that are kept, standardised by public
constants: trained on 10,000 training reviews, evaluated on 2,500 others of the training split. Test reviews are not
read. Each accuracy is from one run and has a standard error of 0.9 points. `shared` is the length of the mean of all
reviews' vectors divided by their root mean squared distance from it, for published and for standardised vectors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipping_bias_parts import shuffled
from provenance import origin
from sordino import data
from sordino.data import Split
from sordino.data.glove import FREQUENT, VectorTokenizer, read_glove, standardised
from sordino.files import write_atomically

TARGET = Path(__file__).parent / "results" / "imdb_kept.json"
HELD_OUT, TRAINED = 2500, 10_000
KEPT = (("end", 64, 0), ("end", 64, FREQUENT), ("start", 64, 0), ("start", 64, FREQUENT), ("end", 256, FREQUENT))


def means(ids: Tensor, table: Tensor) -> Tensor:
    """The mean vector of each text over its words (not its padding); zero for a text without words."""
    known = (ids != 0).sum(1, keepdim=True).clamp_min(1)
    return table[ids].sum(1) / known


def accuracy(rows: Split, others: Split) -> float:
    """The accuracy on `others` of a logistic regression on `rows`."""
    layer = nn.Linear(rows.inputs.shape[1], 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(layer(rows.inputs), rows.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return float((layer(others.inputs).argmax(1) == others.targets).float().mean())


def shared(vectors: Tensor) -> float:
    """The length of the mean divided by the root mean squared distance from it."""
    mean = vectors.mean(0)
    return float(mean.norm() / (vectors - mean).square().sum(1).mean().sqrt())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET)
    target = parser.parse_args().out
    words = read_glove(data.data_directory())
    reviews, _ = data.load_texts("imdb")
    order = shuffled(Split(torch.arange(len(reviews.targets)), reviews.targets))
    chosen = [reviews.texts[int(at)] for at in order.inputs[: HELD_OUT + TRAINED]]
    targets, centred, rows, ratios = order.targets, standardised(words).table, [], {}
    for keep, length, frequent in KEPT:
        ids = VectorTokenizer(words, length, keep, frequent)(chosen)  # type: ignore[arg-type]
        vectors = means(ids, centred)
        held = Split(vectors[:HELD_OUT], targets[:HELD_OUT])
        trained = Split(vectors[HELD_OUT:], targets[HELD_OUT : HELD_OUT + TRAINED])
        row: dict[str, Any] = {"keep": keep, "words": length, "without_most_frequent": frequent}
        rows.append(row | {"accuracy": accuracy(trained, held)})
        if (keep, length, frequent) == ("end", 64, FREQUENT):
            ratios = {"published": shared(means(ids, words.table)), "standardised": shared(vectors)}
    document = {
        **origin("python experiments/imdb_kept.py"), "trained": TRAINED, "held_out": HELD_OUT, "rows": rows,
        "shared": ratios,
    }  # fmt: skip
    write_atomically(target, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
