"""Ways to change data, or its gradient, that the tape does not see: none of them is trusted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.checks.neutral import Neutral

N = 6
Forward = Callable[[Any, Tensor], Tensor]


def losses(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, reduction="none")


def net(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    return Fn(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()


def rows(seed: int = 0) -> Rows:
    source = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(N, 4, generator=source, dtype=torch.float64), torch.arange(N) % 3)


def plain(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)))


def _imaginary(other: Callable[[Tensor], Tensor]) -> Forward:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        z = torch.complex(h, h)
        z.imag = other(h)
        return m.b(torch.tanh(z.real + z.imag))

    return forward


def _seldom(h: Tensor) -> Tensor:
    """The other rows, in batches that a test may never meet."""
    return torch.where(h.detach().max() > 1e4, h.flip(0), h)


@torch.jit.script
def _scripted(y: Tensor) -> Tensor:
    return y.sub_(y.mean(0))


def _by_script(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    _scripted(y)
    return plain(m, y)


def _through_memory(m: Any, x: Tensor) -> Tensor:
    h, other = m.a(x) * 2, m.a(x).detach().flip(0).contiguous()
    ctypes.memmove(h.data_ptr(), other.data_ptr(), other.numel() * 8)
    return m.b(h + 0)


def _by_storage(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 2
    h.untyped_storage().copy_(h.detach().flip(0).contiguous().untyped_storage())
    return m.b(h + 0)


def _by_numpy(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 2
    seen = h.detach().numpy()
    seen[:] = seen[::-1].copy()
    return m.b(h + 0)


def _by_dlpack(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 2
    seen = torch.utils.dlpack.from_dlpack(h.detach())
    seen.copy_(seen.flip(0).clone())
    return m.b(h + 0)


def _as_a_list_of_tensors(m: Any, x: Tensor) -> Tensor:
    y = [x * 1.0]
    torch._foreach_sub_(y, [x.mean(0).expand_as(x).contiguous()])
    return plain(m, y[0])


def _memory_of_another(m: Any, x: Tensor) -> Tensor:
    y, other = x * 1.0, x.flip(0).contiguous()
    y.set_(other.untyped_storage(), 0, y.shape, y.stride())
    return plain(m, y)


WRITES: dict[str, Forward] = {
    "z.imag = the mean": _imaginary(lambda h: h.mean(0).expand_as(h)),
    "z.imag = other rows, seldom": _imaginary(_seldom),
    "a scripted function in place": _by_script,
    "ctypes": _through_memory,
    "untyped_storage": _by_storage,
    "numpy": _by_numpy,
    "dlpack": _by_dlpack,
    "torch._foreach": _as_a_list_of_tensors,
    "set_": _memory_of_another,
}


@pytest.mark.parametrize("name", WRITES)
def test_data_that_is_written_to_unseen_is_refused(name: str) -> None:
    with pytest.raises(Refused):
        clipped_sum(net(WRITES[name]), losses, rows(), FlatClip(1.0), assurance=Assurance())


def test_a_part_of_a_complex_number_that_is_set_does_not_hold_up_the_check_for_ever() -> None:
    with Neutral(), pytest.raises(Refused, match="imag"):
        clipped_sum(net(WRITES["z.imag = the mean"]), losses, rows(), FlatClip(1.0))


def _flipped(gradients: Any) -> Any:
    return tuple(None if g is None else g.flip(0) for g in gradients)


def _hook(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    h.register_hook(lambda g: g.flip(0))
    return m.b(h)


def _prehook_of_a_node(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    h.grad_fn.register_prehook(_flipped)  # type: ignore[union-attr]
    return m.b(h)


def _hook_that_depends_on_the_batch(m: Any, x: Tensor) -> Tensor:
    """The others' gradients are scaled where one row is large."""
    h, large = torch.tanh(m.a(x)), 1.0 if float(x.detach().abs().max()) < 50 else 0.1
    h.grad_fn.register_hook(lambda inner, outer: (inner[0] * large, *inner[1:]))  # type: ignore[union-attr]
    return m.b(h)


def _kept_tensors(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.flip(0) if t.shape == (len(x), 5) else t):
        h = torch.tanh(m.a(x))
    return m.b(h)


HOOKS: dict[str, Forward] = {
    "a hook on a tensor": _hook,
    "a hook on a node of the graph": _prehook_of_a_node,
    "a hook that looks at the batch": _hook_that_depends_on_the_batch,
    "hooks on what autograd keeps": _kept_tensors,
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_mixes_the_rows_of_a_gradient_is_refused(name: str) -> None:
    with pytest.raises(Refused):
        clipped_sum(net(HOOKS[name]), losses, rows(), FlatClip(1.0), assurance=Assurance())


def _view(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1.0
    part = h[:, :2]
    part.mul_(2.0)
    h.clamp_(min=-1.0)
    return m.b(h + part.sum(1, keepdim=True))


def _constant(m: Any, x: Tensor) -> Tensor:
    scale = torch.ones(5, dtype=x.dtype)
    scale.view(-1)[1:].mul_(0.5)
    return m.b(torch.tanh(m.a(x)) * scale)


def _scaled_by_a_hook(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    if h.requires_grad:
        h.register_hook(lambda g: 0.5 * g)
    return m.b(h)


@pytest.mark.parametrize("forward", [_view, _constant, _scaled_by_a_hook])
def test_writes_and_hooks_that_work_row_by_row_are_followed(forward: Forward) -> None:
    model = net(forward)
    found = clipped_sum(model, losses, rows(), FlatClip(1.0), assurance=Assurance())
    oracle = brute_force(model, losses, rows(), FlatClip(1.0))
    for name, want in oracle.sums.items():
        torch.testing.assert_close(found.sums[name], want)


def _mixed_by_seeded_numbers(m: Any, x: Tensor) -> Tensor:
    """Equal numbers in the place of random ones would order nobody."""
    order = torch.randn(len(x), generator=torch.Generator().manual_seed(7)).argsort().numpy()
    return plain(m, 0.5 * x + 0.5 * torch.from_numpy(x.numpy()[order].copy()))


def _gate(of: Callable[[Tensor], bool]) -> Forward:
    return lambda m, x: plain(m, x) * (0.1 if of(x) else 1.0)


def _kept_in_an_array(m: Any, x: Tensor) -> Tensor:
    kept = m.__dict__.setdefault("kept", np.zeros(1))
    out = plain(m, x * float(1 + kept[0] // 1000))  # of the first batches nothing shows
    kept[0] = float(x.abs().max())
    return out


ACROSS: dict[str, Forward] = {
    "mixed by seeded random numbers": _mixed_by_seeded_numbers,
    "a gate on records of zeros": _gate(lambda x: bool((x.abs().sum(1) == 0).any())),
    "a gate on constant records": _gate(lambda x: bool((x.std(1) == 0).any())),
    "a gate on equal records": _gate(lambda x: len(torch.unique(x, dim=0)) < len(x)),
    "a gate on short records": _gate(lambda x: float(x.abs().amax(1).min()) < 0.05),
    "an array that the next batch reads": _kept_in_an_array,
}


@pytest.mark.parametrize("name", ACROSS)
def test_records_that_meet_in_special_batches_are_refused(name: str) -> None:
    with pytest.raises(Refused):
        clipped_sum(net(ACROSS[name]), losses, rows(), FlatClip(1.0), assurance=Assurance())


def _generator_made_in_the_pass(m: Any, x: Tensor) -> Tensor:
    source = torch.Generator().manual_seed(7)
    return m.b(torch.tanh(m.a(x)) * (torch.rand(len(x), 5, generator=source, dtype=x.dtype) < 0.5))


def _generator_of_the_model(m: Any, x: Tensor) -> Tensor:
    source = m.__dict__.setdefault("source", torch.Generator().manual_seed(1))
    return m.b(torch.tanh(m.a(x)) + torch.randn(len(x), 5, generator=source, dtype=x.dtype))


def _seeded(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return m.b(F.dropout(torch.tanh(m.a(x)), 0.5))


def _seeded_and_put_back(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return m.b(F.dropout(torch.tanh(m.a(x)), 0.5))


KNOWN: dict[str, Forward] = {
    "a generator made in the pass": _generator_made_in_the_pass,
    "a generator of the model": _generator_of_the_model,
    "torch's generator, seeded": _seeded,
    "torch's generator, seeded and put back": _seeded_and_put_back,
}


@pytest.mark.parametrize("name", KNOWN)
def test_masks_that_are_known_to_who_knows_the_program_are_refused(name: str) -> None:
    """They belong to a place in the batch: one record less moved the sum by 3 to 7 clip norms."""
    with pytest.raises(Refused, match="secret randomness"):
        clipped_sum(net(KNOWN[name]), losses, rows(), FlatClip(1.0), assurance=Assurance())


def _projected(m: Any, x: Tensor) -> Tensor:
    source = torch.Generator().manual_seed(7)
    return plain(m, x @ torch.randn(4, 4, generator=source, dtype=x.dtype))


@pytest.mark.parametrize("forward", [_projected, lambda m, x: m.b(F.dropout(torch.tanh(m.a(x)), 0.5))])
def test_numbers_that_are_the_same_for_all_rows_or_secret_are_accepted(forward: Forward) -> None:
    assert clipped_sum(net(forward), losses, rows(), FlatClip(1.0), assurance=Assurance()).dropped == 0
