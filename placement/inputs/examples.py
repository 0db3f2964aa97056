"""Runnable models with example inputs, loaded from the MODEL argument of a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphs.capture import example_inputs
from graphs.capture.record import argument_leaves
from graphs.errors import CaptureError, GraphFileError
from graphs.zoo import build
from placement.inputs.call_arguments import check_call, check_data, check_states, tensors_of
from placement.inputs.functions import described, is_function, is_model, make_model, name_of
from placement.inputs.sources import batch_of, refuse_script


@dataclass(frozen=True)
class Example:
    """A model with inputs for one step.

    Attributes:
        model: with weights.
        args, kwargs: of one step.
        name: of its graph.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str


def read_example(
    argument: str, *, train: bool = False, dims: Mapping[str, int] | None = None, seed: int = 0
) -> Example:
    """The model that a MODEL argument names: a built-in one or one of a configuration of transformers, with random
    weights, or what ``file.py:function`` returns.

    Args:
        train: a built-in model with the inputs of a training step.
        dims: as in `placement.inputs.sources.read_source`.
        seed: of torch's random numbers, from which weights and inputs are drawn.

    Raises:
        UnknownNameError: no such model, function or dimension.
        GraphFileError: a file of another kind, which has no weights to run.
        CaptureError: the user's function failed, or returned something else.
        MismatchError: what it returned cannot be run: no data, or arguments that the model does not take.
    """
    torch.manual_seed(seed)
    if is_model(argument):
        returned = make_model(argument, dims, None, train)
        if not (isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module)):
            raise CaptureError(
                f"{argument} returned {described(returned)}; expected (model, args) or (model, args, kwargs)."
            )
        name = name_of(argument) if is_function(argument) else type(returned[0]).__name__
        return _checked(Example(returned[0], *example_inputs(*(*returned[1:], None)[:2]), name))
    refuse_script(argument)
    if Path(argument).suffix and not Path(argument).exists():
        raise GraphFileError(
            f"there is no file {argument}; give a built-in model (`placement models`), file.py:function "
            "or a configuration of transformers."
        )
    if Path(argument).suffix:
        raise GraphFileError(
            f"{argument} has no weights to run; give a built-in model (`placement models`), file.py:function "
            "or a configuration of transformers."
        )
    zoo = build(argument, device="cpu", batch_size=batch_of(argument, dims or {}))
    return Example(zoo.model, zoo.train_args if train else zoo.args, {}, argument)


def _checked(example: Example) -> Example:
    check_call(example.model, example.args, example.kwargs)
    check_states(example.model)
    check_data(tensors_of(argument_leaves(example.model, example.args, example.kwargs)))
    return example
