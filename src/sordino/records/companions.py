"""BatchClipping: a network with BatchNorm, each private record normalised with public rows (Xiao et al. 2023, Alg. 3).

A record's gradient is that of its own loss, computed on a batch of p rows: the record and p − 1 *public* rows, drawn
for every record and step by public randomness and the record's own content. A private row is never normalised with
another private row, and there are no running statistics. So a record contributes one clipped vector, and the
sensitivity is that of DP-SGD (docs/guarantees/batch_clipping.md). Training and prediction need the public rows: they
are part of the model.

    resnet = nets.build("resnet", (3, 32, 32), 10, depth=8, form="batch")
    net = companion_model(resnet, public, companions=7)                      # public: a Split; p = 8 rows per record
    plan = Plan.dpsgd(…, public=PublicSet.of(public, "100 images of …"))     # the plan says which rows are public
    train(net, cross_entropy, private, plan, lr=1.0)
    classes = predict(net, test_inputs, draws=10)

Nothing else has to be switched on: `train`, `record_gradients`, `private_steps` and the audits draw the companions of
such a model, also with views (each view has its own companions) and past iterates (all have the same).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino.errors import InputError, Refused
from sordino.gradients import Rows
from sordino.gradients.layers.companion_norm import STACKED_ROWS, companion_norm
from sordino.plan.contribution import Companions, Contribution
from sordino.plan.core import Plan
from sordino.plan.public import digest_of, refuse_shared_rows
from sordino.records.content import digests, sequence, start
from sordino.registry import names_with
from sordino.split import Split

_BatchNorm = nn.modules.batchnorm._BatchNorm


class CompanionNorm(nn.Module):
    """nn.BatchNorm in training mode over each record's own rows. Eval mode is the same: the running averages that
    BatchNorm would use there would depend on private rows."""

    def __init__(self, norm: _BatchNorm, rows_per_record: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.rows_per_record = rows_per_record

    def forward(self, x: Tensor) -> Tensor:
        return companion_norm(x, self.weight, self.bias, self.rows_per_record, self.eps)

    def extra_repr(self) -> str:
        return f"rows_per_record={self.rows_per_record}, eps={self.eps}"


class CompanionNet(nn.Module):
    """A network whose BatchNorm layers see a row together with its companions; outputs are those of the row only.

    forward(inputs, companions): ``companions`` (rows, p − 1) are indices of public rows. Made by `companion_model`.
    """

    def __init__(self, network: nn.Module, public: Split, companions: int) -> None:
        super().__init__()
        self.network, self.companions, self.rows_per_record = network, companions, companions + 1
        self.public: Tensor
        self.public_targets: Tensor  # only used to compare the rows with the plan's declaration
        self.register_buffer("public", public.inputs.detach().clone())
        self.register_buffer("public_targets", public.targets.detach().clone())

    def forward(self, inputs: Tensor, companions: Tensor | None = None) -> Tensor:
        if companions is None:
            raise InputError(
                "this network normalises each row with public companions, and none were given: train it with train or "
                "record_gradients, which draw them, and predict with sordino.records.companions.predict"
            )
        if companions.shape != (inputs.shape[0], self.companions):
            raise InputError(
                f"companions must have shape {(inputs.shape[0], self.companions)}, got {tuple(companions.shape)}"
            )
        stack = torch.cat([inputs[None], self.public[companions.T]]).flatten(0, 1)  # (p · rows, …), own rows first
        return self.network(stack)[: inputs.shape[0]]  # type: ignore[no-any-return]


def companion_model(model: nn.Module, public: Split, companions: int | None = None) -> CompanionNet:
    """A copy of a network with BatchNorm in which each record is normalised with some of the public rows.

    Running statistics are dropped; scales and shifts are kept.

    Args:
        model: The network.
        public: The public rows.
        companions: The number of public rows for each record, p − 1 of Xiao et al. 2023. None: all of them, the same
            for every record.

    Returns:
        The network for `train`, `record_gradients` and `predict`.

    Raises:
        InputError: the network has no BatchNorm, `companions` is out of range, or a public row is not finite.
        Refused: a BatchNorm layer does not have rows in dimension 0, or a lazy layer has no size yet.
    """
    count = len(public) if companions is None else companions
    if not 1 <= count <= len(public):
        raise InputError(f"companions must lie between 1 and {len(public)}, the number of public rows; got {count}")
    if not bool(torch.isfinite(public.inputs.double()).all()):
        raise InputError("the public rows contain NaN or infinity, which would spoil every record normalised with them")
    network = _replaced(copy.deepcopy(model), count + 1)
    net = CompanionNet(network, public, count).train(model.training)
    _check_same(model, net)
    return net


def _replaced(network: nn.Module, rows_per_record: int) -> nn.Module:
    if isinstance(network, _BatchNorm):
        return CompanionNorm(network, rows_per_record)
    found = 0
    for name, module in list(network.named_modules()):
        for child_name, child in list(module.named_children()):
            if not isinstance(child, _BatchNorm):
                continue
            if isinstance(child, nn.modules.lazy.LazyModuleMixin):
                raise Refused(f"{name}.{child_name}: run the model once so that its lazy layers have their sizes")
            setattr(module, child_name, CompanionNorm(child, rows_per_record))
            found += 1
    if not found:
        raise InputError(
            "the network has no BatchNorm, so companions would change nothing: give one with BatchNorm (for example "
            'nets.build("resnet", …, form="batch"))'
        )
    return network


def _check_same(model: nn.Module, net: CompanionNet) -> None:
    """Compares torch's BatchNorm with ours on the same rows: they differ if a layer has no rows in dimension 0."""
    twin, ours = copy.deepcopy(model).double().eval(), copy.deepcopy(net).double().eval()
    for module in twin.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    own, others = ours.public[-1:], ours.public[: net.companions]
    with torch.no_grad():
        want = twin(torch.cat([own, others]))[:1]
        found = ours(own, torch.arange(net.companions)[None])
    scale = float(want.abs().max().clamp_min(1e-12))
    if want.shape != found.shape or float((want - found).abs().max()) > 1e-6 * scale:
        raise Refused(
            "with companions the network does not compute what it does with BatchNorm on the same rows: one of its "
            "BatchNorm layers does not have rows in dimension 0, and can't be replaced"
        )


def draw_companions(digests: npt.NDArray[np.uint64], public: int, count: int, *, seed: int, step: int) -> Tensor:
    """(rows, count) different public rows for each row: a function of (seed, step, the row's digest) only.

    A digest is of a row's content, not of its position: removing a record, which shifts all later ones, does not change
    other records' companions. The randomness is public: no guarantee depends on its secrecy.
    """
    if count == public:
        return torch.arange(public).expand(len(digests), public)
    words = sequence(start(digests, "companions", seed, step), public)
    order = np.argsort(words, axis=1, kind="stable")
    return torch.from_numpy(order[:, :count].copy())


def with_companions(rows: Rows, model: nn.Module, *, seed: int, step: int) -> Rows:
    """The rows, each with its companions of this step if the model uses companions."""
    if not isinstance(model, CompanionNet):
        return rows
    if not isinstance(rows.inputs, Tensor):
        raise InputError("BatchClipping needs records whose inputs are one tensor; these have several")
    found = digests(rows.inputs, len(rows.inputs))
    drawn = draw_companions(found, len(model.public), model.companions, seed=seed, step=step)
    return replace(rows, inputs=(rows.inputs, drawn))


def companions_of(model: nn.Module) -> Companions | None:
    """The companions that a model states, or None."""
    if not isinstance(model, CompanionNet):
        return None
    return Companions(model.companions, digest_of(Split(model.public, model.public_targets)))


def refuse_undeclared(plan: Plan, stated: Contribution) -> None:
    """Refuses companions that the plan does not declare as public, or that the method's proof does not cover.

    Raises:
        Refused: the method does not cover companions, or the plan declares no public rows or other companions.
        InputError: the companions are drawn from other rows than the declared ones.
    """
    if stated.companions is None:
        return
    if "companions" not in plan.method.covers:
        covered = ", ".join(names_with(lambda method: "companions" in method.covers))
        raise Refused(
            f"BatchClipping is covered by the proof of {covered}, not by that of {plan.method.name}: use a plan of "
            "that method, or a network without companions"
        )
    if plan.public is None:
        raise Refused(
            "the network normalises private records with companions that the plan does not declare as public: make "
            "the plan with public=PublicSet.of(rows, origin), or set rows aside with [public]"
        )
    plan.public.check_digest(stated.companions.digest)
    if plan.contribution.companions not in (None, stated.companions):
        raise Refused(f"the network uses {stated.companions}, but the plan states {plan.contribution.companions}")


def refuse_shared_companions(model: nn.Module, private: Iterable[Split]) -> None:
    """InputError if a private row is among the model's companions. `private` is read only if there are companions."""
    if isinstance(model, CompanionNet):
        for rows in private:
            refuse_shared_rows(Split(model.public, model.public_targets), rows)


def draws_of(model: CompanionNet, inputs: Tensor, *, draws: int = 10, seed: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """(rows, outputs (draws, rows, classes)) over chunks of the inputs, in eval mode and without gradients.

    Draw k has the same companions for every input, so an input's outputs depend on itself only.
    """
    if draws < 1:
        raise InputError(f"draws = {draws}: give at least 1")
    public, count = len(model.public), model.companions
    sets = draw_companions(np.arange(draws, dtype=np.uint64), public, count, seed=seed, step=-1)
    size = max(1, STACKED_ROWS // model.rows_per_record)
    for lo in range(0, len(inputs), size):
        some = inputs[lo : lo + size]
        yield slice(lo, lo + len(some)), _each_draw(model, some, sets)


def _each_draw(model: CompanionNet, inputs: Tensor, sets: Tensor) -> Tensor:
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad():
            return torch.stack([model(inputs, one.expand(len(inputs), -1)) for one in sets])
    finally:
        model.train(was_training)


def answers(model: nn.Module, inputs: Tensor, *, draws: int = 10, seed: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """`draws_of` a network with companions; any other network gives one draw."""
    if isinstance(model, CompanionNet):
        yield from draws_of(model, inputs, draws=draws, seed=seed)
        return
    for lo in range(0, len(inputs), 1024):
        some = inputs[lo : lo + 1024]
        yield slice(lo, lo + len(some)), model(some)[None]


def majority(outputs: Tensor) -> Tensor:
    """(draws, rows, classes) → (rows,): the class chosen by most draws; ties go to the more probable on average."""
    if len(outputs) == 1:
        return outputs[0].argmax(1)
    votes = nn.functional.one_hot(outputs.argmax(2), outputs.shape[2]).sum(0)
    return (votes + 0.5 * outputs.softmax(2).mean(0)).argmax(1)


def predict(model: CompanionNet, inputs: Tensor, *, draws: int = 10, seed: int = 0) -> Tensor:
    """Classes by majority over several draws of companions (Xiao et al. 2023, Appendix E).

    Args:
        model: The network.
        inputs: The rows to classify.
        draws: The number of draws.
        seed: The public seed of the draws; the result is a function of it.

    Returns:
        (rows,) the classes.
    """
    found = [majority(outputs) for _, outputs in draws_of(model, inputs, draws=draws, seed=seed)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
