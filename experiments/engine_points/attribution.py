"""A length decides who a row belongs to; rows permuted inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sordino

from .common import (
    MOST,
    Fn,
    Seen,
    against_loop,
    ce,
    data,
    declare_torchvision,
    layers,
    moved,
    plain,
    point,
    summed,
)

LENGTH = "a length decides who a row belongs to"
PERMUTED = "rows permuted inside"
COINCIDING = (
    "tests/gradients/test_assurance.py::test_sums_at_coinciding_sizes_equal_brute_force_and_both_ways_accept_the_model"
)


def _with_the_check(model: nn.Module, inputs: Any, targets: Tensor, *, clip: float = 1.0) -> Seen:
    """Against the loop; with what the check that starts a training says, and what a record moves the sum by."""
    model, inputs = model.double(), inputs.double()
    rows = sordino.Rows(inputs, targets)
    try:
        sordino.verify(model, ce, rows, sordino.FlatClip(clip))
    except sordino.Refused as said:
        return Seen(False, f"the check refuses it: {said}")
    seen = against_loop(model, ce, inputs, targets, tolerance=1e-9, clip=clip)
    if not seen.wrong:
        return seen
    most = moved(model, ce, (inputs, targets), clip)
    return Seen(True, f"the check says ok; one record moves the sum by {most:.2f} clip norms; {seen.text}")


def _in_seeds(make: Callable[[], nn.Module], *shape: int) -> Seen:
    """Five seeds of weights and records: in how many the check says ok, and what a record then moves the sum by."""
    most, taken = [], 0
    for seed in range(5):
        torch.manual_seed(seed)
        model, (x, y) = make(), data(*shape)
        x[:8] *= 50
        rows = sordino.Rows(x, y)
        try:
            sordino.verify(model, ce, rows, sordino.FlatClip(1.0))
        except sordino.Refused:
            continue
        taken += 1
        most.append(moved(model, ce, (x, y), 1.0, range(7, 8)))
    if not taken:
        return Seen(False, "the check refuses it in 5 of 5 seeds")
    worst = max(most)
    text = f"the check says ok in {taken} of 5 seeds; one record moves the sum by up to {worst:.2f} clip norms"
    return Seen(worst > MOST, text)


def _axial(s: Any, x: Tensor) -> Tensor:
    h = s.stem(x)
    b, c, high, wide = h.shape
    rows = s.row(h.permute(0, 2, 3, 1).reshape(b * high, wide, c)).reshape(b, high * wide, c)
    found: Tensor = s.head(rows.mean(1))
    return found


@point(LENGTH, "axial attention (5.05); the check says ok: it looks at three rows", f"{COINCIDING}[axial attention]")
def axial_attention() -> Seen:
    n = 16
    row = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = Fn(_axial, stem=nn.Conv2d(2, 8, 3, padding=1), row=row, head=nn.Linear(8, 3))
    x, y = torch.randn(n, 2, n, n), torch.arange(n) % 3
    x[0] *= 20
    return _with_the_check(model, x, y)


@point(LENGTH, "windows of 64 with 64 records (61.9)", f"{COINCIDING}[windows as long as the batch]")
def windows_of_64() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        b, length, d = x.shape
        h = torch.relu(s.a(x.reshape(b * length // 64, 64, d)))
        found: Tensor = s.b(h.reshape(b, length, -1).mean(1))
        return found

    x, y = torch.randn(64, 256, 16), torch.randint(0, 10, (64,))
    x[-1] = torch.randn(16) * 300
    model = Fn(forward, **layers(16, 32, 10))
    if sordino.Plan.dpsgd(epsilon=1.0, delta=1e-5, records=64, expected_batch=64, steps=1).guarantee().epsilon > 1:
        return Seen(False, "the plan's ε is above 1")
    try:
        sordino.verify(model, ce, sordino.Rows(x, y), sordino.FlatClip(1.0))
    except sordino.Refused as said:
        return Seen(False, f"the check refuses it: {said}")
    both = summed(model, ce, (x, y), torch.arange(64), 1.0), summed(model, ce, (x, y), torch.arange(63), 1.0)
    most = float((both[0] - both[1]).norm())
    return Seen(most > MOST, f"the check says ok; one record moves the sum by {most:.2f} clip norms at ε = 1")


@point(LENGTH, "`torch.stack([net(r) for r in x])` (4.78)", f"{COINCIDING}[torch.stack of a network on each row]")
def stack_of_rows() -> Seen:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model = Fn(lambda s, x: torch.stack([s.net(r).mean(0) for r in x]), net=net)
    x, y = torch.randn(16, 16, 8), torch.arange(16) % 3
    x[-1] *= 50
    return _with_the_check(model, x, y)


@point(LENGTH, "a hierarchical text model", f"{COINCIDING}[a hierarchical text model]")
def hierarchical_text() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        found: Tensor = s.b(torch.stack([s.g(text)[1][0] for text in x]).mean(1))  # sentences of one text at a time
        return found

    model = Fn(forward, g=nn.GRU(4, 6, batch_first=True), b=nn.Linear(6, 3))
    x, y = torch.randn(8, 8, 5, 4), torch.arange(8) % 3
    x[-1] *= 50
    return _with_the_check(model, x, y)


@point(
    LENGTH,
    "unbatched linear maps (norms off by 200-600 %)",
    "tests/gradients/test_fallback_records.py::test_the_rows_are_found_where_the_batch_is_as_large_as_another_dimension",
)
def unbatched_linear_maps() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        return torch.stack([s.b(torch.tanh(s.a(x[i]))).sum(0) for i in range(len(x))])

    x, y = torch.randn(8, 8, 4), torch.arange(8) % 3
    return _with_the_check(Fn(forward, **layers(4, 6)), x, y)


@point(LENGTH, "index_select", f"{COINCIDING}[unbatched index_select]")
def rows_by_index_select() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        each = [s.table.index_select(0, row.long()).tanh() @ s.w for row in x]
        return torch.stack(each).mean(1)

    model = Fn(forward, table=torch.randn(12, 5), w=torch.randn(5, 3)).double()
    x, y = torch.randint(0, 12, (8, 8)).double(), torch.arange(8) % 3
    return _with_the_check(model, x, y)


@point(
    LENGTH,
    "DeBERTa-v2 at n = 2·position_buckets",
    "tests/models/test_coinciding_sizes.py::test_deberta_with_as_many_records_as_twice_its_buckets",
)
def deberta() -> Seen:
    declare_torchvision()
    import transformers as hf

    config = hf.DebertaV2Config(
        vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, relative_attention=True, position_buckets=3, pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm", share_att_key=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pooler_dropout=0.0, num_labels=3,
    )  # fmt: skip
    model = hf.DebertaV2ForSequenceClassification(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ids = torch.randint(1, 31, (6, 5))

    def loss(out: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(out.logits, target, reduction="none")

    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return against_loop(model, loss, inputs, torch.arange(6) % 3)


@point(
    LENGTH,
    "a parameter expanded to n and reduced (1.44)",
    f"{COINCIDING}[a parameter expanded to the batch and reduced]",
)
def expanded_parameter() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        found: Tensor = plain(s, x) + s.p.expand(len(x), 3).mean(0) * x.sum(1, keepdim=True)
        return found

    x, y = torch.randn(8, 4), torch.arange(8) % 3
    x[-1] *= 50
    return _with_the_check(Fn(forward, p=torch.randn(1, 3), **layers(4, 6)), x, y)


@point(
    PERMUTED,
    "sort and unsort (up to 1.85)",
    "tests/gradients/test_permuted_images.py::test_scales_and_shifts_follow_the_order_of_the_images",
    f"{COINCIDING}[rows flipped and flipped back]",
)
def sort_and_unsort() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        found: Tensor = s.b(torch.relu(s.a(x))[order])[order.argsort()]
        return found

    return _in_seeds(lambda: Fn(forward, **layers()), 8)


@point(PERMUTED, "sorting by length before a GRU", f"{COINCIDING}[rows sorted by length for a GRU]")
def sorted_for_a_gru() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        order = (x[..., 0] > 0).sum(1).argsort(descending=True, stable=True)
        found: Tensor = s.b(s.g(x[order])[0][:, -1][order.argsort()])
        return found

    return _in_seeds(lambda: Fn(forward, g=nn.GRU(4, 5, batch_first=True), b=nn.Linear(5, 3)), 5, 4)


@point(PERMUTED, "dispatch to experts", f"{COINCIDING}[dispatch to experts]")
def dispatched_to_experts() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        order = s.r(x).argmax(1).argsort()
        weight, which = s.r(x[order]).softmax(-1).max(-1)
        each = torch.stack([expert(x[order]) for expert in s.e], 1)
        out = (each * F.one_hot(which, 3)[..., None]).sum(1) * weight[:, None]
        found: Tensor = s.h(out[order.argsort()])
        return found

    def made() -> nn.Module:
        experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        return Fn(forward, r=nn.Linear(4, 3), e=experts, h=nn.Linear(4, 3))

    return _in_seeds(made, 4)
