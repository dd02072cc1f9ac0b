"""What went wrong, often silently, for users of other libraries: each report is a test, by its number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.clipping import FlatClip
from sordino.errors import Refused, SordinoError
from sordino.gradients import Rows, brute_force, clipped_sum, verify

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def next_token(outputs: hf.utils.ModelOutput, targets: Tensor) -> Tensor:
    logits = outputs.logits[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, targets[:, 1:], reduction="none").mean(1)


def gpt2_with_lora() -> nn.Module:
    """The model of Opacus #820's reproduction, small: fused c_attn is a Conv1D, B starts at zero."""
    config = hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return get_peft_model(hf.GPT2LMHeadModel(config), lora).double()


class WithSpare(nn.Module):
    """Declares a layer that its forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 4)
        self.dense_agsx = nn.Linear(2, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def linear_rows(records: int = 4, features: int = 5) -> Rows:
    return Rows(torch.randn(records, features, dtype=torch.float64), torch.arange(records) % 4)


def test_opacus_820_every_lora_parameter_is_trained() -> None:
    """After a PEFT upgrade the hooks missed the adapter: loss fell, ε grew, the weights were useless."""
    model = gpt2_with_lora().eval()
    ids = torch.randint(97, (4, 12))
    rows = Rows({"input_ids": ids}, ids)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    before = {n: p.detach().clone() for n, p in trained.items()}
    for _ in range(2):  # A's gradient is exactly zero until B has moved
        sums = clipped_sum(model, next_token, rows, FlatClip(1.0)).sums
        assert set(sums) == set(trained)
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.sub_(sums[name])
    for name, parameter in trained.items():
        assert not torch.equal(parameter, before[name]), f"{name} was never trained"


def test_opacus_820_a_step_goes_downhill() -> None:
    model = gpt2_with_lora().eval()
    ids = torch.randint(97, (4, 12))
    rows = Rows({"input_ids": ids}, ids)
    first = clipped_sum(model, next_token, rows, FlatClip(1.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.sub_(0.1 * first.sums[name])
    assert clipped_sum(model, next_token, rows, FlatClip(1.0)).losses.mean() < first.losses.mean()


def test_opacus_820_a_parameter_that_gets_no_gradient_is_named() -> None:
    with pytest.raises(Refused, match=r"dense_agsx\.weight"):
        verify(WithSpare().double(), nn.CrossEntropyLoss(), linear_rows(), FlatClip(1.0))


def test_opacus_692_chunks_give_the_sum_of_the_whole_batch() -> None:
    """Ghost clipping with the memory manager added up aliases of one gradient buffer."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4)).double()
    rows = Rows(torch.randn(7, 1, 8, 8, dtype=torch.float64), torch.arange(7) % 4)
    whole = clipped_sum(model, nn.CrossEntropyLoss(), rows, FlatClip(0.5))
    for chunk in (1, 2, 3, 7, 100):
        parts = clipped_sum(model, nn.CrossEntropyLoss(), rows, FlatClip(0.5), chunk=chunk)
        torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parts.norms, whole.norms, rtol=1e-12, atol=0)


def test_opacus_692_a_result_is_not_overwritten_by_the_next_call() -> None:
    model = nn.Linear(5, 4).double()
    rows = linear_rows()
    first = clipped_sum(model, nn.CrossEntropyLoss(), rows, FlatClip(1.0))
    copy = {n: v.clone() for n, v in first.sums.items()}
    clipped_sum(model, nn.CrossEntropyLoss(), linear_rows(), FlatClip(1.0))
    torch.testing.assert_close(first.sums, copy, rtol=0, atol=0)


def test_pytorch_97718_a_compiled_model_is_refused_and_its_original_is_taken() -> None:
    """Hooks on a compiled module did not run: a step without gradients, and no error."""
    torch._dynamo.reset()
    eager = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    rows, loss, clipping = linear_rows(), nn.CrossEntropyLoss(), FlatClip(0.5)
    oracle = brute_force(eager, loss, rows, clipping)
    compiled = torch.compile(eager, backend="eager")
    compiled(rows.inputs)  # the compilation that used to bake the absence of hooks in
    with pytest.raises(Refused, match=r"torch\.compile.*_orig_mod"):
        clipped_sum(compiled, loss, rows, clipping)
    torch.testing.assert_close(clipped_sum(compiled._orig_mod, loss, rows, clipping).sums, oracle.sums)


def test_pytorch_97718_a_compiled_layer_inside_the_model_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model[2].compile(backend="eager")
    with pytest.raises(Refused, match=r"^2: torch\.compile"):
        clipped_sum(model, nn.CrossEntropyLoss(), linear_rows(), FlatClip(0.5))


def test_opacus_502_a_layer_that_forward_does_not_use_has_a_zero_sum() -> None:
    """Declared in __init__ and never called: the peer stopped at optimizer.step() without naming it."""
    model = WithSpare().double()
    rows = linear_rows()
    ours = clipped_sum(model, nn.CrossEntropyLoss(), rows, FlatClip(1.0))
    oracle = brute_force(model, nn.CrossEntropyLoss(), rows, FlatClip(1.0))
    torch.testing.assert_close(ours.sums, oracle.sums)
    assert ours.sums["dense_agsx.weight"].abs().max() == 0


def test_opacus_561_a_parameter_used_outside_of_any_layer(agree, awaken) -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(1, 2, 5))
            self.temperature = nn.Parameter(torch.ones(()))
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            with_prompt = torch.cat([self.prompt.expand(len(x), -1, -1), x.unsqueeze(1)], 1)
            return self.layer(with_prompt.tanh()).mean(1) * self.temperature.exp()

    agree(awaken(Prompted()), nn.CrossEntropyLoss(), linear_rows())


def test_opacus_578_one_layernorm_applied_at_two_places(agree, awaken) -> None:
    """The decoder's norm is applied after every layer: grad was there, grad_sample was None."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
            self.norm = nn.LayerNorm(5)
            self.head = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            intermediate = []
            for layer in self.layers:
                x = x + layer(x).tanh()
                intermediate.append(self.norm(x))
            return self.head(torch.stack(intermediate, 1)).mean(1)

    agree(awaken(Decoder()), nn.CrossEntropyLoss(), linear_rows())


def test_opacus_732_lora_on_a_bert_classifier_with_keyword_inputs(agree, awaken) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.BertConfig(**sizes, intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, task_type="SEQ_CLS")
    model = awaken(get_peft_model(hf.BertForSequenceClassification(config), lora))
    inputs = {
        "input_ids": torch.randint(1, 61, (3, 8)),
        "attention_mask": torch.ones(3, 8, dtype=torch.int64),
        "token_type_ids": torch.zeros(3, 8, dtype=torch.int64),
    }

    def loss(outputs: hf.utils.ModelOutput, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits, targets, reduction="none")

    ours = agree(model, loss, Rows(inputs, torch.tensor([0, 1, 1])))
    assert {"lora_A" in n or "lora_B" in n or "classifier" in n for n in ours.sums} == {True}


class SampleNet(nn.Module):
    """The network of Opacus #53, with torch's own LSTM in the place of DPLSTM."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, 100)
        self.lstm = nn.LSTM(100, 100, batch_first=True)
        self.fc1 = nn.Linear(100, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.emb(x))
        return self.fc1(states.mean(1))


def resident(field: str) -> int:
    lines = [line for line in STATUS.read_text().splitlines() if line.startswith(field)]
    return int(lines[0].split()[1]) * 1024


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the peak of resident memory can be reset on Linux only")
def test_opacus_53_an_lstm_takes_megabytes_and_not_95_gigabytes() -> None:
    """Batch 100, 256 tokens: less than the one per-record gradient of its Embedding would take (400 MB)."""
    model = SampleNet(10_004)
    rows = Rows(torch.randint(10_004, (100, 256)), torch.arange(100) % 2)
    clipped_sum(model, nn.CrossEntropyLoss(), Rows(rows.inputs[:2], rows.targets[:2]), FlatClip(1.0))
    before = resident("VmRSS")
    CLEAR_REFS.write_text("5")
    ours = clipped_sum(model, nn.CrossEntropyLoss(), rows, FlatClip(1.0))
    extra = resident("VmHWM") - before
    assert ours.norms.shape == (100,)
    assert extra < 100 * 10_004 * 100 * 4, f"{extra / 1e6:.0f} MB"


def test_opacus_319_340_batchnorm_is_refused_before_anything_is_computed() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    with pytest.raises(Refused, match=r"^1: BatchNorm in training mode"):
        clipped_sum(model, nn.CrossEntropyLoss(), linear_rows(), FlatClip(1.0))
    assert int(model[1].num_batches_tracked) == 0


def test_opacus_nan_record_is_dropped_and_counted() -> None:
    """One record with a NaN turned the whole model into NaN."""
    model, rows = nn.Linear(5, 4).double(), linear_rows()
    rows.inputs[2, 0] = torch.nan
    ours = clipped_sum(model, nn.CrossEntropyLoss(), rows, FlatClip(1.0))
    kept = torch.tensor([0, 1, 3])
    without = clipped_sum(model, nn.CrossEntropyLoss(), Rows(rows.inputs[kept], rows.targets[kept]), FlatClip(1.0))
    assert ours.dropped == 1
    torch.testing.assert_close(ours.sums, without.sums)


def test_a_loss_that_mixes_records_is_refused() -> None:
    def batch_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs - outputs.mean(0, keepdim=True), targets, reduction="none")

    with pytest.raises(SordinoError):
        verify(nn.Linear(5, 4).double(), batch_loss, linear_rows(), FlatClip(1.0))
