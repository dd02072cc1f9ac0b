"""The contract of clipped_sum: records, coefficients, iterates, chunks, bad records, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import RECORD, Fn, agree, noise, squared
from sordino.clipping import AutomaticClip, Clipping, FlatClip, L1Clip, L2LinfClip, NormalisedClip, PerLayerClip
from sordino.errors import InputError, Refused
from sordino.gradients import Rows, brute_force, clipped_sum, fix
from sordino.gradients.chunk_sizes import default_chunk
from sordino.gradients.layers import fallback
from sordino.gradients.survey import survey

CLIPPINGS: list[Clipping] = [
    FlatClip(1.0),
    AutomaticClip(),
    NormalisedClip(0.5),
    PerLayerClip(1.0, "equal"),
    PerLayerClip(1.0, "sqrt-dim"),
    L1Clip(1.0),
    L2LinfClip(1.0, 4.0),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: f"{c.name}-{getattr(c, 'split', '')}")
@pytest.mark.parametrize("record", [None, RECORD])
def test_every_clipping_equals_the_loop(clipping: Clipping, record: Tensor | None) -> None:
    model, rows = mlp(), Rows(noise(5, 3, 4), noise(5), record)
    agree(clipped_sum(model, squared, rows, clipping), brute_force(model, squared, rows, clipping))


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: f"{c.name}-{getattr(c, 'split', '')}")
def test_no_record_moves_the_sum_by_more_than_the_bound(clipping: Clipping) -> None:
    model, x, y = mlp(), 100 * noise(5, 4), noise(5)
    whole = clipped_sum(model, squared, Rows(x, y), clipping).sums
    rest = clipped_sum(model, squared, Rows(x[1:], y[1:]), clipping).sums
    moved = torch.cat([(whole[k] - rest[k]).flatten() for k in whole])
    order = 1 if clipping.norm == "l1" else 2
    assert float(moved.norm(order)) <= clipping.sensitivity("add-remove") * (1 + 1e-9)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_coefficients_iterates_and_reduction(reduction: Any) -> None:
    model = mlp()
    other = {k: p.detach() + 0.1 * torch.randn_like(p) for k, p in model.named_parameters()}
    steps = [({}, 1.0), (other, -0.5), ({"0.weight": other["0.weight"]}, 0.25)]
    rows = Rows(noise(5, 4), noise(5), RECORD, 6, torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64))
    options: dict[str, Any] = {"reduction": reduction, "iterates": steps}
    engine = clipped_sum(model, squared, rows, FlatClip(0.1), **options)
    agree(engine, brute_force(model, squared, rows, FlatClip(0.1), **options))
    assert engine.norms.shape == (6,)
    assert engine.norms[[2, 4, 5]].tolist() == [0.0, 0.0, 0.0]  # records without rows


def test_iterates_of_every_form_have_their_cross_terms() -> None:
    model = Fn(
        lambda s, i: F.linear(s.norm(s.conv(s.e(i).mT).mT), s.e.weight),
        e=nn.Embedding(7, 4), conv=nn.Conv1d(4, 4, 3, padding=1), norm=nn.LayerNorm(4),
    ).double()  # fmt: skip
    other = {k: p.detach() + 0.1 * torch.randn_like(p) for k, p in model.named_parameters()}
    rows = Rows(torch.randint(0, 7, (5, 6)), noise(5), RECORD)
    steps: Any = [({}, 1.0), (other, -0.9)]
    engine = clipped_sum(model, squared, rows, FlatClip(1.0), iterates=steps)
    agree(engine, brute_force(model, squared, rows, FlatClip(1.0), iterates=steps))


@pytest.mark.parametrize("record", [None, torch.arange(23) % 7])
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_the_result_does_not_depend_on_the_chunk(record: Tensor | None, chunk: int) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 2)).double()
    rows = Rows(noise(23, 2, 6), noise(23), record)
    whole = clipped_sum(model, squared, rows, FlatClip(0.3))
    agree(clipped_sum(model, squared, rows, FlatClip(0.3), chunk=chunk), whole, 1e-12)


def test_rows_in_any_order() -> None:
    model, x, y = mlp(), noise(23, 4), noise(23)
    record, shuffle = torch.arange(23) % 7, torch.randperm(23)
    a = clipped_sum(model, squared, Rows(x, y, record), FlatClip(0.3))
    b = clipped_sum(model, squared, Rows(x[shuffle], y[shuffle], record[shuffle]), FlatClip(0.3))
    assert torch.allclose(a.norms, b.norms)
    assert torch.allclose(a.losses[shuffle], b.losses)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: f"{c.name}-{getattr(c, 'split', '')}")
def test_records_that_are_not_finite_contribute_zero_and_are_counted(clipping: Clipping) -> None:
    """Opacus turns the whole model into NaN here."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.LayerNorm(9), nn.Linear(9, 2)
    ).double()
    x, y = noise(6, 4), noise(6)
    x[2, 1], x[4] = torch.nan, torch.inf
    good = torch.tensor([0, 1, 3, 5])
    engine = clipped_sum(model, squared, Rows(x, y), clipping)
    clean = clipped_sum(model, squared, Rows(x[good], y[good]), clipping)
    assert engine.dropped == 2
    assert not bool(torch.isfinite(engine.norms[[2, 4]]).any())
    for name in clean.sums:
        assert torch.allclose(engine.sums[name], clean.sums[name], atol=1e-12), name


def test_a_bad_row_drops_its_whole_record_and_no_other() -> None:
    model, x, y = mlp(), noise(5, 4), noise(5)
    x[0, 0] = torch.nan  # record 0 has rows 0 and 4
    engine = clipped_sum(model, squared, Rows(x, y, RECORD), FlatClip(1.0))
    clean = clipped_sum(model, squared, Rows(x[1:4], y[1:4], RECORD[1:4]), FlatClip(1.0))
    assert engine.dropped == 1
    for name in clean.sums:
        assert torch.allclose(engine.sums[name], clean.sums[name])


@pytest.mark.parametrize("record", [None, RECORD])
def test_a_bad_record_stays_alone_where_an_operation_allows_no_vmap(
    monkeypatch: pytest.MonkeyPatch, record: Tensor | None
) -> None:
    monkeypatch.setattr(fallback, "_vectorised", lambda *args: None)
    pairing = Fn(lambda s, x: s.form(x[:, :2], x[:, 2:]), form=nn.Bilinear(2, 2, 2))  # has no rule of its own
    model, x, y = nn.Sequential(pairing, nn.Tanh(), nn.Linear(2, 1)).double(), noise(5, 4), noise(5)
    rows, clipping = Rows(x, y, record), FlatClip(0.1)
    agree(clipped_sum(model, squared, rows, clipping), brute_force(model, squared, rows, clipping))
    x[1, 0] = torch.nan
    engine, loop = clipped_sum(model, squared, rows, clipping), brute_force(model, squared, rows, clipping)
    assert engine.dropped == loop.dropped == 1
    for name in loop.sums:
        assert torch.allclose(engine.sums[name], loop.sums[name], atol=1e-12), name


def test_no_rows_give_zero() -> None:
    """Poisson sampling can pick nobody; Opacus' adaptive clipping crashes there."""
    result = clipped_sum(mlp(), squared, Rows(noise(0, 4), noise(0)), FlatClip(1.0))
    assert result.norms.shape == (0,)
    assert all(not bool(s.any()) for s in result.sums.values())
    assert {k: tuple(s.shape) for k, s in result.sums.items()} == {
        k: tuple(p.shape) for k, p in mlp().named_parameters()
    }


def test_torch_losses_are_asked_for_one_value_per_row_and_left_alone() -> None:
    model, x, y = mlp(), noise(5, 4), torch.tensor([0, 1, 2, 0, 1])
    module = nn.CrossEntropyLoss()
    a = clipped_sum(model, module, Rows(x, y), FlatClip(1.0))
    b = clipped_sum(model, F.cross_entropy, Rows(x, y), FlatClip(1.0))
    assert module.reduction == "mean"
    assert torch.equal(a.losses, b.losses)
    assert torch.allclose(a.losses, F.cross_entropy(model(x), y, reduction="none"))


def test_inputs_as_tensor_tuple_and_mapping() -> None:
    model = Fn(lambda s, x: s.l(x), l=nn.Linear(4, 2)).double()
    named = type("Named", (nn.Module,), {"forward": lambda s, x: s.inner(x)})()
    named.inner = model
    x, y = noise(5, 4), noise(5)
    sums = [
        clipped_sum(m, squared, Rows(i, y), FlatClip(1.0)).norms
        for m, i in ((model, x), (model, (x,)), (named, {"x": x}))
    ]
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def snapshot(model: nn.Module) -> Any:
    """Attributes, hooks and gradients of every module and parameter."""
    hooks = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]
    modules = [(set(m.__dict__), [len(getattr(m, h)) for h in hooks]) for m in model.modules()]
    return modules, [(k, set(p.__dict__), p.grad, p._backward_hooks) for k, p in model.named_parameters()]


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("on purpose")


def test_nothing_is_left_on_the_model_also_after_an_exception() -> None:
    body, x, y = mlp(), noise(5, 4), noise(5)
    before, weights = snapshot(body), [p.detach().clone() for p in body.parameters()]
    clipped_sum(body, squared, Rows(x, y), FlatClip(1.0))
    with pytest.raises(ValueError, match="on purpose"):
        clipped_sum(nn.Sequential(body, Failing()), squared, Rows(x, y), FlatClip(1.0))
    with pytest.raises(Refused, match="one value per row"):
        clipped_sum(body, lambda o, t: squared(o, t).mean(), Rows(x, y), FlatClip(1.0))
    assert snapshot(body) == before
    assert all(torch.equal(a, b) for a, b in zip(weights, body.parameters(), strict=True))
    assert not torch.overrides._is_torch_function_mode_enabled()
    assert torch.nn.functional.linear(x[:1], body[0].weight).requires_grad  # plain training works as before


def test_activations_are_freed_after_each_call() -> None:
    """The tape and autograd's graph refer to each other; a leak here eats the machine."""
    model, x, y = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LSTM(6, 3, batch_first=True)).double(),
        noise(5, 7, 4),
        noise(5),
    )

    def alive() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if issubclass(type(o), Tensor))

    clipped_sum(model, squared, Rows(x, y), FlatClip(1.0))
    before = alive()
    for _ in range(3):
        clipped_sum(model, squared, Rows(x, y), FlatClip(1.0))
        with pytest.raises(ValueError, match="on purpose"):
            clipped_sum(nn.Sequential(model[0], Failing()), squared, Rows(x, y), FlatClip(1.0))
    assert alive() <= before + 2


def test_memory_is_bounded_by_the_chunk() -> None:
    """The largest intermediate tensor grows with the chunk, not with the batch."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor) and t.grad_fn is None and not t._is_view():
                    Largest.size = max(Largest.size, t.numel())
            return out

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    sizes = {}
    for n in (64, 256):
        for clipping in (FlatClip(1.0), L1Clip(1.0), L2LinfClip(1.0, 4.0)):
            Largest.size = 0
            rows = Rows(torch.randn(n, 8), torch.randn(n))
            with Largest():
                clipped_sum(model, squared, rows, clipping, chunk=16)
            sizes[n, clipping.name] = Largest.size
    for name in ("flat", "l1", "l2-linf"):
        assert sizes[64, name] == sizes[256, name]


@pytest.mark.parametrize("seed", range(2))
def test_dropout_masks_are_those_of_the_forward_pass(seed: int) -> None:
    """The clipped sum of one chunk with dropout is the gradient of the losses that it reports."""
    torch.manual_seed(seed)
    model, x, y = (
        nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.Bilinear(30, 30, 2)).double(),
        noise(5, 4),
        noise(5),
    )
    model = Fn(lambda s, x: s.b(*(h := s.d(s.a(x)), h)), a=model[0], d=model[1], b=model[2])
    torch.manual_seed(7)
    engine = clipped_sum(model, squared, Rows(x, y), FlatClip(1e9))
    torch.manual_seed(7)
    losses = squared(model(x), y)
    wanted = torch.autograd.grad(losses.sum(), list(model.parameters()))
    assert torch.allclose(engine.losses, losses.detach())
    for got, want in zip(engine.sums.values(), wanted, strict=True):
        assert torch.allclose(got, want)


def test_bfloat16_autocast_accumulates_in_float64() -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(2), nn.LayerNorm(6), nn.LSTM(6, 4, batch_first=True)
    )
    rows = Rows(torch.randn(6, 2, 8), torch.randn(6))
    loss = lambda o, t: (o[0].float().sum((1, 2)) - t) ** 2  # noqa: E731
    exact = clipped_sum(model, loss, rows, FlatClip(1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = clipped_sum(model, loss, rows, FlatClip(1.0))
    assert {s.dtype for s in engine.sums.values()} == {torch.float64}
    scale = max(float(s.abs().max()) for s in exact.sums.values())
    assert all(float((engine.sums[k] - s).abs().max()) < 0.05 * scale for k, s in exact.sums.items())
    assert not all(torch.equal(engine.sums[k], s) for k, s in exact.sums.items())  # autocast did take place


def test_fix_replaces_batch_norm_by_group_norm_in_a_copy() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 48, 3),
        nn.BatchNorm2d(48),
        nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)),
    )
    model[1].weight.data.normal_()
    fixed = fix(model)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[1].num_groups == 16
    assert torch.equal(fixed[1].weight, model[1].weight)
    assert isinstance(fixed[2][0], nn.GroupNorm)
    assert fixed[2][1].running_mean is None


def test_inputs_that_do_not_fit_together() -> None:
    model = mlp()
    with pytest.raises(InputError, match="first dimension"):
        clipped_sum(model, squared, Rows(noise(4, 4), noise(5)), FlatClip(1.0))
    with pytest.raises(InputError, match="int64"):
        clipped_sum(model, squared, Rows(noise(5, 4), noise(5), torch.zeros(5)), FlatClip(1.0))
    with pytest.raises(InputError, match=r"\[0, 2\)"):
        clipped_sum(model, squared, Rows(noise(5, 4), noise(5), RECORD, 2), FlatClip(1.0))
    with pytest.raises(InputError, match="chunk"):
        clipped_sum(model, squared, Rows(noise(5, 4), noise(5)), FlatClip(1.0), chunk=0)
    with pytest.raises(InputError, match="reduction"):
        clipped_sum(model, squared, Rows(noise(5, 4), noise(5)), FlatClip(1.0), reduction="max")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no trainable parameter"):
        clipped_sum(model.requires_grad_(False), squared, Rows(noise(5, 4), noise(5)), FlatClip(1.0))


def test_without_a_chunk_the_held_products_are_bounded() -> None:
    """Vectors of features hold no products; with positions the batch is cut into equal chunks of about 192 MB."""
    wide = nn.Linear(1000, 1000)  # 4 MB a record
    sizes = {"vectors": torch.zeros(1000, 1000), "positions": torch.zeros(1000, 2, 1000)}
    got = {k: default_chunk(wide, survey(wide), Rows(x, x), 1000) for k, x in sizes.items()}
    assert got == {"vectors": 1000, "positions": 50}
    table = nn.Embedding(100_000, 100)
    ids = torch.zeros(1000, 5, dtype=torch.int64)
    assert default_chunk(table, survey(table), Rows(ids, ids), 1000) == 1000


@pytest.mark.parametrize("size", [1e-24, 1e-22, 1e-20, 1e-18, 1e-12, 1e-8])
@pytest.mark.parametrize("clipping", [NormalisedClip(1.0), FlatClip(1.0)])
def test_a_record_whose_squares_underflow_stays_within_its_bound(size: float, clipping: Clipping) -> None:
    """A tiny output gradient meets tiny, ordinary or huge inputs: squares of either underflow in single precision."""
    for inputs in (1.0, 1e18 / 16, 1e-10):
        model = nn.Linear(64, 48, bias=False)
        rows = Rows(inputs=torch.full((1, 64), inputs), targets=torch.full((1,), size))
        found = clipped_sum(model, lambda out, weight: out.sum(1) * weight, rows, clipping)
        assert float(found.sums["weight"].double().norm()) <= 1.001


LOSSES: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: nn.CrossEntropyLoss(),
    "function": lambda model: nn.functional.cross_entropy,
    "weighted": lambda model: nn.CrossEntropyLoss(weight=torch.rand(3, dtype=torch.float64)),
    "of the user's": lambda model: lambda out, y: nn.functional.cross_entropy(out * model.p, y, reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bare", [False, True], ids=["of data", "a parameter itself"])
def test_a_loss_is_seen_where_it_may_meet_a_parameter(name: str, bare: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.q.expand(len(x), 3) if bare else self.l(x)
        return out

    model = Fn(forward, l=nn.Linear(4, 3), p=torch.rand(3) + 1, q=torch.rand(1, 3)).double()
    rows = Rows(torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3)
    loss = LOSSES[name](model)
    agree(clipped_sum(model, loss, rows, FlatClip(0.3)), brute_force(model, loss, rows, FlatClip(0.3)))
