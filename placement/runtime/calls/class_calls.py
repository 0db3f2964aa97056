"""Log-softmax where each part has some of the classes, as of logits that are cut by their vocabulary.

Each part adds up its own classes, one number a sample, and has those of all parts beside its own (`Extras.class_sums`),
a row for each part; the rest is local (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from placement.runtime.calls.part_calls import Extras, Handlers, LocalCall, PartCall, part_call
from placement.runtime.parts.layouts import PartLayout

CLASSES = Handlers()


# -- numbers -----------------------------------------------------------------------------------------------------------


def log_sum_exp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[1, ...]: logarithms of the sums of the exponentials of the classes that are here, along dimension ``dim``."""
    return torch.logsumexp(_wide(x), dim).unsqueeze(0)


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool, sums: torch.Tensor) -> torch.Tensor:
    """As ``aten._log_softmax`` of all classes; ``sums``: [parts, ...], `log_sum_exp` of each part."""
    result = _wide(x) - torch.logsumexp(sums, 0).unsqueeze(dim)
    return result.to(torch.float32 if half_to_float else x.dtype)


def sum_of_gradients(gradient: torch.Tensor, dim: int) -> torch.Tensor:
    """[1, ...]: of the classes that are here, along dimension ``dim``."""
    return _wide(gradient).sum(dim).unsqueeze(0)


def log_softmax_backward(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype, sums: torch.Tensor
) -> torch.Tensor:
    """As ``aten._log_softmax_backward_data`` of all classes; ``sums``: [parts, ...], `sum_of_gradients` of each."""
    return torch.addcmul(_wide(gradient), _wide(output).exp(), sums.sum(0).unsqueeze(dim), value=-1).to(dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


# -- calls -------------------------------------------------------------------------------------------------------------

_SUMS = {"_log_softmax": log_sum_exp, "_log_softmax_backward_data": sum_of_gradients}


def class_sums_call(node: fx.Node, inputs: Mapping[fx.Node, PartLayout]) -> LocalCall | None:
    """The call whose results become `Extras.class_sums`, that of each part a row; None where all classes are here."""
    call = part_call(node, inputs, (), Extras())
    if call.name not in _SUMS or not call.first.part.along(_dim(call)):
        return None
    return LocalCall(_SUMS[call.name], (call.first.node, _dim(call)), {})


@CLASSES.on("_log_softmax")
def _log_softmax(call: PartCall) -> LocalCall:
    if call.extras.class_sums is None:
        return call.plain()
    return LocalCall(log_softmax, (call["self"], _dim(call), call["half_to_float"], call.extras.class_sums), {})


@CLASSES.on("_log_softmax_backward_data")
def _log_softmax_backward(call: PartCall) -> LocalCall:
    if call.extras.class_sums is None:
        return call.plain()
    given = call["grad_output"], call["output"], _dim(call), call["input_dtype"], call.extras.class_sums
    return LocalCall(log_softmax_backward, given, {})


def _dim(call: PartCall) -> int:
    dim: int = call["dim"] % len(call.first.part.shape)
    return dim
