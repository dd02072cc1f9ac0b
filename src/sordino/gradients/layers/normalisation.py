"""Layer, group, instance, RMS and frozen batch normalisation: gradients of scales and shifts; other uses are
refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.errors import Refused
from sordino.gradients.labels.lineage import MANY, Axis, Owners
from sordino.gradients.layers.elementwise import stand_in
from sordino.gradients.sums.contributions import Contribution, Dense
from sordino.gradients.sums.standardisation import pull_back
from sordino.gradients.tape.layout import Frame, full
from sordino.gradients.tape.slots import Slot, Use, hold
from sordino.gradients.tape.tape import Tape

_BATCH = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_INSTANCE = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")


def _bound(names: tuple[str, ...], args: Any, kwargs: Any, **defaults: Any) -> dict[str, Any]:
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _owner(tape: Tape, call: dict[str, Any], kind: str) -> str:
    named = [*tape.model.named_parameters(), *tape.model.named_buffers()]
    names = {id(t): name.rpartition(".")[0] or "the model" for name, t in named}
    held = [names[id(t)] for t in call.values() if id(t) in names]
    if held:
        return held[0]
    like = [n for n, m in tape.model.named_modules() if kind in type(m).__name__]
    return like[0] if like else "a functional call"


def _batch_statistics(name: str) -> Refused:
    return Refused(
        f"{name}: BatchNorm in training mode normalises each record with the others, so a record's gradient is "
        "not its own; replace it with sordino.fix(model) (GroupNorm) or use eval mode"
    )


def refuse_batchnorm(name: str, module: nn.Module) -> None:
    """Runs before the forward pass: the module counts its batches before it calls batch_norm."""
    if module.training or module.running_mean is None:
        raise _batch_statistics(name or "the model")


def refuse_batch_statistics(tape: Tape, func: Any, args: Any, kwargs: Any) -> None:
    names = _BATCH if func is F.batch_norm else ("input", "weight", "bias", "running_mean", "running_var", "training")
    call = _bound(names, args, kwargs, training=False)
    if call["training"] or call.get("running_mean") is None:
        raise _batch_statistics(_owner(tape, call, "BatchNorm"))


def refuse_running_statistics(tape: Tape, func: Any, args: Any, kwargs: Any) -> None:
    call = _bound(_INSTANCE, args, kwargs, running_mean=None, use_input_stats=True)
    if call["use_input_stats"] and call["running_mean"] is not None:
        raise Refused(
            f"{_owner(tape, call, 'InstanceNorm')}: InstanceNorm with track_running_stats writes statistics of the "
            "batch into its buffers without noise; set track_running_stats=False"
        )


def layer_norm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = _bound(
        ("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs, weight=None, bias=None, eps=1e-5
    )
    x, shape, eps = call["input"], list(call["normalized_shape"]), call["eps"]
    w, b = tape.slot(call["weight"]), tape.slot(call["bias"])
    if tape.slot(x) is not None:
        return NotImplemented
    weight, bias = tape.value(call["weight"]), tape.value(call["bias"])
    if torch.is_autocast_enabled(x.device.type) or (weight is not None and weight.dtype != x.dtype):
        output = F.layer_norm(x, shape, weight, bias, eps)
        stats: tuple[Tensor, Tensor] | None = None
    else:
        output, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        stats = mean, rstd
    k, slots = len(shape), tuple(s for s in (w, b) if s is not None)

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        g = frame.fold(gradient, k, gradient=True).flatten(2)  # (m, S, d)
        out: list[tuple[Slot, Contribution]] = []
        if w is not None:
            mean, rstd = _statistics(x, k, eps) if stats is None else stats
            a = frame.fold(x.detach(), k).flatten(2)
            mean, rstd = (frame.fold(t, k).reshape(*a.shape[:2], 1) for t in (mean, rstd))
            # Σ_s x̂_s·g_s = Σ_s rstd_s·(a_s·g_s) − Σ_s (rstd_s·mean_s)·g_s, without a normalised copy
            scale = torch.bmm(rstd.mT, g * a) - torch.bmm((rstd * mean).mT, g)
            out.append((w, Dense(scale.reshape(-1, *shape))))
        if b is not None:
            out.append((b, Dense(g.sum(1).reshape(-1, *shape))))
        return out

    use = Use(func, slots, output.shape, tuple(range(x.ndim - k)), emit, hold(x))
    given = [t for t in (call["weight"], call["bias"]) if t is not None]
    return tape.tap(output, use, tape.leading(x, k) if len(given) == len(slots) else None)


def _statistics(x: Tensor, k: int, eps: float) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.ndim - k, x.ndim))
    variance, mean = torch.var_mean(full(x.detach()), dims, correction=0, keepdim=True)
    return mean, torch.rsqrt(variance + eps)


def rms_norm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = _bound(("input", "normalized_shape", "weight", "eps"), args, kwargs, weight=None, eps=None)
    slot = tape.slot(call["weight"])
    if slot is None or tape.slot(call["input"]) is not None:
        return NotImplemented
    plain = F.rms_norm(call["input"], call["normalized_shape"], None, call["eps"])
    return plain * stand_in(tape, func, slot, plain.shape, tape.joined([call["input"]], plain.shape))


def _per_image(tape: Tape, func: Any, t: Tensor | None, x: Tensor) -> Tensor | None:
    """A scale or shift of C channels as (n, C), one for each image: autograd's kernel returns their gradients
    separately."""
    if t is None:
        return None
    n, slot, label = x.shape[0], tape.slot(t), tape.joined([x], x.shape)
    if slot is None:
        return t.expand(n, -1)
    if isinstance(label, Owners):
        label = Owners(label.own.reshape(label.own.shape[0], 1)) if label.own[0].numel() == 1 else MANY
    elif isinstance(label, Axis) and label.dim:
        label = MANY
    return stand_in(tape, func, slot, (n, *slot.value.shape), label)


def _grouped(tape: Tape, func: Any, x: Tensor, groups: int, weight: Any, bias: Any, eps: float) -> Any:
    """Group normalisation of n images with c channels equals that of one image with n·c channels."""
    n, c = x.shape[:2]
    w, b = (_per_image(tape, func, t, x) for t in (weight, bias))
    flat = [None if t is None else t.reshape(n * c) for t in (w, b)]
    out = F.group_norm(x.reshape(1, n * c, *x.shape[2:]), n * groups, flat[0], flat[1], eps)
    return out.reshape(x.shape)


def group_norm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = _bound(("input", "num_groups", "weight", "bias", "eps"), args, kwargs, weight=None, bias=None, eps=1e-5)
    if tape.slot(call["input"]) is not None:
        return NotImplemented
    return _grouped(tape, func, call["input"], call["num_groups"], call["weight"], call["bias"], call["eps"])


def instance_norm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = _bound(_INSTANCE, args, kwargs, weight=None, bias=None, use_input_stats=True, eps=1e-5, running_mean=None)
    x = call["input"]
    if tape.slot(x) is not None:
        return NotImplemented
    if call["use_input_stats"]:
        return _grouped(tape, func, x, x.shape[1], call["weight"], call["bias"], call["eps"])
    return batch_norm(
        tape, func, (x, call["running_mean"], call["running_var"], call["weight"], call["bias"]), {"eps": call["eps"]}
    )


def batch_norm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """With frozen statistics (the guard refuses the other mode): a scale and a shift per channel."""
    call = _bound(_BATCH, args, kwargs, weight=None, bias=None, eps=1e-5)
    x = call["input"]
    if tape.slot(x) is not None:
        return NotImplemented
    out = F.batch_norm(x, call["running_mean"], call["running_var"], None, None, False, 0.0, call["eps"])
    shape = (x.shape[0], x.shape[1], *([1] * (x.ndim - 2)))
    w, b = (_per_image(tape, func, call[k], x) for k in ("weight", "bias"))
    out = out if w is None else out * w.reshape(shape)
    return out if b is None else out + b.reshape(shape)


def weight_standardisation(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """A kernel of standardised filters; for a parameter the pull-back is known in closed form."""
    weight, eps = args
    slot = tape.slot(weight)
    if kwargs or slot is None or slot.name is None:
        return tape.derive(func, args, kwargs)
    return tape.derive(func, args, kwargs, source=(slot, pull_back(slot.value, eps)))
