"""Means and losses over parts: a part's mean is a summand once it is scaled to all of the entries, or labels.

Where classes are cut, a part picks the scores of the labels whose class it has, and leaves 0 for all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from placement.runtime.calls.part_calls import Extras, Handlers, LocalCall, PartCall, part_call
from placement.runtime.parts.layouts import PartLayout

LOSSES = Handlers()
_MEAN, _SUM = 1, 2  # values of ``reduction``
_NOBODY = -100  # a label that does not count here


@dataclass(frozen=True)
class ScaledCall:
    """Calls an operator and multiplies the first tensor that it makes."""

    target: Callable[..., Any]
    factor: float
    __name__ = "scaled"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.target(*args, **kwargs)
        (result if isinstance(result, torch.Tensor) else result[0]).mul_(self.factor)
        return result


@LOSSES.on("mean")
def _mean(call: PartCall) -> LocalCall:
    part = call.first.part
    given = call["dim"]
    dims = {d % len(part.shape) for d in given} if given else set(range(len(part.shape)))
    share = math.prod(part.local_shape[d] / part.shape[d] for d in dims)
    return call.plain() if share == 1 else call.plain(ScaledCall(call.target, share))


_ENTRYWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
_MARGINS = (
    "multi_margin_loss",
    "multi_margin_loss_backward",
    "multilabel_margin_loss_backward",
    "multilabel_margin_loss",
)


@LOSSES.on(
    *_ENTRYWISE, *(f"{name}_backward" for name in _ENTRYWISE), "binary_cross_entropy_with_logits", "kl_div", *_MARGINS
)
@LOSSES.on("multilabel_margin_loss_forward")
def _entrywise_loss(call: PartCall) -> LocalCall:
    share = min(operand.part.share for operand in call.operands)
    if share == 1 or call["reduction"] != _MEAN:
        return call.plain()
    return call.plain(ScaledCall(call.target, share))


# -- losses over labels ------------------------------------------------------------------------------------------------

_FORWARD = ("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss_nd", "nll_loss2d", "cross_entropy_loss")
_BACKWARD = ("nll_loss_backward", "nll_loss2d_backward")


def label_weight(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Divisor of a mean over labels: their number, or the sum of the weights of their classes, in float64.

    Args:
        target: integers of any shape.
        weight: of each class, or None.
        ignore_index: a label that does not count.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum(dtype=torch.float64)
    return weight.double()[target.where(counted, 0)].mul_(counted).sum()


def label_weight_call(node: fx.Node, inputs: Mapping[fx.Node, PartLayout]) -> LocalCall | None:
    """The call of `label_weight` on the labels that are here; None where a call needs no such sum over the parts."""
    call = part_call(node, inputs, (), Extras())
    if call.name not in (*_FORWARD, *_BACKWARD) or not _is_mean_over_part(call):
        return None
    weight = call["weight"]
    return LocalCall(label_weight, (call["target"].node, weight and weight.node, call["ignore_index"]), {})


def _is_mean_over_part(call: PartCall) -> bool:
    return call["reduction"] == _MEAN and not call["target"].part.is_whole and not _has_probabilities(call)


def _has_probabilities(call: PartCall) -> bool:
    return bool(call["target"].layout.dtype.is_floating_point)


@dataclass(frozen=True)
class DividedByAll:
    """Calls a loss with ``reduction="sum"`` and divides it by the weight of all labels, its first argument."""

    target: Callable[..., Any]
    __name__ = "divided_by_all"

    def __call__(self, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self.target(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result / weight.to(result.dtype)
        return result[0] / weight.to(result[0].dtype), *result[1:]


@dataclass(frozen=True)
class WithAllLabels:
    """Calls the backward pass of a loss with the weight of all labels, its first argument, in the place of its last."""

    target: Callable[..., Any]
    __name__ = "with_all_labels"

    def __call__(self, weight: torch.Tensor, *args: Any) -> Any:
        return self.target(*args[:-1], weight.to(args[1].dtype))


@dataclass(frozen=True)
class OfClasses:
    """Calls a loss, or its backward pass, on the classes from ``start`` on that are here.

    Attributes:
        target: the operator.
        start: the first class.
        classes: how many are here.
    """

    target: Callable[..., Any]
    start: int
    classes: int
    __name__ = "of_classes"

    def here(
        self, labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Labels and weights of the classes that are here."""
        place = labels - self.start
        is_here = (place >= 0) & (place < self.classes) & (labels != ignore_index)
        own = None if weight is None else weight.narrow(0, self.start, self.classes)
        return place.where(is_here, _NOBODY), own


class LossOfClasses(OfClasses):
    """The summand of a loss, and the weight of all labels that are here, by which a mean is divided.

    ``divisor``: that of the labels of all parts; None where all are here.
    """

    __name__ = "loss_of_classes"

    def __call__(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        divisor: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Arguments as of ``aten.nll_loss_forward``, and ``divisor``."""
        place, own = self.here(labels, weight, ignore_index)
        result = self.target(x, place, own, _SUM if reduction == _MEAN else reduction, _NOBODY)[0]
        total = label_weight(labels, weight, ignore_index)
        if reduction == _MEAN:
            result = result / (total if divisor is None else divisor).to(result.dtype)
        return result, (total if reduction else torch.zeros_like(total)).to(x.dtype)


class GradientOfClasses(OfClasses):
    """The gradient of the scores of the classes that are here; ``divisor`` as of `LossOfClasses`."""

    __name__ = "gradient_of_classes"

    def __call__(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        total: torch.Tensor,
        divisor: torch.Tensor | None,
    ) -> torch.Tensor:
        """Arguments as of ``aten.nll_loss_backward``, and ``divisor``."""
        place, own = self.here(labels, weight, ignore_index)
        total = (total if divisor is None else divisor).to(x.dtype)
        result: torch.Tensor = self.target(gradient, x, place, own, reduction, _NOBODY, total)
        return result


def classes_here(call: PartCall) -> tuple[int, int] | None:
    """First class of a loss that is here, and how many are; None where all are."""
    part = call["self"].part
    dim = min(1, len(part.shape) - 1)
    if not part.along(dim):
        return None
    runs = part.runs(dim)
    if len(runs) != 1:
        raise call.refused("the classes that are here do not lie side by side")
    return runs[0][0], runs[0][1] - runs[0][0]


@LOSSES.on(*_FORWARD)
def _label_loss(call: PartCall) -> LocalCall:
    if _has_probabilities(call):
        return _entrywise_loss(call)
    here = classes_here(call)
    if here is not None:
        names = "self", "target", "weight", "reduction", "ignore_index"
        divisor = _all_labels(call) if _is_mean_over_part(call) else None
        return LocalCall(LossOfClasses(call.target, *here), (*(call[name] for name in names), divisor), {})
    if not _is_mean_over_part(call):
        return call.plain()
    summed = call.plain(DividedByAll(call.target), reduction=_SUM)
    return LocalCall(summed.target, (_all_labels(call), *summed.args), summed.kwargs)


@LOSSES.on(*_BACKWARD)
def _label_loss_backward(call: PartCall) -> LocalCall:
    here = classes_here(call)
    # Where the loss itself had all labels, it gives their weight.
    divisor = call.extras.label_weight if call["reduction"] == _MEAN else None
    if here is not None:
        return LocalCall(GradientOfClasses(call.target, *here), (*call.args, divisor), call.kwargs)
    if divisor is None:
        return call.plain()
    return LocalCall(WithAllLabels(call.target), (divisor, *call.args), call.kwargs)


def _all_labels(call: PartCall) -> fx.Node:
    if call.extras.label_weight is None:
        raise call.refused("it lacks the weight of the labels of all parts")
    return call.extras.label_weight
