"""Forms of tensors and of numbers: rows that can't be selected, and models that compute in half precision."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sordino
from sordino.clipping import FlatClip
from sordino.errors import InputError, Refused
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.tape.layout import Frame
from sordino.sampling import LogicalBatch

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "without data": lambda x: x.to("meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_can_not_be_selected_are_named_with_the_remedy(form: str) -> None:
    """Each ended in an error of torch's own, such as "Internal error … Please file an issue"."""
    rows = Rows(FORMS[form](torch.randn(5, 6)), torch.zeros(5, dtype=torch.long))
    with pytest.raises(InputError, match="give a dense one"):
        clipped_sum(nn.Linear(6, 3), F.cross_entropy, rows, FlatClip(1.0))


@pytest.mark.parametrize("where", ["inputs", "targets", "the call"])
def test_tensors_of_inference_mode_and_calls_within_it_are_named_with_the_remedy(where: str) -> None:
    """Both ended in "Inference tensors do not track version counter"."""
    with torch.inference_mode():
        made = {"inputs": torch.randn(5, 6), "targets": torch.zeros(5, dtype=torch.long)}
        if where == "the call":
            with pytest.raises(InputError, match="outside of"):
                clipped_sum(nn.Linear(6, 3), F.cross_entropy, Rows(**made), FlatClip(1.0))
    if where != "the call":
        rows = {name: t if name == where else t.clone() for name, t in made.items()}
        with pytest.raises(InputError, match=f"{where} have a tensor that was made in torch.inference_mode"):
            clipped_sum(nn.Linear(6, 3), F.cross_entropy, Rows(**rows), FlatClip(1.0))


class Halves(nn.Module):
    """Single precision, but for one layer that casts its own weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x.unflatten(1, (3, 2)).bfloat16(), self.a.weight.bfloat16(), self.a.bias.bfloat16())
        return self.b(torch.tanh(h.float()).mean(1))  # type: ignore[no-any-return]


def released() -> Tensor:
    source = torch.Generator().manual_seed(1)
    data = torch.randn(40, 6, generator=source), torch.randint(3, (40,), generator=source)
    made = sordino.record_gradients(Halves(), F.cross_entropy, data, FlatClip(1.0))
    return made(LogicalBatch(0, torch.arange(40), 64)).norms


def test_weights_that_the_model_casts_to_half_precision_are_no_fault() -> None:
    """Refused once: the comparison with autograd asked for more digits than the model computes."""
    assert bool(released().isfinite().all())


def test_a_fault_is_still_found_in_half_precision() -> None:
    fold = Frame.fold

    def exchanged(self: Frame, t: Tensor, features: int, gradient: bool = False) -> Tensor:
        found = fold(self, t, features, gradient)
        return found.flip(0) if gradient else found

    with mock.patch.object(Frame, "fold", exchanged), pytest.raises(Refused, match="differs from autograd"):
        released()
