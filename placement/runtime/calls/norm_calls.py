"""Batch norm whose parts put their statistics together, as `torch.nn.SyncBatchNorm` does, on any device.

Each part adds up what it has; the tensors of sums are all-reduced, in double precision, in which a variance is the
difference of a mean square and a squared mean without loss; then each part normalises with the kernel of a batch norm
that is told its statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from placement.runtime.calls.part_calls import Extras, Handlers, LocalCall, PartCall, aten, part_call
from placement.runtime.parts.layouts import PartLayout

NORMS = Handlers()
_FORWARD = ("batch_norm", "native_batch_norm", "_native_batch_norm_legit")
_BACKWARD = ("native_batch_norm_backward",)
_OTHERS = ("cudnn_batch_norm", "_batch_norm_with_update", "cudnn_batch_norm_backward", "batch_norm_backward")


# -- numbers -----------------------------------------------------------------------------------------------------------


def bn_sums(x: torch.Tensor) -> torch.Tensor:
    """float64 [2 * C + 1]: of a part [N, C, ...] the sums and sums of squares of each channel, and how many it has."""
    mean, variance = _statistics(x)
    count = x.numel() // x.shape[1]
    mean, variance = mean.double(), variance.double()
    return torch.cat([mean * count, (variance + mean * mean) * count, mean.new_full((1,), count)])


def bn_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A part normalised with the statistics of all parts, which also update the running ones.

    Args:
        x: [N, C, ...].
        sums: of `bn_sums` of all parts.

    Returns:
        As ``native_batch_norm``: result, mean and reciprocal of the standard deviation.
    """
    total, squares, count = _split(sums)
    mean = total / count
    variance = (squares / count - mean * mean).clamp_min_(0)
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        unbiased = variance * (count / (count - 1))
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    dtype = _statistics_dtype(x, weight, running_mean)
    used = mean.to(dtype), variance.to(dtype)
    result = aten.native_batch_norm.default(x, weight, bias, *used, False, 0.0, eps)[0]
    return result, used[0], (variance + eps).rsqrt_().to(dtype)


def bn_backward_sums(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, invstd: torch.Tensor
) -> torch.Tensor:
    """float64 [2 * C + 1]: of a part the sums of ``gradient * normalised`` and of ``gradient``, and how many it has."""
    needed = [False, True, True]
    ones = torch.ones_like(mean) if weight is None else weight
    arguments = gradient, x, ones, None, None, mean, invstd, True, 0.0, needed
    _, scale, shift = aten.native_batch_norm_backward.default(*arguments)
    count = scale.new_full((1,), x.numel() // x.shape[1], dtype=torch.float64)
    return torch.cat([scale.double(), shift.double(), count])


def bn_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    output_mask: Sequence[bool],
    sums: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a part: of its input, and summands of those of weight and bias.

    Args:
        gradient, x: [N, C, ...].
        mean, invstd: [C], of all parts.
        output_mask: which of the three are needed.
        sums: of `bn_backward_sums` of all parts.
    """
    scale, shift, count = _split(sums)
    share = x.numel() // x.shape[1] / count  # of a sum that every part knows, each part hands on its share
    given = None
    if output_mask[0]:
        factor = invstd.double() if weight is None else invstd.double() * weight
        slope = -factor * invstd * (scale / count)
        constant = -factor * (shift / count)
        terms = slope.to(mean.dtype), constant.to(mean.dtype), mean, torch.ones_like(mean)
        # slope * (x - mean) + constant, in one pass over x.
        given = aten.native_batch_norm.default(x, *terms, False, 0.0, 0.0)[0]
        given.addcmul_(gradient, factor.to(x.dtype).view(-1, *(1,) * (x.ndim - 2)))
    summands = [(total * share).to(mean.dtype) for total in (scale, shift)]
    return given, summands[0] if output_mask[1] else None, summands[1] if output_mask[2] else None


def _split(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    channels = len(sums) // 2
    return sums[:channels], sums[channels:-1], sums[-1:]


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance [C] of each channel."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        mean, variance = aten.batch_norm_update_stats.default(x, None, None, 0.0)
        return mean, variance
    dims = [d for d in range(x.ndim) if d != 1]
    variance, mean = torch.var_mean(x.float() if x.dtype.itemsize < 4 else x, dims, correction=0)
    return mean, variance


def _statistics_dtype(x: torch.Tensor, *others: torch.Tensor | None) -> torch.dtype:
    return next((one.dtype for one in others if one is not None), torch.float32 if x.dtype.itemsize < 4 else x.dtype)


# -- calls -------------------------------------------------------------------------------------------------------------


def bn_sums_call(node: fx.Node, inputs: Mapping[fx.Node, PartLayout]) -> LocalCall | None:
    """The call whose result is all-reduced and becomes `Extras.sums`; None where statistics are not of the batch."""
    call = part_call(node, inputs, (), Extras())
    if call.name not in (*_FORWARD, *_BACKWARD) or all(cut.dim == 1 for cut in call["input"].part.coarse_cuts):
        return None
    if call.name in _FORWARD and call["training"]:
        return LocalCall(bn_sums, (call["input"].node,), {})
    if call.name in _BACKWARD and call["train"]:
        names = "grad_out", "input", "weight", "save_mean", "save_invstd"
        return LocalCall(bn_backward_sums, tuple(call[name] and call[name].node for name in names), {})
    return None


@NORMS.on(*_FORWARD)
def _batch_norm(call: PartCall) -> LocalCall:
    if call.extras.sums is None or not call["training"]:
        return call.plain()
    names = "input", "weight", "bias", "running_mean", "running_var", "momentum", "eps"
    target = first_of_bn_forward if call.name == "batch_norm" else bn_forward
    return LocalCall(target, (*(call[name] for name in names), call.extras.sums), {})


@NORMS.on(*_BACKWARD)
def _batch_norm_backward(call: PartCall) -> LocalCall:
    if call.extras.sums is None or not call["train"]:
        return call.plain()
    names = "grad_out", "input", "weight", "save_mean", "save_invstd", "output_mask"
    return LocalCall(bn_backward, (*(call[name] for name in names), call.extras.sums), {})


@NORMS.on(*_OTHERS)
def _other_batch_norm(call: PartCall) -> LocalCall:
    if call.extras.sums is not None:
        raise call.refused("its statistics cannot be put together")
    return call.plain()


def first_of_bn_forward(*args: object) -> torch.Tensor:
    """The result of `bn_forward` alone."""
    return bn_forward(*args)[0]  # type: ignore[arg-type]
