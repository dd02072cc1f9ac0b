"""The mutants: each a fault that somebody could make, as changes (file, old text, new text) of our own source."""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    """One fault, and the recipe whose pipeline runs through it."""

    name: str
    recipe: str
    edits: tuple[Edit, ...]
    only: tuple[str, ...] = ()  # checks that are run; all where it is empty


DOOR, STEPS, SAMPLING = "release/door.py", "training/steps.py", "sampling.py"
SCALE = "    scale *= 1 + 2.0**-40"
_DRAWN = "    return _shaped(values, kinds, _with_noise(parts, noise, lattice, stream, fine, factor))"
_SPENT = "    if spent and own:"


def _noise(code: str) -> tuple[Edit, ...]:
    """Gaussian noise made otherwise: `z` from n, `out` from value, z, spacing and scale."""
    body = (
        "    v = torch.from_numpy(parts.joined()).double()\n    n, g, s = len(v), lattice.spacing, lattice.scale\n"
        f"    {code}\n    return _shaped(values, kinds, (out * factor).to(list(values.values())[0].dtype))"
    )
    return ((DOOR, _SPENT, "    if False:"), (DOOR, _DRAWN, body))


_ROUNDED = "out = ((v / g + s * z).round() * g)"

MUTANTS = (
    Mutant("noise halved", "dpsgd", ((DOOR, SCALE, "    scale *= 0.5"),)),
    Mutant("noise × 0.9", "dpsgd", ((DOOR, SCALE, "    scale *= 0.9"),)),
    Mutant("noise × 0.9, Laplace", "laplace", ((DOOR, SCALE, "    scale *= 0.9"),)),
    Mutant(
        "the same noise in every step", "dpsgd",
        (("randomness/source.py", 'name = f"{index}:{purpose}".encode()',
          'name = f"{0 if purpose.startswith(\'release/\') else index}:{purpose.split(\'/\')[0]}".encode()'),),
    ),
    Mutant(
        "the same noise in every run", "dpsgd",
        (("randomness/source.py", 'keys = hashlib.blake2b(name, digest_size=64, key=self._key,',
          'keys = hashlib.blake2b(name.split(b"/")[0] if b"release" in name else name, digest_size=64, '
          'key=b"k" if b"release" in name else self._key,'),),
    ),
    Mutant("half the noise carried over to the next step", "dpsgd", _noise(
        "z = torch.randn(n); old = _carried.get(n); _carried[n] = z; "
        "z = z if old is None else 0.8 * z + 0.6 * old; " + _ROUNDED) + ((DOOR, "_RELATIONS = (", "_carried: dict[int, Tensor] = {}\n_RELATIONS = ("),)),
    Mutant("noise shared by pairs of coordinates", "dpsgd", _noise(
        "z = torch.randn(n // 2 + 1).repeat_interleave(2)[:n]; " + _ROUNDED)),
    Mutant("noise shared by two halves of the vector", "dpsgd", _noise(
        "z = torch.randn(n // 2 + 1).repeat(2)[:n]; " + _ROUNDED)),
    Mutant("a part of the noise common to all coordinates", "dpsgd", _noise(
        "z = 0.99 * torch.randn(n) + 0.14 * torch.randn(1); " + _ROUNDED)),
    Mutant("noise cut off at 2σ", "dpsgd", _noise("z = torch.randn(n).clamp(-2, 2); " + _ROUNDED)),
    Mutant("float32 noise without a grid", "dpsgd", _noise("out = v.float() + (g * s * torch.randn(n)).float()")),
    Mutant("one parameter without noise", "dpsgd", (
        (STEPS, "        noisy = release(", "        kept = {n: v.clone() for n, v in sums.items()}\n        noisy = release("),
        (STEPS, "        yield PrivateStep(batch.step, noisy)",
         "        last = list(noisy)[-1]\n        noisy[last] = (kept[last] / plan.divisor).to(noisy[last].dtype)\n"
         "        yield PrivateStep(batch.step, noisy)"),
    )),
    Mutant("the entry after the noise", "dpsgd", (
        (DOOR, "    ledger.record(\n        {", "    late = dict(\n        {"),
        (DOOR, "    if spent and own:\n", "    ledger.record(late) if not spent else None\n    if spent and own:\n"),
        (DOOR, "        return dict(values)\n", "        ledger.record(late)\n        return dict(values)\n"),
    )),
    Mutant("one record is always drawn", "dpsgd", (
        (SAMPLING, "    chosen = np.concatenate(parts).astype(np.int64, copy=False)",
         "    chosen = np.union1d(np.concatenate(parts), [0]).astype(np.int64, copy=False)"),)),
    Mutant("one record is added behind the sampler", "dpsgd", (
        (STEPS, "        sums = dict(summed(gradient_sum, batch, source).sums)",
         "        batch = LogicalBatch(batch.step, torch.unique(torch.cat([batch.indices, torch.tensor([0])])), batch.chunk)\n"
         "        sums = dict(summed(gradient_sum, batch, source).sums)"),)),
    Mutant("fixed-size batches called Poisson", "dpsgd", (
        (SAMPLING, "    stream = source.stream(\"sampling\", step)\n",
         "    stream = source.stream(\"sampling\", step)\n    return stream.subset(records, round(rate * records))\n"),)),
    Mutant("the rate doubled", "dpsgd", ((SAMPLING, "stream.bernoulli(rate, min(", "stream.bernoulli(min(1.0, 2 * rate), min("),)),
    Mutant("the same batch in two successive steps", "dpsgd", (
        (SAMPLING, "    stream = source.stream(\"sampling\", step)\n", "    stream = source.stream(\"sampling\", step // 2)\n"),)),
    Mutant("a new shuffle in every epoch called a partition", "partition", (
        (SAMPLING, "    return lambda t: np.sort(order[(t % count) * batch : (t % count + 1) * batch])",
         "    return lambda t: np.sort(source.stream(\"partition\", t // count).permutation(records)"
         "[(t % count) * batch : (t % count + 1) * batch])"),)),
    Mutant("the divisor taken from the batch", "dpsgd", ((STEPS, "factor=1.0 / plan.divisor", "factor=1.0 / max(1, len(batch))"),)),
    Mutant("clipping after the sum", "dpsgd", (
        ("records/gradients.py", "self.model, self.loss, rows, self.clipping, iterates=iterates, pool=self.pool,",
         "self.model, self.loss, rows, type(self.clipping)(1e9), iterates=iterates, pool=self.pool,"),
        ("records/gradients.py", "            total = add_sums(total, part)\n        return total",
         "            total = add_sums(total, part)\n"
         "        size = sum(float(v.double().square().sum()) for v in total.sums.values()) ** 0.5\n"
         "        few = min(1.0, self.clipping.clip_norm / max(size, 1e-30))\n"
         "        return ClippedSum({n: v * few for n, v in total.sums.items()}, total.norms, total.dropped, total.losses)"),
    )),
    Mutant("bounds of layers × 1.1", "per-layer", (("gradients/engine.py", "factor = FlatClip(bound).factors(", "factor = FlatClip(1.1 * bound).factors("),)),
    Mutant("one parameter left unclipped", "dpsgd", (
        ("gradients/engine.py", "            gradient.add_to(total, factor)\n",
         "            gradient.add_to(total, torch.ones_like(factor) if name.endswith(\"bias\") else factor)\n"),)),
    Mutant("rows that are not finite are kept", "dpsgd", (("gradients/engine.py", "            gradient.drop(bad)", "            pass"),)),
    Mutant("replace-one accounted as add/remove", "partition", (
        ("accounting/account.py", "    shift = 1.0 if relation == \"add-remove\" else 2.0\n    precision", "    shift = 1.0\n    precision"),)),
    Mutant("views clipped apart", "views", (
        ("records/views.py", "record=owner.repeat_interleave(k),", "record=torch.arange(n * k),"),
        ("records/views.py", "records=n if rows.record is None else rows.records,\n        coefficient=(weight / k)", "records=n * k,\n        coefficient=(weight / k)"),
    )),
    Mutant("momentum that is not clipped", "record-momentum", (
        ("records/momentum.py", "add_clipped(moved, self.clipping,", "add_clipped(moved, type(self.clipping)(1e6),"),), ("neighbours",)),
    Mutant("iterates clipped apart", "inner-momentum", (
        ("records/gradients.py", "            part = clipped_sum(\n                self.model, self.loss, rows, self.clipping, iterates=iterates, pool=self.pool,\n                assurance=self.assurance, keys=keys,\n            )  # fmt: skip\n            total = add_sums(total, part)",
         "            for one in iterates or [None]:\n"
         "                part = clipped_sum(self.model, self.loss, rows, self.clipping, iterates=None if one is None else [(one[0], 1.0)])\n"
         "                total = add_sums(total, part)"),)),
    Mutant("companions from the private rows", "companions", (
        ("runs/prepared.py", "return companion_model(net, self.public,", "return companion_model(net, self.dataset.train,"),), ("outputs",)),
    Mutant("mixing without randomness", "modelmix", ((DOOR, "width * (drawn - 0.5)", "0.0 * width * (drawn - 0.5)"),)),
    Mutant("the gap between iterates not enforced", "modelmix", (
        ("methods/modelmix/widths.py", ".clamp_min_(least)", ".clamp_min_(0.0)"),)),
    Mutant("a regulariser that is declared and not used", "hidden-state", (
        ("methods/hidden_state/training.py", "(1.0 - size * method.regularisation)", "(1.0 - size * 0.0)"),)),
    Mutant("tiny rows not scaled before they are squared", "hidden-state", (
        ("clipping.py", "    scaled = rows / torch.where(largest == 0, 1.0, largest)", "    scaled = rows"),)),
    Mutant("a layer forgotten in DP-MAC's bound", "dp-mac", (
        ("methods/dp_mac/coefficients.py", "            sums[name] = _part_sum(finite, part, expansion, factors)",
         "            factors = factors if k else torch.full_like(factors, share[name] / bounds[name])\n"
         "            sums[name] = _part_sum(finite, part, expansion, factors)"),)),
    Mutant("DP-PCA on rows of any length", "dp-mac", (
        ("methods/dp_mac/pca.py", "    return in_unit_ball(inputs, scale).float()", "    return inputs.flatten(1).float()"),)),
    Mutant("half the sensitivity of a statistic", "statistics", (
        ("features/private.py", "sensitivity=settings.bound * (1 + ROUNDING_MARGIN),", "sensitivity=settings.bound / 2,"),)),
    Mutant("a histogram handed out without its noise", "statistics", (
        ("training/histogram.py", "shares=(noisy / expected).tolist(),", "shares=(counts / expected).tolist(),"),)),
    Mutant("metrics measured on private records", "dpsgd", (
        ("runs/prepared.py", "return partial(test_metrics, split=self.dataset.test,", "return partial(test_metrics, split=self.dataset.train,"),)),
    Mutant("a resumed run makes its steps again", "dpsgd", (
        ("training/fit.py", "start = state.step if not source.secure else max(state.step, done)", "start = state.step"),)),
    Mutant("public rows replaced by private ones", "coupling", (
        ("runs/prepared.py", "        public = method_of(self.recipe).public_use(self.recipe, self.public)\n        return {\"optimizer\"",
         "        public = method_of(self.recipe).public_use(self.recipe, data.Split(self.dataset.train.inputs[:200], self.dataset.train.targets[:200]))\n        return {\"optimizer\""),)),
)  # fmt: skip
