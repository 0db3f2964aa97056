"""`capture` of a model, or of the words that name one on a command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphs.capture import capture as capture_module
from graphs.errors import CaptureError
from graphs.origin import COMPILED, with_step_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from env.cluster import Cluster
    from graphs.capture.record import Loss
    from graphs.opgraph import OpGraph


def capture(
    model: nn.Module | str | os.PathLike[str],
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    *,
    granularity: str = "op",
    loss: Loss | None = None,
    optimizer: str = "adam",
    precision: str | None = None,
    name: str | None = None,
    is_compiled: bool = False,
    dims: Mapping[str, int] | None = None,
    cluster: Cluster | None = None,
) -> OpGraph:
    """The graph of one inference (in evaluation mode) or one training step (in training mode) of a model.

    The model is not changed, its weights are neither copied nor computed with, and they may be on ``meta``.

    Args:
        model: any module; or, as on a command line, a built-in model's name, ``file.py:function``, or the file of a
            configuration of transformers, torchtitan or Megatron-LM, the latter two always of a training step.
        args: positional example inputs of a module; their shapes are the shapes captured. A single tensor stands for
            ``(tensor,)``.
        kwargs: keyword example inputs of a module.
        train, granularity, optimizer, precision, name, is_compiled: as of `graphs.capture.capture`.
        loss: of a module, function from its output to a scalar.
        dims: sizes of what is named, as ``--dim`` gives them.
        cluster: for a configuration of torchtitan or Megatron-LM, whose batch may follow from the number of devices.

    Raises:
        CaptureError: the model cannot be traced, the message names the module and the line; or arguments for what has
            its own.
        UnknownNameError: no such model, granularity, optimizer or precision.
        GraphFileError, ConfigurationError: a file that is not what it says.
    """
    if not isinstance(model, (str, os.PathLike)):
        if dims is not None or cluster is not None:
            raise CaptureError("dims and cluster are for a model that is named; a module has the shapes of its args.")
        how: dict[str, Any] = {"granularity": granularity, "loss": loss, "optimizer": optimizer, "name": name}
        return capture_module(model, args, kwargs, train, **how, precision=precision, is_compiled=is_compiled)
    if not (isinstance(args, tuple) and not args) or kwargs is not None or loss is not None:
        raise CaptureError(
            f"{os.fspath(model)} brings its own arguments and loss; leave out args, kwargs and loss, or give a module."
        )
    from placement.inputs.sources import read_source

    named: dict[str, Any] = {"train": train, "granularity": granularity, "dims": dims, "cluster": cluster}
    stack = COMPILED if is_compiled else None
    graph = read_source(os.fspath(model), **named, precision=precision, stack=stack).graph
    if graph.is_training and graph.origin.optimizer not in (None, optimizer):
        from graphs.transforms.optimizers import with_optimizer

        graph = with_optimizer(graph, optimizer)
    return graph if name is None else with_step_of(graph, replace(graph, name=name))
