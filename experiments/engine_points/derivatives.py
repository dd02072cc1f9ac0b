"""Zero or wrong gradients, silently."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sordino

from .common import Fn, Seen, against_loop, declare_torchvision, layers, point, squared

LINE = "zero or wrong gradients, silently"
AUTOGRAD = "tests/gradients/test_own_autograd.py"
N = 6


def _loop(model: nn.Module, *shape: int) -> Seen:
    x, y = torch.randn(N, *shape, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    return against_loop(model.double(), squared, x, y, tolerance=1e-9)


def _logits(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(out.logits, target, reduction="none")


@point(
    LINE,
    "inputs with requires_grad: peft's enable_input_require_grads",
    "tests/gradients/test_graded_inputs.py::test_parameters_behind_data_with_a_gradient[after_a_frozen_table]",
)
def graded_inputs_of_peft() -> Seen:
    declare_torchvision()
    import peft
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    base = hf.BertForSequenceClassification(config)
    base.enable_input_require_grads()
    given = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(base, given).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(1, 31, (N, 5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return against_loop(model, _logits, inputs, torch.arange(N) % 3, tolerance=1e-8)


@point(
    LINE,
    "inputs with requires_grad: Wav2Vec2",
    "tests/gradients/test_graded_inputs.py::test_parameters_behind_data_with_a_gradient[by_attribute]",
)
def wav2vec2() -> Seen:
    declare_torchvision()
    import transformers as hf

    config = hf.Wav2Vec2Config(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False,
        num_labels=3, classifier_proj_size=8, feat_extract_norm="layer",
    )  # fmt: skip
    model = hf.Wav2Vec2ForSequenceClassification(config).double().train()
    inputs = {"input_values": torch.randn(N, 120, dtype=torch.float64)}
    return against_loop(model, _logits, inputs, torch.arange(N) % 3, tolerance=1e-8)


@point(
    LINE,
    "an in-place operation after a biased linear map on three dimensions: `ReLU(inplace=True)`",
    "tests/gradients/test_assurance.py::test_sums_at_coinciding_sizes_equal_brute_force_and_both_ways_accept_the_model"
    "[an in-place operation after a linear map on three dimensions]",
)
def relu_in_place() -> Seen:
    first = nn.Linear(4, 6), nn.ReLU(True)
    return _loop(nn.Sequential(*first, nn.Linear(6, 6), nn.ReLU(True), nn.Linear(6, 1), nn.Flatten()), 3, 4)


@point(
    LINE,
    "the same: `y += residual`",
    "tests/gradients/test_written_data.py::test_a_parameter_that_is_written_into_data[assigned]",
)
def residual_in_place() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.i(x))
        y = s.a(h)
        y += h
        found: Tensor = s.b(torch.tanh(y))
        return found

    return _loop(Fn(forward, i=nn.Linear(4, 4), **layers(4, 4)), 3, 4)


@point(
    LINE,
    "`out[:, t] = h` into zeros",
    "tests/gradients/test_far.py::test_layer_families_clippings_and_a_run_are_the_same_on_another_device",
)
def written_into_zeros() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 4, 6, dtype=x.dtype)
        for t in range(4):
            out[:, t] = torch.tanh(s.a(x[:, t]))
        found: Tensor = s.b(out)
        return found

    return _loop(Fn(forward, **layers(4, 6)), 4, 4)


@point(
    LINE,
    "scripted functions inside",
    "tests/gradients/test_measure.py::test_a_traced_function_hides_rows_and_sums_are_right_all_the_same",
    "tests/gradients/test_refusals.py::test_compiled_and_scripted_models_are_refused_not_silently_left_without_gradient",
)
def scripted_inside() -> Seen:
    def scaled(h: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(h) * w

    inner = torch.jit.script(scaled)
    return _loop(Fn(lambda s, x: s.b(inner(s.a(x), s.w)), w=torch.randn(6), **layers(4, 6)), 4)


@point(
    LINE,
    "compiled functions inside",
    "tests/gradients/test_refusals.py::test_compiled_functions_run_as_they_are_written",
)
def compiled_inside() -> Seen:
    inner = torch.compile(lambda layer, h: torch.tanh(layer(h)), backend="aot_eager")
    return _loop(Fn(lambda s, x: s.b(inner(s.a, x)), **layers(4, 6)), 4)


@point(
    LINE,
    "a derived slot with two parents used twice (timm's vit_srelpos)",
    "tests/models/test_coinciding_sizes.py::test_a_vision_transformer_with_shared_relative_positions",
    "tests/gradients/test_derived.py::test_each_parameter_gets_its_own_share_of_a_tensor_made_of_several",
)
def shared_relative_positions() -> Seen:
    declare_torchvision()
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    model = VisionTransformerRelPos(
        img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=8, depth=2, num_heads=2, shared_rel_pos=True,
        rel_pos_type="mlp", rel_pos_dim=4, class_token=True,
    )  # fmt: skip
    for part in model.modules():  # timm drops an eighth of the positions' network, and a loop would draw others
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return _loop(model.train(), 1, 8, 8)


@point(LINE, "complex activations", "tests/gradients/test_complex.py::test_real_parameters_and_complex_activations")
def complex_activations() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.fft.rfft(torch.tanh(s.l(x)))
        found: Tensor = (h @ torch.complex(s.w, s.v)).abs()
        return found

    return _loop(Fn(forward, l=nn.Linear(4, 4), w=torch.randn(3, 2), v=torch.randn(3, 2)), 4)


def _energy(s: Any, x: Tensor) -> Tensor:
    found: Tensor = s.b(torch.tanh(s.a(x)))
    return found


@point(
    LINE,
    "gradient penalties",
    f"{AUTOGRAD}::test_derivatives_that_the_forward_pass_takes",
)
def gradient_penalty() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = _energy(s, x)
        slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        return torch.cat([out, slope.square().sum(1, keepdim=True)], 1)

    return _loop(Fn(forward, **layers(4, 6, 1)), 4)


@point(LINE, "force networks", f"{AUTOGRAD}::test_derivatives_that_the_forward_pass_takes")
def force_network() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(_energy(s, x).sum(), x, create_graph=True)[0]

    return _loop(Fn(forward, **layers(4, 6, 1)), 4)


@point(LINE, "implicit layers", f"{AUTOGRAD}::test_implicit_layers_and_reversible_functions")
def implicit_layer() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = x
            for _ in range(30):
                z = torch.tanh(0.2 * s.w(z) + x)
        z = torch.tanh(0.2 * s.w(z) + x)
        start = z.detach().requires_grad_()
        again = torch.tanh(0.2 * s.w(start) + x)

        def solve(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(30):
                found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)  # type: ignore[no-untyped-call]
        out: Tensor = s.o(z)
        return out

    return _loop(Fn(forward, w=nn.Linear(4, 4), o=nn.Linear(4, 1)), 4)


class Reversible(torch.autograd.Function):
    """x + f(x), whose backward pass computes f again and calls .backward()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: nn.Module) -> Tensor:
        ctx.inner = inner
        ctx.save_for_backward(x)
        with torch.no_grad():
            found: Tensor = x + inner(x)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(x + ctx.inner(x), gradients[0])
        return x.grad, None


def _reversible() -> nn.Module:
    parts = {"i": nn.Linear(4, 4), "f": nn.Linear(4, 4), "o": nn.Linear(4, 1)}
    run: Any = Reversible.apply
    return Fn(lambda s, x: s.o(run(s.i(x), s.f)), **parts).double()


def _of_reversible() -> tuple[nn.Module, sordino.Rows, str | None, int]:
    """The engine on one: what it refuses with, and the parameters whose share is missing."""
    model = _reversible()
    x, y = torch.randn(N, 4, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    try:
        found = sordino.clipped_sum(model, squared, sordino.Rows(x, y), sordino.FlatClip(1.0))
    except sordino.Refused as said:
        return model, sordino.Rows(x, y), str(said)[:140], 0
    return model, sordino.Rows(x, y), None, sum(not bool(value.any()) for value in found.sums.values())


@point(LINE, "reversible functions", f"{AUTOGRAD}::test_implicit_layers_and_reversible_functions")
def reversible_function() -> Seen:
    _, _, said, missing = _of_reversible()
    return Seen(said is None and missing > 0, f"refused: {said}" if said else f"the sums of {missing} parameters are 0")


@point(
    LINE,
    "an un-noised gradient left in `.grad`",
    f"{AUTOGRAD}::test_implicit_layers_and_reversible_functions",
)
def gradient_left_behind() -> Seen:
    model, *_ = _of_reversible()
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    return Seen(bool(left), f"left in .grad of {', '.join(left)}" if left else "no parameter has a .grad afterwards")
