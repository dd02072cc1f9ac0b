"""Views of a record: drawn from its own content, whoever else is there, and clipped as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sordino.audit import check_neighbouring
from sordino.audit.faults import views_by_place, views_clipped_apart
from sordino.errors import ClaimBroken, InputError, Refused
from sordino.gradients import Rows
from sordino.plan import Plan
from sordino.plan.contribution import Augmentation
from sordino.records.content import digests
from sordino.records.gradients import plan_gradients, record_gradients
from sordino.records.views import with_views
from sordino.release.ledger import Ledger
from sordino.sampling import LogicalBatch
from sordino.training.steps import private_steps

EVERYTHING = Augmentation(views=3, crop=1, flip=True, erase=0.5, mixup=0.4)


def images(n: int, channels: int = 2, side: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(seed))


def views_of(x: Tensor, augmentation: Augmentation, seed: int = 0, step: int = 0) -> Tensor:
    """(records, views, …)"""
    rows = with_views(Rows(x, torch.zeros(len(x))), augmentation, seed=seed, step=step)
    return rows.inputs.unflatten(0, (len(x), augmentation.views))


class TestWhatTheyDependOn:
    @given(st.sets(st.integers(0, 9), min_size=1), st.integers(0, 2**32))
    @settings(max_examples=30, deadline=None)
    def test_a_record_has_the_same_views_whoever_else_is_there_and_wherever_it_stands(
        self, kept: set[int], seed: int
    ) -> None:
        x, some = images(10), torch.tensor(sorted(kept, key=lambda i: (i * 7 + seed) % 10))
        everyone = views_of(x, EVERYTHING, seed, step=4)
        assert torch.equal(views_of(x[some], EVERYTHING, seed, step=4), everyone[some])

    def test_texts_too(self) -> None:
        x = torch.randint(1, 50, (8, 30), generator=torch.Generator().manual_seed(0))
        dropout = Augmentation(views=2, word_dropout=0.3)
        assert torch.equal(views_of(x[[5, 2]], dropout), views_of(x, dropout)[[5, 2]])

    def test_step_and_seed_draw_anew_and_the_same_ones_draw_the_same(self) -> None:
        x = images(4)
        drawn = views_of(x, EVERYTHING, seed=1, step=2)
        assert torch.equal(drawn, views_of(x, EVERYTHING, seed=1, step=2))
        assert not torch.equal(drawn, views_of(x, EVERYTHING, seed=2, step=2))
        assert not torch.equal(drawn, views_of(x, EVERYTHING, seed=1, step=3))
        assert not torch.equal(drawn[:, 0], drawn[:, 1])

    def test_one_bit_of_a_record_changes_its_digest_and_no_other(self) -> None:
        for x in (images(5), torch.randint(0, 256, (5, 3, 7), dtype=torch.uint8), torch.randint(0, 99, (5, 9))):
            other = x.clone()
            other[2].view(-1)[0] += 1
            same = digests(x, 5) == digests(other, 5)
            assert same.tolist() == [True, True, False, True, True]


class TestWhatTheyAre:
    def test_a_crop_is_a_window_of_the_padded_image_mirrored_or_not_and_every_window_comes(self) -> None:
        x = images(1)
        padded = nn.functional.pad(x, [1] * 4)[0]
        windows = [padded[:, r : r + 6, c : c + 6] for r in range(3) for c in range(3)]
        known = windows + [w.flip(2) for w in windows]
        found = torch.zeros(len(known))
        for view in views_of(x, Augmentation(views=900, crop=1, flip=True))[0]:
            hits = [i for i, window in enumerate(known) if torch.equal(view, window)]
            assert len(hits) == 1
            found[hits[0]] += 1
        assert found.min() > 20, "fifty of each are expected"
        assert found.max() < 90

    def test_erasing_puts_zeros_into_one_rectangle_of_some_views(self) -> None:
        x = torch.ones(1, 1, 16, 16)
        views = views_of(x, Augmentation(views=400, erase=0.5))[0, :, 0]
        erased = [v for v in views if bool((v == 0).any())]
        assert 150 < len(erased) < 250
        for view in erased:
            rows, columns = (view == 0).any(1), (view == 0).any(0)
            assert torch.equal(view == 0, rows[:, None] & columns[None, :])
            assert 2 <= int(rows.sum()) <= 8
            assert int(rows.nonzero().max() - rows.nonzero().min()) + 1 == int(rows.sum())

    def test_mixup_stays_within_the_record(self) -> None:
        """Black and white records: a mix across records would be grey."""
        x = torch.cat([torch.zeros(3, 1, 8, 8), torch.ones(3, 1, 8, 8)])
        flat = views_of(x, Augmentation(views=4, flip=True, mixup=0.5))
        assert torch.allclose(flat, x[:, None].expand_as(flat))
        ramp = torch.arange(8.0).expand(1, 1, 8, 8)
        mixed = views_of(ramp, Augmentation(views=50, flip=True, mixup=0.5))[0, :, 0, 0]
        share = mixed[:, 0] / 7  # of the mirrored one
        assert torch.allclose(
            mixed, (1 - share[:, None]) * ramp[0, 0, 0] + share[:, None] * ramp[0, 0, 0].flip(0), atol=1e-5
        )
        assert len(share.unique()) > 10

    def test_word_dropout_replaces_words_at_its_rate_and_never_padding(self) -> None:
        x = torch.randint(2, 90, (5, 400), generator=torch.Generator().manual_seed(3))
        x[:, 300:] = 0
        views = views_of(x, Augmentation(views=10, word_dropout=0.2, unknown_id=1))
        changed = views != x[:, None]
        assert bool((views[changed] == 1).all())
        assert not bool(changed[:, :, 300:].any())
        assert float(changed[:, :, :300].double().mean()) == pytest.approx(0.2, abs=0.02)

    def test_several_rows_of_a_user_are_averaged_over_their_own_views(self) -> None:
        rows = Rows(images(3), torch.zeros(3), torch.tensor([1, 0, 1]), 2, torch.tensor([1.0, 2.0, 3.0]))
        seen = with_views(rows, Augmentation(views=2, flip=True), seed=0, step=0)
        assert seen.record is not None
        assert seen.coefficient is not None
        assert seen.record.tolist() == [1, 1, 0, 0, 1, 1]
        assert seen.coefficient.tolist() == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]

    def test_nothing_to_change_changes_nothing(self) -> None:
        rows = Rows(images(3), torch.zeros(3))
        assert with_views(rows, Augmentation(), seed=0, step=0) is rows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"views": 0}, "views"),
        ({"views": 4}, "all equal"),
        ({"crop": -1}, "crop"),
        ({"crop": True}, "crop"),
        ({"flip": True, "erase": 1.5}, "erase"),
        ({"mixup": 0.3}, "crop, flip or erase must make them differ"),
        ({"flip": True, "mixup": 0.7}, "mixup"),
        ({"flip": True, "word_dropout": 0.1}, "for texts"),
    ],
)
def test_what_makes_no_sense_is_an_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Augmentation(**options)


def test_images_and_texts_are_told_apart() -> None:
    with pytest.raises(InputError, match="images"):
        views_of(torch.randn(4, 12), Augmentation(crop=1))
    with pytest.raises(InputError, match="word ids"):
        views_of(images(4), Augmentation(word_dropout=0.1))


# --- the bound -------------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


def views_plan(augmentation: Augmentation | None) -> Plan:
    return Plan.dpsgd(
        noise_multiplier=1.0, delta=1e-5, records=12, expected_batch=12, steps=2, clip_norm=0.5,
        augmentation=augmentation, insecure_seed=0,
    )  # fmt: skip


def dataset() -> tuple[Tensor, Tensor]:
    return 5 * images(12), torch.arange(12) % 3


def test_a_record_moves_the_sum_by_at_most_the_clip_norm_wherever_it_stands() -> None:
    plan = views_plan(EVERYTHING)
    sums = plan_gradients(plan, net(), nn.functional.cross_entropy, dataset())
    for record in range(12):
        found = check_neighbouring(plan, sums, record, others=torch.arange(12), step=record)
        assert found.difference == pytest.approx(0.5, rel=1e-3), "large gradients: the bound is attained"


@pytest.mark.parametrize("fault", [views_clipped_apart, views_by_place])
def test_views_that_are_clipped_apart_or_drawn_by_place_are_caught(fault: Any) -> None:
    """Clipped one by one they add up to three times the bound; drawn by place, all later records get new ones."""
    plan = views_plan(Augmentation(views=3, flip=True))
    broken = fault(plan, net(), nn.functional.cross_entropy, dataset())
    with pytest.raises(ClaimBroken, match="more than the"):
        check_neighbouring(plan, broken, 0, others=torch.arange(12))


def test_taking_a_row_out_of_the_dataset_moves_the_sum_by_at_most_the_clip_norm() -> None:
    """Not an index less in the batch but a row less in the array: every later record has another index."""
    plan, (x, y) = views_plan(EVERYTHING), dataset()

    def total(inputs: Tensor, targets: Tensor) -> Tensor:
        sums = plan_gradients(plan, net(), nn.functional.cross_entropy, (inputs, targets))
        found = sums(LogicalBatch(0, torch.arange(len(inputs)), 512)).sums
        return torch.cat([v.double().flatten() for v in found.values()])

    whole = total(x, y)
    for gone in range(12):
        rest = torch.arange(12) != gone
        assert float((whole - total(x[rest], y[rest])).norm()) <= 0.5 * (1 + 1e-5)


def test_gradients_of_other_views_than_the_plan_states_are_refused() -> None:
    plan = views_plan(None)
    sums = record_gradients(net(), nn.functional.cross_entropy, dataset(), plan.clipping, views=EVERYTHING)
    with Ledger.open(None, plan.to_dict()) as ledger, pytest.raises(Refused, match="the plan states"):
        next(private_steps(plan, sums, records=12, source=plan.source(), ledger=ledger))


def test_the_chunk_bounds_rows_and_changes_nothing() -> None:
    sums = plan_gradients(views_plan(EVERYTHING), net(), nn.functional.cross_entropy, dataset())
    whole, parts = (sums(LogicalBatch(0, torch.arange(12), chunk)) for chunk in (512, 4))
    for name, value in whole.sums.items():
        assert torch.allclose(value.double(), parts.sums[name].double(), atol=1e-6)
    assert torch.allclose(whole.norms, parts.norms, rtol=1e-5)
