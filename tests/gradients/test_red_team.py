"""Attacks that found nothing, kept: each mixes records somewhere, and is refused in its first batch.

The hidden values (rows, 16) of a small network go through one operation that lets rows meet, at sizes that coincide.
Operations of which labels know nothing are among them: those are measured, or tested.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import Tensor, nn

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance

ROWS = 16


def _outside(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def act(z: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            return make(z)

    return act


def _in_a_thread(z: Tensor) -> Tensor:
    found: list[Tensor] = []
    worker = threading.Thread(target=lambda: found.append(z.detach().mean(0)))
    worker.start()
    worker.join()
    return z - found[0]


def _out_of_a_mean(z: Tensor) -> Tensor:
    mean = torch.empty(16)
    torch.mean(z.detach(), 0, out=mean)
    return z - mean


def _set_with_an_offset(z: Tensor) -> Tensor:
    shifted = torch.empty(0)
    shifted.set_(z.detach().clone().untyped_storage(), 16, (len(z) - 1, 16), (16, 1))
    return z + torch.cat([shifted, z.detach()[:1]])


def _put(z: Tensor, accumulate: bool) -> Tensor:
    place = z.argmax(1) % 4
    return z + torch.zeros(4, 16).index_put((place,), z, accumulate=accumulate)[place]


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "roll without dimensions": lambda z: z + z.roll(16),
    "rot90": lambda z: z + torch.rot90(z, 2),
    "the transpose of a square": lambda z: z + z.T if z.shape[0] == 16 else z,
    "overlapping strides": lambda z: torch.as_strided(
        torch.cat([z.flatten(), z.new_zeros(16)]), (len(z), 16), (16, 1), 8
    ),
    "windows over rows": lambda z: torch.cat([z, z[-1:], z[-1:]]).unfold(0, 3, 1).mean(-1),
    "rows as an image": lambda z: F.unfold(F.pad(z[None, None], (0, 0, 1, 1)), (3, 1)).view(3, len(z), 16).mean(0),
    "pixel_shuffle": lambda z: F.pixel_shuffle(z.view(1, -1, 4, 4)[:, : len(z) // 4 * 4], 2).reshape(len(z), 16),
    "einsum with an ellipsis": lambda z: torch.einsum("...i,...i->", z, z) * 0.01 * z,
    "einsum without an arrow": lambda z: z + (torch.einsum("ba", z) if len(z) == 16 else 0),
    "pdist": lambda z: z * F.pdist(z).mean(),
    "histc": lambda z: z * torch.histc(z.detach(), 4)[0] / 100,
    "bincount": lambda z: z * torch.bincount(z.argmax(1), minlength=16)[z.argmax(1)][:, None] / 10,
    "index_put, added": lambda z: _put(z, True),
    "index_put, the last wins": lambda z: _put(z, False),
    "scatter_reduce": lambda z: (
        z + torch.zeros(4, 16).scatter_reduce(0, (z.argmax(1) % 4)[:, None].expand(-1, 16), z, "amax")[z.argmax(1) % 4]
    ),
    "segment_reduce": lambda z: z + torch.segment_reduce(z, "mean", lengths=torch.tensor([len(z)]), axis=0),
    "take": lambda z: z + torch.take(z, torch.arange(z.numel()).view_as(z).flip(0)),
    "diff": lambda z: z + torch.diff(z, dim=0, prepend=z[:1]),
    "cov": lambda z: z * torch.cov(z.T).diagonal().mean(),
    "renorm": lambda z: torch.renorm(z, 2, 1, 0.5),
    "tensordot": lambda z: z @ torch.tensordot(z, z, dims=([0], [0])),
    "multi_dot": lambda z: torch.linalg.multi_dot([z, z.T, z]) * 0.1,
    "a solver": lambda z: torch.linalg.solve(z.T @ z + torch.eye(16), z.T).T,
    "layer_norm over everything": lambda z: F.layer_norm(z, z.shape),
    "group_norm with rows as channels": lambda z: F.group_norm(z[None], 1)[0],
    "attention over the batch": lambda z: F.scaled_dot_product_attention(z[None], z[None], z[None])[0],
    "halves swapped": lambda z: torch.vstack(torch.chunk(z, 2)[::-1]),
    "rows merged and moved": lambda z: z.view(-1, 4, 4).transpose(0, 1).reshape(-1, 16),
    "fftshift": lambda z: torch.fft.fftshift(z),
    "a count of nonzero": lambda z: z * (1 + torch.nonzero(z.detach() > 0.5).shape[0] / 100),
    "masked_scatter": lambda z: z.masked_scatter(z.detach() > 0.3, z.flip(0)),
    "searchsorted": lambda z: z * torch.searchsorted(z[:, 0].detach().sort().values, z[:, 0].detach())[:, None] / 16,
    "a clamp by another row": lambda z: torch.clamp(z, max=z.detach().roll(1, 0) + 0.5),
    "addr": lambda z: torch.addr(z, z[:, 0], z[0]),
    "a sparse product": lambda z: torch.sparse.mm((torch.ones(len(z), len(z)) / len(z)).to_sparse(), z),
    "tril": torch.tril,
    "aten": lambda z: torch.ops.aten.sub(z, torch.ops.aten.mean(z, [0])),
    "dlpack": lambda z: z - torch.from_dlpack(z.detach()).mean(0),
    "pickle": lambda z: z - pickle.loads(pickle.dumps(z.detach())).mean(0),
    "text": lambda z: z * len(str(z)) / 3000,
    "a row that gets the mean": lambda z: torch.cat([z.mean(0, keepdim=True), z[1:]]),
    "out=": _out_of_a_mean,
    "set_": _set_with_an_offset,
    "a thread": _in_a_thread,
    "no torch function": _outside(lambda z: z - z.mean(0)),
    "no torch function, detached": _outside(lambda z: z - z.detach().mean(0)),
}


def network(act: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Fn(lambda s, x: s.b(act(torch.tanh(s.a(x)))), a=nn.Linear(8, 16), b=nn.Linear(16, 3))


def rows(count: int = ROWS) -> Rows:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return Rows(x, torch.arange(count) % 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_meet_are_refused(name: str) -> None:
    with pytest.raises(sordino.Refused):
        clipped_sum(network(MIXING[name]), F.cross_entropy, rows(), FlatClip(0.5), assurance=Assurance())


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


SOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "renorm of rows": lambda z: torch.renorm(z, 2, 0, 0.5),
    "kron": lambda z: torch.kron(z, torch.ones(1, 1)),
    "tensordot of features": lambda z: torch.tensordot(z, torch.eye(16), dims=([1], [0])),
    "stft": lambda z: torch.stft(z, 8, 4, window=torch.ones(8), return_complex=True).abs().flatten(1)[:, :16],
    "setup_context": lambda z: Halved.apply(z),  # type: ignore[no-untyped-call]
    "bucketize": lambda z: z * torch.bucketize(z.detach(), torch.linspace(-1, 1, 5)),
    "straight through": lambda z: z + (z.sign() - z).detach(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOUND)
def test_rows_that_do_not_meet_have_the_sums_of_a_loop_in_batches_of_several_sizes(name: str) -> None:
    model, checks = network(SOUND[name]), Assurance()
    for count in (ROWS, 9, 33):
        given = Rows(rows(count).inputs, rows(count).targets, torch.arange(count) // 2)
        found = clipped_sum(model, F.cross_entropy, given, FlatClip(0.5), assurance=checks)
        want = brute_force(model, F.cross_entropy, given, FlatClip(0.5))
        for key, value in want.sums.items():
            torch.testing.assert_close(found.sums[key].float(), value, rtol=1e-4, atol=1e-5)
