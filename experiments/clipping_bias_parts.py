"""The parts of experiments/clipping_bias.py: their rows, their columns and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sordino import data, features
from sordino.clipping import Clipping, FlatClip
from sordino.data import Split
from sordino.data.glove import VectorTokenizer, read_glove, standardised
from sordino.plan.contribution import Augmentation
from sordino.plan.public import drop_shared_rows

OUTER = 0.9
INNER_LENGTH, INNER_DECAY = 2, 0.08  # the paper's K₀ and γ₀


@dataclass(frozen=True)
class Column:
    """One way to train. `lr_of`: the column whose step size it uses if it is not tuned itself."""

    model: Mapping[str, Any]
    inner: float = 0.0  # γ₀; 0: no inner momentum
    outer: float = OUTER  # the factor of the outer momentum
    augmentation: Augmentation | None = None
    average: bool = True
    scattering: bool = False
    companions: int = 0
    centred: bool = False  # word vectors are standardised by public constants before the network
    lr_of: str | None = None


@dataclass(frozen=True)
class Part:
    """An experiment: data, sizes, and its columns in the order in which they run."""

    title: str
    rows: Callable[[Column, bool], Rows]
    columns: Mapping[str, Column]
    epsilons: tuple[float, ...]
    tuned_at: float
    expected_batch: int
    length: Mapping[str, float]  # {"epochs": …} or {"steps": …}
    first_lr: float
    watched: int  # the number of public rows of a reading
    clipping: Clipping
    chunk: int = 256
    notes: str = ""


@dataclass(frozen=True)
class Rows:
    train: Split
    test: Split
    classes: int
    vectors: Tensor | None = None
    public: Split | None = None  # companions


# the data


def shuffled(split: Split) -> Split:
    """The rows in an order drawn with a public seed, so that "the first n rows" are a random sample."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    return Split(split.inputs[order], split.targets[order])


def part_of(split: Split, start: int, stop: int) -> Split:
    return Split(split.inputs[start:stop], split.targets[start:stop])


LENGTH, KEEP = 64, "end"


@cache
def reviews() -> tuple[Split, Split, Tensor, Tensor]:
    words = read_glove(data.data_directory())
    cut = VectorTokenizer(words, LENGTH, KEEP)  # type: ignore[arg-type]
    train_texts, test_texts = data.load_texts("imdb")
    sides = [Split(cut(side.texts), side.targets) for side in (train_texts, test_texts)]
    return shuffled(sides[0]), shuffled(sides[1]), words.table, standardised(words).table


def imdb(column: Column, held_out: bool) -> Rows:
    train_rows, test_rows, published, centred = reviews()
    vectors = centred if column.centred else published
    if held_out:
        return Rows(part_of(train_rows, 2500, 25_000), part_of(train_rows, 0, 2500), 2, vectors)
    return Rows(train_rows, test_rows, 2, vectors)


@cache
def images(name: str, scattering: bool = False) -> tuple[Split, Split]:
    found = data.load(name)
    sides = [found.train, found.test]
    if scattering:
        extract = features.build({"name": "scattering", "normalise": "group", "groups": 27})
        folder = features.default_folder()
        sides = [Split(extract.cached(side.inputs, folder), side.targets) for side in sides]
    return shuffled(sides[0]), shuffled(sides[1])


def of_images(name: str, records: int, held: int, public: int, column: Column, held_out: bool) -> Rows:
    """The first `records` rows; held-out and public rows come after them. Private copies of public rows are removed."""
    train_rows, test_rows = images(name, column.scattering)
    mine, others = part_of(train_rows, 0, records), part_of(train_rows, records, records + held)
    if column.companions:
        shared = part_of(train_rows, records + held, records + held + public)
        mine = drop_shared_rows(shared, mine)
        return Rows(mine, others if held_out else part_of(test_rows, 0, 2000), 10, public=shared)
    return Rows(mine, others if held_out else test_rows, 10)


# the columns


def text_columns() -> dict[str, Column]:
    plain, better = ({"name": "gru", "form": form} for form in ("original", "enhanced"))
    return {
        "original": Column(plain),
        "enhanced": Column(better, centred=True),
        "standardised projections only": Column(better),
        "standardised vectors only": Column(plain, centred=True),
        "original + inner momentum": Column(plain, inner=INNER_DECAY, lr_of="original"),
        "enhanced + inner momentum": Column(better, inner=INNER_DECAY, centred=True, lr_of="enhanced"),
        "enhanced + word dropout": Column(
            better, centred=True, augmentation=Augmentation(views=2, word_dropout=0.1), lr_of="enhanced"
        ),
    }


VIEWS, FOUR_VIEWS = Augmentation(views=4, crop=4, flip=True), "enhanced + self-augmentation 4"


def image_columns() -> dict[str, Column]:
    nets_of = {form: {"name": "resnet", "depth": 8, "form": form} for form in ("original", "enhanced", "batch")}
    better = Column(nets_of["enhanced"])
    return {
        "original": Column(nets_of["original"]),
        "enhanced": better,
        "enhanced + inner-outer momentum": replace(better, inner=INNER_DECAY),
        "enhanced + inner-outer momentum, γ₀ = 0.3": replace(better, inner=0.3),
        FOUR_VIEWS: replace(better, augmentation=VIEWS),
        "enhanced + self-augmentation 8": replace(better, augmentation=replace(VIEWS, views=8), lr_of=FOUR_VIEWS),
        "enhanced + self-augmentation 16": replace(better, augmentation=replace(VIEWS, views=16), lr_of=FOUR_VIEWS),
        "small CNN on scattering": Column({"name": "scatter-cnn-cifar"}, scattering=True),
        "BatchClipping": Column(nets_of["batch"], companions=3),
        "WRN-16-4": Column({"name": "wide-resnet", "depth": 16, "width": 4}, lr_of="enhanced"),
    }


def ablation() -> dict[str, Column]:
    base = Column({"name": "mnist-cnn"}, average=False)
    better, shifted = {"name": "mnist-cnn", "form": "enhanced"}, Augmentation(views=4, crop=2, flip=True)
    scattered = replace(base, model={"name": "scatter-cnn"}, scattering=True)
    four = "+ self-augmentation 4"  # columns with more views use its step size
    return {
        "base": base,
        "base, no momentum": replace(base, outer=0.0),
        "+ EMA": replace(base, average=True),
        "+ enhanced normalisation": replace(base, model=better),
        "+ inner-outer momentum": replace(base, inner=INNER_DECAY),
        "+ inner-outer momentum, γ₀ = 0.3": replace(base, inner=0.3),
        "+ self-augmentation 4": replace(base, augmentation=shifted),
        "+ self-augmentation 8": replace(base, augmentation=replace(shifted, views=8), lr_of=four),
        "+ self-augmentation 16": replace(base, augmentation=replace(shifted, views=16), lr_of=four),
        "+ self-augmentation 4, erase": replace(base, augmentation=replace(shifted, erase=0.5), lr_of=four),
        "+ self-augmentation 4, mixup": replace(base, augmentation=replace(shifted, mixup=0.5), lr_of=four),
        "+ scattering": scattered,
        "EMA + enhanced": replace(base, model=better, average=True),
        "EMA + scattering": replace(scattered, average=True),
        "EMA + scattering + inner-outer": replace(scattered, average=True, inner=INNER_DECAY),
        "all but scattering": replace(
            base, model=better, average=True, inner=INNER_DECAY, augmentation=shifted, lr_of="EMA + enhanced"
        ),
    }


PARTS: dict[str, Part] = {
    "imdb": Part(
        f"IMDb, GloVe-50d, the last {LENGTH} known words that are not among the most frequent", imdb,
        text_columns(), (4.0, 8.0, 1.0, 2.0), 4.0, 2000,
        length={"epochs": 5}, first_lr=1.0, watched=256, clipping=FlatClip(5.0),
        notes="c = 5 as in the paper; GRU of 64, classifier on its last state; enhanced: gate projections and word "
        "vectors standardised, the latter by public constants; EMA of weights 0.9, step sizes linearly to zero",
    ),
    "cifar10": Part(
        "CIFAR-10, ResNet-8", partial(of_images, "cifar10", 47_900, 2000, 100), image_columns(),
        (8.0, 4.0, 2.0, 1.0), 8.0, 500, length={"steps": 80}, first_lr=0.2, watched=128, clipping=FlatClip(5.0),
        notes="c = 5 as in the paper; EMA of weights 0.9, step sizes linearly to zero; BatchClipping: 100 public "
        "images, 3 companions per record, majority of 10 draws on 2,000 test images; the others on all 10,000",
    ),
    "fashion_mnist": Part(
        "Fashion-MNIST, small CNN", partial(of_images, "fashion-mnist", 56_000, 4000, 0), ablation(),
        (3.0,), 3.0, 500, length={"steps": 80}, first_lr=1.0, watched=256, clipping=FlatClip(1.0),
        notes="c = 1; step sizes linearly to zero; scattering maps are not augmented: a view is one of the image, not "
        "of its maps",
    ),
}  # fmt: skip
