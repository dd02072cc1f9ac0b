"""The items of ModelMix (Xiao, Wan & Devadas 2022)."""

from __future__ import annotations

from .row import RESULTS, Row, hours, kept, percent, read

BUILT, TESTED = "src/sordino/methods/modelmix", "tests/methods/modelmix"


def _modelmix(arm: str) -> str:
    rows = [row for row in read("modelmix.json")["table"] if row["arm"] == arm]
    return percent([row["mean"] for row in sorted(rows, key=lambda row: float(row["target_epsilon"]))])


def _appendix_e() -> str:
    rows = read("modelmix_table1.json")["table"]
    return "; ".join(f"{row['arm']} ε = {row['target_epsilon']:g}: {row['mean']:.1f} ({row['seeds']})" for row in rows)


def _shared_minutes(name: str) -> str:
    """How long the runs of a file took, each on a shared core."""
    minutes = [run["seconds"] / 60 for run in read(name)["runs"].values()]
    return f"{min(minutes):.0f} to {max(minutes):.0f} minutes on a shared core"


def _variants(*arms: str) -> str:
    if not (RESULTS / "modelmix_variants.json").exists():
        return "not run yet"
    rows = {row["arm"]: row for row in read("modelmix_variants.json")["table"]}
    found = [f"{arm}: {100 * rows[arm]['mean']:.1f} (ε = {rows[arm]['epsilon']:.2f})" for arm in arms if arm in rows]
    return "; ".join(found) + f"; {max(row['seeds'] for row in rows.values())} seed(s)"


def _transfer() -> str:
    rows = read("modelmix_transfer.json")["table"]
    return "; ".join(f"{r['arm']} ε = {r['target_epsilon']:g}: {100 * r['mean']:.1f} ({r['seeds']})" for r in rows)


def _gep() -> str:
    """The ε of each bound with p = 25, for both readings of τ."""
    rows = [r for r in read("modelmix_gep.json")["table"] if r["p"] > 1]
    return "; ".join(
        f"{tau}: " + ", ".join(f"{r['bound']} {r['epsilon']:.2f}" for r in rows if r["tau"] == tau)
        for tau in dict.fromkeys(r["tau"] for r in rows)
    )


def _fig3_further() -> str:
    lines = read("modelmix_fig3.json")["further"]["lines"]
    return " / ".join(f"{line['classic']:.3g}" for line in lines)


ROWS = (
    Row(
        "Algorithm 1 (mixing)",
        f"{BUILT}/method.py",
        f"{TESTED}/test_mixing.py {TESTED}/test_mixed_training.py",
        "experiments/results/modelmix.json",
        ours=lambda: f"ε = 0.2 / 0.6 / 1: {_modelmix('modelmix')}",
        left="trained in Table 1 below, with its control",
    ),
    Row(
        "Algorithm 2 (l2, then l∞ truncation, p > 1)",
        f"{BUILT}/method.py src/sordino/clipping.py",
        f"{TESTED}/test_modelmix_recipes.py",
        kept("modelmix_variants.json"),
        "–",
        lambda: _variants("p = 1", "p = 25", "p = 100"),
        "Fashion-MNIST, small CNN, 60 steps, ε = 1; truncating coordinates lowers the required noise by 7 % and "
        "takes time: every coordinate of every record is computed",
    ),
    Row(
        "Thm 2.1, 2.2 (composition)",
        "src/sordino/accounting/rdp.py",
        "tests/accounting",
        left="quoted theorems; PLDs are tighter",
    ),
    Row("Thm 3.1 (utility, convex)", left="a statement on utility: nothing to implement; not measured"),
    Row(
        "Example 3.1 (clipping without a condition on the noise)",
        tested="tests/diagnostics/test_threshold.py",
        left="both of its statements hold; its noise breaks Assumption 2.1 as printed: docs/modelmix.md",
    ),
    Row(
        "Thm 3.2, B.1, Lemma B.1 (clipping threshold)",
        "src/sordino/diagnostics/threshold.py",
        "tests/diagnostics/test_threshold.py",
        left="implemented as advice on the clip norm; the bound itself is not measured",
    ),
    Row(
        "Thm 4.1 (accountant)",
        f"{BUILT}/accountant.py {BUILT}/mixture.py",
        f"{TESTED}/test_modelmix_accountant.py",
        left="corrected: docs/guarantees/modelmix.md; the worst case is verified numerically, not proven",
    ),
    Row(
        "Thm 4.2 (asymptotics), Lemmas D.1, D.2",
        tested=f"{TESTED}/test_modelmix_theorems.py",
        left="the accountant's ε depends on ηT/τ alone, as printed; a fourfold τ divides it by 1.84, then 1.56, where "
        "the theorem has 2; its δ exceeds 1 in every setting of Fig. 3",
    ),
    Row(
        "Eqs. (7), (8) (two models in turns)",
        tested=f"{TESTED}/test_modelmix_theorems.py",
        left="Algorithm 1 with the gradient taken one iterate earlier, so the same accountant applies; not "
        "implemented separately",
    ),
    Row(
        "Cor. 4.1 (p > 1)",
        f"{BUILT}/accountant.py",
        f"{TESTED}/test_modelmix_accountant.py",
        left="part of the accountant; its ε for p = 25 and 100 are in the row of Fig. 3d-f below",
    ),
    Row(
        "Remark C.1 (Laplace)",
        f"{BUILT}/accountant.py",
        f"{TESTED}/test_modelmix_accountant.py",
        left="part of the accountant; the paper trains nothing with it, and neither do we",
    ),
    Row("Fig. 1 (illustration)", left="nothing to implement"),
    Row(
        "Fig. 2 (equal noise, with and without mixing)",
        "experiments/modelmix_variants.py",
        "tests/experiments/test_small_items.py",
        kept("modelmix_variants.json"),
        "a figure",
        lambda: _variants("p = 1", "mean of two", "no mixing"),
        "Fashion-MNIST, small CNN, 60 steps, equal Gaussian noise: mixing, the mean of two iterates without mixing's "
        f"noise, and plain descent; the paper's ResNet-20 on CIFAR-10 would take {hours('ModelMix, Table 2, CIFAR')}",
    ),
    Row(
        "Fig. 3a-c (amplification)",
        "experiments/modelmix_fig3.py",
        f"{TESTED}/test_modelmix_accountant.py",
        "experiments/results/modelmix_fig3.json",
        "nine values",
        "within 3 % of each",
        "docs/guarantees/modelmix.md",
    ),
    Row(
        "Fig. 3d-f (q = 0.04)",
        "experiments/modelmix_fig3.py",
        f"{TESTED}/test_modelmix_accountant.py",
        "experiments/results/modelmix_fig3.json",
        "a figure",
        lambda: _fig3_further(),
        left="ε for τ = 0.075, 0.15, 0.3·η and p = 1, 25, 100, the paper's conversion; accounting only",
    ),
    Row(
        "Table 1, Fashion-MNIST, [19], ε = 0.2 / 0.6 / 1",
        "experiments/modelmix.py",
        f"{TESTED}/test_modelmix_recipes.py",
        "experiments/results/modelmix.json",
        "53.4 / 81.5 / 85.6",
        lambda: _modelmix("dpsgd"),
        "ours: 60 steps, batch 4,096, step size tuned on held-out rows",
    ),
    Row(
        "Table 1, Fashion-MNIST, ModelMix",
        "experiments/modelmix.py",
        f"{TESTED}/test_modelmix_recipes.py",
        "experiments/results/modelmix.json",
        "83.9 / 86.1 / 88.8",
        lambda: _modelmix("modelmix"),
        "its averaging control at the same ε is as accurate; there is no gain over DP-SGD",
    ),
    Row(
        "Table 1, Fashion-MNIST, the 800 steps of Appendix E",
        "experiments/modelmix_table1.py",
        "tests/experiments/test_small_items.py",
        "experiments/results/modelmix_table1.json",
        "DP-SGD 53.4 / 74.0 / 81.5 / 84.5 / 85.6, ModelMix 83.9 / 85.7 / 86.1 / 87.9 / 88.8",
        _appendix_e,
        "ε = 0.2, 0.4, 0.6, 0.8, 1 in the paper; its own settings, nothing tuned; one seed, because a run takes "
        + _shared_minutes("modelmix_table1.json"),
    ),
    Row(
        "Table 1, CIFAR-10",
        "experiments/recipes/modelmix_table1_cifar10.toml",
        f"{TESTED}/test_modelmix_recipes.py",
        published="58.5 … 68.3",
        left=f"not run: {hours('ModelMix, Table 1, CIFAR')}, 15 runs with the control at all five ε; the recipe's "
        "first steps run in the tests",
    ),
    Row(
        "Table 2 (ResNet-20)",
        "experiments/recipes/modelmix_table2_cifar10.toml experiments/recipes/modelmix_table2_svhn.toml",
        f"{TESTED}/test_modelmix_recipes.py",
        published="59.8 … 70.4; 78.2 … 90.1",
        left=f"not run: {hours('ModelMix, Table 2, CIFAR')}; SVHN is not on this machine; the recipes' first steps "
        "run in the tests",
    ),
    Row(
        "Table 3 (ε for a given accuracy)",
        published="4.7 … 9.2",
        left="follows from Table 2's runs, which are too long here",
    ),
    Row(
        "Section 5.3 (transfer, ε = 2)",
        "experiments/modelmix_transfer.py",
        "tests/experiments/test_transfer.py",
        "experiments/results/modelmix_transfer.json",
        "DP-SGD 92.7, ModelMix 93.6",
        lambda: _transfer(),
        "its own settings, nothing tuned; EfficientNet-Lite0's features (86.6 % without privacy) instead of SimCLR's "
        "(94.3 %), which are not on this machine; DP-SGD is ahead at both ε, and the control is not behind ModelMix",
    ),
    Row(
        "Section 5.3 (GEP: a public embedding of gradients)",
        "experiments/modelmix_gep.py",
        "tests/experiments/test_modelmix_gep.py",
        "experiments/results/modelmix_gep.json",
        "74.2 (ε = 2.9)",
        lambda: _gep(),
        "ε only, proved in docs/guarantees/modelmix.md; the paper states its ε without a proof. Not trained: "
        f"{hours('ModelMix, section 5.3')}, and Gaussian noise of equal variance has the smaller ε",
    ),
)
