"""The items of Clipping bias (Xiao, Xiang, Wang & Devadas 2023)."""

from __future__ import annotations

from .row import RESULTS, Row, hours, kept, read

INSTRUMENTS, T_INSTRUMENTS = "src/sordino/diagnostics/instruments", "tests/diagnostics/instruments"

INNER = ("enhanced + inner-outer momentum", "enhanced + inner-outer momentum, γ₀ = 0.3")


def _bias(part: str, column: str) -> str:
    rows = [r for r in read(f"clipping_bias_{part}.json")["table"] if r["column"] == column]
    return "; ".join(f"ε = {r['target_epsilon']:g}: {100 * r['mean']:.1f}" for r in rows)


def _size(part: str) -> str:
    """Records, steps and batch of the runs of a part."""
    document = read(f"clipping_bias_{part}.json")
    run = next(r for r in document["runs"].values() if not r["held_out"])
    return f"{run['records']:,} records, {run['steps']} steps of {document['expected_batch']}"


def _views() -> str:
    """What is known of self-augmentation, by the number of views."""
    names = [f"+ self-augmentation {k}" for k in ("4", "8", "16", "4, erase", "4, mixup")]
    cifar = _columns("cifar10_8000", "enhanced + self-augmentation 4", "enhanced") + ", on 8,000 records"
    return f"Fashion-MNIST, ε = 3: {_columns('fashion_mnist', *names)}; CIFAR-10, ε = 8: {cifar}"


def _noise() -> str:
    """τ²/‖∇F‖² of the original and of the enhanced network at the first ε."""
    found = []
    for part, name in (("cifar10", "CIFAR-10"), ("imdb", "IMDb")):
        rows = read(f"clipping_bias_{part}.json")["table"]
        first = {r["column"]: r["relative_noise"] for r in reversed(rows)}
        found.append(f"{name}: {first['original']:.0f} → {first['enhanced']:.0f}")
    return "; ".join(found)


def _columns(part: str, *columns: str) -> str:
    """Columns at the first ε of the file."""
    rows = {r["column"]: r for r in reversed(read(f"clipping_bias_{part}.json")["table"])}
    found = [f"{name}: {100 * rows[name]['mean']:.1f} ({rows[name]['seeds']})" for name in columns if name in rows]
    return "; ".join(found) or "not run yet"


def _small(part: str) -> str:
    if not (RESULTS / "bias_small.json").exists():
        return "not run yet"
    rows = [r for r in read("bias_small.json")["table"] if r["column"].startswith(part)]
    return "; ".join(f"{r['column'].partition(', ')[2]}: {100 * r['mean']:.1f} ({r['seeds']})" for r in rows)


ROWS = (
    Row(
        "Thm 2.1, 2.2 (composition)",
        "src/sordino/accounting/rdp.py",
        "tests/accounting",
        left="quoted theorems; PLDs are tighter",
    ),
    Row(
        "Thm 3.1, 3.2 (bias of clipped DP-SGD)",
        f"{INSTRUMENTS}/theory.py",
        f"{T_INSTRUMENTS}/test_theory.py",
        left="errors in the printed version: docs/clipping_bias_theory.md",
    ),
    Row(
        "Thm 4.1 (momentum of single records)",
        tested="tests/records/test_momentum_theorem.py",
        left="(28) to (30) hold with their constants on least squares; the last term of (12) falls as T^(-1/4) for "
        "independent noise and not at all for identical noise, as printed",
    ),
    Row(
        "Algorithm 1 (DP-GD with momentum)",
        "src/sordino/records/momentum.py",
        "tests/records/test_momentum.py",
        kept("bias_small.json"),
        ours=lambda: _small("records"),
        left="3,000 images, softmax layer on pixels, full batches, ε = 3; kept = 0 is DP-GD",
    ),
    Row(
        "Algorithm 2 (inner-outer momentum)",
        "src/sordino/records/momentum.py",
        "tests/records/test_momentum.py",
        "experiments/results/clipping_bias_cifar10.json experiments/results/clipping_bias_fashion_mnist.json",
        ours=lambda: (
            f"CIFAR-10, ε = 8: {_columns('cifar10', *INNER, 'enhanced')}; Fashion-MNIST, ε = 3: "
            f"{_columns('fashion_mnist', '+ inner-outer momentum', '+ inner-outer momentum, γ₀ = 0.3', 'base')}"
        ),
        left="it loses, with a step size of its own too: docs/clipping_bias.md",
    ),
    Row(
        "Algorithm 3 (BatchClipping)",
        "src/sordino/records/companions.py",
        "tests/records/test_batchclipping.py",
        "experiments/results/clipping_bias_cifar10_8000.json",
        ours=lambda: (
            f"CIFAR-10, {_bias('cifar10_8000', 'BatchClipping')} (GroupNorm {_bias('cifar10_8000', 'original')})"
        ),
        left=f"ResNet-8, {_size('cifar10_8000')}, 100 public images, 3 companions of each record",
    ),
    Row("Algorithm 4 (BatchNorm)", left="quoted"),
    Row(
        "Figs. 1, 3, 5a, 7 (instruments)",
        f"{INSTRUMENTS}/reading.py experiments/instruments_figures.py",
        f"{T_INSTRUMENTS}/test_reading.py",
        "experiments/results/instruments.json",
        left="on a small CNN; Fig. 5a is not reproduced",
    ),
    Row(
        "Fig. 2 (ResNet-32 on CIFAR-100)",
        tested="tests/data/test_images_readers.py",
        left="not run: CIFAR-100 is not on this machine (its reader is tested on files of the true layout), and "
        f"{hours('Clipping bias, Fig. 2')}",
    ),
    Row(
        "Fig. 4 (p-averaged DP-SGD)",
        f"{INSTRUMENTS}/signal.py",
        f"{T_INSTRUMENTS}/test_p_averaging.py",
        kept("bias_small.json"),
        "a figure",
        lambda: _small("fig4b"),
        "4b: equal ε = 4, a small CNN; refused as a private method because its sensitivity grows with p; 4a (larger "
        "ResNets at one noise) is not run",
    ),
    Row(
        "Fig. 5b (with and without momentum)",
        "experiments/clipping_bias.py",
        "tests/experiments/test_clipping_bias_recipes.py",
        "experiments/results/clipping_bias_fashion_mnist.json",
        "a figure",
        lambda: _columns("fashion_mnist", "base, no momentum", "base", "+ inner-outer momentum, γ₀ = 0.3"),
        "Fashion-MNIST, small CNN, ε = 3, each with its own step size; outer momentum 0.9 where the paper has 0.6",
    ),
    Row(
        "Fig. 6 (enhanced network: sampling noise, convergence)",
        "src/sordino/nets/resnet.py experiments/clipping_bias_page.py",
        "tests/nets/test_resnet.py tests/experiments/test_clipping_bias_recipes.py",
        "experiments/results/clipping_bias_cifar10.json experiments/results/clipping_bias_imdb.json",
        "τ² about one half",
        lambda: _noise(),
        "τ²/‖∇F‖² at the end of private runs: not lower here; docs/figures/clipping_bias_*.svg; the paper has clipped "
        "SGD without noise, ResNet-20 and 60 epochs. τ² itself does not compare networks of different scale",
    ),
    Row(
        "Fig. 8 (groups with BatchNorm, without noise)",
        f"{INSTRUMENTS}/signal.py",
        f"{T_INSTRUMENTS}/test_p_averaging.py",
        published="a figure",
        left="not run: a network with BatchNorm over a group of p private records is no private method (each record "
        "moves the gradients of the others) and is refused; what averaging p gradients does is in the row of Fig. 4",
    ),
    Row(
        "Fig. 9 (BatchClipping without noise)",
        "src/sordino/records/companions.py",
        "tests/records/test_batchclipping.py",
        "experiments/results/clipping_bias_cifar10_8000.json",
        ours=lambda: _columns("cifar10_8000", "BatchClipping"),
        left="8,000 records, with noise, 100 public images and 3 companions, ResNet-8; the curves without noise are "
        "not drawn; 100 companions for each record would make a step 101 times as long",
    ),
    Row(
        "Fig. 10 (scattering)",
        "experiments/clipping_bias.py",
        "tests/experiments/test_clipping_bias_recipes.py",
        "experiments/results/clipping_bias_fashion_mnist.json experiments/results/clipping_bias_cifar10.json",
        ours=lambda: (
            f"Fashion-MNIST, {_bias('fashion_mnist', '+ scattering')}; CIFAR-10, "
            f"{_columns('cifar10', 'small CNN on scattering', 'enhanced')}"
        ),
        left=f"Fashion-MNIST: {_size('fashion_mnist')}, ε = 3; CIFAR-10: {_size('cifar10')}, ε = 8, beside the "
        "enhanced ResNet-8",
    ),
    Row(
        "Fig. 11 (self-augmentation)",
        "src/sordino/records/views.py",
        "tests/records/test_views.py",
        "experiments/results/clipping_bias_fashion_mnist.json experiments/results/clipping_bias_cifar10_8000.json",
        ours=lambda: _views(),
        left="a small CNN and ResNet-8; views that are not named were not run: K views take K times the base's "
        "time, on ResNet-8 16 and 32 core-minutes for K = 8 and 16",
    ),
    Row(
        "Table 1, CIFAR-10, 8 and 16 views (ε = 8)",
        "experiments/clipping_bias.py",
        "tests/experiments/test_clipping_bias_recipes.py",
        "experiments/results/clipping_bias_cifar10_8000.json",
        "74.9; 76.0",
        lambda: _columns("cifar10_8000", "enhanced + self-augmentation 4", "enhanced"),
        "four views, on ResNet-8 and 8,000 records; 8 and 16 times the cost of the row below at the paper's size",
    ),
    Row(
        "Table 1, CIFAR-10 (ε = 4 / 8)",
        "experiments/clipping_bias.py",
        "tests/experiments/test_clipping_bias_recipes.py",
        "experiments/results/clipping_bias_cifar10.json",
        "71.5 / 74.5",
        lambda: _bias("cifar10", "enhanced"),
        f"ResNet-8, {_size('cifar10')}, three seeds at ε = 8; without inner momentum, which loses; "
        "the paper's ResNet-20, 50,000 records, 60 epochs: "
        f"{hours('Clipping bias, Table 1')}",
    ),
    Row(
        "Table 1, IMDb (ε = 4 / 8)",
        "experiments/clipping_bias.py",
        "tests/experiments/test_clipping_bias_recipes.py",
        "experiments/results/clipping_bias_imdb.json",
        "77.5 / 79.2",
        lambda: _bias("imdb", "enhanced"),
        "5 epochs",
    ),
    Row(
        "Table 2, CIFAR-10 (ε = 4 / 8)",
        "experiments/clipping_bias.py",
        "tests/experiments/test_clipping_bias_recipes.py",
        "experiments/results/clipping_bias_cifar10.json",
        "51.3 / 61.2",
        lambda: _bias("cifar10", "original"),
        f"as Table 1; {hours('Clipping bias, Table 2')}",
    ),
    Row(
        "Table 2, IMDb (ε = 4 / 8)",
        "experiments/clipping_bias.py",
        "tests/experiments/test_clipping_bias_recipes.py",
        "experiments/results/clipping_bias_imdb.json",
        "69.6 / 73.5",
        lambda: _bias("imdb", "original"),
        "5 epochs",
    ),
    Row(
        "Tables 1, 2, SVHN",
        "experiments/recipes/bias_table1_svhn.toml",
        "tests/data/test_images_readers.py",
        published="88.6 (8 and 16 views: 90.1); 85.3",
        left="not run: SVHN is not on this machine (its reader is tested on files of the true layout)",
    ),
)
