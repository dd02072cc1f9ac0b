"""What can't be certified is refused, with the layer's name, the reason and the remedy; verify finds the rest."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum, verify
from sordino.gradients.checks.assurance import Assurance

X, Y = noise(6, 4), noise(6)


def run(model: nn.Module, loss: Any = squared, x: Any = X) -> None:
    clipped_sum(model.double(), loss, Rows(x, Y), FlatClip(1.0))


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_training_mode(affine: bool) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=affine)))
    with pytest.raises(Refused, match=r"body\.1: BatchNorm in training mode.*sordino\.fix"):
        run(model)
    with pytest.raises(Refused, match="BatchNorm"):
        run(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False).eval()))


def test_instance_norm_with_running_statistics() -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(4, 2)
    )
    with pytest.raises(Refused, match="1: InstanceNorm with track_running_stats"):
        run(model)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, lambda o, t: squared(o, t).mean(), lambda o, t: 1.0], ids=["2d", "scalar", "float"]
)
def test_losses_without_one_value_per_row(loss: Any) -> None:
    with pytest.raises(Refused, match=r"one value per row, shape \(rows,\).*reduction='none'"):
        run(nn.Linear(4, 6), (lambda o, t: loss(o, t[:, None].expand(6, 6))) if loss is F.mse_loss else loss)


def test_compiled_and_scripted_models_are_refused_not_silently_left_without_gradient() -> None:
    """pytorch #97718: a compiled model ignored the hooks, and training went on."""
    with pytest.raises(Refused, match=r"torch\.compile hides the layers.*_orig_mod"):
        run(torch.compile(nn.Linear(4, 3)))  # type: ignore[arg-type]
    inner = nn.Linear(4, 3)
    inner.compile()
    with pytest.raises(Refused, match=r"^1: torch\.compile"):
        run(nn.Sequential(nn.Tanh(), inner))
    with pytest.raises(Refused, match="scripted"):
        run(nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 3).double(), X)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_run_as_they_are_written(backend: str) -> None:
    """Dynamo traced through the mode that records the operations."""
    inner = torch.compile(lambda layer, h, w: torch.tanh(layer(h)) * w, backend=backend)
    matches(Fn(lambda s, x: s.b(inner(s.a, x, s.w)), w=noise(3), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), noise(5, 4))


FIRST = """
import torch
from torch import nn
from sordino import FlatClip, Refused, Rows, clipped_sum

class Compiling(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x):
        return torch.compile(torch.tanh, backend="eager")(self.a(x))

try:
    clipped_sum(Compiling(), lambda out, y: out[:, 0] - y, Rows(torch.randn(3, 4), torch.ones(3)), FlatClip(1.0))
except Refused as said:
    print(said)
"""


def test_the_first_compilation_of_a_process_is_refused_inside_of_a_pass() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST], capture_output=True, text=True, check=True)
    assert "calls torch.compile in its forward pass" in done.stdout


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum(0)


def test_parameters_inside_operations_that_cannot_be_seen() -> None:
    with pytest.raises(Refused, match=r"^p: it is used inside an operation that sordino can't intercept"):
        run(Fn(lambda s, x: Scaled.apply(s.l(x), s.p), l=nn.Linear(4, 3), p=noise(3)))


def test_buffers_written_by_the_forward_pass() -> None:
    model = Fn(lambda s, x: (s.seen.add_(1), s.l(x))[1], l=nn.Linear(4, 3))
    model.register_buffer("seen", torch.zeros(()))
    with pytest.raises(Refused, match="seen: the forward pass writes to this buffer"):
        run(model)


def test_inputs_overwritten_after_their_use() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        out = self.l(h)
        h.zero_()
        return out

    with pytest.raises(Refused, match=r"linear\(l.bias, l.weight\): its input was modified in place"):
        run(Fn(forward, l=nn.Linear(4, 3)))


def test_embedding_options_that_mix_records() -> None:
    ids = torch.zeros(6, 2, dtype=torch.int64)
    for options, reason in (({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq")):
        with pytest.raises(Refused, match=reason):
            run(nn.Embedding(4, 3, **options), x=ids)


def test_a_loss_that_no_parameter_reaches() -> None:
    with pytest.raises(Refused, match="does not depend on any trainable parameter"):
        run(Fn(lambda s, x: s.l(x).detach(), l=nn.Linear(4, 3)))


def check(model: nn.Module, loss: Any = squared, **options: Any) -> None:
    verify(model, loss, Rows(X, Y), FlatClip(1.0), **options)


@pytest.mark.parametrize(
    "mix", [lambda h: h - h.mean(0), lambda h: h * h.softmax(0), lambda h: h + h.flip(0), lambda h: h.cumsum(0)]
)
def test_verify_finds_records_that_interact(mix: Any) -> None:
    with pytest.raises(Refused, match="interact"):
        check(Fn(lambda s, x: mix(s.l(x)), l=nn.Linear(4, 3)))


def test_verify_finds_losses_that_mix_records() -> None:
    with pytest.raises(Refused, match="interact"):
        check(nn.Linear(4, 3), lambda o, t: squared(o, t) * o.std())


def test_verify_names_parameters_without_a_gradient() -> None:
    """Opacus #820: an upgrade left adapters untrained for 45 GPU-hours."""
    model = Fn(lambda s, x: s.used(x), used=nn.Linear(4, 3), spare=nn.Linear(2, 2))
    with pytest.raises(Refused, match=r"received no gradient: spare\.weight, spare\.bias.*requires_grad_\(False\)"):
        check(model)
    model.spare.requires_grad_(False)
    check(model)


def test_verify_accepts_gradients_that_happen_to_be_zero() -> None:
    """A fresh LoRA adapter: B = 0, so that A's gradient is zero although A is used."""
    b = nn.Linear(2, 3, bias=False)
    nn.init.zeros_(b.weight)
    check(Fn(lambda s, x: s.b(s.a(x)), a=nn.Linear(4, 2, bias=False), b=b))


def test_verify_neutralises_dropout_and_stochastic_depth() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        keep = x.new_empty(x.shape[0], 1).bernoulli_(0.5) / 0.5
        return self.rnn(self.d(self.l(x))[:, None])[0][:, 0] * keep

    rnn = nn.LSTM(8, 3, 2, dropout=0.5, batch_first=True)
    check(Fn(forward, l=nn.Linear(4, 8), d=nn.Dropout(0.5), rnn=rnn))


def test_verify_leaves_the_model_and_its_precision_alone() -> None:
    model = nn.Linear(4, 3)
    state = torch.random.get_rng_state()
    verify(model, squared, Rows(X.float(), Y.float(), torch.arange(6) // 2), FlatClip(1.0), reduction="mean")
    assert model.weight.dtype == torch.float32
    assert model.weight.grad is None
    assert torch.equal(state, torch.random.get_rng_state())


def _over_time(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda part: torch.tanh(m.a(part)), in_dims=1, out_dims=1)(x).sum((1, 2))


def _packed(m: Any, x: Tensor) -> Tensor:
    """All records as one sequence, whose attention stays within each of them."""
    rows, length, width = x.shape
    long = m.a(x).reshape(1, rows * length, width)
    within = torch.block_diag(*[torch.ones(length, length)] * rows).bool()
    return F.scaled_dot_product_attention(long, long, long, attn_mask=within).reshape(rows, -1).sum(1)


def _nested(m: Any, x: Tensor) -> Tensor:
    ragged = torch.nested.as_nested_tensor(list(x), layout=torch.jagged)
    return m.a(ragged).to_padded_tensor(0.0).sum((1, 2))


def _sparse(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(x[:, 0].to_sparse(), m.a.weight.t()).sum(1)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_over_time, "torch.vmap runs over another dimension than the rows"),
        (_packed, "packed into one sequence"),
        (_nested, "padded"),
        (_sparse, "dense"),
    ],
)
def test_a_refusal_says_what_it_is(forward: Any, reason: str) -> None:
    torch.manual_seed(0)
    model, x = Fn(forward, a=nn.Linear(4, 4)).double(), torch.randn(5, 3, 4, dtype=torch.float64)
    with pytest.raises(Refused, match=reason):
        clipped_sum(model, lambda out, t: out * t, Rows(x, torch.ones(5)), FlatClip(1.0), assurance=Assurance())


def test_a_plain_loop_takes_models_in_bfloat16() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).bfloat16(), torch.randn(5, 4).bfloat16()
    found = [f(model, F.cross_entropy, Rows(x, torch.arange(5) % 3), FlatClip(0.5)) for f in (brute_force, clipped_sum)]
    for name, want in found[0].sums.items():
        torch.testing.assert_close(found[1].sums[name].float(), want, rtol=0.02, atol=0.02)


def test_what_a_refusal_says_in_public_has_no_count_of_rows_and_no_value() -> None:
    """Batch sizes and differences of losses are private: messages are logged."""
    programs: list[tuple[nn.Module, Any]] = [
        (nn.Linear(4, 3), lambda o, t: squared(o, t)[:, None].expand(-1, 2)),
        (Fn(lambda s, x: s.l(x) * (0.5 if len(x) > 2 else 1.0), l=nn.Linear(4, 3)), squared),
        (Fn(_keeps, l=nn.Linear(4, 3)), squared),
    ]
    for model, loss in programs:
        with pytest.raises(Refused) as found:
            _twice(model.double(), loss)
        assert found.value.private
        assert str(len(X)) not in str(found.value).replace("float32", "")
        assert "e-0" not in str(found.value)


def _twice(model: nn.Module, loss: Any) -> None:
    assurance = Assurance()
    for _ in range(2):
        clipped_sum(model, loss, Rows(X, Y), FlatClip(1.0), assurance=assurance)


def _keeps(s: Any, x: Tensor) -> Tensor:
    kept = s.__dict__.get("kept", x)
    s.__dict__["kept"] = x * 2
    out: Tensor = s.l(x + 0 * kept[: len(x)])
    return out
