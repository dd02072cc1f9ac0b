"""What is run on the second device (`far.py`), in a process of its own: torch counts its devices at the first backward
pass of a process, so none may have been made before the device is registered.

    python tests/gradients/far_cases.py       prints JSON: what went wrong with each case, an empty text for nothing
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gradients import far
from sordino.clipping import AutomaticClip, FlatClip, L1Clip, L2LinfClip, PerLayerClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.plan import Plan
from sordino.plan.contribution import InnerMomentum
from sordino.training import Averaging, Settings, train

B = 5


class Takes(nn.Module):
    """The first of several outputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.attention = nn.Parameter(torch.randn(1, 1, 8)), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Fn(nn.Module):
    """A function of the rows and of its own parameters."""

    def __init__(self, function: Callable[..., Tensor], **values: Tensor) -> None:
        super().__init__()
        self.function, self.values = function, nn.ParameterDict(values)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self.values)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).flatten(1).square().sum(1)


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, 10, shape)


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(B, 4)),
    "linear over positions": lambda: (nn.Linear(4, 6), torch.randn(B, 7, 4)),
    "wide linear over positions": lambda: (nn.Linear(40, 50), torch.randn(B, 3, 40)),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Tanh()), torch.randn(B, 3, 8, 8)),
    "grouped convolution": lambda: (nn.Conv2d(4, 6, 3, groups=2), torch.randn(B, 4, 6, 6)),
    "depthwise convolution": lambda: (nn.Conv2d(4, 4, 3, groups=4), torch.randn(B, 4, 6, 6)),
    "convolution of one dimension": lambda: (nn.Conv1d(3, 4, 3), torch.randn(B, 3, 8)),
    "transposed convolution": lambda: (nn.ConvTranspose2d(4, 6, 3, stride=2), torch.randn(B, 4, 5, 5)),
    "embedding": lambda: (nn.Embedding(10, 4), _ids(B, 7)),
    "embedding bag": lambda: (nn.EmbeddingBag(10, 4), _ids(B, 7)),
    "layer norm": lambda: (nn.LayerNorm(6), torch.randn(B, 3, 6)),
    "group norm": lambda: (nn.GroupNorm(2, 6), torch.randn(B, 6, 4, 4)),
    "instance norm": lambda: (nn.InstanceNorm2d(3, affine=True), torch.randn(B, 3, 4, 4)),
    "rms norm": lambda: (nn.RMSNorm(6), torch.randn(B, 3, 6)),
    "prelu": lambda: (nn.PReLU(3), torch.randn(B, 3, 4)),
    "bilinear": lambda: (Fn(lambda x, w: F.bilinear(x, x, w), w=torch.randn(3, 4, 4)), torch.randn(B, 4)),
    "scale and shift": lambda: (Fn(lambda x, a, b: x * a + b, a=torch.randn(4), b=torch.randn(4)), torch.randn(B, 4)),
    "einsum": lambda: (Fn(lambda x, w: torch.einsum("bsd,df->bsf", x, w), w=torch.randn(4, 3)), torch.randn(B, 3, 4)),
    "product of parameters": lambda: (
        Fn(lambda x, u, v: F.linear(x, u @ v), u=torch.randn(3, 2), v=torch.randn(2, 4)), torch.randn(B, 4),
    ),
    "weight norm": lambda: (parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(B, 4)),
    "lstm": lambda: (Takes(nn.LSTM(4, 3, batch_first=True)), torch.randn(B, 5, 4)),
    "gru": lambda: (Takes(nn.GRU(4, 3, batch_first=True)), torch.randn(B, 5, 4)),
    "rnn": lambda: (Takes(nn.RNN(4, 3, batch_first=True)), torch.randn(B, 5, 4)),
    "attention": lambda: (Attends(), torch.randn(B, 4, 8)),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(B, 4, 8)),
    "any other operation": lambda: (
        Fn(lambda x, w: torch.nn.functional.cosine_similarity(x[:, None], w[None], dim=-1), w=torch.randn(3, 4)),
        torch.randn(B, 4),
    ),
}  # fmt: skip


CHECKED = ("linear", "convolution", "embedding", "transformer", "any other operation")  # against plain autograd too


def _both(net: nn.Module, x: Tensor, clipping: Any, checks: bool = False) -> None:
    net = net.double()
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        targets = torch.randn_like(net(x))
    near = clipped_sum(net, squared, Rows(x, targets), clipping)
    net.to(far.NAME)
    away = Rows(x.to(far.NAME), targets.to(far.NAME))
    found = clipped_sum(net, squared, away, clipping, assurance=Assurance() if checks else None)
    assert found.norms.cpu().allclose(near.norms, rtol=1e-6)  # attention is computed otherwise
    for name, value in near.sums.items():
        assert found.sums[name].device.type == far.NAME, name
        assert found.sums[name].cpu().allclose(value, rtol=1e-6, atol=1e-6), name


def family_is_the_same(family: str) -> None:
    net, x = FAMILIES[family]()
    _both(net, x, FlatClip(0.8), checks=family in CHECKED)


def refuses_to_meet_the_cpu() -> None:
    try:
        torch.ones(3).to(far.NAME) + torch.ones(3)
    except (RuntimeError, SystemError):
        return
    raise AssertionError("two devices met")


CLIPPINGS = [PerLayerClip(0.5), AutomaticClip(0.5), L1Clip(0.5), L2LinfClip(0.5, 0.1)]


def clipping_is_the_same(clipping: Any) -> None:
    _both(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(B, 4), clipping)


def _trained(device: str, out: Path) -> tuple[list[Tensor], int]:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 3)).to(device)
    x, y = torch.randn(40, 1, 6, 6), torch.arange(40) % 3
    plan = Plan.dpsgd(
        noise_multiplier=1.0, delta=1e-4, records=40, expected_batch=20, steps=3, clip_norm=1.0, insecure_seed=4,
        inner=InnerMomentum(length=1, decay=0.5),
    )  # fmt: skip
    settings = Settings(chunk=8, checkpoint_every=1, progress=False, averaging=Averaging("tail"))
    given: dict[str, Any] = {"optimizer": torch.optim.Adam, "lr": 0.1, "settings": settings, "out": out}
    result = train(net, F.cross_entropy, (x, y), plan, **given)
    again = train(net, F.cross_entropy, (x, y), plan, **given, resume=True)
    assert [p.device.type for p in result.model.parameters()] == [device] * 4
    return [p.detach().cpu() for p in again.model.parameters()], len(list((out / "checkpoint").iterdir()))


def run_ends_with_the_weights_of_the_cpu(tmp_path: Path) -> None:
    near, far_away = _trained("cpu", tmp_path / "near"), _trained(far.NAME, tmp_path / "far")
    assert near[1] == far_away[1]
    for one, other in zip(near[0], far_away[0], strict=True):
        assert one.allclose(other, rtol=1e-4, atol=1e-5)


def main() -> int:
    far.register()
    cases: dict[str, Callable[[], None]] = {"refuses": refuses_to_meet_the_cpu}
    cases |= {family: partial(family_is_the_same, family) for family in FAMILIES}
    cases |= {str(clipping): partial(clipping_is_the_same, clipping) for clipping in CLIPPINGS}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        cases["run"] = partial(run_ends_with_the_weights_of_the_cpu, Path(folder))
        for name, case in cases.items():
            torch.manual_seed(0)
            try:
                case()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
