"""A model with data to fit, from the MODEL argument of a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphs.errors import CaptureError, GraphFileError
from placement.inputs.functions import call_function, described, is_function
from placement.inputs.sources import refuse_script


def model_and_data(argument: str, dims: Mapping[str, int], seed: int) -> tuple[nn.Module, Any]:
    """A model and the samples to fit it to, as ``file.py:function`` returns them.

    Args:
        dims: keyword arguments of the function.
        seed: of torch's random numbers while it runs.

    Raises:
        UnknownNameError, GraphFileError: no such function; or no function, as built-in models have no data.
        CaptureError: the user's function failed, or returned something else.
    """
    refuse_script(argument)
    if not is_function(argument):
        raise GraphFileError(
            f"{argument} has no data to be fitted to; give file.py:function that returns (model, data), data being "
            "tensors with a row for each sample."
        )
    torch.manual_seed(seed)
    returned = call_function(argument, dims)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        raise CaptureError(f"{argument} returned {described(returned)}; expected (model, data).")
    return returned
